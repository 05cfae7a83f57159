"""The simulated network: what arrives, what doesn't, and that a seed repeats a run."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from sim_machines import A, B, C, Heard, Pinger, pair

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import Ack, Message, Ping
from tensorhub_p2p.sim.host import Host, State
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.network import SimNetwork


def test_messages_arrive_after_the_links_latency_and_are_answered() -> None:
    network, a, b = pair(link=Link(latency=(0.1, 0.2)))
    network.run_for(0.5)
    ((at, sender, message),) = b.heard
    assert 0.1 <= at <= 0.2
    assert sender == A
    assert message == Ping(1)
    ((back, _, answer),) = a.heard
    assert 0.2 <= back <= 0.4
    assert answer == Ack(1)
    assert network.now == 0.5


def test_machines_are_woken_exactly_when_they_asked() -> None:
    network, a, _ = pair()
    network.run_for(3.5)
    assert a.ticks == [0.0, 1.0, 2.0, 3.0]


def test_a_message_to_an_address_reaches_whoever_listens_there() -> None:
    network, a, b = pair()
    a.outbox.send_to("b:1", Ping(77))
    a.outbox.send_to("nowhere:1", Ping(78))
    network.run_for(0.5)
    assert Ping(77) in [message for _, _, message in b.heard]
    assert network.counters["absent"] == 1


def test_an_address_belongs_to_the_newest_peer_that_started_there() -> None:
    network, a, b = pair()
    network.crash(B)
    c = Pinger()
    network.add(C, ["b:1"], c)
    a.outbox.send_to("b:1", Ping(77))
    network.run_for(0.5)
    assert [message for _, _, message in c.heard] == [Ping(77)]
    assert b.heard == []


def test_a_message_meant_for_a_dead_peer_never_reaches_its_successor() -> None:
    network, _, _ = pair()
    network.crash(B)
    c = Pinger()
    network.add(C, ["b:1"], c)
    network.run_for(5)
    assert c.heard == []


def test_a_message_to_oneself_is_never_lost() -> None:
    network, a, _ = pair(link=Link(loss=1.0))
    a.outbox.send(A, Ack(9))
    network.run_for(0.5)
    assert [message for _, _, message in a.heard] == [Ack(9)]


def test_loss_takes_its_share() -> None:
    network, _, b = pair(link=Link(loss=0.3))
    network.run_for(1000)
    assert 600 < len(b.heard) < 800
    assert network.counters["lost"] > 200


def test_one_link_can_differ_from_the_others() -> None:
    network, _, b = pair()
    network.links[A, B] = Link(loss=1.0)
    network.run_for(10)
    assert b.heard == []


@pytest.mark.parametrize("one_way", [False, True])
def test_a_partition_blocks_until_it_heals(one_way: bool) -> None:
    network, a, b = pair()
    network.partition([B], [A], one_way=one_way)
    network.run_for(3.5)
    assert len(b.heard) == (4 if one_way else 0)
    assert a.heard == []
    network.heal()
    network.run_for(1)
    assert a.heard


def test_a_paused_peer_does_nothing_and_receives_all_when_resumed() -> None:
    network, a, b = pair()
    network.pause(B)
    network.run_for(2.5)
    assert b.heard == []
    assert network.running() == (A,)
    network.resume(B)
    assert [message for _, _, message in b.heard] == [Ping(1), Ping(2), Ping(3)]
    network.pause(A)
    network.run_for(5)
    assert len(a.ticks) == 3
    network.resume(A)
    assert a.ticks[-1] == network.now == 7.5


def test_run_until_stops_as_soon_as_the_predicate_holds() -> None:
    network, _a, b = pair()
    assert network.run_until(lambda: len(b.heard) == 3, limit=10)
    assert 2 < network.now < 2.1
    assert not network.run_until(lambda: len(b.heard) == 30, limit=10)
    assert 12 < network.now < 12.1


def test_events_are_handed_over_with_their_peer() -> None:
    events: list[tuple[PeerId, Event]] = []
    network, _, _ = pair(on_event=lambda peer, event: events.append((peer, event)))
    network.run_for(0.5)
    assert [peer for peer, _ in events] == [B, A]
    assert all(isinstance(event, Heard) for _, event in events)


def test_a_machine_whose_wakeup_never_moves_ends_the_run() -> None:
    class Stuck(Pinger):
        def next_wakeup(self) -> float | None:
            return 0.0

    network = SimNetwork(1)
    network.add(A, [], Stuck())
    with pytest.raises(RuntimeError, match="for ever"):
        network.run_for(1)


def chatter(seed: int) -> list[tuple[float, PeerId, Message]]:
    network = SimNetwork(seed, link=Link(loss=0.1))
    rng = random.Random(seed)
    ids = [PeerId(f"p{i}") for i in range(10)]
    machines = [Pinger(rng.choice(ids), rng.random() + 0.01) for _ in ids]
    for peer_id, machine in zip(ids, machines, strict=True):
        network.add(peer_id, [f"{peer_id}:1"], machine)
    network.run_for(5)
    return [entry for machine in machines for entry in machine.heard]


def test_a_seed_repeats_a_run_exactly() -> None:
    assert chatter(7) == chatter(7)
    assert chatter(7) != chatter(8)


def test_undecodable_bytes_are_counted_and_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, _, b = pair()
    scramble: Callable[[object], bytes] = lambda envelope: b"\xc1junk"  # noqa: E731
    monkeypatch.setattr("tensorhub_p2p.sim.network.encode", scramble)
    network.run_for(0.5)
    assert b.heard == []
    assert network.counters["garbage"] == 1


# -- hosts --


def test_a_crashed_process_frees_its_address_and_loses_what_was_under_way() -> None:
    network, _, b = pair(link=Link((0.1, 0.1)))
    network.run_for(1.05)
    network.crash(B)
    network.run_for(1.1)
    assert b.pings() == [1]
    assert network.listener("b:1") is None
    assert network.host(B).state is State.CRASHED
    assert network.counters["absent"] == 2, "one was under way, one was sent later"


@pytest.mark.parametrize("host", [False, True])
def test_a_peer_restarted_with_its_memory_goes_on_as_itself(host: bool) -> None:
    network, a, b = pair()
    network.run_for(1.5)
    network.crash(B, host=host)
    network.run_for(2)
    network.restart(B)
    network.run_for(1)
    assert b.pings() == [1, 2, 5]
    assert network.listener("b:1") == B
    network.crash(A, host=host)
    network.run_for(5)
    network.restart(A)
    assert a.ticks[-1] == network.now
    network.run_for(0.5)
    assert b.pings()[-1] == 6


def test_a_peer_restarted_without_memory_is_another_one_on_the_same_computer() -> None:
    network, a, b = pair()
    network.partition([A], [B])
    network.crash(B)
    c = Pinger()

    def follow(old: Host) -> tuple[PeerId, Pinger]:
        assert (old.peer_id, old.addresses) == (B, ("b:1",))
        return C, c

    assert network.restart_anew(B, follow) == C
    assert network.listener("b:1") == C
    a.outbox.send_to("b:1", Ping(77))
    network.run_for(1.5)
    assert c.heard == [], "it is still on its side of the partition"
    network.heal()
    a.outbox.send_to("b:1", Ping(78))
    network.run_for(1.5)
    assert c.pings() == [78]
    assert b.heard == []


def test_only_what_is_gone_can_be_restarted_and_only_what_is_there_be_paused() -> None:
    network, _, _ = pair()
    with pytest.raises(ValueError, match="b is running: it can't be restarted"):
        network.restart(B)
    network.crash(B)
    with pytest.raises(ValueError, match="b is crashed: it can't be paused"):
        network.pause(B)
    with pytest.raises(ValueError, match="b is crashed: it can't be resumed"):
        network.resume(B)


def test_a_stalled_peer_runs_nothing_and_gets_its_messages_later_in_order() -> None:
    network, _, b = pair()
    network.stall(B)
    network.run_for(3.5)
    assert b.heard == []
    assert network.host(B).state is State.STALLED
    network.resume(B)
    assert b.pings() == [1, 2, 3, 4]


def test_a_slow_process_takes_its_time_for_each_message_and_tick() -> None:
    network, a, b = pair(link=Link((0.0, 0.0)))
    network.slow(B, 0.4)
    a.interval = 0.1
    network.run_for(2.05)
    assert [round(at, 6) for at, _, _ in b.heard] == [0.4, 0.8, 1.2, 1.6, 2.0]
    network.slow(B, 0.0)
    network.run_for(1)
    assert b.pings() == sorted(b.pings()), "what was queued isn't overtaken"
    network.run_for(10)
    assert network.host(B).is_free
    assert a.seq - 1 <= b.pings()[-1]


def test_a_slow_process_ticks_in_its_turn_and_does_not_pile_ticks_up() -> None:
    network, a, _ = pair()
    network.slow(A, 3.0)
    network.run_for(30)
    assert len(a.ticks) <= 10
    network.slow(A, 0.0)
    network.run_for(20)
    assert network.host(A).is_free


def test_a_tick_that_was_put_off_is_not_asked_for_early() -> None:
    class Later(Pinger):
        """Each message puts its tick off by a second."""

        def receive(self, now: float, sender: PeerId, message: Message) -> None:
            self.due = now + 1.0

        def tick(self, now: float) -> None:
            self.ticks.append(now)
            self.due = now + 1.0

    network, a, _ = pair(link=Link((0.0, 0.0)))
    later = Later(B)
    network.add(C, [], later)
    a.to, a.interval = C, 0.5
    network.run_for(5.2)
    assert later.ticks == [0.0]


def test_what_is_planned_happens_at_its_time() -> None:
    network, _, b = pair()
    network.at(1.5, lambda: network.crash(B))
    network.run_for(5)
    assert b.pings() == [1, 2]


def test_a_dear_predicate_can_be_asked_now_and_then() -> None:
    network, _, b = pair()
    asked = []
    assert network.run_until(lambda: bool(asked.append(1)) or len(b.heard) == 3, 10, every=0.5)
    assert network.now == 2.5
    assert len(asked) == 6


def test_traffic_is_counted_by_peer_and_by_kind() -> None:
    network, _, _ = pair()
    network.run_for(9.5)
    a, b = network.host(A), network.host(B)
    assert (a.sent, b.received, b.sent, a.received) == (10, 10, 10, 10)
    assert a.sent_bytes == b.received_bytes == network.kinds["Ping"]
    assert network.counters["bytes"] == sum(network.kinds.values())
    assert 0 < network.largest < 100


def test_the_trace_proves_that_a_run_was_repeated() -> None:
    def trace(seed: int) -> int:
        network, _, _ = pair(seed, link=Link(loss=0.1))
        network.run_for(20)
        return network.trace

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_a_run_does_not_depend_on_how_strings_hash() -> None:
    code = (
        "from tensorhub_p2p.sim.membership import MembershipSim as S;"
        "s = S(12, seed=3); s.network.crash(s.peers[4]); s.run_for(20); print(s.network.trace)"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
