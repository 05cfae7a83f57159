"""A shard's tensors as one virtual byte range, cut on a fixed grid of chunks.

Rule of this file. A layout knows names, types and sizes; it never learns an address,
a device or a tensor. Two peers agree on what is moved by agreeing on a layout.

Theory. The publisher's order of registration is the order of the range: each tensor
follows the one before with no gap. Tensors that share memory (tied weights, a fused weight
and parts of it) form a *block*, which occupies the range once: the first name is its
*root*, the others are aliases that name it, and each says where in the block it begins.
A tensor's bytes are in the order of its elements in memory, without the gaps that there may
be; its strides say which order that is, and 0 marks a dimension along which it only repeats.
A puller may have registered the same names in any order; it maps its tensors to the
publisher's layout by name (`differences` says whether it can), so that offsets mean the same
on both sides. Where only strides differ (`restrided`), the memory decides whether it can.
The grid follows from the size alone: about 256 chunks, each a power of two between 256 KiB
and 16 MiB, the last one shorter. Fewer chunks make a swarm slow, as a chunk is passed on only
when all of it has come; smaller ones cost more than they gain. The digest covers the ordered
entries: equal digests are equal layouts, order included.

Bounds: `MAX_TENSORS` entries and `MAX_BYTES` bytes; names and shapes by their types.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorhub_p2p.errors import LayoutMismatch

MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 16 << 20
CHUNKS_AIMED_AT = 256
MAX_TENSORS = 1 << 20
MAX_BYTES = 1 << 50
MAX_NAME_CHARS = 1024
MAX_DIFFERENCES = 20
"""Lines in the list of differences; more are counted."""

Size = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as both sides must agree on it; `dtype` as torch prints it, without "torch."."""

    name: Name
    dtype: Annotated[str, Meta(max_length=64)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]
    num_bytes: Size
    """From its first byte in the range to its last: fewer than its elements have if it repeats."""
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)] | None = None
    """None for row-major; otherwise where the elements lie in the range, in elements."""
    alias_of: Name | None = None
    """The earlier tensor, the root of the block that this one is a part of."""
    offset: Size = 0
    """Where in its block this tensor begins, in bytes; 0 if it shares nothing."""

    def __str__(self) -> str:
        stride = "" if self.stride is None else f" with strides {list(self.stride)}"
        return f"{self.dtype}{list(self.shape)}{stride}"


def chunk_bytes_for(num_bytes: int) -> int:
    """The grid for a range of this size: a power of two, about size / 256, within bounds."""
    aim = max(1, -(-num_bytes // CHUNKS_AIMED_AT))
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, 1 << (aim - 1).bit_length()))


