"""Checks of versions: whole, never older than before, kept for who is told of them.

Rules of this file: those of checks.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf

from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    SlotClaim,
    Status,
)
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import Asking, ClusterCheck, Offers, Span, Voids
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    Broke,
    Ended,
    Fact,
    HandleId,
    Holding,
    LetGo,
    Lost,
    Probed,
    Withdraws,
)
from tensorhub_p2p.sim.cluster.linear import Op, check, newest
from tensorhub_p2p.sim.cluster.programs import PROBE_KEY
from tensorhub_p2p.sim.cluster.stage import ClusterSim

COUNTED = 12
"""Calls for "latest" that are judged after a cut."""


class WholeOnly(ClusterCheck):
    """An answer was whole once: all shards of its replica were published at the same time."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._offers = Offers()

    def on_fact(self, now: float, fact: Fact) -> None:
        self._offers.on_fact(now, fact)
        if not isinstance(fact, Answered):
            return
        shards = [self._offers.of(fact.publication, shard) for shard in range(fact.num_shards)]
        moments = [span.began for spans in shards for span in spans]
        if not any(all(_covers(spans, at) for spans in shards) for at in moments):
            raise Violation(f"{fact.handle} got {fact.publication}, which never was whole")


def _covers(spans: list[Span], at: float) -> bool:
    return any(span.began <= at <= span.ended for span in spans)


