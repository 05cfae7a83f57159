"""Huge pages are asked for behind registered memory, and nothing else happens to it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from tensorhub_p2p.config import ConfigError, MemoryConfig
from tensorhub_p2p.transfer import huge_pages
from tensorhub_p2p.transfer.huge_pages import HugePages, Mapping, advisable, block_bytes
from tensorhub_p2p.transfer.memory import Extents, Region

BLOCK = block_bytes()
PAGE = mmap.PAGESIZE

needs_them = pytest.mark.skipif(
    huge_pages.unavailable() is not None, reason=f"huge pages: {huge_pages.unavailable()}"
)


def small_pages(num_bytes: int, flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> Any:
    """An aligned array in memory that has no huge pages so far."""
    memory = mmap.mmap(-1, num_bytes + BLOCK, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    whole = numpy.frombuffer(memory, dtype=numpy.uint8)
    offset = -whole.ctypes.data % BLOCK
    return whole[offset : offset + num_bytes]


def smaps(array: Any, field: str) -> int:
    """A field of the mapping that the array begins in, in bytes."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, _, end = head.partition("-")
            found = int(start, 16) <= array.ctypes.data < int(end, 16)
        elif found and head == field + ":":
            return int(line.split()[1]) * 1024
    raise LookupError(field)


@pytest.fixture
def pages() -> Iterator[HugePages]:
    pages = HugePages(MemoryConfig(huge_page_load=1.0))
    yield pages
    pages.close()


def ask(pages: HugePages, *arrays: Any) -> Region:
    region = Region.of([(f"t{i}", array) for i, array in enumerate(arrays)])
    pages.ask(region)
    assert pages.settled(30)
    return region


@needs_them
def test_written_memory_gets_huge_pages_and_keeps_its_content(pages: HugePages) -> None:
    array = small_pages(3 * BLOCK)
    array[:] = numpy.random.default_rng(1).integers(0, 256, len(array), dtype=numpy.uint8)
    before, address = array.tobytes(), array.ctypes.data
    assert smaps(array, "AnonHugePages") == 0
    ask(pages, array[PAGE:])  # the first block is not all ours
    assert smaps(array[BLOCK:], "AnonHugePages") == 2 * BLOCK
    assert array.tobytes() == before
    assert array.ctypes.data == address


@needs_them
def test_small_tensors_that_lie_close_together_get_them_in_any_order(pages: HugePages) -> None:
    array = small_pages(2 * BLOCK)
    array[:] = 1
    parts = [array[at : at + 5000] for at in range(0, len(array) - 5000, 8000)]
    ask(pages, *parts[::2], *parts[1::2])
    assert smaps(array, "AnonHugePages") == BLOCK  # the last block isn't filled to its end


@needs_them
def test_memory_that_was_never_written_stays_away(pages: HugePages) -> None:
    sparse = small_pages(8 * BLOCK)
    sparse[0] = 1
    assert sparse[3 * BLOCK : 4 * BLOCK].sum() == 0  # read, so that pages of zeros are there
    before = smaps(sparse, "Rss")
    ask(pages, sparse)
    assert smaps(sparse, "Rss") == before <= 2 * PAGE
    sparse[2 * BLOCK] = 1  # pages that come from now on are huge ones
    assert smaps(sparse, "AnonHugePages") == BLOCK


