"""The member table: what one peer holds of all others, and which claim beats which.

Rules of this file. It stores and compares. It knows no messages other than the rumour,
no timers, and not the peer that owns the table, which is never in it.

Theory of operation. A claim about a member is ranked by (incarnation, status), and the
higher rank wins, whoever said it and in whatever order claims arrive (SWIM §4.2). Only
the member itself raises its incarnation; so an "alive" at the incarnation at which it
was declared dead proves nothing, and one above it, which the member itself must have
said, revives it.

What dies when. The dead and those that left stay in the table for `forget_dead_after`,
so that they are re-dialled and their old "alive"s are refused; then only a tombstone
remains: identity and rank. A death that is the first news of a peer leaves just
the tombstone. Either way the peer is *forgotten* once, that long after its death was heard of,
or when it makes room: then what it wrote may be dropped.

The fingerprint of a view is the XOR of one hash per reachable member and its rank, so that
peers whose views agree find that out from 8 bytes. It is kept for each of `PARTS` parts into
which a hash of the PeerIds cuts the view, so that peers whose views differ find out where.

Bounds: `max_members` entries; when full, the longest gone make room, else newcomers are
refused. As many tombstones; the oldest go first.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import mmh3

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.messages import Rumour, Status

TOMBSTONES_TOLD = 1024
"""Tombstones in a view: who joins later must learn of those whose records are still about."""

PARTS = 64
"""Into how many parts a view is cut for comparing."""

GONE = frozenset({Status.DEAD, Status.LEFT})
"""States of those that are no members any more; all others count as reachable."""

Rank = tuple[int, Status]


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member as this peer sees it; `since` is when it learnt of this status."""

    info: PeerInfo
    incarnation: int
    status: Status
    since: float

    @property
    def peer_id(self) -> PeerId:
        return self.info.peer_id

    @property
    def rank(self) -> Rank:
        return (self.incarnation, self.status)

    @property
    def is_reachable(self) -> bool:
        return self.status not in GONE


def rank(rumour: Rumour) -> Rank:
    """What decides between claims about one member: the higher wins."""
    return (rumour.incarnation, rumour.status)


@lru_cache(maxsize=65536)
def fingerprint(peer: PeerId, incarnation: int, status: Status) -> int:
    """One member's part of a view's fingerprint: 64 bits."""
    return mmh3.hash64(f"{peer}/{incarnation}/{status.value}", signed=False)[0]


@lru_cache(maxsize=65536)
def part_of(peer: PeerId) -> int:
    """Which part of a view is about this peer."""
    return mmh3.hash64(peer, signed=False)[1] % PARTS


