"""The layout: offsets, the grid, and what makes two of them differ."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.layout import (
    CHUNKS_AIMED_AT,
    MAX_CHUNK_BYTES,
    MAX_DIFFERENCES,
    MIN_CHUNK_BYTES,
    Layout,
    TensorSpec,
    chunk_bytes_for,
)

MiB = 1 << 20


def spec(name: str, size: int = 4, alias_of: str | None = None) -> TensorSpec:
    return TensorSpec(name, "uint8", (size,), size, None, alias_of)


@given(st.lists(st.integers(0, 5 * MiB), max_size=30))
def test_chunks_cover_the_range_once_and_in_order(sizes: list[int]) -> None:
    layout = Layout(spec(f"t{i}", size) for i, size in enumerate(sizes))
    assert layout.num_bytes == sum(sizes)
    end = 0
    for chunk in range(layout.num_chunks):
        start, length = layout.chunk_range(chunk)
        assert start == end
        assert 0 < length <= layout.chunk_bytes
        assert list(layout.chunks_of(start, length)) == [chunk]
        end = start + length
    assert end == layout.num_bytes


@given(st.integers(0, 1 << 45))
@example(CHUNKS_AIMED_AT * MIN_CHUNK_BYTES + 1)
def test_the_grid_is_a_power_of_two_that_gives_about_256_chunks(num_bytes: int) -> None:
    chunk = chunk_bytes_for(num_bytes)
    assert MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES
    assert chunk & (chunk - 1) == 0
    if CHUNKS_AIMED_AT * MIN_CHUNK_BYTES < num_bytes <= CHUNKS_AIMED_AT * MAX_CHUNK_BYTES:
        assert CHUNKS_AIMED_AT // 2 <= -(-num_bytes // chunk) <= CHUNKS_AIMED_AT


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_a_byte_belongs_to_the_tensor_whose_part_of_the_range_it_is_in(sizes: list[int]) -> None:
    layout = Layout(spec(f"t{i}", size) for i, size in enumerate(sizes))
    owners = [f"t{i}" for i, size in enumerate(sizes) for _ in range(size)]
    assert [layout.tensor_at(byte).name for byte in range(layout.num_bytes)] == owners


def test_a_chunk_that_is_not_there_is_an_index_error() -> None:
    layout = Layout([spec("a")])
    for chunk in (-1, 1):
        with pytest.raises(IndexError):
            layout.chunk_range(chunk)


def test_a_layout_without_bytes_has_no_chunks() -> None:
    assert Layout([]).num_chunks == 0
    assert Layout([spec("empty", 0)]).num_chunks == 0


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([spec("a"), spec("a")], "two tensors have the name 'a'"),
        ([spec("")], "0 characters"),
        ([spec("x" * 1025)], "1025 characters"),
        ([spec("a", alias_of="b")], "'b'"),
        ([spec("b"), TensorSpec("a", "uint8", (4,), 4, None, "b", 5)], "4 to 5 .*'b' shares"),
        ([TensorSpec("a", "uint8", (4,), 4, None, None, 1)], "0 to 1 .*'a' shares"),
        ([spec(f"t{i}", (1 << 64) - 1) for i in range(3)], "bytes"),
        ([spec("c"), spec("b", alias_of="c"), spec("a", alias_of="b")], "'b'"),
        ([spec("a", 1 << 51)], "bytes"),
    ],
)
def test_a_list_that_is_no_layout_is_refused(tensors: list[TensorSpec], complaint: str) -> None:
    with pytest.raises(LayoutMismatch, match=complaint):
        Layout(tensors)


def test_a_tied_tensor_lies_where_its_root_does_and_counts_once() -> None:
    layout = Layout([spec("x", 3), spec("embed", 8), spec("head", 8, "embed"), spec("y", 5)])
    assert layout.num_bytes == 16
    assert list(layout.offsets) == [0, 3, 3, 11]
    assert layout.root("head") == layout.root("embed") == "embed"


def fused() -> list[TensorSpec]:
    """A key of 4 bytes inside a fused weight of 12; and a window that reaches beyond it."""
    return [
        spec("x", 3),
        TensorSpec("k", "uint8", (4,), 4, None, None, 4),
        TensorSpec("qkv", "uint8", (12,), 12, None, "k"),
        TensorSpec("window", "uint8", (4,), 4, None, "k", 10),
        spec("y", 5),
    ]


def test_tensors_that_overlap_lie_in_one_block_each_at_its_place() -> None:
    layout = Layout(fused())
    assert layout.num_bytes == 3 + 14 + 5
    assert list(layout.offsets) == [0, 3 + 4, 3, 3 + 10, 3 + 14]
    assert {layout.block(name) for name in ("k", "qkv", "window")} == {(3, 14)}
    assert (layout.block("x"), layout.block("y")) == ((0, 3), (17, 5))
    assert [layout.is_shared(name) for name in ("x", "k", "qkv")] == [False, True, True]
    assert [layout.tensor_at(3 + byte).name for byte in (0, 4, 13)] == ["qkv", "k", "window"]


def test_a_place_beyond_all_bounds_is_no_layout() -> None:
    far = 2**64 - 1
    with pytest.raises(LayoutMismatch):
        Layout(
            [
                spec("before", 5),
                TensorSpec("root", "uint8", (1,), 1, None, None, far),
                TensorSpec("all", "uint8", (far,), far, None, "root", 0),
            ]
        )


def test_a_block_is_the_same_whichever_of_its_tensors_comes_first() -> None:
    layout = Layout(fused())
    other = Layout(
        [
            TensorSpec("qkv", "uint8", (12,), 12),
            TensorSpec("window", "uint8", (4,), 4, None, "qkv", 10),
            TensorSpec("k", "uint8", (4,), 4, None, "qkv", 4),
            spec("y", 5),
            spec("x", 3),
        ]
    )
    assert other.num_bytes == layout.num_bytes
    assert layout.differences(other) == other.differences(layout) == []
    elsewhere = fused()
    elsewhere[1] = TensorSpec("k", "uint8", (4,), 4, None, None, 3)
    assert layout.differences(Layout(elsewhere)) == [
        "'k' begins 4 bytes into the storage that it shares here, 3 there"
    ]
    apart = [t if t.name != "window" else spec("window") for t in fused()]
    assert layout.differences(Layout(apart)) == [
        "'window' shares the storage of 'k' here, but not there"
    ]


def test_the_order_changes_the_digest_but_makes_no_difference() -> None:
    tensors = [spec(f"t{i}", i + 1) for i in range(50)]
    shuffled = tensors.copy()
    random.Random(7).shuffle(shuffled)
    one, other = Layout(tensors), Layout(shuffled)
    assert one != other
    assert one == Layout(list(tensors))
    assert one.differences(other) == []


def test_differences_name_the_tensor_and_both_sides() -> None:
    here = Layout(
        [
            spec("only_here"),
            TensorSpec("repeats", "float32", (2, 3), 12, (0, 1)),
            TensorSpec("shape", "float32", (2, 3), 24),
            TensorSpec("dtype", "float16", (4,), 8),
            TensorSpec("order", "float32", (2, 3), 24, (1, 2)),
        ]
    )
    there = Layout(
        [
            TensorSpec("order", "float32", (2, 3), 24),
            TensorSpec("repeats", "float32", (2, 3), 24),
            TensorSpec("shape", "float32", (3, 2), 24),
            TensorSpec("dtype", "bfloat16", (4,), 8),
            spec("only_there"),
        ]
    )
    assert here.differences(there) == [
        "'only_here' is missing there",
        "'only_there' is missing here",
        "'repeats' is float32[2, 3] with strides [0, 1] here, float32[2, 3] there",
        "'shape' is float32[2, 3] here, float32[3, 2] there",
        "'dtype' is float16[4] here, bfloat16[4] there",
    ]
    assert here.restrided(there) == ["order"], "it is for the memory to say whether it can be"


def test_other_strides_of_a_tensor_that_shares_its_storage_are_a_difference() -> None:
    def tied(stride: tuple[int, ...] | None) -> Layout:
        root = TensorSpec("a", "uint8", (2, 3), 6, stride)
        return Layout([root, TensorSpec("b", "uint8", (2, 3), 6, None, "a")])

    assert tied(None).restrided(tied((1, 2))) == []
    assert tied(None).differences(tied((1, 2))) == [
        "'a' is uint8[2, 3] here, uint8[2, 3] with strides [1, 2] there"
    ]


def test_a_long_list_of_differences_is_cut_and_counted() -> None:
    differences = Layout(spec(f"t{i}") for i in range(100)).differences(Layout([]))
    assert len(differences) == MAX_DIFFERENCES + 1
    assert differences[-1] == "... and 80 more"


def test_shared_storage_must_be_shared_by_the_same_names_whichever_comes_first() -> None:
    tied = Layout([spec("a"), spec("b", alias_of="a"), spec("c")])
    assert tied.differences(Layout([spec("c"), spec("b"), spec("a", alias_of="b")])) == []
    apart = Layout([spec("a"), spec("b"), spec("c")])
    assert tied.differences(apart) == ["'b' shares the storage of 'a' here, but not there"]
    assert apart.differences(tied) == ["'b' shares the storage of 'a' there, but not here"]
    more = Layout([spec("a"), spec("b", alias_of="a"), spec("c", alias_of="a")])
    assert tied.differences(more)
    assert more.differences(tied)


def test_twenty_thousand_tensors_are_laid_out_and_compared() -> None:
    tensors = [spec(f"layer.{i}.weight", 4096) for i in range(20_000)]
    one, other = Layout(tensors), Layout(reversed(tensors))
    assert one.num_bytes == 20_000 * 4096
    assert one.differences(other) == []
    assert one.offsets[one.index("layer.5.weight")] == 5 * 4096
