"""Fault schedules: drawn from a seed, kept as JSON, played on a stage."""

from __future__ import annotations

import json
import math

import pytest

from tensorhub_p2p.sim.faults import (
    KINDS,
    Burst,
    Clog,
    Crash,
    Fault,
    Partition,
    Pause,
    Schedule,
    Slow,
    Stall,
    generate,
)
from tensorhub_p2p.sim.host import State
from tensorhub_p2p.sim.membership import MembershipSim

EVERY_KIND = (
    Crash(1.0, 2.0, 3, host=True, memory=True),
    Crash(1.5, math.inf, 0),
    Pause(2.0, 1.0, 1),
    Stall(2.0, 1.0, 2),
    Slow(2.0, 1.0, 2, 0.01),
    Partition(3.0, 1.0, (0, 1), one_way=True, outwards=False),
    Clog(3.0, 1.0, (2,)),
    Burst(4.0, 1.0, (0,), 0.5, 0.25, 1.0),
)


def states(sim: MembershipSim) -> list[State]:
    return [sim.network.host(peer).state for peer in sim.peers]


OF_MEMBERSHIP = {k for k in Fault.kinds.values() if k.__module__ == Fault.__module__}
"""Other modules add kinds of their own."""


def play(*faults: Fault, peers: int = 4) -> MembershipSim:
    sim = MembershipSim(peers, seed=1)
    Schedule(faults).play(sim)
    return sim


def test_a_schedule_survives_being_kept_as_json() -> None:
    schedule = Schedule(EVERY_KIND)
    kept = json.loads(json.dumps(schedule.to_json()))
    assert Schedule.from_json(kept) == schedule
    assert {f["kind"] for f in kept} == {kind.__name__ for kind in OF_MEMBERSHIP}


def test_an_unknown_kind_of_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="Flood"):
        Fault.from_dict({"kind": "Flood", "at": 1.0, "lasts": 1.0})


def test_the_same_seed_draws_the_same_schedule() -> None:
    assert generate(7, 10, 30.0, 3.0) == generate(7, 10, 30.0, 3.0)
    assert generate(7, 10, 30.0, 3.0) != generate(8, 10, 30.0, 3.0)


@pytest.mark.parametrize("seed", range(50))
def test_drawn_faults_end_in_time_and_leave_most_peers_alive(seed: int) -> None:
    schedule = generate(seed, 10, 30.0, 10.0, zones=2, needed=4)
    assert [f.at for f in schedule.faults] == sorted(f.at for f in schedule.faults)
    lost = {f.place for f in schedule.faults if isinstance(f, Crash) and f.lasts == math.inf}
    assert len(lost) <= 3
    assert not lost & {0, 1, 2, 3}
    assert schedule.ends <= 30.01


def test_schedules_draw_every_kind_of_fault_and_more_of_them_the_more_intense_they_are() -> None:
    drawn = [f for seed in range(100) for f in generate(seed, 10, 30.0, 3.0).faults]
    assert {type(f) for f in drawn} == set(KINDS)
    assert 700 < len(drawn) < 1000
    assert generate(1, 3, 5.0, 0.01).faults, "there is always one"


def test_a_crash_without_end_is_for_good() -> None:
    sim = play(Crash(1.0, math.inf, 2))
    sim.run_for(60)
    assert states(sim)[2] is State.CRASHED


@pytest.mark.parametrize("memory", [False, True])
def test_a_crash_ends_with_a_restart_as_itself_or_as_somebody_new(memory: bool) -> None:
    sim = play(Crash(1.0, 2.0, 2, host=True, memory=memory))
    before = sim.peers[2]
    sim.run_for(2)
    assert states(sim)[2] is State.DOWN
    sim.run_for(2)
    assert states(sim) == [State.RUNNING] * 4
    assert (sim.peers[2] == before) is memory
    assert sim.run_until_converged(30)


def test_pauses_and_stalls_end() -> None:
    sim = play(Pause(1.0, 1.0, 1), Stall(1.0, 2.0, 2))
    sim.run_for(1.5)
    assert states(sim) == [State.RUNNING, State.PAUSED, State.STALLED, State.RUNNING]
    sim.run_for(1.0)
    assert states(sim) == [State.RUNNING, State.RUNNING, State.STALLED, State.RUNNING]
    sim.run_for(1.0)
    assert states(sim) == [State.RUNNING] * 4


def test_of_two_faults_on_one_computer_the_first_has_it() -> None:
    sim = play(Crash(1.0, 5.0, 1), Pause(2.0, 1.0, 1), Stall(2.0, 10.0, 1), Slow(2.0, 9.0, 1, 1.0))
    sim.run_for(4)
    assert states(sim)[1] is State.CRASHED
    sim.run_for(3)
    assert states(sim)[1] is State.RUNNING
    assert sim.network.host(sim.peers[1]).cost == 0


def test_the_end_of_a_pause_does_not_end_the_crash_that_came_in_between() -> None:
    sim = play(Pause(1.0, 3.0, 1))
    sim.network.at(2.0, lambda: sim.crash(1))
    sim.run_for(5)
    assert states(sim)[1] is State.CRASHED


def test_a_slow_process_is_quick_again_afterwards() -> None:
    sim = play(Slow(1.0, 2.0, 1, 0.05))
    sim.run_for(2)
    assert sim.network.host(sim.peers[1]).cost == 0.05
    sim.run_for(2)
    assert sim.network.host(sim.peers[1]).cost == 0


@pytest.mark.parametrize("kind", [Partition, Clog])
@pytest.mark.parametrize(
    ("sides", "out", "back"),
    [
        ({}, True, True),
        ({"one_way": True}, True, False),
        ({"one_way": True, "outwards": False}, False, True),
    ],
)
def test_partitions_and_clogs_part_some_from_the_others(
    kind: type[Partition], sides: dict[str, bool], out: bool, back: bool
) -> None:
    sim = play(kind(1.0, 2.0, places=(0, 1), **sides))
    hosts = [sim.network.host(peer) for peer in sim.peers]
    cuts = sim.network.weather.cuts
    sim.run_for(2)
    assert (cuts(hosts[0], hosts[2]), cuts(hosts[3], hosts[1])) == (out, back)
    assert not cuts(hosts[0], hosts[1])
    assert not cuts(hosts[2], hosts[3])
    sim.run_for(2)
    assert not sim.network.weather


def test_who_is_restarted_behind_a_partition_stays_behind_it() -> None:
    sim = play(Partition(1.0, 20.0, places=(2,)), Crash(2.0, 2.0, 2))
    sim.run_for(6)
    newcomer = sim.network.host(sim.peers[2])
    assert sim.network.weather.cuts(newcomer, sim.network.host(sim.peers[0]))


def test_a_burst_loses_messages_while_it_lasts() -> None:
    sim = play(Burst(1.0, 2.0, (0,), loss=1.0))
    sim.run_for(2.9)
    lost = sim.network.counters["lost"]
    assert lost > 0
    sim.run_for(30)
    assert sim.network.counters["lost"] <= lost + 2


def test_leaving_out_one_fault_keeps_the_others() -> None:
    schedule = Schedule(EVERY_KIND)
    assert schedule.without(0).faults == EVERY_KIND[1:]
    assert str(schedule.without(0)).count("\n") == len(EVERY_KIND) - 2
    assert str(Schedule()) == "no faults"
