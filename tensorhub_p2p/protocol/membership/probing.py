"""Probing: finding out who is silent.

Rules of this file. It asks and listens. That a member was silent for a whole probe is
reported to swim.py, which decides what that means. Messages leave bare, in `sends`;
swim.py lets rumours ride on them. Whom to look at leaves in `looks`.

Theory of operation (SWIM §3.1, §4.3). Members are probed one an interval, in a
shuffled order in which each occurs once; newcomers are inserted at a random place; after
a full round it is shuffled anew. So every member is probed within two rounds.

A probe runs through `DIRECT → INDIRECT → silent`, or ends at any time with an Ack:

    DIRECT    Ping to the target. After `probe_timeout`:
    INDIRECT  PingRequest to k relays. Each pings the target under a sequence number of
              its own and passes the Ack on, or sends a Nack when none came in time: the
              target is silent, but the relay is not (Lifeguard §3.1). The target's sockets
              are looked at as well; what they show is kept as the probe's finding.
    silent    `probe_interval` after its start.

An urgent probe, for which there was a reason, asks the relays and looks from the start.
All times are stretched by the local health (health.py), which each outcome changes.

A target that sent anything during the probe is not silent, though it doesn't answer: then
what this peer sends gets lost. And if nobody at all was heard, the silence may well be
this peer's own. Both are reported with the outcome (`Silence`).

Bounds: one regular probe, at most `MAX_URGENT` that evidence called for, and
`max_relayed_probes` for others; what exceeds them is not started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.membership.health import LocalHealth
from tensorhub_p2p.protocol.membership.members import Members
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Ack, Message, Nack, Ping, PingRequest

MAX_URGENT = 32
NACK_SHARE = 0.8
"""A relay gives up after this share of the time that a probe has left when it asks relays, so
that its Nack is in time."""


@dataclass(slots=True)
class Probe:
    """One member being probed."""

    target: PeerId
    indirect_at: float | None
    """When relays are asked; None once they were."""
    silent_at: float
    relays: list[PeerId] = field(default_factory=list)
    nacks: list[PeerId] = field(default_factory=list)
    """Relays that are alive and couldn't reach it either."""
    finding: Evidence | None = None
    """What its sockets showed."""
    heard_target: bool = False
    heard_anybody: bool = False


@dataclass(frozen=True)
class Silence:
    """The outcome of a probe that nobody answered."""

    target: PeerId
    finding: Evidence | None
    heard_target: bool
    """It sent something meanwhile."""
    heard_anybody: bool
    """So did anybody, relays with their Nacks included."""


@dataclass(slots=True)
class Relayed:
    """A ping on somebody else's behalf."""

    requester: PeerId
    seq: int
    """The requester's sequence number."""
    target: PeerId
    nack_at: float | None
    """When to give up; None once the Nack was sent. A late Ack is passed on all the same."""
    forget_at: float


