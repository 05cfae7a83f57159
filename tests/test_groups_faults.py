"""Groups under random faults: whatever happens, and once it is over.

Each seed decides the loss, the crashes, pauses and cuts, and when a new peer takes over a
slot. While faults last, safety is checked (spmd.py); afterwards every group must work.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from cluster import ROLLOUT, TRAINER, Cluster
from spmd import PERIOD, Rollout, Trainer, Watcher, Worker

from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.sim.network import Link

FAULTS = ("crash", "crash", "pause", "cut", "close")
STEP = 0.05
FAULTS_LAST = 10.0
CALM_LASTS = 15.0
WORKING = 4.0
"""Seconds of the calm in which nothing may fail any more."""


@dataclass
class Run:
    """One seed: a trainer of two shards, a rollout of three, on six peers and more."""

    seed: int
    workers: list[Worker] = field(default_factory=list)
    later: list[tuple[float, str, int]] = field(default_factory=list)
    paused: set[int] = field(default_factory=set)
    faulty: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(f"faults/{self.seed}")
        self.cluster = Cluster(self.seed, 6)
        self.watcher = Watcher(self.cluster)
        self.add(Trainer, 0, Slot(TRAINER, 0))
        self.add(Trainer, 1, Slot(TRAINER, 1))
        for shard in range(3):
            self.add(Rollout, 2 + shard, Slot(ROLLOUT, shard))

    def add(self, kind: type[Worker], peer: int, slot: Slot) -> None:
        num_shards = 2 if kind is Trainer else 3
        worker = kind(self.watcher, peer, slot, num_shards)
        if isinstance(worker, Rollout) and self.seed % 3 == 2:
            worker.gives_up = lambda: self.faulty and self.rng.random() < 0.05
        self.workers.append(worker)

    def run(self, seconds: float) -> None:
        end = self.cluster.now + seconds
        while self.cluster.now < end:
            for worker in self.workers:
                if worker.peer not in self.cluster.down | self.paused:
                    worker.step()
            for when, what, peer in [x for x in self.later if x[0] <= self.cluster.now]:
                self.later.remove((when, what, peer))
                getattr(self, what)(peer)
            self.cluster.net.run_for(STEP)
        self.cluster.check_ends()

    # --- faults ---

    def plan(self) -> None:
        """Two to six faults at random times."""
        self.cluster.net.default_link = Link(
            self.cluster.latency, self.rng.choice((0.0, 0.05, 0.1, 0.2))
        )
        self.faulty = True
        start = self.cluster.now
        for _ in range(self.rng.randint(2, 6)):
            when = start + self.rng.uniform(0.0, FAULTS_LAST - 2)
            what = self.rng.choice(FAULTS)
            self.later.append((when, what, self.rng.randrange(6)))

    def crash(self, peer: int) -> None:
        if peer in self.cluster.down or peer in self.paused or len(self.cluster.down) >= 3:
            return
        self.cluster.crash(peer)
        for worker in [w for w in self.workers if w.peer == peer]:
            worker.over = True
        self.later.append((self.cluster.now + self.rng.uniform(0.1, 4.0), "replace", peer))

    def replace(self, peer: int) -> None:
        """A new peer takes over what this one held."""
        newcomer = self.cluster.start(meet=False)
        self.later.append((self.cluster.now + 0.5, "take_over", newcomer * 1000 + peer))

    def take_over(self, both: int) -> None:
        newcomer, peer = divmod(both, 1000)
        for worker in [w for w in self.workers if w.peer == peer]:
            self.add(type(worker), newcomer, worker.slot)

    def close(self, peer: int) -> None:
        for worker in self.workers:
            worker.closing = worker.closing or (worker.peer == peer and worker.is_open)

    def pause(self, peer: int) -> None:
        if peer in self.cluster.down or peer in self.paused:
            return
        self.paused.add(peer)
        self.cluster.pause(peer)
        seconds = self.rng.choice((0.7, 2.0, 6.0))
        self.later.append((self.cluster.now + seconds, "resume", peer))
        if self.rng.random() < 0.5:
            self.later.append((self.cluster.now + 1.0, "replace", peer))

    def resume(self, peer: int) -> None:
        self.paused.discard(peer)
        self.cluster.resume(peer)

    def cut(self, peer: int) -> None:
        """For a while it hears nothing, or nothing from some."""
        ids = [n.info.peer_id for n in self.cluster.nodes]
        others = self.rng.sample(ids, self.rng.randint(1, len(ids)))
        one_way = self.rng.random() < 0.5
        self.cluster.net.partition(
            [ids[peer]], [o for o in others if o != ids[peer]], one_way=one_way
        )
        self.later.append((self.cluster.now + self.rng.uniform(0.5, 4.0), "mend", peer))

    def mend(self, _peer: int) -> None:
        self.cluster.net.heal()

    # --- afterwards ---

    def calm(self) -> None:
        """No more faults; every slot whose holder is gone gets a new one."""
        self.faulty = False
        self.cluster.net.default_link = Link(self.cluster.latency)
        self.cluster.net.heal()
        for when, what, peer in list(self.later):
            if what in FAULTS:
                self.later.remove((when, what, peer))
        for peer in sorted(self.paused):
            self.resume(peer)

    def holders(self, group: object) -> list[Worker]:
        return [w for w in self.workers if w.slot.group == group and w.is_open and not w.over]


@pytest.mark.parametrize("seed", range(6))
def test_groups_keep_their_guarantees_under_faults_and_work_afterwards(seed: int) -> None:
    run = Run(seed)
    run.run(1.5)
    run.plan()
    run.run(FAULTS_LAST)
    run.calm()
    run.run(CALM_LASTS)
    _check_all_work(run)
    for worker in run.workers:
        worker.running = False
    run.run(5.0)
    for worker in run.holders(ROLLOUT) + run.holders(TRAINER):
        assert worker.idle
        run.watcher.check_notices(worker)


def _check_all_work(run: Run) -> None:
    """For a while, every shard has been at it with no error, and got what is newest."""
    rollouts, trainers = run.holders(ROLLOUT), run.holders(TRAINER)
    state = [(w.peer, str(w.slot), w.is_open, w.over) for w in run.workers]
    assert (len(rollouts), len(trainers)) == (3, 2), state
    now = run.cluster.now
    for verb in run.cluster.verbs.values():
        if verb.began > now - WORKING and verb.ended is not None:
            assert verb.error is None, verb
    newest = int(now / PERIOD)
    for worker in rollouts:
        assert isinstance(worker, Rollout)
        assert worker.seen, worker
        assert worker.seen[-1] >= newest, (worker.peer, worker.seen, newest)
