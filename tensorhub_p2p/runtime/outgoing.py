"""The connections that this peer dials: opened on demand, bounded, and never waited for.

Theory. One ROUTER socket dials all destinations. Each connection gets a fresh routing id
when it is opened, so that a send names exactly one connection; ROUTER_MANDATORY turns a
full or missing one into an error code instead of a silent drop. One socket, rather than
one for each destination, costs one file descriptor a connection instead of four and has
one event stream. Connections carry messages one way, away from us; answers arrive at our
own bound socket.

A destination is the tuple of addresses that somebody gave. Its *route* holds the numeric
addresses behind them, in order; one is current, and a failure moves on to the next. A
numeric address has one `Link`. A link that fails is closed here (ZeroMQ's own retries are
off in practice: they hammer a refusing server ten times a second, and never resume after
a protocol error), rests a moment, and is dialled again by the next message, or at once if
it is watched.

Bounds: `max_connections` open links; the least recently used is closed beyond it, except
watched ones. Routes and closed links are forgotten, oldest first, at four times as many.
A link queues `send_queue` messages; more are dropped. `send` returns at once in all cases.
"""

from __future__ import annotations

import errno
import itertools
import selectors
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.protocol.envelope import MAX_MESSAGE_BYTES
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.runtime.addresses import dialable, parse
from tensorhub_p2p.runtime.monitor import Fact, Link, LinkFact, LinkState, Monitor, advance
from tensorhub_p2p.runtime.redial import Redialer
from tensorhub_p2p.runtime.resolving import Found, Resolver, resolve_all
from tensorhub_p2p.runtime.security import secure

FRAMING_ROOM = 1024
"""Bytes that ZMTP and CURVE may add to a message."""

_NEVER_MS = 120_000
"""When ZeroMQ would retry by itself: long after the failed link was closed here."""

_REMEMBERED = 4
"""Routes and links that are remembered, as a multiple of the connections kept open."""

_PENDING_PER_ROUTE = 8
"""Messages kept for a destination whose name is being looked up; the oldest is dropped."""

_RESOLVE_AGAIN = 5.0
"""Seconds after which names are looked up anew, when none of their addresses works."""

Destination = tuple[str, ...]


@dataclass
class Route:
    destination: Destination
    candidates: tuple[str, ...] = ()
    """Numeric addresses; empty until the names are looked up."""
    current: int = 0
    named: bool = False
    resolved_at: float = float("-inf")
    error: str = ""
    pending: deque[tuple[PeerId, bytes]] = field(
        default_factory=lambda: deque(maxlen=_PENDING_PER_ROUTE)
    )