class ProbeOrder:
    """Who is probed next: every member once a round, in random order."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[PeerId] = []
        self._next = 0

    def insert(self, peer: PeerId, members: Members) -> None:
        """A newcomer, or one that came back, at a random place of what is still to come."""
        if len(self._order) > 64 + 2 * members.num_reachable:  # of those that came and went
            to_come = dict.fromkeys(self._order[self._next :])
            self._order, self._next = [p for p in to_come if members.is_reachable(p)], 0
        self._order.insert(self._rng.randint(self._next, len(self._order)), peer)

    def fill(self, members: Members) -> None:
        """All of them, anew."""
        self._order = list(members.reachable())
        self._rng.shuffle(self._order)
        self._next = 0

    def next(self, members: Members) -> PeerId | None:
        """The next reachable member; None if there is none."""
        for _ in range(2):
            while self._next < len(self._order):
                peer = self._order[self._next]
                self._next += 1
                if members.is_reachable(peer):
                    return peer
            self._next = 0
            self._order = [p for p in dict.fromkeys(self._order) if members.is_reachable(p)]
            self._rng.shuffle(self._order)
        return None


class Prober:
    """All probes of one peer: regular, urgent, and relayed for others."""

    def __init__(
        self, config: SwimConfig, rng: random.Random, members: Members, health: LocalHealth
    ) -> None:
        self._config = config
        self._rng = rng
        self._members = members
        self._health = health
        self._order = ProbeOrder(rng)
        self._probes: dict[int, Probe] = {}
        self._relayed: dict[int, Relayed] = {}
        self._last_seq = 0
        self._next_probe: float | None = None
        self.sends: list[tuple[PeerId, Message]] = []
        self.looks: list[PeerId] = []
        """Members whose sockets should be looked at."""

    # -- inputs --

    def admit(self, now: float, peer: PeerId) -> None:
        """Probe this member from now on, in its turn."""
        self.start(now)
        self._order.insert(peer, self._members)

    def start(self, now: float) -> None:
        """There is somebody to probe; the first probe comes within an interval."""
        if self._next_probe is None:
            self._next_probe = now + self._rng.uniform(0, self._config.probe_interval)

    def adopt(self, now: float) -> None:
        """All present members are to be probed, in their turn."""
        self.start(now)
        self._order.fill(self._members)

    def probe_now(self, now: float, peer: PeerId) -> None:
        """Probe this member out of turn, with all means at once, unless that is being done."""
        for seq, probe in self._probes.items():
            if probe.target == peer:
                if probe.indirect_at is not None:
                    self._ask_others(seq, probe)
                return
        if len(self._probes) <= MAX_URGENT:
            seq = self._begin(now, peer)
            self._ask_others(seq, self._probes[seq])

    def restart(self, now: float) -> None:
        """The own process was paused: what seemed silent may only have been unread."""
        probes, self._probes = self._probes, {}
        for probe in probes.values():
            self._begin(now, probe.target)
        self._relayed.clear()

    def heard(self, sender: PeerId) -> None:
        """Something came from this peer."""
        for probe in self._probes.values():
            probe.heard_anybody = True
            if probe.target == sender:
                probe.heard_target = True

    def absolve(self, peer: PeerId) -> None:
        """Others said that it is well, or gone: a probe that began before is settled."""
        for seq, probe in list(self._probes.items()):
            if probe.target == peer:
                del self._probes[seq]

    def found(self, peer: PeerId, finding: Evidence) -> bool:
        """What its sockets showed; True if that settles the probe.

        It does when a watch was lost and nobody greets, in whatever order both were seen: then
        it has been silent for as long as the watch's heartbeats were missing, and its kernel says
        that it is there.
        """
        for seq, probe in list(self._probes.items()):
            if probe.target == peer:
                shown = {probe.finding, finding}
                probe.finding = finding
                if shown == {Evidence.DISCONNECTED, Evidence.ACCEPTED}:
                    del self._probes[seq]
                    return True
        return False

    def pinged(self, sender: PeerId, message: Ping) -> None:
        self.sends.append((sender, Ack(message.seq)))

    def asked(self, now: float, sender: PeerId, message: PingRequest) -> bool:
        """Probe for somebody else; False if that is too much now."""
        if len(self._relayed) >= self._config.max_relayed_probes:
            return False
        config = self._config
        seq = self._new_seq()
        self._relayed[seq] = Relayed(
            sender,
            message.seq,
            message.target,
            nack_at=now + NACK_SHARE * (config.probe_interval - config.probe_timeout),
            forget_at=now + config.probe_interval,
        )
        self.sends.append((message.target, Ping(seq)))
        return True

    def acked(self, sender: PeerId, message: Ack) -> bool:
        """The target answered, directly or through a relay; False if nobody waits for that."""
        probe = self._probes.get(message.seq)
        if probe is not None and (sender == probe.target or sender in probe.relays):
            del self._probes[message.seq]
            self._health.note(-1)
            return True
        relayed = self._relayed.get(message.seq)
        if relayed is not None and sender == relayed.target:
            del self._relayed[message.seq]
            self.sends.append((relayed.requester, Ack(relayed.seq)))
            return True
        return False

    def nacked(self, sender: PeerId, message: Nack) -> bool:
        """A relay is well and couldn't reach the target either; False if nobody asked it."""
        probe = self._probes.get(message.seq)
        if probe is None or sender not in probe.relays or sender in probe.nacks:
            return False
        probe.nacks.append(sender)
        return True

    # -- time --

    def tick(self, now: float) -> list[Silence]:
        """Move all probes on; returns those that ended with nobody's answer."""
        silent = []
        for seq, probe in list(self._probes.items()):
            if now >= probe.silent_at:
                del self._probes[seq]
                silent.append(self._failed(probe))
            elif probe.indirect_at is not None and now >= probe.indirect_at:
                self._ask_others(seq, probe)
        for seq, relayed in list(self._relayed.items()):
            self._advance_relayed(now, seq, relayed)
        if self._next_probe is not None and now >= self._next_probe:
            self._next_probe = now + self._config.probe_interval * self._health.stretch
            target = self._order.next(self._members)
            if target is not None:
                self._begin(now, target)
        return silent

    def next_wakeup(self) -> float | None:
        times = [self._next_probe] if self._members.num_reachable else []
        for probe in self._probes.values():
            times.append(probe.silent_at if probe.indirect_at is None else probe.indirect_at)
        for relayed in self._relayed.values():
            times.append(relayed.forget_at if relayed.nack_at is None else relayed.nack_at)
        return earliest(*times)

    # -- the steps of a probe --

    def _begin(self, now: float, target: PeerId) -> int:
        seq = self._new_seq()
        stretch = self._health.stretch
        self._probes[seq] = Probe(
            target,
            indirect_at=now + self._config.probe_timeout * stretch,
            silent_at=now + self._config.probe_interval * stretch,
        )
        self.sends.append((target, Ping(seq)))
        return seq

    def _ask_others(self, seq: int, probe: Probe) -> None:
        """The relays, and the target's own sockets."""
        probe.indirect_at = None
        probe.relays = self._members.sample(
            self._rng, self._config.indirect_probes, without=(probe.target,)
        )
        self.sends.extend((relay, PingRequest(seq, probe.target)) for relay in probe.relays)
        self.looks.append(probe.target)

    def _failed(self, probe: Probe) -> Silence:
        missing = len(probe.relays) - len(probe.nacks)
        self._health.note(missing if probe.relays else 1)
        return Silence(probe.target, probe.finding, probe.heard_target, probe.heard_anybody)

    def _advance_relayed(self, now: float, seq: int, relayed: Relayed) -> None:
        if relayed.nack_at is not None and now >= relayed.nack_at:
            relayed.nack_at = None
            self.sends.append((relayed.requester, Nack(relayed.seq)))
        if now >= relayed.forget_at:
            del self._relayed[seq]

    def _new_seq(self) -> int:
        self._last_seq += 1
        return self._last_seq
