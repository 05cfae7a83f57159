"""Where a shard's bytes are: from what the user registers to addresses in this process.

Rule of this file. It turns a range of a layout into the pieces of memory behind it; it
never copies a byte. Which tensors there are, and which can be moved at all, registering.py
says.

Theory. A range of a layout is scattered over tensors. `Extents` is that map, flattened:
neighbours in memory are joined, and any range of it becomes an iovec, an `array('Q')`
of address, length, address, length …, which the system calls take as it is. A `Region`
is a layout plus the extents of one process, and keeps the memory behind it alive.
"""

from __future__ import annotations

import ctypes
import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import attrgetter
from typing import Any

from tensorhub_p2p.errors import LayoutMismatch, StateError
from tensorhub_p2p.protocol.layout import MAX_DIFFERENCES, Layout
from tensorhub_p2p.transfer.footprint import Footprint, row_major
from tensorhub_p2p.transfer.registering import (
    MAX_PIECES,
    Found,
    find_all,
    note_written,
    whom_to_tell,
)
from tensorhub_p2p.transfer.watching import Watch

IOV_MAX = 1024
"""Vectors that one system call takes (Linux)."""

# All of the process's address space as one object: a slice of it is a view of the memory
# there, for a tenth of what making a ctypes array for each piece costs.
_SPACE = memoryview((ctypes.c_char * (1 << 62)).from_address(0)).cast("B")


def view(address: int, length: int) -> memoryview:
    """Raw memory as a writable buffer. The caller keeps what lies there alive."""
    return _SPACE[address : address + length]


class Extents:
    """A contiguous virtual range as the pieces of memory that it is scattered over."""

    __slots__ = ("addresses", "lengths", "num_bytes", "starts")

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        """`pieces` are (address, length) in order; neighbours in memory are joined."""
        self.starts = array("Q")
        self.addresses = array("Q")
        self.lengths = array("Q")
        self.num_bytes = 0
        end = -1
        for address, length in pieces:
            if not length:
                continue
            if address == end:
                self.lengths[-1] += length
            else:
                self.starts.append(self.num_bytes)
                self.addresses.append(address)
                self.lengths.append(length)
            self.num_bytes += length
            end = address + length

    @classmethod
    def of_table(cls, addresses: array[int], lengths: array[int]) -> Extents:
        """The same from two columns, as another process's extents are laid out."""
        self = cls(())
        ends = array("Q", accumulate(lengths))
        self.addresses, self.lengths = addresses, lengths
        self.starts = array("Q", [0]) + ends[:-1] if ends else ends
        self.num_bytes = ends[-1] if ends else 0
        return self

    def __len__(self) -> int:
        """How many pieces."""
        return len(self.starts)

    def pieces(self, start: int, length: int, limit: int = sys.maxsize) -> array[int]:
        """The memory behind [start, start + length): address, length, address, length …

        At most `limit` pieces: then they cover only the beginning of the range.
        IndexError if the range isn't within this one.
        """
        if start < 0 or length < 0 or start + length > self.num_bytes:
            raise IndexError(f"bytes {start} to {start + length} of {self.num_bytes}")
        if not length:
            return array("Q")
        first = bisect_right(self.starts, start) - 1
        last = bisect_right(self.starts, start + length - 1, lo=first)
        cut = last - first > limit
        if cut:
            last = first + limit
        iov = array("Q", bytes(16 * (last - first)))
        iov[0::2] = self.addresses[first:last]
        iov[1::2] = self.lengths[first:last]
        if not cut:
            iov[-1] -= self.starts[last - 1] + self.lengths[last - 1] - (start + length)
        inside = start - self.starts[first]
        iov[0] += inside
        iov[1] -= inside
        return iov


def address_of(iov: array[int]) -> int:
    """Where an iovec itself lies, for the system calls."""
    return iov.buffer_info()[0]


