"""What connections would show: the evidence that a driver draws from its sockets.

Rules of this file. It models ZeroMQ over TCP, as the runtime was measured to see it, and
tells machines by their `evidence(now, peer, Evidence)`. It changes nothing and delays
nothing, and draws from a random generator of its own. Machines without `evidence` are never
told anything.

Theory of operation. What one host's sockets meet at another:

    ANSWERS   it runs: a dial is greeted
    HOLDS     its Python stands still: a dial is greeted, but nobody says who he is
    STOPPED   it (or who lives there now) is paused: a dial is accepted, and not greeted
    REFUSES   the process is gone
    FOREIGN   somebody else lives at its address now, and greets
    SILENT    the host is down, or a partition or clog lies in either direction

A *look* (the machine emitted `Look`) is one fresh dial. It takes a round trip, and
`syn_retry` more for each SYN that the link loses; what comes after `look_limit` never
comes. REFUSED comes at once, GREETED after the handshake's round trips, ACCEPTED at
`look_limit`. If nothing comes, a watch that still stands `heartbeat_interval +
heartbeat_timeout` after the look began greets for it.

A *watch* (the machine's `watched()`) is a standing connection:

    STANDING ──the process dies──▶ DISCONNECTED, after the latency of the way
             ──no heartbeat for heartbeat_interval + heartbeat_timeout──▶ DISCONNECTED
    then it is dialled anew, at once:
             ──▶ REFUSED, after a round trip, and again every `redial_interval`
             ──▶ ACCEPTED after `look_limit`, and GREETED once it is
             ──▶ UNREACHABLE every `unreachable_after` of dials without an answer
             ──▶ GREETED: standing again
    A watch that is new tells neither UNREACHABLE nor GREETED: nothing was lost.

Doubt. Where the other side ended the connection its process is mostly gone, and somebody
else may live there soon: from then on neither ACCEPTED nor GREETED is told, until the peer
itself runs and says who it is. Other disconnects raise no doubt: who greets then is taken
for the peer, stalled or a stranger.

Watches that stand cost nothing and are not even listed: `watched()` is asked when a fault
begins or ends, and when the members of a peer change while there are faults. Only watches
that a fault concerns are objects here, and each has one plan for what it shows next.

Lost messages lose no heartbeats: TCP sends them again. A stalled watcher's evidence waits
for it with its messages. A paused watcher's sockets stand still too: after a pause longer than
the heartbeats allow, all its watches have ended.

Bounds: one watch for each peer that a machine watches and that a fault concerns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Protocol

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.sim.host import Host, State
from tensorhub_p2p.sim.link import Links
from tensorhub_p2p.sim.weather import Weather


class Surroundings(Protocol):
    """What the sockets see of the network that they are in (network.py)."""

    @property
    def now(self) -> float: ...
    @property
    def weather(self) -> Weather: ...
    @property
    def link_table(self) -> Links: ...
    def host(self, peer_id: PeerId) -> Host: ...
    def find(self, peer_id: PeerId) -> Host | None: ...
    def hosts(self) -> Sequence[Host]: ...
    def listener(self, address: str) -> PeerId | None: ...
    def at(self, time: float, action: Callable[[], None]) -> None: ...
    def tell(self, peer_id: PeerId, about: PeerId, evidence: Evidence) -> None: ...


@dataclass(frozen=True)
class SocketModel:
    """How the driver's sockets are set. All in seconds."""

    heartbeat_interval: float = 0.25
    heartbeat_timeout: float = 1.0
    look_limit: float = 0.4
    """What a dial shows later than this, a look doesn't show; nor does it take an accepted
    connection for a paused process any earlier."""
    syn_retry: float = 1.0
    """By which a lost SYN delays a dial."""
    greeting_round_trips: int = 2
    """Of ZMTP's handshake, after TCP's."""
    unreachable_after: float = 2.0
    """Of dials without an answer."""
    redial_interval: float = 2.0
    """Between two dials of one that refuses."""

    @property
    def heartbeat_limit(self) -> float:
        """The longest silence that a standing connection survives."""
        return self.heartbeat_interval + self.heartbeat_timeout


class View(Enum):
    """What a host's sockets meet at another: see the table above."""

    ANSWERS = auto()
    HOLDS = auto()
    STOPPED = auto()
    REFUSES = auto()
    FOREIGN = auto()
    SILENT = auto()


