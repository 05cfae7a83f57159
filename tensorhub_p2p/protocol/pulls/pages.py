"""Finding out which layout a publication has, from what its holders say.

Rule of this file. `LayoutAgreement` judges offers and pages, and asks nobody;
`PageRequests` asks for the pages that are missing, and decides nothing else of a source.

The first sound offer settles the digest of the layout, and so the grid of chunks. If that
is our own layout's, it is found; else, or if we have none yet, it comes in pages, in
order, from whoever is asked (anything else is ignored, and asked for again). Pages count
only if together they hash to the digest and have the size that was announced: then it
doesn't matter who sent which.

A layout whose pages came once is remembered (`KnownLayouts`): the versions of a model mostly have
one layout, so it crosses once for each peer, not for each version.

One page is asked for at a time, from one source that answers, the nearest; from another
one if it stays silent for a retry interval.
"""

from __future__ import annotations

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.layout import (
    MAX_BYTES,
    MAX_TENSORS,
    Layout,
    TensorSpec,
    chunk_bytes_for,
)
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import LayoutPage, LayoutRequest, PullOffer
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import ANSWERED, Source

MAX_KNOWN = 64
MAX_KNOWN_TENSORS = 1 << 20
"""Layouts that are remembered, and tensors in all of them together."""


class KnownLayouts:
    """Layouts that came from others, by digest; the oldest are forgotten."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, Layout] = {}

    def get(self, digest: bytes) -> Layout | None:
        return self._layouts.get(digest)

    def add(self, layout: Layout) -> None:
        """Replaces the whole table, so that pulls of other threads may look meanwhile."""
        kept, room = {layout.digest: layout}, MAX_KNOWN_TENSORS - len(layout.tensors)
        for digest, known in self._layouts.items():
            room -= len(known.tensors)
            if len(kept) < MAX_KNOWN and room >= 0:
                kept.setdefault(digest, known)
        self._layouts = kept


class LayoutAgreement:
    """The publication's layout: unknown, settled (digest and grid), then found.

    `own` is that of the memory to pull into; None if that is made once the layout is found.
    `known` are those of others.
    """

    def __init__(self, own: Layout | None, known: KnownLayouts | None = None) -> None:
        self.own = own
        self._known = known if known is not None else KnownLayouts()
        self.found: Layout | None = None
        self.digest: bytes | None = None
        """Of the layout that is settled; None before."""
        self.num_chunks = 0
        self._tensors: list[TensorSpec] = []

    @property
    def settled(self) -> bool:
        return self.digest is not None

    @property
    def next(self) -> int | None:
        """The first tensor that is missing; None if no page is."""
        return None if self.found is not None or not self.settled else len(self._tensors)

    def grid(self, offer: PullOffer) -> int:
        """How many chunks the offer is about; ValueError if its sizes contradict each other."""
        num_bytes, chunk_bytes = offer.num_bytes, offer.chunk_bytes
        sound = num_bytes <= MAX_BYTES and chunk_bytes == chunk_bytes_for(num_bytes)
        num_chunks = -(-num_bytes // chunk_bytes) if sound else -1
        recalled = self._recall(offer.layout)
        if recalled is not None:
            sound = sound and num_bytes == recalled.num_bytes
        elif offer.layout == self.digest:
            sound = sound and num_chunks == self.num_chunks
        if not sound:
            raise ValueError(f"{num_bytes} bytes in chunks of {chunk_bytes}")
        return num_chunks

    def _recall(self, digest: bytes) -> Layout | None:
        if self.own is not None and digest == self.own.digest:
            return self.own
        return self._known.get(digest)

    def settle(self, offer: PullOffer) -> None:
        """Go by this offer's layout from now on; its `grid` is sound."""
        self.digest, self.num_chunks = offer.layout, self.grid(offer)
        self.found = self._recall(offer.layout)

    def add(self, page: LayoutPage) -> bool:
        """Take a page; whether it was the next one. The last one makes `found`.

        Raises LayoutMismatch if all pages together are not what was announced; then
        nothing is settled any more.
        """
        if page.first != self.next or not page.tensors or page.total > MAX_TENSORS:
            return False
        self._tensors.extend(page.tensors)
        if len(self._tensors) >= page.total:
            self._assemble()
        return True

    def _assemble(self) -> None:
        announced, num_chunks = self.digest, self.num_chunks
        tensors, self._tensors = self._tensors, []
        self.digest, self.num_chunks = None, 0
        layout = Layout(tensors)
        if layout.digest != announced or layout.num_chunks != num_chunks:
            raise LayoutMismatch("the pages of its layout are not what it announced")
        self.digest, self.num_chunks, self.found = announced, num_chunks, layout
        self._known.add(layout)


class PageRequests:
    """Asks for the layout's pages until it is found."""

    def __init__(
        self,
        pull: str,
        agreement: LayoutAgreement,
        sources: SourceTable,
        config: PullConfig,
        outbox: Outbox,
    ) -> None:
        self._pull = pull
        self._agreement = agreement
        self._sources = sources
        self._config = config
        self._outbox = outbox
        self._asked: Source | None = None
        """Who was asked for the next page, last at `_asked_at`."""
        self._asked_at = 0.0

    def tick(self, now: float) -> None:
        """Ask one source that answers for the next page; another one if it stays silent."""
        if self._agreement.next is None:
            return
        asked = self._asked
        patient = now < self._asked_at + self._config.retry_interval
        if asked is not None and asked.state in ANSWERED and patient:
            return
        answering = self._sources.answering()
        others = [s for s in answering if s is not asked] or answering
        if others:
            self._request(now, min(others, key=lambda s: s.locality))
        else:
            self._asked = None

    def next_wakeup(self) -> float | None:
        return self._asked_at + self._config.retry_interval if self._asked else None

    def take(self, now: float, source: Source, page: LayoutPage) -> None:
        """A page came; LayoutMismatch as `LayoutAgreement.add` raises it."""
        was_next = self._agreement.add(page)
        if was_next and self._agreement.found is None:
            self._request(now, source)

    def stop(self) -> None:
        """The layout is found, or no longer settled: nobody is asked any more."""
        self._asked = None

    def _request(self, now: float, source: Source) -> None:
        first = self._agreement.next
        if first is not None:
            self._asked, self._asked_at = source, now
            self._outbox.send(source.id.peer, LayoutRequest(self._pull, source.id.slot, first))
