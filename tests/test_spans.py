"""Small pieces read as long spans: every byte where it belongs, and no page that wasn't there."""

from __future__ import annotations

import ctypes
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.transfer.memory import Extents, view
from tensorhub_p2p.transfer.spans import MAX_GAP, Spans

ROOM = 1 << 16


def iov(data: array[int]) -> list[tuple[int, int]]:
    return list(zip(data[0::2], data[1::2], strict=True))


def scattered(base: int, sizes: list[int], gaps: list[int]) -> Extents:
    pieces, at = [], base
    for size, gap in zip(sizes, gaps, strict=True):
        pieces.append((at, size))
        at += size + gap
    return Extents(pieces)


def transfer(remote: array[int], local: array[int]) -> int:
    """What the kernel does with the vectors of one call."""
    data = b"".join(bytes(view(address, length)) for address, length in iov(remote))
    at = 0
    for address, length in iov(local):
        view(address, length)[:] = data[at : at + length]
        at += length
    assert at == len(data)
    return at


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)
gap = st.sampled_from([0, 0, 1, 80, 500])


@given(lengths, st.data())
def test_every_piece_arrives_however_both_sides_are_cut(
    sizes: list[int], data: st.DataObject
) -> None:
    total = sum(sizes)
    source, target = ctypes.create_string_buffer(ROOM), ctypes.create_string_buffer(ROOM)
    source.raw = random.Random(total).randbytes(ROOM)
    gaps = data.draw(st.lists(gap, min_size=len(sizes), max_size=len(sizes)))
    theirs = scattered(ctypes.addressof(source), sizes, gaps)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=10)))
    ours = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    if data.draw(st.booleans()):
        ours = sizes
    here = scattered(ctypes.addressof(target), ours, [3] * len(ours))
    start = data.draw(st.integers(0, total - 1))
    length = data.draw(st.integers(1, total - start))
    sink = ctypes.create_string_buffer(MAX_GAP + 1)
    spans = Spans(theirs)
    limit = data.draw(st.integers(1, 50))
    reach = spans.reach(start, length, limit)
    assert 1 <= reach <= length
    assert len(theirs.pieces(start, reach)) <= 2 * limit
    vectors = spans.vectors(start, reach, here.pieces(start, reach), ctypes.addressof(sink))
    assert transfer(vectors.remote, vectors.local) == vectors.num_bytes
    assert max(len(vectors.remote), len(vectors.local)) <= 6 * max(limit, len(here))

    def content(extents: Extents) -> bytes:
        return b"".join(bytes(view(a, n)) for a, n in iov(extents.pieces(start, reach)))

    assert content(here) == content(theirs)


def test_only_what_no_untouched_page_lies_between_is_joined() -> None:
    sizes = [10, 10, 10, 10]
    near = scattered(1 << 20, sizes, [MAX_GAP, MAX_GAP, MAX_GAP, 0])
    spans = Spans(near)
    vectors = spans.vectors(0, 40, array("Q", [1 << 30, 40]), 1 << 31)
    assert iov(vectors.remote) == [(1 << 20, 40 + 3 * MAX_GAP)]
    far = Spans(scattered(1 << 20, sizes, [MAX_GAP + 1] * 4))
    assert len(iov(far.vectors(0, 40, array("Q", [1 << 30, 40]), 1 << 31).remote)) == 4
    backwards = Spans(Extents([(1000 - at, 10) for at in range(0, 40, 10)]))
    assert len(iov(backwards.vectors(0, 40, array("Q", [1 << 30, 40]), 1 << 31).remote)) == 4


def test_adjacent_pieces_go_to_one_place_in_one_vector() -> None:
    spans = Spans(Extents([(4096, 100)]))
    vectors = spans.vectors(10, 50, array("Q", [1 << 30, 50]), 1 << 31)
    assert (iov(vectors.remote), iov(vectors.local)) == ([(4106, 50)], [(1 << 30, 50)])


def test_tables_of_thousands_stay_below_the_system_calls_limit() -> None:
    sizes, limit = [64] * 5000, 341
    theirs = scattered(1 << 20, sizes, [16] * 5000)
    ours = scattered(1 << 30, [100] * 3200, [8] * 3200)
    spans = Spans(theirs)
    start, most = 0, 0
    while start < 320_000:
        step = spans.reach(start, 1 << 19, limit)
        pieces = ours.pieces(start, min(step, 320_000 - start), limit)
        step = sum(pieces[1::2])
        vectors = spans.vectors(start, step, pieces, 1 << 31)
        most = max(most, len(vectors.local) // 2, len(vectors.remote) // 2)
        start += step
    assert start == 320_000
    assert 600 < most <= 1023


@pytest.mark.parametrize("start", [0, 3, 99, 100])
def test_a_range_may_begin_and_end_inside_one_piece(start: int) -> None:
    spans = Spans(scattered(1 << 20, [100, 100], [8, 0]))
    vectors = spans.vectors(start, 5, array("Q", [1 << 30, 5]), 1 << 31)
    assert sum(vectors.local[1::2]) == sum(vectors.remote[1::2]) == vectors.num_bytes