class Region:
    """The memory of one shard in this process, as the virtual range of its layout.

    It keeps the memory alive, not the promise that a tensor still uses it:
    `check_unmoved` does that.
    """

    __slots__ = (
        "__weakref__",
        "_arranged",
        "_found",
        "_read_only",
        "_roots",
        "_told",
        "_watch",
        "extents",
        "layout",
    )

    def __init__(self, layout: Layout, found: list[Found]) -> None:
        """`found[i]` is the memory of `layout.tensors[i]`. Use `Region.of` instead."""
        self.layout = layout
        self._found = found
        self._read_only = next((f.spec.name for f in found if not f.writable), None)
        """The name of a tensor that can't be written."""
        self._roots: list[tuple[int, int]] | None = None
        """(start in the range, index) of each block's root; None until somebody asks."""
        self._watch: Watch | None = None
        self._told: list[Any] | None = None
        self._arranged: Region | None = None
        """The same memory in the order that was last asked for."""
        self.extents = Extents(
            piece
            for spec, tensor in zip(layout.tensors, found, strict=True)
            if spec.alias_of is None
            for piece in tensor.pieces()
        )

    @classmethod
    def of(cls, source: object) -> Region:
        """The region of what a user registers (see `registering.collect`), in that order.

        Raises StateError, which names the tensor, for everything that can't be moved.
        """
        found = find_all(source)
        return cls(Layout(f.spec for f in found), found)

    @classmethod
    def of_buffer(cls, layout: Layout, buffer: Any) -> Region:
        """The region that lies in one writable buffer, in the order of the layout.

        The buffer has `layout.num_bytes` or more. ValueError if it is smaller.
        """
        memory = memoryview(buffer).cast("B")
        if memory.nbytes < layout.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes for {layout!r}")
        first = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if memory.nbytes else 0
        return cls(layout, [_slice(memory, first, layout, i) for i in range(len(layout.tensors))])

    def pieces(self, start: int, length: int, limit: int = sys.maxsize) -> array[int]:
        """See `Extents.pieces`."""
        return self.extents.pieces(start, length, limit)

    def arranged(self, layout: Layout) -> Region:
        """The same memory as the range of `layout`: what it calls x is what is x here.

        Raises LayoutMismatch, with the differences, unless all of it agrees. Where only strides
        differ, the memory is taken in the order of theirs, as long as that doesn't cut it
        into too many pieces.
        """
        if layout.digest == self.layout.digest:
            return self
        if self._arranged is not None and self._arranged.layout.digest == layout.digest:
            return self._arranged
        differences = self.layout.differences(layout)
        if differences:
            raise LayoutMismatch(
                "the registered tensors are not those of the publication:\n  "
                + "\n  ".join(differences)
            )
        found = [self._found[self.layout.index(spec.name)] for spec in layout.tensors]
        self._restride(layout, found)
        self._arranged = Region(layout, found)
        return self._arranged

    def _restride(self, layout: Layout, found: list[Found]) -> None:
        """Put those whose strides are others in `layout` into its order."""
        names = layout.restrided(self.layout)
        if not names:
            return
        for name in names:
            index = layout.index(name)
            found[index] = found[index].in_order_of(layout.tensors[index])
        roots = zip(layout.tensors, found, strict=True)
        pieces = sum(f.footprint.num_runs for spec, f in roots if spec.alias_of is None)
        if pieces > MAX_PIECES:
            raise LayoutMismatch(
                "the registered tensors lie in another order in memory than those of the "
                f"publication, and moving them piece by piece makes {pieces} pieces, more than "
                f"{MAX_PIECES}; register tensors with the publisher's strides, and copy from "
                "them afterwards:\n  " + "\n  ".join(self._strides(layout, names))
            )

    def _strides(self, layout: Layout, names: list[str]) -> list[str]:
        lines = [
            f"{name!r} is {self.layout.tensors[self.layout.index(name)]} here, "
            f"{layout.tensors[layout.index(name)]} there"
            for name in names[:MAX_DIFFERENCES]
        ]
        more = len(names) - MAX_DIFFERENCES
        return [*lines, f"... and {more} more"] if more > 0 else lines

    def check_unmoved(self) -> None:
        """StateError, naming the tensor, if one no longer uses the memory that was registered."""
        if self._watch is None:
            self._watch = Watch(self._found)
        if self._watch.unchanged():
            return
        for found in self._found:
            _check_unmoved(found)

    def check_in_place(self, start: int, length: int) -> None:
        """`check_unmoved` for those that have bytes of [start, start + length), one a block.

        Whoever is about to read registered memory with the CPU asks this first: memory that
        was given back to the system ends the process. It can still be given back in between.
        """
        if self._roots is None:
            indices = (i for i, t in enumerate(self.layout.tensors) if t.alias_of is None)
            self._roots = [(self.layout.block(self.layout.tensors[i].name)[0], i) for i in indices]
        first = bisect_right(self._roots, (start, len(self._found))) - 1
        last = bisect_left(self._roots, (start + length, 0))
        for _, index in self._roots[max(first, 0) : last]:
            _check_unmoved(self._found[index])

    def note_written(self) -> None:
        """The tensors are about to change; see `registering.note_written`."""
        if self._told is None:
            self._told = whom_to_tell(self._found)
        note_written(self._told)

    def check_writable(self) -> None:
        """StateError, naming the tensor, if one lies in read-only memory (a mapped file)."""
        if self._read_only is not None:
            raise StateError(
                f"tensor {self._read_only!r} is read-only memory: it can be published, "
                "but not replicated into; register a copy"
            )


def _check_unmoved(found: Found) -> None:
    if found.moved():
        raise StateError(
            f"tensor {found.spec.name!r} was resized, or points to other memory, since it "
            "was registered: write into registered tensors in place, or unregister() and "
            "register() again"
        )


def _slice(memory: memoryview, first: int, layout: Layout, index: int) -> Found:
    """A tensor's part of a buffer that begins at address `first`."""
    spec, offset = layout.tensors[index], layout.offsets[index]
    part = memory[offset : offset + spec.num_bytes]
    start, length = layout.block(spec.name)
    found = Found(
        spec,
        Footprint(first + offset, spec.num_bytes),
        part,
        address_of=lambda _part: first + offset,
        form_of=attrgetter("nbytes"),
        item=spec.num_bytes // (math.prod(spec.shape) or 1),
        shape=spec.shape,
        stride=spec.stride or row_major(spec.shape),
        holds=part,
        writable=True,
    )
    found.memory = ((first + start, length),)
    return found
