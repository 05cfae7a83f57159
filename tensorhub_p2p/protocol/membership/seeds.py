"""Seeds: which bare addresses to dial, to join and to find back after a partition.

Rules of this file. It picks addresses and times; swim.py sends what is sent there.

Theory of operation. Until one seed has answered, all of them are dialled every
`join_retry` seconds, except those found to be this very peer. From then on they are one way back
among others: now and then one seed behind which no reachable member is known, and one
member declared dead, are dialled: each `redial_interval` up to `SMALL_CLUSTER` members and,
as all members do this, proportionally less often above, so that what they all send to
those addresses doesn't grow with the cluster. So the halves of a healed partition
find each other, though each holds the other for dead, and a peer that started before its
seeds finds them later. A seed is known by the peer that answered there, or by being a
member's address: a name that resolves to it is as good.

Bounds: as many seeds as the caller named; two dials an interval after the join.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import NOBODY, PeerId
from tensorhub_p2p.protocol.membership.members import Members
from tensorhub_p2p.protocol.messages import Status

SMALL_CLUSTER = 32


class Seeds:
    """The addresses this peer may join through, and what is known of each."""

    def __init__(self, config: SwimConfig, rng: random.Random, members: Members) -> None:
        self._config = config
        self._rng = rng
        self._members = members
        self._answered_by: dict[str, PeerId | None] = {}
        self._own: set[str] = set()
        self._elsewhere: set[str] = set()
        """Seeds of other zones: the gateways keep in touch with those (zones.py)."""
        self._next_dial: float | None = None
        self.joined = False

    def name(self, now: float, addresses: Sequence[str]) -> None:
        """These are the seeds; dial them from now on."""
        self._answered_by.update(dict.fromkeys(addresses))
        self._next_dial = now

    def is_seed(self, address: str) -> bool:
        return address in self._answered_by

    def note_own(self, address: str) -> bool:
        """This peer itself listens there; whether that is news about a seed."""
        if not self.is_seed(address) and not self._members.at(address):
            return False  # nobody dialled it
        news = self.is_seed(address) and address not in self._own
        self._own.add(address)
        return news

    def note_answer(self, address: str, peer: PeerId) -> None:
        """This peer answered there."""
        if self.is_seed(address):
            self._answered_by[address] = peer

    def note_elsewhere(self, address: str) -> None:
        """Somebody of another zone answered there: it is no way back into this one."""
        if self.is_seed(address):
            self._elsewhere.add(address)

    def note_joined(self, now: float) -> None:
        """One answered: from now on seeds are dialled slowly, and only while they are missing."""
        self.joined = True
        self._next_dial = now + self._pause()

    def start_redialling(self, now: float) -> None:
        """Somebody was declared dead: look for it now and then."""
        if self._next_dial is None:
            self._next_dial = now + self._pause()

    def due(self, now: float) -> list[str]:
        """Addresses to dial now."""
        if self._next_dial is None or now < self._next_dial:
            return []
        if self._joining():
            self._next_dial = now + self._config.join_retry
            return self._others()
        self._next_dial = now + self._pause()
        return self._pick(self._missing()) + self._pick(self._dead())

    def next_wakeup(self) -> float | None:
        if self._joining() or self._missing() or self._members.has_gone():
            return self._next_dial
        return None

    def _joining(self) -> bool:
        return not self.joined and bool(self._others())

    def _others(self) -> list[str]:
        """All seeds but the own addresses."""
        return [address for address in self._answered_by if address not in self._own]

    def _missing(self) -> list[str]:
        """Seeds behind which no reachable member is known."""
        return [
            address
            for address in self._others()
            if address not in self._elsewhere
            and not self._is_taken(address)
            and not self._members.is_reachable(self._answered_by[address] or NOBODY)
        ]

    def _dead(self) -> list[str]:
        """Addresses of members declared dead at which nobody else lives now."""
        return [
            address
            for view in self._members.gone()
            if view.status is Status.DEAD
            for address in view.info.addresses[:1]
            if address not in self._own and not self._is_taken(address)
        ]

    def _is_taken(self, address: str) -> bool:
        return any(view.is_reachable for view in self._members.at(address))

    def _pick(self, addresses: list[str]) -> list[str]:
        return [self._rng.choice(addresses)] if addresses else []

    def _pause(self) -> float:
        scale = max(1.0, self._members.num_reachable / SMALL_CLUSTER)
        return self._config.redial_interval * scale * self._rng.uniform(0.5, 1.5)
