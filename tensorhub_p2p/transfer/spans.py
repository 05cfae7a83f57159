"""Many small pieces of another process's memory, read as few long spans.

Rule of this file. It says which vectors a system call is to be given; it reads nothing.

Theory. The kernel looks up and pins every page of every vector that it reads from another
process, so thousands of tensors of a page or less cost twice what one large one costs.
Small tensors that were allocated one after the other lie close together: an allocator's few
bytes are between them. Pieces whose gap is below a page are joined into one *span*, which is
one vector: as every page of a span holds a byte of a piece, no page is touched that was not
there already. The reader's own vectors, which cost little, take the span apart again: the
pieces go where they belong, the gaps into a sink.

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
    """What one read is given: as many bytes on both sides."""

    remote: array[int]
    local: array[int]
    num_bytes: int
    """Those of the pieces, and of the gaps between them."""


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

    def reach(self, start: int, length: int, limit: int) -> int:
        """How many of the bytes [start, start + length) the first `limit` pieces hold."""
        starts = self._extents.starts
        last = bisect_right(starts, start) - 1 + limit
        return length if last >= len(starts) else min(length, starts[last] - start)

    def vectors(self, start: int, length: int, local: array[int], sink: int) -> Vectors:
        """Read the pieces of [start, start + length) into the vectors `local`, of that length.

        `sink` is the address of a page for the gaps. Of at most n pieces on either side there
        are at most 3 n vectors.
        """
        starts = self._extents.starts
        first = bisect_right(starts, start) - 1
        last = bisect_right(starts, start + length - 1, lo=first) - 1
        began = self._stretched[first] + start - starts[first]
        ended = self._stretched[last] + start + length - starts[last]
        remote = self._spans.pieces(began, ended - began)
        if ended - began > length:
            sizes = array("Q", self._extents.lengths[first : last + 1])
            sizes[0] -= start - starts[first]
            sizes[-1] = start + length - max(start, starts[last])
            local = _with_gaps(local, sizes, self._gaps[first:last], sink)
        return Vectors(remote, local, ended - began)


def _with_gaps(local: array[int], sizes: array[int], gaps: array[int], sink: int) -> array[int]:
    """`local`, and after each of these sizes a gap, which goes into the sink."""
    if local[1::2] == sizes:
        addresses = local[0::2]
    elif len(local) == 2:
        addresses = array("Q", accumulate(sizes[:-1], initial=local[0]))
    else:
        return _merged(local, sizes, gaps, sink)
    vectors = array("Q", bytes(32 * len(sizes) - 16))
    vectors[0::4], vectors[1::4] = addresses, sizes
    vectors[2::4], vectors[3::4] = array("Q", [sink]) * len(gaps), gaps
    return vectors


def _merged(local: array[int], sizes: array[int], gaps: array[int], sink: int) -> array[int]:
    """The same where the pieces of the two sides end in different places."""
    vectors = array("Q")
    at, used = 0, 0
    for size, gap in zip(sizes, [*gaps, 0], strict=True):
        while size:
            part = min(size, local[at + 1] - used)
            vectors.extend((local[at] + used, part))
            size, used = size - part, used + part
            if used == local[at + 1]:
                at, used = at + 2, 0
        if gap:
            vectors.extend((sink, gap))
    return vectors
