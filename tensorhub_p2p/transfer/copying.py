"""Copies of registered memory in host memory of our own: made chunk by chunk, and given back.

Rule of this file. It allocates, copies and frees; what a copy is for, and who reads it, it
doesn't know.

Theory. `HostMemory` is one private anonymous mapping for a whole shard. Its pages come
as they are written, and go when `free` says so, whoever still refers to the mapping: what
is read there afterwards is zeros, which the reader sees in the digest, and never memory
of somebody else. `copy_chunk` takes the digest of what it wrote, not of what it read: if the
source was changed meanwhile, the digest says so. Copies are made by calls that
release the GIL; thousands of small pieces are gathered first, as each such call may have
to wait for the GIL afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.transfer.digest import ChunkHasher
from tensorhub_p2p.transfer.memory import Region, view
from tensorhub_p2p.transfer.scratch import Scratch, are_small


class HostMemory:
    """Host memory for one shard; `region` is what lies there. Raises MemoryError."""

    def __init__(self, layout: Layout) -> None:
        available = available_bytes()
        if available is not None and layout.num_bytes > available:
            raise MemoryError(
                f"{layout.num_bytes} bytes of host memory are needed, {available} are available"
            )
        try:
            # Not shared, as Python's default is: pages of shared mappings can't be given back.
            self._mapping = mmap.mmap(
                -1, max(1, layout.num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MemoryError(f"no {layout.num_bytes} bytes of host memory: {error}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages does as well
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.region = Region.of_buffer(layout, self._mapping)

    def free(self) -> None:
        """Give the pages back to the system, now. What is read here later is zeros."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


def available_bytes() -> int | None:
    """Memory that the machine has left without swapping; None where it doesn't say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def usable_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(memory, int(file.read()))
    except (OSError, ValueError):  # no such group here, or "max"
        return memory


def copy_chunk(source: Region, into: HostMemory, chunk: int, scratch: Scratch) -> bytes:
    """Copy one chunk of `source`, which has the same layout; returns the copy's digest.

    StateError if its tensors moved away.
    """
    start, length = source.layout.chunk_range(chunk)
    source.check_in_place(start, length)
    (first, _) = into.region.pieces(start, length)
    iov = source.pieces(start, length)
    if are_small(iov, length):
        _copy_gathered(source, start, length, first, scratch)
    else:
        at = first
        for i in range(0, len(iov), 2):
            ctypes.memmove(at, iov[i], iov[i + 1])
            at += iov[i + 1]
    hasher = ChunkHasher()
    hasher.update(view(first, length))
    return hasher.digest()


def _copy_gathered(source: Region, start: int, length: int, at: int, scratch: Scratch) -> None:
    end = start + length
    while start < end:
        step = min(scratch.size, end - start)
        scratch.gather(source.pieces(start, step))
        ctypes.memmove(at, scratch.address, step)
        start += step
        at += step
