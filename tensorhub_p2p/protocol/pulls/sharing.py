"""What a puller leaves to its fellows: of a source that many read, each takes its own part.

Rule of this file. It says which chunks are not to be asked of whole sources now; it asks
nobody, and picks no chunk.

Theory of operation. A *spring* is a source that had everything when it was first heard of.
Its cable is what a whole swarm waits for, so each chunk should leave it once: as many times
as there are springs, to be exact. A spring says whom it serves besides (`others`); these and
we are *fellows*. A chunk that none of our sources but springs has is *fresh*. Fresh chunks we
take from springs in the order of ownership.py: those for which fewer of the fellows come
before us than there are springs. All others we wait for, as fellows have or will have them,
and take springs' time for nothing else while something is fresh.

Nobody waits for ever: a chunk is *late* once nothing came, and no fellow showed anything new,
for `late_after` seconds, or for as long as a spring needs for LATE_CHUNKS chunks. Then it may
be taken by one more in order; and by one more each time as much passes again.

A source on the same host has no cable, and is read by everybody at will.
"""

from __future__ import annotations

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.ownership import MAX_RANKS, Ranking
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import Source, SourceId

LATE_CHUNKS = 3
"""Chunks that a spring could have sent to us until what a fellow should have is late."""


class Sharing:
    """The share of one pull."""

    def __init__(
        self, own: SourceId, sources: SourceTable, ledger: Ledger, config: PullConfig
    ) -> None:
        self._own = own
        self._sources = sources
        self._ledger = ledger
        self._config = config
        self._ranking: Ranking | None = None
        self._fellows: frozenset[SourceId] = frozenset()
        self._ranks = [0] * MAX_RANKS
        self._moved_at = float("-inf")
        """When something was last seen to go on."""
        self._waiting = False

    def moved(self, now: float) -> None:
        """Something of what is left to fellows came, or one of them has more than before."""
        self._moved_at = now

    def withheld(self, now: float) -> int:
        """The chunks that no spring is to be asked for now."""
        self._waiting = False
        springs = self._springs()
        fellows: frozenset[SourceId] = frozenset().union(*(s.serving for s in springs))
        needed = self._ledger.needed
        fresh = needed & ~self._among_fellows()
        if not springs or not fellows or not fresh:
            return 0
        tolerated = len(springs) - 1 + self._times_late(now, springs)
        ranks = self._ranks_among(fellows)
        if tolerated >= MAX_RANKS:
            return 0
        self._waiting = True
        return needed & ~fresh | ranks[tolerated]

    def next_wakeup(self, now: float) -> float | None:
        """When one more chunk becomes late."""
        if not self._waiting:
            return None
        patience = self._patience(self._springs())
        return self._moved_at + patience * (self._times_late(now, self._springs()) + 1)

    def _springs(self) -> list[Source]:
        return [s for s in self._sources.open() if s.shared]

    def _among_fellows(self) -> int:
        have = 0
        for source in self._sources.answering():
            if not source.spring and not source.failing:
                have |= source.have
        return have

    def _ranks_among(self, fellows: frozenset[SourceId]) -> list[int]:
        if fellows != self._fellows or self._ranking is None:
            self._ranking = self._ranking or Ranking(self._own, self._ledger.manifest.num_chunks)
            self._fellows, self._ranks = fellows, self._ranking.ranks(sorted(fellows))
        return self._ranks

    def _patience(self, springs: list[Source]) -> float:
        chunk_times = [1 / s.pace for s in springs if s.pace]
        return max(self._config.late_after, LATE_CHUNKS * max(chunk_times, default=0.0))

    def _times_late(self, now: float, springs: list[Source]) -> int:
        if self._moved_at == float("-inf"):
            self._moved_at = now
        return int((now - self._moved_at) / self._patience(springs) + 1e-9)
