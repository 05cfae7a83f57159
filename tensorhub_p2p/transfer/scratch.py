"""A small contiguous buffer that gathers scattered memory, and scatters it again.

Why. Thousands of tiny tensors cost a Python call each when they are hashed or sent one by
one. Gathered in a buffer of half a megabyte, which stays in the processor's cache, they
cost one call. The buffer is an anonymous file in memory that is also mapped: `pwritev`
to the file gathers and `preadv` scatters, a thousand pieces in one system call, without
the GIL, and without a right to trace processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from array import array

from tensorhub_p2p.transfer.memory import IOV_MAX, address_of, view

STEP_BYTES = 512 << 10
"""What is read, hashed or sent at a time: little enough to stay in the cache in between."""

SMALL_PIECE_BYTES = 64 << 10
"""Pieces shorter than this, on average, are better handled through a scratch buffer."""

_libc = ctypes.CDLL(None, use_errno=True)
_preadv, _pwritev = _libc.preadv, _libc.pwritev
for _call in (_preadv, _pwritev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long]
    _call.restype = ctypes.c_ssize_t


def are_small(iov: array[int], length: int) -> bool:
    """Whether `length` bytes in these pieces are better gathered than handled one by one."""
    return len(iov) > 4 and length < SMALL_PIECE_BYTES * (len(iov) // 2)


class Scratch:
    """A buffer of `size` bytes; `memory` is its content. Used by one thread at a time."""

    _file = -1

    def __init__(self, size: int = STEP_BYTES) -> None:
        self.size = size
        self._file = os.memfd_create("tensorhub_p2p-scratch", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = view(self.address, size)

    def gather(self, iov: array[int]) -> int:
        """Copy the pieces into the buffer, one after the other; returns the bytes."""
        return self._copy(_pwritev, iov)

    def scatter(self, iov: array[int]) -> int:
        """Copy the beginning of the buffer out into the pieces; returns the bytes."""
        return self._copy(_preadv, iov)

    def _copy(self, call: object, iov: array[int]) -> int:
        done = 0
        for first in range(0, len(iov), 2 * IOV_MAX):
            batch = iov[first : first + 2 * IOV_MAX]
            due = sum(batch[1::2])
            if done + due > self.size:
                raise ValueError(f"{done + due} bytes in a buffer of {self.size}")
            moved = call(self._file, address_of(batch), len(batch) // 2, done)  # type: ignore[operator]
            if moved != due:
                code = ctypes.get_errno()
                what = os.strerror(code) if moved < 0 else f"{moved} of {due} bytes"
                raise OSError(code, f"copying registered memory failed: {what}")
            done += due
        return done

    def close(self) -> None:
        """Free the file; the mapping goes with the object."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close
