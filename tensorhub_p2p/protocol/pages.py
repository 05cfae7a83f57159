"""Finding out which layout a publication has, from what its holders say.

Rule of this file. It judges offers and pages, and asks nobody. The first sound offer
settles the digest of the layout, and so the grid of chunks. If that is our own layout's,
it is found; else it comes in pages, in order, from whoever is asked (anything else is
ignored, and asked for again). Pages count only if together they hash to the digest and
have the size that was announced: then it doesn't matter who sent which.
"""

from __future__ import annotations

from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.layout import (
    MAX_BYTES,
    MAX_TENSORS,
    Layout,
    TensorSpec,
    chunk_bytes_for,
)
from tensorhub_p2p.protocol.messages import LayoutPage, PullOffer


class LayoutAgreement:
    """The publication's layout: unknown, settled (digest and grid), then found."""

    def __init__(self, own: Layout) -> None:
        self.own = own
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
        if offer.layout == self.own.digest:
            sound = sound and num_bytes == self.own.num_bytes
        elif offer.layout == self.digest:
            sound = sound and num_chunks == self.num_chunks
        if not sound:
            raise ValueError(f"{num_bytes} bytes in chunks of {chunk_bytes}")
        return num_chunks

    def settle(self, offer: PullOffer) -> None:
        """Go by this offer's layout from now on; its `grid` is sound."""
        self.digest, self.num_chunks = offer.layout, self.grid(offer)
        if offer.layout == self.own.digest:
            self.found = self.own

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
