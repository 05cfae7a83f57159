"""Sets of chunks behave as sets, and survive the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.chunks import ChunkSet


@st.composite
def sets(draw: st.DrawFn) -> tuple[int, set[int], set[int]]:
    size = draw(st.integers(0, 70))
    some = st.sets(st.integers(0, max(0, size - 1)) if size else st.nothing())
    return size, draw(some), draw(some)


@given(sets())
def test_a_chunk_set_is_a_set(case: tuple[int, set[int], set[int]]) -> None:
    size, a, b = case
    x, y = ChunkSet.of(size, a), ChunkSet.of(size, b)
    assert list(x) == sorted(a)
    assert len(x) == len(a)
    assert bool(x) == bool(a)
    assert x.is_full == (len(a) == size)
    assert set(x | y) == a | b
    assert set(x & y) == a & b
    assert set(x - y) == a - b
    assert set(x.missing()) == set(range(size)) - a
    assert [c for c in range(-2, size + 2) if c in x] == sorted(a)


@given(sets())
def test_the_bitmap_has_bit_c_of_byte_c_over_8_and_comes_back(
    case: tuple[int, set[int], set[int]],
) -> None:
    size, a, _ = case
    data = ChunkSet.of(size, a).to_bytes()
    assert len(data) == (size + 7) // 8
    assert {c for c in range(size) if data[c // 8] >> c % 8 & 1} == a
    assert ChunkSet.from_bytes(size, data) == ChunkSet.of(size, a)


@given(sets(), st.integers(-2, 72), st.integers(-2, 72))
def test_has_all_asks_for_every_chunk_of_a_range(
    case: tuple[int, set[int], set[int]], start: int, stop: int
) -> None:
    size, a, _ = case
    chunks = range(start, stop)
    assert ChunkSet.of(size, a).has_all(chunks) == all(c in a for c in chunks)


@pytest.mark.parametrize(("size", "data"), [(8, b""), (8, b"\0\0"), (3, b"\x08"), (0, b"\1")])
def test_a_bitmap_of_another_size_or_with_spare_bits_is_refused(size: int, data: bytes) -> None:
    with pytest.raises(ValueError, match="chunks"):
        ChunkSet.from_bytes(size, data)


def test_adding_what_does_not_exist_is_an_index_error() -> None:
    chunks = ChunkSet(8)
    for chunk in (-1, 8):
        with pytest.raises(IndexError):
            chunks.add(chunk)
    assert not chunks


def test_discarding_removes_only_what_is_there() -> None:
    chunks = ChunkSet.of(8, [1, 2])
    chunks.discard(2)
    chunks.discard(5)
    assert list(chunks) == [1]


def test_a_copy_goes_its_own_way() -> None:
    chunks = ChunkSet.of(8, [1])
    copy = chunks.copy()
    copy.add(2)
    assert list(chunks) == [1]
    assert ChunkSet.full(8).is_full


def test_sets_of_different_sizes_do_not_mix() -> None:
    with pytest.raises(ValueError, match="8 and of 9"):
        ChunkSet(8) | ChunkSet(9)
