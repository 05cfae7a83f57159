"""Small machines for the tests of the simulator itself."""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.membership.swim_events import Evidence, Look
from tensorhub_p2p.protocol.messages import Ack, Message, Ping
from tensorhub_p2p.sim.network import SimNetwork

A, B, C, D = PeerId("a"), PeerId("b"), PeerId("c"), PeerId("d")


class Heard(Event):
    def __init__(self, message: Message) -> None:
        self.message = message


class Pinger:
    """Pings `to` every `interval` seconds, acknowledges pings, and notes what it hears."""

    def __init__(self, to: PeerId | None = None, interval: float = 1.0) -> None:
        self.to, self.interval, self.due, self.seq = to, interval, 0.0, 0
        self.outbox = Outbox()
        self.heard: list[tuple[float, PeerId, Message]] = []
        self.ticks: list[float] = []

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self.heard.append((now, sender, message))
        self.outbox.emit(Heard(message))
        if isinstance(message, Ping):
            self.outbox.send(sender, Ack(message.seq))

    def tick(self, now: float) -> None:
        if self.to is not None and now >= self.due:
            self.ticks.append(now)
            self.due = now + self.interval
            self.seq += 1
            self.outbox.send(self.to, Ping(self.seq))

    def next_wakeup(self) -> float | None:
        return self.due if self.to is not None else None

    def pings(self) -> list[int]:
        """The numbers of the pings that it heard, in order."""
        return [message.seq for _, _, message in self.heard if isinstance(message, Ping)]


class Watcher(Pinger):
    """Watches some peers, and notes what it is told of them."""

    def __init__(self, *watches: PeerId) -> None:
        super().__init__()
        self.watches = watches
        self.evidences: list[tuple[float, PeerId, Evidence]] = []

    def watched(self) -> tuple[PeerId, ...]:
        return self.watches

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        self.evidences.append((now, peer, evidence))

    def look(self, peer: PeerId) -> None:
        self.outbox.emit(Look(peer))

    def shown(self, peer: PeerId) -> list[Evidence]:
        return [evidence for _, about, evidence in self.evidences if about == peer]

    def times(self, peer: PeerId) -> list[float]:
        return [round(time, 2) for time, about, _ in self.evidences if about == peer]


def pair(seed: int = 1, **options: object) -> tuple[SimNetwork, Pinger, Pinger]:
    """a pings b once a second."""
    network = SimNetwork(seed, **options)  # type: ignore[arg-type]
    a, b = Pinger(B), Pinger()
    network.add(A, ["a:1"], a)
    network.add(B, ["b:1"], b)
    return network, a, b
