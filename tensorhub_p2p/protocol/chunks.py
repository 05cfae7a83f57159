"""A set of chunks out of a fixed number: what somebody has, lacks, or may serve.

Rule of this file. A value type and its bitmap on the wire (bit c of byte c//8 stands for
chunk c; spare bits of the last byte are zero). It doesn't know what a chunk contains.

The set is one int that is replaced as a whole, so a thread that reads it while another
one adds to it sees either the old set or the new one. Only one thread may add at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_BITS_OF = tuple(tuple(b for b in range(8) if value >> b & 1) for value in range(256))


class ChunkSet:
    """A subset of the chunks 0 … size-1."""

    __slots__ = ("bits", "size")

    def __init__(self, size: int, bits: int = 0) -> None:
        """ValueError if `bits` (bit c for chunk c) has a bit beyond `size`."""
        if size < 0 or bits < 0 or bits >> size:
            raise ValueError(f"not a set of chunks of {size}: {bits:#x}")
        self.size = size
        self.bits = bits

    @classmethod
    def full(cls, size: int) -> ChunkSet:
        return cls(size, (1 << size) - 1)

    @classmethod
    def of(cls, size: int, chunks: Iterable[int]) -> ChunkSet:
        """The set of these chunks; IndexError if one is out of range."""
        result = cls(size)
        for chunk in chunks:
            result.add(chunk)
        return result

    @classmethod
    def from_bytes(cls, size: int, data: bytes) -> ChunkSet:
        """The set that `to_bytes` wrote; ValueError if the length or a spare bit is wrong."""
        if len(data) != (size + 7) // 8:
            raise ValueError(f"{len(data)} bytes for a set of {size} chunks")
        return cls(size, int.from_bytes(data, "little"))

    def to_bytes(self) -> bytes:
        """The bitmap, ⌈size / 8⌉ bytes."""
        return self.bits.to_bytes((self.size + 7) // 8, "little")

    def add(self, chunk: int) -> None:
        """IndexError if there is no such chunk."""
        if not 0 <= chunk < self.size:
            raise IndexError(f"chunk {chunk} of {self.size}")
        self.bits |= 1 << chunk

    def discard(self, chunk: int) -> None:
        if chunk in self:
            self.bits ^= 1 << chunk

    def has_all(self, chunks: range) -> bool:
        """Whether every chunk of this contiguous range is in the set (an empty range is)."""
        if not len(chunks):
            return True
        if chunks.start < 0 or chunks.stop > self.size:
            return False
        return (~self.bits >> chunks.start) & ((1 << len(chunks)) - 1) == 0

    @property
    def is_full(self) -> bool:
        return self.bits.bit_count() == self.size

    def missing(self) -> ChunkSet:
        """The complement."""
        return ChunkSet(self.size, self.bits ^ ((1 << self.size) - 1))

    def copy(self) -> ChunkSet:
        return ChunkSet(self.size, self.bits)

    def __contains__(self, chunk: int) -> bool:
        return chunk >= 0 and bool(self.bits >> chunk & 1)

    def __len__(self) -> int:
        """How many chunks are in the set."""
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        """The chunks in rising order, as of now."""
        for index, value in enumerate(self.to_bytes()):
            for bit in _BITS_OF[value]:
                yield index * 8 + bit

    def __or__(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self._same(other), self.bits | other.bits)

    def __and__(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self._same(other), self.bits & other.bits)

    def __sub__(self, other: ChunkSet) -> ChunkSet:
        return ChunkSet(self._same(other), self.bits & ~other.bits)

    def _same(self, other: ChunkSet) -> int:
        if self.size != other.size:
            raise ValueError(f"sets of {self.size} and of {other.size} chunks")
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkSet) and (self.size, self.bits) == (other.size, other.bits)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<ChunkSet: {len(self)} of {self.size}>"
