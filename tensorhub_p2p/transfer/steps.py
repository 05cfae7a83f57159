"""What the reads of small pieces are given, remembered from one pull to the next.

Rule of this file. It cuts a range into steps, each for one system call, and remembers them by
what they depend on: where the source's pieces lie, the target, and the range. It reads nothing.

Why. The next version mostly lies where this one does, on both sides. Cutting both sides into
pieces and joining these to vectors takes a good part of the time that their bytes take to be
moved, and holds Python's lock, for which the other readers wait.

Bounds: `MAX_KNOWN_PIECES` pieces in all, of either side, with 16 bytes each; when there are more
everything is forgotten. What belongs to a target goes with it.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tensorhub_p2p.transfer.memory import IOV_MAX, Region
from tensorhub_p2p.transfer.scratch import STEP_BYTES
from tensorhub_p2p.transfer.spans import MAX_GAP, Spans, Vectors

MAX_STEP_PIECES = (IOV_MAX - 1) // 3
"""Pieces of either side in one step, so that its vectors (spans.py) are not too many."""
MAX_KNOWN_PIECES = 1 << 20

_Key = tuple[bytes, int, int]
"""Digest of the source's table, start, length."""


class Step(NamedTuple):
    """One read."""

    vectors: Vectors
    pieces: array[int]
    """Where its bytes are then, in order: address, length, address, length …"""


def _size(step: Step) -> int:
    """Pieces of memory that it names, on all sides."""
    return (len(step.pieces) + len(step.vectors.local) + len(step.vectors.remote)) // 2


class Steps:
    """The steps of one transport. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakKeyDictionary[Region, dict[_Key, list[Step]]] = WeakKeyDictionary()
        self._num_pieces = 0
        """That were remembered since everything was forgotten."""
        self._sink = (ctypes.c_char * (MAX_GAP + 1))()
        """What lies between pieces goes there; nobody reads it."""

    def known(self, table: bytes, into: Region, start: int, length: int) -> list[Step] | None:
        """How [start, start + length) was read into the region before, if that is remembered."""
        with self._lock:
            return self._known.get(into, {}).get((table, start, length))

    def cut(
        self, table: bytes, spans: Spans, into: Region, start: int, length: int
    ) -> Iterator[Step]:
        """How to read [start, start + length) into the region; `table` is the digest of `spans`.

        They hold as long as this object and the region live. Whoever takes all of them has them
        remembered.
        """
        key = (table, start, length)
        steps: list[Step] = []
        num_pieces = 0
        for step in self._cut(spans, into, start, length):
            num_pieces += _size(step)
            if num_pieces <= MAX_KNOWN_PIECES:
                steps.append(step)
            yield step
        if num_pieces <= MAX_KNOWN_PIECES:
            self._remember(into, key, steps, num_pieces)

    def _cut(self, spans: Spans, into: Region, start: int, length: int) -> Iterator[Step]:
        sink, end = ctypes.addressof(self._sink), start + length
        while start < end:
            step = spans.reach(start, min(STEP_BYTES, end - start), MAX_STEP_PIECES)
            pieces = into.pieces(start, step, MAX_STEP_PIECES)
            if len(pieces) == 2 * MAX_STEP_PIECES:
                step = sum(pieces[1::2])
            yield Step(spans.vectors(start, step, pieces, sink), pieces)
            start += step

    def _remember(self, into: Region, key: _Key, steps: list[Step], num_pieces: int) -> None:
        with self._lock:
            if self._num_pieces + num_pieces > MAX_KNOWN_PIECES:
                self._known.clear()
                self._num_pieces = 0
            self._known.setdefault(into, {})[key] = steps
            self._num_pieces += num_pieces
