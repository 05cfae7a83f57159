"""Copying from memory of this very process: what a prefetch brought, into the tensors.

Rule of this file. It is no link, so no peer offers it to another, and nobody can choose it or
do without. A pull that has something in the memory of its own process (transfer/stock.py) gets a
transport of its own, for that alone.

Theory. What is exported is in one piece. It is copied in steps that stay in the processor's
cache and are hashed as they were written, by calls that release the GIL; thousands of small
tensors go through a scratch buffer, as each such call may have to wait for the GIL afterwards.
"""

from __future__ import annotations

import ctypes
import secrets
import time

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.memory import Region, view
from tensorhub_p2p.transfer.scratch import STEP_BYTES, Scratch, are_small
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    SourceGone,
    SourceSilent,
    Transport,
)


class MemoryTransport(Transport):
    """Between places in this process. Endpoints mean nothing elsewhere."""

    name = "memory"

    def __init__(self) -> None:
        self._exports: dict[bytes, Region] = {}

    def unavailable(self) -> str | None:
        return None

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        """`region` is in one piece."""
        endpoint = secrets.token_bytes(8)
        self._exports[endpoint] = region
        return endpoint

    def withdraw(self, endpoint: bytes) -> None:
        self._exports.pop(endpoint, None)

    def drain(self, endpoint: bytes, deadline: float) -> None:
        """Whoever frees the memory waits for its readers: they are threads of its own pull."""
        self.withdraw(endpoint)

    def reachable(self, endpoint: bytes) -> str | None:
        return None if endpoint in self._exports else "it is not in this process's memory"

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        region = self._exports.get(endpoint)
        if region is None:
            raise CannotReach("memory: it is not in this process's memory (any more)")
        return MemoryReader(region)

    def close(self) -> None:
        self._exports.clear()


class MemoryReader(Reader):
    """Copies from one region."""

    def __init__(self, source: Region) -> None:
        self._source = source
        self._scratch: Scratch | None = None
        self._closed = False

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        end = start + length
        while start < end:
            if self._closed:
                raise SourceGone("memory: the reader was closed")
            if time.monotonic() > deadline:
                raise SourceSilent(f"memory: the deadline passed at byte {start}")
            step = min(STEP_BYTES, end - start)
            self._step(start, step, into, hasher)
            start += step

    def _step(self, start: int, length: int, into: Region, hasher: Hasher) -> None:
        (at, _) = self._source.pieces(start, length)
        iov = into.pieces(start, length)
        if are_small(iov, length):
            if self._scratch is None:
                self._scratch = Scratch(STEP_BYTES)
            ctypes.memmove(self._scratch.address, at, length)
            self._scratch.scatter(iov)
            hasher.update(self._scratch.memory[:length])
            return
        for i in range(0, len(iov), 2):
            ctypes.memmove(iov[i], at, iov[i + 1])
            hasher.update(view(iov[i], iov[i + 1]))
            at += iov[i + 1]

    def close(self) -> None:
        self._closed = True