class NeverBackwards(ClusterCheck):
    """No handle is answered "latest" with less than it had already; a void takes that back."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._had: dict[HandleId, list[Answered]] = defaultdict(list)
        self._answer: dict[HandleId, Answered] = {}
        self._voids = Voids()

    def on_fact(self, now: float, fact: Fact) -> None:
        self._voids.on_fact(now, fact)
        if isinstance(fact, Answered):
            self._answer[fact.handle] = fact
            if fact.question.selector == "latest":
                self._compare(fact)
        elif isinstance(fact, Ended) and fact.verb in ("replicate", "wait_for"):
            answer = self._answer.get(fact.handle)
            if fact.error is None and answer is not None:
                self._had[fact.handle].append(answer)

    def _compare(self, fact: Answered) -> None:
        for before in self._had[fact.handle]:
            assert before.generation is not None
            voids = self._voids.of(fact.handle.slot.group, before.generation.generation)
            below = fact.publication.order < before.publication.order
            if below and before.question.selector == "latest" and before.call not in voids:
                raise Violation(
                    f"{fact.handle} had {before.publication}, and got {fact.publication}"
                )


class KeptForCalls(ClusterCheck):
    """When a call is first answered, nobody has let go the last copy of any shard of the answer.

    Nor does anybody do so later while a member of the group still pulls that shard, before the
    deadline of who gives it up, unless his user forces it. That is what pins are for. They end with
    the declared death of who leads the group, with the call and with its generation, and do not
    hold back who crashes: a copy that is gone without a word counts as one that is there. Nor do
    they hold back those of whom the leader is cut off. Versions that were taken back as bad are
    kept for nobody.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._offers = Offers()
        self._copies: dict[tuple[Publication, int], list[Span]] = defaultdict(list)
        self._answered: set[tuple[Group, Generation, int]] = set()
        self._declared_dead: set[PeerId] = set()
        self._pulls: dict[HandleId, tuple[float, Answered]] = {}
        """Who was answered what, when, and is at it still."""
        self._over: set[tuple[Group, Generation]] = set()
        self._voids = Voids()
        self._begun: dict[HandleId, Began] = {}
        self._withdraws: dict[HandleId, float] = {}
        self._told: set[tuple[HandleId, Publication]] = set()
        self._bad: set[int] = set()

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, MemberChanged) and not event.member.is_reachable:
            self._declared_dead.add(event.member.peer_id)

    def on_fact(self, now: float, fact: Fact) -> None:
        self._voids.on_fact(now, fact)
        self._note(now, fact)
        self._follow(now, fact)
        if isinstance(fact, LetGo):
            self._let_go(now, fact)
        if isinstance(fact, Answered) and fact.generation is not None:
            self._judge(now, fact, fact.generation)

    def _follow(self, now: float, fact: Fact) -> None:
        self._offers.on_fact(now, fact)
        if isinstance(fact, Holding) and fact.whole:
            self._copies[fact.publication, fact.handle.slot.shard].append(Span(fact.handle, now))
        elif isinstance(fact, LetGo):
            for span in self._copies[fact.publication, fact.handle.slot.shard]:
                if span.handle == fact.handle:
                    span.ended = min(span.ended, now)

    def _note(self, now: float, fact: Fact) -> None:
        if isinstance(fact, Began):
            self._begun[fact.handle] = fact
            if fact.verb == "retract":
                self._bad.add(fact.version)
        elif isinstance(fact, Answered) and fact.question.verb == "replicate":
            self._pulls[fact.handle] = (now, fact)
        elif isinstance(fact, Ended):
            self._pulls.pop(fact.handle, None)
        elif isinstance(fact, Broke):
            self._over.add((fact.handle.slot.group, fact.record.generation))
        elif isinstance(fact, Withdraws):
            self._withdraws[fact.handle] = now
        elif isinstance(fact, Lost):
            self._told.add((fact.handle, fact.publication))

    def _let_go(self, now: float, fact: LetGo) -> None:
        """By somebody who was to wait, if others were pulling it when that began."""
        handle, publication, shard = fact.handle, fact.publication, fact.handle.slot.shard
        spans = self._copies[publication, shard] + self._offers.of(publication, shard)
        mine = any(span.handle == handle and span.ended == now for span in spans)
        began, since = self._begun.get(handle), self._withdraws.get(handle)
        if not mine or began is None or since is None or now >= began.deadline:
            return
        if (handle, publication) in self._told or any(span.ended > now for span in spans):
            return
        for puller, (answered, answer) in self._pulls.items():
            same = answer.publication == publication and puller.slot.shard == shard
            if same and answered < since and self._is_pinned(puller, answer, handle):
                raise Violation(
                    f"{handle} let go the last copy of shard {shard} of {publication}, "
                    f"which {puller} was told of at {answered:.3f} and pulls"
                )

    def _is_pinned(self, puller: HandleId, answer: Answered, handle: HandleId) -> bool:
        group, record = puller.slot.group, answer.generation
        if record is None or group == handle.slot.group or answer.publication.version in self._bad:
            return False
        leader = record.members[record.leader].peer
        gone = any(self.network.host(peer).is_gone for peer in (leader, puller.peer))
        over = (group, record.generation) in self._over
        void = answer.call in self._voids.of(group, record.generation)
        apart = leader in self._declared_dead or self.are_cut_off(leader, handle.peer)
        return not (gone or over or void or apart)

    def _judge(self, now: float, fact: Answered, record: GenerationRecord) -> None:
        key = (fact.handle.slot.group, record.generation, fact.call)
        leader = record.members[record.leader].peer
        if key in self._answered or leader in self._declared_dead:
            return
        self._answered.add(key)
        if fact.publication.version in self._bad:
            return
        for shard in range(fact.num_shards):
            spans = self._offers.of(fact.publication, shard)
            spans = spans + self._copies[fact.publication, shard]
            last = max(spans, key=lambda span: span.ended, default=None)
            forced = last is not None and (last.handle, fact.publication) in self._told
            if last is None or (last.ended < now and not forced and not self._cut(leader, last)):
                raise Violation(
                    f"{fact.handle} got {fact.publication}, of whose shard {shard} the last copy "
                    f"was let go at {last.ended if last else -inf:.3f}"
                )

    def _cut(self, leader: PeerId, last: Span) -> bool:
        """The leader goes by what is on record on its side of a cut."""
        holder = last.handle.peer
        gone = self.network.host(holder).is_gone
        return not gone and self.are_cut_off(leader, holder)


