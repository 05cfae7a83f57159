"""The connections that this peer dials: opened on demand, bounded, and never waited for.

Theory. One ROUTER socket dials all destinations. Each connection gets a fresh routing id
when it is opened, so that a send names exactly one connection; ROUTER_MANDATORY turns a
full or missing one into an error code instead of a silent drop. One socket, rather than
one for each destination, costs one file descriptor a connection instead of four and has
one event stream. Connections carry messages one way, away from us; answers arrive at our
own bound socket.

The addresses that somebody gave lead to the numeric one to be dialled by a route (routes.py).
A numeric address has one `Link`. A link that fails is closed here (ZeroMQ's own retries are
off in practice: they hammer a refusing server ten times a second, and never resume after
a protocol error), rests a moment, and is dialled again by the next message. ZeroMQ says that
a dial failed, not why; so a look (looking.py) finds out.

Bounds: `max_connections` open links; the least recently used is closed beyond it. Closed
links are forgotten, oldest first, at four times as many, and `MAX_LOOKS` failed ones are
looked at at a time. A link queues `send_queue` messages; more are dropped. `send` returns
at once in all cases.
"""

from __future__ import annotations

import errno
import itertools
import selectors
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

import zmq

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.protocol.envelope import MAX_MESSAGE_BYTES
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.runtime.addresses import parse
from tensorhub_p2p.runtime.looking import Looker, Seen
from tensorhub_p2p.runtime.monitor import (
    Fact,
    Link,
    LinkFact,
    LinkState,
    Monitor,
    advance,
    receive,
    send_to,
)
from tensorhub_p2p.runtime.routes import Destination, Route, Routes
from tensorhub_p2p.runtime.security import secure

FRAMING_ROOM = 1024
"""Bytes that ZMTP and CURVE may add to a message."""

NEVER_MS = 120_000
"""When ZeroMQ would retry by itself: long after the failed link was closed here."""

REMEMBERED = 4
"""Routes and links that are remembered, as a multiple of the connections kept open."""

MAX_LOOKS = 32
"""Failed links about which it is found out at a time why they failed."""

_PENDING_PER_ROUTE = 8
"""Messages kept for a destination whose name is being looked up; the oldest is dropped."""


