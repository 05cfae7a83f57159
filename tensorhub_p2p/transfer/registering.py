"""What a user registers: named tensors, and whether and where each one can be moved.

Rule of this file. It turns tensors into addresses and specs, and says no to those that
can't be moved; it never copies a byte. torch is imported by whoever owns the tensors,
never from here: a process without tensors runs without torch.

What can be registered: dense tensors in host memory. Row-major or a dense permutation
(then the strides are part of the layout). Everything else is a StateError that names
the tensor and what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.layout import MAX_NAME_CHARS, TensorSpec


def collect(source: object) -> list[tuple[str, Any]]:
    """The named tensors in what a user registers.

    `source` is an nn.Module (its parameters and persistent buffers, under their
    `state_dict` names), a mapping from names, or (name, tensor) pairs. Values are torch
    tensors, or numpy arrays. Raises StateError for anything that isn't.
    """
    if callable(getattr(source, "named_parameters", None)) and hasattr(source, "state_dict"):
        state = source.state_dict(keep_vars=True)
        # Opaque, pickled state of some modules (a name that torch reserves): not weights.
        pairs = [(name, value) for name, value in state.items() if not _is_extra_state(name)]
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


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


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
    """One tensor as found: the address of its memory, and its spec while nothing is shared."""

    __slots__ = ("address", "address_of", "holds", "spec", "tensor", "writable")

    def __init__(
        self,
        spec: TensorSpec,
        tensor: Any,
        address_of: Callable[[Any], int],
        holds: Any,
        writable: bool,
    ) -> None:
        self.spec = spec
        self.address = address_of(tensor)
        self.address_of = address_of
        self.tensor = tensor
        self.holds = holds
        """Keeps the memory even if the tensor is pointed at other memory later."""
        self.writable = writable

    def moved(self) -> bool:
        """Whether the tensor's memory is elsewhere, or has another size, by now."""
        num_bytes: int = self.tensor.nbytes
        if num_bytes != self.spec.num_bytes:
            return True
        return num_bytes > 0 and self.address_of(self.tensor) != self.address


def _find(name: str, tensor: Any) -> Found:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _find_torch(name, tensor, torch)
    if hasattr(tensor, "__array_interface__") and hasattr(tensor, "strides"):
        return _find_array(name, tensor)
    raise _unfit(name, f"it is a {type(tensor).__name__}, not a tensor", "leave it out")


def _find_torch(name: str, tensor: Any, torch: Any) -> Found:
    _check_kind(name, tensor, torch)
    shape, stride = tuple(tensor.shape), None
    if not tensor.is_contiguous():
        stride = _dense_stride(shape, tensor.stride())
        if stride == _SPARSE:
            raise _unfit(name, "it is not dense in memory", "register tensor.contiguous() instead")
    num_bytes = tensor.nbytes
    if num_bytes and not tensor.data_ptr():
        raise _unfit(name, "there is no memory behind it", "materialise it first")
    dtype = str(tensor.dtype).removeprefix("torch.")
    spec = TensorSpec(name, dtype, shape, num_bytes, stride)
    return Found(spec, tensor, torch.Tensor.data_ptr, tensor.detach(), writable=True)


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
    if tensor.dtype.hasobject or tensor.dtype.fields or not tensor.dtype.isnative:
        raise _unfit(name, f"its elements are {tensor.dtype}", "register plain native numbers")
    item = tensor.dtype.itemsize
    stride = _dense_stride(tensor.shape, tuple(s // item for s in tensor.strides))
    if stride == _SPARSE or any(s % item for s in tensor.strides):
        raise _unfit(name, "it is not dense in memory", "register numpy.ascontiguousarray() of it")
    spec = TensorSpec(name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes, stride)
    return Found(spec, tensor, _array_address, tensor, bool(tensor.flags.writeable))


def _array_address(tensor: Any) -> int:
    address: int = tensor.ctypes.data
    return address


_SPARSE = (-1,)
"""Stands for strides that leave gaps, or overlap."""


def _dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """None for row-major, the strides of a dense permutation, _SPARSE for anything else.

    Strides of dimensions of size 1 mean nothing; they are reported as 1, so that equal
    memory gives equal strides.
    """
    if 0 in shape or _is_chain(zip(reversed(stride), reversed(shape), strict=True)):
        return None
    if not _is_chain(sorted(zip(stride, shape, strict=True))):
        return _SPARSE
    return tuple(step if size > 1 else 1 for step, size in zip(stride, shape, strict=True))


def _is_chain(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether each (step, size) begins where the one before it ends."""
    expected = 1
    for step, size in dimensions:
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def _share(found: list[Found]) -> None:
    """Turn tensors that are the same memory into aliases of the first; refuse half of it."""
    roots: dict[tuple[int, int], str] = {}
    for f in found:
        if not f.spec.num_bytes:
            continue
        root = roots.setdefault((f.address, f.spec.num_bytes), f.spec.name)
        if root != f.spec.name:
            s = f.spec
            f.spec = TensorSpec(s.name, s.dtype, s.shape, s.num_bytes, s.stride, root)
    end, before = 0, ""
    for address, num_bytes in sorted(roots):
        name = roots[address, num_bytes]
        if address < end:
            raise _unfit(name, f"it overlaps {before!r} in memory", "register only one of them")
        end, before = address + num_bytes, name


def find_all(source: object) -> list[Found]:
    """The tensors in what a user registers (see `collect`), in that order.

    Those that are the same memory are aliases of the first of them. Raises StateError,
    which names the tensor, for everything that can't be moved.
    """
    found = [_find(name, tensor) for name, tensor in collect(source)]
    _share(found)
    return found
