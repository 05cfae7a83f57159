"""Reading another process's memory: right bytes, or an error that says whose fault it is."""

from __future__ import annotations

import random
import signal
import time
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy
import pytest
from holder_process import Holder, arrays, blank, blank_in_one_piece

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer import native_loops
from tensorhub_p2p.transfer.digest import digest, timed_hasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.spans import Spans, Vectors
from tensorhub_p2p.transfer.transports import cma
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
)
from tensorhub_p2p.transfer.transports.cma import CmaTransport, host_id

MiB = 1 << 20
SHAPES = {
    "one flat tensor": [3 * MiB + 5],
    "thousands of small ones": [4096] * 3000 + [1] * 1500 + [0] * 3,
    "everything mixed": [0, 1, 2 * MiB + 3, 0, 7, 7, 7, 100_000, 0, 600_000, 65_536] * 3,
    "nothing": [],
    "only empty ones": [0, 0],
}

pytestmark = pytest.mark.skipif(
    CmaTransport().unavailable() is not None, reason=f"cma: {CmaTransport().unavailable()}"
)


def soon() -> float:
    return time.monotonic() + 20


def read_all(reader: Reader, into: Region) -> list[bytes]:
    digests = []
    for chunk in range(into.layout.num_chunks):
        hasher = timed_hasher()
        reader.read(*into.layout.chunk_range(chunk), into, soon(), hasher)
        digests.append(hasher.digest())
    return digests


@pytest.fixture
def transport() -> Iterator[CmaTransport]:
    transport = CmaTransport()
    yield transport
    transport.close()


@pytest.mark.processes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("loops")
def test_every_byte_of_another_process_arrives_and_is_hashed(
    shape: str, transport: CmaTransport
) -> None:
    sizes = SHAPES[shape]
    with Holder("cma", sizes) as holder:
        target = blank(sizes)
        into = Region.of(target)
        digests = read_all(transport.connect(holder.endpoint, soon()), into)
    expected = arrays(sizes, 1)
    assert all(numpy.array_equal(target[name], expected[name]) for name in expected)
    scratch = Scratch()
    assert digests == [digest(into, c, scratch) for c in range(into.layout.num_chunks)]


def test_the_target_may_have_the_tensors_in_another_order(transport: CmaTransport) -> None:
    sizes = [5, 70_000, 1, 300_000, 9]
    source = Region.of(expected := arrays(sizes, 3))
    endpoint = transport.export(source, ChunkSet.full(source.layout.num_chunks))
    target = dict(reversed(blank(sizes).items()))
    read_all(transport.connect(endpoint, soon()), Region.of(target).arranged(source.layout))
    assert all(numpy.array_equal(target[name], expected[name]) for name in expected)


@pytest.mark.parametrize("joined", ["source", "target"])
def test_the_two_sides_may_be_scattered_differently(joined: str, transport: CmaTransport) -> None:
    sizes = [64] * 12_000  # more pieces than one system call takes
    target = blank_in_one_piece(sizes) if joined == "target" else blank(sizes)
    expected = arrays(sizes, 1)
    if joined == "source":
        whole = blank_in_one_piece(sizes)
        for name, content in expected.items():
            whole[name][:] = content
        expected = whole
    source, into = Region.of(expected), Region.of(target)
    assert min(len(source.extents), len(into.extents)) == 1
    endpoint = transport.export(source, ChunkSet.full(source.layout.num_chunks))
    digests = read_all(transport.connect(endpoint, soon()), into)
    assert all(numpy.array_equal(target[name], expected[name]) for name in expected)
    scratch = Scratch()
    assert digests == [digest(source, c, scratch) for c in range(source.layout.num_chunks)]


