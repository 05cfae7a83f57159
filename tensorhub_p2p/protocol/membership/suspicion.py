"""Suspicion: how long a silent member may still refute before it is declared dead.

Rules of this file. It keeps deadlines and accusers and decides nothing else: who is
suspected, and what follows, is swim.py's business.

Theory of operation (Lifeguard §3.2, "dynamic suspicion timeouts"). One accuser may
itself be the sick one, so its lone word runs for the longest timeout. Each independent
confirmation, by another accuser, shortens it on a logarithmic scale; K of them bring it
to the shortest. A member that was refuted, or died, is simply cancelled. Of an unresponsive
member, whose sockets answer, no confirmations count: shortest and longest are its limit.

Hard evidence of the sockets caps a suspicion (`hasten`): the verdict falls soon, whatever
the accusers say. Evidence to the contrary lifts the cap (`relent`).

Bounds: one entry a suspected member, K accusers an entry. A stale heap entry is inert
and disappears when its time comes, or when there are too many.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from tensorhub_p2p.protocol.identity import NOBODY, PeerId

HOLD = 1.0
"""Seconds until a judge that doubts itself looks at a verdict again."""


def timeout(confirmations: int, expected: int, shortest: float, longest: float) -> float:
    """Seconds from the first accusation to the verdict (Lifeguard §3.2).

    `confirmations` counts accusers after the first one, `expected` is K. With K = 0
    nobody else is there to confirm, and the shortest holds at once.
    """
    if expected < 1:
        return shortest
    share = math.log(confirmations + 1) / math.log(expected + 1)
    return max(shortest, longest - share * (longest - shortest))


@dataclass
class Suspicion:
    """One suspected member."""

    started: float
    shortest: float
    longest: float
    expected: int
    accusers: list[PeerId]
    cap: float = math.inf
    """The verdict falls no later than this, whatever the accusers say (hard evidence)."""

    held_until: float = -math.inf
    """The judge doubts itself: no verdict before."""

    deadline: float = math.inf
    """When the verdict falls, as it stands."""

    def reckon(self) -> float:
        """Find the deadline anew, after any of the above has changed."""
        confirmations = max(0, len(self.accusers) - 1)
        seconds = timeout(confirmations, self.expected, self.shortest, self.longest)
        self.deadline = max(self.held_until, min(self.cap, self.started + seconds))
        return self.deadline


class Suspicions:
    """All running suspicions of one peer, by suspected member."""

    def __init__(self) -> None:
        self._running: dict[PeerId, Suspicion] = {}
        self._heap: list[tuple[float, PeerId]] = []

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._running

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self,
        now: float,
        peer: PeerId,
        accuser: PeerId,
        *,
        expected: int,
        shortest: float,
        longest: float,
    ) -> None:
        """Begin anew, also when one is running (at a lower incarnation, or for less)."""
        accusers = [accuser] if accuser != NOBODY else []
        self._running[peer] = Suspicion(now, shortest, longest, expected, accusers)
        self._schedule(peer)

    def confirm(self, peer: PeerId, accuser: PeerId) -> bool:
        """Another accuser; whether it is independent and still counts, so worth passing on."""
        suspicion = self._running.get(peer)
        if suspicion is None or accuser == NOBODY or accuser in suspicion.accusers:
            return False
        if len(suspicion.accusers) > suspicion.expected:
            return False
        suspicion.accusers.append(accuser)
        self._schedule(peer)
        return True

    def hasten(self, peer: PeerId, deadline: float) -> None:
        """Hard evidence: the verdict falls at `deadline` at the latest."""
        suspicion = self._running.get(peer)
        if suspicion is not None and deadline < suspicion.deadline:
            suspicion.cap = deadline
            self._schedule(peer)

    def relent(self, peer: PeerId) -> None:
        """The hard evidence holds no longer."""
        suspicion = self._running.get(peer)
        if suspicion is not None and suspicion.cap != math.inf:
            suspicion.cap = math.inf
            self._schedule(peer)

    def cancel(self, peer: PeerId) -> None:
        """Refuted or settled."""
        self._running.pop(peer, None)

    def postpone(self, gap: float, *, until: float = -math.inf) -> None:
        """The judge itself was not running for `gap` seconds: nobody's time has passed.

        No verdict falls before `until`: what was said meanwhile has yet to be read.
        """
        for suspicion in self._running.values():
            suspicion.started += gap
            suspicion.cap += gap
            suspicion.held_until = max(suspicion.held_until, until)
        self._sort()

    def deadline(self, peer: PeerId) -> float | None:
        """When the verdict on `peer` falls, as it stands."""
        suspicion = self._running.get(peer)
        return suspicion.deadline if suspicion is not None else None

    def next_deadline(self) -> float | None:
        """The earliest verdict."""
        while self._heap:
            deadline, peer = self._heap[0]
            suspicion = self._running.get(peer)
            if suspicion is not None and suspicion.deadline == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: float, *, hold: bool = False) -> list[PeerId]:
        """End the suspicions whose time is up, and name them; or give them `HOLD` more."""
        due = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, peer = heapq.heappop(self._heap)
            if hold:
                self._running[peer].held_until = now + HOLD
                self._schedule(peer)
            else:
                del self._running[peer]
                due.append(peer)
        return due

    def _schedule(self, peer: PeerId) -> None:
        heapq.heappush(self._heap, (self._running[peer].reckon(), peer))
        if len(self._heap) > 64 + 4 * len(self._running):
            self._sort()

    def _sort(self) -> None:
        self._heap = [(suspicion.reckon(), peer) for peer, suspicion in self._running.items()]
        heapq.heapify(self._heap)