class Layout:
    """An ordered list of tensors as one byte range on a grid of chunks. An immutable value.

    `tensors[i]` starts at byte `offsets[i]`, `num_bytes` is the length of the range,
    `digest` 16 bytes that identify all of it. Raises LayoutMismatch if the list can't be one:
    a name that is empty, too long or there twice, an alias of nothing, a block with bytes
    that are nobody's, or too much of it.
    """

    __slots__ = (
        "_block_bytes",
        "_by_name",
        "chunk_bytes",
        "digest",
        "num_bytes",
        "num_chunks",
        "offsets",
        "tensors",
    )

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        self.tensors = tuple(tensors)
        if len(self.tensors) > MAX_TENSORS:
            raise LayoutMismatch(f"{len(self.tensors)} tensors; at most {MAX_TENSORS} are possible")
        self._by_name: dict[str, int] = {}
        for index, spec in enumerate(self.tensors):
            self._check(index, spec)
            self._by_name[spec.name] = index
        self._block_bytes = self._measure_blocks()
        self.offsets = array("Q")
        self.num_bytes = 0
        for spec in self.tensors:
            self._place(spec)
        self.chunk_bytes = chunk_bytes_for(self.num_bytes)
        self.num_chunks = -(-self.num_bytes // self.chunk_bytes)
        entries = msgspec.msgpack.encode(self.tensors)
        self.digest = hashlib.blake2b(entries, digest_size=16).digest()

    def _check(self, index: int, spec: TensorSpec) -> None:
        if not 0 < len(spec.name) <= MAX_NAME_CHARS:
            raise LayoutMismatch(
                f"tensor {index} has a name of {len(spec.name)} characters; "
                f"1 to {MAX_NAME_CHARS} are possible"
            )
        if spec.name in self._by_name:
            raise LayoutMismatch(f"two tensors have the name {spec.name!r}")
        if spec.alias_of is not None:
            root = self._by_name.get(spec.alias_of)
            if root is None or self.tensors[root].alias_of is not None:
                raise LayoutMismatch(
                    f"{spec.name!r} shares the storage of {spec.alias_of!r}, "
                    "but no tensor before it has that name, or it is an alias itself"
                )

    def _measure_blocks(self) -> dict[str, int]:
        """Root → the length of its block, of those that have more than the root, in bytes."""
        parts: dict[str, list[tuple[int, int]]] = {}
        for spec in self.tensors:
            if spec.alias_of is not None or spec.offset:
                root = self.tensors[self._by_name[spec.alias_of or spec.name]]
                known = parts.setdefault(root.name, [(root.offset, root.num_bytes)])
                known.append((spec.offset, spec.num_bytes))
        return {root: _joined(root, known) for root, known in parts.items()}

    def _place(self, spec: TensorSpec) -> None:
        if spec.alias_of is None:
            offset = self.num_bytes + spec.offset
            self.num_bytes += self._block_bytes.get(spec.name, spec.num_bytes)
        else:
            root = self._by_name[spec.alias_of]
            offset = self.offsets[root] - self.tensors[root].offset + spec.offset
        if self.num_bytes > MAX_BYTES:
            raise LayoutMismatch(f"{self.num_bytes} bytes; at most {MAX_BYTES} are possible")
        self.offsets.append(offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"<Layout: {len(self.tensors)} tensors, {self.num_bytes} bytes, "
            f"{self.num_chunks} chunks of {self.chunk_bytes}>"
        )

    def index(self, name: str) -> int:
        """Where in `tensors` this name is; KeyError if nowhere."""
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def root(self, name: str) -> str:
        """The name under which this tensor's block is in the range: its own, or its root's."""
        return self.tensors[self._by_name[name]].alias_of or name

    def block(self, name: str) -> tuple[int, int]:
        """(start, length) in the range, in bytes, of all that this tensor shares memory with.

        Of the tensor itself if it shares nothing.
        """
        root = self._by_name[self.root(name)]
        spec = self.tensors[root]
        length = self._block_bytes.get(spec.name, spec.num_bytes)
        return self.offsets[root] - spec.offset, length

    def is_shared(self, name: str) -> bool:
        """Whether other tensors are in the same memory."""
        return self.root(name) in self._block_bytes

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """(start, length) of a chunk in the range, in bytes; IndexError if there is none."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} of {self.num_chunks}")
        start = chunk * self.chunk_bytes
        return start, min(self.chunk_bytes, self.num_bytes - start)

    def chunks_of(self, start: int, length: int) -> range:
        """The chunks that the bytes [start, start + length) touch."""
        if length <= 0:
            return range(0)
        return range(start // self.chunk_bytes, -(-(start + length) // self.chunk_bytes))

    def tensor_at(self, offset: int) -> TensorSpec:
        """The first tensor that has byte `offset`; for telling where a fault is."""
        for spec, start in zip(self.tensors, self.offsets, strict=True):
            if start <= offset < start + spec.num_bytes:
                return spec
        raise IndexError(f"byte {offset} of {self.num_bytes}")

    def differences(self, other: Layout) -> list[str]:
        """What keeps tensors of `self` from being moved to tensors of `other`, by name.

        Empty if all names, shapes, dtypes and shared storages agree, in any order, and strides
        but for those of `restrided`. At most MAX_DIFFERENCES lines, then one that counts the
        rest.
        """
        if self.digest == other.digest:
            return []
        found = [f"{name!r} is missing there" for name in self._by_name if name not in other]
        found += [f"{name!r} is missing here" for name in other._by_name if name not in self]
        for spec in self.tensors:
            if spec.name in other:
                theirs = other.tensors[other.index(spec.name)]
                found += self._disagreement(spec, theirs, other)
        if len(found) > MAX_DIFFERENCES:
            more = len(found) - MAX_DIFFERENCES
            found[MAX_DIFFERENCES:] = [f"... and {more} more"]
        return found

    def restrided(self, other: Layout) -> list[str]:
        """The names whose elements are the same here and there, but in another order in memory."""
        return [
            spec.name
            for spec in self.tensors
            if spec.name in other
            and spec.stride != (theirs := other.tensors[other.index(spec.name)]).stride
            and not self._disagreement(spec, theirs, other)
        ]

    def _disagreement(self, ours: TensorSpec, theirs: TensorSpec, other: Layout) -> list[str]:
        name = ours.name
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return [f"{name!r} is {ours} here, {theirs} there"]
        # The names that share one storage must be the same ones, whichever is the root.
        here, there = self.root(name), other.root(name)
        if here != name and here in other and other.root(here) != there:
            return [f"{name!r} shares the storage of {here!r} here, but not there"]
        if there != name and there in self and self.root(there) != here:
            return [f"{name!r} shares the storage of {there!r} there, but not here"]
        if ours.stride != theirs.stride and not (
            _is_permutation(ours) and _is_permutation(theirs) and not self.is_shared(name)
        ):
            return [f"{name!r} is {ours} here, {theirs} there"]
        if ours.num_bytes != theirs.num_bytes:
            return [f"{name!r} has {ours.num_bytes} bytes here, {theirs.num_bytes} there"]
        if ours.offset != theirs.offset:
            return [
                f"{name!r} begins {ours.offset} bytes into the storage that it shares here, "
                f"{theirs.offset} there"
            ]
        return []


def _joined(root: str, parts: list[tuple[int, int]]) -> int:
    """The end of the parts (offset, length) of a block, which lie side by side or overlap."""
    end = 0
    for offset, length in sorted(parts):
        if offset > end:
            raise LayoutMismatch(
                f"bytes {end} to {offset} of the storage that {root!r} shares are in no tensor"
            )
        end = max(end, offset + length)
    return end


def _is_permutation(spec: TensorSpec) -> bool:
    """Whether each element has a place of its own, and no place is empty."""
    if spec.stride is None:
        return True
    if len(spec.stride) != len(spec.shape):
        return False
    expected = 1
    for step, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
