"""Many small pieces of another process's memory, read as few long spans.

Rule of this file. It says which vectors a system call is to be given; it reads nothing.

Theory. The kernel looks up and pins every page of every vector that it reads from another
process, so thousands of tensors of a page or less cost twice what one large one costs.
Small tensors that were allocated one after the other lie close together: an allocator's few
bytes are between them. Pieces whose gap is below a page are joined into one *span*, which is
one vector: as every page of a span holds a byte of a piece, no page is touched that was not
there already. The reader's own vectors, which cost next to nothing, take the span apart
again: the pieces go where they belong, the gaps into a sink.

Offsets count pieces only; *stretched* offsets count the gaps within spans as well.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_right
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from tensorhub_p2p.transfer.memory import Extents

MAX_GAP = mmap.PAGESIZE - 1
"""Bytes between two pieces of one span, at most: less than a page."""


class Vectors(NamedTuple):
    """What one read is given: as many bytes on both sides, `gaps` of them for the sink."""

    remote: array[int]
    local: array[int]
    length: int
    """Bytes of pieces."""
    gaps: int


class Spans:
    """The pieces of `extents`, and the spans that they form."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        addresses, lengths = extents.addresses, extents.lengths
        between = list(map(sub, addresses[1:], map(add, addresses, lengths)))
        self._gaps = array("Q", [gap if 0 <= gap <= MAX_GAP else 0 for gap in between] + [0])
        """By piece: the gap that follows it within its span."""
        widths = array("Q", map(add, lengths, self._gaps))
        self._stretched = array("Q", accumulate(widths[:-1], initial=0))
        """By piece: where it begins, stretched."""
        self._spans = Extents(zip(addresses, widths, strict=True))

    def vectors(self, start: int, length: int, limit: int, target: int, sink: int) -> Vectors:
        """Read the pieces of [start, start + length), one after the other, to `target`.

        At most `limit` pieces, each of which takes two vectors here; then only the
        beginning of the range is read. `sink` is the address of a page for the gaps.
        """
        extents = self._extents
        starts = extents.starts
        first = bisect_right(starts, start) - 1
        last = min(bisect_right(starts, start + length - 1, lo=first), first + limit)
        end = min(start + length, starts[last - 1] + extents.lengths[last - 1])
        began = self._stretched[first] + start - starts[first]
        ended = self._stretched[last - 1] + end - starts[last - 1]
        remote = self._spans.pieces(began, ended - began)
        gaps = (ended - began) - (end - start)
        if not gaps:
            return Vectors(remote, array("Q", [target, end - start]), end - start, 0)
        local = array("Q", bytes(32 * (last - first)))
        local[0::4] = array("Q", map((target - start).__add__, starts[first:last]))
        local[1::4] = extents.lengths[first:last]
        local[2::4] = array("Q", [sink]) * (last - first)
        local[3::4] = self._gaps[first:last]
        local[0] = target
        local[1] -= start - starts[first]
        local[-3] -= starts[last - 1] + extents.lengths[last - 1] - end
        return Vectors(remote, local[:-2], end - start, gaps)
