"""Groups come, go, move on and fail, messages get lost: what is retained is there at any moment.

A watcher that sees all nodes looks after every step. It knows copies from the nodes themselves, not
from what is on record.
"""

from __future__ import annotations

import random

import pytest
from cluster import LAYOUT, QUICK, Cluster

from tensorhub_p2p.config import Config
from tensorhub_p2p.errors import RetentionLost
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.messages import Phase, Question, Retain
from tensorhub_p2p.protocol.shards.keeping import KeepState

TRAINER = Slot(Group("policy", "trainer"), 0)
ROLLOUTS = [Slot(Group("policy", f"rollout{n}"), 0) for n in range(3)]
WATCHER = Slot(Group("policy", "watcher"), 0)
PEERS, RETAINER = 7, 6


class Run:
    """One seed: a trainer on peer 0, rollouts on 1 to 3, and peers 4 to 6 that look on."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"retention/{seed}")
        loss = self.rng.choice([0.0, 0.02, 0.1])
        room = LAYOUT.num_bytes * self.rng.choice([1, 3, 50])
        self.cluster = Cluster(seed, PEERS, offload_limit=room, config=Config(swim=QUICK))
        self.cluster.net.default_link = type(self.cluster.net.default_link)((0.0002, 0.01), loss)
        self.cluster.copy_seconds = self.rng.choice([0.01, 0.3])
        self.version = 0
        self.lost = False
        """Somebody said so, or asked for it."""
        self.left: set[int] = set()

    def copies(self, version: int) -> int:
        """How many there are of it, in whatever memory."""
        count = 0
        for peer, node in enumerate(self.cluster.nodes):
            if peer in self.cluster.down:
                continue
            for part in node.shards.values():
                held = part.references.held
                if held is not None and held.phase is Phase.READY:
                    count += held.publication.version == version
            for keep in node.keeps:
                alive = keep.references.held is not None and keep.state is not KeepState.FREEING
                count += alive and keep.publication.version == version
        return count

    def look(self) -> bool:
        """False, always: for `run_until`."""
        errors = [v.error for v in self.cluster.verbs.values() if v.end is not None]
        lost = any(isinstance(e, RetentionLost) and "was closed" in str(e) for e in errors)
        left = [v for v in self.cluster.verbs.values() if v.name == "leave_well" and v.end]
        self.lost = self.lost or lost or any(v.error is None and v.result for v in left)
        if self.version and not self.lost:
            assert self.copies(1), "version 1 is lost"
        return False

    def wait(self, *numbers: int) -> None:
        verbs = [self.cluster.verbs[number] for number in numbers]
        self.cluster.net.run_until(
            lambda: self.look() or all(verb.end is not None for verb in verbs), 60.0
        )

    def run(self) -> None:
        cluster = self.cluster
        cluster.wait(cluster.open(RETAINER, WATCHER, 1, timeout=30.0, retain=Retain(versions=(1,))))
        cluster.wait(cluster.open(0, TRAINER, 1, timeout=30.0))
        cluster.wait(cluster.publish(0, TRAINER, 1, timeout=30.0))
        cluster.until(lambda: all(n.references.held for n in [cluster.shard(0, TRAINER)]))
        self.version = 1
        self.wait(*(cluster.open(n + 1, slot, 1) for n, slot in enumerate(ROLLOUTS)))
        for _ in range(25):
            self.act()
            cluster.net.run_until(self.look, self.rng.choice([0.0, 0.005, 0.05, 0.5]))
        cluster.net.default_link = type(cluster.net.default_link)((0.0002, 0.002), 0.0)
        cluster.net.run_until(self.look, 15.0)
        cluster.check_ends()

    def act(self) -> None:
        choice = self.rng.randrange(10)
        n = self.rng.randrange(3)
        peer, slot = n + 1, ROLLOUTS[n]
        if choice <= 1:
            self.move_on()
        elif choice <= 4:
            self.replicate(peer, slot)
        elif choice <= 6:
            self.unpublish(peer, slot)
        elif choice == 7 and self.is_free(peer, slot):
            number = self.cluster.close(peer, slot, self.rng.choice([1.0, 10.0]))
            self.wait(number)
            if peer not in self.left:
                self.wait(self.cluster.open(peer, slot, 1))
        elif choice == 8 and self.rng.random() < 0.3 and peer not in self.left:
            self.leave(peer, slot)

    def is_free(self, peer: int, slot: Slot) -> bool:
        part = self.cluster.nodes[peer].shards.get(slot)
        busy = any(
            v.end is None and v.peer == peer and v.slot == slot for v in self.cluster.verbs.values()
        )
        return part is not None and not part.closed and not busy and peer not in self.left

    def move_on(self) -> None:
        if not self.is_free(0, TRAINER):
            return
        number = self.cluster.unpublish(0, TRAINER, self.rng.choice([0.02, 0.2, 5.0]))

        def then() -> None:
            if self.cluster.nodes[0].shards[TRAINER].references.held is None:
                self.version += 1
                self.cluster.publish(0, TRAINER, self.version)

        self.cluster.on_end[number] = lambda _verb: self.cluster.net.at(self.cluster.now, then)

    def replicate(self, peer: int, slot: Slot) -> None:
        """With the steps of a handle: ask, give up the old one, hold the new one."""
        if not self.is_free(peer, slot):
            return
        selector = self.rng.choice(["1", "latest"])
        number = self.cluster.ask(peer, slot, Question("replicate", selector), 2.0)
        self.wait(number)
        verb = self.cluster.verbs[number]
        if verb.error is not None:
            return
        answer = verb.result
        held = self.cluster.shard(peer, slot).references.held
        if held is not None and held.publication != answer.publication:
            self.wait(self.cluster.unpublish(peer, slot, 5.0))
        if self.cluster.shard(peer, slot).references.held is None and self.is_free(peer, slot):
            self.wait(self.cluster.hold(peer, slot, answer, timeout=20.0))
        self.cluster.finish(peer, slot, answer)

    def unpublish(self, peer: int, slot: Slot) -> None:
        if self.is_free(peer, slot):
            self.cluster.unpublish(peer, slot, self.rng.choice([0.02, 0.3, 5.0]))

    def leave(self, peer: int, slot: Slot) -> None:
        self.left.add(peer)
        leaving = self.cluster.leave_well(peer, 10.0)
        part = self.cluster.nodes[peer].shards.get(slot)
        if part is not None and not part.closed:
            self.wait(leaving, self.cluster.close(peer, slot, 10.0))
        else:
            self.wait(leaving)


@pytest.mark.parametrize("seed", range(12))
def test_a_retained_version_has_a_copy_at_any_moment(seed: int) -> None:
    Run(seed).run()
