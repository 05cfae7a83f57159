"""From tensors to addresses: what is taken, what is refused, and where the bytes are."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_p2p.errors import LayoutMismatch, StateError
from tensorhub_p2p.transfer.footprint import row_major
from tensorhub_p2p.transfer.memory import Extents, Region, view
from tensorhub_p2p.transfer.registering import collect
from tensorhub_p2p.transfer.scratch import Scratch


def content(region: Region, start: int = 0, length: int | None = None) -> bytes:
    length = region.layout.num_bytes - start if length is None else length
    iov = region.pieces(start, length)
    return b"".join(bytes(view(iov[i], iov[i + 1])) for i in range(0, len(iov), 2))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def test_a_module_gives_parameters_and_persistent_buffers_under_state_dict_names() -> None:
    module = Tied()
    region = Region.of(module)
    assert [t.name for t in region.layout.tensors] == list(module.state_dict())
    assert "cache" not in region.layout
    assert "norm.num_batches_tracked" in region.layout


def test_tied_weights_lie_in_the_range_once() -> None:
    region = Region.of(Tied())
    head = region.layout.tensors[region.layout.index("head.weight")]
    assert head.alias_of == "embed.weight"
    assert region.layout.num_bytes == 10 * 4 * 4 + 4 * 4 * 4 + 8


def test_mappings_and_pairs_are_taken_in_their_order() -> None:
    a, b = torch.arange(4.0), torch.ones(2, 2, dtype=torch.bfloat16)
    for source in ({"b": b, "a": a}, [("b", b), ("a", a)], iter([("b", b), ("a", a)])):
        region = Region.of(source)
        assert [(t.name, t.dtype, t.shape) for t in region.layout.tensors] == [
            ("b", "bfloat16", (2, 2)),
            ("a", "float32", (4,)),
        ]
        assert content(region) == raw(b) + raw(a)


def test_numpy_arrays_and_tensors_of_one_kind_have_one_layout() -> None:
    for dtype in ("float32", "int64", "bool", "uint8", "float16", "complex64"):
        array_ = numpy.zeros((3, 4), dtype)
        tensor = torch.zeros(3, 4, dtype=getattr(torch, dtype))
        assert Region.of({"x": array_}).layout == Region.of({"x": tensor}).layout


def test_empty_and_scalar_tensors_are_fine() -> None:
    tensors = {"none": torch.empty(0, 7), "one": torch.tensor(3.5), "also": torch.empty(0)}
    region = Region.of(tensors)
    assert region.layout.num_bytes == 4
    assert content(region) == raw(tensors["one"].reshape(1))
    region.check_unmoved()


def test_a_dense_permutation_is_raw_memory_with_its_strides() -> None:
    base = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    region = Region.of({"x": base.permute(2, 0, 1)})
    assert region.layout.tensors[0].stride == (1, 12, 4)
    assert content(region) == raw(base)
    channels_last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert Region.of({"x": channels_last}).layout.tensors[0].stride == channels_last.stride()


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    odd = torch.as_strided(torch.zeros(6), (1, 6, 1), (99, 1, 42))
    assert Region.of({"x": odd}).layout == Region.of({"x": torch.zeros(1, 6, 1)}).layout


class Wrapper(torch.Tensor):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


class LikeDTensor(torch.Tensor):
    placements = ()

    def to_local(self) -> torch.Tensor:
        return self


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: torch.zeros(9).as_strided((3, 2), (2, 3)), "interleave.*contiguous"),
        (lambda: torch.zeros(99).as_strided((3, 2, 2), (4, 1, 1)), "overlap.*gaps.*contiguous"),
        (lambda: numpy.zeros(4)[::-1], "backwards.*ascontiguousarray"),
        (lambda: numpy.zeros(4, ">f4"), "plain native numbers"),
        (lambda: torch.zeros(3, 1 << 20)[:, ::2], "3145728|1572864 pieces.*contiguous copy"),
        (lambda: torch.zeros(3, device="meta"), "meta device"),
        (lambda: torch.zeros(3).to_sparse(), "layout"),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "lazy conjugate"),
        (lambda: torch.zeros(2).as_subclass(Wrapper), "Wrapper wraps other tensors"),
        (lambda: torch.zeros(2).as_subclass(LikeDTensor), "DTensor.*to_local"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "not initialised"),
        (lambda: 3.5, "float, not a tensor"),
        (lambda: None, "NoneType"),
        (lambda: [1, 2], "list"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(
    make: Callable[[], object], complaint: str
) -> None:
    with pytest.raises(StateError, match=rf"(?s)'bad.weight' cannot be registered.*{complaint}"):
        Region.of({"good": torch.zeros(2), "bad.weight": make()})


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "two tensors have the name 'a'"),
        ({"": torch.zeros(1)}, "''"),
        ({7: torch.zeros(1)}, "7 cannot name"),
        ({"x" * 2000: torch.zeros(1)}, "1 to 1024"),
        ([torch.zeros(2)], "pairs"),
        (3, "int"),
        ("abc", "str"),
        (None, "NoneType"),
    ],
)
def test_what_has_no_proper_names_is_refused(source: Any, complaint: str) -> None:
    with pytest.raises(StateError, match=complaint):
        collect(source)


def test_tensors_that_overlap_lie_in_the_range_once_each_at_its_place() -> None:
    fused = torch.arange(12.0)
    region = Region.of({"k": fused[4:8], "qkv": fused, "tail": fused[9:]})
    assert list(region.pieces(0, 48)) == [fused.data_ptr(), 48]
    assert [(t.alias_of, t.offset) for t in region.layout.tensors] == [
        (None, 16),
        ("k", 0),
        ("k", 36),
    ]


def test_columns_of_one_matrix_are_apart_and_each_is_packed() -> None:
    fused = torch.arange(24.0).reshape(4, 6)
    columns = {"q": fused[:, :3], "k": fused[:, 3:5], "v": fused[:, 5:]}
    region = Region.of(columns)
    assert region.layout == Region.of({n: t.contiguous() for n, t in columns.items()}).layout
    assert content(region) == b"".join(raw(t) for t in columns.values())
    both = Region.of({"q": fused[:, :3], "fused": fused})
    assert both.layout.num_bytes == 96, "where the whole is registered, too, it is shared"
    assert both.layout.tensors[0].stride == (6, 1)


def test_memory_between_overlapping_tensors_that_is_in_none_of_them_is_never_taken() -> None:
    fused = torch.zeros(4, 6)
    with pytest.raises(StateError, match=r"'a'.*overlaps 'b'.*24 bytes are in none.*views of"):
        Region.of({"a": fused[:, :3], "b": fused[:, 2:4]})


def test_an_expanded_tensor_is_the_memory_that_it_repeats() -> None:
    bias = torch.arange(3.0)
    region = Region.of({"x": bias.expand(4, 3), "one": torch.ones(1).expand(7)})
    assert [(t.num_bytes, t.stride) for t in region.layout.tensors] == [(12, (0, 1)), (4, (0,))]
    assert content(region) == raw(bias) + raw(torch.ones(1))
    tied = Region.of({"x": bias.expand(4, 3), "bias": bias, "windows": bias.unfold(0, 2, 1)})
    assert tied.layout.num_bytes == 12


strided = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)


@given(st.lists(st.tuples(st.integers(0, 15), strided, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=300)
def test_each_element_is_in_the_range_where_its_layout_says_and_no_byte_is_twice(
    views: list[tuple[int, list[tuple[int, int]], bool]],
) -> None:
    memory = torch.arange(200, dtype=torch.uint8)
    tensors = {}
    for i, (start, dimensions, wide) in enumerate(views):
        shape, stride = [n for n, _ in dimensions], [s for _, s in dimensions]
        base = memory.view(torch.int16) if wide else memory
        tensors[str(i)] = base.as_strided(shape, stride, start)
    try:
        region = Region.of(tensors)
    except StateError as error:
        if not re.search("overlap|interleave", str(error)):
            raise
        return
    layout, bytes_ = region.layout, content(region)
    assert len(set(bytes_)) == len(bytes_)
    for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
        tensor = tensors[spec.name]
        item, step = tensor.element_size(), spec.stride or row_major(spec.shape)
        for index in itertools.product(*map(range, tensor.shape)):
            at = offset + item * sum(i * s for i, s in zip(index, step, strict=True))
            assert bytes_[at : at + item] == raw(tensor[index].reshape(1))
            assert offset <= at < offset + spec.num_bytes
            start, length = layout.block(spec.name)
            assert start <= at < start + length


@given(st.permutations(range(3)), st.permutations(range(3)), st.booleans(), st.booleans())
def test_another_order_of_dimensions_is_moved_piece_by_piece(
    theirs: list[int], ours: list[int], gaps: bool, wide: bool
) -> None:
    """The same values, in memory in another order: `arranged` follows the publisher's order."""

    def lay(order: list[int], gaps: bool) -> torch.Tensor:
        shape = torch.Size([2, 3, 4])
        memory = torch.empty([*(shape[d] for d in order[:2]), shape[order[2]] + gaps], dtype=dtype)
        back = [order.index(d) for d in range(3)]
        tensor = memory[:, :, : shape[order[2]]].permute(back)
        tensor.copy_(torch.arange(24).reshape(shape))
        return tensor

    dtype = torch.float64 if wide else torch.bfloat16
    publisher, puller = Region.of({"x": lay(theirs, False)}), Region.of({"x": lay(ours, gaps)})
    arranged = puller.arranged(publisher.layout)
    assert arranged.layout == publisher.layout
    assert content(arranged) == content(publisher)
    arranged.check_unmoved()
    buffer = Region.of_buffer(puller.layout, bytearray(content(puller)))
    assert content(buffer.arranged(publisher.layout)) == content(publisher)


