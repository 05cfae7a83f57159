"""A simulated cluster of directories, with a stand-in for membership.

Each peer has its own view of the members, as SWIM would: claims merge by (incarnation,
status). News of a join or death reaches each peer after a delay of its own, or when directories
disagree: then the two peers exchange their views, one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import (
    Admit,
    Directory,
    KeyChanged,
    OwnersDiffer,
    ReadDone,
    RequestExpired,
    WriteDone,
    WriteRefused,
    admit_all,
)
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import Key, Register, Rumour, SlotClaim, Status
from tensorhub_p2p.sim.network import Link, SimNetwork

KEY = Key("versions", "policy")
TRIP = 0.005
"""Seconds that a view takes from one peer to another."""


def value(number: int) -> SlotClaim:
    """A register value that carries one number."""
    return SlotClaim(0, 1, number, True)


def numbers(registers: Sequence[Register]) -> dict[str, int]:
    """The numbers read, by register name."""
    return {r.name: r.value.counter for r in registers if isinstance(r.value, SlotClaim)}


class Peer:
    """One directory and its view of the members."""

    def __init__(
        self, me: PeerId, seed: int, config: DirectoryConfig, admit: Admit = admit_all
    ) -> None:
        self.me = me
        self.claims: dict[PeerId, tuple[int, Status]] = {me: (0, Status.ALIVE)}
        self.directory = Directory(me, config, random.Random(f"{seed}{me}"), admit)
        self.events: list[Event] = []
        self.ended: dict[int, Event] = {}

    def view(self) -> tuple[Rumour, ...]:
        return tuple(Rumour(p, i, s) for p, (i, s) in sorted(self.claims.items()))

    def absorb(self, now: float, view: Sequence[Rumour]) -> None:
        for rumour in view:
            claim = (rumour.incarnation, rumour.status)
            if rumour.peer == self.me:
                continue
            self.claims[rumour.peer] = max(self.claims.get(rumour.peer, claim), claim)
        alive = [p for p, (_, s) in sorted(self.claims.items()) if s is Status.ALIVE]
        self.directory.members_changed(now, alive)


class Cluster:
    def __init__(
        self,
        seed: int = 0,
        peers: int = 0,
        config: DirectoryConfig | None = None,
        loss: float = 0.0,
        latency: tuple[float, float] = (0.001, 0.005),
        admit: Admit = admit_all,
    ) -> None:
        self.seed = seed
        self.config = config or DirectoryConfig(virtual_nodes=16)
        self.admit = admit
        self.net = SimNetwork(seed, link=Link(latency, loss), on_event=self.on_event)
        self.peers: dict[PeerId, Peer] = {}
        self.everyone: dict[PeerId, Peer] = {}
        if peers:
            first = [self.start() for _ in range(peers)]
            view = tuple(Rumour(p.me, 0, Status.ALIVE) for p in first)
            for peer in first:
                peer.absorb(self.net.now, view)
                peer.directory._owner._past._rings.clear()  # a cluster that has been so for long

    @property
    def now(self) -> float:
        return self.net.now

    def __getitem__(self, index: int) -> Peer:
        return list(self.everyone.values())[index]

    def start(self) -> Peer:
        """A new peer that knows only itself."""
        me = PeerId(f"{len(self.everyone):04d}{self.seed % 4096:04x}")
        peer = Peer(me, self.seed, self.config, self.admit)
        self.peers[me] = self.everyone[me] = peer
        self.net.add(me, [f"{me}:1"], peer.directory)
        return peer

    def on_event(self, me: PeerId, event: Event) -> None:
        peer = self.everyone[me]
        peer.events.append(event)
        if isinstance(event, OwnersDiffer):
            self.compare(peer, self.everyone[event.peer])
        elif isinstance(event, (ReadDone, WriteDone, WriteRefused, RequestExpired)):
            assert event.request not in peer.ended, "a request ended twice"
            peer.ended[event.request] = event

    def compare(self, one: Peer, other: Peer) -> None:
        """What membership does when two views seem to differ, if nothing gets lost."""

        def learns(peer: Peer, of: Peer) -> None:
            weather, hosts = self.net.weather, (self.net.host(peer.me), self.net.host(of.me))
            if peer.me in self.peers and not weather.cuts(*reversed(hosts)):
                self.tell(peer, *of.view())

        self.net.at(self.now + TRIP, lambda: learns(other, one))
        self.net.at(self.now + 2 * TRIP, lambda: learns(one, other))

    def tell(self, peer: Peer, *rumours: Rumour) -> None:
        """Membership news reaches this peer now."""
        if peer.me in self.peers:
            peer.absorb(self.now, rumours)
            self.net.settle(peer.me)

    def join(self, peer: Peer, through: Peer) -> None:
        """The joiner learns the view of the one it joins through, and that one of the joiner."""
        self.tell(peer, *through.view())
        self.tell(through, Rumour(peer.me, 0, Status.ALIVE))

    def spread(self, rumour: Rumour) -> None:
        """Tell everyone now."""
        for peer in list(self.peers.values()):
            self.tell(peer, rumour)

    def crash(self, peer: Peer) -> None:
        self.net.crash(peer.me)
        del self.peers[peer.me]

    def owners(self, key: Key = KEY) -> list[Peer]:
        """By the view of the first peer that runs."""
        viewer = next(iter(self.peers.values()))
        return [self.everyone[p] for p in viewer.directory.owners(key)]

    def owners_by(self, viewer: Peer, key: Key = KEY) -> list[Peer]:
        return [self.everyone[p] for p in viewer.directory.owners(key)]

    def ended(self, peer: Peer, request: int, limit: float = 10.0) -> Event:
        """Run until the request of this peer has ended."""
        self.net.settle(peer.me)
        assert self.net.run_until(lambda: request in peer.ended, limit), "the request hangs"
        return peer.ended[request]

    def write(self, peer: Peer, name: str, number: int, key: Key = KEY) -> None:
        request = peer.directory.write(self.now, key, name, 0, value(number), self.now + 8)
        event = self.ended(peer, request)
        assert isinstance(event, WriteDone), event

    def read(self, peer: Peer, key: Key = KEY) -> dict[str, int]:
        event = self.ended(peer, peer.directory.read(self.now, key, self.now + 8))
        assert isinstance(event, ReadDone), event
        return numbers(event.registers)

    def changes(self, peer: Peer) -> int:
        return sum(isinstance(event, KeyChanged) for event in peer.events)
