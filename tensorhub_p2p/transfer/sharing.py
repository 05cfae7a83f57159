"""Which registered tensors share memory, and how.

Rule of this file. It compares footprints (footprint.py); it knows no tensor.

Theory. Tensors that are the same bytes in the same order are tied. Tensors that share only
some bytes (a fused weight and a part of it) form a block: all that hang together by such
overlaps, directly or through others. A block moves as one stretch of memory, so it must be
one: if some of it is in no tensor, nothing may be written there. Columns of a matrix
interleave without sharing a byte, and are no block.

One sweep over all runs, in the order of their addresses, finds the overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub_p2p.transfer.footprint import Footprint


@dataclass(frozen=True, slots=True)
class Block:
    """Footprints (by index, in order) that hang together: one stretch of memory."""

    members: tuple[int, ...]
    start: int
    """Its first address."""
    length: int
    """In bytes, to the last one of any member."""
    gaps: int
    """How many of these bytes are in no member."""


def find_blocks(footprints: Sequence[Footprint]) -> list[Block]:
    """The blocks of more than one footprint. No two of the footprints are equal."""
    group = list(range(len(footprints)))

    def find(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    stretches: list[tuple[int, int]] = []
    """(some member, bytes) of each stretch of memory that has no gap or change of group."""
    end = first = begin = 0
    for start, stop, i in _runs(footprints):
        if start < end:
            group[find(i)] = find(first)
        else:
            stretches.append((first, end - begin))
            begin, first = start, i
        end = max(end, stop)
    stretches.append((first, end - begin))
    members: dict[int, list[int]] = {}
    for i in range(len(footprints)):
        members.setdefault(find(i), []).append(i)
    shared = {g: m for g, m in members.items() if len(m) > 1}
    covered = dict.fromkeys(shared, 0)
    for i, length in stretches if shared else ():
        if find(i) in covered:
            covered[find(i)] += length
    return [_block(footprints, m, covered[g]) for g, m in shared.items()]


def _runs(footprints: Sequence[Footprint]) -> list[tuple[int, int, int]]:
    """(start, end, index) of all runs that have bytes, by address."""
    found = []
    for i, footprint in enumerate(footprints):
        if not footprint.steps:
            found.append((footprint.address, footprint.address + footprint.run, i))
        else:
            found.extend((a, a + n, i) for a, n in footprint.runs())
    return sorted(run for run in found if run[0] < run[1])


def _block(footprints: Sequence[Footprint], members: list[int], covered: int) -> Block:
    start = min(footprints[i].address for i in members)
    end = max(footprints[i].address + footprints[i].span for i in members)
    return Block(tuple(members), start, end - start, end - start - covered)