def test_another_order_that_makes_too_many_pieces_is_a_mismatch_that_says_so() -> None:
    ours, theirs = torch.empty(1025, 1024).t(), torch.empty(1024, 1025)
    with pytest.raises(
        LayoutMismatch, match=r"(?s)1049600 pieces.*'x' is float32\[1024, 1025\] with strides"
    ):
        Region.of({"x": ours}).arranged(Region.of({"x": theirs}).layout)


def test_parts_of_one_tensor_are_joined_to_one_piece() -> None:
    fused = torch.arange(12.0)
    region = Region.of({"q": fused[:4], "k": fused[4:8], "v": fused[8:]})
    assert list(region.pieces(0, 48)) == [fused.data_ptr(), 48]


def test_a_region_keeps_its_memory_when_the_tensors_are_dropped() -> None:
    region = Region.of({"x": torch.full((1 << 20,), 7, dtype=torch.uint8)})
    assert content(region, 1000, 3) == b"\7\7\7"


def test_a_tensor_that_was_pointed_elsewhere_or_resized_is_named() -> None:
    module = torch.nn.Linear(3, 3)
    region = Region.of(module)
    region.check_unmoved()
    with torch.no_grad():
        module.weight.mul_(2)
    region.check_unmoved()
    module.bias.data = torch.zeros(3)
    with pytest.raises(StateError, match=r"'bias'.*register"):
        region.check_unmoved()
    tensor = torch.zeros(8)
    region = Region.of({"x": tensor})
    tensor.resize_(4)
    with pytest.raises(StateError, match="'x'"):
        region.check_unmoved()
    for change in (
        lambda t: t.t_(),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: t.set_(torch.zeros(2, 3)),
    ):
        tensor = torch.zeros(2, 3)
        region = Region.of({"fine": torch.zeros(1), "x": tensor})
        change(tensor)
        with pytest.raises(StateError, match="'x'"):
            region.check_unmoved()


