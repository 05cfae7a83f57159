"""Putting together a publisher's layout that came in pages.

Rule of this file. Pages must come in order; anything else is ignored, and asked for
again by whoever drives this. The result counts only if it hashes to the digest that the
source announced: then it doesn't matter who sent which page.
"""

from __future__ import annotations

from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.layout import MAX_TENSORS, Layout, TensorSpec
from tensorhub_p2p.protocol.messages import LayoutPage


class LayoutPages:
    """Collects the layout whose digest is `digest`."""

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self._tensors: list[TensorSpec] = []

    @property
    def next(self) -> int:
        """The first tensor that is still missing."""
        return len(self._tensors)

    def add(self, page: LayoutPage) -> Layout | None:
        """The whole layout once this was the last page.

        Raises LayoutMismatch if the pages together are not what the digest announced (all
        of them are forgotten then), or can't be a layout at all.
        """
        if page.first != self.next or not page.tensors or page.total > MAX_TENSORS:
            return None
        self._tensors.extend(page.tensors)
        if self.next < page.total:
            return None
        tensors, self._tensors = self._tensors, []
        layout = Layout(tensors)
        if layout.digest != self.digest:
            raise LayoutMismatch("the pages of the layout don't match its digest")
        return layout
