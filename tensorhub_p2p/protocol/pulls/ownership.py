"""Which puller of several is the first for a chunk: rendezvous hashing, without a planner.

Rule of this file. Pure functions of names and numbers. What being the first means (who takes
a chunk from a source that everybody reads, who carries one across zones) is said by those
who ask.

Theory. Every puller has a weight for every chunk, a hash of the two. Of any set of pullers,
a chunk belongs to the one with the lowest weight; if that one drops out it passes to the
next in order, and nothing else changes hands. All who know the same set agree, whoever asks;
who knows of one puller less is wrong about that puller's share only.

A puller's weights are one stream of an extendable hash, 64 bits a chunk: thousands of them
cost less than a millisecond. Sets of chunks are ints (bit c for chunk c).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from tensorhub_p2p.protocol.pulls.sources import SourceId

MAX_RANKS = 8
"""Ranks that are told apart; who comes later has the last of them."""


def weights(puller: SourceId, num_chunks: int) -> array[int]:
    """The puller's weight for each chunk; the lowest is first."""
    stream = hashlib.shake_128(f"{puller.peer} {puller.slot}".encode())
    return array("Q", stream.digest(8 * num_chunks))


def even_share(own: SourceId, pullers: Iterable[SourceId], num_chunks: int, copies: int = 1) -> int:
    """The chunks of `own` if everybody gets equally many: bit c for chunk c.

    Each chunk, in order, goes to the `copies` first for it that have no full share yet: all
    who know the same pullers agree, and if one drops out little but its share changes hands.
    """
    order = sorted({own, *pullers})
    copies = min(copies, len(order))
    room = [-(-num_chunks * copies // len(order))] * len(order)
    me, share = order.index(own), 0
    for chunk, column in enumerate(zip(*(weights(p, num_chunks) for p in order), strict=True)):
        left = copies
        for place in sorted(range(len(order)), key=column.__getitem__):
            if room[place] and left:
                room[place] -= 1
                left -= 1
                share |= (place == me) << chunk
    return share


class Ranking:
    """In what place one puller comes among others, for each chunk."""

    def __init__(self, own: SourceId, num_chunks: int) -> None:
        self._own = own
        self._num_chunks = num_chunks
        self._weights = weights(own, num_chunks)
        self._ahead: dict[SourceId, int] = {}
        """By other puller: the chunks for which it comes before us."""

    def ranks(self, others: Iterable[SourceId]) -> list[int]:
        """ranks[k]: the chunks for which more than k of these come before us, up to MAX_RANKS.

        What isn't in ranks[0] is ours; what isn't in ranks[k] is at least the (k+1)th's.
        """
        ranks = [0] * MAX_RANKS
        for other in others:
            carry = self._before_us(other)
            for k in range(MAX_RANKS):
                ranks[k], carry = ranks[k] | carry, ranks[k] & carry
                if not carry:
                    break
        return ranks

    def _before_us(self, other: SourceId) -> int:
        known = self._ahead.get(other)
        if known is None:
            theirs = weights(other, self._num_chunks)
            pairs = zip(theirs, self._weights, strict=True)
            first = other < self._own
            bits = "".join("1" if (a, not first) < (b, first) else "0" for a, b in pairs)
            known = self._ahead[other] = int(bits[::-1] or "0", 2)
        return known
