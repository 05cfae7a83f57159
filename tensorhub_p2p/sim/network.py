"""A seeded network on a virtual clock, for any object with the machine's face.

Rules of this file. One thread, one heap, one random generator: the seed decides
everything, so a run can be repeated exactly. (Machines bring their own seeded
generators, and must not iterate over sets of strings.) No machine is looked into:
messages leave through its outbox, are packed into an envelope and encoded, and are
decoded again before they are handed over, as on the real wire.

A message to a PeerId reaches that peer or nobody, never a successor at its address; one to
an address reaches whoever listens there.

What a link does to a message: it loses it with the link's probability, else delays it by a
draw from the link's range; hence messages also overtake each other. A blocked pair
loses everything. A crashed peer is gone with what was under way to it. A paused one
runs nothing and gets what was sent to it when it is resumed.

Nothing here decides what is right: checks live in the tests.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tensorhub_p2p.protocol.envelope import (
    WIRE_VERSION,
    Envelope,
    Undecodable,
    encode,
    open_envelope,
    pack,
    unpack,
)
from tensorhub_p2p.protocol.identity import NOBODY, PeerId
from tensorhub_p2p.protocol.machine import Event, Machine, Send, SendTo
from tensorhub_p2p.protocol.messages import Message

CLUSTER = "sim"
SPIN_LIMIT = 10_000
"""Ticks of one machine at one instant before the run is ended as stuck."""


@dataclass(frozen=True)
class Link:
    """How messages travel in one direction between two peers."""

    latency: tuple[float, float] = (0.0002, 0.002)
    """Seconds, drawn uniformly from this range."""
    loss: float = 0.0
    """Probability that a message is lost."""


@dataclass
class Host:
    """One peer in the simulation."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    machine: Machine
    zone: str
    paused: bool = False
    backlog: list[bytes] = field(default_factory=list)
    """What arrived during the pause, in order."""
    wakeup: float | None = None
    """When the pending tick is due; a heap entry with another time is stale."""
    last_tick: float = -1.0
    spins: int = 0


