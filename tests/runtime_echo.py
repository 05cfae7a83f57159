"""A machine that only answers, and a peer's runtime around it: what the runtime's tests drive."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Ack, Message, Ping
from tensorhub_p2p.runtime.control import ControlThread
from tensorhub_p2p.runtime.links import Links
from tensorhub_p2p.runtime.monitor import Fact, LinkFact

PATIENCE = 15.0
"""Seconds that a test waits for something that must happen."""

QUICK = WireConfig(handshake_timeout=1.0)


class Echo:
    """Answers each Ping with an Ack, and remembers what it got."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.got: queue.Queue[tuple[PeerId, Message]] = queue.Queue()
        self.ticked = threading.Event()
        self.wakeup: float | None = None

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, Ping):
            self.outbox.send(sender, Ack(message.seq))
        self.got.put((sender, message))

    def tick(self, now: float) -> None:
        if self.wakeup is not None and self.wakeup <= now:
            self.wakeup = None
            self.ticked.set()

    def next_wakeup(self) -> float | None:
        return self.wakeup


class EchoPeer:
    """One runtime with an echo machine; a context manager that checks for faults at its end."""

    def __init__(self, *, cluster: str = "c", config: WireConfig = QUICK, **links: Any) -> None:
        self.machine = Echo()
        self.me = PeerId(secrets.token_hex(8))
        self.links = Links(self.me, cluster, "z", config=config, **links)
        self.events: queue.Queue[Event] = queue.Queue()
        self.facts: queue.Queue[LinkFact] = queue.Queue()
        self.evidence: queue.Queue[tuple[PeerId, Evidence]] = queue.Queue()
        self.control = ControlThread(
            self.machine,
            self.links,
            self.events.put,
            lambda _now, fact: self.facts.put(fact),
            on_evidence=lambda _now, peer, evidence: self.evidence.put((peer, evidence)),
        )
        self.faults_expected = False

    @property
    def address(self) -> str:
        return self.links.addresses[0]

    def __enter__(self) -> EchoPeer:
        self.control.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.control.stop()
        if kind is None and not self.faults_expected:
            assert list(self.control.faults) == []

    def ping(self, address: str, seq: int = 1) -> None:
        self.control.call(lambda now: self.machine.outbox.send_to(address, Ping(seq))).result(5)

    def ping_peer(self, peer: PeerId, seq: int = 1) -> None:
        self.control.call(lambda now: self.machine.outbox.send(peer, Ping(seq))).result(5)

    def next_ack(self, timeout: float = PATIENCE) -> tuple[PeerId, Ack]:
        """The next Ack that arrives; other messages are passed over."""
        while True:
            sender, message = self.machine.got.get(timeout=timeout)
            if isinstance(message, Ack):
                return sender, message

    def keep_pinging(self, address: str, until: Fact, count: int = 1) -> LinkFact:
        """Ping `address` until this fact about it has shown `count` times in a row."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.ping(address)
            try:
                fact = self.facts.get(timeout=0.05)
            except queue.Empty:
                continue
            if fact.fact is until and fact.count >= count:
                return fact
        raise AssertionError(f"no {until} about {address}: {self.links.describe(address)}")

    def watch(self, *peers: PeerId) -> None:
        self.control.call(lambda now: self.links.watch(lambda: peers)).result(5)

    def look(self, peer: PeerId) -> None:
        self.control.call(lambda now: self.links.look(peer)).result(5)

    def evidence_until(self, last: Evidence, timeout: float = PATIENCE) -> list[Evidence]:
        """What the sockets told of whomever, up to and with `last`."""
        told = [self.evidence.get(timeout=timeout)[1]]
        while told[-1] is not last:
            told.append(self.evidence.get(timeout=timeout)[1])
        return told

    def reach(self, other: EchoPeer) -> None:
        """Exchange one ping and ack, retrying while links rest."""
        eventually(lambda: self._reached(other), f"{other.address} answers")

    def reach_peer(self, peer: PeerId) -> None:
        """The same with a peer whose address is known."""
        eventually(lambda: self._answered_by(peer), f"{peer} answers")

    def _reached(self, other: EchoPeer) -> bool:
        self.ping(other.address, 77)
        return self._answered(other.me)

    def _answered_by(self, peer: PeerId) -> bool:
        self.ping_peer(peer, 78)
        return self._answered(peer)

    def _answered(self, peer: PeerId) -> bool:
        try:
            return self.next_ack(timeout=0.3)[0] == peer
        except queue.Empty:
            return False


def eventually(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s in vain: {what}"
        time.sleep(0.01)


def free_port() -> int:
    """A port on which nobody listens (right now)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def deaf_address() -> Iterator[str]:
    """An address from which no answer comes, as in a network that drops everything."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # beyond its backlog the kernel drops what asks for a connection
            dial = opened.enter_context(socket.socket())
            dial.setblocking(False)
            dial.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
