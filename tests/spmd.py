"""Worker programs for the simulated cluster, and what must hold whatever happens to them.

A `Rollout` asks for "latest" again and again, a `Trainer` publishes the version of the hour;
both retry after every error, as a training loop would. `Watcher` notes what the workers were
told, and asserts the guarantees on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster import LATEST, Cluster, Running

from tensorhub_p2p.errors import (
    GroupBroken,
    SlotTaken,
    Timeout,
    VersionConflict,
)
from tensorhub_p2p.protocol.identity import Generation, Group, Publication, Slot
from tensorhub_p2p.protocol.messages import GenerationRecord
from tensorhub_p2p.protocol.shards.shard import ShardNode

PACE = 0.25
"""Seconds that a worker computes between two verbs, about."""
PERIOD = 1.0
"""Seconds between two versions."""
ALLOWED = (GroupBroken, SlotTaken, Timeout, VersionConflict)


@dataclass
class Watcher:
    """What the workers saw."""

    cluster: Cluster
    answers: dict[tuple[Group, Generation, int], Publication] = field(default_factory=dict)
    ready: dict[tuple[str, int, int], list[list[float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By (replica, version, shard): from when to when a worker had it published."""
    ended: dict[int, set[Generation]] = field(default_factory=lambda: defaultdict(set))
    """By peer: its generations that ended, as its protocols noticed."""
    merged: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By peer: ends that were noticed while an earlier end had not been told yet."""
    raised: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By peer: how many verbs raised GroupBroken."""
    voids: bool = False
    """Some call was given up."""

    def watch(self, shard: ShardNode, peer: int) -> None:
        """Note the ends of generations, just where the protocol decides to tell of them."""
        self.ended[peer], self.merged[peer], self.raised[peer] = set(), 0, 0
        tell = shard.part.notices.generation_ended

        def told(record: GenerationRecord, why: str) -> None:
            if record.generation in self.ended[peer]:
                before = shard.part.notices.pending
                tell(record, why)
                assert shard.part.notices.pending is before, "one end is told twice"
                return
            self.ended[peer].add(record.generation)
            self.merged[peer] += shard.part.notices.pending is not None
            tell(record, why)

        shard.part.notices.generation_ended = told  # type: ignore[method-assign]

    def answered(self, verb: Running) -> None:
        """G2: one publication for one call. G3: it was whole once."""
        assert verb.slot is not None
        shard = self.cluster.shard(verb.peer, verb.slot)
        assert shard.part.answered is not None
        generation, answer = shard.part.answered[0].generation, verb.result
        key = (verb.slot.group, generation, answer.call)
        assert self.answers.setdefault(key, answer.publication) == answer.publication, key
        assert self.was_whole(answer.publication, answer.num_shards), answer

    def was_whole(self, publication: Publication, num_shards: int) -> bool:
        """All shards were published at the same time, once.

        A shard that crashed counts: nobody can know until it is declared dead.
        """
        spans = [
            self.ready[(publication.replica, publication.version, shard)]
            for shard in range(num_shards)
        ]
        starts = [start for span in spans for start, _ in span]
        return any(all(any(a <= t <= b for a, b in span) for span in spans) for t in starts)

    def check_notices(self, worker: Worker) -> None:
        """Every end of a generation fails one verb, and only one. (Voids fail others.)"""
        if self.voids:
            return
        shard = worker.shard
        assert shard is not None
        pending = shard.part.notices.pending is not None
        told = len(self.ended[worker.peer]) - self.merged[worker.peer] - pending
        assert self.raised[worker.peer] == told, f"{worker.slot} on p{worker.peer}"


