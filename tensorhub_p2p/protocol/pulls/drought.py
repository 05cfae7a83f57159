"""When a pull gives up, and what it says then.

Rule of this file. It watches what is to be had and gives the verdict; it changes nothing.

A chunk is *dry* while nobody who answers has it (a source whose reads fail time and again
counts as having nothing); before the layout is known the whole is, while nobody answers, and
while those who answered send no more of its pages.
Once some chunk was dry for `unavailable_after` seconds without a break, the verdict is

    Corrupt   wrong bytes of a dry chunk came before: from whom
    Starved   nobody has these chunks (at most MAX_NAMED are named), or nobody answers

A dry chunk is *lost* when the origin is dead and nobody can have it any more: its digest isn't
known here, and all holders that are listed have said since the death what they have. Bytes without
a digest are nobody's, so `unsealed_after` seconds do from then on: time to hear of a holder that
was new.

The set of chunks that are watched only shrinks while it lasts: it holds those that were
dry all the time. Time in which this process itself did not run does not count (`postpone`).
"""

from __future__ import annotations

import random

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.pulls.crossing import Crossing
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.pages import LayoutAgreement
from tensorhub_p2p.protocol.pulls.picking import some_of
from tensorhub_p2p.protocol.pulls.pull_events import Corrupt, Starved
from tensorhub_p2p.protocol.pulls.source_table import SourceTable

MAX_NAMED = 16
"""Chunks named in `Starved`."""


class Drought:
    """What has been to be had nowhere, and since when."""

    def __init__(
        self,
        agreement: LayoutAgreement,
        sources: SourceTable,
        ledger: Ledger,
        crossing: Crossing,
        config: PullConfig,
        rng: random.Random,
    ) -> None:
        self._agreement = agreement
        self._sources = sources
        self._ledger = ledger
        self._crossing = crossing
        self._config = config
        self._rng = rng
        self._dry = 0
        self._since: float | None = None
        self._orphaned_at: float | None = None
        """When the origin was first seen to be dead."""
        self._lost_since: float | None = None
        """Since when some of the dry chunks have been lost."""
        self._pages: int | None = None
        """How far the layout's pages had come."""

    def check(self, now: float) -> Event | None:
        """The verdict, once the same chunk was to be had nowhere for too long."""
        dry = self._unavailable()
        still = self._dry & dry
        if not still:
            self._dry, self._since = dry, now if dry else None
            self._lost_since = None
            return None
        self._dry = still
        self._note_loss(now)
        due = self.next_wakeup()
        return None if due is None or now < due else self._verdict(still)

    def next_wakeup(self) -> float | None:
        if self._since is None:
            return None
        due = self._since + self._config.unavailable_after
        if self._lost_since is None:
            return due
        return min(due, self._lost_since + self._config.unsealed_after)

    def postpone(self, late: float) -> None:
        """For so long nobody can be blamed for anything."""
        if self._since is not None:
            self._since += late
        if self._lost_since is not None:
            self._lost_since += late

    def forget(self) -> None:
        """The layout was found: from now on it is about chunks."""
        self._dry, self._since, self._lost_since = 0, None, None

    def _unavailable(self) -> int:
        """Chunks that nobody who answers has; a lone bit for the unknown whole."""
        answering = self._sources.answering()
        if self._agreement.found is None:
            pages, self._pages = self._pages, self._agreement.next
            return 0 if answering and pages != self._pages else 1
        reachable = 0
        for source in answering:
            if not source.failing:
                reachable |= source.have
        return self._ledger.needed & ~reachable & ~self._crossing.expected()

    def _note_loss(self, now: float) -> None:
        if not self._sources.origin_is_dead():
            self._orphaned_at = self._lost_since = None
            return
        if self._orphaned_at is None:
            self._orphaned_at = now
        if not self._lost(self._dry):
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now

    def _lost(self, dry: int) -> int:
        """Of the dry chunks, those that nobody can have any more."""
        everything = (1 << self._ledger.manifest.num_chunks) - 1
        orphaned_at = self._orphaned_at
        if orphaned_at is None or not self._sources.all_have_spoken(orphaned_at, everything):
            return 0
        if self._agreement.found is None:
            return 0 if self._sources.answering() else dry  # they may still send its pages
        return dry & ~self._ledger.manifest.known.bits

    def _verdict(self, dry: int) -> Event:
        lost = self._lost(dry)
        if self._agreement.found is None:
            return Starved((), self._sources.facts(), lost=bool(lost))
        if lost:
            named = some_of(lost, MAX_NAMED, self._rng)
            return Starved(tuple(sorted(named)), self._sources.facts(), lost=True)
        for chunk in ChunkSet(self._ledger.manifest.num_chunks, dry):
            liars = tuple(s.id for s in self._sources if s.bad >> chunk & 1)
            if liars:
                return Corrupt(chunk, liars)
        chunks = some_of(dry, MAX_NAMED, self._rng)
        return Starved(tuple(sorted(chunks)), self._sources.facts())
