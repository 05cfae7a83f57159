"""Which earlier owners a key must still be merged from before its reads can be trusted.

Rules of this file. `Debts` is the warmth of one key at one peer: pure bookkeeping over
owner sets. `Past` is the ring's history at one peer. Neither sends anything or reads the
clock; `owner.py` asks, answers and keeps the time.

Theory of operation. A write is done once a majority of the owner set S took it. When the
owner set becomes S', a majority of S' must know it before it may answer reads:

    COLD      owes sets: a read is parked. The members of each owed set are asked for what
              they hold, and for the sets that *they* owe or serve: those are owed here too
    WARM      owes nothing: reads are answered
    CLOSED    was asked to hand over to a set S' that isn't the one served here, so its view
              and the asker's differ. Takes no request for the set that it serves, until its
              view changes, or some time passed and it has merged from S' in turn (COLD)

Why it is enough, within the limits below: of any majority of S', either all are of S as
well, and then they are a majority of S, or one merged from a majority of S before it was
warm. Whoever answered such a merge is closed for S, so no later write can be done in S. A
majority that isn't done merging itself names the sets it owes, so the argument goes down
to the first set.
(Reconfiguration as in RAMBO, Lynch and Shvartsman 2002, without its consensus on what
comes next: that follows from membership. While views differ, requests wait.)

What a peer owes at first touch of a key: each set of its ring history that it wasn't in.
A peer that was alone (it just joined) also counts the ring of those that appeared as an
earlier one. A peer that was itself absent for a while (paused, cut off, or held for silent)
counts the ring of all others without itself as an earlier one, and owes it for all keys. When
departed members return (a partition healed), their ring is owed for the keys whose owners
change by it, for `returned_seconds` at most.

A set is settled by answers from so many of it that each write it took must be known to one
of them, n - W + 1 (the peer itself counts in a set it is in), or, where deaths rule that out,
from all of it that can still be reached. Silent members count as reachable: what only they
hold isn't gone. But a set of a single peer is waited for `returned_seconds` only. Answers are
given cold or warm, so peers that wait for each other can't deadlock, and a set that died
out is settled at once.

Where it is not enough. A write can be missed by a warm owner when

- its owner set is more than `HISTORY` ring changes old at a peer that first hears of the
  key now, and no set in between was merged (rings older than that are forgotten);
- a key owes `MAX_SETS` sets already: further ones are not owed;
- a majority of its owners is dead: what only they held is gone;
- it was made when there was just one peer, and that one is silent;
- it was made on the other side of a partition, and its owners there stay silent for
  `returned_seconds` after they came back: a silent peer may not stop others (G8).

Live writers compare what they wrote with what new owners hold, within `rewrite_jitter` when they
see a key's owners change, and with all owners at each `repair_interval`: what such a gap hides
comes back then, except registers of the dead. Until then a read, or the judgement of a
conditional write, can miss it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub_p2p.protocol.directory.ring import Owners, Ring, majority
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Key

MAX_SETS = 24
HISTORY = 8

Reachable = Callable[[PeerId], bool]


def same(one: Owners, other: Owners) -> bool:
    """The same set of owners, in whatever order."""
    return one == other or sorted(one) == sorted(other)


@dataclass
class Debts:
    """One key's warmth at peer `me`. `served` is its owner list by the own ring."""

    me: PeerId
    served: Owners
    owed: dict[Owners, float | None] = field(default_factory=dict)
    """With the time at which the debt lapses, paid or not; None for never."""
    answered: dict[PeerId, None] = field(default_factory=dict)
    """Peers that handed over what they hold, since the debts began."""
    settled: set[Owners] = field(default_factory=set)
    successor: Owners = ()
    """The set for which this key is closed; () if it is open."""
    reopen_at: float = 0.0
    alone_lapse: float | None = None
    """When the debt to a set of a single peer lapses: a silent one may not stop others (G8)."""

    @property
    def warm(self) -> bool:
        return not self.owed

    @property
    def closed(self) -> bool:
        return bool(self.successor)

    def owe(self, owners: Owners, lapse: float | None = None) -> None:
        """Writes to this set may be unknown here."""
        owners = tuple(sorted(owners))
        if len(owners) == 1 and lapse is None:
            lapse = self.alone_lapse
        if owners and owners not in self.settled and len(self.owed) < MAX_SETS:
            self.owed.setdefault(owners, lapse)

    def move(self, served: Owners) -> None:
        """The own ring now names other owners for the key.

        Earlier answers don't count any more: whoever gave them was not closed for `served`.
        """
        before, self.served = self.served, served
        self.settled.clear()
        self.answered.clear()
        if self.me not in before:
            self.owe(before)
        if self.successor:
            self.owe(self.successor)
            self.successor = ()
        self.owed.pop(tuple(sorted(served)), None)

    def absent(self, others: Owners, lapse: float) -> None:
        """While this peer was absent, `others` may have taken writes as this key's owners."""
        self.settled.discard(tuple(sorted(others)))
        self.owed.pop(tuple(sorted(others)), None)
        self.answered.clear()
        self.owe(others, lapse)

    def close(self, until: float, successor: Owners) -> None:
        """Take no request for the set served here: `successor` is being merged from it."""
        successor = tuple(sorted(successor))
        if self.successor and self.successor != successor:
            self.owe(self.successor)
        self.owed.pop(successor, None)
        self.successor, self.reopen_at = successor, until

    def reopen(self, now: float) -> None:
        """Once the time is up: owe the successor's writes, and be open when they are merged."""
        if self.successor and now >= self.reopen_at and self.successor not in self.owed:
            self.settled.discard(self.successor)
            self.answered.clear()
            self.owe(self.successor)

    def told(self, peer: PeerId, sets: tuple[Owners, ...]) -> None:
        """`peer` handed over what it holds, and named the sets that it serves or owes itself."""
        for owners in sets:
            if not same(owners, self.served):
                self.owe(owners)
        self.answered[peer] = None

    def settle(self, now: float, reachable: Reachable) -> bool:
        """Strike the debts that are paid or lapsed; returns whether none is left."""
        for owners, lapse in list(self.owed.items()):
            if self._paid(owners, reachable) or (lapse is not None and now >= lapse):
                del self.owed[owners]
                self.settled.add(owners)
                if owners == self.successor:
                    self.successor = ()
        if not self.owed:
            self.answered.clear()
        return not self.owed

    def to_ask(self, reachable: Reachable) -> list[PeerId]:
        """Whose answers are still wanted."""
        wanted: dict[PeerId, None] = {}
        for owners in self.owed:
            for peer in owners:
                if peer != self.me and peer not in self.answered and reachable(peer):
                    wanted[peer] = None
        return list(wanted)

    def _paid(self, owners: Owners, reachable: Reachable) -> bool:
        have = [peer for peer in owners if peer == self.me or peer in self.answered]
        if len(have) > len(owners) - majority(len(owners)):
            return True
        return all(peer in have or not reachable(peer) for peer in owners)


class Past:
    """The rings that may have taken writes before the present one, newest last."""

    def __init__(self) -> None:
        self._rings: deque[Ring] = deque(maxlen=HISTORY)

    def add(self, ring: Ring) -> None:
        if len(ring):
            if ring in self._rings:
                self._rings.remove(ring)
            self._rings.append(ring)

    def debts(
        self, me: PeerId, key: Key, n: int, served: Owners, alone_lapse: float | None = None
    ) -> Debts:
        """What is owed for a key that was never heard of here."""
        debts = Debts(me, served, alone_lapse=alone_lapse)
        for ring in self._rings:
            owners = ring.owners(key, n)
            if me not in owners and not same(owners, served):
                debts.owe(owners)
        return debts
