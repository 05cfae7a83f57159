"""What checks reckon from the facts of a run: who published, kept, asked and gave up what.

Rules of this file. These accounts are the users' own: of their calls, not of the directory.
They judge nothing; each check keeps those that it needs. `ClusterCheck` is what all checks of
whole clusters have in common.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication
from tensorhub_p2p.sim.checks import Check
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    Ended,
    Fact,
    GaveUp,
    HandleId,
    LetGo,
    Offered,
    Probed,
)
from tensorhub_p2p.sim.cluster.memory import Token
from tensorhub_p2p.sim.cluster.stage import ClusterSim

AS_GOOD_AS_CUT = 0.5
"""Seconds that messages take longer: whoever waits for their answers holds others for silent."""


class ClusterCheck(Check):
    """One promise, in one run."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self.cluster = sim
        self.calm_since = inf
        """When the faults were over; infinity: not yet."""
        self.resting_since = inf
        """Since when nobody has anything to do; infinity: not yet."""
        self.together_since = -inf
        """When all that run saw each other again after the cuts; minus infinity: there are none,
        infinity: not yet."""

    def on_fact(self, now: float, fact: Fact) -> None:
        """Something happened to a handle."""

    @property
    def waiting(self) -> list[str]:
        """What has to happen in the calm, and has not yet."""
        return []

    def on_probe(self, now: float, probe: Probed) -> None:
        """Somebody read or wrote the bare directory."""

    def are_cut_off(self, one: PeerId, other: PeerId) -> bool:
        """There is a cut, or was one, and by the account of one of them the other isn't there."""
        effects = [rule.effect for rule in self.network.weather.rules()]
        cut = any(effect.cuts or effect.delay >= AS_GOOD_AS_CUT for effect in effects)
        if not cut and self.network.cut_until == -inf:
            return False
        first, second = self.cluster.process(one), self.cluster.process(other)
        return other not in first.responsive() or one not in second.responsive()


class Voids:
    """Which calls of which generation were given up, and when first."""

    def __init__(self) -> None:
        self.given_up: dict[tuple[Group, Generation], dict[int, float]] = defaultdict(dict)

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, GaveUp):
            calls = self.given_up[fact.handle.slot.group, fact.generation]
            calls.setdefault(fact.call, now)

    def of(self, group: Group, generation: Generation) -> dict[int, float]:
        return self.given_up.get((group, generation), {})


@dataclass
class Span:
    """A handle had something, from then to then."""

    handle: HandleId
    began: float
    ended: float = inf
    publication: Publication | None = None
    """If it is known: a publish that failed may have been seen by others all the same."""
    tokens: tuple[Token, ...] = ()


class Offers:
    """What users published from when to when: their own account, not the directory's.

    A process that crashed goes on offering, as nobody can know before it is declared dead. So does
    one whose handle is closed in the middle of its publish: closing takes it back by the same steps
    as it does what was published before.
    """

    def __init__(self) -> None:
        self.spans: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
        """By replica, version and shard."""
        self._open: dict[HandleId, Span] = {}
        self._closing: set[HandleId] = set()

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, Offered):
            slot = fact.handle.slot
            span = Span(fact.handle, now, tokens=fact.tokens)
            self.spans[slot.group.replica, fact.version, slot.shard].append(span)
            self._open[fact.handle] = span
        elif isinstance(fact, Ended) and fact.verb == "publish":
            span = self._open[fact.handle]
            span.publication = fact.publication
            if fact.error is not None and fact.handle not in self._closing:
                self._close(now, fact.handle)
        elif isinstance(fact, Began) and fact.verb == "close":
            self._closing.add(fact.handle)
        elif (isinstance(fact, Ended) and fact.verb == "close") or isinstance(fact, LetGo):
            self._close(now, fact.handle)

    def _close(self, now: float, handle: HandleId) -> None:
        span = self._open.pop(handle, None)
        if span is not None:
            span.ended = now

    def of(self, publication: Publication, shard: int) -> list[Span]:
        """Those that may have been this publication's."""
        spans = self.spans.get((publication.replica, publication.version, shard), [])
        return [span for span in spans if span.publication in (None, publication)]


@dataclass
class Asking:
    """Since when each handle has been asking for what it is answered next."""

    since: dict[HandleId, float] = field(default_factory=dict)

    def on_fact(self, now: float, fact: Fact) -> None:
        """To be told before a check judges an answer."""
        if isinstance(fact, Began) and fact.question is not None:
            self.since.setdefault(fact.handle, now)

    def began(self, answer: Answered) -> float:
        """When the first member of the generation began to ask for this."""
        assert answer.generation is not None
        members = {member.peer for member in answer.generation.members}
        group = answer.handle.slot.group
        return min(
            at for h, at in self.since.items() if h.slot.group == group and h.peer in members
        )

    def answered(self, handle: HandleId) -> None:
        self.since.pop(handle, None)
