"""What a user registers: named tensors, and whether and where each one can be moved.

Rule of this file. It turns tensors into addresses and specs, and says no to those that
can't be moved; it never copies a byte. torch is imported by whoever owns the tensors,
never from here: a process without tensors runs without torch.

What can be registered: tensors in host memory whose elements lie in equal runs at equal
distances (footprint.py), however they share it (sharing.py). A dense tensor is one run, a
slice of columns one for each row; a dimension that only repeats has no bytes of its own. How
the elements follow one another in memory is part of the layout, the gaps between them are
not. Everything else is a StateError that names the tensor and what to do.

Bounds: `MAX_PIECES` runs in all.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.layout import MAX_NAME_CHARS, TensorSpec
from tensorhub_p2p.transfer.footprint import Footprint, NoRuns, packed_stride, plain_stride
from tensorhub_p2p.transfer.sharing import Block, find_blocks

MAX_PIECES = 1 << 20
"""Pieces of memory that the tensors of one shard may be scattered over."""
MAX_TOLD = 8
"""Names in a line of the log; more are counted."""

_log = logging.getLogger(__name__)


def collect(source: object) -> list[tuple[str, Any]]:
    """The named tensors in what a user registers.

    `source` is an nn.Module (its parameters and persistent buffers, under their
    `state_dict` names), a mapping from names, or (name, tensor) pairs. Values are torch
    tensors, or numpy arrays. Raises StateError for anything that isn't, and if there is none.
    """
    if callable(getattr(source, "named_parameters", None)) and hasattr(source, "state_dict"):
        pairs = _of_module(source)
    elif isinstance(source, Mapping):
        pairs = list(source.items())
    elif isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        pairs = [_pair(item) for item in source]
    else:
        raise StateError(
            f"cannot register a {type(source).__name__}: "
            "give an nn.Module, a mapping of names to tensors, or (name, tensor) pairs"
        )
    seen: set[str] = set()
    for name, _ in pairs:
        _check_name(name, seen)
    return pairs


def _of_module(module: Any) -> list[tuple[str, Any]]:
    """What `state_dict` names, as far as it is the module's own memory."""
    pairs = [
        (name, value)
        for name, value in module.state_dict(keep_vars=True).items()
        if not _is_extra_state(name)
    ]
    own = [
        tensor
        for _, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
    ]
    ids = {id(tensor) for tensor in own}
    strange = [(n, t) for n, t in pairs if id(t) not in ids and hasattr(t, "untyped_storage")]
    memory = {tensor.untyped_storage().data_ptr() for tensor in own} if strange else set()
    for name, tensor in strange:
        if tensor.untyped_storage().data_ptr() not in memory:
            raise _unfit(
                name,
                "state_dict() of this module makes it, it is none of its parameters and buffers",
                "register (name, tensor) pairs of the memory that the module works with",
            )
    _tell_left_out(module, {id(value) for _, value in pairs})
    return pairs


def _is_extra_state(name: str) -> bool:
    """Opaque, pickled state of some modules (a name that torch reserves): not weights."""
    return name.rpartition(".")[2] == "_extra_state"


def _tell_left_out(module: Any, taken: set[int]) -> None:
    """Log the tensors of the module that `state_dict` doesn't have: caches, mostly."""
    left_out = [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name, value in (*vars(part).items(), *part.named_buffers(recurse=False))
        if hasattr(value, "data_ptr") and hasattr(value, "stride") and id(value) not in taken
    ]
    if left_out:
        shown, more = ", ".join(left_out[:MAX_TOLD]), len(left_out) - MAX_TOLD
        _log.info(
            "not registered, as state_dict() does not have them: %s%s; give (name, tensor) pairs "
            "if they are to be moved",
            shown,
            f" and {more} more" if more > 0 else "",
        )


