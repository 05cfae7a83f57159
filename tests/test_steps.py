"""The steps of a read are cut once, hold for the next one, and are forgotten in time."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable

import numpy
import pytest

from tensorhub_p2p.transfer import steps as module
from tensorhub_p2p.transfer.memory import Extents, Region, view
from tensorhub_p2p.transfer.spans import Spans
from tensorhub_p2p.transfer.steps import MAX_STEP_PIECES, Step, Steps

COUNT, BYTES = 3 * MAX_STEP_PIECES, 64
TOTAL = COUNT * BYTES


class Side:
    """Small arrays with gaps in between, as a region and as spans."""

    def __init__(self, count: int = COUNT, size: int = BYTES) -> None:
        whole = numpy.zeros(count * (size + 8), numpy.uint8)
        self.parts = [whole[at : at + size] for at in range(0, len(whole), size + 8)]
        self.region = Region.of([(f"t{i}", part) for i, part in enumerate(self.parts)])
        self.spans = Spans(self.region.extents)

    def fill(self, seed: int) -> None:
        random = numpy.random.default_rng(seed)
        for part in self.parts:
            part[:] = random.integers(0, 256, len(part), dtype=numpy.uint8)

    def content(self, start: int = 0, length: int = TOTAL) -> bytes:
        return joined(self.region.pieces(start, length))


def joined(iov: array[int]) -> bytes:
    return b"".join(bytes(view(iov[i], iov[i + 1])) for i in range(0, len(iov), 2))


def steps_of(
    steps: Steps, table: bytes, spans: Spans, into: Region, start: int, length: int
) -> Iterable[Step]:
    """As a reader asks for them."""
    known = steps.known(table, into, start, length)
    return steps.cut(table, spans, into, start, length) if known is None else known


def carry_out(steps: Iterable[Step]) -> bytes:
    """What the kernel does with them; returns what is to be hashed."""
    hashed = b""
    for vectors, pieces in steps:
        data, at = joined(vectors.remote), 0
        for i in range(0, len(vectors.local), 2):
            address, length = vectors.local[i : i + 2]
            view(address, length)[:] = data[at : at + length]
            at += length
        assert at == len(data) == vectors.num_bytes
        hashed += joined(pieces)
    return hashed


def no_cutting(*_arguments: object) -> None:
    raise AssertionError("these were cut before")


def test_what_was_cut_once_carries_the_next_content_too(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, steps = Side(), Side(), Steps()
    ranges = [(0, 1000), (1000, TOTAL - 1000), (3, 5)]
    for seed in (1, 2):
        source.fill(seed)
        for start, length in ranges:
            hashed = carry_out(
                steps_of(steps, b"there", source.spans, target.region, start, length)
            )
            assert hashed == source.content(start, length)
        assert target.content() == source.content()
        monkeypatch.setattr(Spans, "vectors", no_cutting)


def test_other_tables_targets_and_ranges_have_their_own_steps() -> None:
    sources, targets, steps = [Side(), Side()], [Side(), Side()], Steps()
    for seed, source in enumerate(sources):
        source.fill(seed)
    for _ in range(2):
        for number, source in enumerate(sources):
            for target in targets:
                of = (b"%d" % number, source.spans, target.region)
                for start, length in ((0, 500), (0, TOTAL), (500, 500)):
                    for part in target.parts:
                        part[:] = 0
                    carry_out(steps_of(steps, *of, start, length))
                    assert target.content(start, length) == source.content(start, length)


def test_steps_of_a_read_that_broke_off_are_cut_again() -> None:
    source, target, steps = Side(), Side(), Steps()
    source.fill(1)
    next(iter(steps_of(steps, b"there", source.spans, target.region, 0, TOTAL)))
    carry_out(steps_of(steps, b"there", source.spans, target.region, 0, TOTAL))
    assert target.content() == source.content()


def test_a_target_that_is_gone_is_forgotten() -> None:
    source, target, steps = Side(), Side(), Steps()
    carry_out(steps_of(steps, b"there", source.spans, target.region, 0, TOTAL))
    assert len(steps._known) == 1
    del target
    gc.collect()
    assert len(steps._known) == 0


def num_known(steps: Steps) -> int:
    return sum(
        len(step.pieces) // 2
        for known in steps._known.values()
        for each in known.values()
        for step in each
    )


def test_what_one_flat_target_is_given_from_many_pieces_counts_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, steps = Side(), Steps()
    flat = Region.of({"t": numpy.zeros(TOTAL, numpy.uint8)})
    monkeypatch.setattr(module, "MAX_KNOWN_PIECES", COUNT)
    carry_out(steps_of(steps, b"there", source.spans, flat, 0, TOTAL))
    assert steps.known(b"there", flat, 0, TOTAL) is None


def test_no_more_pieces_are_remembered_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN_PIECES", 300)  # those of the vectors count as well
    source, target, steps = Side(), Side(), Steps()
    source.fill(1)
    counts = []
    for start in range(0, 30 * 30 * BYTES, 30 * BYTES):
        carry_out(steps_of(steps, b"there", source.spans, target.region, start, 30 * BYTES))
        counts.append(num_known(steps))
    assert counts[:5] == [30, 60, 90, 30, 60]
    assert max(counts) <= 100
    before = num_known(steps)
    assert (
        carry_out(steps_of(steps, b"there", source.spans, target.region, 0, TOTAL))
        == source.content()
    )
    assert num_known(steps) == before, "a range of more pieces than that is cut each time"


def test_a_target_in_one_piece_and_a_source_in_one_piece() -> None:
    steps, whole = Steps(), numpy.arange(4096, dtype=numpy.uint32).view(numpy.uint8)
    one, many = Region.of({"t": whole}), Side(256, 64)
    spans = Spans(Extents([(whole.ctypes.data, 4096 * 4)]))
    carry_out(steps_of(steps, b"one", spans, many.region, 0, 4096 * 4))
    expected = many.content(0, 4096 * 4)
    assert expected == whole.tobytes()
    whole[:] = 0
    carry_out(steps_of(steps, b"many", many.spans, one, 0, 4096 * 4))
    assert whole.tobytes() == expected
