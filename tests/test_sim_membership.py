"""Simulated clusters: how they start, and what is measured of them."""

from __future__ import annotations

import pytest

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership import anti_entropy
from tensorhub_p2p.protocol.membership.swim_events import Joined
from tensorhub_p2p.protocol.messages import Status
from tensorhub_p2p.protocol.zones.zones import Zones
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.membership import LAN, MEMBERLIST, MembershipSim
from tensorhub_p2p.sim.record import percentile


def lossy(loss: float) -> Link:
    return Link(LAN.latency, loss)


# -- starting --


def test_a_converged_start_needs_no_message() -> None:
    sim = MembershipSim(50)
    assert sim.converged()
    assert sim.network.counters["sent"] == 0
    sim.run_for(20)
    assert sim.converged()
    assert sim.record.falsely_declared() == {}


def test_peers_can_join_instead() -> None:
    sim = MembershipSim(20, converged=False)
    sim.run_for(0.3)
    assert sim.run_until_converged(10)


@pytest.mark.parametrize("converged", [True, False])
def test_several_zones_know_each_other_through_their_gateways(converged: bool) -> None:
    sim = MembershipSim(30, zones=3, converged=converged)
    sim.run_for(20)
    assert sim.converged()
    for peer in sim.peers:
        machine = sim.machine(peer)
        assert isinstance(machine, Zones)
        assert {summary.zone for summary in machine.zones()} == set(sim.zones)
        assert len(machine.members()) == 10, "nobody of another zone is a member"


@pytest.mark.parametrize("peers", [60, 200])
def test_however_many_join_at_once_each_has_joined_with_the_view_of_the_others(
    monkeypatch: pytest.MonkeyPatch, peers: int
) -> None:
    """A peer tells its view to a few of them each second, as it does in a cluster of a thousand."""
    monkeypatch.setattr(anti_entropy, "MAX_TOLD", 600)
    sim = MembershipSim(100, seed=5)
    sim.run_for(2)
    known: dict[PeerId, int] = {}

    def note(peer: PeerId, event: Event) -> None:
        if isinstance(event, Joined):
            known[peer] = sum(view.is_reachable for view in sim.machine(peer).members())

    sim.listeners.append(note)
    began = sim.network.now
    for place in range(100, 100 + peers):
        info = sim._new_info(place)
        machine = sim._new_machine(info)
        machine.join(began, ["host-0:7946"])
        sim.network.add(info.peer_id, info.addresses, machine, info.zone)
    assert sim.network.run_until(lambda: len(known) == peers, 3, every=0.1), len(known)
    assert min(known.values()) >= 100


def test_halves_that_were_cut_off_for_minutes_are_one_again_soon() -> None:
    sim = MembershipSim(16, seed=2)
    sim.run_for(5)
    sim.network.partition(sim.peers[::2], sim.peers[1::2])
    sim.run_for(300)
    for peer in sim.peers:
        assert len(sim.machine(peer).responsive()) == 8
    sim.network.heal()
    assert sim.run_until_converged(30)


def test_a_restarted_place_holds_a_newcomer_that_joins() -> None:
    sim = MembershipSim(10)
    gone = sim.crash(3)
    sim.run_for(20)
    sim.restart_anew(3)
    assert sim.peers[3] != gone
    assert sim.run_until_converged(30)
    assert sim.machine(sim.peers[0]).status(gone) is Status.DEAD


def test_the_same_seed_gives_the_same_run() -> None:
    def trace(seed: int) -> int:
        sim = MembershipSim(20, zones=2, seed=seed, link=lossy(0.05))
        sim.crash(4)
        sim.run_for(20)
        return sim.network.trace

    assert trace(1) == trace(1)
    assert trace(1) != trace(2)


# -- measures --


