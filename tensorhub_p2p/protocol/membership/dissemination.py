"""Dissemination: which news rides on the next message.

Rules of this file. It orders, counts and cuts to size; it neither reads the news nor
knows members or messages. Membership rumours and version hints each have a queue, and a
byte budget, of their own, so that neither starves the other.

Theory of operation (SWIM §4.1). A piece of news is sent ⌈λ·log10(N+1)⌉ times and then
forgotten: by then it has reached everyone with high probability. What was sent least goes
first and, among equals, the newest. A newer claim about a subject replaces the older one
and starts over: nobody needs the older one any more.

Bounds: one piece a subject, and `limit` pieces: what was sent most often makes room. Messages
carry at most the budget, except that a single piece larger than the budget
travels alone rather than block the queue.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

Subject = TypeVar("Subject", bound=Hashable)
News = TypeVar("News")

_SMALLEST = 16
"""Less room than this, in bytes, is not worth searching for a piece that fits."""


def retransmit_limit(multiplier: int, members: int) -> int:
    """How often one piece is sent among `members` peers (SWIM §4.1; memberlist's formula)."""
    return multiplier * max(1, math.ceil(math.log10(members + 1)))


@dataclass
class _Piece(Generic[News]):
    news: News
    size: int
    """Encoded bytes."""


class Dissemination(Generic[Subject, News]):
    """News by subject, each with the number of times it was sent."""

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._by_sends: list[dict[Subject, _Piece[News]]] = []
        """At index s, what was sent s times; in each, the newest last."""
        self._sends: dict[Subject, int] = {}

    def __len__(self) -> int:
        return len(self._sends)

    def put(self, subject: Subject, news: News) -> None:
        """Spread `news` instead of whatever is being said about `subject`."""
        self.drop(subject)
        size = len(msgspec.msgpack.encode(news))
        self._file(subject, _Piece(news, size), 0)
        if len(self._sends) > self._limit:
            self.drop(next(iter(next(filter(None, reversed(self._by_sends))))))

    def drop(self, subject: Subject) -> None:
        """Say nothing more about `subject`."""
        sends = self._sends.pop(subject, None)
        if sends is not None:
            del self._by_sends[sends][subject]

    def clear(self) -> None:
        """Say nothing of what waits."""
        self._by_sends.clear()
        self._sends.clear()

    def take(self, budget: int, limit: int) -> tuple[News, ...]:
        """News for one message: at most `budget` bytes; what was sent `limit` times is gone."""
        if not self._sends:
            return ()
        chosen: list[tuple[Subject, _Piece[News], int]] = []
        used = 0
        for sends, tier in enumerate(self._by_sends):
            if not tier:
                continue
            for subject, piece in reversed(tier.items()):
                if chosen and used + _SMALLEST > budget:
                    break
                if chosen and used + piece.size > budget:
                    continue
                chosen.append((subject, piece, sends))
                used += piece.size
        for subject, piece, sends in reversed(chosen):
            del self._by_sends[sends][subject]
            del self._sends[subject]
            if sends + 1 < limit:
                self._file(subject, piece, sends + 1)
        return tuple(piece.news for _, piece, _ in chosen)

    def _file(self, subject: Subject, piece: _Piece[News], sends: int) -> None:
        while len(self._by_sends) <= sends:
            self._by_sends.append({})
        self._by_sends[sends][subject] = piece
        self._sends[subject] = sends