class NotLost(ClusterCheck):
    """What was written to W owners is read from R, and nothing older, whoever comes and goes.

    Each register of the probe key is a regular one: a read returns the last write that had
    ended when it began, or a later one that had begun when it ended. Only what no process
    that is there holds any more may be missing. After cuts this holds for reads that begin once
    all see each other again.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._written: dict[tuple[PeerId, str], list[tuple[float, int]]] = defaultdict(list)
        """By register: what was on W owners, and since when."""
        self._begun: dict[tuple[PeerId, str], int] = {}

    def on_probe(self, now: float, probe: Probed) -> None:
        if probe.values is not None:
            if probe.began < self.together_since:
                return
            for register in self._begun:
                self._judge(probe, register, probe.values.get(register, 0))
        elif probe.ended:
            self._written[probe.peer, probe.name].append((now, probe.value))
        else:
            self._begun[probe.peer, probe.name] = probe.value

    def _judge(self, probe: Probed, register: tuple[PeerId, str], got: int) -> None:
        least = max((v for at, v in self._written[register] if at <= probe.began), default=0)
        writer, name = register
        if got > self._begun[register]:
            raise Violation(f"{probe.peer} read {got} of {writer}'s {name}, which never wrote it")
        if got < least and self._is_held(register, least):
            raise Violation(
                f"{probe.peer} began to read at {probe.began:.3f} and got {got} of {writer}'s "
                f"{name}; {least} had been written by then"
            )

    def _is_held(self, wanted: tuple[PeerId, str], least: int) -> bool:
        return any(
            (register.writer, register.name) == wanted
            and isinstance(register.value, SlotClaim)
            and register.value.counter >= least
            for copy in self.cluster.copies(PROBE_KEY)
            for register in copy
        )


class Linear(ClusterCheck):
    """Publishing and resolving are linearizable: the newest version is a maximum (G5).

    For runs in which trainers take turns, so that the newest version is never taken back, and
    whose publishers are never taken for dead. `whole` begins when the last shard began to
    publish and ends when the last one returned; `resolve` of one call begins with the first
    member's asking and ends with its first answer.

    In a cut each side resolves what it sees. Once all see each other again, whatever was published
    on any side counts, and calls that begin from then on are in one order with it.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._asking = Asking()
        self._resolved: dict[tuple[Group, Generation, int], Op] = {}
        self._begun: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._done: dict[Publication, dict[int, float]] = defaultdict(dict)
        self._publishers: set[PeerId] = set()
        self.is_void = False
        """A publisher that lives was taken for dead: what is hidden can't be found."""

    def on_event(self, peer: PeerId, event: Event) -> None:
        if self.network.now < self.together_since:
            return
        if isinstance(event, MemberChanged) and event.member.peer_id in self._publishers:
            self.is_void = self.is_void or event.member.status is Status.DEAD

    @property
    def waiting(self) -> list[str]:
        """After cuts there have to be calls that count."""
        enough = self.together_since == -inf or len(self._counted()) >= COUNTED
        return [] if enough or self.is_void else ["calls for the latest"]

    def _counted(self) -> list[Op]:
        return [op for op in self._resolved.values() if op.called >= self.together_since]

    def on_fact(self, now: float, fact: Fact) -> None:
        self._asking.on_fact(now, fact)
        if isinstance(fact, Began) and fact.verb == "publish":
            self._publishers.add(fact.handle.peer)
            key = (fact.handle.slot.group.replica, fact.version)
            self._begun[key].setdefault(fact.handle.slot.shard, now)
        elif isinstance(fact, Ended) and fact.verb == "publish" and fact.publication is not None:
            self._done[fact.publication][fact.handle.slot.shard] = now
        elif isinstance(fact, Answered) and fact.generation is not None:
            self._answered(now, fact)
            self._asking.answered(fact.handle)

    def _answered(self, now: float, fact: Answered) -> None:
        group = fact.handle.slot.group
        key = (group, fact.generation.generation, fact.call) if fact.generation else None
        if key is not None and key not in self._resolved and fact.question.selector == "latest":
            began, version = self._asking.began(fact), fact.publication.version
            self._resolved[key] = Op(str(group), began, now, "resolve", version)

    def history(self) -> list[Op]:
        """All operations that count."""
        ops = self._counted()
        num_shards = {job.replica: job.num_shards for job in self.cluster.jobs}
        for (replica, version), begun in self._begun.items():
            if len(begun) == num_shards[replica]:
                ended = min(self._ends(replica, version, num_shards[replica]), default=inf)
                ops.append(Op(replica, max(begun.values()), ended, "whole", version))
        return ops

    def _ends(self, replica: str, version: int, num_shards: int) -> Iterator[float]:
        """When all shards of it had returned: of one publication, as groups may have been cut."""
        for publication, done in self._done.items():
            same = (publication.replica, publication.version) == (replica, version)
            if same and len(done) == num_shards:
                yield max(done.values())

    def conclude(self) -> None:
        if self.is_void:
            return
        if self.waiting:
            raise Violation(f"since all see each other there were {len(self._counted())} calls")
        found = check(self.history(), -1, newest)
        if found is not None:
            raise Violation(f"publish and resolve are not linearizable: {found}")