@dataclass
class Worker:
    """One handle of one peer, and the loop that uses it."""

    watcher: Watcher
    peer: int
    slot: Slot
    num_shards: int
    verb: int | None = None
    next_at: float = 0.0
    is_open: bool = False
    over: bool = False
    """Its slot was taken, or its peer crashed."""
    closing: bool = False
    """It shall close its handle, and open another one."""
    running: bool = True
    """False lets the present verb end, and begins no other."""

    @property
    def cluster(self) -> Cluster:
        return self.watcher.cluster

    @property
    def shard(self) -> ShardNode | None:
        return self.cluster.nodes[self.peer].shards.get(self.slot)

    @property
    def idle(self) -> bool:
        return self.verb is None

    def step(self) -> None:
        """Begin the next verb, if it is time."""
        if self.over or not self.running or not self.idle or self.cluster.now < self.next_at:
            return
        if self.closing:
            self.begin(self.cluster.close(self.peer, self.slot, timeout=3.0))
        elif not self.is_open:
            self.begin(self.cluster.open(self.peer, self.slot, self.num_shards, timeout=5.0))
        else:
            self.act()

    def begin(self, number: int) -> None:
        """Have `after` called when the verb has ended, which may be already."""
        self.verb = number
        verb = self.cluster.verbs[number]
        if verb.end is not None:
            self.after(verb)
        else:
            self.cluster.on_end[number] = self.after

    def after(self, verb: Running) -> None:
        self.verb = None
        self.next_at = self.cluster.now + PACE
        error = verb.error
        if error is None:
            self.succeeded(verb)
            return
        assert isinstance(error, ALLOWED), error
        self.watcher.raised[self.peer] += isinstance(error, GroupBroken)
        if isinstance(error, SlotTaken):
            self.over = True
        self.failed(verb)

    def act(self) -> None:
        raise NotImplementedError

    def succeeded(self, verb: Running) -> None:
        if verb.name == "open":
            self.is_open = True
            assert self.shard is not None
            self.watcher.watch(self.shard, self.peer)
        elif verb.name == "close":
            self.closing = self.is_open = False

    def failed(self, verb: Running) -> None: ...


@dataclass
class Rollout(Worker):
    """Replicates "latest", and again."""

    seen: list[int] = field(default_factory=list)
    gives_up: Callable[[], bool] = lambda: False
    """Whether it finds that it can't have what was decided, this time."""

    def act(self) -> None:
        self.begin(self.cluster.ask(self.peer, self.slot, LATEST, timeout=4.0))

    def succeeded(self, verb: Running) -> None:
        super().succeeded(verb)
        if verb.name == "ask":
            self.watcher.answered(verb)
            self._answer = verb.result
            if self.gives_up():
                self.cluster.give_up(self.peer, self.slot, self._answer)
                self.watcher.voids = True
                return
            self.begin(self.cluster.hold(self.peer, self.slot, self._answer, timeout=4.0))
        elif verb.name == "hold":
            error = self.cluster.nodes[self.peer].finish(
                self.cluster.now, self.slot, self._answer.call
            )
            if error is not None:
                assert isinstance(error, (GroupBroken, SlotTaken)), error
                self.watcher.raised[self.peer] += isinstance(error, GroupBroken)
                self.over = isinstance(error, SlotTaken)
                return
            version = self._answer.publication.version
            # G4: never backwards. Only a void restores the floor that there was before.
            forwards = not self.seen or version >= self.seen[-1]
            assert forwards or self.watcher.voids, (self.seen, version)
            self.seen.append(version)


@dataclass
class Trainer(Worker):
    """Publishes the version of the hour, one after the other."""

    published: int = 0
    span: list[float] | None = None
    period: float = PERIOD

    def act(self) -> None:
        version = 1 + int(self.cluster.now / self.period)
        if self.span is not None and self.published != version:
            self.begin(self.cluster.unpublish(self.peer, self.slot, timeout=3.0))
        elif self.span is None and version > self.published:
            self.published = version
            self.span = [self.cluster.now, float("inf")]
            key = (self.slot.group.replica, version, self.slot.shard)
            self.watcher.ready[key].append(self.span)
            self.begin(self.cluster.publish(self.peer, self.slot, version, timeout=4.0))

    def succeeded(self, verb: Running) -> None:
        super().succeeded(verb)
        if verb.name in ("unpublish", "close"):
            self.end_span()

    def failed(self, verb: Running) -> None:
        if verb.name == "publish":
            self.end_span()
            if not isinstance(verb.error, VersionConflict):
                self.published = 0  # try again

    def end_span(self) -> None:
        if self.span is not None:
            self.span[1] = self.cluster.now
            self.span = None
