"""Messages to and from peers: envelopes, their checks, and the two sockets under them.

Theory. A peer binds one ROUTER on which it receives everything, and dials others through
`outgoing.py`. Messages go one way on a connection: the answer travels over the answerer's
own connection, to the address that the envelope names as `reply_to`. A peer is addressed
by its id; the address book knows where it is. Besides, `watching.py` keeps connections to a
few peers only to see them end.

What connections tell of peers goes to `on_evidence`; of addresses, to `on_fact`.

Checks on receipt, in this order: one frame besides the routing id, decodable, of our
cluster, for us (or for nobody in particular, which is how a join begins), from something
that looks like a peer id with an address that can be dialled. Whatever fails is dropped
and counted by reason in `counters`, never raised: the network may say anything.
A message from the own id is passed on: the machine learns that a seed is itself.
"""

from __future__ import annotations

import logging
import re
import selectors
import time
from collections import Counter
from collections.abc import Callable, Collection

import zmq

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.errors import JoinError
from tensorhub_p2p.protocol.envelope import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Envelope,
    Undecodable,
    encode,
    open_envelope,
    pack,
    unpack,
)
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Message
from tensorhub_p2p.runtime.addresses import Address, AddressError, advertised, check_bind, parse
from tensorhub_p2p.runtime.book import AddressBook, Lookup
from tensorhub_p2p.runtime.doubts import Doubts
from tensorhub_p2p.runtime.forkguard import close_port
from tensorhub_p2p.runtime.monitor import Fact, LinkFact, receive
from tensorhub_p2p.runtime.outgoing import REMEMBERED, Outgoing, limit_socket
from tensorhub_p2p.runtime.routes import Routes
from tensorhub_p2p.runtime.security import curve_keys, secure
from tensorhub_p2p.runtime.watching import Watching