class Outgoing:
    """All dialled connections of one peer. Used on one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WireConfig,
        keys: tuple[bytes, bytes] | None,
        counters: Counter[str],
        routes: Routes,
        on_fact: Callable[[LinkFact], None],
    ) -> None:
        self._config = config
        self._counters = counters
        self._on_fact = on_fact
        self._ids = itertools.count(1)
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._open: OrderedDict[str, Link] = OrderedDict()
        self._routes = routes
        self._pending: OrderedDict[Destination, deque[tuple[PeerId, bytes]]] = OrderedDict()
        """Messages to destinations whose names are being looked up."""
        self._looker: Looker[str] = Looker(MAX_LOOKS)
        self._socket = _dialling_socket(context, config, keys)
        self._monitor = Monitor(context, self._socket)

    # --- driving ---------------------------------------------------------------------

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake the caller when `service` is due."""
        selector.register(self._monitor.fileno(), selectors.EVENT_READ)
        selector.register(int(self._socket.getsockopt(zmq.FD)), selectors.EVENT_READ)
        self._looker.attach(selector)

    def service(self, now: float) -> None:
        """Take note of what happened to the connections."""
        for event in self._monitor.read():
            link = self._open.get(event.address)
            if link is not None:
                self._happened(link, event.kind, now)
        for sight in self._looker.sights(now):
            if sight.seen is Seen.REFUSED:
                self._known(sight.key, Fact.GONE)
            elif sight.seen is Seen.UNREACHABLE:
                self._known(sight.key, Fact.UNREACHABLE, sight.error)
        if dropped := drain(self._socket, self._config.receive_batch):
            self._counters["dropped: came back on a dialled connection"] += dropped

    def resolved(self, route: Route, now: float) -> None:
        """The names of this route were looked up."""
        destination = route.destination
        if not route.candidates:
            self._on_fact(LinkFact(Fact.UNREACHABLE, "", destination, (), 1, route.error))
            return
        for peer, payload in self._pending.pop(destination, ()):
            self.send(destination, peer, payload, now)

    def next_wakeup(self) -> float | None:
        """When `service` should be called next, if nothing happens before."""
        return self._looker.next_wakeup()

    def describe(self, destination: Destination) -> str:
        """What is known about reaching it, for error messages."""
        route = self._routes.get(destination)
        if route is None:
            return "not tried yet"
        if not route.candidates:
            return route.error or "its name is being looked up"
        states = [
            f"{address}: {link.describe()}" if len(route.candidates) > 1 else link.describe()
            for address in route.candidates
            if (link := self._links.get(address)) is not None
        ]
        return "; ".join(states) or "not tried yet"

    def close(self, linger: float, now: float) -> None:
        """Close everything, giving connections that work (or are new) `linger` seconds to flush."""
        for link in list(self._open.values()):
            if link.state is not LinkState.UP and now - link.opened_at > linger:
                self._close(link)
        self._looker.close()
        self._monitor.close()
        self._socket.close(linger=int(linger * 1000))

    # --- sending ---------------------------------------------------------------------

    def send(self, destination: Destination, peer: PeerId, payload: bytes, now: float) -> bool:
        """Queue one message; False if it was dropped. Never blocks. Raises AddressError."""
        address = self._routes.find(destination, now).current
        if address is None:
            self._keep(destination, peer, payload)
            return False
        link = self._link(address)
        link.used_for(destination, peer)
        if link.state is LinkState.CLOSED and not self._dial(link, now):
            self._counters["dropped: unreachable"] += 1
            return False
        self._open.move_to_end(link.address)
        return self._push(link, payload)

    def _push(self, link: Link, payload: bytes) -> bool:
        try:
            send_to(self._socket, link.routing_id, payload)
        except zmq.Again:
            self._counters["dropped: send queue full"] += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._counters["dropped: unreachable"] += 1
            return False  # the connection just ended; its event is on its way
        self._counters["sent"] += 1
        return True

    def _keep(self, destination: Destination, peer: PeerId, payload: bytes) -> None:
        """Until the names are looked up."""
        pending = self._pending.setdefault(destination, deque(maxlen=_PENDING_PER_ROUTE))
        if len(pending) == _PENDING_PER_ROUTE:
            self._counters["dropped: name not resolved"] += 1
        pending.append((peer, payload))
        if len(self._pending) > REMEMBERED * self._config.max_connections:
            _, dropped = self._pending.popitem(last=False)
            self._counters["dropped: name not resolved"] += len(dropped)

    # --- links -----------------------------------------------------------------------

    def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address)
            self._forget_links()
        self._links.move_to_end(address)
        return link

    def _dial(self, link: Link, now: float) -> bool:
        if now < link.rests_until:
            return False
        self._make_room()
        link.routing_id = b"c%d" % next(self._ids)
        link.state = LinkState.DIALLING
        link.opened_at = now
        self._socket.setsockopt(zmq.IPV6, 1 if link.address.startswith("[") else 0)
        self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, link.routing_id)
        try:
            self._socket.connect(link.endpoint)
        except zmq.ZMQError as error:
            link.state = LinkState.CLOSED
            link.rests_until = now + self._config.redial_interval
            self._on_fact(link.note(Fact.UNREACHABLE, str(error)))
            return False
        self._open[link.address] = link
        return True

    def _make_room(self) -> None:
        while len(self._open) >= self._config.max_connections:
            self._close(next(iter(self._open.values())))
            self._counters["connections closed to make room"] += 1

    def _close(self, link: Link) -> None:
        self._open.pop(link.address, None)
        link.state = LinkState.CLOSED
        try:
            self._socket.disconnect(link.endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # ZeroMQ dropped it itself: a protocol error
                raise

    def _happened(self, link: Link, event: int, now: float) -> None:
        fact = advance(link, event, now, self._config.handshake_timeout)
        if fact is None:
            return
        if fact is Fact.UP:
            self._routes.worked(link.address)
            self._on_fact(link.note(fact))
            return
        self._close(link)
        link.rests_until = now + self._config.redial_interval
        self._routes.failed(link.address, now)
        if fact is not Fact.UNREACHABLE:
            self._on_fact(link.note(fact))
        if fact in (Fact.UNREACHABLE, Fact.LOST):
            self._find_out(link, now)

    def _find_out(self, link: Link, now: float) -> None:
        timeout = self._config.connect_timeout
        if not self._looker.look(link.address, parse(link.address), now, timeout, greeting=0):
            self._known(link.address, Fact.UNREACHABLE, "too many failed connections at once")

    def _known(self, address: str, fact: Fact, detail: str = "") -> None:
        link = self._links.get(address)
        if link is None or link.state is LinkState.UP:
            return
        told = link.note(fact, detail)
        if fact is Fact.GONE:  # of those that have another address it proves nothing
            sure = [p for p, d in link.peers.items() if self._routes.is_proof(d, address)]
            told = replace(told, peers=tuple(sure))
        self._on_fact(told)

    def _forget_links(self) -> None:
        while len(self._links) > REMEMBERED * self._config.max_connections:
            oldest = next((a for a in self._links if a not in self._open), None)
            if oldest is None:
                return
            del self._links[oldest]


def _dialling_socket(
    context: zmq.Context[zmq.Socket[bytes]], config: WireConfig, keys: tuple[bytes, bytes] | None
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    limit_socket(socket, config)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, config.send_queue)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(config.connect_timeout * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(config.heartbeat_interval * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(config.heartbeat_timeout * 1000))
    secure(socket, keys, server=False)
    return socket


def limit_socket(socket: zmq.Socket[bytes], config: WireConfig) -> None:
    """What holds for all sockets: bounds on time, size and lingering."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + FRAMING_ROOM)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(config.handshake_timeout * 1000))


def drain(socket: zmq.Socket[bytes], limit: int) -> int:
    """Read what nobody should have sent on a dialled connection; how many messages it was.

    Reading also lets the socket tidy up.
    """
    for read in range(limit):
        if receive(socket) is None:
            return read
    return limit
