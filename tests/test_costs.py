"""What publishing costs in network delays, measured on a network whose every delay is the same.

The clock is virtual and nothing is lost, so a number here is a number of messages one after
the other, not a time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub_p2p.protocol.directory.records import Registers, values, versions_key
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.messages import Phase, VersionRecord
from tensorhub_p2p.sim.cluster.handles import SimHandle
from tensorhub_p2p.sim.cluster.memory import Memory, layout_of
from tensorhub_p2p.sim.cluster.stage import ClusterSim
from tensorhub_p2p.sim.cluster.tasks import Pending, start
from tensorhub_p2p.sim.link import Link

DELAY = 0.005
"""Seconds from any peer to any other."""
KEY = versions_key("policy")
SOON = 0.01 * DELAY


class Bench:
    """Eight peers that know each other, and a trainer of two shards on the last two."""

    def __init__(self, seed: int) -> None:
        self.sim = ClusterSim(8, [], seed=seed, link=Link((DELAY, DELAY)))
        self.sim.run_for(1.0)
        self.handles = [self._handle(shard) for shard in range(2)]
        for handle in self.handles:
            self.wait(self.run(handle, lambda handle=handle: start(handle.open(5.0))))
        self.wait(*(self.publish(handle, 1) for handle in self.handles))
        self.wait(*(self.run(h, lambda h=h: start(h.unpublish(5.0))) for h in self.handles))

    def _handle(self, shard: int) -> SimHandle:
        peer = self.sim.process(self.sim.peers[6 + shard])
        return SimHandle(peer, Slot(Group("policy", "t"), shard), 2, Memory(layout_of(1)))

    def run(self, handle: SimHandle, call: Callable[[], Pending]) -> Pending:
        """Have the handle's process call this now; settled with its end."""
        end = Pending()
        handle.peer.post(lambda: (began := call()).then(lambda: end.settle(began.value)))
        return end

    def publish(self, handle: SimHandle, version: int) -> Pending:
        return self.run(handle, lambda: start(handle.publish(version, 5.0)))

    def wait(self, *ends: Pending) -> None:
        assert self.sim.network.run_until(lambda: all(end.settled for end in ends), 10.0)

    def delays_until(self, holds: Callable[[], bool]) -> float:
        """One-way delays that pass until it holds, asked often."""
        began = self.sim.network.now
        assert self.sim.network.run_until(holds, 40 * DELAY, every=SOON)
        return (self.sim.network.now - began) / DELAY

    def owners_that_have(self, version: int, shard: int) -> int:
        return sum(_has(copy, version, shard) for copy in self.sim.copies(KEY))


def _has(copy: Registers, version: int, shard: int) -> bool:
    return any(
        record.publication.version == version
        and record.slot.shard == shard
        and record.phase is Phase.READY
        for _, record in values(copy, VersionRecord)
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_publish_is_on_the_owners_quorum_after_at_most_two_delays(seed: int) -> None:
    bench = Bench(seed)
    bench.wait(bench.publish(bench.handles[0], 2))
    bench.sim.run_for(1.0)
    end = bench.publish(bench.handles[1], 2)
    assert bench.delays_until(lambda: bench.owners_that_have(2, 1) >= 2) <= 1.05
    assert bench.delays_until(lambda: end.settled) <= 1.05  # and its acknowledgement is back


@pytest.mark.parametrize("seed", range(5))
def test_a_watcher_hears_of_the_last_shard_after_at_most_three_delays(seed: int) -> None:
    bench = Bench(seed)
    bench.wait(bench.publish(bench.handles[0], 2))
    watcher, heard = bench.sim.process(bench.sim.peers[0]), [0]

    def hears(_now: float) -> None:
        heard[0] += 1

    watcher.post(lambda: watcher.node.records.watch(watcher.now, KEY, hears))
    watcher.post(watcher.pump)
    bench.sim.run_for(1.0)
    before = heard[0]
    bench.publish(bench.handles[1], 2)
    assert bench.delays_until(lambda: heard[0] > before) <= 3.05


def test_who_waits_is_answered_four_delays_after_the_last_publish_began() -> None:
    """Written, told, pinned, and acknowledged: each takes one, and nothing is asked in between."""
    for seed in range(5):
        bench = Bench(seed)
        peer = bench.sim.process(bench.sim.peers[0])
        waiter = SimHandle(peer, Slot(Group("policy", "w"), 0), 1, Memory(layout_of(1)))
        bench.wait(bench.run(waiter, lambda waiter=waiter: start(waiter.open(5.0))))
        answer = bench.run(waiter, lambda waiter=waiter: start(waiter.wait_for(1, 9.0)))
        bench.sim.run_for(1.0)
        bench.wait(bench.publish(bench.handles[0], 2))
        bench.sim.run_for(1.0)
        bench.publish(bench.handles[1], 2)
        assert bench.delays_until(lambda answer=answer: answer.settled) <= 4.05
