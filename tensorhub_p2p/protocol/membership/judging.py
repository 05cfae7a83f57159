"""Judging the silent: what a member's silence, and what its sockets show, say of it.

Rules of this file. It takes outcomes of probes and evidence of the sockets, and accuses; what
follows from an accusation is opinions.py's. It sends nothing.

Theory of operation. The kernel and ZeroMQ's I/O thread answer even while Python is held up.
So what a silent member's sockets show (`Evidence`) decides what it is held for, and how long
it has to refute:

    GREETED, ACCEPTED   its process is there: UNRESPONSIVE, `unresponsive_limit` at most, once
                        a probe found it silent, or somebody suspects it
    DISCONNECTED        a watch ended: probed at once. If nobody greets a new one (ACCEPTED), it
                        stands still: UNRESPONSIVE, without waiting for the probe's end
    REFUSED             its process is gone: SUSPECT, `refused_suspicion`
    UNREACHABLE         its watch can't be renewed: `unreachable_suspicion`, if it is SUSPECT. An
                        UNRESPONSIVE one was reached by somebody, and one dial's bad luck isn't
                        enough to kill it: there it counts the second time in a row
    nothing             SUSPECT, with Lifeguard's suspicion; or DEAD, if there was reason to
                        think so and it is silent too

Such reasons are a death in somebody's view (opinions.py), and somebody else at its address, this
peer included. Sockets at an address that has a new tenant say nothing of the one before.

The judge may be the sick one. While it hears nobody at all it accuses nobody, unless a socket
answered, and holds its verdicts, for `doubt_limit` at most: it may be the one that is cut off.
A member that sends, but doesn't answer, isn't accused either: what this peer sends to it
gets lost (`Unheard`).
"""

from __future__ import annotations

import math

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.membership.members import Members
from tensorhub_p2p.protocol.membership.opinions import Opinions
from tensorhub_p2p.protocol.membership.probing import Prober, Silence
from tensorhub_p2p.protocol.membership.swim_events import Evidence, Unheard
from tensorhub_p2p.protocol.messages import Status

ENOUGH_TO_DOUBT = 3
"""With fewer other members, hearing nobody is no sign of being cut off."""
DEAF_INTERVALS = 3
"""Probe intervals without a word after which a judge holds its verdicts: of a tiny cluster, half
of which died, one doesn't hear anybody more often."""

MAX_UNREACHED = 64
"""Watches that couldn't be renewed and are remembered; there are a few at most at a time."""

PROCESS_IS_THERE = frozenset({Evidence.GREETED, Evidence.ACCEPTED})


class Judge:
    """One peer's judgement of the others."""

    def __init__(
        self,
        me: PeerInfo,
        config: SwimConfig,
        members: Members,
        prober: Prober,
        opinions: Opinions,
        outbox: Outbox,
    ) -> None:
        self._me = me
        self._config = config
        self._members = members
        self._prober = prober
        self._opinions = opinions
        self._outbox = outbox
        self._last_heard = -math.inf
        self._unreached: dict[PeerId, int] = {}
        """How often in a row a watched member's watch couldn't be renewed."""

    def adopt(self, now: float) -> None:
        """The members are taken for known since long, so for heard of till now."""
        self._last_heard = now

    def heard(self, now: float, sender: PeerId) -> None:
        """Something came from this peer."""
        self._last_heard = now
        self._prober.heard(sender)

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        """What the sockets showed of a reachable member."""
        if evidence in PROCESS_IS_THERE and self._shares_address(peer):
            return
        if evidence is not Evidence.UNREACHABLE:
            self._unreached.pop(peer, None)
        if evidence in (Evidence.DISCONNECTED, Evidence.REFUSED):
            self._prober.probe_now(now, peer)
        stands_still = self._prober.found(peer, evidence)
        if stands_still:
            self._opinions.accuse(now, peer, Status.UNRESPONSIVE)
        if evidence in PROCESS_IS_THERE:
            self._process_is_there(now, peer)
        elif evidence is Evidence.UNREACHABLE:
            self._out_of_reach(now, peer)
        elif evidence is Evidence.REFUSED:
            self._opinions.accuse(now, peer, Status.SUSPECT)
            self._opinions.verdicts.hasten(peer, now + self._config.refused_suspicion)

    def _process_is_there(self, now: float, peer: PeerId) -> None:
        self._opinions.verdicts.relent(peer)
        if self._status(peer) is Status.SUSPECT:
            self._opinions.accuse(now, peer, Status.UNRESPONSIVE)

    def _out_of_reach(self, now: float, peer: PeerId) -> None:
        if len(self._unreached) >= MAX_UNREACHED and peer not in self._unreached:
            self._unreached.pop(next(iter(self._unreached)))
        self._unreached[peer] = times = self._unreached.get(peer, 0) + 1
        status = self._status(peer)
        if status is Status.SUSPECT or (status is Status.UNRESPONSIVE and times > 1):
            self._opinions.verdicts.hasten(peer, now + self._config.unreachable_suspicion)

    def silence(self, now: float, silence: Silence) -> None:
        """A probe ended with nobody's answer."""
        peer = silence.target
        if silence.heard_target:
            self._outbox.emit(Unheard(peer))
        elif silence.finding in PROCESS_IS_THERE:
            self._opinions.accuse(now, peer, Status.UNRESPONSIVE)
        elif silence.heard_anybody or not self._hears_nobody(now):
            expected = self._opinions.is_reported_dead(peer) or self._shares_address(peer)
            self._opinions.accuse(now, peer, Status.DEAD if expected else Status.SUSPECT)

    def pronounce(self, now: float) -> None:
        """Declare dead whose time is up, or hold the verdicts while the judge doubts itself."""
        deaf = self._hears_nobody(now, DEAF_INTERVALS)
        for peer in self._opinions.verdicts.take_due(now, hold=deaf):
            self._opinions.accuse(now, peer, Status.DEAD)

    def _hears_nobody(self, now: float, intervals: int = 1) -> bool:
        """Whether this peer may be the one that is cut off (for `doubt_limit`, then not)."""
        silence = now - self._last_heard  # not stretched: deafness itself ruins the health
        return (
            self._members.num_reachable >= ENOUGH_TO_DOUBT
            and intervals * self._config.probe_interval <= silence < self._config.doubt_limit
        )

    def _status(self, peer: PeerId) -> Status | None:
        view = self._members.get(peer)
        return view.status if view is not None else None

    def _shares_address(self, peer: PeerId) -> bool:
        """Whether somebody else lives at its address: whose sockets answer there?"""
        view = self._members.get(peer)
        addresses = view.info.addresses[:1] if view is not None else ()
        return any(
            address in self._me.addresses
            or any(
                other.status is Status.ALIVE and other.peer_id != peer
                for other in self._members.at(address)
            )
            for address in addresses
        )
