"""What a puller leaves to its fellows: of a source that many read, each takes its own part.

Rule of this file. It says which chunks are not to be asked of whole sources now; it asks
nobody, and picks no chunk.

Theory of operation. A *spring* is a source that had everything when it was first heard of.
Its cable is what a whole swarm waits for, so each chunk should leave it once: as many times
as there are springs, to be exact. A spring says whom it serves besides (`others`); these and
we are *fellows*. A chunk that none of our sources but springs has is *fresh*. Fresh chunks we
take from springs if they are in our even share (ownership.py) among the fellows. All others we
wait for, as fellows have or will have them, and take springs' time for nothing else while
something is fresh. Shares are even as each fellow passes its own on to all others: one with a
larger share would be what everybody waits for.

Nobody waits for ever, nor for a slow fellow. What comes is counted over stretches of
`late_after` seconds, or of as long as a spring needs for LATE_CHUNKS chunks. After a stretch in
which less than half as much came as in the best ones before, fellows are *late*: fresh chunks
may be taken by one more in order (ownership.py), once there is nothing left of what is taken
anyway; and by one more after each further poor stretch, in the end by anybody. After STEADY good
ones it is one less. The best fades, so that a network which has become slow doesn't look like
slow fellows for long.

A source on the same host has no cable, and is read by everybody at will.
"""

from __future__ import annotations

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.ownership import Ranking, even_share
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import Source, SourceId

LATE_CHUNKS = 3
"""Chunks that a spring could send us in a stretch, at least."""
STEADY = 4
"""Good stretches in a row after which fellows count as less late."""
FADING = 0.8
"""What is left of the best rate after each stretch."""


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
        self._divided: tuple[frozenset[SourceId], int] = (frozenset(), 0)
        self._left: list[int] = []
        """What is left to fellows; to those that are late by one place less; and so on."""
        self._late = 0
        """By how many places in order fellows are late."""
        self._since: float | None = None
        """When the present stretch began."""
        self._came = 0
        """Chunks that came in it."""
        self._best = 0.0
        """Chunks a second in good stretches."""
        self._good = 0
        """Good stretches in a row."""
        self._until: float | None = None
        """When the present stretch ends, if there is anything to wait for."""

    def came(self) -> None:
        """A chunk came, from wherever."""
        self._came += 1

    def withheld(self, now: float) -> list[int]:
        """Sets of chunks that no spring is to be asked for now: the first, if it leaves any.

        Else the second leaves more, and so on; empty if everything may be asked for.
        """
        self._until = None
        springs = self._springs()
        fellows: frozenset[SourceId] = frozenset().union(*(s.serving for s in springs))
        needed = self._ledger.needed
        fresh = needed & ~self._among_fellows()
        if not springs or not fellows or not fresh:
            return []
        self._divide(fellows, len(springs))
        self._judge(now, springs)
        return [needed & ~fresh | left for left in self._left[: self._late + 1]]

    def begin_anew(self) -> None:
        """The present stretch is worth nothing: we did not run meanwhile."""
        self._since = None

    def next_wakeup(self) -> float | None:
        """When it shows whether fellows are late."""
        return self._until

    def _judge(self, now: float, springs: list[Source]) -> None:
        """At the end of a stretch: was it a poor one?"""
        patience = self._patience(springs)
        if self._since is None:
            self._since, self._came = now, 0
        elif now >= self._since + patience:
            rate = self._came / (now - self._since)
            self._good = self._good + 1 if rate * 2 >= self._best else 0
            if not self._good:
                self._late = min(self._late + 1, len(self._left) - 1)
            elif self._good % STEADY == 0:
                self._late = max(self._late - 1, 0)
            self._best = max(rate, self._best * FADING)
            self._since, self._came = now, 0
        self._until = self._since + patience

    def _springs(self) -> list[Source]:
        return [s for s in self._sources.open() if s.shared]

    def _among_fellows(self) -> int:
        have = 0
        for source in self._sources.answering():
            if not source.spring and not source.failing:
                have |= source.have
        return have

    def _divide(self, fellows: frozenset[SourceId], copies: int) -> None:
        """Find what is left to fellows: first by equal shares, then by places in order."""
        if (fellows, copies) == self._divided:
            return
        num_chunks = self._ledger.manifest.num_chunks
        self._divided = (fellows, copies)
        self._ranking = self._ranking or Ranking(self._own, num_chunks)
        others = ((1 << num_chunks) - 1) & ~even_share(self._own, fellows, num_chunks, copies)
        ranks = self._ranking.ranks(sorted(fellows))
        self._left = [others, *(others & rank for rank in ranks[copies:]), 0]

    def _patience(self, springs: list[Source]) -> float:
        chunk_times = [1 / s.pace for s in springs if s.pace]
        return max(self._config.late_after, LATE_CHUNKS * max(chunk_times, default=0.0))
