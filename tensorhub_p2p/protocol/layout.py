"""A shard's tensors as one virtual byte range, cut on a fixed grid of chunks.

Rule of this file. A layout knows names, types and sizes; it never learns an address,
a device or a tensor. Two peers agree on what is moved by agreeing on a layout.

Theory. The publisher's order of registration is the order of the range: each tensor
follows the one before with no gap. Tensors that share storage (tied weights) occupy the
range once: the first name is the *root*, the others are aliases that name it. A puller may
have registered the same names in any order; it maps its tensors to the publisher's layout
by name (`differences` says whether it can), so that offsets mean the same on both sides.
The grid follows from the size alone: about 256 chunks, each a power of two between 256 KiB
and 16 MiB, the last one shorter. Fewer chunks make a swarm slow, as a chunk is passed on only
when all of it has come; smaller ones cost more than they gain. The digest covers the ordered
entries: equal digests are equal layouts, order included.

Bounds: `MAX_TENSORS` entries and `MAX_BYTES` bytes; names and shapes by their types.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
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
    stride: Annotated[tuple[Size, ...], Meta(max_length=64)] | None = None
    """None for row-major; otherwise the strides, in elements, of a dense permutation."""
    alias_of: Name | None = None
    """The earlier tensor whose storage this one shares; it takes no bytes of its own."""

    def __str__(self) -> str:
        stride = "" if self.stride is None else f" with strides {list(self.stride)}"
        return f"{self.dtype}{list(self.shape)}{stride}"


def chunk_bytes_for(num_bytes: int) -> int:
    """The grid for a range of this size: a power of two, about size / 256, within bounds."""
    aim = max(1, -(-num_bytes // CHUNKS_AIMED_AT))
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, 1 << (aim - 1).bit_length()))


class Layout:
    """An ordered list of tensors as one byte range on a grid of chunks. An immutable value.

    `tensors[i]` starts at byte `offsets[i]` (an alias where its root does), `num_bytes` is
    the length of the range, `digest` 16 bytes that identify all of it. Raises
    LayoutMismatch if the list can't be one: a name that is empty, too long or there twice,
    an alias of nothing, or too much of it.
    """

    __slots__ = (
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
        self.offsets = array("Q")
        self.num_bytes = 0
        for index, spec in enumerate(self.tensors):
            self._place(index, spec)
        if self.num_bytes > MAX_BYTES:
            raise LayoutMismatch(f"{self.num_bytes} bytes; at most {MAX_BYTES} are possible")
        self.chunk_bytes = chunk_bytes_for(self.num_bytes)
        self.num_chunks = -(-self.num_bytes // self.chunk_bytes)
        entries = msgspec.msgpack.encode(self.tensors)
        self.digest = hashlib.blake2b(entries, digest_size=16).digest()

    def _place(self, index: int, spec: TensorSpec) -> None:
        if not 0 < len(spec.name) <= MAX_NAME_CHARS:
            raise LayoutMismatch(
                f"tensor {index} has a name of {len(spec.name)} characters; "
                f"1 to {MAX_NAME_CHARS} are possible"
            )
        if spec.name in self._by_name:
            raise LayoutMismatch(f"two tensors have the name {spec.name!r}")
        if spec.alias_of is None:
            self.offsets.append(self.num_bytes)
            self.num_bytes += spec.num_bytes
        else:
            root = self._by_name.get(spec.alias_of)
            if (
                root is None
                or self.tensors[root].alias_of is not None
                or self.tensors[root].num_bytes != spec.num_bytes
            ):
                raise LayoutMismatch(
                    f"{spec.name!r} shares the storage of {spec.alias_of!r}, "
                    "but no tensor before it has that name and size"
                )
            self.offsets.append(self.offsets[root])
        self._by_name[spec.name] = index

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
        """The name under which this tensor's storage is in the range: its own, or its root's."""
        return self.tensors[self._by_name[name]].alias_of or name

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
        """The tensor (a root) that byte `offset` belongs to; for telling where a fault is."""
        if not 0 <= offset < self.num_bytes:
            raise IndexError(f"byte {offset} of {self.num_bytes}")
        starts = [(o, i) for i, o in enumerate(self.offsets) if self.tensors[i].alias_of is None]
        at = bisect_right(starts, (offset, len(self.tensors))) - 1
        return self.tensors[starts[at][1]]

    def differences(self, other: Layout) -> list[str]:
        """What keeps tensors of `self` from being moved to tensors of `other`, by name.

        Empty if all names, shapes, dtypes, strides and shared storages agree, in any
        order. At most MAX_DIFFERENCES lines, then one that counts the rest.
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

    def _disagreement(self, ours: TensorSpec, theirs: TensorSpec, other: Layout) -> list[str]:
        if (ours.dtype, ours.shape, ours.stride) != (theirs.dtype, theirs.shape, theirs.stride):
            return [f"{ours.name!r} is {ours} here, {theirs} there"]
        if ours.num_bytes != theirs.num_bytes:
            return [f"{ours.name!r} has {ours.num_bytes} bytes here, {theirs.num_bytes} there"]
        # The names that share one storage must be the same ones, whichever is the root.
        here, there = self.root(ours.name), other.root(ours.name)
        if here != ours.name and here in other and other.root(here) != there:
            return [f"{ours.name!r} shares the storage of {here!r} here, but not there"]
        if there != ours.name and there in self and self.root(there) != here:
            return [f"{ours.name!r} shares the storage of {there!r} there, but not here"]
        return []
