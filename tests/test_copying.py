"""Copies of registered memory: right bytes and digests, and memory that comes back."""

from __future__ import annotations

import mmap

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES
from tensorhub_p2p.transfer import copying
from tensorhub_p2p.transfer.copying import HostMemory, available_bytes, copy_chunk
from tensorhub_p2p.transfer.digest import digest
from tensorhub_p2p.transfer.memory import Region, view
from tensorhub_p2p.transfer.scratch import Scratch

MIB = 1 << 20


def weights(sizes: list[int]) -> dict[str, object]:
    rng = numpy.random.default_rng(1)
    return {f"w{i}": rng.integers(0, 255, n, dtype=numpy.uint8) for i, n in enumerate(sizes)}


def copied(source: Region) -> tuple[HostMemory, list[bytes]]:
    memory, scratch = HostMemory(source.layout), Scratch()
    try:
        chunks = range(source.layout.num_chunks)
        return memory, [copy_chunk(source, memory, chunk, scratch) for chunk in chunks]
    finally:
        scratch.close()


def content(region: Region) -> bytes:
    iov = region.pieces(0, region.layout.num_bytes)
    return b"".join(bytes(view(iov[i], iov[i + 1])) for i in range(0, len(iov), 2))


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=4))
def test_a_copy_has_the_bytes_and_digests_of_what_was_copied(sizes: list[int]) -> None:
    source = Region.of(weights(sizes))
    memory, digests = copied(source)
    assert content(memory.region) == content(source)
    scratch = Scratch()
    assert digests == [digest(source, chunk, scratch) for chunk in range(len(digests))]
    scratch.close()


def test_thousands_of_small_tensors_are_copied_as_well() -> None:
    memory_of_all = numpy.random.default_rng(2).integers(0, 255, (3000, 1000), dtype=numpy.uint8)
    source = Region.of({f"w{i}": memory_of_all[i, :900] for i in range(3000)})
    assert content(copied(source)[0].region) == content(source)


def test_the_digest_is_that_of_the_copy() -> None:
    tensors = weights([MIN_CHUNK_BYTES])
    source = Region.of(tensors)
    memory, (before,) = copied(source)
    tensors["w0"][5] ^= 1  # type: ignore[index]
    scratch = Scratch()
    assert copy_chunk(source, memory, 0, scratch) != before
    assert digest(memory.region, 0, scratch) != before
    scratch.close()


def test_memory_that_is_freed_is_the_systems_again_whoever_still_refers_to_it() -> None:
    source = Region.of({"w": numpy.ones(64 * MIB, dtype=numpy.uint8)})
    before = resident()
    memory, _ = copied(source)
    assert resident() - before > 60 * MIB
    memory.free()
    assert resident() - before < 4 * MIB
    assert not any(content(memory.region)[:MIB]), "what is read there is zeros"


def test_memory_that_is_not_there_is_an_error_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Region.of({"w": numpy.ones(MIB, dtype=numpy.uint8)}).layout
    monkeypatch.setattr(copying, "available_bytes", lambda: MIB - 1)
    with pytest.raises(MemoryError, match=rf"{MIB} bytes.*{MIB - 1} are available"):
        HostMemory(layout)


def test_a_mapping_that_the_system_refuses_is_a_memory_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    layout = Region.of({"w": numpy.ones(MIB, dtype=numpy.uint8)}).layout
    monkeypatch.setattr(copying.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="Cannot allocate"):
        HostMemory(layout)


def test_the_machine_says_what_is_available() -> None:
    available = available_bytes()
    assert available is not None
    assert available > MIB
