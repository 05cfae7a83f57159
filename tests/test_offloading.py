"""Offloads: one thread that copies, keeps and frees; a scripted node hears what became of it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy
import pytest

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Generation, Group, Publication, Slot
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES
from tensorhub_p2p.runtime import offloading
from tensorhub_p2p.runtime.offloading import Offloads
from tensorhub_p2p.transfer.copying import HostMemory, copy_chunk
from tensorhub_p2p.transfer.digest import digest
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import Reader, Transport

CHUNK = MIN_CHUNK_BYTES
PUBLICATION = Publication(0, 7, "trainer", Generation(1, 1))
NEXT = Publication(0, 8, "trainer", Generation(1, 1))
SLOT = Slot(Group("m", "trainer"), 0)
KEEP = Slot(Group("m", "kept/a/1"), 0)
SECOND = Slot(Group("m", "kept/a/2"), 0)
PATIENCE = 20.0


class Exports(Transport):
    """Notes what is exported, and what was drained."""

    name = "noted"

    def __init__(self) -> None:
        self.exported: dict[bytes, Region] = {}
        self.drained: list[bytes] = []

    def unavailable(self) -> str | None:
        return None

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        blob = str(len(self.exported)).encode()
        self.exported[blob] = region
        return blob

    def withdraw(self, endpoint: bytes) -> None:
        pass

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self.drained.append(endpoint)

    def reachable(self, endpoint: bytes) -> str | None:
        return None

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Told:
    """The node: what it was told, in order."""

    def __init__(self) -> None:
        self.news: SimpleQueue[tuple[Any, ...]] = SimpleQueue()

    def offloaded(self, now: float, keep: Slot, layout: object, ends: Any, digests: Any) -> None:
        self.news.put(("offloaded", keep, layout, ends, digests))

    def offload_failed(self, now: float, keep: Slot, why: str) -> None:
        self.news.put(("failed", keep, why))

    def freed(self, now: float, keep: Slot) -> None:
        self.news.put(("freed", keep))

    def next(self) -> tuple[Any, ...]:
        return self.news.get(timeout=PATIENCE)


class Bench:
    def __init__(self) -> None:
        self.transport, self.node = Exports(), Told()
        self.offloads = Offloads({"noted": self.transport}, lambda call: call(0.0), self.node)
        self.tensor = numpy.random.default_rng(1).integers(0, 255, 5 * CHUNK, dtype=numpy.uint8)
        self.region = Region.of({"w": self.tensor})


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.offloads.close()


class Gate:
    """Has the copying stop before each chunk until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.copied: list[int] = []
        monkeypatch.setattr(offloading, "copy_chunk", self.copy)

    def copy(self, source: Region, into: HostMemory, chunk: int, scratch: Scratch) -> bytes:
        self.reached.release()
        assert self.go.acquire(timeout=PATIENCE)
        self.copied.append(chunk)
        return copy_chunk(source, into, chunk, scratch)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=PATIENCE)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_a_copy_is_exported_and_its_digests_are_told(bench: Bench) -> None:
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    what, keep, layout, endpoints, digests = bench.node.next()
    assert (what, keep, layout) == ("offloaded", KEEP, bench.region.layout)
    assert [e.blob for e in endpoints] == [b"0"]
    scratch = Scratch()
    assert list(digests) == [digest(bench.region, c, scratch) for c in range(5)]
    bench.tensor[:] = 0  # the copy is one
    assert [digest(bench.transport.exported[b"0"], c, scratch) for c in range(5)] == list(digests)
    scratch.close()


def test_freeing_ends_the_export_first_and_is_told(bench: Bench) -> None:
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    bench.node.next()
    bench.offloads.free(KEEP)
    assert bench.node.next() == ("freed", KEEP)
    assert bench.transport.drained == [b"0"]


def test_memory_that_is_not_there_is_told_and_the_next_copy_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(layout: object) -> None:
        raise MemoryError("5 bytes are needed, 3 are available")

    with monkeypatch.context() as patch:
        patch.setattr(offloading, "HostMemory", none_left)
        bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
        assert bench.node.next() == (
            "failed",
            KEEP,
            "MemoryError: 5 bytes are needed, 3 are available",
        )
    bench.offloads.copy(SLOT, SECOND, PUBLICATION, bench.region)
    assert bench.node.next()[:2] == ("offloaded", SECOND)


def test_copies_are_made_where_no_descriptor_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is out of them for a while is not without copies for ever."""

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    assert bench.node.next()[:2] == ("offloaded", KEEP)


def test_after_stop_no_byte_is_copied_from_the_slot(bench: Bench, gate: Gate) -> None:
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    gate.wait()
    stopped = threading.Thread(target=bench.offloads.stop, args=(SLOT, PUBLICATION))
    stopped.start()
    stopped.join(0.05)
    assert stopped.is_alive(), "a chunk is being copied"
    gate.go.release()
    stopped.join(PATIENCE)
    assert bench.node.next()[:2] == ("failed", KEEP)
    assert gate.copied == [0]


def test_stop_is_about_one_publication_of_one_slot(bench: Bench, gate: Gate) -> None:
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    gate.wait()
    bench.offloads.stop(SLOT, NEXT)
    bench.offloads.stop(KEEP, PUBLICATION)
    for _ in range(5):
        gate.go.release()
    assert bench.node.next()[:2] == ("offloaded", KEEP)


def test_a_copy_that_waits_is_stopped_too(bench: Bench, gate: Gate) -> None:
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    bench.offloads.copy(SLOT, SECOND, NEXT, bench.region)
    gate.wait()
    bench.offloads.stop(SLOT, NEXT)
    for _ in range(5):
        gate.go.release()
    assert bench.node.next()[:2] == ("offloaded", KEEP)
    assert bench.node.next()[:2] == ("failed", SECOND)
    assert gate.copied == [0, 1, 2, 3, 4]


def test_a_copy_that_is_freed_while_it_is_made_is_given_up(bench: Bench, gate: Gate) -> None:
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    gate.wait()
    bench.offloads.free(KEEP)
    gate.go.release()
    assert bench.node.next()[:2] == ("failed", KEEP)
    assert bench.node.next() == ("freed", KEEP)
    assert gate.copied == [0]


def test_closing_gives_up_what_is_under_way_and_frees_the_rest(bench: Bench, gate: Gate) -> None:
    for _ in range(5):
        gate.go.release()
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    bench.node.next()
    bench.offloads.copy(SLOT, SECOND, PUBLICATION, bench.region)
    for _ in range(6):
        gate.wait()
    closing = threading.Thread(target=bench.offloads.close)
    closing.start()
    while not bench.offloads._closed:
        time.sleep(0.001)
    gate.go.release()
    closing.join(PATIENCE)
    assert bench.transport.drained == [b"0"]
    assert gate.copied == [0, 1, 2, 3, 4, 0]
    assert not any(t.name == "tensorhub_p2p-offload" for t in threading.enumerate())


def test_what_comes_after_closing_is_neither_made_nor_kept(bench: Bench) -> None:
    bench.offloads.close()
    bench.offloads.copy(SLOT, KEEP, PUBLICATION, bench.region)
    bench.offloads.keep(SECOND, HostMemory(bench.region.layout), ())
    assert bench.transport.drained == list(bench.transport.exported)
    assert bench.node.news.empty()
