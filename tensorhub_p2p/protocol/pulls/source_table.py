"""The sources that one pull knows.

Rule of this file. A table and questions about it: whom it may hold, who of them answers.
What is asked of a source is courting.py's business, what is fetched from it dispatch.py's.

A source is remembered when the directory names it, or another source does. We ourselves
never are. Bound: `max_candidates`; at the bound a source that is of no use and has no
story makes room, else the newcomer is not taken.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.messages import Phase
from tensorhub_p2p.protocol.pulls.sources import (
    ACTIVE,
    ANSWERED,
    Source,
    SourceFacts,
    SourceId,
    SourceState,
)


class SourceTable:
    """At most `max_candidates` sources, in the order in which they were first heard of."""

    def __init__(self, own: SourceId, publication: Publication, max_candidates: int) -> None:
        self._own = own
        self._publication = publication
        self._max = max_candidates
        self._sources: dict[SourceId, Source] = {}

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def get(self, source: SourceId) -> Source | None:
        return self._sources.get(source)

    def remember(
        self, source: SourceId, locality: int, phase: Phase, publication: Publication
    ) -> Source | None:
        """The source's entry; None if it is ourselves, or one too many."""
        known = self._sources.get(source)
        if known is not None or source == self._own:
            return known
        if len(self._sources) >= self._max and not self._forget_one():
            return None
        known = Source(source, locality, phase, publication, listed=False)
        self._sources[source] = known
        return known

    def _forget_one(self) -> bool:
        """Make room: forget a source that is of no use and has no story."""
        for id, source in self._sources.items():
            idle = source.state not in ACTIVE and not source.in_flight and not source.owes_bye
            if idle and not source.listed and not source.bytes and not source.mismatches:
                del self._sources[id]
                return True
        return False

    def open(self) -> list[Source]:
        """Those that serve us."""
        return [s for s in self if s.state is SourceState.OPEN]

    def answering(self) -> list[Source]:
        """Those that serve us, or would if they had a free slot."""
        return [s for s in self if s.state in ANSWERED]

    def origin_is_dead(self) -> bool:
        origin = (s for s in self if s.id.slot.group.replica == self._publication.replica)
        return any(s.state is SourceState.DEAD for s in origin)

    def all_have_spoken(self, since: float, everything: int) -> bool:
        """Every holder of the publication that is listed has said since then what it has.

        One that is listed as having all of it (`everything`) has said so. The dead are listed until
        the directory was looked at after their death: so it was.
        """
        return all(
            s.state in ANSWERED
            and s.heard_at >= since
            and (s.phase is not Phase.READY or s.have == everything)
            for s in self
            if s.listed and s.publication == self._publication
        )

    def facts(self) -> tuple[SourceFacts, ...]:
        """All sources that were considered, those that delivered most first."""
        facts = [source.facts() for source in self]
        return tuple(sorted(facts, key=lambda f: (-f.bytes, f.locality, f.source)))
