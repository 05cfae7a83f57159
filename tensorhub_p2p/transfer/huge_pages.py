"""Huge pages for registered memory: asked for in the background, as reads are faster then.

Rule of this file. It advises the kernel about memory and never touches a byte: contents stay,
addresses stay, and memory that is not there stays away. Whatever the kernel refuses is no
error: pages stay small, as they were.

Theory. `process_vm_readv` looks up and pins every page that it reads. In pages of 2 MiB instead
of 4 KiB there are 512 times fewer of them, and fewer misses of the TLB: a read takes little
more than half the time. Allocators mostly give small pages. Two pieces of advice change that
for each aligned block that lies inside a tensor, or inside many that lie close together:
MADV_HUGEPAGE, for pages that come later (of memory that was never written), and MADV_COLLAPSE
(Linux 6.1), which copies the small pages that are there into a huge one.

What is left alone. Files, shared memory and read-only memory: only private anonymous
mappings are advised (/proc/self/maps). Blocks with a page that was never written, that is
swapped out, or shared with a forked child (/proc/self/pagemap): collapsing them would take
memory that nobody has asked for, so that a sparse tensor stays sparse.

Load. One block at a time, a few milliseconds, during which nobody maps memory in this
process; then a pause, so that it takes `MemoryConfig.huge_page_load` of one core at most.

Threads. One for all regions; it starts with the first and ends with the last. `forget` is a
fence: when it returns, no memory of that region is being advised, or will be.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from tensorhub_p2p.config import MemoryConfig
from tensorhub_p2p.transfer.memory import Extents, Region
from tensorhub_p2p.transfer.spans import MAX_GAP

_log = logging.getLogger(__name__)

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25
_SETTINGS = "/sys/kernel/mm/transparent_hugepage/"

# The highest byte of an entry of /proc/self/pagemap: present (128), swapped (64), of a file or
# shared memory (32), mapped by this process alone (1). The page of zeros that stands for memory
# that was only read is nobody's alone.
_JUDGED = bytes(byte & 0xE1 for byte in range(256))
_OWN_PAGE = 0x81
_ENTRY_BYTES = 8
RETRY_SECONDS = 1.0
"""Pause until blocks that were refused are tried again: a page that is being read can't move."""
MAX_FAILURES = 16
"""Blocks in a row that the kernel refuses until the rest of a region is left as it is."""

_libc = ctypes.CDLL(None, use_errno=True)


class Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    permissions: str
    file: int
    """The number of its file; 0 if it has none."""


def _advise(address: int, length: int, advice: int) -> int:
    """madvise; 0, or the error's number."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if failed else 0


def unavailable() -> str | None:
    """Why this machine has no huge pages to ask for, or None."""
    try:
        with open(_SETTINGS + "enabled", encoding="ascii") as file:
            enabled = file.read()
    except OSError:
        return "this kernel has no transparent huge pages"
    if "[never]" in enabled:
        return f"they are switched off ({_SETTINGS}enabled is never)"
    return _collapse_fails()


def _collapse_fails() -> str | None:
    block = block_bytes()
    with mmap.mmap(-1, 2 * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        first = -(-ctypes.addressof(anchor) // block) * block
        offset = first - ctypes.addressof(anchor)
        del anchor
        memory[offset] = 1
        code = _advise(first, block, _MADV_COLLAPSE)
    if code == errno.EINVAL:
        return "memory that is there can't be collapsed: that needs Linux 6.1"
    return None if not code else f"collapsing memory failed: {os.strerror(code)}"


def block_bytes() -> int:
    """The size of a huge page."""
    try:
        with open(_SETTINGS + "hpage_pmd_size", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 2 << 20


def own_mappings() -> list[Mapping]:
    """Private anonymous memory of this process that may be written, in order of addresses."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            start, _, end = fields[0].partition("-")
            mapping = Mapping(int(start, 16), int(end, 16), fields[1], int(fields[4]))
            if mapping.permissions.startswith("rw-p") and not mapping.file:
                found.append(mapping)
    return found


def _insides(extents: Extents, block: int) -> Iterator[tuple[int, int]]:
    """The aligned inside of each span that has any, as (start, end), in order of addresses.

    A span has pieces with less than a page in between, in whatever order they are registered.
    """
    first = last = -1
    for address, length in sorted(zip(extents.addresses, extents.lengths, strict=True)):
        if not first <= address <= last + MAX_GAP:
            yield from _aligned(first, last, block)
            first = address
        last = max(last, address + length)
    yield from _aligned(first, last, block)