GREETS = frozenset({View.ANSWERS, View.HOLDS, View.FOREIGN})
"""Somebody shakes hands."""
ENDED = frozenset({View.REFUSES, View.FOREIGN})
"""The process that the connection was made to is gone, and its kernel said so."""
HEARTLESS = frozenset({View.STOPPED, View.SILENT})
"""Heartbeats stay unanswered."""


@dataclass(eq=False)
class Watch:
    """A standing connection that a fault concerns."""

    watcher: Host
    target: Host
    view: View
    standing: bool
    """Not ended yet, as far as the watcher's sockets know."""
    was_up: bool
    """It stood once: only then can it be lost."""
    silent_since: float | None = None
    """When the heartbeats' answers stopped, while it stands."""
    dialled_at: float = 0.0
    """When dials without an answer began."""
    plan: int = 0
    """The number of the plan in force; older ones are void."""
    doubted: bool = False
    """The other side ended it."""
    troubled: bool = False
    """Something else than life was told of it, and nothing since."""
    waits: bool = False
    """Its plan came up while the watcher was paused."""


@dataclass
class Sockets:
    """The connections of all hosts of one network."""

    network: Surroundings
    model: SocketModel
    rng: random.Random
    _watches: dict[PeerId, dict[PeerId, Watch]] = field(default_factory=dict)
    """By watcher and watched peer."""
    _ill: dict[PeerId, None] = field(default_factory=dict)
    """Hosts that aren't running."""

    # -- what the network reports --

    def host_changed(self, host: Host, before: State, lasted: float) -> None:
        """It came into another state, having been in the one `before` for so long."""
        if host.state is State.RUNNING:
            self._ill.pop(host.peer_id, None)
        else:
            self._ill[host.peer_id] = None
        if host.is_gone:
            self._watches.pop(host.peer_id, None)
        for concerned in (host, *self._former(host)):
            self._all_look_again(concerned)
        if before is State.PAUSED and not host.is_gone:
            self._woke(host, lasted)

    def host_started(self, host: Host) -> None:
        """Where it listens now, somebody who is gone may have listened before."""
        for gone in self._former(host):
            self._all_look_again(gone)

    def _former(self, host: Host) -> list[Host]:
        """Those that are gone and listened where this one does."""
        ill = [self.network.host(peer) for peer in self._ill if peer != host.peer_id]
        return [h for h in ill if h.is_gone and h.addresses[:1] == host.addresses[:1]]

    def weather_changed(self) -> None:
        """A partition or clog began or ended."""
        for watcher in self._watchers():
            for peer in dict.fromkeys((*self._watched(watcher), *self._known(watcher))):
                self._look_again(watcher, peer, standing=True)

    def members_changed(self, host: Host) -> None:
        """It may watch others than before: those that are ill it finds so at once."""
        if not self._ill and not self.network.weather:
            return
        watched = self._watched(host)
        for watch in list(self._watches.get(host.peer_id, {}).values()):
            if watch.target.peer_id not in watched:
                self._drop(watch)
        for peer in watched:
            if peer not in self._watches.get(host.peer_id, {}):
                self._look_again(host, peer, standing=False)

    def _all_look_again(self, host: Host) -> None:
        for watcher in self._watchers():
            watches = self._watches.get(watcher.peer_id, {})
            if host.peer_id in watches or host.peer_id in self._watched(watcher):
                self._look_again(watcher, host.peer_id, standing=True)

    def _watchers(self) -> list[Host]:
        return [h for h in self.network.hosts() if h.watched is not None and not h.is_gone]

    def _watched(self, host: Host) -> tuple[PeerId, ...]:
        return tuple(host.watched()) if host.watched is not None else ()

    def _known(self, host: Host) -> tuple[PeerId, ...]:
        return tuple(self._watches.get(host.peer_id, ()))

    # -- what one host's sockets meet at another --

    def view(self, watcher: Host, target: Host) -> View:
        """What a dial, or a heartbeat, would meet now."""
        weather = self.network.weather
        if target.state is State.DOWN:
            return View.SILENT
        if weather.cuts(watcher, target) or weather.cuts(target, watcher):
            return View.SILENT
        if target.state is State.CRASHED:
            return self._view_of_address(target)
        if target.state is State.PAUSED:
            return View.STOPPED
        return View.HOLDS if target.state is State.STALLED else View.ANSWERS

    def _view_of_address(self, gone: Host) -> View:
        """Of one whose process is gone: does anybody else live where it did?"""
        for address in gone.addresses[:1]:
            other = self.network.listener(address)
            if other is not None:
                paused = self.network.host(other).state is State.PAUSED
                return View.STOPPED if paused else View.FOREIGN
        return View.REFUSES

    def _way(self, sender: Host, to: Host) -> float:
        """Seconds one way."""
        link = self.network.link_table.between(sender.peer_id, sender.zone, to.peer_id, to.zone)
        return link.delay.draw(self.rng)

    def _round_trip(self, one: Host, other: Host) -> float:
        return self._way(one, other) + self._way(other, one)

    def _lost_syns(self, one: Host, other: Host) -> int:
        """How many SYNs, or their answers, get lost before one gets through."""
        table = self.network.link_table
        there = table.between(one.peer_id, one.zone, other.peer_id, other.zone).loss
        back = table.between(other.peer_id, other.zone, one.peer_id, one.zone).loss
        lost = 0
        while lost < 8 and self.rng.random() >= (1 - there) * (1 - back):
            lost += 1
        return lost

    # -- looks --

    def look(self, host: Host, peer: PeerId) -> None:
        """The machine wants to know what this peer's sockets show now."""
        target = self.network.find(peer)
        if target is None or host.take_evidence is None:
            return
        trip = self._round_trip(host, target) + self.model.syn_retry * self._lost_syns(host, target)
        began = self.network.now
        if trip < self.model.look_limit:
            self._later(trip, partial(self._connected, host, target, began))
        else:
            self._unanswered(host, target, began)

    def _connected(self, host: Host, target: Host, began: float) -> None:
        """A look's SYN should have its answer by now."""
        view, left = self.view(host, target), began + self.model.look_limit - self.network.now
        greeted = self.model.greeting_round_trips * self._round_trip(host, target)
        if view is View.REFUSES:
            self._tell(host, target, Evidence.REFUSED)
        elif view is View.STOPPED:
            self._later(left, partial(self._waited, host, target))
        elif view in GREETS and greeted <= left:
            self._later(greeted, partial(self._waited, host, target))
        else:
            self._unanswered(host, target, began)

    def _waited(self, host: Host, target: Host) -> None:
        """A look was accepted, and either greeted by now or not."""
        view = self.view(host, target)
        if view is View.STOPPED:
            self._tell_life(host, target, Evidence.ACCEPTED)
        elif view in GREETS:
            self._tell_life(host, target, Evidence.GREETED)

    def _unanswered(self, host: Host, target: Host, began: float) -> None:
        """A look will show nothing, but perhaps only the dial got lost: the watch may tell."""
        due = began + self.model.heartbeat_limit
        self._later(due - self.network.now, partial(self._stands, host, target))

    def _stands(self, host: Host, target: Host) -> None:
        """A watch that was lost before the look began would have ended by now."""
        watch = self._watch(host, target)
        if target.peer_id in self._watched(host) and (watch is None or watch.standing):
            self._tell_life(host, target, Evidence.GREETED)

    def _tell_life(self, host: Host, target: Host, evidence: Evidence) -> None:
        """Somebody is there: who, if there is a doubt?"""
        watch = self._watch(host, target)
        doubted = watch is not None and watch.doubted
        if not doubted or self.view(host, target) is View.ANSWERS:
            self._tell(host, target, evidence)

    def _watch(self, host: Host, target: Host) -> Watch | None:
        return self._watches.get(host.peer_id, {}).get(target.peer_id)

    # -- watches --

    def _look_again(self, watcher: Host, peer: PeerId, *, standing: bool) -> None:
        """What a watch meets may have changed. `standing`: it stood until now, if it's new."""
        target = self.network.find(peer)
        if target is None or target is watcher:
            return
        view = self.view(watcher, target)
        watches = self._watches.setdefault(watcher.peer_id, {})
        watch = watches.get(peer)
        if watch is None:
            if view in (View.ANSWERS, View.HOLDS):
                return
            watch = watches[peer] = Watch(watcher, target, View.ANSWERS, standing, standing)
            watch.dialled_at = self.network.now
        if view is not watch.view:
            before, watch.view = watch.view, view
            self._change(watch, before)

    def _change(self, watch: Watch, before: View) -> None:
        now = self.network.now
        if watch.view in HEARTLESS and before not in HEARTLESS:
            watch.silent_since = now
        elif watch.view not in HEARTLESS:
            watch.silent_since = None
        if watch.standing and watch.doubted:
            self._end(watch)
        elif watch.standing:
            self._plan_end(watch)
        else:
            watch.dialled_at = now
            self._plan_dial(watch, resends=before is View.SILENT)

    def _plan_end(self, watch: Watch) -> None:
        """It stands: will it, and when?"""
        if watch.view in ENDED:
            watch.doubted = True
            self._plan(watch, self._way(watch.target, watch.watcher), partial(self._end, watch))
        elif watch.silent_since is not None:
            since_beat = self.rng.random() * self.model.heartbeat_interval
            ends = watch.silent_since + self.model.heartbeat_limit - since_beat
            self._plan(watch, max(0.0, ends - self.network.now), partial(self._end, watch))
        else:
            self._drop(watch)

    def _end(self, watch: Watch) -> None:
        """It is lost, and dialled anew."""
        watch.standing = False
        watch.silent_since = None
        watch.dialled_at = self.network.now
        self._trouble(watch, Evidence.DISCONNECTED)
        self._plan_dial(watch)

    def _plan_dial(self, watch: Watch, *, resends: bool = False) -> None:
        """What will the dial that is under way show? `resends`: only its next SYN may arrive."""
        model, watcher, target = self.model, watch.watcher, watch.target
        unreachable = watch.dialled_at + model.unreachable_after - self.network.now
        trip = self._round_trip(watcher, target)
        trip += model.syn_retry * self._lost_syns(watcher, target)
        trip += model.syn_retry * self.rng.random() if resends else 0.0
        if watch.view is View.SILENT or trip > unreachable:
            self._plan(watch, max(0.0, unreachable), partial(self._unreached, watch))
        elif watch.view is View.REFUSES:
            self._plan(watch, trip, partial(self._refused, watch))
        elif watch.view is View.STOPPED:
            self._plan(watch, trip + model.look_limit, partial(self._accepted, watch))
        else:
            trip += model.greeting_round_trips * self._round_trip(watcher, target)
            self._plan(watch, trip, partial(self._greets, watch))

    def _unreached(self, watch: Watch) -> None:
        watch.dialled_at = self.network.now
        if watch.was_up:
            self._trouble(watch, Evidence.UNREACHABLE)
        self._plan_dial(watch)

    def _refused(self, watch: Watch) -> None:
        self._trouble(watch, Evidence.REFUSED)
        self._plan(watch, self.model.redial_interval, partial(self._refused, watch))

    def _accepted(self, watch: Watch) -> None:
        """The connection stays open and waits for its greeting."""
        if not watch.doubted:
            self._trouble(watch, Evidence.ACCEPTED)

    def _greets(self, watch: Watch) -> None:
        """Somebody shakes hands: the watch stands again, if there is no doubt."""
        if watch.view is View.ANSWERS:
            self._drop(watch)
        elif watch.doubted:
            return
        watch.standing = watch.was_up = True
        if watch.troubled:
            watch.troubled = False
            self._tell(watch.watcher, watch.target, Evidence.GREETED)

    def _trouble(self, watch: Watch, evidence: Evidence) -> None:
        """Tell something else than life."""
        watch.troubled = True
        self._tell(watch.watcher, watch.target, evidence)

    def _woke(self, host: Host, slept: float) -> None:
        """A pause is over. Both ends have given up what was silent for longer than allowed."""
        if slept > self.model.heartbeat_limit:
            for peer in self._watched(host):
                target = self.network.find(peer)
                watches = self._watches.setdefault(host.peer_id, {})
                if target is not None and target is not host and peer not in watches:
                    watches[peer] = Watch(host, target, self.view(host, target), True, True)
        for watch in list(self._watches.get(host.peer_id, {}).values()):
            if watch.standing and slept > self.model.heartbeat_limit:
                watch.doubted = watch.view in ENDED
                self._plan(watch, 0.0, partial(self._end, watch))
            elif watch.waits and watch.standing:
                self._plan_end(watch)
            elif watch.waits:
                self._plan_dial(watch)

    # -- plans --

    def _plan(self, watch: Watch, delay: float, step: Callable[[], None]) -> None:
        """This is what the watch does next, unless something changes before."""
        watch.plan += 1
        watch.waits = False
        number = watch.plan

        def due() -> None:
            if number != watch.plan:
                return
            if watch.target.peer_id not in self._watched(watch.watcher):
                self._drop(watch)
            elif watch.watcher.state is State.PAUSED:
                watch.waits = True
            else:
                step()

        self._later(delay, due)

    def _drop(self, watch: Watch) -> None:
        watch.plan += 1
        self._watches.get(watch.watcher.peer_id, {}).pop(watch.target.peer_id, None)

    def _later(self, delay: float, step: Callable[[], None]) -> None:
        self.network.at(self.network.now + delay, step)

    def _tell(self, host: Host, target: Host, evidence: Evidence) -> None:
        self.network.tell(host.peer_id, target.peer_id, evidence)