@pytest.mark.parametrize("host", [False, True])
def test_a_crash_is_measured_from_the_first_suspicion_to_the_last_verdict(host: bool) -> None:
    sim = MembershipSim(30)
    sim.run_for(5)
    peer = sim.crash(7, host=host)
    (early,) = sim.record.detections()
    assert early.everyone is None
    assert len(early.missing) == 29
    sim.run_for(30)
    (found,) = sim.record.detections()
    assert (found.peer, found.of_host, found.crashed_at) == (peer, host, 5.0)
    assert found.first_suspected is not None
    assert found.first_declared is not None
    assert found.everyone is not None
    assert found.first_suspected <= found.first_declared <= found.everyone
    assert found.missing == ()


def test_one_who_comes_back_as_itself_needs_no_detection() -> None:
    sim = MembershipSim(10)
    peer = sim.crash(3)
    sim.network.restart(peer)
    sim.run_for(10)
    assert sim.record.detections() == []


@pytest.mark.parametrize(
    ("what", "cause"), [("pause", "paused"), ("stall", "stalled"), ("cut", "cut off")]
)
def test_a_false_death_is_told_with_its_cause(what: str, cause: str) -> None:
    sim = MembershipSim(20, sockets=False)
    victim = sim.peers[5]
    if what == "cut":
        sim.network.partition([victim], [p for p in sim.peers if p != victim])
    else:
        getattr(sim.network, what)(victim)
    sim.run_for(40)
    mistakes = {death.observer for death in sim.record.false_deaths if death.peer == victim}
    assert len(mistakes) == 19
    assert sim.record.falsely_declared()[victim] == cause


def test_the_death_of_one_who_is_gone_is_no_false_one() -> None:
    sim = MembershipSim(20)
    sim.crash(5)
    sim.crash(6, host=True)
    sim.run_for(40)
    assert sim.record.false_deaths == []


def test_traffic_is_what_each_peer_sends_a_second() -> None:
    sim = MembershipSim(30)
    sim.run_for(10)
    traffic = sim.traffic(20)
    assert traffic.peers == 30
    assert traffic.seconds == 20
    assert traffic.mean_messages == pytest.approx(2.0, rel=0.1)
    assert traffic.max_messages >= traffic.mean_messages
    assert sum(traffic.mean_bytes_by_kind.values()) == pytest.approx(traffic.mean_bytes)


def test_a_hint_and_a_goodbye_are_followed_until_everyone_heard_them() -> None:
    sim = MembershipSim(60)
    sim.run_for(2)
    for spread in (sim.spread_hint(7), sim.spread_goodbye(8)):
        assert spread.complete
        half, most, last = (spread.time_until(share) for share in (0.5, 0.99, 1.0))
        assert half is not None
        assert most is not None
        assert last is not None
        assert half <= most <= last < 2


def test_news_that_reaches_only_some_has_no_time_for_all() -> None:
    sim = MembershipSim(20)
    sim.network.partition(sim.peers[:10], sim.peers[10:])
    spread = sim.spread_hint(0, limit=5)
    assert not spread.complete
    assert len(spread.heard) == 9
    assert spread.time_until(0.4) is not None
    assert spread.time_until(0.5) is None


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([3.0], 0.01) == 3.0


# -- memberlist beside ours --


def test_memberlist_s_defaults_find_a_death_as_slowly_as_memberlist_does() -> None:
    times = []
    for seed in range(3):
        sim = MembershipSim(100, seed=seed, config=MEMBERLIST, sockets=False)
        sim.run_for(5)
        sim.crash(10)
        sim.run_for(30)
        (found,) = sim.record.detections()
        assert found.everyone is not None
        times.append(found.everyone)
    assert 8.0 < percentile(times, 0.5) < 12.0


def test_ours_finds_a_dead_process_several_times_as_fast() -> None:
    def time(config: SwimConfig | None, *, sockets: bool) -> float:
        sim = MembershipSim(32, seed=3, config=config, sockets=sockets)
        sim.run_for(5)
        sim.crash(10)
        sim.run_for(30)
        (found,) = sim.record.detections()
        assert found.everyone is not None
        return found.everyone

    assert time(MEMBERLIST, sockets=False) > 4 * time(None, sockets=True)