def test_a_module_whose_state_dict_is_a_copy_is_refused() -> None:
    """A pull would change the copy, and not the module."""

    class Copying(torch.nn.Linear):
        def state_dict(self, **options: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"weight": self.weight.detach().clone(), "bias": self.bias.detach()}

    with pytest.raises(StateError, match=r"'weight'.*none of its parameters.*pairs"):
        Region.of(Copying(2, 2))


def test_tensors_of_a_module_that_are_left_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    module = Tied()
    module.norm.scale = torch.ones(3)
    with caplog.at_level("INFO"):
        region = Region.of(module)
    assert "norm.scale" not in region.layout
    [told] = caplog.messages
    assert re.search("not registered.*: cache, norm.scale;", told)


def test_autograd_hears_that_the_memory_changes() -> None:
    leaf = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        inference = torch.ones(3)
    region = Region.of({"leaf": leaf, "inference": inference, "array": numpy.zeros(3)})
    squares = (leaf * leaf).sum()
    region.note_written()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_read_only_memory_may_be_published_but_not_written() -> None:
    frozen = numpy.zeros(4)
    frozen.flags.writeable = False
    region = Region.of({"x": frozen})
    with pytest.raises(StateError, match="'x' is read-only"):
        region.check_writable()
    Region.of({"x": numpy.zeros(4)}).check_writable()


def test_arranged_maps_by_name_to_the_publishers_order() -> None:
    a, b, c = torch.arange(3.0), torch.arange(5.0), torch.arange(7.0)
    ours = Region.of({"a": a, "tied": a, "b": b, "c": c})
    publisher = Region.of({"c": c.clone(), "tied": (t := a.clone()), "b": b.clone(), "a": t})
    arranged = ours.arranged(publisher.layout)
    assert arranged.layout == publisher.layout
    assert content(arranged) == content(publisher)
    assert ours.arranged(ours.layout) is ours


