"""Processes in two zones: what one zone publishes the other finds, pins, pulls and serves on.

Both zones are on this machine; only their names keep them apart.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import steps
from workers import Worker

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
NEWS = 5.0
"""Seconds within which every peer surely knows of what is whole in another zone."""
Take = Callable[[int], list[Worker]]


class Zones:
    """A worker or more in each zone, joined through the first one of the first zone."""

    def __init__(self, take: Take, cluster: str, east: int, west: int) -> None:
        workers = take(east + west)
        self.east, self.west = workers[:east], workers[east:]
        seeds: list[str] = []
        for worker in workers:
            zone = "east" if worker in self.east else "west"
            options: dict[str, Any] = {"zone": zone, "transports": ["tcp"], "name": zone}
            address = worker.do(steps.start, cluster, seeds, **options)
            seeds = seeds or [address]

    def assert_no_faults(self) -> None:
        for worker in (*self.east, *self.west):
            if worker.alive:
                assert worker.do(steps.faults) == []


@pytest.fixture
def zones(take: Take, cluster: str) -> Callable[..., Zones]:
    return lambda east, west: Zones(take, cluster, east, west)


def localities(pull: Any) -> set[str]:
    """Where the bytes came from."""
    return {source.locality for source in pull.sources if source.bytes}


def test_what_one_zone_publishes_the_other_pulls_once_and_then_serves_itself(
    zones: Callable[..., Zones],
) -> None:
    z = zones(1, 2)
    (trainer,), (first, second) = z.east, z.west
    trainer.do(steps.open_shard, "trainer")
    first.do(steps.open_shard, "first")
    second.do(steps.open_shard, "second")
    trainer.do(steps.publish, 1)
    pull = first.do(steps.replicate)
    assert (pull.version, localities(pull)) == (1, {"far"})
    assert localities(second.do(steps.replicate, 1)) == {"host"}
    (found,) = second.do(steps.versions)
    # The news of the other zone may reach one peer a little later than its neighbour.
    until = time.monotonic() + NEWS
    while found.zones == ("west",) and time.monotonic() < until:
        (found,) = second.do(steps.versions)
    assert (found.version, found.whole, found.holders) == (1, True, 3)
    assert found.zones == ("east", "west")
    z.assert_no_faults()


def test_both_shards_of_a_replica_follow_the_versions_of_another_zone(
    zones: Callable[..., Zones],
) -> None:
    z = zones(2, 2)
    for shard in range(2):
        z.east[shard].do(steps.open_shard, "trainer", shard=shard, num_shards=2)
        z.west[shard].do(steps.open_shard, "rollout", shard=shard, num_shards=2)
    for version in (1, 2, 3):
        for worker in z.east:
            worker.begin(steps.publish, version, timeout=30)
        for worker in z.east:
            worker.finish()
        for worker in z.west:
            worker.begin(steps.wait_for, version - 1)
        assert [worker.finish() for worker in z.west] == [version, version]
        for worker in z.west:
            worker.begin(steps.replicate)
        assert [worker.finish().version for worker in z.west] == [version, version]
        for worker in z.east:
            worker.begin(steps.unpublish)
        for worker in z.east:
            worker.finish()
    z.assert_no_faults()


def test_what_another_zone_is_pulling_stays_as_a_copy(zones: Callable[..., Zones]) -> None:
    z = zones(1, 1)
    (trainer,), (rollout,) = z.east, z.west
    trainer.do(steps.open_shard, "trainer", count=6)
    rollout.do(steps.open_shard, "rollout", count=6)
    trainer.do(steps.publish, 1)
    rollout.begin(steps.replicate_pausing, "latest", at=2)
    rollout.wait_paused("in the middle of the pull")
    trainer.do(steps.unpublish)
    trainer.do(steps.publish, 2)  # the tensors are others now
    rollout.go_on()
    assert rollout.finish().version == 1
    z.assert_no_faults()


def test_who_dies_in_another_zone_holds_no_version_back(zones: Callable[..., Zones]) -> None:
    z = zones(1, 2)
    (trainer,), (rollout, _) = z.east, z.west
    trainer.do(steps.open_shard, "trainer", count=6)
    rollout.do(steps.open_shard, "rollout", count=6)
    trainer.do(steps.publish, 1)
    rollout.begin(steps.replicate_pausing, "latest", at=2)
    rollout.wait_paused("in the middle of the pull")
    rollout.kill()
    trainer.do(steps.unpublish, 60.0)
    z.assert_no_faults()


def test_a_zone_whose_gateways_are_killed_is_found_through_those_that_follow(
    zones: Callable[..., Zones],
) -> None:
    z = zones(4, 1)
    (rollout,) = z.west
    rollout.do(steps.open_shard, "rollout")
    gateways = [worker for worker in z.east if worker.do(steps.is_gateway)]
    assert gateways
    (trainer, *_) = [worker for worker in z.east if worker not in gateways]
    trainer.do(steps.open_shard, "trainer")
    trainer.do(steps.publish, 1)
    assert rollout.do(steps.replicate).version == 1
    trainer.do(steps.unpublish)
    for worker in gateways:
        worker.signal(signal.SIGKILL)
    trainer.do(steps.publish, 2)
    assert rollout.do(steps.replicate, 2, 60.0).version == 2
    z.assert_no_faults()
