"""What every transport promises, tried on each that is installed: right bytes, or a typed end.

`make test-transports` installs those that are optional, and runs this.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from holder_process import Holder, arrays, blank, make_transport

from tensorhub_p2p.config import TRANSPORTS
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.digest import ChunkHasher, digest, timed_hasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)

MiB = 1 << 20
FLAT = [9 * MiB + 5]
SHAPES = {
    "everything mixed": [0, 1, 2 * MiB + 3, 7, 7, 100_000, 0, 65_536, *[4096] * 500, *[1] * 200],
    "nothing": [],
}
ONE_SIDED = {"cma", "nixl"}
"""Need nothing of the source once they are connected, not even that it runs."""

pytestmark = pytest.mark.processes


def soon(seconds: float = 20) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module", params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    transport = make_transport(request.param)
    reason = transport.unavailable()
    transport.close()
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def transport(name: str) -> Iterator[Transport]:
    transport = make_transport(name)
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def lasting(name: str) -> Iterator[Holder]:
    """One process for all tests that leave it alive."""
    with Holder(name, FLAT) as holder:
        yield holder


@pytest.fixture
def holder(lasting: Holder) -> Iterator[Holder]:
    lasting.export_again()
    yield lasting
    lasting.signal(signal.SIGCONT)


@pytest.fixture
def doomed(name: str) -> Iterator[Holder]:
    with Holder(name, FLAT) as holder:
        yield holder


@pytest.fixture
def into() -> Region:
    return Region.of(blank(FLAT))


def read_all(reader: Reader, into: Region) -> list[bytes]:
    digests = []
    for chunk in range(into.layout.num_chunks):
        hasher = timed_hasher()
        reader.read(*into.layout.chunk_range(chunk), into, soon(), hasher)
        digests.append(hasher.digest())
    return digests


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_arrives_in_its_place_and_is_hashed(
    shape: str, name: str, transport: Transport
) -> None:
    sizes = SHAPES[shape]
    target, expected = blank(sizes), arrays(sizes, 1)
    into = Region.of(target)
    with Holder(name, sizes) as holder:
        reader = transport.connect(holder.endpoint, soon())
        digests = read_all(reader, into)
        scratch = Scratch()
        assert digests == [digest(into, c, scratch) for c in range(into.layout.num_chunks)]
        assert all(numpy.array_equal(target[n], expected[n]) for n in expected)
        reader.close()


def test_any_range_can_be_read_in_any_order(
    transport: Transport, holder: Holder, into: Region
) -> None:
    expected = next(iter(arrays(FLAT, 1).values()))
    size = into.layout.num_bytes
    draw = random.Random(1)
    cuts = sorted({0, size, 1, size - 1, *(draw.randrange(size) for _ in range(9))})
    ranges = list(itertools.pairwise(cuts))
    draw.shuffle(ranges)
    reader = transport.connect(holder.endpoint, soon())
    for start, end in ranges:
        hasher = timed_hasher()
        reader.read(start, end - start, into, soon(), hasher)
        assert hasher.digest() == ChunkHasher(expected[start:end]).digest()
    whole = timed_hasher()
    reader.read(0, size, into, soon(), whole)
    assert whole.digest() == ChunkHasher(expected).digest()
    reader.close()


def test_what_was_withdrawn_is_not_read_any_more(
    transport: Transport, holder: Holder, into: Region
) -> None:
    reader = transport.connect(holder.endpoint, soon())
    reader.read(0, 5, into, soon(), timed_hasher())
    withdrawn = holder.endpoint
    holder.tell("withdraw")
    with pytest.raises(SourceWithdrew):
        reader.read(0, 5, into, soon(), timed_hasher())
    reader.close()
    holder.export_again()
    with pytest.raises((SourceWithdrew, CannotReach)):
        transport.connect(withdrawn, soon()).read(0, 5, into, soon(), timed_hasher())
    read_all(transport.connect(holder.endpoint, soon()), into)


def test_what_was_drained_is_served_no_more_and_its_memory_again_later(
    transport: Transport, holder: Holder, into: Region
) -> None:
    reader = transport.connect(holder.endpoint, soon())
    holder.tell(("drain", 1.0))
    with pytest.raises(ReadFailed):
        reader.read(0, 5, into, soon(), timed_hasher())
    reader.close()
    read_all(transport.connect(holder.export_again(), soon()), into)


def test_an_endpoint_of_rubbish_is_refused(transport: Transport) -> None:
    for endpoint in (b"", b"rubbish", b"\x99" + b"\0" * 40):
        assert transport.reachable(endpoint)
        with pytest.raises(CannotReach):
            transport.connect(endpoint, soon())


def test_a_source_that_was_killed_ends_reads_in_time(
    transport: Transport, doomed: Holder, into: Region
) -> None:
    reader = transport.connect(doomed.endpoint, soon())
    reader.read(0, 5, into, soon(), timed_hasher())
    doomed.kill()
    with pytest.raises(ReadFailed):
        reader.read(0, into.layout.num_bytes, into, soon(5), timed_hasher())
    reader.close()
    with pytest.raises(ReadFailed):
        transport.connect(doomed.endpoint, soon(3))


def test_a_source_that_dies_takes_no_other_read_with_it(
    transport: Transport, holder: Holder, doomed: Holder, into: Region
) -> None:
    there = transport.connect(holder.endpoint, soon())
    reader = transport.connect(doomed.endpoint, soon())
    there.read(0, 5, into, soon(), timed_hasher())
    reader.read(0, 5, into, soon(), timed_hasher())
    doomed.kill()
    with pytest.raises(ReadFailed):
        reader.read(0, 5, into, soon(5), timed_hasher())
    reader.close()
    read_all(there, into)
    there.close()
    read_all(transport.connect(holder.endpoint, soon()), into)


def test_a_stopped_source_is_silent_or_not_even_needed(
    name: str, transport: Transport, holder: Holder, into: Region
) -> None:
    reader = transport.connect(holder.endpoint, soon())
    reader.read(0, 5, into, soon(), timed_hasher())
    holder.signal(signal.SIGSTOP)
    began = time.monotonic()
    if name in ONE_SIDED:
        read_all(reader, into)
    else:
        with pytest.raises(SourceSilent):
            reader.read(0, into.layout.num_bytes, into, soon(0.5), timed_hasher())
    assert time.monotonic() - began < 5
    reader.close()
    holder.signal(signal.SIGCONT)
    read_all(transport.connect(holder.endpoint, soon()), into)


def test_connecting_to_a_stopped_source_ends_by_its_deadline(
    name: str, transport: Transport, holder: Holder
) -> None:
    holder.signal(signal.SIGSTOP)
    if name in ONE_SIDED:
        transport.connect(holder.endpoint, soon(0.5)).close()
        return
    began = time.monotonic()
    with pytest.raises((SourceSilent, CannotReach)):
        transport.connect(holder.endpoint, soon(0.5))
    assert time.monotonic() - began < 5


def test_memory_that_was_unmapped_under_the_source_never_crashes_the_reader(
    transport: Transport, doomed: Holder, into: Region
) -> None:
    reader = transport.connect(doomed.endpoint, soon())
    doomed.tell("unmap")
    with pytest.raises(ReadFailed):
        reader.read(0, into.layout.num_bytes, into, soon(5), timed_hasher())
    reader.close()


def test_a_reader_that_is_closed_ends_its_read(
    name: str, transport: Transport, holder: Holder, into: Region
) -> None:
    reader = transport.connect(holder.endpoint, soon())
    reader.read(0, 5, into, soon(), timed_hasher())
    if name not in ONE_SIDED:
        holder.signal(signal.SIGSTOP)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            while True:
                reader.read(0, into.layout.num_bytes, into, soon(), timed_hasher())
        except BaseException as error:  # noqa: BLE001  the test looks at it
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    reader.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(ended[0], SourceGone)
    with pytest.raises(SourceGone):
        reader.read(0, 5, into, soon(), timed_hasher())


def test_several_threads_read_one_export_side_by_side(
    transport: Transport, holder: Holder, into: Region
) -> None:
    failures: list[BaseException] = []

    def read() -> None:
        try:
            reader = transport.connect(holder.endpoint, soon())
            read_all(reader, into)
            reader.close()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures
    expected = next(iter(arrays(FLAT, 1).values()))
    assert digest(into, 0, Scratch()) == ChunkHasher(expected[: into.layout.chunk_bytes]).digest()


def test_versions_in_a_row_leave_nothing_behind(
    transport: Transport, holder: Holder, into: Region
) -> None:
    def versions(count: int) -> tuple[int, int]:
        for _ in range(count):
            reader = transport.connect(holder.endpoint, soon())
            read_all(reader, into)
            reader.close()
            endpoint = transport.export(into, ChunkSet.full(into.layout.num_chunks))
            transport.drain(endpoint, soon(0))
            holder.tell(("drain", 1.0))
            holder.export_again()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    pages = Path("/proc/self/statm")
    had = versions(5)
    memory = int(pages.read_text().split()[1])
    assert versions(45) <= had
    grown = (int(pages.read_text().split()[1]) - memory) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 8 * MiB
    transport.release(into)


def test_what_is_closed_serves_no_more(transport: Transport, doomed: Holder, into: Region) -> None:
    reader = transport.connect(doomed.endpoint, soon())
    reader.read(0, 5, into, soon(), timed_hasher())
    doomed.tell("close")

    def read() -> None:  # what the old reader has already, it may give
        reader.read(0, 5, into, soon(5), timed_hasher())
        transport.connect(doomed.endpoint, soon(3)).read(0, 5, into, soon(5), timed_hasher())

    with pytest.raises(ReadFailed):
        read()
    reader.close()
