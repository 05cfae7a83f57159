"""Where a shard's bytes are: from what the user registers to addresses in this process.

Rule of this file. It turns tensors into addresses, and a range of the layout into the
pieces of memory behind it; it never copies a byte. torch is imported by whoever owns the
tensors, never from here: a process without tensors runs without torch.

Theory. A range of a layout is scattered over tensors. `Extents` is that map, flattened:
neighbours in memory are joined, and any range of it becomes an iovec, an `array('Q')`
of address, length, address, length …, which the system calls take as it is. A `Region`
is a layout plus the extents of one process, and keeps the memory behind it alive.

What can be registered: dense tensors in host memory. Row-major or a dense permutation
(then the strides are part of the layout). Everything else is a StateError that names
the tensor and what to do.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from tensorhub_p2p.errors import LayoutMismatch, StateError
from tensorhub_p2p.protocol.layout import MAX_NAME_CHARS, Layout, TensorSpec

IOV_MAX = 1024
"""Vectors that one system call takes (Linux)."""

# All of the process's address space as one object: a slice of it is a view of the memory
# there, for a tenth of what making a ctypes array for each piece costs.
_SPACE = memoryview((ctypes.c_char * (1 << 62)).from_address(0)).cast("B")


def view(address: int, length: int) -> memoryview:
    """Raw memory as a writable buffer. The caller keeps what lies there alive."""
    return _SPACE[address : address + length]


# --- what the user registers -------------------------------------------------------------


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


class _Found:
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


def _find(name: str, tensor: Any) -> _Found:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _find_torch(name, tensor, torch)
    if hasattr(tensor, "__array_interface__") and hasattr(tensor, "strides"):
        return _find_array(name, tensor)
    raise _unfit(name, f"it is a {type(tensor).__name__}, not a tensor", "leave it out")


def _find_torch(name: str, tensor: Any, torch: Any) -> _Found:
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
    return _Found(spec, tensor, torch.Tensor.data_ptr, tensor.detach(), writable=True)


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


def _find_array(name: str, tensor: Any) -> _Found:
    if tensor.dtype.hasobject or tensor.dtype.fields or not tensor.dtype.isnative:
        raise _unfit(name, f"its elements are {tensor.dtype}", "register plain native numbers")
    item = tensor.dtype.itemsize
    stride = _dense_stride(tensor.shape, tuple(s // item for s in tensor.strides))
    if stride == _SPARSE or any(s % item for s in tensor.strides):
        raise _unfit(name, "it is not dense in memory", "register numpy.ascontiguousarray() of it")
    spec = TensorSpec(name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes, stride)
    return _Found(spec, tensor, _array_address, tensor, bool(tensor.flags.writeable))


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


# --- ranges of memory --------------------------------------------------------------------


class Extents:
    """A contiguous virtual range as the pieces of memory that it is scattered over."""

    __slots__ = ("addresses", "lengths", "num_bytes", "starts")

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        """`pieces` are (address, length) in order; neighbours in memory are joined."""
        self.starts = array("Q")
        self.addresses = array("Q")
        self.lengths = array("Q")
        self.num_bytes = 0
        end = -1
        for address, length in pieces:
            if not length:
                continue
            if address == end:
                self.lengths[-1] += length
            else:
                self.starts.append(self.num_bytes)
                self.addresses.append(address)
                self.lengths.append(length)
            self.num_bytes += length
            end = address + length

    @classmethod
    def of_table(cls, addresses: array[int], lengths: array[int]) -> Extents:
        """The same from two columns, as another process's extents are laid out."""
        self = cls(())
        ends = array("Q", accumulate(lengths))
        self.addresses, self.lengths = addresses, lengths
        self.starts = array("Q", [0]) + ends[:-1] if ends else ends
        self.num_bytes = ends[-1] if ends else 0
        return self

    def __len__(self) -> int:
        """How many pieces."""
        return len(self.starts)

    def pieces(self, start: int, length: int, limit: int = sys.maxsize) -> array[int]:
        """The memory behind [start, start + length): address, length, address, length …

        At most `limit` pieces: then they cover only the beginning of the range.
        IndexError if the range isn't within this one.
        """
        if start < 0 or length < 0 or start + length > self.num_bytes:
            raise IndexError(f"bytes {start} to {start + length} of {self.num_bytes}")
        if not length:
            return array("Q")
        first = bisect_right(self.starts, start) - 1
        last = bisect_right(self.starts, start + length - 1, lo=first)
        cut = last - first > limit
        if cut:
            last = first + limit
        iov = array("Q", bytes(16 * (last - first)))
        iov[0::2] = self.addresses[first:last]
        iov[1::2] = self.lengths[first:last]
        if not cut:
            iov[-1] -= self.starts[last - 1] + self.lengths[last - 1] - (start + length)
        inside = start - self.starts[first]
        iov[0] += inside
        iov[1] -= inside
        return iov


