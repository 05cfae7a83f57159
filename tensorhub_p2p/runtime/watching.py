"""Standing connections to a few peers, only to see them end; and looks at silent ones.

Rules of this file. No message ever travels on a watch. What the sockets show of a peer is
told as `Evidence`; what it means is for membership to decide.

Theory. The watches have a socket of their own, with fast heartbeats that the other side's
ZeroMQ answers without Python, and with room at the other side whatever queues there. Nor
do they count for the bound on connections. One watch is

    LOOKING ──accepted, greeted──▶ DIALLING ──▶ GREETING ──handshake──▶ UP ──ends──▶ LOOKING
       │ ▲                            │            │
       │ └────────── pause ──◀ RESTING ◀──────────┘ refuses the handshake
       └──refused, unreachable, stranger──▶ RESTING

and tells

    UP ends                                DISCONNECTED, and it is looked at once more, at once
    the look is refused                    REFUSED
    no answer to it, after it was UP       UNREACHABLE, and again with each try
    connected, not greeted for a while     ACCEPTED; the connection stays, for the handshake
                                           comes when the process goes on
    handshake after any of these           GREETED

A look tells what its own dial shows. If that is nothing, the dial may have got lost: a watch
that is UP answers for it, but only `watch_interval` + `watch_timeout` after the look began, when
a peer that was gone by then would have ended it; and one `watch_interval` on, as ZeroMQ's thread
may come to end it, and to say so, a little late.

A connection to a process that stands still must not be dialled again and again, as each
dial fills its backlog: so a handshake has no time limit here. Its kernel answers TCP's
keepalives meanwhile; when the host is gone they end the connection.

Who ended it? ZeroMQ closes a watch whose heartbeats aren't answered; a process that ends
closes it from the other side, and tether.py tells which it was. In the second case its peer
comes under doubt (doubts.py), and until that ends somebody's accepting or greeting at its
address is told to nobody.

Bounds: as many watches as are asked for (three), one look at a peer, `MAX_LOOKS` at a time;
further ones stay unanswered. Only watches answer for looks, once each. Pauses grow up to
`watch_retry_limit`.
"""

from __future__ import annotations

import errno
import selectors
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import zmq

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.runtime.addresses import parse
from tensorhub_p2p.runtime.doubts import Doubts
from tensorhub_p2p.runtime.looking import Looker, Seen, Sight
from tensorhub_p2p.runtime.monitor import Monitor, SocketEvent
from tensorhub_p2p.runtime.outgoing import NEVER_MS, drain, limit_socket
from tensorhub_p2p.runtime.routes import Destination, Routes
from tensorhub_p2p.runtime.security import secure
from tensorhub_p2p.runtime.tether import Tether

MAX_LOOKS = 64
"""Silent peers whose sockets are looked at at a time."""

FIRST_PAUSE = 0.25
"""Seconds until a watch that failed is tried again, at first."""

_MAX_BYTES = 1024
"""Larger frames end a watch: only handshakes and heartbeats are expected."""
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
"""While there is no handshake, and so no heartbeat. In seconds."""


class State(Enum):
    RESTING = auto()
    LOOKING = auto()
    DIALLING = auto()
    GREETING = auto()
    UP = auto()


@dataclass
class Watch:
    """The standing connection to one peer, at one of its addresses."""

    peer: PeerId
    destination: Destination
    address: str
    state: State = State.RESTING
    since: float = 0.0
    """When it came to be GREETING."""
    retry_at: float = float("-inf")
    pause: float = FIRST_PAUSE
    was_up_at: str = ""
    """Where it was UP last."""
    troubled: bool = False
    """Something else than life was told of it, and nothing since."""
    stands_still: bool = False
    """ACCEPTED was found: the connection is kept without a handshake."""
    tether: Tether | None = None