def test_arranged_lists_the_differences() -> None:
    ours = Region.of({"a": torch.zeros(3), "b": torch.zeros(2)})
    theirs = Region.of({"a": torch.zeros(4), "d": torch.zeros(2)})
    with pytest.raises(LayoutMismatch, match=r"(?s)'b' is missing.*'d' is missing.*'a' is float"):
        ours.arranged(theirs.layout)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12), st.data())
def test_pieces_are_exactly_the_bytes_of_the_range(
    parts: list[tuple[int, bool]], data: st.DataObject
) -> None:
    at, pieces, flat = 1000, [], []
    for length, adjoining in parts:
        at += 0 if adjoining else 10
        pieces.append((at, length))
        flat += range(at, at + length)
        at += length
    extents = Extents(pieces)
    assert extents.num_bytes == len(flat)
    start = data.draw(st.integers(0, len(flat)))
    length = data.draw(st.integers(0, len(flat) - start))
    limit = data.draw(st.integers(1, 14))
    same = Extents.of_table(extents.addresses, extents.lengths)
    for each in (extents, same):
        iov = each.pieces(start, length, limit)
        covered = [b for i in range(0, len(iov), 2) for b in range(iov[i], iov[i] + iov[i + 1])]
        assert covered == flat[start : start + len(covered)]
        assert len(iov) // 2 <= limit
        assert len(covered) == length or len(iov) // 2 == limit
        assert all(iov[1::2])


def test_a_range_beyond_the_end_is_an_index_error() -> None:
    extents = Extents([(1000, 10)])
    for start, length in ((0, 11), (11, 0), (-1, 2), (5, 6)):
        with pytest.raises(IndexError):
            extents.pieces(start, length)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_scratch_gathers_and_scatters_what_was_there(sizes: list[int]) -> None:
    source = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in sizes]
    target = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    scratch = Scratch(4096)
    iovs = [
        array("Q", [x for t in ts for x in (t.data_ptr(), t.nbytes)]) for ts in (source, target)
    ]
    assert scratch.gather(iovs[0]) == sum(sizes)
    assert bytes(scratch.memory[: sum(sizes)]) == b"".join(raw(t) for t in source)
    assert scratch.scatter(iovs[1]) == sum(sizes)
    assert all(map(torch.equal, source, target))
    scratch.close()


def test_scratch_takes_more_pieces_than_one_system_call_does() -> None:
    tensors = [torch.full((3,), i % 251, dtype=torch.uint8) for i in range(3000)]
    iov = array("Q", [x for t in tensors for x in (t.data_ptr(), 3)])
    scratch = Scratch(9000)
    assert scratch.gather(iov) == 9000
    assert bytes(scratch.memory) == b"".join(bytes([i % 251] * 3) for i in range(3000))


def test_scratch_refuses_more_than_it_holds_and_says_when_memory_is_gone() -> None:
    scratch = Scratch(4096)
    with pytest.raises(ValueError, match="4097 bytes"):
        scratch.gather(array("Q", [scratch.address, 4097]))
    with pytest.raises(OSError, match="registered memory"):
        scratch.gather(array("Q", [4096, 16]))


def test_the_transfer_floor_runs_without_torch() -> None:
    code = (
        "import sys, array; sys.modules['torch'] = None\n"
        "from tensorhub_p2p.transfer.transports import cma, tcp\n"
        "from tensorhub_p2p.transfer.digest import Digester\n"
        "from tensorhub_p2p.transfer.memory import Region\n"
        "import numpy\n"
        "assert Region.of({'x': numpy.zeros(3)}).layout.num_bytes == 24\n"
        "assert not [m for m in sys.modules if m.startswith('torch.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_region_of_a_buffer_lies_in_it_as_in_the_layout() -> None:
    a, t = torch.arange(5.0), torch.arange(3, dtype=torch.uint8)
    layout = Region.of({"a": a, "empty": torch.zeros(0), "t": t, "tied": a}).layout
    buffer = bytearray(range(40))
    region = Region.of_buffer(layout, buffer)
    assert content(region) == bytes(range(23)), "aliases take no bytes of their own"
    assert len(region.extents) == 1
    region.check_unmoved()
    region.check_writable()
    assert region.arranged(layout) is region
    other = Region.of({"t": t, "tied": (c := a.clone()), "a": c, "empty": torch.zeros(0)}).layout
    assert content(region.arranged(other)) == bytes([20, 21, 22, *range(20)])


def test_a_buffer_that_is_too_small_is_refused() -> None:
    layout = Region.of({"x": torch.zeros(8)}).layout
    with pytest.raises(ValueError, match="31 bytes"):
        Region.of_buffer(layout, bytearray(31))
    nothing = Region.of({"x": torch.zeros(0)}).layout
    assert content(Region.of_buffer(nothing, bytearray())) == b""