_logger = logging.getLogger(__name__)
_PEER_ID = re.compile(r"[0-9a-f]{16}")
_SOCKETS = 16
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""For incoming connections, about which this side asks nothing: their hosts may vanish."""


class Links:
    """All control connections of one peer; binds when it is made.

    Made on any thread, then used on one (the control thread). `on_fact` gets what becomes
    known about dialled addresses, `on_evidence` what connections show of peers; both may be
    set later. `lookup` finds a peer whose address is not known from a message or from `learn`.

    Raises AddressError for a bind or advertise address that can't be used, JoinError for
    a port in use, ConfigError for an empty secret.
    """

    def __init__(
        self,
        me: PeerId,
        cluster: str,
        zone: str,
        *,
        bind: str = "127.0.0.1:0",
        advertise: str | None = None,
        secret: str | None = None,
        insecure: bool = False,
        config: WireConfig | None = None,
        lookup: Lookup | None = None,
        on_fact: Callable[[LinkFact], None] | None = None,
        on_evidence: Callable[[PeerId, Evidence], None] | None = None,
    ) -> None:
        self.me = me
        self.config = config if config is not None else WireConfig()
        self.counters: Counter[str] = Counter()
        self.on_fact = on_fact
        self.on_evidence = on_evidence
        self._cluster = cluster
        self._zone = zone
        self._book = AddressBook(self.config.max_addresses, lookup)
        self._routes = Routes(REMEMBERED * self.config.max_connections, self.config.resolve_retry)
        self._doubts = Doubts(self.config.max_addresses)
        self._watched: Callable[[], Collection[PeerId]] | None = None
        """Who is to be watched from now on, if that has changed."""
        self._closed = False
        numeric = check_bind(parse(bind, 0), secret=secret is not None, insecure=insecure)
        keys = curve_keys(secret) if secret is not None else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = _receiving_socket(self._context, self.config, keys)
            self.bound = _bind(self._socket, numeric, bind)
            self.addresses = advertised(self.bound, advertise)
            self._outgoing = Outgoing(
                self._context, self.config, keys, self.counters, self._routes, self._tell_fact
            )
            self._watching = Watching(
                self._context,
                self.config,
                keys,
                self.counters,
                self._routes,
                self._doubts,
                self._tell_evidence,
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise

    # --- who is where ----------------------------------------------------------------

    def learn(self, info: PeerInfo) -> None:
        """Remember a peer's addresses; unusable ones are ignored."""
        self._book.learn(info.peer_id, info.addresses)

    def forget(self, peer: PeerId) -> None:
        self._book.forget(peer)
        self._doubts.forget(peer)

    def watch(self, peers: Callable[[], Collection[PeerId]]) -> None:
        """Keep a connection to each of these only to see it end; tells `on_evidence`.

        Replaces what was watched before. Who they are is asked in the next `service`, once
        for many changes; those whose address is not known are left out.
        """
        self._watched = peers

    def _watch(self) -> None:
        watched, self._watched = self._watched, None
        if watched is None:
            return
        known = {p: self._book.addresses_of(p) for p in watched() if p != self.me}
        self._watching.watch({p: a for p, a in known.items() if a is not None})

    def look(self, peer: PeerId) -> None:
        """Look what the sockets of this peer show now; `on_evidence` is told soon, or never."""
        addresses = self._book.addresses_of(peer)
        if addresses is not None:
            self._watching.look(peer, addresses, time.monotonic())

    def describe(self, address: str) -> str:
        """What is known about reaching a seed, for an error message."""
        return self._outgoing.describe((address,))

    # --- sending ---------------------------------------------------------------------

    def send(self, to: PeerId, message: Message) -> bool:
        """Queue `message` for a peer; False if it was dropped. Never blocks, never raises."""
        addresses = self._book.addresses_of(to)
        if addresses is None:
            self.counters["dropped: address not known"] += 1
            return False
        return self._send(addresses, to, message)

    def send_to(self, address: str, message: Message) -> bool:
        """Queue `message` for whoever is at `address` (`host:port`)."""
        return self._send((address,), NOBODY, message)

    def _send(self, addresses: tuple[str, ...], to: PeerId, message: Message) -> bool:
        kind, body = pack(message)
        envelope = Envelope(
            WIRE_VERSION, self._cluster, self._zone, self.me, self.addresses[0], to, kind, body
        )
        payload = encode(envelope)
        if len(payload) > MAX_MESSAGE_BYTES:
            self.counters["dropped: too large to send"] += 1
            _logger.error("a %s of %d bytes is too large to send", kind, len(payload))
            return False
        try:
            return self._outgoing.send(addresses, to, payload, time.monotonic())
        except AddressError as error:
            self.counters["dropped: bad address"] += 1
            _logger.warning("%s", error)
            return False

    # --- receiving and driving -------------------------------------------------------

    def attach(self, selector: selectors.BaseSelector, wake: Callable[[], None]) -> int:
        """Have `selector` wake its owner when `receive` or `service` has something to do.

        Returns the descriptor that is for `receive`; all others, and `wake`, are for `service`.
        """
        arrivals = int(self._socket.getsockopt(zmq.FD))
        selector.register(arrivals, selectors.EVENT_READ)
        self._routes.attach(wake)
        self._outgoing.attach(selector)
        self._watching.attach(selector)
        return arrivals

    def receive(self, limit: int) -> tuple[list[tuple[PeerId, Message]], bool]:
        """Up to `limit` incoming messages, the bad ones left out; True if there may be more.

        The socket's descriptor only announces *new* messages: call again before waiting
        on it as long as there may be more.
        """
        messages: list[tuple[PeerId, Message]] = []
        for _ in range(limit):
            frames = receive(self._socket)
            if frames is None:
                return messages, False
            checked = self._check(frames)
            if isinstance(checked, str):
                self.counters[f"dropped: {checked}"] += 1
            else:
                self.counters["received"] += 1
                self._doubts.heard(checked[0])
                messages.append(checked)
        return messages, True

    def service(self, now: float) -> None:
        """Take note of what happened to the connections; tells `on_fact`, `on_evidence`."""
        for route in self._routes.resolved(now):
            self._outgoing.resolved(route, now)
        self._watch()
        self._watching.service(now)
        self._outgoing.service(now)

    def next_wakeup(self) -> float | None:
        if self._watched is not None:
            return float("-inf")
        return earliest(self._outgoing.next_wakeup(), self._watching.next_wakeup())

    def close(self, linger: float | None = None) -> None:
        """Close all sockets, after at most `linger` seconds for what is still queued."""
        if self._closed:
            return
        self._closed = True
        linger = self.config.close_linger if linger is None else linger
        self._watching.close()
        self._outgoing.close(linger, time.monotonic())
        self._socket.close(linger=0)
        self._context.term()

    @property
    def keep_in_child(self) -> tuple[object, ...]:
        """What a forked child must neither use nor destroy."""
        return (self._context, self._socket, self._outgoing, self._watching)

    def disown(self) -> None:
        """In a forked child: the parent's death must show at its sockets."""
        if not self._closed:
            close_port(self.bound.port)

    def _check(self, frames: list[bytes]) -> tuple[PeerId, Message] | str:
        """The message with its sender, or why it is dropped."""
        if len(frames) != 2:
            return "not one frame"
        try:
            envelope = open_envelope(frames[1])
            if envelope.cluster != self._cluster:
                return "another cluster"
            if envelope.to not in (self.me, NOBODY):
                return "for another peer"
            if not _PEER_ID.fullmatch(envelope.sender):
                return "malformed sender"
            message = unpack(envelope)
        except Undecodable:
            return "undecodable"
        if not self._book.hear(envelope.sender, envelope.reply_to):
            return "no usable address to reply to"
        return envelope.sender, message

    def _tell_fact(self, fact: LinkFact) -> None:
        self.counters[f"links: {fact.fact.name.lower()}"] += 1
        for peer in fact.peers:
            self._weigh(peer, fact.fact)
        if self.on_fact is not None:
            self.on_fact(fact)

    def _weigh(self, peer: PeerId, fact: Fact) -> None:
        """What an ordinary connection shows of a peer; of a watched one the watch knows better."""
        if fact is Fact.UP:
            self._doubts.greeted(peer)
        elif fact is Fact.GONE:
            self._tell_evidence(peer, Evidence.REFUSED)
        elif fact is Fact.LOST:
            if peer not in self._watching:
                self._doubts.closed(peer)
            self._tell_evidence(peer, Evidence.DISCONNECTED)

    def _tell_evidence(self, peer: PeerId, evidence: Evidence) -> None:
        self.counters[f"evidence: {evidence.name.lower()}"] += 1
        if self.on_evidence is not None:
            self.on_evidence(peer, evidence)


