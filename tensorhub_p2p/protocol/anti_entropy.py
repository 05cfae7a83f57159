"""Exchanging whole views: how a peer joins, and how gaps that gossip left are mended.

Rule of this file. It decides with whom views are exchanged, and when; what a view means is
for swim.py to judge, and the table of members is only read.

Theory of operation. Who sends `PushPull` sends its view, and is answered with the other's
(`PushPullReply`). That happens

    to join          with whoever answers at a seed's address, or where a dead member was
    now and then     with a random member, every `push_pull_interval` (jittered by half)
    for a stranger   that writes to us: it knows this peer, which doesn't know it
    for the lost     a member that was held for dead and is back
    for a mismatch   the fingerprint on an Ack shows that two views differ though no more
                     news is on its way: gossip misses some peer now and then, and this
                     finds the gap within seconds
    after a pause    of our own (`hasten`): who knows what was missed

A fingerprint covers all reachable members and this peer (members.py); 0 says nothing.
A view for a peer that is remembered as gone includes what is held of it, to be refuted.

Bounds: a view is bounded by the table. Strangers cause at most one exchange each
`gossip_interval`, mismatches one each `mismatch_interval`, whoever sends them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.hints import Hints
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.members import Members
from tensorhub_p2p.protocol.messages import PushPull, PushPullReply, Rumour


class AntiEntropy:
    """The exchanges of one peer. `view` is its present opinion of everyone, itself first."""

    def __init__(
        self,
        me: PeerInfo,
        view: Callable[[], tuple[Rumour, ...]],
        members: Members,
        hints: Hints,
        config: SwimConfig,
        rng: random.Random,
        outbox: Outbox,
    ) -> None:
        self._me = me
        self._view = view
        self._members = members
        self._hints = hints
        self._config = config
        self._rng = rng
        self._outbox = outbox
        self._next: float | None = None
        """When the next exchange with a random member is due; None before the first member."""
        self._next_introduction = -math.inf
        self._next_comparison = -math.inf

    def start(self, now: float) -> None:
        """There is somebody to exchange views with."""
        if self._next is None:
            self._next = now + self._pause()

    def hasten(self, now: float) -> None:
        """The next exchange is due now."""
        if self._next is not None:
            self._next = now

    def tick(self, now: float) -> None:
        if self._next is not None and now >= self._next:
            self._next = now + self._pause()
            for peer in self._members.sample(self._rng, 1):
                self.exchange_with(peer)

    def next_wakeup(self) -> float | None:
        return self._next if self._members.num_reachable else None

    def _pause(self) -> float:
        return self._config.push_pull_interval * self._rng.uniform(0.5, 1.5)

    # -- one exchange --

    def exchange_with(self, peer: PeerId) -> None:
        view, hints = self._view_for(peer), self._hints.newest()
        self._outbox.send(peer, PushPull(self._me, view, hints=hints))

    def reply(self, peer: PeerId, dialled: str) -> None:
        """The other half; `dialled` is the address under which it found us, if any."""
        view, hints = self._view_for(peer), self._hints.newest()
        self._outbox.send(peer, PushPullReply(self._me, view, hints, dialled))

    def dial(self, address: str, *, joining: bool) -> None:
        """Knock where a seed, or a member held for dead, may be."""
        hello = PushPull(self._me, self._view(), joining, self._hints.newest(), address)
        self._outbox.send_to(address, hello)

    def _view_for(self, peer: PeerId) -> tuple[Rumour, ...]:
        """The own view, and what is on its addressee's tombstone, for it to refute."""
        last = self._members.rank(peer)
        if last is None or peer in self._members:
            return self._view()
        return (*self._view(), Rumour(peer, *last))

    # -- reasons for one --

    def compare(self, now: float, sender: PeerId, ours: int, theirs: int) -> None:
        """Views that differ when all has been said are exchanged, but not in storms."""
        if theirs in (0, ours) or now < self._next_comparison:
            return
        self._next_comparison = now + self._config.mismatch_interval
        self.exchange_with(sender)

    def introduce(self, now: float, sender: PeerId) -> None:
        """A stranger writes, so it knows this peer: exchange views, but never in storms."""
        if sender in self._members or sender == self._me.peer_id or now < self._next_introduction:
            return
        self._next_introduction = now + self._config.gossip_interval
        self.exchange_with(sender)
