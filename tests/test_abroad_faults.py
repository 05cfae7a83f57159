"""A trainer in one zone, a rollout in another, and faults in both and between them.

As in test_groups_faults.py, whose faults these are; besides, the zones lose each other for a
while. Deaths of gateways and owners are among the crashes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from cluster import ROLLOUT, TRAINER
from far_cluster import NEWS, FarCluster
from spmd import Rollout, Trainer, Watcher, Worker
from test_groups_faults import FAULTS, FAULTS_LAST, WORKING, Run

from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.sim.network import Link

CALM_LASTS = 30.0
"""Seconds until a zone that was silent is waited for again, and all groups work."""
PERIOD = 4.0
"""Seconds between two versions: another zone hears of one after a second or two."""


@dataclass
class FarRun(Run):
    """Three peers in "east", two of them a trainer; four in "west", three of them a rollout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.far = FarCluster(self.seed, sizes={"east": 3, "west": 4})
        self.cluster = self.far
        self.watcher = Watcher(self.far)
        self.workers = []
        for shard, peer in enumerate(self.far.of("east")[:2]):
            self.add(Trainer, peer, Slot(TRAINER, shard))
        for shard, peer in enumerate(self.far.of("west")[:3]):
            self.add(Rollout, peer, Slot(ROLLOUT, shard))

    def add(self, kind: type[Worker], peer: int, slot: Slot) -> None:
        super().add(kind, peer, slot)
        worker = self.workers[-1]
        if isinstance(worker, Trainer):
            worker.period = PERIOD

    def plan(self) -> None:
        super().plan()
        loss = self.far.net.default_link.loss
        self.far.net.link_table.between_zones = Link((0.05, 0.2), loss=loss)
        if self.rng.random() < 0.7:
            when = self.far.now + self.rng.uniform(0.0, FAULTS_LAST - 4)
            self.later.append((when, "split", 0))

    def split(self, _peer: int) -> None:
        """The zones lose each other."""
        self.far.cut("east", "west")
        self.later.append((self.far.now + self.rng.uniform(0.5, 4.0), "mend", 0))

    def replace(self, peer: int) -> None:
        newcomer = self.far.start_in(self.far.where[peer])
        self.later.append((self.far.now + 0.5, "take_over", newcomer * 1000 + peer))

    def take_over(self, both: int) -> None:
        """As a `Peer` does: it opens nothing before it has joined."""
        if len(self.far.nodes[both // 1000].directory.members) > 1:
            super().take_over(both)
        else:
            self.later.append((self.far.now + 0.5, "take_over", both))

    def calm(self) -> None:
        super().calm()
        self.later = [each for each in self.later if each[1] not in (*FAULTS, "split")]
        self.far.net.link_table.between_zones = self.far.far


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_two_zones_keep_their_guarantees_under_faults_and_work_afterwards(
    seed: int,
) -> None:
    run = FarRun(seed)
    run.run(3.0)
    run.plan()
    run.run(FAULTS_LAST)
    run.calm()
    run.run(CALM_LASTS)
    rollouts, trainers = run.holders(ROLLOUT), run.holders(TRAINER)
    assert (len(rollouts), len(trainers)) == (3, 2)
    now = run.far.now
    for verb in run.far.verbs.values():
        if verb.began > now - WORKING and verb.ended is not None:
            assert verb.error is None, verb
    for worker in rollouts:
        assert isinstance(worker, Rollout)
        assert worker.seen
        newest = int((now - NEWS) / PERIOD)
        assert worker.seen[-1] >= newest, (worker.peer, worker.seen, newest)
    for worker in run.workers:
        worker.running = False
    run.run(5.0)
    for worker in run.holders(ROLLOUT) + run.holders(TRAINER):
        assert worker.idle
        run.watcher.check_notices(worker)