def _aligned(start: int, end: int, block: int) -> Iterator[tuple[int, int]]:
    start, end = -(-start // block) * block, end // block * block
    if 0 <= start < end:
        yield start, end


def advisable(extents: Extents, mappings: list[Mapping], block: int) -> list[tuple[int, int]]:
    """Ranges of whole blocks that lie in a piece and in one of these mappings."""
    ranges = []
    at = 0
    for start, end in _insides(extents, block):
        while at < len(mappings) and mappings[at].end <= start:
            at += 1
        for mapping in islice(mappings, at, None):
            if mapping.start >= end:
                break
            first = -(-max(start, mapping.start) // block) * block
            last = min(end, mapping.end) // block * block
            if first < last:
                ranges.append((first, last))
    return ranges


def is_populated(pagemap: int, address: int, length: int) -> bool:
    """Whether every page there was written, and is this process's alone."""
    pages = length // mmap.PAGESIZE
    entries = os.pread(pagemap, pages * _ENTRY_BYTES, address // mmap.PAGESIZE * _ENTRY_BYTES)
    return entries[7::_ENTRY_BYTES].translate(_JUDGED).count(_OWN_PAGE) == pages


class HugePages:
    """Asks for huge pages behind regions. Thread-safe."""

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._changed = threading.Condition()
        self._waiting: deque[Region] = deque()
        self._running: Region | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._usable = False
        self._advising = threading.Lock()
        """Held while memory of `_running` is advised."""
        self._block = block_bytes()

    def ask(self, region: Region) -> None:
        """Ask for huge pages behind this region, soon. Returns at once."""
        if not self._config.huge_pages or region.extents.num_bytes < self._block:
            return
        with self._changed:
            if self._closed:
                return
            self._waiting.append(region)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="tensorhub_p2p-huge-pages", daemon=True
                )
                thread.start()
                self._thread = thread

    def forget(self, region: Region) -> None:
        """On return no memory of this region is being advised, or will be. Harmless if unknown."""
        with self._changed:
            if region in self._waiting:
                self._waiting.remove(region)
            if self._running is region:
                self._running = None
                self._changed.notify_all()
        with self._advising:  # the block that was begun before
            pass

    def settled(self, timeout: float) -> bool:
        """Wait, `timeout` seconds at most, until nothing is left to do; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def close(self) -> None:
        """Forget all regions and end the thread."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._running = None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # --- the thread ----------------------------------------------------------------------

    def _work(self) -> None:
        while (region := self._next()) is not None:
            try:
                self._serve(region)
            except Exception:  # noqa: BLE001  pages just stay small
                _log.exception("no huge pages for %r", region.layout)

    def _next(self) -> Region | None:
        with self._changed:
            self._running = self._waiting.popleft() if self._waiting else None
            if self._running is None:
                self._thread = None
                self._changed.notify_all()
            return self._running

    def _serve(self, region: Region) -> None:
        if not self._usable:
            reason = unavailable()
            if reason is not None:
                _log.debug("no huge pages are asked for: %s", reason)
                return
            self._usable = True
        ranges = advisable(region.extents, own_mappings(), self._block)
        for start, end in ranges:
            self._advise(region, start, end - start, _MADV_HUGEPAGE)
        blocks = [at for start, end in ranges for at in range(start, end, self._block)]
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            refused = self._collapse(region, blocks, pagemap.fileno())
            if refused and self._pause(region, RETRY_SECONDS):  # they were being read
                self._collapse(region, refused, pagemap.fileno())

    def _collapse(self, region: Region, blocks: list[int], pagemap: int) -> list[int]:
        """Collapse these blocks; returns those that the kernel refused."""
        refused: list[int] = []
        failures = 0
        for at in blocks:
            began = time.monotonic()
            if is_populated(pagemap, at, self._block):
                code = self._advise(region, at, self._block, _MADV_COLLAPSE)
                failures = failures + 1 if code else 0
                if code:
                    refused.append(at)
            pause = (time.monotonic() - began) * (1 / self._config.huge_page_load - 1)
            if failures == MAX_FAILURES or not self._pause(region, pause):
                break
        return refused

    def _advise(self, region: Region, address: int, length: int, advice: int) -> int:
        """0, or why not, as an error's number; does nothing if the region was forgotten."""
        with self._advising:
            return _advise(address, length, advice) if self._running is region else 0

    def _pause(self, region: Region, seconds: float) -> bool:
        """Wait; False, at once, if the region was forgotten."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._running is not region, seconds)