def _receiving_socket(
    context: zmq.Context[zmq.Socket[bytes]], config: WireConfig, keys: tuple[bytes, bytes] | None
) -> zmq.Socket[bytes]:
    context.setsockopt(zmq.MAX_SOCKETS, _SOCKETS)
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    limit_socket(socket, config)
    socket.setsockopt(zmq.RCVHWM, config.send_queue)
    socket.setsockopt(zmq.BACKLOG, config.listen_backlog)
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    secure(socket, keys, server=True)
    return socket


def _bind(socket: zmq.Socket[bytes], numeric: list[Address], asked: str) -> Address:
    """Bind to the first address that works; what it became, port 0 filled in."""
    problems = []
    for address in numeric:
        socket.setsockopt(zmq.IPV6, 1 if ":" in address.host else 0)
        try:
            socket.bind(address.endpoint)
        except zmq.ZMQError as error:
            problems.append(f"{address}: {_why(error)}")
            continue
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        return address._replace(port=int(bound.rpartition(":")[2]))
    raise JoinError(f"can't bind to {asked!r}: {'; '.join(problems)}")


def _why(error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return "the port is in use by another process; use port 0 to get a free one"
    if error.errno == zmq.EADDRNOTAVAIL:
        return "no interface of this machine has that address (behind NAT, pass advertise=...)"
    return str(error)
