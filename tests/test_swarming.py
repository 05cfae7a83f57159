"""Whole swarms on limited cables, in virtual time: how flat they are, and what a death costs."""

from __future__ import annotations

import functools
import operator

import pytest

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.sim.swarming.cables import Cable, Flow
from tensorhub_p2p.sim.swarming.swarming import Host, SwarmRun

MIB = 1 << 20
RATE = 15.0 * MIB


def swarm(pullers: int, size: int = 64 * MIB, **options: object) -> SwarmRun:
    return SwarmRun(pullers=pullers, num_bytes=size, rate=RATE, **options)  # type: ignore[arg-type]


def held(host: Host) -> int:
    assert host.swarm is not None
    return host.swarm.held.bits


def test_eight_pullers_take_little_longer_than_one() -> None:
    """Each chunk leaves the source about once, and hardly any comes twice."""
    alone = swarm(1).run().slowest
    run = swarm(8)
    outcome = run.run()
    assert outcome.slowest <= 1.15 * alone
    assert outcome.source_sent[0] <= 1.1 * run.layout.num_bytes
    assert max(outcome.received) <= 1.02 * run.layout.num_bytes


def test_a_second_whole_source_takes_half_of_the_load() -> None:
    run = swarm(4, size=16 * MIB, sources=2)
    outcome = run.run()
    assert sum(outcome.source_sent) <= 2.6 * run.layout.num_bytes
    assert min(outcome.source_sent) >= 0.4 * max(outcome.source_sent)


def test_a_source_that_dies_half_way_costs_the_chunks_in_flight_if_another_has_it_all() -> None:
    alone = swarm(1, sources=2).run().slowest
    run = swarm(1, sources=2)
    [puller] = run.pullers
    run.run(until=lambda: held(puller).bit_count() >= run.layout.num_chunks // 2)
    run.kill(run.sources[0])
    outcome = run.run()
    in_flight = PullConfig().chunks_in_flight * run.layout.chunk_bytes
    assert outcome.slowest <= 1.1 * alone
    assert outcome.received[0] <= run.layout.num_bytes + in_flight


def test_pullers_that_have_everything_between_them_finish_without_the_source() -> None:
    run = swarm(4, size=16 * MIB)
    everything = (1 << run.layout.num_chunks) - 1
    run.run(until=lambda: functools.reduce(operator.or_, map(held, run.pullers)) == everything)
    assert not all(host.done_at for host in run.pullers)
    run.kill(run.sources[0])
    assert len(run.run().finished) == 4


def test_the_share_of_a_puller_that_dies_passes_to_the_others() -> None:
    run = swarm(6, size=16 * MIB)
    run.run(until=lambda: held(run.pullers[0]).bit_count() >= run.layout.num_chunks // 4)
    run.kill(run.pullers[0])
    outcome = run.run()
    assert len(outcome.finished) == 5
    assert outcome.slowest <= 1.6 * swarm(1, size=16 * MIB).run().slowest


def test_a_puller_on_a_slow_cable_does_not_hold_the_others_up() -> None:
    run = swarm(4)
    run.pullers[0].cable.rate = RATE / 20
    outcome = run.run(until=lambda: all(host.done_at is not None for host in run.pullers[1:]))
    assert outcome.slowest <= 1.5 * swarm(1).run().slowest


def test_a_busy_cable_is_shared_by_those_who_read_through_it() -> None:
    run = swarm(0)
    source, targets = Cable(10.0 * MIB, run.later), [Cable(RATE, run.later) for _ in range(2)]
    ends: list[float] = []
    flows: list[Flow] = [
        target.read(source, 5 * MIB, lambda: ends.append(run.now)) for target in targets
    ]
    run.run(until=lambda: len(ends) == len(flows))
    assert ends == [pytest.approx(1.0, rel=0.02)] * 2