@needs_them
def test_files_and_shared_memory_are_left_alone(pages: HugePages, tmp_path: Path) -> None:
    shared = small_pages(2 * BLOCK, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    shared[:] = 1
    path = tmp_path / "weights"
    path.write_bytes(b"\1" * 4 * BLOCK)
    mapped = numpy.memmap(path, dtype=numpy.uint8, mode="c")
    ranges = advisable(
        Region.of({"shared": shared, "mapped": mapped}).extents, huge_pages.own_mappings(), BLOCK
    )
    assert ranges == []
    ask(pages, shared, mapped)


def test_only_whole_blocks_inside_a_piece_and_its_mapping_are_advised() -> None:
    def mapping(start: float, end: float) -> Mapping:
        return Mapping(int(start * BLOCK), int(end * BLOCK), "rw-p", 0)

    pieces = [(5 * BLOCK + 1, 4 * BLOCK), (BLOCK, BLOCK - 8), (2 * BLOCK, 2 * BLOCK)]
    mappings = [mapping(0, 1), mapping(1, 2.5), mapping(2.5, 4), mapping(6, 8), mapping(9, 99)]
    assert advisable(Extents(pieces), mappings, BLOCK) == [
        (BLOCK, 2 * BLOCK),
        (3 * BLOCK, 4 * BLOCK),
        (6 * BLOCK, 8 * BLOCK),
    ]
    assert advisable(Extents([]), mappings, BLOCK) == []


@needs_them
def test_after_forget_returns_nothing_is_advised(
    pages: HugePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = small_pages(64 * BLOCK)
    array[:] = 1
    region, other = Region.of({"t": array}), Region.of({"t": small_pages(BLOCK)})
    advised: list[int] = []
    plain = huge_pages._advise

    def advise(address: int, length: int, advice: int) -> int:
        advised.append(address)
        return plain(address, length, advice)

    monkeypatch.setattr(huge_pages, "_advise", advise)
    pages.ask(region)
    while len(advised) < 4:
        os.sched_yield()
    pages.forget(region)
    count = len(advised)
    pages.ask(other)
    pages.forget(other)  # was waiting, or is the one that runs
    assert pages.settled(30)
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    assert sum(start <= address < end for address in advised) <= count
    assert smaps(array, "AnonHugePages") < array.nbytes
    pages.forget(region)  # harmless


@needs_them
def test_a_region_that_is_forgotten_just_before_a_block_is_not_advised(
    pages: HugePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = small_pages(2 * BLOCK)
    array[:] = 1
    region = Region.of({"t": array})

    def forget_first(*_: int) -> bool:
        pages.forget(region)
        return True

    monkeypatch.setattr(huge_pages, "is_populated", forget_first)
    pages.ask(region)
    assert pages.settled(30)
    assert smaps(array, "AnonHugePages") == 0


def test_forget_waits_for_the_block_that_is_being_advised(
    pages: HugePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = Region.of({"t": small_pages(2 * BLOCK)})
    begun, go_on = threading.Event(), threading.Event()

    def advise(*_: int) -> int:
        begun.set()
        assert go_on.wait(30)
        return 0

    monkeypatch.setattr(huge_pages, "unavailable", lambda: None)
    monkeypatch.setattr(huge_pages, "_advise", advise)
    pages.ask(region)
    assert begun.wait(30)
    forgetting = threading.Thread(target=pages.forget, args=(region,))
    forgetting.start()
    forgetting.join(0.1)
    assert forgetting.is_alive()
    go_on.set()
    forgetting.join(30)
    assert not forgetting.is_alive()


@needs_them
def test_a_kernel_that_refuses_is_no_error_and_the_rest_is_left(
    pages: HugePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = small_pages(40 * BLOCK)
    array[:] = 1
    tried: list[int] = []

    def refuse(address: int, _length: int, _advice: int) -> int:
        tried.append(address)
        return 12

    monkeypatch.setattr(huge_pages, "unavailable", lambda: None)
    monkeypatch.setattr(huge_pages, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(huge_pages, "_advise", refuse)
    ask(pages, array)
    assert len(tried) <= 1 + 2 * huge_pages.MAX_FAILURES


def test_without_huge_pages_and_when_switched_off_nothing_is_done(
    pages: HugePages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    array = small_pages(2 * BLOCK)
    monkeypatch.setattr(huge_pages, "_advise", lambda *_: pytest.fail("advised"))
    off = HugePages(MemoryConfig(huge_pages=False))
    ask(off, array)
    monkeypatch.setattr(huge_pages, "unavailable", lambda: "there are none")
    with caplog.at_level("DEBUG"):
        ask(pages, array)
    assert "there are none" in caplog.text
    pages.close()
    pages.ask(Region.of({"t": array}))
    assert pages.settled(0)


def test_more_than_a_core_can_not_be_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"huge_page_load = 2.*at most 1"):
        MemoryConfig(huge_page_load=2)