class Members:
    """Everyone else, by PeerId."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._views: dict[PeerId, MemberView] = {}
        self._reachable: list[PeerId] = []
        self._place: dict[PeerId, int] = {}
        """Where in `_reachable`, so that removal takes no search."""
        self._gone: dict[PeerId, None] = {}
        """Dead or left, the longest gone first."""
        self._at: dict[str, tuple[PeerId, ...]] = {}
        """By preferred address."""
        self._tombstones: dict[PeerId, Rank] = {}
        self._hearsay: dict[PeerId, float] = {}
        """Tombstones of those that weren't in the table, by when they were heard of."""
        self.forgotten: list[PeerId] = []
        """Who was forgotten and not told of yet; whoever tells it empties this."""
        self.fingerprint = 0
        """Of all reachable members."""
        self.part_fingerprints = [0] * PARTS

    def adopt(self, views: Sequence[MemberView], without: PeerId) -> None:
        """Fill an empty table at once with reachable members, all but one of them."""
        self._views = {view.info.peer_id: view for view in views}
        del self._views[without]
        self._reachable = list(self._views)
        self._place = {peer: place for place, peer in enumerate(self._reachable)}
        for view in self._views.values():
            self._at[view.info.addresses[0]] = (view.info.peer_id,)
            self._mix(view)

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[MemberView]:
        return iter(self._views.values())

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._views

    def get(self, peer: PeerId) -> MemberView | None:
        return self._views.get(peer)

    def buried(self) -> Iterator[tuple[PeerId, Rank]]:
        """Those of whom only a tombstone is left, the newest `TOMBSTONES_TOLD` of them."""
        newest = islice(reversed(self._tombstones.items()), TOMBSTONES_TOLD)
        return ((peer, last) for peer, last in newest if peer not in self._views)

    def rank(self, peer: PeerId) -> Rank | None:
        """The highest claim about a peer, also when only a tombstone is left of it."""
        view = self._views.get(peer)
        return view.rank if view is not None else self._tombstones.get(peer)

    def is_reachable(self, peer: PeerId) -> bool:
        return peer in self._place

    @property
    def num_reachable(self) -> int:
        return len(self._reachable)

    def reachable(self) -> Sequence[PeerId]:
        """All reachable members, in no particular order; not to be changed."""
        return self._reachable

    def sample(
        self, rng: random.Random, size: int, without: Collection[PeerId] = ()
    ) -> list[PeerId]:
        """Up to `size` distinct reachable members, drawn uniformly."""
        drawn = rng.sample(self._reachable, min(size + len(without), len(self._reachable)))
        return [peer for peer in drawn if peer not in without][:size]

    def at(self, address: str) -> list[MemberView]:
        """Members whose preferred address this is, gone ones included."""
        return [self._views[peer] for peer in self._at.get(address, ())]

    def of_parts(self, parts: Collection[int]) -> Iterator[MemberView]:
        """Members, gone ones too, that these parts of the view are about."""
        return (view for peer, view in self._views.items() if part_of(peer) in parts)

    def gone(self) -> Iterator[MemberView]:
        """Dead or left, the most recent first."""
        return (self._views[peer] for peer in reversed(self._gone))

    def has_gone(self) -> bool:
        return bool(self._gone)

    def put(self, view: MemberView) -> bool:
        """Set what is held of a member; False if the table has no room for a newcomer."""
        peer = view.peer_id
        if peer not in self._views and not self._make_room():
            return False
        self._tombstones.pop(peer, None)
        self._hearsay.pop(peer, None)
        old = self._views.get(peer)
        for each in (old, view):
            if each is not None and each.is_reachable:
                self._mix(each)
        self._views[peer] = view
        if old is None:
            for address in view.info.addresses[:1]:
                self._at[address] = (*self._at.get(address, ()), peer)
        self._gone.pop(peer, None)
        if view.is_reachable:
            self._enter(peer)
        else:
            self._withdraw(peer)
            self._gone[peer] = None
        return True

    def bury(self, peer: PeerId, last: Rank, now: float) -> None:
        """Remember only that a peer which isn't in the table is dead or left, at this rank."""
        self._hearsay.pop(peer, None)
        self._hearsay[peer] = now
        self._set_tombstone(peer, last)

    def _set_tombstone(self, peer: PeerId, last: Rank) -> None:
        self._tombstones.pop(peer, None)
        self._tombstones[peer] = last
        if len(self._tombstones) > self._limit:
            oldest = next(iter(self._tombstones))
            del self._tombstones[oldest]
            if self._hearsay.pop(oldest, None) is not None:
                self.forgotten.append(oldest)

    def forget_gone(self, before: float) -> None:
        """Leave only tombstones of those gone since a time earlier than `before`."""
        while self._gone and self._views[next(iter(self._gone))].since < before:
            self._forget(next(iter(self._gone)))
        while self._hearsay and next(iter(self._hearsay.values())) < before:
            peer = next(iter(self._hearsay))
            del self._hearsay[peer]
            self.forgotten.append(peer)

    def _make_room(self) -> bool:
        if len(self._views) < self._limit:
            return True
        if not self._gone:
            return False
        self._forget(next(iter(self._gone)))
        return True

    def _forget(self, peer: PeerId) -> None:
        view = self._views.pop(peer)
        del self._gone[peer]
        for address in view.info.addresses[:1]:
            others = tuple(other for other in self._at[address] if other != peer)
            if others:
                self._at[address] = others
            else:
                del self._at[address]
        self._set_tombstone(peer, view.rank)
        self.forgotten.append(peer)

    def _mix(self, view: MemberView) -> None:
        """Into the fingerprints, or out of them: XOR is its own inverse."""
        peer = view.info.peer_id
        mixed = fingerprint(peer, view.incarnation, view.status)
        self.fingerprint ^= mixed
        self.part_fingerprints[part_of(peer)] ^= mixed

    def _enter(self, peer: PeerId) -> None:
        if peer not in self._place:
            self._place[peer] = len(self._reachable)
            self._reachable.append(peer)

    def _withdraw(self, peer: PeerId) -> None:
        place = self._place.pop(peer, None)
        if place is None:
            return
        last = self._reachable.pop()
        if last != peer:
            self._reachable[place] = last
            self._place[last] = place