class Watching:
    """All watches and looks of one peer. Used on one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: WireConfig,
        keys: tuple[bytes, bytes] | None,
        counters: Counter[str],
        routes: Routes,
        doubts: Doubts,
        on_evidence: Callable[[PeerId, Evidence], None],
    ) -> None:
        self._config = config
        self._counters = counters
        self._routes = routes
        self._doubts = doubts
        self._on_evidence = on_evidence
        self._wanted: dict[PeerId, Destination] = {}
        self._watches: dict[PeerId, Watch] = {}
        self._renewals: Looker[PeerId] = Looker(MAX_LOOKS)
        self._looks: Looker[PeerId] = Looker(MAX_LOOKS)
        self._looked_at: dict[PeerId, tuple[Destination, str, float]] = {}
        """Where, and since when."""
        self._unanswered: dict[PeerId, float] = {}
        """Looks that came to nothing: when the watch, if it still stands, answers for them."""
        self._socket = _watching_socket(context, config, keys)
        self._monitor = Monitor(context, self._socket)

    def __contains__(self, peer: PeerId) -> bool:
        """Whether this peer is watched."""
        return peer in self._watches

    def is_up(self, peer: PeerId) -> bool:
        """Whether its heartbeats are answered (as far as is known)."""
        watch = self._watches.get(peer)
        return watch is not None and watch.state is State.UP

    # --- what to watch ---------------------------------------------------------------

    def watch(self, peers: Mapping[PeerId, Destination]) -> None:
        """Watch exactly these from the next `service` on."""
        self._wanted = dict(peers)

    def look(self, peer: PeerId, destination: Destination, now: float) -> None:
        """Tell soon what this peer's sockets show now: REFUSED, ACCEPTED, GREETED or nothing.

        Raises AddressError.
        """
        address = self._routes.find(destination, now).current
        if address is None or peer in self._looks or peer in self._looked_at:
            return
        limit = self._config.look_timeout
        if self._looks.look(peer, parse(address), now, connect=limit, greeting=limit):
            self._looked_at[peer] = (destination, address, now)
        else:
            self._counters["looks not taken: too many at once"] += 1

    # --- driving ---------------------------------------------------------------------

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake the caller when `service` is due."""
        selector.register(self._monitor.fileno(), selectors.EVENT_READ)
        selector.register(int(self._socket.getsockopt(zmq.FD)), selectors.EVENT_READ)
        self._renewals.attach(selector)
        self._looks.attach(selector)

    def service(self, now: float) -> None:
        """Take note of what happened, and go on; tells `on_evidence`."""
        for event in self._monitor.read():
            self._happened(event, now)
        for sight in self._renewals.sights(now):
            self._renewed(sight, now)
        for sight in self._looks.sights(now):
            self._looked(sight)
        self._tell_of_standing(now)
        if dropped := drain(self._socket, self._config.receive_batch):
            self._counters["dropped: came back on a watch"] += dropped
        self._assign(now)
        for watch in self._watches.values():
            self._go_on(watch, now)

    def next_wakeup(self) -> float | None:
        """When `service` should be called next, if nothing happens before."""
        times = [self._renewals.next_wakeup(), self._looks.next_wakeup()]
        times += self._unanswered.values()
        for watch in self._watches.values():
            if watch.state is State.RESTING:
                times.append(watch.retry_at)
            elif self._may_stand_still(watch):
                times.append(watch.since + self._config.look_timeout)
        return earliest(*times)

    def close(self) -> None:
        """End all watches and looks."""
        self._looks.close()
        self._renewals.close()
        for watch in self._watches.values():
            self._hang_up(watch)
        self._watches.clear()
        self._monitor.close()
        self._socket.close(linger=0)

    # --- the steps of a watch --------------------------------------------------------

    def _assign(self, now: float) -> None:
        """End the watches that aren't wanted (there) any more, and begin new ones."""
        for peer, watch in list(self._watches.items()):
            if self._wanted.get(peer) != watch.destination:
                self._hang_up(watch)
                self._renewals.cancel(peer)
                del self._watches[peer]
            elif watch.state is State.RESTING:
                watch.address = self._routes.find(watch.destination, now).current or watch.address
        taken = {watch.address for watch in self._watches.values()}
        for peer, destination in self._wanted.items():
            address = self._routes.find(destination, now).current
            # Of two at one address one is gone, which the connection of the other shows.
            if peer not in self._watches and address is not None and address not in taken:
                self._watches[peer] = Watch(peer, destination, address)
                taken.add(address)

    def _go_on(self, watch: Watch, now: float) -> None:
        """What is due without anything having happened."""
        if watch.state is State.RESTING and now >= watch.retry_at:
            self._look_again(watch, now)
        elif self._may_stand_still(watch) and now >= watch.since + self._config.look_timeout:
            self._stands_still(watch)

    def _look_again(self, watch: Watch, now: float) -> None:
        config = self._config
        watch.state = State.LOOKING
        if not self._renewals.look(
            watch.peer,
            parse(watch.address),
            now,
            connect=config.watch_connect_timeout,
            greeting=config.look_timeout,
        ):
            self._rest(watch, now)

    def _renewed(self, sight: Sight[PeerId], now: float) -> None:
        watch = self._watches.get(sight.key)
        if watch is None or watch.state is not State.LOOKING:
            return
        if sight.seen in (Seen.GREETED, Seen.ACCEPTED):
            self._connect(watch, now)
            if sight.seen is Seen.ACCEPTED:
                self._stands_still(watch)
            return
        if sight.seen is Seen.REFUSED and self._is_proof(watch):
            self._trouble(watch, Evidence.REFUSED)
        elif sight.seen is Seen.UNREACHABLE and watch.was_up_at:
            self._trouble(watch, Evidence.UNREACHABLE)
        self._rest(watch, now)

    def _is_proof(self, watch: Watch) -> bool:
        proof = self._routes.is_proof(watch.destination, watch.address)
        return proof or watch.was_up_at == watch.address

    def _connect(self, watch: Watch, now: float) -> None:
        watch.state = State.DIALLING
        self._socket.setsockopt(zmq.IPV6, 1 if watch.address.startswith("[") else 0)
        try:
            self._socket.connect(f"tcp://{watch.address}")
        except zmq.ZMQError:  # no descriptor left, or the like: try again
            self._rest(watch, now)

    def _happened(self, event: SocketEvent, now: float) -> None:
        watch = next((w for w in self._watches.values() if w.address == event.address), None)
        if watch is None:
            return
        if event.kind == zmq.EVENT_CONNECTED and watch.state is State.DIALLING:
            watch.state = State.GREETING
            watch.since = now
            watch.tether = Tether.to(event.value)
        elif event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED and watch.state is State.GREETING:
            self._is_up(watch)
        elif event.kind == zmq.EVENT_CONNECT_RETRIED and watch.state is State.DIALLING:
            self._hang_up(watch)
            self._rest(watch, now)
        elif event.kind == zmq.EVENT_DISCONNECTED:
            self._ended(watch, now)

    def _is_up(self, watch: Watch) -> None:
        watch.state = State.UP
        watch.was_up_at = watch.address
        watch.stands_still = False
        watch.pause = FIRST_PAUSE
        self._routes.worked(watch.address)
        self._doubts.greeted(watch.peer)
        if watch.troubled and watch.peer not in self._doubts:
            watch.troubled = False
            self._on_evidence(watch.peer, Evidence.GREETED)

    def _may_stand_still(self, watch: Watch) -> bool:
        """Connected, and no handshake yet."""
        return watch.state is State.GREETING and not watch.stands_still

    def _stands_still(self, watch: Watch) -> None:
        watch.stands_still = True
        if watch.peer not in self._doubts:
            self._trouble(watch, Evidence.ACCEPTED)

    def _ended(self, watch: Watch, now: float) -> None:
        """The connection is gone, by whichever side."""
        if watch.state not in (State.GREETING, State.UP):
            return
        stood = watch.state is State.UP or watch.stands_still
        closed = watch.tether is None or watch.tether.closed_by_peer
        self._hang_up(watch)
        if not stood:
            self._rest(watch, now)  # it refuses the handshake
            return
        if closed:
            self._doubts.closed(watch.peer)
        self._trouble(watch, Evidence.DISCONNECTED)
        self._look_again(watch, now)

    def _trouble(self, watch: Watch, evidence: Evidence) -> None:
        watch.troubled = True
        self._on_evidence(watch.peer, evidence)

    def _rest(self, watch: Watch, now: float) -> None:
        """Nothing came of it: try again later, where there is a choice at another address."""
        watch.state = State.RESTING
        watch.stands_still = False
        watch.retry_at = now + watch.pause
        watch.pause = min(2 * watch.pause, self._config.watch_retry_limit)
        self._routes.failed(watch.address, now)

    def _hang_up(self, watch: Watch) -> None:
        """Close the connection, if there is one."""
        if watch.tether is not None:
            watch.tether.cut()
            watch.tether = None
        if watch.state not in (State.DIALLING, State.GREETING, State.UP):
            return
        watch.state = State.RESTING
        watch.stands_still = False
        try:
            self._socket.disconnect(f"tcp://{watch.address}")
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # ZeroMQ dropped it itself: a protocol error
                raise

    # --- looks -----------------------------------------------------------------------

    def _looked(self, sight: Sight[PeerId]) -> None:
        peer = sight.key
        destination, address, began = self._looked_at.pop(peer)
        if sight.seen is Seen.REFUSED:
            if self._routes.is_proof(destination, address):
                self._on_evidence(peer, Evidence.REFUSED)
        elif sight.seen is Seen.ACCEPTED:
            self._tell_life(peer, Evidence.ACCEPTED)
        elif sight.seen is Seen.GREETED:
            self._doubts.greeted(peer)
            self._tell_life(peer, Evidence.GREETED)
        elif self.is_up(peer):  # perhaps just the look got lost
            limit = 2 * self._config.watch_interval + self._config.watch_timeout
            # The first such look counts: others that follow fast would put it off for ever.
            self._unanswered.setdefault(peer, began + limit)

    def _tell_of_standing(self, now: float) -> None:
        """A watch that stands by now had its heartbeats answered after the look began."""
        for peer in [peer for peer, due in self._unanswered.items() if now >= due]:
            del self._unanswered[peer]
            if self.is_up(peer):
                self._tell_life(peer, Evidence.GREETED)

    def _tell_life(self, peer: PeerId, evidence: Evidence) -> None:
        if peer not in self._doubts:
            self._on_evidence(peer, evidence)


def _watching_socket(
    context: zmq.Context[zmq.Socket[bytes]], config: WireConfig, keys: tuple[bytes, bytes] | None
) -> zmq.Socket[bytes]:
    watching: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    limit_socket(watching, config)
    watching.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
    watching.setsockopt(zmq.RCVHWM, 1)
    watching.setsockopt(zmq.HANDSHAKE_IVL, 0)
    watching.setsockopt(zmq.HEARTBEAT_IVL, int(config.watch_interval * 1000))
    watching.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(config.watch_timeout * 1000))
    watching.setsockopt(zmq.CONNECT_TIMEOUT, int(config.watch_connect_timeout * 1000))
    watching.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    for option, value in _KEEPALIVE.items():
        watching.setsockopt(option, value)
    secure(watching, keys, server=False)
    return watching