def _pair(item: object) -> tuple[str, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    raise StateError(f"cannot register a {type(item).__name__}: give (name, tensor) pairs")


def _check_name(name: object, seen: set[str]) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        shown = repr(name) if not isinstance(name, str) or not name else repr(name[:40]) + "…"
        raise StateError(
            f"{shown} cannot name a tensor: names are strings of 1 to {MAX_NAME_CHARS} characters"
        )
    if name in seen:
        raise StateError(f"two tensors have the name {name!r}: give each its own")
    seen.add(name)


def _unfit(name: str, what: str, do: str) -> StateError:
    return StateError(f"tensor {name!r} cannot be registered: {what}; {do}")


class Found:
    """One tensor as found: where its bytes are, and its spec.

    `shape` and `stride` (in elements of `item` bytes) are those of the tensor; those of the
    spec are the layout's.
    """

    __slots__ = (
        "address_of",
        "footprint",
        "form",
        "form_of",
        "holds",
        "item",
        "memory",
        "num_bytes",
        "shape",
        "size",
        "size_of",
        "spec",
        "stride",
        "tensor",
        "writable",
    )

    def __init__(
        self,
        spec: TensorSpec,
        footprint: Footprint,
        tensor: Any,
        *,
        address_of: Callable[[Any], int],
        form_of: Callable[[Any], object],
        size_of: Callable[[Any], int] = attrgetter("nbytes"),
        item: int = 1,
        shape: tuple[int, ...] = (),
        stride: tuple[int, ...] = (),
        holds: Any,
        writable: bool,
    ) -> None:
        self.spec = spec
        self.footprint = footprint
        self.memory: Iterable[tuple[int, int]] | None = None
        """(address, length) of its block, where that is more than the tensor."""
        self.item, self.shape, self.stride = item, shape, stride
        self.tensor = tensor
        self.address_of = address_of
        self.form_of = form_of
        self.form = form_of(tensor)
        self.size_of = size_of
        self.size = size_of(tensor)
        self.num_bytes: int = tensor.nbytes
        self.holds = holds
        """Keeps the memory even if the tensor is pointed at other memory later."""
        self.writable = writable

    def pieces(self) -> Iterable[tuple[int, int]]:
        """(address, length) of the memory that this tensor, as a root, has in the range."""
        if self.memory is not None:
            return self.memory
        if not self.footprint.steps:
            return ((self.footprint.address, self.footprint.run),)
        return self.footprint.runs()

    def moved(self) -> bool:
        """Whether the tensor's memory is elsewhere, or is cut in another way, by now."""
        tensor = self.tensor
        if self.size_of(tensor) != self.size or self.form_of(tensor) != self.form:
            return True
        return self.num_bytes > 0 and self.address_of(tensor) != self.footprint.address

    def in_order_of(self, spec: TensorSpec) -> Found:
        """The same tensor as what `spec` says, whose strides are others; it shares nothing."""
        f = self.footprint
        found = Found(
            spec,
            Footprint.in_order_of(spec.stride, f.address, self.item, self.shape, self.stride),
            self.tensor,
            address_of=self.address_of,
            form_of=self.form_of,
            size_of=self.size_of,
            item=self.item,
            shape=self.shape,
            stride=self.stride,
            holds=self.holds,
            writable=self.writable,
        )
        found.form, found.size, found.num_bytes = self.form, self.size, self.num_bytes
        return found


def _find(name: str, tensor: Any) -> Found:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _find_torch(name, tensor, torch)
    if hasattr(tensor, "__array_interface__") and hasattr(tensor, "strides"):
        return _find_array(name, tensor)
    raise _unfit(name, f"it is a {type(tensor).__name__}, not a tensor", "leave it out")


def _find_torch(name: str, tensor: Any, torch: Any) -> Found:
    _check_kind(name, tensor, torch)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    address, item = tensor.data_ptr() if tensor.nbytes else 0, tensor.element_size()
    if tensor.nbytes and not address:
        raise _unfit(name, "there is no memory behind it", "materialise it first")
    if tensor.is_contiguous():  # nearly all are, and there are many
        footprint, packed = Footprint(address, tensor.nbytes), None
    else:
        footprint = _footprint(name, address, item, shape, stride, "tensor.contiguous()")
        packed = packed_stride(shape, stride)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Found(
        TensorSpec(name, dtype, shape, footprint.num_bytes, packed),
        footprint,
        tensor,
        address_of=torch.Tensor.data_ptr,
        # Each replicate asks this of thousands: row-major ones are told by what costs least.
        form_of=torch.Tensor.is_contiguous if tensor.is_contiguous() else torch.Tensor.stride,
        size_of=torch.Tensor.numel,
        item=item,
        shape=shape,
        stride=stride,
        holds=tensor.detach(),
        writable=True,
    )


def _footprint(
    name: str,
    address: int,
    item: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    instead: str,
) -> Footprint:
    try:
        return Footprint.of(address, item, shape, stride)
    except NoRuns as error:
        raise _unfit(name, str(error), f"register {instead} instead") from None


def _check_kind(name: str, tensor: Any, torch: Any) -> None:
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        _check_subclass(name, tensor, torch)
    if tensor.is_meta:
        raise _unfit(name, "it is on the meta device", "materialise it first")
    if not tensor.is_cpu:
        raise _unfit(
            name, f"memory of {tensor.device} is not supported yet", "register a copy on the CPU"
        )
    if tensor.layout is not torch.strided:
        raise _unfit(name, f"its layout is {tensor.layout}", "register a dense copy")
    if tensor.is_quantized:
        raise _unfit(
            name, "its scale and zero point lie outside its memory", "register tensor.int_repr()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise _unfit(
            name,
            "it is a lazy conjugate or negation",
            "register tensor.resolve_conj().resolve_neg()",
        )


def _check_subclass(name: str, tensor: Any, torch: Any) -> None:
    if hasattr(tensor, "to_local") and hasattr(tensor, "placements"):
        raise _unfit(name, "DTensors are not supported yet", "register tensor.to_local()")
    if torch.nn.parameter.is_lazy(tensor):
        raise _unfit(name, "it is not initialised yet", "run the module once first")
    if hasattr(tensor, "__tensor_flatten__"):
        raise _unfit(
            name, f"{type(tensor).__name__} wraps other tensors", "register the inner ones"
        )


def _find_array(name: str, tensor: Any) -> Found:
    dtype = tensor.dtype
    if dtype.hasobject or dtype.fields or not dtype.isnative or not dtype.itemsize:
        raise _unfit(name, f"its elements are {tensor.dtype}", "register plain native numbers")
    item, shape, instead = tensor.dtype.itemsize, tuple(tensor.shape), "numpy.ascontiguousarray()"
    if any(step % item for step in tensor.strides):
        raise _unfit(
            name, "its elements are not aligned to their size", f"register {instead} of it"
        )
    stride = tuple(step // item for step in tensor.strides)
    footprint = _footprint(name, _array_address(tensor), item, shape, stride, f"{instead} of it")
    return Found(
        TensorSpec(
            name, str(tensor.dtype), shape, footprint.num_bytes, packed_stride(shape, stride)
        ),
        footprint,
        tensor,
        address_of=_array_address,
        form_of=attrgetter("strides"),
        item=item,
        shape=shape,
        stride=stride,
        holds=tensor,
        writable=bool(tensor.flags.writeable),
    )


def _array_address(tensor: Any) -> int:
    address: int = tensor.ctypes.data
    return address


def _share(found: list[Found]) -> None:
    """Turn tensors that are the same memory into aliases of the first, and find the blocks."""
    same: dict[Footprint, list[Found]] = {}
    pieces = 0
    for f in found:
        if f.footprint.run:
            tied = same.setdefault(f.footprint, [])
            tied.append(f)
            pieces += f.footprint.num_runs if len(tied) == 1 else 0
            if pieces > MAX_PIECES:
                raise _unfit(
                    f.spec.name,
                    f"it is {f.footprint.num_runs} pieces of {f.footprint.run} bytes, which makes "
                    f"more than {MAX_PIECES} in all",
                    "register a contiguous copy",
                )
    for tied in same.values():
        for f in tied[1:]:
            s = f.spec
            f.spec = TensorSpec(s.name, s.dtype, s.shape, s.num_bytes, s.stride, tied[0].spec.name)
    order = {id(f): i for i, f in enumerate(found)}
    for block in find_blocks(list(same)):
        groups = list(same.values())
        members = [f for i in block.members for f in groups[i]]
        _make_block(block, sorted(members, key=lambda f: order[id(f)]))


def _make_block(block: Block, members: list[Found]) -> None:
    """Have all these tensors, in the order of registration, lie in one stretch of memory."""
    root = members[0]
    if block.gaps:
        names = ", ".join(repr(f.spec.name) for f in members[1:MAX_TOLD])
        raise _unfit(
            root.spec.name,
            f"it overlaps {names} in memory, and between them {block.gaps} bytes are in none "
            "of them",
            "register the tensor that they are views of as well",
        )
    for f in members:
        f.memory = ((block.start, block.length),)
        f.spec = TensorSpec(
            f.spec.name,
            f.spec.dtype,
            f.spec.shape,
            f.footprint.span,
            plain_stride(f.shape, f.stride),
            None if f is root else root.spec.name,
            f.footprint.address - block.start,
        )


def find_all(source: object) -> list[Found]:
    """The tensors in what a user registers (see `collect`), in that order.

    Those that are the same memory are aliases of the first of them. Raises StateError,
    which names the tensor, for everything that can't be moved.
    """
    found = [_find(name, tensor) for name, tensor in collect(source)]
    _share(found)
    return found


def whom_to_tell(found: Iterable[Found]) -> list[Any]:
    """The torch tensors whose versions have to rise when these change in place.

    Views of one tensor count their versions together: one of them is enough.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    tensors: dict[int, Any] = {}
    for tensor in (f.tensor for f in found):
        if isinstance(tensor, torch.Tensor):
            tensors.setdefault(id(tensor if tensor._base is None else tensor._base), tensor)
    return list(tensors.values())


def note_written(tensors: list[Any]) -> None:
    """Tell autograd that these tensors (see `whom_to_tell`) change in place: it can't see that.

    What was computed from them before and is differentiated afterwards is an error then,
    instead of wrong gradients.
    """
    if not tensors:
        return
    torch = sys.modules["torch"]
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # an older torch takes one at a time
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
