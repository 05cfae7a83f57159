"""The hash ring: which members own which key.

Rules of this file. A `Ring` is an immutable value that follows from its members alone:
peers that know the same members compute the same owners, in the same order, with no
message. It doesn't know which of the members answer, nor what they store.

Theory of operation. Every member has `virtual_nodes` points on a circle of 64-bit hashes
(consistent hashing, Karger et al. 1997; virtual nodes and successor lists as in Dynamo,
DeCandia et al. 2007, §4.2). A key's owners are the first n different members met when
walking up from the key's own point. So a member that joins takes keys over from its
successors only, and one that goes leaves them to its successors only: of N members, about
n/N of the keys get another owner list.

Bounds. A ring holds members x virtual_nodes points, as two flat arrays. A change by a few
members copies the arrays and edits the copy. Rings that are alive anywhere in the process
are shared between those who know the same members.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar
from weakref import WeakValueDictionary

from mmh3 import hash64

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Key

Owners = tuple[PeerId, ...]
"""The owner list of a key, in ring order; as a set it names who may take writes."""

_HASH_BITS = (1 << 63) - 1


@lru_cache(maxsize=8192)
def _points(member: PeerId, virtual_nodes: int) -> tuple[int, ...]:
    """The places of one member on the circle."""
    points: list[int] = []
    for number in range((virtual_nodes + 1) // 2):
        points += hash64(f"{member}\0{number}", 0, True, signed=False)
    return tuple(points[:virtual_nodes])


def _place(key: Key) -> int:
    return hash64(f"{key.kind}\0{key.model}\0{key.part}", 1, True, signed=False)[0]


@lru_cache(maxsize=8192)
def owners_hash(owners: Owners) -> int:
    """63 bits that identify a set of owners, whatever their order."""
    return hash64("\0".join(sorted(owners)), 2, True, signed=False)[0] & _HASH_BITS


def majority(count: int) -> int:
    """The quorum W = R of `count` owners: two of them always share one."""
    return count // 2 + 1


class Ring:
    """The circle of some members. Make it by `Ring.of`, or `ring.of_members` after a change."""

    __slots__ = ("__weakref__", "_holders", "_points", "members", "virtual_nodes")

    _alive: ClassVar[WeakValueDictionary[tuple[int, Owners], Ring]] = WeakValueDictionary()

    def __init__(self, members: Iterable[PeerId], virtual_nodes: int) -> None:
        self.members: Owners = tuple(sorted(set(members)))
        self.virtual_nodes = virtual_nodes
        points = [p for member in self.members for p in _points(member, virtual_nodes)]
        # The sort is stable, so that members with equal points stay in their order.
        circle = sorted(range(len(points)), key=points.__getitem__)
        self._points = array("Q", [points[at] for at in circle])
        self._holders = [self.members[at // virtual_nodes] for at in circle]

    @classmethod
    def of(cls, members: Iterable[PeerId], virtual_nodes: int) -> Ring:
        """The ring of these members, shared with everybody who knows the same ones."""
        key = (virtual_nodes, tuple(sorted(set(members))))
        ring = cls._alive.get(key)
        if ring is None:
            ring = cls._alive[key] = cls(key[1], virtual_nodes)
        return ring

    def of_members(self, members: Iterable[PeerId]) -> Ring:
        """The ring of other members; cheap when few of them differ."""
        wanted = tuple(sorted(set(members)))
        if wanted == self.members:
            return self
        ring = self._alive.get((self.virtual_nodes, wanted))
        if ring is not None:
            return ring
        gone = sorted(set(self.members).difference(wanted))
        new = sorted(set(wanted).difference(self.members))
        if len(gone) + len(new) > max(1, len(wanted) // 16):
            return Ring.of(wanted, self.virtual_nodes)
        ring = self._copy(wanted)
        for member in gone:
            ring._take_out(member)
        for member in new:
            ring._put_in(member)
        self._alive[(self.virtual_nodes, wanted)] = ring
        return ring

    def owners(self, key: Key, n: int) -> Owners:
        """The first `n` different members from the key's place on, or all if there are fewer."""
        n = min(n, len(self.members))
        holders = self._holders
        start = bisect_right(self._points, _place(key))
        found: list[PeerId] = []
        at = start
        while len(found) < n:
            if at == len(holders):
                at = 0
            member = holders[at]
            if member not in found:
                found.append(member)
            at += 1
        return tuple(found)

    def __contains__(self, member: PeerId) -> bool:
        at = bisect_left(self.members, member)
        return at < len(self.members) and self.members[at] == member

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Ring of {len(self.members)}"

    def _copy(self, members: Owners) -> Ring:
        ring = Ring.__new__(Ring)
        ring.members, ring.virtual_nodes = members, self.virtual_nodes
        ring._points, ring._holders = self._points[:], self._holders[:]
        return ring

    def _find(self, point: int, member: PeerId) -> int:
        """Where (point, member) is, or belongs; equal points are ordered by member."""
        at = bisect_left(self._points, point)
        while at < len(self._points) and self._points[at] == point and self._holders[at] < member:
            at += 1
        return at

    def _put_in(self, member: PeerId) -> None:
        for point in _points(member, self.virtual_nodes):
            at = self._find(point, member)
            self._points.insert(at, point)
            self._holders.insert(at, member)

    def _take_out(self, member: PeerId) -> None:
        for point in _points(member, self.virtual_nodes):
            at = self._find(point, member)
            del self._points[at], self._holders[at]
