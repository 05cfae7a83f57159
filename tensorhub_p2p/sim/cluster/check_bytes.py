"""Checks of tensors: the right bytes, and nothing read or digested of what was let go.

Rules of this file: those of checks.py.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged
from tensorhub_p2p.protocol.messages import (
    PullOffer,
)
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import Asking, ClusterCheck, Offers
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    DigestTaken,
    Ended,
    Fact,
    HandleId,
    Holding,
    LetGo,
    ReadBegan,
    Replicated,
    Said,
    Withdraws,
)
from tensorhub_p2p.sim.cluster.stage import ClusterSim


class RightBytes(ClusterCheck):
    """What is in the tensors after `replicate` is what the publisher's tensors were."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._offers = Offers()

    def on_fact(self, now: float, fact: Fact) -> None:
        self._offers.on_fact(now, fact)
        if not isinstance(fact, Replicated):
            return
        offered = self._offers.of(fact.publication, fact.handle.slot.shard)
        if not any(span.tokens == fact.tokens for span in offered):
            raise Violation(
                f"{fact.handle} holds {fact.tokens} as {fact.publication}, "
                f"which was {[span.tokens for span in offered]}"
            )


class LowestStands(ClusterCheck):
    """Of replicas that publish a version side by side the lowest one that is whole answers.

    Judged are calls during all of which it was whole, and seen by who led the group: not across
    cuts and zones, where one may not have heard of the other.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._num_shards = {job.replica: job.num_shards for job in sim.jobs}
        self._asking = Asking()
        self._there: dict[Publication, dict[int, tuple[float, HandleId]]] = defaultdict(dict)
        """By shard: who has published it, since when."""
        self._changed: dict[tuple[PeerId, PeerId], float] = {}
        """When the first one's opinion of the second changed last."""
        self._answered: set[tuple[Group, Generation, int]] = set()
        self._bad: set[int] = set()

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, MemberChanged):
            self._changed[peer, event.member.peer_id] = self.network.now

    def on_fact(self, now: float, fact: Fact) -> None:
        self._asking.on_fact(now, fact)
        handle = fact.handle
        if isinstance(fact, Ended) and fact.verb == "publish" and fact.publication is not None:
            self._there[fact.publication][handle.slot.shard] = (now, handle)
        elif isinstance(fact, (Withdraws, LetGo)):
            _, holder = self._there[fact.publication].get(handle.slot.shard, (inf, None))
            if holder == handle:
                del self._there[fact.publication][handle.slot.shard]
        elif isinstance(fact, Began) and fact.verb == "retract":
            self._bad.add(fact.version)
        elif isinstance(fact, Answered) and fact.generation is not None:
            self._judge(fact)
            self._asking.answered(handle)

    def _judge(self, fact: Answered) -> None:
        """The first answer of a call: what others are told of it was decided before."""
        assert fact.generation is not None
        key = (fact.handle.slot.group, fact.generation.generation, fact.call)
        asked, got = self._asking.began(fact), fact.publication
        if key in self._answered:
            return
        self._answered.add(key)  # also of one that isn't judged: its call was decided, too
        if got.version in self._bad or asked < self.together_since:
            return
        leader = fact.generation.members[fact.generation.leader].peer
        for lower, shards in self._there.items():
            stands = lower.order == got.order and lower.replica < got.replica
            whole = len(shards) == self._num_shards.get(lower.replica)
            seen = (self._seen(leader, h, lower, since, asked) for since, h in shards.values())
            if stands and whole and all(seen):
                raise Violation(f"{fact.handle} got {got}, but {lower} was whole all the time")

    def _seen(
        self, leader: PeerId, handle: HandleId, lower: Publication, since: float, asked: float
    ) -> bool:
        """It was published by then, was not aborted since, and its holder was there."""
        process = self.cluster.process(handle.peer)
        lost = any(h.id == handle and h.lost == lower for h in process.handles)
        return since < asked and not lost and self._saw(leader, handle.peer, asked)

    def _saw(self, leader: PeerId, publisher: PeerId, since: float) -> bool:
        """All the time, from then on, both were there and saw each other."""
        ends = ((leader, publisher), (publisher, leader))
        zones = {self.cluster.process(peer).info.zone for peer in (leader, publisher)}
        return len(zones) == 1 and all(
            not self.network.host(one).is_gone
            and self._changed.get((one, other), -inf) < since
            and other in (*self.cluster.process(one).responsive(), one)
            for one, other in ends
        )


class NoDigestAfterHiding(ClusterCheck):
    """Nothing is read, for a digest or a copy, of what is hidden or the user was told is his."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._let_go: set[tuple[HandleId, Publication]] = set()

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, LetGo):
            self._let_go.add((fact.handle, fact.publication))
        elif isinstance(fact, Holding):
            self._let_go.discard((fact.handle, fact.publication))  # it came here once more
        elif isinstance(fact, DigestTaken):
            theirs = (fact.handle, fact.publication) in self._let_go
            if theirs or not fact.holds:
                raise Violation(f"{fact.handle} took a digest of {fact.publication}, let go before")


class Drains(ClusterCheck):
    """Nobody is offered what a handle has let go, nor begins to read it."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._let_go: set[tuple[PeerId, Slot, Publication]] = set()

    def on_fact(self, now: float, fact: Fact) -> None:
        peer, slot = fact.handle.peer, fact.handle.slot
        if isinstance(fact, LetGo):
            self._let_go.add((peer, slot, fact.publication))
        elif isinstance(fact, Holding):
            self._let_go.discard((peer, slot, fact.publication))
        elif isinstance(fact, ReadBegan):
            self._judge(fact, (fact.source, fact.slot, fact.publication), "reads")
        elif isinstance(fact, Said) and isinstance(fact.message, PullOffer):
            self._judge(fact, (peer, slot, fact.message.publication), "offers")

    def _judge(self, fact: Fact, what: tuple[PeerId, Slot, Publication], does: str) -> None:
        if what in self._let_go:
            raise Violation(f"{fact.handle} {does} {what[2]} of {what[1]}, let go before")
