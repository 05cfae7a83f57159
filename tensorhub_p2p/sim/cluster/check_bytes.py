"""Checks of tensors: the right bytes, and nothing read or digested of what was let go.

Rules of this file: those of checks.py.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import (
    PullOffer,
)
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import ClusterCheck, Offers
from tensorhub_p2p.sim.cluster.history import (
    DigestTaken,
    Fact,
    HandleId,
    Holding,
    LetGo,
    ReadBegan,
    Replicated,
    Said,
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