def address_of(iov: array[int]) -> int:
    """Where an iovec itself lies, for the system calls."""
    return iov.buffer_info()[0]


class Region:
    """The memory of one shard in this process, as the virtual range of its layout.

    It keeps the memory alive, not the promise that a tensor still uses it:
    `check_unmoved` does that.
    """

    __slots__ = ("_found", "extents", "layout")

    def __init__(self, layout: Layout, found: list[_Found]) -> None:
        """`found[i]` is the memory of `layout.tensors[i]`. Use `Region.of` instead."""
        self.layout = layout
        self._found = found
        self.extents = Extents(
            (tensor.address, spec.num_bytes)
            for spec, tensor in zip(layout.tensors, found, strict=True)
            if spec.alias_of is None
        )

    @classmethod
    def of(cls, source: object) -> Region:
        """The region of what a user registers (see `collect`), in that order.

        Raises StateError, which names the tensor, for everything that can't be moved.
        """
        found = [_find(name, tensor) for name, tensor in collect(source)]
        _share(found)
        return cls(Layout(f.spec for f in found), found)

    @classmethod
    def of_buffer(cls, layout: Layout, buffer: Any) -> Region:
        """The region that lies in one writable buffer, in the order of the layout.

        The buffer has `layout.num_bytes` or more. ValueError if it is smaller.
        """
        memory = memoryview(buffer).cast("B")
        if memory.nbytes < layout.num_bytes:
            raise ValueError(f"{memory.nbytes} bytes for {layout!r}")
        first = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if memory.nbytes else 0
        return cls(layout, [_slice(memory, first, layout, i) for i in range(len(layout.tensors))])

    def pieces(self, start: int, length: int, limit: int = sys.maxsize) -> array[int]:
        """See `Extents.pieces`."""
        return self.extents.pieces(start, length, limit)

    def arranged(self, layout: Layout) -> Region:
        """The same memory as the range of `layout`: what it calls x is what is x here.

        Raises LayoutMismatch, with the differences, unless all of it agrees.
        """
        if layout.digest == self.layout.digest:
            return self
        differences = self.layout.differences(layout)
        if differences:
            raise LayoutMismatch(
                "the registered tensors are not those of the publication:\n  "
                + "\n  ".join(differences)
            )
        found = [self._found[self.layout.index(spec.name)] for spec in layout.tensors]
        return Region(layout, found)

    def check_unmoved(self) -> None:
        """StateError, naming the tensor, if one no longer uses the memory that was registered."""
        for found in self._found:
            if found.moved():
                raise StateError(
                    f"tensor {found.spec.name!r} was resized, or points to other memory, since it "
                    "was registered: write into registered tensors in place, or unregister() and "
                    "register() again"
                )

    def check_writable(self) -> None:
        """StateError, naming the tensor, if one lies in read-only memory (a mapped file)."""
        for found in self._found:
            if not found.writable:
                raise StateError(
                    f"tensor {found.spec.name!r} is read-only memory: it can be published, "
                    "but not replicated into; register a copy"
                )


def _slice(memory: memoryview, first: int, layout: Layout, index: int) -> _Found:
    """A tensor's part of a buffer that begins at address `first`."""
    spec, offset = layout.tensors[index], layout.offsets[index]
    part = memory[offset : offset + spec.num_bytes]
    return _Found(spec, part, lambda _part: first + offset, part, writable=True)


def _share(found: list[_Found]) -> None:
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