class Outgoing:
    """All dialled connections of one peer. Used on one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WireConfig,
        keys: tuple[bytes, bytes] | None,
        counters: Counter[str],
        on_fact: Callable[[LinkFact], None],
    ) -> None:
        self._config = config
        self._counters = counters
        self._on_fact = on_fact
        self._ids = itertools.count(1)
        self._links: OrderedDict[str, Link] = OrderedDict()
        self._open: OrderedDict[str, Link] = OrderedDict()
        self._routes: OrderedDict[Destination, Route] = OrderedDict()
        self._watched: dict[Destination, PeerId] = {}
        self._resolver = Resolver()
        self._redialer = Redialer(config.connect_timeout)
        self._socket = _dialling_socket(context, config, keys)
        self._monitor = Monitor(context, self._socket)

    # --- driving ---------------------------------------------------------------------

    def attach(self, selector: selectors.BaseSelector, wake: Callable[[], None]) -> None:
        """Have `selector` wake the caller when `service` is due; `wake` does so from a thread."""
        selector.register(self._monitor.fileno(), selectors.EVENT_READ)
        selector.register(int(self._socket.getsockopt(zmq.FD)), selectors.EVENT_READ)
        self._redialer.attach(selector)
        self._resolver.wake = wake

    def service(self, now: float) -> None:
        """Take note of what happened to the connections; reopen watched ones."""
        for event, endpoint in self._monitor.read():
            link = self._open.get(endpoint.removeprefix("tcp://"))
            if link is not None:
                self._happened(link, event, now)
        for outcome in self._redialer.outcomes(now):
            if outcome.error:
                fact = Fact.GONE if outcome.refused else Fact.UNREACHABLE
                self._known(outcome.address, fact, "" if outcome.refused else outcome.error)
        for found in self._resolver.take():
            self._resolved(found, now)
        self._drain_unexpected()
        for destination, peer in self._watched.items():
            self._watch(destination, peer, now)

    def next_wakeup(self) -> float | None:
        """When `service` should be called next, if nothing happens before."""
        rests = [
            link.rests_until
            for link in map(self._current_link, self._watched)
            if link is not None and link.state is LinkState.CLOSED
        ]
        return earliest(self._redialer.next_wakeup(), *rests)

    def watch(self, peers: dict[Destination, PeerId]) -> None:
        """Keep connections to exactly these open, whether or not anything is sent."""
        self._watched = dict(peers)

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
        self._redialer.close()
        self._monitor.close()
        self._socket.close(linger=int(linger * 1000))

    # --- sending ---------------------------------------------------------------------

    def send(self, destination: Destination, peer: PeerId, payload: bytes, now: float) -> bool:
        """Queue one message; False if it was dropped. Never blocks. Raises AddressError."""
        route = self._route(destination, now)
        if not route.candidates:
            if len(route.pending) == _PENDING_PER_ROUTE:
                self._counters["dropped: name not resolved"] += 1
            route.pending.append((peer, payload))
            self._look_up(route, now)
            return False
        link = self._link(route.candidates[route.current])
        link.used_for(destination, peer)
        if link.state is LinkState.CLOSED and not self._dial(link, now):
            self._counters["dropped: unreachable"] += 1
            return False
        self._open.move_to_end(link.address)
        return self._push(link, payload)

    def _push(self, link: Link, payload: bytes) -> bool:
        try:
            self._socket.send_multipart((link.routing_id, payload), zmq.NOBLOCK)
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

    # --- routes ----------------------------------------------------------------------

    def _route(self, destination: Destination, now: float) -> Route:
        route = self._routes.get(destination)
        if route is None:
            named = not all(a.is_numeric for a in map(dialable, destination))
            route = self._routes[destination] = Route(destination, named=named)
            if not named:
                self._resolved(resolve_all(destination), now)
            self._forget_routes()
        self._routes.move_to_end(destination)
        return route

    def _look_up(self, route: Route, now: float) -> None:
        if now - route.resolved_at > (self._config.resolve_retry if route.error else 0):
            self._resolver.request(route.destination)

    def _resolved(self, found: Found, now: float) -> None:
        route = self._routes.get(found.addresses)
        if route is None:
            return
        route.resolved_at = now
        route.error = found.error
        if found.numeric and found.numeric != route.candidates:
            route.candidates = found.numeric
            route.current = 0
        if not route.candidates:
            fact = LinkFact(Fact.UNREACHABLE, "", route.destination, (), 1, route.error)
            self._on_fact(fact)
            return
        pending, route.pending = route.pending, deque(maxlen=_PENDING_PER_ROUTE)
        for peer, payload in pending:
            self.send(route.destination, peer, payload, now)

    def _rotate(self, link: Link, now: float) -> None:
        """`link` failed: those routes that use it try their next address."""
        for route in self._routes.values():
            if not route.candidates or route.candidates[route.current] != link.address:
                continue
            route.current = (route.current + 1) % len(route.candidates)
            if route.current == 0 and route.named and now - route.resolved_at > _RESOLVE_AGAIN:
                self._resolver.request(route.destination)

    def _current_link(self, destination: Destination) -> Link | None:
        route = self._routes.get(destination)
        if route is None or not route.candidates:
            return None
        return self._links.get(route.candidates[route.current])

    def _watch(self, destination: Destination, peer: PeerId, now: float) -> None:
        route = self._route(destination, now)
        if not route.candidates:
            self._look_up(route, now)
            return
        link = self._link(route.candidates[route.current])
        link.used_for(destination, peer)
        if link.state is LinkState.CLOSED:
            self._dial(link, now)

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
        kept = {link.address for link in map(self._current_link, self._watched) if link}
        spare = [address for address in self._open if address not in kept]
        for address in spare[: max(0, len(spare) + 1 - self._config.max_connections)]:
            self._close(self._open[address])
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
            self._on_fact(link.note(fact))
            return
        self._close(link)
        link.rests_until = now + self._config.redial_interval
        self._rotate(link, now)
        if fact is not Fact.UNREACHABLE:
            self._on_fact(link.note(fact))
        if fact in (Fact.UNREACHABLE, Fact.LOST):
            self._redialer.dial(parse(link.address), now)

    def _known(self, address: str, fact: Fact, detail: str) -> None:
        link = self._links.get(address)
        if link is not None and link.state is not LinkState.UP:
            self._on_fact(link.note(fact, detail))

    def _forget_routes(self) -> None:
        while len(self._routes) > _REMEMBERED * self._config.max_connections:
            oldest = next((d for d in self._routes if d not in self._watched), None)
            if oldest is None:
                return
            del self._routes[oldest]

    def _forget_links(self) -> None:
        while len(self._links) > _REMEMBERED * self._config.max_connections:
            oldest = next((a for a in self._links if a not in self._open), None)
            if oldest is None:
                return
            del self._links[oldest]

    def _drain_unexpected(self) -> None:
        """Nobody answers on a dialled connection; reading also lets the socket tidy up."""
        for _ in range(self._config.receive_batch):
            try:
                self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._counters["dropped: came back on a dialled connection"] += 1


def _dialling_socket(
    context: zmq.Context[zmq.Socket[bytes]], config: WireConfig, keys: tuple[bytes, bytes] | None
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    limit_socket(socket, config)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, config.send_queue)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(config.connect_timeout * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    if keys is not None:
        secure(socket, keys, server=False)
    return socket


def limit_socket(socket: zmq.Socket[bytes], config: WireConfig) -> None:
    """What holds for both sockets: heartbeats, and bounds on time, size and lingering."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + FRAMING_ROOM)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(config.handshake_timeout * 1000))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(config.heartbeat_interval * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(config.heartbeat_timeout * 1000))
