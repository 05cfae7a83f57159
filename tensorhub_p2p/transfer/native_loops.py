"""Digests whose bytes are read, or received, by loops that run without the GIL.

Rule of this file. It calls `native_loops.c` and says when it can't be called. What the loops do is
done in Python elsewhere, too, for a package that was installed without a C compiler: nothing but
speed depends on this.

Theory. A `NativeHasher` is fed by the loop that brings the bytes. Its state and functions are
xxhash's own, from the library inside the Python module: the same digest, by the same code.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorhub_p2p.transfer.memory import address_of

LIBRARY = Path(__file__).with_name("libnative_loops.so")
READ_BYTES = 4 << 20
"""What a loop is told to read at a time: within it nobody can call it off."""
THE_END = -1
"""`receive`: the other end closed the connection."""

_GIL_WORTH = 64 << 10
"""Bytes from which on hashing is long enough to let others have the GIL meanwhile."""
_VERSION = 1
"""Of the C functions: a library that was built from an older checkout is not called."""
_FOR_EVER = (1 << 63) - 1
_CANONICAL = struct.Struct(">QQ")


class _Hasher(ctypes.Structure):
    _fields_ = (
        ("update", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("nanoseconds", ctypes.c_uint64),
    )


class Source(ctypes.Structure):
    """A process, and the seal that must be found in it, by addresses and lengths."""

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("seal_here", ctypes.c_uint64 * 2),
        ("seal_there", ctypes.c_uint64 * 2),
        ("expected", ctypes.c_char_p),
    )


class _Hash(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Loops:
    """The functions of both libraries. OSError, ImportError or AttributeError if one is missing."""

    def __init__(self) -> None:
        native = ctypes.CDLL(str(LIBRARY))
        if native.loops_version() != _VERSION:
            raise OSError(f"{LIBRARY} was built from another version: install the package again")
        hashing = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        fast = hasattr(hashing, "XXH3_128bits_update_dispatch")
        name = "XXH3_128bits_update_dispatch" if fast else "XXH3_128bits_update"
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        at = ctypes.POINTER(_Hasher)
        self.update_at = ctypes.cast(getattr(hashing, name), pointer).value
        self.create = _typed(hashing.XXH3_createState, pointer)
        self.free = _typed(hashing.XXH3_freeState, ctypes.c_int, pointer)
        self.reset = _typed(hashing.XXH3_128bits_reset, ctypes.c_int, pointer)
        self.digest = _typed(hashing.XXH3_128bits_digest, _Hash, pointer)
        self.hash_pieces = _typed(native.hash_pieces, None, at, pointer, size)
        self.read_process = _typed(
            native.read_process, size, at, ctypes.POINTER(Source), pointer, pointer, size
        )
        self.receive = _typed(
            native.receive,
            *(size, at, ctypes.c_int, pointer, size, ctypes.c_uint64),
            ctypes.POINTER(ctypes.c_int),
        )
        # The same, keeping the GIL.
        held = ctypes.PyDLL(str(LIBRARY))
        self.hash_few = _typed(held.hash_pieces, None, at, pointer, size)


def _typed(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, list(arguments)
    called: Callable[..., Any] = function
    return called


class NativeHasher:
    """An xxh3 digest of 128 bits that loops feed; `seconds` is what feeding it cost."""

    __slots__ = ("_hasher", "_loops")

    def __init__(self, loops: _Loops) -> None:
        self._loops = loops
        state = loops.create()
        if not state:
            raise MemoryError("no memory for the state of a digest")
        loops.reset(state)
        self._hasher = _Hasher(loops.update_at, state, 0)

    def __del__(self) -> None:
        self._loops.free(self._hasher.state)

    @property
    def seconds(self) -> float:
        return float(self._hasher.nanoseconds) / 1e9

    def update(self, data: memoryview) -> None:
        """Any buffer in one piece; one that can't be written to is copied for it."""
        data = memoryview(data)
        if data.readonly:
            data = memoryview(bytearray(data))
        if data.nbytes:
            self.update_pieces(array("Q", [_address(data), data.nbytes]))

    def update_pieces(self, iov: array[int]) -> None:
        """The same for many pieces of memory: address, length, address, length …"""
        few = sum(iov[1::2]) < _GIL_WORTH
        call = self._loops.hash_few if few else self._loops.hash_pieces
        call(self._hasher, address_of(iov), len(iov) // 2)

    def read_process(self, source: Source, here: int, there: int, length: int) -> int:
        """Bring and feed that process's memory; returns the bytes that went well.

        The seal is looked at last; 0 if it is another one by now, whatever was fed.
        """
        moved: int = self._loops.read_process(self._hasher, source, here, there, length)
        return moved

    def receive(self, connection: int, here: int, length: int, deadline: float) -> tuple[int, int]:
        """Bring and feed what a connection has: the bytes, and what ended it if they are fewer.

        That is an errno, `THE_END`, or 0: there may be more. Past the deadline (on
        `time.monotonic`) it takes no more than one step.
        """
        why, until = ctypes.c_int(), max(0, min(_FOR_EVER, int(deadline * 1e9)))
        got: int = self._loops.receive(self._hasher, connection, here, length, until, why)
        return got, why.value

    def digest(self) -> bytes:
        """16 bytes."""
        value = self._loops.digest(self._hasher.state)
        return _CANONICAL.pack(value.high, value.low)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _open() -> tuple[_Loops | None, str]:
    try:
        return _Loops(), ""
    except (OSError, ImportError, AttributeError) as error:
        return None, str(error)


_loops, why_not = _open()
"""`why_not`: the reason why there are none here; empty where there are."""


def native_hasher() -> NativeHasher | None:
    """A new one, or None where the loops are not there."""
    return NativeHasher(_loops) if _loops is not None else None
