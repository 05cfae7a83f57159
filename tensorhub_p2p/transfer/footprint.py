"""Which bytes of memory a strided tensor is: equal runs at equal distances.

Rule of this file. Arithmetic on addresses, shapes and strides; it knows no tensor.

Theory. Elements that lie side by side make a run. A dense tensor is one run, in whichever
order its dimensions lie; columns of a matrix are a run for each row. So a footprint is an
address, the length of a run, and for each dimension outside the runs the distance between
two of them and how many there are. Dimensions that only repeat (stride 0) have no bytes.
Dimensions that continue one another are joined: views of the same bytes have equal
footprints, whatever their shape, dtype and order of dimensions.

The bytes of a tensor are taken in the order of its addresses (`Footprint.of`), or in that
of somebody else's dimensions (`Footprint.in_order_of`), which may cut it into more runs.

Bounds: a footprint is a few numbers; its runs are as many as it says, so ask first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

Dimensions = list[tuple[int, int]]
"""(step, size) in elements, fastest first; without those that take no step."""


class NoRuns(ValueError):
    """These strides make no equal runs at equal distances. The message says what it is."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """`run` bytes at `address`, and again at each of `steps`: (distance in bytes, how many).

    Steps are slowest first. Two footprints are equal if they are the same bytes in the
    same order.
    """

    address: int
    run: int
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls, address: int, item: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Footprint:
        """The bytes of a tensor in the order of their addresses; its elements have `item` bytes.

        Elements that overlap (sliding windows) are one run if they leave no gap. Raises
        NoRuns for other strides that make elements overlap or interleave, or go backwards.
        """
        if 0 in shape:
            return cls(address, 0)
        dimensions = sorted(_dimensions(shape, stride))
        _check(dimensions)
        return cls._made(address, item, dimensions)

    @classmethod
    def in_order_of(
        cls,
        theirs: tuple[int, ...] | None,
        address: int,
        item: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Footprint:
        """The bytes of a tensor in the order in which strides `theirs` put its elements.

        None stands for row-major. Neither's elements overlap.
        """
        if 0 in shape:
            return cls(address, 0)
        order = sorted(range(len(shape)), key=lambda d: theirs[d] if theirs else -d)
        dimensions = _dimensions(tuple(shape[d] for d in order), tuple(stride[d] for d in order))
        return cls._made(address, item, dimensions)

    @classmethod
    def _made(cls, address: int, item: int, dimensions: Dimensions) -> Footprint:
        run, steps = 1, Dimensions()
        for step, size in dimensions:
            if not steps and step <= run:
                run += step * (size - 1)
            elif steps and step == steps[-1][0] * steps[-1][1]:
                steps[-1] = (steps[-1][0], steps[-1][1] * size)
            else:
                steps.append((step, size))
        return cls(address, run * item, tuple((s * item, n) for s, n in reversed(steps)))

    @property
    def num_runs(self) -> int:
        """How many runs there are; one of an empty tensor has no bytes."""
        count = 1
        for _, size in self.steps:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Of all runs together."""
        return self.run * self.num_runs

    @property
    def span(self) -> int:
        """From the first byte to the last one, gaps included."""
        return self.run and self.run + sum(step * (size - 1) for step, size in self.steps)

    def runs(self) -> list[tuple[int, int]]:
        """(address, length) of each run, in order."""
        starts = [self.address]
        for step, size in self.steps:
            starts = [start + step * i for start in starts for i in range(size)]
        return [(start, self.run) for start in starts]


def _dimensions(shape: tuple[int, ...], stride: tuple[int, ...]) -> Dimensions:
    return [(t, n) for t, n in zip(stride, shape, strict=True) if n > 1 and t]


def _check(dimensions: Dimensions) -> None:
    """Raise NoRuns unless each dimension steps over all of what those before it take."""
    span, gaps, overlap = 1, False, False
    for step, size in dimensions:
        if step < 0:
            raise NoRuns("its elements run backwards in memory")
        if step < span:
            overlap = True
        gaps = gaps or step > span
        if overlap and gaps:
            raise NoRuns("its elements overlap or interleave, with gaps")
        span += step * (size - 1)


def packed_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides, in elements, once the gaps are gone; None for row-major.

    They are 0 where a dimension only repeats, and 1 where there is nothing to step over, so
    that equal memory gives equal strides. Elements that overlap keep their strides. `shape`
    and `stride` are those of a tensor that has a footprint.
    """
    if 0 in shape:
        return None
    packed, dense = [1] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: stride[d]):
        if shape[d] > 1:
            if 0 < stride[d] < dense:
                return plain_stride(shape, stride)
            packed[d] = dense if stride[d] else 0
            dense *= shape[d] if stride[d] else 1
    return plain_stride(shape, tuple(packed))


def plain_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The same strides: None for row-major, and 1 for dimensions that take no step."""
    takes_step = [size > 1 for size in shape]
    if 0 in shape or all(
        step == dense
        for step, dense, takes in zip(stride, row_major(shape), takes_step, strict=True)
        if takes
    ):
        return None
    return tuple(step if takes else 1 for step, takes in zip(stride, takes_step, strict=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a dense tensor whose last dimension is the fastest."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1][: len(shape)]
