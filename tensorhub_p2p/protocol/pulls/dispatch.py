"""Handing out fetches: what is in flight, what stalls, and how much more may go.

Rule of this file. It knows how many chunks may be under way and which are; which chunk
and whom to prefer is picking.py's choice. It decides nothing about sources. What is left to
other pullers sharing.py says, what may cross from other zones crossing.py, what is broken off
near the end endgame.py.

    missing --Fetch(source, chunk, digest)--> in flight --landed--> held or missing (ledger)

A chunk is fetched only once its digest is known, from one source at a time; different
chunks come from several sources at once. A chunk in flight belongs to its reader until
that reports. One that takes longer than a quarter of `source_timeout` is *stalled*: it
stays in flight, but no longer keeps another one from going.

Bounds: `in_flight_limit` chunks in flight that are not stalled, shared by the open sources;
`MIN_IN_FLIGHT` of them every source may have. Besides, `SHARE_IN_FLIGHT` of our own share at
each source that many read; and the only source that there is may have more (run_ahead.py).
"""

from __future__ import annotations

import random

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.pulls.crossing import Crossing
from tensorhub_p2p.protocol.pulls.endgame import Endgame
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.picking import (
    any_of,
    at_hand_of,
    best_source,
    rarest,
    rarity_levels,
)
from tensorhub_p2p.protocol.pulls.pull_events import Fetch
from tensorhub_p2p.protocol.pulls.run_ahead import run_ahead
from tensorhub_p2p.protocol.pulls.sharing import Sharing
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import Source, SourceId

SHARE_IN_FLIGHT = 2
"""Chunks of our own share that are under way at a source that others read too."""
NO_HURRY = 1 << 30
"""More chunks than a pull has: none is left to a faster source."""
MIN_IN_FLIGHT = 2
"""Chunks that one source may always have in flight."""


def in_flight_limit(config: PullConfig) -> int:
    """Chunks in flight altogether: at least one in work and one queued for each reader."""
    return max(config.chunks_in_flight, 2 * config.reader_threads)


class Dispatch:
    """The fetches of one pull."""

    def __init__(
        self,
        sources: SourceTable,
        ledger: Ledger,
        crossing: Crossing,
        config: PullConfig,
        rng: random.Random,
        outbox: Outbox,
        sharing: Sharing,
    ) -> None:
        self._sharing = sharing
        self._endgame = Endgame(ledger, config, outbox)
        self._sources = sources
        self._ledger = ledger
        self._crossing = crossing
        self._config = config
        self._rng = rng
        self._outbox = outbox

    def hand_out(self, now: float) -> None:
        """Hand out fetches as long as there are readers and chunks for them."""
        in_flight = in_flight_limit(self._config)
        in_flight += run_ahead(self._sources, in_flight, self._config)
        withheld = self._sharing.withheld(now)
        sources = self._sources.open()
        springs, at_hand = [s for s in sources if s.shared], at_hand_of(sources)
        for left in withheld:
            self._own_share(now, springs, left | at_hand)
        flying = sum(
            now < self._stalls_at(asked)
            for source in self._sources
            for asked in source.in_flight.values()
            if not (withheld and source.shared)
        )
        others = [s for s in sources if not (withheld and s.shared)]
        self._spread(now, others, in_flight, in_flight - flying)
        left = withheld[-1] if withheld else 0
        self._endgame.judge(now, sources, left, self._crossing.allowed(now))

    def _spread(self, now: float, sources: list[Source], in_flight: int, room: int) -> None:
        """Hand out `room` more fetches, from near and fast sources before others.

        The sources share `in_flight` between them.
        """
        ledger = self._ledger
        if room <= 0 or not sources or not ledger.wanted:
            return
        limit = max(MIN_IN_FLIGHT, in_flight // len(sources))
        levels = rarity_levels(s.have for s in self._sources.answering())
        num_needed = ledger.needed.bit_count()
        across = self._crossing.allowed(now)
        while room > 0:
            choice = best_source(sources, ledger.wanted, across, num_needed, limit, self._rng)
            if choice is None:
                return
            source, among = choice
            first = self._crossing.first(among) if source.far else None
            chunk = rarest(levels, among, self._rng) if first is None else first
            self._fetch(now, source, chunk)
            room -= 1

    def _own_share(self, now: float, springs: list[Source], withheld: int) -> None:
        """Keep asking springs for what is left to us, whatever comes from fellows meanwhile."""
        ledger = self._ledger
        while True:
            wanted = ledger.wanted & ~withheld
            choice = best_source(springs, wanted, 0, NO_HURRY, SHARE_IN_FLIGHT, self._rng)
            if choice is None:
                return
            source, among = choice
            self._fetch(now, source, any_of(among, self._rng))

    def _fetch(self, now: float, source: Source, chunk: int) -> None:
        source.in_flight[chunk] = now
        self._ledger.flying |= 1 << chunk
        self._outbox.emit(Fetch(source.id, chunk, self._ledger.manifest[chunk]))

    def landed(self, source: SourceId, chunk: int) -> tuple[Source, float] | None:
        """A reader is through with the chunk: (its source, when it was asked for)."""
        at = self._sources.get(source)
        asked = None if at is None else at.in_flight.pop(chunk, None)
        if at is None or asked is None:
            return None
        self._ledger.flying &= ~(1 << chunk)
        return at, asked

    def across(self) -> int:
        """The chunks that are in flight from other zones."""
        chunks = 0
        for source in self._sources:
            if source.far:
                for chunk in source.in_flight:
                    chunks |= 1 << chunk
        return chunks

    def _stalls_at(self, asked: float) -> float:
        """From then on a chunk in flight no longer keeps others from being asked for."""
        return asked + self._config.source_timeout / 4

    def next_wakeup(self, after: float) -> float | None:
        """When something may be handed out, or taken back, though nothing has come."""
        return earliest(
            self._next_stall(after), self._sharing.next_wakeup(), self._endgame.next_wakeup()
        )

    def _next_stall(self, after: float) -> float | None:
        """When the next chunk in flight becomes stalled, so that another one may go."""
        stalls = [
            self._stalls_at(asked)
            for source in self._sources
            for asked in source.in_flight.values()
        ]
        return earliest(*(at for at in stalls if at > after))
