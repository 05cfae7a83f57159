"""Checks of groups: one generation, one answer, nobody unaware, nobody who was replaced.

Rules of this file: those of checks.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from tensorhub_p2p.errors import GroupBroken, GroupDivergence
from tensorhub_p2p.protocol.directory.records import group_key, versions_key
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    Question,
)
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import Asking, ClusterCheck, Voids
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    Broke,
    Ended,
    Fact,
    GaveUp,
    HandleId,
    InForce,
)
from tensorhub_p2p.sim.cluster.stage import ClusterSim


class OneGeneration(ClusterCheck):
    """Of each counter of a group at most one generation is ever worked in, with one leader.

    Unless the first one was forgotten: all processes that had its record are gone.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._seen: dict[tuple[Group, int], GenerationRecord] = {}

    def on_fact(self, now: float, fact: Fact) -> None:
        if not isinstance(fact, InForce):
            return
        group, record = fact.handle.slot.group, fact.record
        key = (group, record.generation.counter)
        other = self._seen.setdefault(key, record)
        if other.generation != record.generation and self._is_forgotten(group, other):
            other = self._seen[key] = record
        if (other.generation, other.leader) != (record.generation, record.leader):
            raise Violation(f"{group} has two generations of one counter: {other} and {record}")
        mine = record.members[fact.handle.slot.shard]
        if mine.peer != fact.handle.peer:
            raise Violation(f"{fact.handle} works in {record.generation}, which is not its own")

    def _is_forgotten(self, group: Group, record: GenerationRecord) -> bool:
        keys = (group_key(group), versions_key(group.model))
        copies = [copy for key in keys for copy in self.cluster.copies(key)]
        return not any(register.value == record for copy in copies for register in copy)


class SameAnswer(ClusterCheck):
    """All shards of a group get the same publication for the same call of a generation.

    A group of one shard may ask something else in the call after a failure, and is then answered
    that. Each time it does so a new *round* begins, also if it had asked this before.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._answers: dict[tuple[Group, Generation, int, int], Answered] = {}
        self._asked: dict[HandleId, tuple[int, Question]] = {}
        """What each handle asked last, in which round."""

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, Began) and fact.question is not None:
            number, before = self._asked.get(fact.handle, (0, fact.question))
            self._asked[fact.handle] = (number + (before != fact.question), fact.question)
        if not isinstance(fact, Answered) or fact.generation is None:
            return
        alone = len(fact.generation.members) == 1
        number = self._asked[fact.handle][0] if alone else 0
        key = (fact.handle.slot.group, fact.generation.generation, fact.call, number)
        other = self._answers.setdefault(key, fact)
        if other.publication != fact.publication:
            raise Violation(
                f"call {fact.call} of {key[0]} gave {other.handle} {other.publication}, "
                f"and {fact.handle} {fact.publication}"
            )


@dataclass
class Told:
    """What one handle has to be told, and was."""

    owed: bool = False
    """Its generation ended, and no verb failed for it yet."""
    owed_when_begun: bool = False
    """That was so already when its present verb began."""
    raised_at: float = -inf
    gave_up: set[tuple[Generation, int]] = field(default_factory=set)
    generations: set[Generation] = field(default_factory=set)
    raised_for_nothing: int = 0
    """Verbs that failed for a void, as far as can be told."""


class NobodyUnaware(ClusterCheck):
    """Each member of a generation that ended, or of a call that was voided, fails once for it.

    Ends that nobody was told of yet when the next one came are told together. So: between the
    end and the next success of a verb that began after it, a verb failed; and no more verbs
    failed with `GroupBroken` than there were ends and voids.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._told: dict[HandleId, Told] = defaultdict(Told)
        self._voids = Voids()

    def on_fact(self, now: float, fact: Fact) -> None:
        self._voids.on_fact(now, fact)
        told = self._told[fact.handle]
        if isinstance(fact, InForce):
            told.generations.add(fact.record.generation)
        elif isinstance(fact, Broke):
            told.owed = True
        elif isinstance(fact, GaveUp):
            told.gave_up.add((fact.generation, fact.call))
        elif isinstance(fact, Began):
            told.owed_when_begun = told.owed
        elif isinstance(fact, Answered):
            self._answered(fact, told)
        elif isinstance(fact, Ended):
            self._ended(now, fact, told)

    def _ended(self, now: float, fact: Ended, told: Told) -> None:
        if isinstance(fact.error, (GroupBroken, GroupDivergence)):
            told.raised_at = now
            if not told.owed and isinstance(fact.error, GroupBroken):
                self._count_void(fact, told)
            told.owed = False
        elif fact.error is None and fact.verb in ("publish", "replicate", "wait_for"):
            unaware = told.owed and told.owed_when_begun
            if unaware:
                raise Violation(f"{fact.handle} was never told that its generation ended: {fact}")

    def _count_void(self, fact: Ended, told: Told) -> None:
        told.raised_for_nothing += 1
        group = fact.handle.slot.group
        voids = sum(len(self._voids.of(group, generation)) for generation in told.generations)
        if told.raised_for_nothing > voids:
            raise Violation(f"{fact.handle} failed for an end that it was told of before: {fact}")

    def _answered(self, fact: Answered, told: Told) -> None:
        assert fact.generation is not None
        generation = fact.generation.generation
        for call, at in self._voids.of(fact.handle.slot.group, generation).items():
            mine = (generation, call) in told.gave_up
            if call < fact.call and not mine and told.raised_at < at:
                raise Violation(
                    f"{fact.handle} got an answer to call {fact.call}, and was never told that "
                    f"call {call} was given up at {at:.3f}"
                )


class Fenced(ClusterCheck):
    """Nothing that a generation began after a higher one was in force is ever accepted.

    A higher one in force, at any member, means that the fence is on W owners. Judged are
    processes that, by their own account, are in one cluster with that member: the halves of
    a cluster that was cut in two go on by themselves.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._formed: dict[Group, dict[Generation, tuple[float, PeerId]]] = defaultdict(dict)
        self._began: dict[HandleId, float] = {}
        self._asking = Asking()
        self._first: dict[tuple[Group, Generation, int], float] = {}

    def on_fact(self, now: float, fact: Fact) -> None:
        self._asking.on_fact(now, fact)
        group = fact.handle.slot.group
        if isinstance(fact, InForce):
            self._formed[group].setdefault(fact.record.generation, (now, fact.handle.peer))
        elif isinstance(fact, Began):
            self._began[fact.handle] = now
        elif isinstance(fact, Ended) and fact.verb == "publish" and fact.publication is not None:
            began = self._began[fact.handle]
            self._judge(fact.handle, fact.publication.generation, began, str(fact.publication))
        elif isinstance(fact, Answered) and fact.generation is not None:
            generation = fact.generation.generation
            key = (group, generation, fact.call)
            asked = self._first.setdefault(key, self._asking.began(fact))
            self._judge(fact.handle, generation, asked, f"its answer {fact.publication}")
            self._asking.answered(fact.handle)

    def _judge(self, handle: HandleId, generation: Generation, began: float, what: str) -> None:
        members = self.cluster.process(handle.peer).responsive()
        for higher, (formed, by) in self._formed[handle.slot.group].items():
            if higher > generation and formed < began and by in members:
                raise Violation(
                    f"{handle} began {what} at {began:.3f} in {generation}, and it was accepted; "
                    f"{higher} was in force since {formed:.3f}"
                )
