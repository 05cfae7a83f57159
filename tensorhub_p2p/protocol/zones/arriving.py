"""Arriving: how a peer that starts finds its zone, or finds that it is the zone's first.

Rules of this file. It keeps what is known until then, and times; zones.py sends the calls,
and hears the answers.

Theory of operation.

    LOOKING ──a member of the zone is known──────────────────────────────▶ ARRIVED
            ──no seeds───────────────────────────────────────────────────▶ ARRIVED, its first
            ──a greeting from another zone that names nobody of the own──▶ ARRIVED, its first
            ──the same, of a peer that is alone there itself, and none
              of another kind comes for `alone_after`────────────────────▶ ARRIVED, its first
            ──a greeting that names some, but none of them answers for
              `alone_after`──────────────────────────────────────────────▶ ARRIVED, its first
            ──a seed is this peer itself, and nobody comes for
              `alone_after`──────────────────────────────────────────────▶ ARRIVED, its first

Those named are called each `join_retry` meanwhile, and so are the seeds (seeds.py). Of a peer
that knows nobody, which has just been started anew, say, it is no proof that it knows nobody
of this zone: it is asked again. The seed that led to another zone counts
as an answer only once the peer has arrived, so that whoever waits for its join doesn't act
on a zone of one while the others are about to answer.

Bounds: `MAX_NAMED` of those named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import earliest

MAX_NAMED = 16


class Contact(NamedTuple):
    """Where the cluster was found."""

    seed: str
    peer: PeerId


class Arrival:
    """One peer's way into its zone."""

    def __init__(self, alone_after: float, retry: float) -> None:
        self.at: float | None = None
        """When it arrived; None while it looks."""
        self.contact: Contact | None = None
        """The seed of another zone that answered, and who that was."""
        self._alone_after = alone_after
        self._retry = retry
        self._named: dict[PeerId, PeerInfo] = {}
        self._alone_at: float | None = None
        self._look_at: float | None = None

    def arrive(self, now: float) -> None:
        """A member is known, or it is clear that there is none."""
        if self.at is None:
            self.at = now

    def may_be_alone(self, now: float) -> None:
        """There may be nobody else: wait no longer than `alone_after` from now."""
        if self._alone_at is None:
            self._alone_at = now + self._alone_after

    def greeted(
        self, now: float, contact: Contact, named: Iterable[PeerInfo], *, is_alone: bool = False
    ) -> None:
        """A peer of another zone, perhaps alone there, named these of the own one."""
        if self.at is not None:
            return
        self.contact = contact
        for info in named:
            if len(self._named) < MAX_NAMED:
                self._named.setdefault(info.peer_id, info)
        if not self._named:
            if is_alone:
                self.may_be_alone(now)
            else:
                self.arrive(now)
        elif self._look_at is None:
            self._look_at = now
            self._alone_at = now + self._alone_after

    def due(self, now: float) -> tuple[PeerInfo, ...]:
        """Whom to call now."""
        if self.at is not None:
            return ()
        if self._alone_at is not None and now >= self._alone_at:
            self.arrive(now)
        elif self._look_at is not None and now >= self._look_at:
            self._look_at = now + self._retry
            return tuple(self._named.values())
        return ()

    def next_wakeup(self) -> float | None:
        return earliest(self._alone_at, self._look_at) if self.at is None else None
