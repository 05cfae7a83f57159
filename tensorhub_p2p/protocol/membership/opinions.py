"""Opinions of members: which claims are believed, what they change, and which are passed on.

Rules of this file. It merges what is said of members (by rumours, views, or this peer's
own findings) into the table, keeps the clock of each silent member's verdict, and queues
what is news. It knows no messages, no probes, no sockets; swim.py brings the claims, and is
told of each change (`on_change`) so that it can act on it.

Theory of operation (SWIM §4.2). Which claim beats which is members.py's rule. A claim that
wins is stored, acted on and passed on:

    ALIVE           its verdict is off
    SUSPECT         silent, and nobody knows why: a Lifeguard suspicion runs (suspicion.py)
    UNRESPONSIVE    silent, but its sockets answer: the verdict falls in `unresponsive_limit`
    DEAD, LEFT      gone; it stays in the table to be refuted by itself

A peer never believes a claim that it is silent or gone: it refutes with an incarnation
above the claim's, which nobody but itself may raise. Of a stranger, only an introduction
that says it is reachable makes a member; its death leaves a tombstone.

A view is older than gossip: a death that it reports of a member that is reachable here
opens a suspicion only, and is *reported*: whoever finds the member silent itself (swim.py
probes it at once) needs no more than that. So healed halves, each of which holds the other
for dead, find each other again without anyone dying of it, and who missed a death catches up.

Bounds: the table's. One rumour a member waits to be spread, the newest. What is malformed
or too much is counted in `dropped`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.membership.dissemination import Dissemination
from tensorhub_p2p.protocol.membership.health import LocalHealth
from tensorhub_p2p.protocol.membership.members import GONE, Members, MemberView, rank
from tensorhub_p2p.protocol.membership.suspicion import Suspicions
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged, Refuted, WasAbsent
from tensorhub_p2p.protocol.messages import Rumour, Status

MAX_INCARNATION = 1 << 53
"""No honest peer refutes that often; this and above is refused, so that there is always a
higher one to refute with."""
MAX_NAME = 64
"""Characters of a PeerId."""
MAX_INFO_BYTES = 4096
"""Encoded bytes of what a member may tell about itself: others keep it, and pass it on."""

OnChange = Callable[[float, MemberView, Status | None], None]
"""`(now, member, old status)`; the old one is None for a newcomer."""


class Opinions:
    """What one peer holds of itself and all others, and what it says of it."""

    def __init__(
        self,
        me: PeerInfo,
        config: SwimConfig,
        members: Members,
        outbox: Outbox,
        dropped: Counter[str],
        health: LocalHealth,
        on_change: OnChange,
    ) -> None:
        self.me = me
        self.incarnation = 0
        self.verdicts = Suspicions()
        """Of each silent member: when it is to be declared dead."""
        self.rumours: Dissemination[PeerId, Rumour] = Dissemination(config.max_members + 1)
        self._reported: dict[PeerId, int] = {}
        """By reachable member: the incarnation of which a view said that it is dead."""
        self._config = config
        self._members = members
        self._outbox = outbox
        self._dropped = dropped
        self._health = health
        self._on_change = on_change

    # -- what others say --

    def hear_all(self, now: float, rumours: Iterable[Rumour]) -> None:
        for rumour in rumours:
            self.hear(now, rumour)

    def hear_view(self, now: float, view: Iterable[Rumour], sender: PeerId) -> list[PeerId]:
        """A view may be old: a death in it is taken for an accusation. Names the accused."""
        accused = []
        for claim in view:
            known = self._members.get(claim.peer)
            said_dead = claim.status is Status.DEAD and known is not None and known.is_reachable
            if said_dead:
                claim = msgspec.structs.replace(claim, status=Status.SUSPECT, accuser=sender)
            self.hear(now, claim)
            if said_dead and known is not None and claim.incarnation >= known.incarnation:
                self._reported[claim.peer] = claim.incarnation
                accused.append(claim.peer)
        return accused

    def is_reported_dead(self, peer: PeerId) -> bool:
        """Whether a view that knew this member's present life said that it is dead."""
        known = self._members.get(peer)
        return known is not None and self._reported.get(peer, -1) >= known.incarnation

    def hear(self, now: float, rumour: Rumour) -> None:
        """Merge one claim, whoever it came from."""
        known = self._members.get(rumour.peer)
        if known is not None and rank(rumour) < known.rank:
            return
        info = rumour.info
        forged = info is not None and info.peer_id != rumour.peer
        named = 0 < len(rumour.peer) <= MAX_NAME and len(rumour.accuser) <= MAX_NAME
        if forged or not named or rumour.incarnation >= MAX_INCARNATION:
            self._dropped["malformed rumour"] += 1
        elif rumour.peer == self.me.peer_id:
            self._hear_of_self(rumour)
        elif known is None:
            self._hear_of_stranger(now, rumour)
        elif rank(rumour) > known.rank:
            self._accept(now, rumour, known.info, known)
        elif self.verdicts.confirm(rumour.peer, rumour.accuser):
            self.rumours.put(rumour.peer, _bare(rumour))

    # -- what this peer finds itself --

    def accuse(self, now: float, peer: PeerId, status: Status) -> None:
        """This peer itself has found a member silent (SUSPECT or UNRESPONSIVE) or dead."""
        known = self._members.get(peer)
        if known is not None and known.is_reachable:
            self.hear(now, Rumour(peer, known.incarnation, status, None, self.me.peer_id))

    def claim(self, status: Status) -> Rumour:
        """What this peer says of itself, by way of introduction."""
        return Rumour(self.me.peer_id, self.incarnation, status, self.me)

    # -- merging --

    def _hear_of_self(self, claim: Rumour) -> None:
        """Refute whatever would beat "alive" at the own incarnation (SWIM §4.2)."""
        if rank(claim) <= (self.incarnation, Status.ALIVE):
            return
        self.incarnation = claim.incarnation + 1
        if claim.status is not Status.ALIVE:
            self._health.note(+1)
            self._outbox.emit(WasAbsent(f"it was held for {claim.status.name.lower()}"))
        revived = claim.status in GONE
        refutation = self.claim(Status.ALIVE)
        self.rumours.put(self.me.peer_id, refutation if revived else _bare(refutation))
        self._outbox.emit(Refuted(self.incarnation, claim.status))

    def _hear_of_stranger(self, now: float, rumour: Rumour) -> None:
        """Only one that is reachable, and introduced, becomes a member."""
        last = self._members.rank(rumour.peer)
        if last is not None and rank(rumour) <= last:
            return
        if rumour.status in GONE:
            self._members.bury(rumour.peer, rank(rumour), now)
        elif rumour.info is not None:
            if len(msgspec.msgpack.encode(rumour.info)) > MAX_INFO_BYTES:
                self._dropped["introduction too large"] += 1
            else:
                self._accept(now, rumour, rumour.info, None)

    def _accept(self, now: float, rumour: Rumour, info: PeerInfo, known: MemberView | None) -> None:
        """This claim holds from now on: store it, act on it and pass it on."""
        old = known.status if known is not None else None
        member = MemberView(info, rumour.incarnation, rumour.status, now)
        if not self._members.put(member):
            self._dropped["newcomer beyond max_members"] += 1
            return
        same_life = known is not None and known.incarnation == rumour.incarnation
        self.verdicts.cancel(rumour.peer)
        if self._reported and (not member.is_reachable or not same_life):
            self._reported.pop(rumour.peer, None)
        if rumour.status is Status.SUSPECT:
            self._suspect(now, rumour)
        elif rumour.status is Status.UNRESPONSIVE:
            self._wait_for(now, rumour)
        if old in GONE and member.is_reachable and self._members.num_reachable == 1:
            # The first one back. What this peer said to nobody while it was alone is old by now:
            # as a rumour it would kill, in a view it only accuses.
            self.rumours.clear()
        introduction = rumour.status is Status.ALIVE and (old is None or old in GONE)
        spread = msgspec.structs.replace(rumour, info=info if introduction else None)
        self.rumours.put(rumour.peer, spread)
        self._on_change(now, member, old)
        if rumour.status is not old:
            self._outbox.emit(MemberChanged(member, old))

    # -- verdicts --

    def _suspect(self, now: float, rumour: Rumour) -> None:
        shortest = self.shortest_suspicion()
        expected = self._config.suspicion_confirmations
        others = self._members.num_reachable - 1
        self.verdicts.start(
            now,
            rumour.peer,
            rumour.accuser,
            expected=expected if others >= expected else 0,
            shortest=shortest,
            longest=shortest * self._config.suspicion_max_multiplier,
        )

    def _wait_for(self, now: float, rumour: Rumour) -> None:
        limit = self._config.unresponsive_limit
        self.verdicts.start(
            now, rumour.peer, rumour.accuser, expected=0, shortest=limit, longest=limit
        )

    def shortest_suspicion(self) -> float:
        """Seconds that a suspicion lasts once it is confirmed (memberlist's formula)."""
        scale = max(1.0, math.log10(self._members.num_reachable + 1))
        return self._config.suspicion_multiplier * scale * self._config.probe_interval


def _bare(rumour: Rumour) -> Rumour:
    """Without the introduction, which only newcomers and the returned need."""
    return msgspec.structs.replace(rumour, info=None)
