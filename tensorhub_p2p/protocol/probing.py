"""Probing: finding out who is silent.

Rules of this file. It asks and listens. That a member was silent for a whole probe is
reported to swim.py, which decides what that means. Messages leave bare, in `sends`;
swim.py lets rumours ride on them.

Theory of operation (SWIM §3.1, §4.3). Members are probed one an interval, in a
shuffled order in which each occurs once; newcomers are inserted at a random place; after
a full round it is shuffled anew. So every member is probed within two rounds.

A probe runs through `DIRECT → INDIRECT → silent`, or ends at any time with an Ack:

    DIRECT    Ping to the target. After `probe_timeout`:
    INDIRECT  PingRequest to k relays. Each pings the target under a sequence number of
              its own and passes the Ack on, or sends a Nack when none came in time: the
              target is silent, but the relay is not (Lifeguard §3.1). Whoever asked makes
              nothing of it yet.
    silent    `probe_interval` after its start.

Bounds: one regular probe, at most `MAX_URGENT` that evidence called for, and
`max_relayed_probes` for others; what exceeds them is not started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.members import Members
from tensorhub_p2p.protocol.messages import Ack, Message, Nack, Ping, PingRequest

MAX_URGENT = 32
NACK_SHARE = 0.8
"""A relay gives up after this share of `probe_timeout`, so that its Nack is in time."""


@dataclass
class Probe:
    """One member being probed."""

    target: PeerId
    indirect_at: float | None
    """When relays are asked; None once they were."""
    silent_at: float
    relays: list[PeerId] = field(default_factory=list)


@dataclass
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

    def insert(self, peer: PeerId) -> None:
        """A newcomer, or one that came back, at a random place of what is still to come."""
        self._order.insert(self._rng.randint(self._next, len(self._order)), peer)

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

    def __init__(self, config: SwimConfig, rng: random.Random, members: Members) -> None:
        self._config = config
        self._rng = rng
        self._members = members
        self._order = ProbeOrder(rng)
        self._probes: dict[int, Probe] = {}
        self._relayed: dict[int, Relayed] = {}
        self._last_seq = 0
        self._next_probe: float | None = None
        self.sends: list[tuple[PeerId, Message]] = []

    # -- inputs --

    def admit(self, now: float, peer: PeerId) -> None:
        """Probe this member from now on, in its turn."""
        if self._next_probe is None:
            self._next_probe = now + self._rng.uniform(0, self._config.probe_interval)
        self._order.insert(peer)

    def probe_now(self, now: float, peer: PeerId) -> None:
        """Probe this member out of turn, unless that is being done."""
        targets = [probe.target for probe in self._probes.values()]
        if peer not in targets and len(targets) <= MAX_URGENT:
            self._begin(now, peer)

    def restart(self, now: float) -> None:
        """The own process was paused: what seemed silent may only have been unread."""
        probes, self._probes = self._probes, {}
        for probe in probes.values():
            self._begin(now, probe.target)
        self._relayed.clear()

    def pinged(self, sender: PeerId, message: Ping) -> None:
        self.sends.append((sender, Ack(message.seq)))

    def asked(self, now: float, sender: PeerId, message: PingRequest) -> None:
        """Probe for somebody else."""
        if len(self._relayed) >= self._config.max_relayed_probes:
            return
        seq = self._new_seq()
        self._relayed[seq] = Relayed(
            sender,
            message.seq,
            message.target,
            nack_at=now + NACK_SHARE * self._config.probe_timeout,
            forget_at=now + self._config.probe_interval,
        )
        self.sends.append((message.target, Ping(seq)))

    def acked(self, sender: PeerId, message: Ack) -> None:
        """The target answered, directly or through a relay; answers unasked for are dropped."""
        probe = self._probes.get(message.seq)
        if probe is not None and (sender == probe.target or sender in probe.relays):
            del self._probes[message.seq]
        relayed = self._relayed.get(message.seq)
        if relayed is not None and sender == relayed.target:
            del self._relayed[message.seq]
            self.sends.append((relayed.requester, Ack(relayed.seq)))

    # -- time --

    def tick(self, now: float) -> list[PeerId]:
        """Move all probes on; returns the targets that stayed silent for a whole probe."""
        silent = []
        for seq, probe in list(self._probes.items()):
            if now >= probe.silent_at:
                del self._probes[seq]
                silent.append(probe.target)
            elif probe.indirect_at is not None and now >= probe.indirect_at:
                self._ask_relays(seq, probe)
        for seq, relayed in list(self._relayed.items()):
            self._advance_relayed(now, seq, relayed)
        if self._next_probe is not None and now >= self._next_probe:
            self._next_probe = now + self._config.probe_interval
            target = self._order.next(self._members)
            if target is not None:
                self._begin(now, target)
        return silent

    def next_wakeup(self) -> float | None:
        return earliest(
            self._next_probe if self._members.num_reachable else None,
            *(probe.silent_at for probe in self._probes.values()),
            *(probe.indirect_at for probe in self._probes.values()),
            *(relayed.nack_at for relayed in self._relayed.values()),
            *(relayed.forget_at for relayed in self._relayed.values()),
        )

    # -- the steps of a probe --

    def _begin(self, now: float, target: PeerId) -> None:
        seq = self._new_seq()
        self._probes[seq] = Probe(
            target,
            indirect_at=now + self._config.probe_timeout,
            silent_at=now + self._config.probe_interval,
        )
        self.sends.append((target, Ping(seq)))

    def _ask_relays(self, seq: int, probe: Probe) -> None:
        probe.indirect_at = None
        probe.relays = self._members.sample(
            self._rng, self._config.indirect_probes, without=(probe.target,)
        )
        self.sends.extend((relay, PingRequest(seq, probe.target)) for relay in probe.relays)

    def _advance_relayed(self, now: float, seq: int, relayed: Relayed) -> None:
        if relayed.nack_at is not None and now >= relayed.nack_at:
            relayed.nack_at = None
            self.sends.append((relayed.requester, Nack(relayed.seq)))
        if now >= relayed.forget_at:
            del self._relayed[seq]

    def _new_seq(self) -> int:
        self._last_seq += 1
        return self._last_seq
