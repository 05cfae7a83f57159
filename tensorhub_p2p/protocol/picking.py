"""Which chunk next: the rarest, with random ties.

Rule of this file. Pure choices over sets of chunks; a set is an int (bit c for chunk c),
so that each step costs a few word operations for every 64 chunks.

Rarest first keeps a swarm from running out of the last copy of something, and makes
pullers of one source fetch different chunks, which they then trade. The random tie is what
makes them differ when all is equally rare.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

MAX_RARITY = 8
"""Chunks with this many holders or more count as equally common."""


def rarity_levels(haves: Iterable[int]) -> list[int]:
    """levels[k]: the chunks that at least k+1 of these sets contain, up to MAX_RARITY."""
    levels = [0] * MAX_RARITY
    for have in haves:
        carry = have
        for k in range(MAX_RARITY):
            levels[k], carry = levels[k] | carry, levels[k] & carry
            if not carry:
                break
    return levels


def rarest(levels: list[int], among: int, rng: random.Random) -> int:
    """A random chunk of those in `among` (not empty) that the fewest sets contain."""
    for common in levels[1:]:
        rare = among & ~common
        if rare:
            return any_of(rare, rng)
    return any_of(among, rng)


def any_of(chunks: int, rng: random.Random) -> int:
    """A chunk of the set (not empty): the first one from a random place on, around the end."""
    place = rng.randrange(chunks.bit_length())
    above = chunks >> place
    if above:
        return place + (above & -above).bit_length() - 1
    return (chunks & -chunks).bit_length() - 1


def some_of(chunks: int, count: int, rng: random.Random) -> list[int]:
    """Up to `count` chunks of the set: a run from a random place on, around the end."""
    picked: list[int] = []
    while chunks and len(picked) < count:
        chunk = any_of(chunks, rng) if not picked else _after(chunks, picked[-1])
        chunks &= ~(1 << chunk)
        picked.append(chunk)
    return picked


def _after(chunks: int, place: int) -> int:
    above = chunks >> place
    if above:
        return place + (above & -above).bit_length() - 1
    return (chunks & -chunks).bit_length() - 1
