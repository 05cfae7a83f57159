"""The line: this peer's view of who the zone's gateways are, kept up to date.

Rules of this file. It applies the rule of gateways.py to the members as they come and go, and
says whether this peer is one. What a gateway does is for zones.py.

Theory of operation. A peer is in line from its arrival on. A newcomer first waits until it
has seen who is there (`first_view`), and while it isn't settled it leaves the duty to those
who speak for the zone already (`incumbents`), if they are as many as are needed. The line is
looked at anew shortly after a candidate came or went, and when one has settled: a zone in
which nothing happens costs nothing.

Bounds: the short list of gateways.py; one look each `CHANGES_SETTLE` at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from tensorhub_p2p.config import ZonesConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.zones.gateways import Candidate, Candidates, choose

CHANGES_SETTLE = 0.1
"""Seconds over which changes of members are collected before the line is looked at."""


class Line:
    """The line of one zone, as one of its peers sees it. `members` are all others at present."""

    def __init__(
        self, me: PeerInfo, config: ZonesConfig, members: Callable[[], Iterable[MemberView]]
    ) -> None:
        self._me = me.peer_id
        self._zone = me.zone
        self._config = config
        self._members = members
        self._candidates = Candidates(me.zone)
        self._since: float | None = None
        """When this peer came; None while it isn't in line."""
        self._not_before = -math.inf
        self._chosen_at = -math.inf
        """When this peer was last seen to be among the gateways."""
        self.named: tuple[PeerId, ...] = ()
        """The gateways, then those next in line; the first one writes the zone's summary."""
        self.next_look: float | None = None
        """When the line is to be looked at again."""

    @property
    def gateways(self) -> tuple[PeerId, ...]:
        return self.named[: self._config.gateways]

    # -- who is there --

    def enter(self, now: float, first_view: float = 0.0) -> None:
        """This peer has arrived, and needs so many seconds until it knows the zone."""
        if self._since is None:
            self._since = now
            self.next_look = self._not_before = now + first_view

    def adopt(self, now: float, members: Iterable[MemberView]) -> None:
        """These members and this peer are there since long."""
        self._candidates.refill(members, since=-math.inf)
        self._since = -math.inf
        self.next_look = now

    def note(self, now: float, member: MemberView) -> None:
        """A member came, or its status changed."""
        if self._candidates.note(member) and self._since is not None:
            self.look_at(max(now, self._not_before) + CHANGES_SETTLE)

    # -- looking --

    def look_at(self, at: float) -> None:
        """Look at this time, if not before."""
        self.next_look = at if self.next_look is None else min(self.next_look, at)

    def look(self, now: float, incumbents: Collection[PeerId]) -> bool:
        """Look anew; whether this peer is a gateway now.

        `incumbents` are the living peers that the zone's summary names as its gateways.
        """
        if self._since is None:
            return False
        if self._candidates.too_few:
            self._candidates.refill(self._members())
        settled_since = now - self._config.settle_seconds
        everyone = [*self._candidates, Candidate(self._me, self._since)]
        self.named = choose(self._zone, everyone, settled_since, self._config.named)
        younger = (c.since for c in everyone if c.since > settled_since)
        settles = min(younger, default=math.inf) + self._config.settle_seconds
        self.next_look = max(settles, now + CHANGES_SETTLE) if settles < math.inf else None
        others = [peer for peer in incumbents if peer != self._me]
        is_newcomer = self._since > settled_since and len(others) >= self._config.gateways
        if self._me in self.gateways and not is_newcomer:
            self._chosen_at = now
        return now < self._chosen_at + self._config.linger_seconds