def test_small_tensors_are_cut_into_vectors_once_for_all_versions_in_the_same_place(
    transport: CmaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [640] * 3000
    tensors, target = arrays(sizes, 1), blank(sizes)
    source, into, cut = Region.of(tensors), Region.of(target), []
    plain = Spans.vectors

    def vectors(*arguments: Any) -> Vectors:
        cut.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(Spans, "vectors", vectors)
    counts = []
    for seed in (1, 2, 3):
        for name, content in arrays(sizes, seed).items():
            tensors[name][:] = content
        endpoint = transport.export(source, ChunkSet.full(source.layout.num_chunks))
        read_all(transport.connect(endpoint, soon()), into)
        transport.drain(endpoint, soon())
        assert all(numpy.array_equal(target[name], tensors[name]) for name in tensors)
        counts.append(len(cut))
    assert counts[0] == counts[1] == counts[2] > 1


@pytest.mark.processes
def test_a_stopped_process_can_still_be_read(transport: CmaTransport) -> None:
    with Holder("cma", [MiB]) as holder:
        holder.signal(signal.SIGSTOP)
        read_all(transport.connect(holder.endpoint, soon()), Region.of(blank([MiB])))
        holder.signal(signal.SIGCONT)


@pytest.mark.processes
def test_a_process_whose_gil_is_held_goes_on_being_read(transport: CmaTransport) -> None:
    with Holder("cma", [MiB]) as holder:
        reader = transport.connect(holder.endpoint, soon())
        holder.tell(("hold the GIL", 50_000_000))
        for _ in range(3):
            read_all(reader, Region.of(blank([MiB])))
        read_all(transport.connect(holder.endpoint, soon()), Region.of(blank([MiB])))
        assert not holder.has_answered(), "it held the GIL too shortly to show anything"


@pytest.mark.processes
@pytest.mark.usefixtures("loops")
def test_a_killed_process_is_gone(transport: CmaTransport) -> None:
    with Holder("cma", [MiB]) as holder:
        reader = transport.connect(holder.endpoint, soon())
        holder.kill()
        with pytest.raises(SourceGone, match="has ended"):
            read_all(reader, Region.of(blank([MiB])))
        with pytest.raises(SourceGone, match="has ended"):
            transport.connect(holder.endpoint, soon())


@pytest.mark.processes
@pytest.mark.usefixtures("loops")
def test_a_withdrawn_export_is_refused_and_a_closed_peer_is_gone(transport: CmaTransport) -> None:
    with Holder("cma", [MiB]) as holder:
        reader = transport.connect(holder.endpoint, soon())
        holder.tell("withdraw")
        for attempt in (
            lambda: read_all(reader, Region.of(blank([MiB]))),
            lambda: transport.connect(holder.endpoint, soon()),
        ):
            with pytest.raises(SourceWithdrew, match="withdrew"):
                attempt()
    with Holder("cma", [MiB]) as holder:
        reader = transport.connect(holder.endpoint, soon())
        holder.tell("close")
        with pytest.raises(SourceGone, match="closed its peer"):
            read_all(reader, Region.of(blank([MiB])))


@pytest.mark.usefixtures("loops")
def test_a_later_export_in_the_same_place_is_not_taken_for_the_earlier(
    transport: CmaTransport,
) -> None:
    region = Region.of(arrays([MiB], 1))
    first = transport.export(region, ChunkSet.full(1))
    reader = transport.connect(first, soon())
    transport.drain(first, soon())
    second = transport.export(region, ChunkSet.full(1))
    assert cma._decode(first).seal == cma._decode(second).seal
    with pytest.raises(SourceWithdrew):
        read_all(reader, Region.of(blank([MiB])))
    transport.withdraw(first)  # does nothing to the second
    read_all(transport.connect(second, soon()), Region.of(blank([MiB])))


@pytest.mark.processes
def test_a_process_that_took_over_the_pid_is_not_read(transport: CmaTransport) -> None:
    with Holder("cma", [MiB]) as holder, Holder("cma", [MiB], seed=2) as other:
        stale = cma._decode(holder.endpoint)
        reused = msgspec.structs.replace(stale, pid=cma._decode(other.endpoint).pid)
        with pytest.raises(SourceGone, match="another process"):
            transport.connect(msgspec.msgpack.encode(reused), soon())
        nowhere = msgspec.structs.replace(stale, seal=8)
        with pytest.raises(SourceGone, match="another process"):
            transport.connect(msgspec.msgpack.encode(nowhere), soon())


@pytest.mark.usefixtures("loops")
def test_memory_that_is_gone_is_an_error_and_not_zeroes(transport: CmaTransport) -> None:
    region = Region.of(arrays([2 * MiB], 1))
    endpoint = transport.export(region, ChunkSet.full(2))
    reader = transport.connect(endpoint, soon())
    assert isinstance(reader, cma.CmaReader)
    reader._table.extents.addresses[0] = 4096
    with pytest.raises(SourceWithdrew, match="freed"):
        read_all(reader, Region.of(blank([2 * MiB])))


def test_a_native_read_that_failed_for_a_moment_is_not_gone_on_with(
    transport: CmaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_loops.why_not:
        pytest.skip(f"no native loops: {native_loops.why_not}")
    region = Region.of(arrays([2 * MiB], 1))
    reader = transport.connect(transport.export(region, ChunkSet.full(2)), soon())
    monkeypatch.setattr(native_loops.NativeHasher, "read_process", lambda *_: 0)
    with pytest.raises(ReadFailed, match="tried again"):
        read_all(reader, Region.of(blank([2 * MiB])))


def test_a_table_that_does_not_fit_is_refused(transport: CmaTransport) -> None:
    region = Region.of(arrays([1000, 2000], 1))
    endpoint = cma._decode(transport.export(region, ChunkSet.full(1)))
    wrong = msgspec.structs.replace(endpoint, num_bytes=2999)
    with pytest.raises(SourceWithdrew, match="table"):
        transport.connect(msgspec.msgpack.encode(wrong), soon())


def test_the_table_of_a_region_crosses_once_and_few_are_remembered(
    transport: CmaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = Region.of(arrays([1000, 2000], 1))
    columns: list[int] = []
    plain = cma.CmaReader._read_words

    def read_words(reader: cma.CmaReader, source: int) -> array[int]:
        columns.append(source)
        return plain(reader, source)

    monkeypatch.setattr(cma.CmaReader, "_read_words", read_words)
    for _ in range(3):  # three versions in the same place
        endpoint = transport.export(region, ChunkSet.full(1))
        read_all(transport.connect(endpoint, soon()), Region.of(blank([1000, 2000])))
        transport.drain(endpoint, soon())
    assert len(columns) == 2
    monkeypatch.setattr(cma, "MAX_TABLES", 1)
    for each in (Region.of(arrays([10], 1)), region, region):
        transport.connect(transport.export(each, ChunkSet.full(1)), soon())
    assert len(columns) == 6


def test_a_table_that_changed_while_it_was_read_is_refused(transport: CmaTransport) -> None:
    region = Region.of(arrays([1000, 2000], 1))
    endpoint = transport.export(region, ChunkSet.full(1))
    region.extents.addresses[0] += 8
    with pytest.raises(SourceWithdrew, match="table"):
        transport.connect(endpoint, soon())


@pytest.mark.processes
@pytest.mark.parametrize("sizes", [[6 * MiB], [3000] * 2000], ids=["large", "small"])
@pytest.mark.usefixtures("loops")
def test_memory_that_its_owner_unmapped_is_an_error_of_the_read(
    sizes: list[int], transport: CmaTransport
) -> None:
    with Holder("cma", sizes) as holder:
        reader = transport.connect(holder.endpoint, soon())
        into = Region.of(blank(sizes))
        read_all(reader, into)
        holder.tell("unmap the middle")
        with pytest.raises(SourceWithdrew, match="freed"):
            read_all(reader, into)
        holder.signal(signal.SIGSTOP)  # it didn't notice, and lives
        holder.signal(signal.SIGCONT)
        holder.tell("withdraw")


def test_another_machine_container_or_label_is_not_reachable(transport: CmaTransport) -> None:
    elsewhere = CmaTransport(host="b")
    endpoint = elsewhere.export(Region.of(blank([10])), ChunkSet.full(1))
    assert "another machine" in (transport.reachable(endpoint) or "")
    assert elsewhere.reachable(endpoint) is None
    with pytest.raises(CannotReach, match="another machine"):
        transport.connect(endpoint, soon())
    assert host_id() == host_id() != host_id("b")


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x91\x01", random.Random(1).randbytes(50)])
def test_a_garbage_endpoint_is_a_reason_and_not_a_crash(
    garbage: bytes, transport: CmaTransport
) -> None:
    assert "can't be read" in (transport.reachable(garbage) or "")
    with pytest.raises(CannotReach):
        transport.connect(garbage, soon())


def test_a_refused_permission_means_another_way_and_says_why(
    transport: CmaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = transport.export(Region.of(blank([10])), ChunkSet.full(1))

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cma, "_read_memory", refuse)
    with pytest.raises(CannotReach, match="same user"):
        transport.connect(endpoint, soon())
    assert "seccomp" in (CmaTransport().unavailable() or "")


@pytest.mark.usefixtures("loops")
def test_a_passed_deadline_and_a_closed_reader_end_the_read(transport: CmaTransport) -> None:
    region = Region.of(arrays([MiB], 1))
    reader = transport.connect(transport.export(region, ChunkSet.full(1)), soon())
    into = Region.of(blank([MiB]))
    with pytest.raises(SourceSilent, match="deadline"):
        reader.read(0, MiB, into, time.monotonic() - 1, timed_hasher())
    reader.close()
    with pytest.raises(SourceGone, match="closed"):
        reader.read(0, MiB, into, soon(), timed_hasher())


def test_memory_of_another_layout_is_not_written(transport: CmaTransport) -> None:
    region = Region.of(arrays([MiB], 1))
    reader = transport.connect(transport.export(region, ChunkSet.full(1)), soon())
    with pytest.raises(ValueError, match="layout"):
        reader.read(0, 10, Region.of(blank([10])), soon(), timed_hasher())