class SimNetwork:
    """Drives machines. Times are virtual seconds, starting at 0.

    `on_event(peer, event)` is called for each event that a machine emits; it may call
    that peer's machine, and `settle` after it called another one.
    """

    def __init__(
        self,
        seed: int,
        *,
        link: Link | None = None,
        on_event: Callable[[PeerId, Event], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.on_event = on_event
        self.default_link = link or Link()
        self.links: dict[tuple[PeerId, PeerId], Link] = {}
        self.blocked: set[tuple[PeerId, PeerId]] = set()
        """Directed pairs (from, to) between which nothing gets through."""
        self.counters: Counter[str] = Counter()
        """sent, bytes, delivered, and drops by reason: lost, blocked, absent, garbage."""
        self._rng = random.Random(seed)
        self._hosts: dict[PeerId, Host] = {}
        self._address_book: dict[str, PeerId] = {}
        self._queue: list[tuple[float, int, PeerId, bytes | None]] = []
        self._order = count()

    # -- the cast --

    def add(
        self, peer_id: PeerId, addresses: Sequence[str], machine: Machine, zone: str = ""
    ) -> None:
        """Start a peer. An address that a crashed peer had may be used again."""
        self._hosts[peer_id] = host = Host(peer_id, tuple(addresses), machine, zone)
        for address in addresses:
            self._address_book[address] = peer_id
        self._settle(host)

    def crash(self, peer_id: PeerId) -> None:
        """The peer is gone at once, without a word."""
        host = self._hosts.pop(peer_id)
        for address in host.addresses:
            if self._address_book.get(address) == peer_id:
                del self._address_book[address]

    def pause(self, peer_id: PeerId) -> None:
        """Stop the peer as SIGSTOP would: it notices nothing, and the network queues for it."""
        self._hosts[peer_id].paused = True

    def resume(self, peer_id: PeerId) -> None:
        """Let it run again: it first receives what has piled up, then ticks."""
        host = self._hosts[peer_id]
        host.paused = False
        backlog, host.backlog = host.backlog, []
        for data in backlog:
            self._deliver(host, data)
        self._tick(host)

    def running(self) -> tuple[PeerId, ...]:
        """Peers that were neither crashed nor paused."""
        return tuple(host.peer_id for host in self._hosts.values() if not host.paused)

    # -- the weather --

    def partition(
        self, one: Iterable[PeerId], other: Iterable[PeerId], *, one_way: bool = False
    ) -> None:
        """Block everything from `one` to `other` and, unless `one_way`, back."""
        one, other = list(one), list(other)
        for a in one:
            for b in other:
                self.blocked.add((a, b))
                if not one_way:
                    self.blocked.add((b, a))

    def heal(self) -> None:
        """Lift all partitions."""
        self.blocked.clear()

    # -- the clock --

    def run_for(self, seconds: float) -> None:
        """Advance the clock by `seconds`, doing everything that falls due."""
        self._run(self.now + seconds, lambda: False)

    def run_until(self, predicate: Callable[[], bool], limit: float) -> bool:
        """Advance until `predicate()` holds, by `limit` seconds at most; whether it holds."""
        return self._run(self.now + limit, predicate)

    def settle(self, peer_id: PeerId) -> None:
        """Take what the peer's machine has put out since; needed after calls from `on_event`."""
        host = self._hosts.get(peer_id)
        if host is not None:
            self._settle(host)

    def _run(self, end: float, done: Callable[[], bool]) -> bool:
        for host in list(self._hosts.values()):
            self._settle(host)
        while not done():
            if not self._queue or self._queue[0][0] > end:
                self.now = end
                return done()
            self.now, _, peer_id, data = heapq.heappop(self._queue)
            self._step(peer_id, data)
        return True

    def _step(self, peer_id: PeerId, data: bytes | None) -> None:
        host = self._hosts.get(peer_id)
        if data is None:
            if host is not None and host.wakeup == self.now:
                host.wakeup = None
                self._tick(host)
        elif host is None:
            self.counters["absent"] += 1
        else:
            self._deliver(host, data)

    def _tick(self, host: Host) -> None:
        if host.paused:
            return
        host.spins = host.spins + 1 if host.last_tick == self.now else 0
        host.last_tick = self.now
        if host.spins > SPIN_LIMIT:
            raise RuntimeError(
                f"{host.peer_id} wants to tick at {self.now} for ever: "
                f"its next_wakeup stays at {host.machine.next_wakeup()}"
            )
        host.machine.tick(self.now)
        self._settle(host)

    def _settle(self, host: Host) -> None:
        """Route what the machine has put out, and note when it wants to be woken."""
        while not host.paused and (items := host.machine.outbox.drain()):
            for item in items:
                if isinstance(item, Send):
                    self._post(host, item.to, item.to, item.message)
                elif isinstance(item, SendTo):
                    there = self._address_book.get(item.address, NOBODY)
                    self._post(host, there, NOBODY, item.message)
                elif self.on_event is not None:
                    self.on_event(host.peer_id, item)
        wakeup = host.machine.next_wakeup()
        if wakeup is not None and (host.wakeup is None or wakeup < host.wakeup):
            host.wakeup = max(wakeup, self.now)
            self._push(host.wakeup, host.peer_id, None)

    # -- messages --

    def _post(self, sender: Host, there: PeerId, to: PeerId, message: Message) -> None:
        """Encode, then lose or delay. `there` is who listens, `to` who is meant."""
        kind, body = pack(message)
        reply_to = sender.addresses[0] if sender.addresses else ""
        data = encode(
            Envelope(WIRE_VERSION, CLUSTER, sender.zone, sender.peer_id, reply_to, to, kind, body)
        )
        self.counters["sent"] += 1
        self.counters["bytes"] += len(data)
        if there == sender.peer_id:
            self._push(self.now, there, data)
            return
        link = self.links.get((sender.peer_id, there), self.default_link)
        delay = self._rng.uniform(*link.latency)
        lost = self._rng.random() < link.loss
        if (sender.peer_id, there) in self.blocked:
            self.counters["blocked"] += 1
        elif lost:
            self.counters["lost"] += 1
        else:
            self._push(self.now + delay, there, data)

    def _deliver(self, host: Host, data: bytes) -> None:
        if host.paused:
            host.backlog.append(data)
            return
        try:
            envelope = open_envelope(data)
            message = unpack(envelope)
        except Undecodable:
            self.counters["garbage"] += 1
            return
        self.counters["delivered"] += 1
        host.machine.receive(self.now, envelope.sender, message)
        self._settle(host)

    def _push(self, time: float, peer_id: PeerId, data: bytes | None) -> None:
        heapq.heappush(self._queue, (time, next(self._order), peer_id, data))
