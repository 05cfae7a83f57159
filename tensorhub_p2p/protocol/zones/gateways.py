"""Which peers speak for their zone: a rule that everyone can compute, with no election.

Rules of this file. It orders members and chooses; it neither sends nor knows what a gateway
does. A candidate is a member of the zone that is ALIVE, with the time since when it was.

Theory of operation. Of the candidates that are *settled* (alive for `settle_seconds`) the
ones with the lowest rendezvous hash (Thaler and Ravishankar 1998) are the gateways. Peers
that know the same members choose the same ones, and a death replaces just the one that died,
by the next in line. While too few are settled, the oldest of the others fill up. So a
zone that starts has gateways at once, and a newcomer never displaces one: it holds everybody
that it met at its arrival for older than itself.

Views differ for a moment after each change, so for that moment a zone may have a gateway too
many, or one too few: harmless, as gateways only carry news.

Bounds. `Candidates` holds the `KEPT` lowest by hash and the `KEPT_OLDEST` oldest of all
members, not another table of everyone. When too many of them are gone it asks to be refilled.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import mmh3

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.messages import Status

KEPT = 32
"""Candidates remembered for their hash."""
KEPT_OLDEST = 4
"""Candidates remembered for their age."""
TOO_FEW = 8
"""With fewer than this left, the table of all members is looked through again."""


class Candidate(NamedTuple):
    """A member that may speak for its zone, since when it may, in seconds."""

    peer: PeerId
    since: float


@lru_cache(maxsize=1 << 16)
def weight(zone: str, peer: PeerId) -> int:
    """The rendezvous hash: the lowest of a zone comes first."""
    return mmh3.hash64(f"{zone}\0{peer}", signed=False)[0]


def choose(
    zone: str, candidates: Iterable[Candidate], settled_since: float, count: int
) -> tuple[PeerId, ...]:
    """The first `count` in line: settled ones by hash, then the others by age.

    Settled is who became a candidate at `settled_since` or before. Of equally old ones the
    earlier in `candidates` counts as the older.
    """
    settled: list[Candidate] = []
    younger: list[Candidate] = []
    for candidate in candidates:
        (settled if candidate.since <= settled_since else younger).append(candidate)
    settled.sort(key=lambda c: weight(zone, c.peer))
    younger.sort(key=lambda c: c.since)
    return tuple(c.peer for c in (*settled, *younger)[:count])


class Candidates:
    """Those other members of a zone that may soon be its gateways."""

    def __init__(self, zone: str) -> None:
        self._zone = zone
        self._since: dict[PeerId, float] = {}
        self._left_out = False
        """Whether there are candidates that are not remembered."""

    def __iter__(self) -> Iterator[Candidate]:
        return (Candidate(peer, since) for peer, since in self._since.items())

    @property
    def too_few(self) -> bool:
        """Whether `refill` might find candidates that are missing here."""
        return self._left_out and len(self._since) < TOO_FEW

    def note(self, member: MemberView) -> bool:
        """A member's status changed; whether that changes who is remembered here."""
        before = self._since.pop(member.peer_id, None)
        if member.status is not Status.ALIVE:
            return before is not None
        self._since[member.peer_id] = member.since
        self._trim()
        return member.peer_id in self._since

    def refill(self, members: Iterable[MemberView], since: float | None = None) -> None:
        """Choose anew whom to remember, among all members; `since` overrides theirs."""
        self._left_out = False
        self._since = {
            member.peer_id: self._since.get(member.peer_id, member.since)
            if since is None
            else since
            for member in members
            if member.status is Status.ALIVE
        }
        self._trim()

    def _trim(self) -> None:
        if len(self._since) <= KEPT + KEPT_OLDEST:
            return
        lowest = heapq.nsmallest(KEPT, self._since, key=lambda peer: weight(self._zone, peer))
        oldest = heapq.nsmallest(KEPT_OLDEST, self._since, key=self._since.__getitem__)
        self._since = {peer: self._since[peer] for peer in dict.fromkeys((*lowest, *oldest))}
        self._left_out = True
