"""Gossip: news leaves with every membership message, and in rounds of its own.

Rules of this file. It sends: what was decided elsewhere, with as much news as fits. Which
piece goes first is dissemination.py's; what the news means is nobody's business here.

Theory of operation (SWIM §4.1; memberlist's rounds). Rumours ride on every message. While
there is news, a round goes to `gossip_nodes` random members each `gossip_interval`, and to
one recently dead, which should learn that it is held for dead, and refute. The first news
after a calm leaves at once, so that it crosses the cluster at the speed of the network
instead of that of the rounds.

Whoever writes to a member that it holds for silent or gone tells it so (Lifeguard §3.3,
"buddy system") and that it is there itself, as each may suspect the other, and nothing else:
news that is sent to the dead is as good as lost, and each piece is sent a limited number of times.

Bounds: rumours, version hints and zone summaries each have a queue and a byte budget of
their own, so that none starves another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import msgspec

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.membership.dissemination import Dissemination, retransmit_limit
from tensorhub_p2p.protocol.membership.hints import Hints
from tensorhub_p2p.protocol.membership.members import Members
from tensorhub_p2p.protocol.membership.summaries import Summaries
from tensorhub_p2p.protocol.messages import Ack, Gossip, Message, Rumour, Status

RECENT_DEAD = 64
"""Of the recently dead, this many are candidates for gossip."""


class Gossiper:
    """Sends one peer's messages. `claim` is what it says of itself, `fingerprint` of its view."""

    def __init__(
        self,
        claim: Callable[[], Rumour],
        fingerprint: Callable[[], int],
        members: Members,
        rumours: Dissemination[PeerId, Rumour],
        hints: Hints,
        summaries: Summaries,
        config: SwimConfig,
        rng: random.Random,
        outbox: Outbox,
    ) -> None:
        self._claim = claim
        self._fingerprint = fingerprint
        self._members = members
        self._rumours = rumours
        self._hints = hints
        self._summaries = summaries
        self._config = config
        self._rng = rng
        self._outbox = outbox
        self._next_round: float | None = None
        """When the next round may be; None before the first call."""

    def start(self, now: float) -> None:
        """Rounds may begin."""
        if self._next_round is None:
            self._next_round = now

    def tick(self, now: float) -> None:
        """A round, if it is due and there is anything to say."""
        if not self._pending() or (self._next_round is not None and now < self._next_round):
            return
        self._next_round = now + self._config.gossip_interval
        targets = self._members.sample(self._rng, self._config.gossip_nodes)
        for peer in targets + self._one_recently_dead(now):
            if not self._pending():
                return
            self.gossip_to(peer)

    def next_wakeup(self) -> float | None:
        return self._next_round if self._pending() else None

    def gossip_to(self, peer: PeerId) -> None:
        """All kinds of news, as much as fits."""
        if self._is_silent(peer):
            self.send(peer, Gossip())
            return
        limit = self._retransmit_limit()
        hints = self._hints.take(self._config.max_hint_bytes, limit) if self._hints else ()
        summaries = (
            self._summaries.take(self._config.max_summary_bytes, limit) if self._summaries else ()
        )
        self.send(peer, Gossip(hints=hints, summaries=summaries))

    def send(self, to: PeerId, message: Message) -> None:
        """Send with as many rumours as fit; or with what the addressee must refute."""
        rumours: tuple[Rumour, ...]
        held = self._members.rank(to)
        if held is not None and held[1] is not Status.ALIVE:
            own = msgspec.structs.replace(self._claim(), info=None)
            rumours = (Rumour(to, *held, None, own.peer), own)
        else:
            budget = self._config.max_rumour_bytes
            rumours = self._rumours.take(budget, self._retransmit_limit())
        if isinstance(message, Ack):
            message = Ack(message.seq, rumours, self._fingerprint())
        elif rumours:
            message = msgspec.structs.replace(message, rumours=rumours)
        self._outbox.send(to, message)

    def _is_silent(self, peer: PeerId) -> bool:
        held = self._members.rank(peer)
        return held is not None and held[1] is not Status.ALIVE

    def _pending(self) -> bool:
        if not self._members.num_reachable:
            return False
        return bool(self._rumours or self._hints or self._summaries)

    def _one_recently_dead(self, now: float) -> list[PeerId]:
        if not self._members.has_gone():
            return []
        recent = now - self._config.gossip_to_dead_for
        dead = [
            view.peer_id
            for view in islice(self._members.gone(), RECENT_DEAD)
            if view.status is Status.DEAD and view.since >= recent
        ]
        return self._rng.sample(dead, min(1, len(dead)))

    def _retransmit_limit(self) -> int:
        members = self._members.num_reachable + 1
        return retransmit_limit(self._config.retransmit_multiplier, members)
