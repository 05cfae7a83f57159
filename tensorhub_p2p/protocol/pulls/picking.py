"""Which chunk next, and from whom.

Rule of this file. Pure choices over sets of chunks and what is known of sources; nothing
is changed here. A set of chunks is an int (bit c for chunk c), so that each step costs a
few word operations for every 64 chunks.

Which chunk: the rarest first keeps a swarm from running out of the last copy of
something, and makes pullers of one source fetch different chunks, which they then trade.
A random tie is what makes them differ when all is equally rare.

From whom: the nearest, and of equally near ones the one with the least in flight; one that is
SLOW times slower than the fastest counts as having two chunks more. (Finer differences of the
measured rates say who was busy a moment ago, and following them makes all run after the same
source.) A slow source gets nothing that faster ones would all be through with before it did
one chunk. What lies in this process's own memory crosses no link, however busy its readers are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from tensorhub_p2p.protocol.pulls.sources import AT_HAND, Source

SLOW = 4
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
    return _from(chunks, rng.randrange(chunks.bit_length()))


def some_of(chunks: int, count: int, rng: random.Random) -> list[int]:
    """Up to `count` chunks of the set: a run from a random place on, around the end."""
    picked: list[int] = []
    place = rng.randrange(chunks.bit_length()) if chunks else 0
    while chunks and len(picked) < count:
        place = _from(chunks, place)
        chunks &= ~(1 << place)
        picked.append(place)
    return picked


def _from(chunks: int, place: int) -> int:
    above = chunks >> place
    if above:
        return place + (above & -above).bit_length() - 1
    return (chunks & -chunks).bit_length() - 1


def fetchable(source: Source, sources: Iterable[Source], wanted: int) -> int:
    """What of `wanted` is to be had there.

    A chunk that came wrong from there, or too slowly, is only if none of the other `sources`
    has it that brought it neither wrong nor late; those of other zones don't count for one of
    ours, as what is here does not cross.
    """
    there, doubtful = wanted & source.have, source.bad | source.given_up
    if not there & doubtful:
        return there
    elsewhere = _of_all(s for s in sources if s is not source and (source.far or not s.far))
    return there & ~(doubtful & elsewhere)


def best_source(
    sources: Sequence[Source],
    wanted: int,
    across: int,
    num_needed: int,
    limit: int,
    rng: random.Random,
) -> tuple[Source, int] | None:
    """The source to give a chunk to, and the chunks to choose from; None if nothing fits.

    Of the `wanted` only those in `across` may come from another zone. At most `limit` chunks
    are in flight at one source; `num_needed` chunks are missing altogether, those in flight
    included.
    """
    best: tuple[tuple[float, ...], Source, int] | None = None
    rates = [s.rate for s in sources if s.rate]
    fastest, combined, at_hand = max(rates, default=1.0), sum(rates), at_hand_of(sources)
    for source in sources:
        if len(source.in_flight) >= limit:
            continue
        here = wanted & across if source.far else wanted
        among = fetchable(source, sources, here)
        if source.locality != AT_HAND:  # what is at hand is left by all others
            among &= ~at_hand
            if source.rate and num_needed * source.rate < combined:
                among &= ~_better_left(source, source.rate, sources, num_needed)
        if not among:
            continue
        slow = (source.rate or fastest) * SLOW < fastest
        rank = (source.locality, len(source.in_flight) + 2 * slow, rng.random())
        if best is None or rank < best[0]:
            best = (rank, source, among)
    return None if best is None else best[1:]


def _better_left(source: Source, rate: float, sources: Sequence[Source], num_needed: int) -> int:
    """What faster ones have, if they'd be through with everything before it did one chunk.

    Only sources with a strictly higher rate count, so that no two wait for each other, and
    none of another zone for one of ours: what is here does not cross.
    """
    faster = [s for s in sources if s.rate and s.rate > rate and (source.far or not s.far)]
    combined = sum(s.rate or 0.0 for s in faster)
    return 0 if num_needed * rate >= combined else _of_all(faster)


def at_hand_of(sources: Iterable[Source]) -> int:
    """The chunks that lie in this process's memory, and came from there neither wrong nor late."""
    chunks = 0
    for source in sources:
        if source.locality == AT_HAND:
            chunks |= source.have & ~(source.bad | source.given_up)
    return chunks


def _of_all(sources: Iterable[Source]) -> int:
    """The chunks that some of these have, and brought neither wrong nor late."""
    chunks = 0
    for source in sources:
        chunks |= source.have & ~(source.bad | source.given_up)
    return chunks
