"""What one outgoing connection is doing, told from ZeroMQ's socket events.

Rules of this file. Events in, facts out; nothing here opens, closes or waits. A link is
one numeric address that this peer dials. Only the dialling side is watched: what another
peer does with *its* connections to us says nothing about ours.

    CLOSED ──open──> DIALLING ──CONNECTED──> GREETING ──HANDSHAKE_SUCCEEDED──> UP
      ^                 │ CONNECT_RETRIED        │ DISCONNECTED                │ DISCONNECTED
      └── UNREACHABLE ──┘        REFUSED, SILENT ┘                        LOST ┘

What ZeroMQ 4.3 reports, measured: a wrong secret, and plain against CURVE either way, show
CONNECTED, then (mostly) HANDSHAKE_FAILED_*, then DISCONNECTED within milliseconds; so does
a server that speaks something else. After a protocol error ZeroMQ never retries by itself.
A stopped process accepts (its kernel does) and then says nothing until HANDSHAKE_IVL. Hence
the time spent GREETING tells "refused" from "silent". A dial that fails ends in
CONNECT_RETRIED without a reason: `looking.py` finds the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from tensorhub_p2p.protocol.identity import PeerId

MAX_USERS_OF_A_LINK = 8
"""Peers and names that a link remembers: more than one or two only after restarts."""

_SILENT_FROM = 0.8
"""Part of the handshake timeout from which a failed greeting counts as silence, not refusal."""


class Fact(Enum):
    """What became known about an address that is dialled."""

    UP = "connected"
    LOST = "the connection ended"
    GONE = "nobody listens: connection refused"
    REFUSED = "reached, but it refuses the handshake: another secret, or no peer of ours"
    SILENT = "reached, but it does not answer the handshake: paused, or no peer of ours"
    UNREACHABLE = "can't be reached"


@dataclass(frozen=True)
class LinkFact:
    """One fact, with whom it concerns.

    `address` is the numeric one that was dialled, `names` the addresses under which callers
    know it, `peers` those that messages on this link were meant for. `count` is how many
    times in a row this same fact has shown.
    """

    fact: Fact
    address: str
    names: tuple[str, ...]
    peers: tuple[PeerId, ...]
    count: int
    detail: str = ""


class LinkState(Enum):
    CLOSED = "closed"
    DIALLING = "dialling"
    GREETING = "greeting"
    UP = "up"


@dataclass
class Link:
    """One numeric address that this peer dials, and what has become of it."""

    address: str
    state: LinkState = LinkState.CLOSED
    routing_id: bytes = b""
    """Names the current connection at the socket; a fresh one for each."""
    opened_at: float = 0.0
    greeting_since: float = 0.0
    rests_until: float = float("-inf")
    """Not dialled before: late events of the failed connection must not meet the next one."""
    last: Fact | None = None
    count: int = 0
    detail: str = ""
    names: dict[str, None] = field(default_factory=dict)
    peers: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    """Who is reached here, and all the addresses that each gave."""

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.address}"

    def used_for(self, destination: tuple[str, ...], peer: PeerId) -> None:
        """Remember who is reached here, and under which addresses."""
        for name in destination:
            _remember(self.names, name, None)
        if peer:
            _remember(self.peers, peer, destination)

    def note(self, fact: Fact, detail: str = "") -> LinkFact:
        """This became known: count repetitions, and say it."""
        self.count = self.count + 1 if fact is self.last else 1
        self.last = fact
        self.detail = detail
        return LinkFact(
            fact, self.address, tuple(self.names), tuple(self.peers), self.count, detail
        )

    def describe(self) -> str:
        """For error messages."""
        if self.last is None:
            return f"{self.state.value}, no answer yet"
        times = f", {self.count} times in a row" if self.count > 1 else ""
        return f"{self.last.value}{f' ({self.detail})' if self.detail else ''}{times}"


_Key = TypeVar("_Key", bound=str)
_Value = TypeVar("_Value")


def _remember(latest: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if key not in latest and len(latest) >= MAX_USERS_OF_A_LINK:
        del latest[next(iter(latest))]
    latest[key] = value


_STEPS: dict[tuple[LinkState, int], tuple[LinkState, Fact | None]] = {
    (LinkState.DIALLING, zmq.EVENT_CONNECTED): (LinkState.GREETING, None),
    (LinkState.DIALLING, zmq.EVENT_CONNECT_RETRIED): (LinkState.CLOSED, Fact.UNREACHABLE),
    (LinkState.GREETING, zmq.EVENT_HANDSHAKE_SUCCEEDED): (LinkState.UP, Fact.UP),
    (LinkState.GREETING, zmq.EVENT_DISCONNECTED): (LinkState.CLOSED, Fact.REFUSED),
    (LinkState.UP, zmq.EVENT_DISCONNECTED): (LinkState.CLOSED, Fact.LOST),
}
"""Everything else changes nothing, such as the CONNECT_RETRIED that follows a DISCONNECTED."""


def advance(link: Link, event: int, now: float, handshake_timeout: float) -> Fact | None:
    """Let one socket event act on its link; the fact that it amounts to, if any.

    UNREACHABLE here means that the dial failed for a reason still to be found out.
    """
    step = _STEPS.get((link.state, event))
    if step is None:
        return None
    link.state, fact = step
    if link.state is LinkState.GREETING:
        link.greeting_since = now
    waited = now - link.greeting_since
    if fact is Fact.REFUSED and waited >= _SILENT_FROM * handshake_timeout:
        return Fact.SILENT
    return fact


WATCHED_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


# As plain numbers: zmq's enums cost more than the calls.
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE_TO_COME = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message of a socket, or None. Asking first costs a tenth of zmq's exception.

    Asking also lets the socket tidy up.
    """
    if not int(socket.getsockopt(_EVENTS)) & _POLLIN:
        return None
    try:
        frames = [socket.recv(_NOBLOCK)]
        while socket.getsockopt(_RCVMORE):
            frames.append(socket.recv(_NOBLOCK))
    except zmq.Again:
        return None
    return frames


def send_to(socket: zmq.Socket[bytes], routing_id: bytes, payload: bytes) -> None:
    """Queue one message at a ROUTER, or raise zmq.Again or ZMQError: it never waits."""
    socket.send(routing_id, _MORE_TO_COME)
    socket.send(payload, _NOBLOCK)


class SocketEvent(NamedTuple):
    """What ZeroMQ tells: one of `WATCHED_EVENTS`, at which address, and a number.

    The number is the connection's descriptor with CONNECTED and DISCONNECTED.
    """

    kind: int
    address: str
    value: int


class Monitor:
    """The event stream of one socket that dials.

    Its queue has no limit: with one, a control thread that Python's lock keeps from
    reading would in the end block ZeroMQ's I/O thread. What fills it is bounded by the
    connections, and each reports a few events a retry.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes]) -> None:
        where = f"inproc://monitor-{id(watched)}"
        watched.monitor(where, WATCHED_EVENTS)
        self._watched = watched
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(where)

    def fileno(self) -> int:
        return int(self._events.getsockopt(zmq.FD))

    def read(self) -> list[SocketEvent]:
        """All events so far."""
        events: list[SocketEvent] = []
        while (frames := receive(self._events)) is not None:
            event = parse_monitor_message(frames)
            address = event["endpoint"].decode("ascii", "replace").removeprefix("tcp://")
            events.append(SocketEvent(int(event["event"]), address, int(event["value"])))
        return events

    def close(self) -> None:
        self._watched.disable_monitor()
        self._events.close(linger=0)
