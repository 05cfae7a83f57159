"""The pool of the gateways of all zones, as one of them is in it.

Rules of this file. It is a `Swim` with the times of a far network, whose messages travel
wrapped (wide_area.py), and the calls that keep it in one piece (reaching.py). When a peer
enters and leaves it, and what its news means at home, is decided by zones.py.

Theory of operation. One enters by calling: nobody is named as a seed, and those who answer
are members from then on. Peers are in it under the same PeerId as at home; its members, of
whatever zone, are no members to anybody above.

Bounds: those of swim.py and reaching.py. What can't be unwrapped is counted in `dropped`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.envelope import Undecodable
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Outbox, Send, SendTo, earliest
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Gossip, WideArea, ZoneSummary
from tensorhub_p2p.protocol.zones.reaching import Pacing, Rounds
from tensorhub_p2p.protocol.zones.wide_area import unwrap, wrap


class WidePool:
    """One gateway's place in the pool. What it puts out is sent by `outbox`, all but events."""

    def __init__(
        self, me: PeerInfo, config: SwimConfig, rng: random.Random, outbox: Outbox
    ) -> None:
        self._me = me
        self._swim = Swim(me, config, random.Random(rng.getrandbits(64)))
        self._rounds = Rounds(config, rng)
        self._pacing = Pacing(config.redial_interval / 2)
        self._outbox = outbox
        self._undecodable = 0

    # -- in and out --

    def receive(self, now: float, sender: PeerId, wrapped: WideArea) -> None:
        try:
            message = unwrap(wrapped)
        except Undecodable:
            self._undecodable += 1
            return
        self._swim.receive(now, sender, message)

    def notice(self, now: float) -> None:
        self._swim.notice(now)

    def tick(self, now: float) -> None:
        self._swim.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(self._swim.next_wakeup(), self._rounds.next)

    def take_events(self) -> list[Event]:
        """Wrap and send what is to be sent; returns what was noticed."""
        events: list[Event] = []
        for item in self._swim.outbox.drain():
            if isinstance(item, Send):
                self._outbox.send(item.to, wrap(item.message))
            elif isinstance(item, SendTo):
                self._outbox.send_to(item.address, wrap(item.message))
            else:
                events.append(item)
        return events

    def leave(self, now: float) -> None:
        """Say goodbye; this place can't be used any more."""
        self._swim.leave(now)
        self.take_events()

    def tell(self, now: float, summary: ZoneSummary) -> None:
        """Spread what a zone says of itself, if that is news in this pool."""
        self._swim.tell(now, summary)

    def tell_one(self, peer: PeerId, summary: ZoneSummary) -> None:
        """Tell one gateway what a zone says of itself, news or not."""
        self._outbox.send(peer, wrap(Gossip(summaries=(summary,))))

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        self._swim.evidence(now, peer, evidence)

    # -- who is there, and who should be --

    def members(self) -> tuple[MemberView, ...]:
        """All others, gone ones included."""
        return self._swim.members()[1:]

    def is_reachable(self, peer: PeerId) -> bool:
        return self._swim.is_reachable(peer)

    def info(self, peer: PeerId) -> PeerInfo | None:
        return self._swim.info(peer)

    def reaches(self, zone: str) -> bool:
        """Whether anybody else of this zone is there."""
        return any(view.info.zone == zone and view.is_reachable for view in self.members())

    @property
    def dropped(self) -> Counter[str]:
        return self._swim.dropped + Counter({"undecodable wide-area message": self._undecodable})

    def round_is_due(self, now: float) -> bool:
        return now >= self._rounds.next

    def hasten(self, now: float) -> None:
        """The next round of calls is due now."""
        self._rounds.next = now

    def call_missing(
        self,
        now: float,
        fellows: Iterable[PeerInfo],
        foreign: Iterable[ZoneSummary],
        seeds: Sequence[str],
    ) -> None:
        """A round of calls: to fellow gateways, those of other zones, and seeds."""
        missing = [info for info in fellows if not self.is_reachable(info.peer_id)]
        zones = {view.info.zone for view in self.members() if view.is_reachable}
        zones.discard(self._me.zone)
        for address in self._rounds.due(now, missing, tuple(foreign), zones, seeds):
            self._call(now, address)

    def call(self, now: float, gateways: Iterable[PeerInfo]) -> None:
        for info in gateways:
            for address in info.addresses[:1]:
                self._call(now, address)

    def _call(self, now: float, address: str) -> None:
        if self._pacing.allows(now, address):
            self._swim.dial(now, address)
