"""The check of floors: a group whose processes were replaced doesn't go back either.

Rules of this file: those of checks.py. That one handle is never answered with less than it had
is check_versions.py's; here it is what others of the same name had before.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from tensorhub_p2p.protocol.directory.records import group_key
from tensorhub_p2p.protocol.identity import Generation, Group, Publication
from tensorhub_p2p.protocol.messages import GenerationRecord, GroupFloor
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import ClusterCheck, Voids
from tensorhub_p2p.sim.cluster.history import Answered, Ended, Fact, HandleId, InForce
from tensorhub_p2p.sim.cluster.stage import ClusterSim

RECORDING_TAKES = 4.0
"""Seconds after which what all members are done with is on record: written at most every 2 s."""
ELECTING_TAKES = 2.0
"""Seconds for which an election may go by what members remembered when it began."""


@dataclass
class Done:
    """A call for "latest" that all members of a generation got."""

    publication: Publication
    record: GenerationRecord
    call: int
    shards: set[int] = field(default_factory=set)
    at: float = 0.0
    """When the last of them had it."""

    @property
    def by_all(self) -> bool:
        return len(self.shards) == len(self.record.members)


class Remembers(ClusterCheck):
    """A later generation of a group is not answered "latest" with less than all of an earlier had.

    If they share a member, it remembers. If not, it is on record `RECORDING_TAKES` later. Excused
    is what was voided; what a leader that was gone or not well could not write, or one that is cut
    off; and what at least two that are gone took with them, unless two others have it on record.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._calls: dict[tuple[Group, Generation, int], Done] = {}
        self._last: dict[HandleId, Answered] = {}
        self._members: dict[tuple[Group, Generation], set[HandleId]] = defaultdict(set)
        self._formed: dict[tuple[Group, Generation], float] = {}
        self._voids = Voids()

    def on_fact(self, now: float, fact: Fact) -> None:
        self._voids.on_fact(now, fact)
        group = fact.handle.slot.group
        if isinstance(fact, InForce):
            self._members[group, fact.record.generation].add(fact.handle)
            self._formed.setdefault((group, fact.record.generation), now)
        elif isinstance(fact, Answered):
            self._last[fact.handle] = fact
            if fact.question.selector == "latest" and fact.generation is not None:
                self._judge(group, fact, fact.generation.generation)
        elif isinstance(fact, Ended) and fact.verb in ("replicate", "wait_for"):
            answer = self._last.pop(fact.handle, None)
            if answer is not None and fact.error is None:
                self._is_done(now, fact.handle, answer)

    def _is_done(self, now: float, handle: HandleId, answer: Answered) -> None:
        record = answer.generation
        if record is None or answer.question.selector != "latest":
            return
        key = (handle.slot.group, record.generation, answer.call)
        done = self._calls.setdefault(key, Done(answer.publication, record, answer.call))
        done.shards.add(handle.slot.shard)
        done.at = now

    def _judge(self, group: Group, fact: Answered, generation: Generation) -> None:
        for (other, earlier, _), done in self._calls.items():
            below = fact.publication.order < done.publication.order
            if other != group or earlier >= generation or not below or not done.by_all:
                continue
            void = done.call in self._voids.of(group, earlier)
            if not void and self._must_know(group, done, generation, fact.handle):
                raise Violation(
                    f"{fact.handle} got {fact.publication} in {generation}; "
                    f"all of {earlier} had {done.publication} at {done.at:.3f}"
                )

    def _must_know(
        self, group: Group, done: Done, generation: Generation, handle: HandleId
    ) -> bool:
        formed = self._formed.get((group, generation), 0.0)
        both = self._members[group, done.record.generation] & self._members[group, generation]
        if both:
            return formed > done.at + ELECTING_TAKES
        leader = done.record.members[done.record.leader].peer
        host, recorded = self.network.host(leader), done.at + RECORDING_TAKES
        gone_before = host.is_gone and host.since < recorded
        unwell = self.cluster.troubled_until(leader) >= done.at or gone_before
        if formed <= recorded or unwell or self.are_cut_off(leader, handle.peer):
            return False
        return self._is_held(group, done)

    def _is_held(self, group: Group, done: Done) -> bool:
        """Few enough are gone since then, or those that are there have it on record."""
        gone = sum(host.is_gone and host.since >= done.at for host in self.network.hosts())
        holding = sum(
            any(
                isinstance(register.value, GroupFloor)
                and register.value.floor >= done.publication.order
                for register in copy
            )
            for copy in self.cluster.copies(group_key(group))
        )
        return gone < 2 or holding >= 2
