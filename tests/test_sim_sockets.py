"""What a driver's sockets would show of every fault, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sim_machines import A, B, C, D, Pinger, Watcher

from tensorhub_p2p.protocol.identity import PeerInfo
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.membership.swim_events import Evidence, MemberChanged
from tensorhub_p2p.protocol.messages import Ping, Status
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.network import SimNetwork

DISCONNECTED, REFUSED, ACCEPTED, GREETED, UNREACHABLE = (
    Evidence.DISCONNECTED,
    Evidence.REFUSED,
    Evidence.ACCEPTED,
    Evidence.GREETED,
    Evidence.UNREACHABLE,
)
WAY = 0.01
"""Seconds one way."""
FAULTS: dict[str, Callable[[SimNetwork], object]] = {
    "runs": lambda network: None,
    "stalls": lambda network: network.stall(B),
    "pauses": lambda network: network.pause(B),
    "crashes": lambda network: network.crash(B),
    "loses its host": lambda network: network.crash(B, host=True),
    "is cut off": lambda network: network.partition([A], [B]),
    "hears nothing": lambda network: network.partition([A], [B], one_way=True),
    "isn't heard": lambda network: network.partition([B], [A], one_way=True),
    "is behind a clog": lambda network: network.clog([A], [B]),
}


def watching(
    *watches: object, sockets: bool = True, loss: float = 0.0
) -> tuple[SimNetwork, Watcher]:
    """a watches b (or nobody); c is there too."""
    network = SimNetwork(1, link=Link((WAY, WAY), loss), sockets=sockets)
    watcher = Watcher(*watches)  # type: ignore[arg-type]
    for peer, machine in ((A, watcher), (B, Pinger()), (C, Pinger())):
        network.add(peer, [f"{peer}:1"], machine)
    return network, watcher


# -- looks --


@pytest.mark.parametrize(
    ("fault", "shown", "after"),
    [
        ("runs", [GREETED], 6 * WAY),
        ("stalls", [GREETED], 6 * WAY),
        ("pauses", [ACCEPTED], 0.4),
        ("crashes", [REFUSED], 2 * WAY),
        ("loses its host", [], None),
        ("is cut off", [], None),
        ("hears nothing", [], None),
        ("isn't heard", [], None),
        ("is behind a clog", [], None),
    ],
)
def test_a_look_shows_what_a_dial_would(
    fault: str, shown: list[Evidence], after: float | None
) -> None:
    network, watcher = watching()
    FAULTS[fault](network)
    watcher.look(B)
    network.run_for(5)
    assert watcher.shown(B) == shown
    assert watcher.times(B) == ([] if after is None else [pytest.approx(after)])


def test_a_look_at_one_that_is_resumed_meanwhile_is_greeted() -> None:
    network, watcher = watching()
    network.pause(B)
    watcher.look(B)
    network.run_for(0.3)
    network.resume(B)
    network.run_for(1)
    assert watcher.shown(B) == [GREETED]


def test_a_look_whose_syn_is_lost_shows_nothing() -> None:
    network, watcher = watching(loss=0.3)
    for _ in range(1000):
        watcher.look(B)
    network.run_for(5)
    assert 440 < len(watcher.shown(B)) < 540, "there and back: 0.7 × 0.7"


def test_a_stranger_at_the_address_of_one_who_was_not_watched_is_taken_for_it() -> None:
    network, watcher = watching()
    network.crash(B)
    network.restart_anew(B, lambda old: (D, Pinger()))
    watcher.look(B)
    network.run_for(1)
    assert watcher.shown(B) == [GREETED]


# -- watches --


@pytest.mark.parametrize(
    ("fault", "shown", "times"),
    [
        ("runs", [], []),
        ("stalls", [], []),
        ("crashes", [DISCONNECTED, *[REFUSED] * 3], [WAY, 3 * WAY, 2.03, 4.03]),
        ("pauses", [DISCONNECTED, ACCEPTED], None),
        ("loses its host", [DISCONNECTED, UNREACHABLE], None),
        ("is cut off", [DISCONNECTED, UNREACHABLE], None),
        ("hears nothing", [DISCONNECTED, UNREACHABLE], None),
        ("isn't heard", [DISCONNECTED, UNREACHABLE], None),
        ("is behind a clog", [DISCONNECTED, UNREACHABLE], None),
    ],
)
def test_a_watch_shows_what_a_standing_connection_would(
    fault: str, shown: list[Evidence], times: list[float] | None
) -> None:
    network, watcher = watching(B)
    FAULTS[fault](network)
    network.run_for(4.5)
    assert watcher.shown(B) == shown
    if times is not None:
        assert watcher.times(B) == pytest.approx(times)
    else:
        first, second = watcher.times(B)
        assert 1.0 <= first <= 1.25, "the heartbeats' interval and timeout"
        redial = 2.0 if UNREACHABLE in shown else 0.4 + 2 * WAY
        assert second - first == pytest.approx(redial, abs=0.011)


def test_a_watch_is_told_as_long_as_nothing_answers() -> None:
    network, watcher = watching(B)
    cut = network.partition([A], [B])
    network.run_for(8)
    assert watcher.shown(B) == [DISCONNECTED, *[UNREACHABLE] * 3]
    network.lift(cut)
    network.run_for(2)
    assert watcher.shown(B)[4:] == [GREETED]
    network.run_for(60)
    assert len(watcher.shown(B)) == 5


def test_a_pause_shorter_than_the_heartbeats_allow_is_not_seen() -> None:
    network, watcher = watching(B)
    for _ in range(5):
        network.pause(B)
        network.run_for(0.9)
        network.resume(B)
        network.run_for(0.1)
    network.run_for(5)
    assert watcher.shown(B) == []


def test_a_paused_peer_is_greeted_once_it_runs_again() -> None:
    network, watcher = watching(B)
    network.pause(B)
    network.run_for(3)
    network.resume(B)
    network.run_for(1)
    assert watcher.shown(B) == [DISCONNECTED, ACCEPTED, GREETED]
    assert watcher.times(B)[-1] == pytest.approx(3 + 6 * WAY)


def test_a_paused_process_that_is_killed_refuses_at_once() -> None:
    network, watcher = watching(B)
    network.pause(B)
    network.run_for(3)
    network.crash(B)
    network.run_for(1)
    assert watcher.shown(B) == [DISCONNECTED, ACCEPTED, REFUSED]
    assert watcher.times(B)[-1] == pytest.approx(3 + 2 * WAY)


def test_a_stalled_peer_that_was_only_cut_off_is_greeted() -> None:
    network, watcher = watching(B)
    cut = network.partition([A], [B])
    network.run_for(2)
    network.stall(B)
    network.lift(cut)
    network.run_for(10)
    assert watcher.shown(B) == [DISCONNECTED, GREETED]
    network.resume(B)
    network.run_for(10)
    assert watcher.shown(B) == [DISCONNECTED, GREETED], "the watch stands again"


def test_where_a_process_ended_nobody_else_counts_as_it() -> None:
    network, watcher = watching(B)
    network.crash(B)
    network.run_for(0.015)
    network.restart_anew(B, lambda old: (D, Pinger()))
    network.run_for(10)
    watcher.look(B)
    network.run_for(1)
    network.pause(D)
    watcher.look(B)
    network.run_for(2)
    assert watcher.shown(B) == [DISCONNECTED]
    network.crash(D)
    network.run_for(1)
    assert watcher.shown(B) == [DISCONNECTED, REFUSED]


def test_a_stranger_where_a_host_went_down_is_taken_for_the_one_that_was_there() -> None:
    network, watcher = watching(B)
    network.crash(B, host=True)
    network.run_for(4)
    network.restart_anew(B, lambda old: (D, Pinger()))
    network.run_for(4)
    assert watcher.shown(B) == [DISCONNECTED, UNREACHABLE, GREETED]
    network.crash(D)
    network.run_for(1)
    assert watcher.shown(B)[3:] == [DISCONNECTED, REFUSED]


@pytest.mark.parametrize(
    ("fault", "shown"),
    [("crashes", [REFUSED]), ("pauses", [ACCEPTED]), ("stalls", []), ("is cut off", [])],
)
def test_a_new_watch_finds_out_what_is_wrong_already_but_has_nothing_to_lose(
    fault: str, shown: list[Evidence]
) -> None:
    network, watcher = watching()
    FAULTS[fault](network)
    network.run_for(10)
    watcher.watches = (B,)
    member = MemberView(PeerInfo(C, "c", "", ()), 0, Status.ALIVE, 0.0)
    watcher.outbox.emit(MemberChanged(member, None))
    network.run_for(1)
    assert watcher.shown(B) == shown


def test_a_look_whose_dial_is_lost_is_answered_by_a_watch_that_stands() -> None:
    network, watcher = watching(B, loss=0.3)
    for _ in range(100):
        watcher.look(B)
    network.run_for(5)
    assert watcher.shown(B) == [GREETED] * 100
    assert watcher.times(B)[-1] == 1.25, "when it would have ended, had B been gone"


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("gone_for", [0.1, 1.0, 5.0])
def test_a_watch_whose_end_has_not_shown_yet_answers_for_no_look(
    gone_for: float, loss: float
) -> None:
    network, watcher = watching(B, loss=loss)
    network.run_for(1)
    network.crash(B, host=True)
    network.run_for(gone_for)
    for _ in range(20):
        watcher.look(B)
    network.run_for(5)
    assert GREETED not in watcher.shown(B)


def test_one_who_comes_back_with_its_memory_is_greeted() -> None:
    network, watcher = watching(B)
    network.crash(B)
    network.run_for(1)
    network.restart(B)
    network.run_for(1)
    assert watcher.shown(B) == [DISCONNECTED, REFUSED, GREETED]


def test_a_stalled_watcher_gets_its_evidence_when_it_wakes_in_order_with_its_messages() -> None:
    network, watcher = watching(B)
    network.stall(A)
    network.crash(B)
    network.run_for(1)
    assert watcher.evidences == []
    sender = network.host(C).machine
    sender.outbox.send(A, Ping(1))
    network.run_for(0.5)
    network.resume(A)
    assert watcher.shown(B) == [DISCONNECTED, REFUSED]
    assert watcher.pings() == [1]


def test_a_paused_watcher_finds_its_watches_ended_when_it_wakes() -> None:
    network, watcher = watching(B, C)
    network.pause(A)
    network.run_for(0.5)
    network.crash(C)
    network.run_for(4)
    assert watcher.evidences == []
    network.resume(A)
    network.run_for(1)
    assert watcher.shown(B) == [DISCONNECTED, GREETED]
    assert watcher.shown(C) == [DISCONNECTED, REFUSED]
    assert watcher.times(C)[0] >= 4.5


def test_a_short_pause_of_the_watcher_ends_no_watch() -> None:
    network, watcher = watching(B)
    network.pause(A)
    network.run_for(0.9)
    network.resume(A)
    network.run_for(5)
    assert watcher.evidences == []


def test_who_is_not_watched_any_more_is_not_told_of() -> None:
    network, watcher = watching(B)
    network.crash(B, host=True)
    network.run_for(4)
    assert watcher.shown(B) == [DISCONNECTED, UNREACHABLE]
    watcher.watches = ()
    network.run_for(60)
    assert len(watcher.shown(B)) == 2


def test_without_sockets_nothing_is_told() -> None:
    network, watcher = watching(B, sockets=False)
    watcher.look(B)
    network.crash(B)
    network.run_for(10)
    assert watcher.evidences == []


def test_lost_syns_delay_a_greeting_and_may_look_unreachable_for_a_while() -> None:
    outcomes = []
    for seed in range(200):
        network = SimNetwork(seed, link=Link((WAY, WAY), loss=0.3), sockets=True)
        watcher = Watcher(B)
        network.add(A, ["a:1"], watcher)
        network.add(B, ["b:1"], Pinger())
        network.pause(B)
        network.run_for(3)
        network.resume(B)
        network.run_for(30)
        assert watcher.shown(B)[-1] is GREETED
        outcomes.append(UNREACHABLE in watcher.shown(B))
    assert 20 < sum(outcomes) < 150
