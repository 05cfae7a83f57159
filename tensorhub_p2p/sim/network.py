"""A seeded network on a virtual clock, for any object with the machine's face.

Rules of this file. One thread, one heap, one random generator: the seed decides
everything, so a run can be repeated exactly, and `trace` proves that it was. (Machines
bring their own seeded generators, and must not iterate over sets of strings.) No machine
is looked into: messages leave through its outbox, are packed into an envelope and encoded,
and are decoded again before they are handed over, as on the real wire. Nothing here
decides what is right: checks live in checks.py and in the tests.

A message to a PeerId reaches that peer or nobody, never a successor at its address; one to
an address reaches whoever listens there.

Theory of operation. The heap holds, by time, messages on their way, wake-ups of machines
and actions that somebody planned (`at`). What a link does to a message is link.py's, which
rules of the weather apply to it weather.py's, what state a host is in host.py's table; what
connections would show of all that is sockets.py's, which is told of every change, and
costs nothing while there is none.

Who does not run. A machine that is crashed or down is gone, with what was under way to it.
A paused or stalled one does nothing; what arrives waits, and is handed over in order when it
wakes, before its next tick. A slow one handles what arrives one after the other, each when
its cost is paid. `restart` brings the same machine back, with its memory of the past;
`restart_anew` starts a new one, with a new PeerId, on the same computer.

Bounds: `BACKLOG` messages wait at a host that doesn't run or is slow, HELD in a clog; more
are dropped and counted. A machine that ticks for ever at one instant ends the run, and so
do messages that breed more and more messages.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from zlib import crc32

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
from tensorhub_p2p.protocol.membership.swim_events import Evidence, Look, MemberChanged
from tensorhub_p2p.protocol.messages import Message
from tensorhub_p2p.sim.collector import at_rest
from tensorhub_p2p.sim.host import ASLEEP, GONE, Arrival, Host, State
from tensorhub_p2p.sim.link import Link, Links, Queues
from tensorhub_p2p.sim.sockets import SocketModel, Sockets
from tensorhub_p2p.sim.weather import HELD, Effect, Rule, Side, Weather, peers

__all__ = ["Host", "Link", "SimNetwork", "State"]

CLUSTER = "sim"
SPIN_LIMIT = 10_000
"""Ticks of one machine at one instant before the run is ended as stuck."""
STORM, STORM_SHARE = 200_000, 100
"""More messages under way than this, and this for each peer, end the run as a storm."""
BACKLOG = 100_000
"""Messages that wait at one host that doesn't run, or is slow."""

Action = Callable[[], None]
Due = tuple[Host, bytes] | Host | Action
"""What falls due: a message at its addressee, a wake-up of a host, or an action."""
Successor = Callable[[Host], tuple[PeerId, Machine]]
"""Makes the peer that follows one that is gone, on the same computer."""


class SimNetwork:
    """Drives machines. Times are virtual seconds, starting at 0.

    `on_event(peer, event)` is called for each event that a machine emits; it may call
    that peer's machine, and `settle` after it called another one. `on_change(host, before)`
    is called when a host comes into another state, or is made slow or quick. With `sockets`,
    machines that have `watched` and `evidence` are told what their connections would show.
    """

    def __init__(
        self,
        seed: int,
        *,
        link: Link | None = None,
        on_event: Callable[[PeerId, Event], None] | None = None,
        on_change: Callable[[Host, State], None] | None = None,
        sockets: SocketModel | bool = False,
    ) -> None:
        self.now = 0.0
        self.on_event = on_event
        self.on_change = on_change
        self.link_table = Links(link or Link())
        self.weather = Weather()
        self.counters: Counter[str] = Counter()
        """sent, bytes, delivered, and drops by reason: lost, blocked, absent, garbage,
        oversized, overflow."""
        self.kinds: Counter[str] = Counter()
        """Bytes sent by kind of message."""
        self.ticking: PeerId | None = None
        """Whose tick it is that events come from now; None if they come from anything else."""
        self.trace = 0
        """A hash of all that machines were told so far, and when."""
        self.cut_until = -inf
        """When the last partition or clog ended."""
        self.largest = 0
        """Bytes of the largest message."""
        self._rng = random.Random(seed)
        self._hosts: dict[PeerId, Host] = {}
        self._address_book: dict[str, PeerId] = {}
        self._lines = Queues()
        """When limited bandwidth lets the next message out, by pair."""
        self._arrivals = Queues()
        """When the last message in order arrives, by pair."""
        self._queue: list[tuple[float, int, Due]] = []
        """(when, tie-breaker, what)."""
        self._order = count()
        self._sockets = _sockets(self, sockets, seed)

    # -- the cast --

    def add(
        self, peer_id: PeerId, addresses: Sequence[str], machine: Machine, zone: str = ""
    ) -> None:
        """Start a peer. An address that a crashed peer had may be used again."""
        self._start(Host(peer_id, tuple(addresses), machine, zone, since=self.now), None)

    def host(self, peer_id: PeerId) -> Host:
        """What is known of a peer, gone ones included; KeyError if there never was one."""
        return self._hosts[peer_id]

    def find(self, peer_id: PeerId) -> Host | None:
        """The same, or None."""
        return self._hosts.get(peer_id)

    def hosts(self) -> tuple[Host, ...]:
        """All of them, in the order in which they started, gone ones included."""
        return tuple(self._hosts.values())

    def listener(self, address: str) -> PeerId | None:
        """Who listens at an address."""
        return self._address_book.get(address)

    def running(self) -> tuple[PeerId, ...]:
        """Peers that are neither gone nor asleep."""
        return tuple(h.peer_id for h in self._hosts.values() if h.state is State.RUNNING)

    def crash(self, peer_id: PeerId, *, host: bool = False) -> None:
        """The process is gone at once, without a word; with `host`, its computer is too."""
        self._change(peer_id, State.DOWN if host else State.CRASHED)

    def restart(self, peer_id: PeerId) -> None:
        """A peer that was gone goes on as if nothing had happened, with all its memory."""
        host = self._hosts[peer_id]
        if not host.is_gone:
            raise ValueError(f"{peer_id} is {host.state.value}: it can't be restarted")
        host.backlog.clear()
        host.tick_queued = False
        self._change(peer_id, State.RUNNING)
        self._go_on(host)

    def restart_anew(self, peer_id: PeerId, successor: Successor) -> PeerId:
        """A new peer starts where a gone one was, without its memory; returns its name."""
        old = self._hosts[peer_id]
        if not old.is_gone:
            raise ValueError(f"{peer_id} is {old.state.value}: nobody can follow it yet")
        newcomer, machine = successor(old)
        if old.state is State.DOWN:
            self._change(peer_id, State.CRASHED)
        self._start(Host(newcomer, old.addresses, machine, old.zone, since=self.now), old)
        return newcomer

    def pause(self, peer_id: PeerId) -> None:
        """Stop the peer as SIGSTOP would: it notices nothing, and the network queues for it."""
        self._change(peer_id, State.PAUSED)

    def stall(self, peer_id: PeerId) -> None:
        """Its Python does nothing, as if the GIL were held; its sockets go on answering."""
        self._change(peer_id, State.STALLED)

    def resume(self, peer_id: PeerId) -> None:
        """Let it run again: it first receives what has piled up, then ticks."""
        host = self._hosts[peer_id]
        if host.is_gone:
            raise ValueError(f"{peer_id} is {host.state.value}: it can't be resumed")
        self._change(peer_id, State.RUNNING)
        backlog, host.backlog = host.backlog, deque()
        host.tick_queued = False
        for arrival in backlog:
            if arrival is not None:
                self._arrive(host, arrival)
        self._go_on(host)

    def slow(self, peer_id: PeerId, cost: float) -> None:
        """From now on each message and each tick takes it `cost` seconds; 0 ends that."""
        host = self._hosts[peer_id]
        host.cost = cost
        self._note_free(host)
        if self.on_change is not None:
            self.on_change(host, host.state)

    # -- the weather --

    @property
    def default_link(self) -> Link:
        """What lies between two peers, if the table of links says nothing else."""
        return self.link_table.default

    @default_link.setter
    def default_link(self, link: Link) -> None:
        self.link_table.default = link

    @property
    def links(self) -> dict[tuple[PeerId, PeerId], Link]:
        """Links of single pairs (from, to)."""
        return self.link_table.pairs

    def partition(
        self, one: Side | Iterable[PeerId], other: Side | Iterable[PeerId], *, one_way: bool = False
    ) -> Rule:
        """Block everything from `one` to `other` and, unless `one_way`, back."""
        return self.disturb(one, other, Effect(blocks=True), one_way=one_way)

    def clog(
        self, one: Side | Iterable[PeerId], other: Side | Iterable[PeerId], *, one_way: bool = False
    ) -> Rule:
        """Hold everything between the two until it is lifted; then it arrives in order."""
        return self.disturb(one, other, Effect(holds=True), one_way=one_way)

    def disturb(
        self,
        one: Side | Iterable[PeerId],
        other: Side | Iterable[PeerId],
        effect: Effect,
        *,
        one_way: bool = False,
    ) -> Rule:
        """Do this to all messages from `one` to `other` and, unless `one_way`, back."""
        one, other = (side if callable(side) else peers(side) for side in (one, other))
        rule = self.weather.lay(self._hosts.values(), one, other, effect, one_way=one_way)
        if effect.cuts and self._sockets is not None:
            self._sockets.weather_changed()
        return rule

    def lift(self, rule: Rule) -> None:
        """End one partition, clog or disturbance."""
        self.weather.lift(self._hosts.values(), rule)
        if rule.effect.cuts:
            self.cut_until = self.now
        held, rule.held = rule.held, []
        for sender, addressee, data in held:
            self._travel(sender, addressee, data, at_once=True)
        if rule.effect.cuts and self._sockets is not None:
            self._sockets.weather_changed()

    def heal(self) -> None:
        """Lift all partitions, clogs and disturbances."""
        for rule in self.weather.rules():
            self.lift(rule)

    # -- the clock --

    def at(self, time: float, action: Action) -> None:
        """Do something at this time, between two deliveries."""
        self._push(max(time, self.now), action)

    def run_for(self, seconds: float) -> None:
        """Advance the clock by `seconds`, doing everything that falls due."""
        self._run(self.now + seconds, None)

    def run_until(self, predicate: Callable[[], bool], limit: float, *, every: float = 0.0) -> bool:
        """Advance until `predicate()` holds, by `limit` seconds at most; whether it holds.

        It is asked after each step or, if it is dear, only `every` so many seconds.
        """
        end = self.now + limit
        if not every:
            return self._run(end, predicate)
        while not (holds := predicate()) and self.now < end:
            self._run(min(end, self.now + every), None)
        return holds

    def settle(self, peer_id: PeerId) -> None:
        """Take what the peer's machine has put out since; needed after calls from `on_event`."""
        host = self._hosts.get(peer_id)
        if host is not None:
            self._settle(host)

    def tell(self, peer_id: PeerId, about: PeerId, evidence: Evidence) -> None:
        """The peer's connections have noticed this; it learns of it once it runs."""
        host = self._hosts[peer_id]
        if host.take_evidence is not None:
            self._arrive(host, (about, evidence))

    # -- the loop --

    def _run(self, end: float, done: Callable[[], bool] | None) -> bool:
        with at_rest(len(self._hosts)):
            return self._loop(end, done)

    def _loop(self, end: float, done: Callable[[], bool] | None) -> bool:
        for host in list(self._hosts.values()):
            self._settle(host)
        queue = self._queue
        while done is None or not done():
            if not queue or queue[0][0] > end:
                self.now = end
                return done is not None and done()
            self.now, _, what = heapq.heappop(queue)
            if isinstance(what, tuple):
                self._arrive(*what)
            elif isinstance(what, Host):
                self._wake(what)
            else:
                what()
        return True

    def _push(self, time: float, what: Due) -> None:
        if len(self._queue) > STORM + STORM_SHARE * len(self._hosts):
            raise RuntimeError(f"a storm: {len(self._queue)} messages are under way at {self.now}")
        heapq.heappush(self._queue, (time, next(self._order), what))

    def _wake(self, host: Host) -> None:
        """An entry in the queue has come up: tick, if the machine still wants that now."""
        if host.wakeup != self.now:
            return
        host.wakeup = None
        if host.due is None:
            return
        if host.due > self.now:
            host.wakeup = host.due
            self._push(host.due, host)
        else:
            self._go_on(host)

    def _go_on(self, host: Host) -> None:
        """Tick now or, if the process is slow, in its turn."""
        if host.is_free:
            self._tick(host)
        elif host.state is State.RUNNING:
            self._enqueue(host, None)

    def _tick(self, host: Host) -> None:
        host.spins = host.spins + 1 if host.last_tick == self.now else 0
        host.last_tick = self.now
        if host.spins > SPIN_LIMIT:
            raise RuntimeError(
                f"{host.peer_id} wants to tick at {self.now} for ever: "
                f"its next_wakeup stays at {host.machine.next_wakeup()}"
            )
        self.ticking = host.peer_id
        host.machine.tick(self.now)
        self._settle(host)
        self.ticking = None

    def _settle(self, host: Host) -> None:
        """Route what the machine has put out, and note when it wants to be woken."""
        if host.state is not State.RUNNING:
            return
        machine = host.machine
        while items := machine.outbox.drain():
            for item in items:
                if isinstance(item, Send):
                    self._post(host, self._hosts.get(item.to), item.to, item.message)
                elif isinstance(item, SendTo):
                    there = self._hosts.get(self._address_book.get(item.address, NOBODY))
                    self._post(host, there, NOBODY, item.message)
                else:
                    self._handle_event(host, item)
        host.due = wakeup = machine.next_wakeup()
        if wakeup is not None and (host.wakeup is None or wakeup < host.wakeup):
            host.wakeup = max(wakeup, self.now)
            self._push(host.wakeup, host)

    def _handle_event(self, host: Host, event: Event) -> None:
        if self._sockets is not None:
            if isinstance(event, Look):
                self._sockets.look(host, event.peer)
            elif isinstance(event, MemberChanged):
                self._sockets.members_changed(host)
        if self.on_event is not None:
            self.on_event(host.peer_id, event)

    # -- messages --

    def _post(self, sender: Host, there: Host | None, to: PeerId, message: Message) -> None:
        """Encode, and put on its way. `there` is who listens, `to` who is meant."""
        kind, body = pack(message)
        data = encode(
            Envelope(
                WIRE_VERSION, CLUSTER, sender.zone, sender.peer_id, sender.reply_to, to, kind, body
            )
        )
        size = len(data)
        counters = self.counters
        counters["sent"] += 1
        counters["bytes"] += size
        self.kinds[kind] += size
        sender.sent += 1
        sender.sent_bytes += size
        if size > self.largest:
            self.largest = size
        if there is None:
            counters["absent"] += 1
        elif there is sender:
            self._push(self.now, (there, data))
        else:
            self._travel(sender, there, data)

    def _travel(self, sender: Host, to: Host, data: bytes, *, at_once: bool = False) -> None:
        """Lose a message, or let it arrive later; `at_once`: it was held for long enough."""
        rules = self.weather.between(sender, to) if sender.sends & to.hears else []
        link = self.link_table.between(sender.peer_id, sender.zone, to.peer_id, to.zone)
        delay = link.delay.draw(self._rng)
        is_lost = self._rng.random() < link.loss
        if rules and self._is_stopped(rules, sender, to, data):
            return
        if is_lost and not at_once:
            self.counters["lost"] += 1
        elif link.is_plain and not rules and not at_once:
            self._push(self.now + delay, (to, data))
        else:
            effects = [rule.effect for rule in rules]
            self._travel_roughly(sender, to, data, link, effects, at_once)

    def _is_stopped(self, rules: list[Rule], sender: Host, to: Host, data: bytes) -> bool:
        """Whether a partition or a clog is in the way; a clog keeps the message."""
        if any(rule.effect.blocks for rule in rules):
            self.counters["blocked"] += 1
            return True
        for rule in rules:
            if rule.effect.holds:
                if len(rule.held) < HELD:
                    rule.held.append((sender, to, data))
                else:
                    self.counters["overflow"] += 1
                return True
        return False

    def _travel_roughly(
        self,
        sender: Host,
        to: Host,
        data: bytes,
        link: Link,
        effects: list[Effect],
        at_once: bool,
    ) -> None:
        """The same over a link that does more than lose and delay, or in bad weather."""
        rng, pair, now = self._rng, (sender.peer_id, to.peer_id), self.now
        if len(data) > link.max_bytes:
            self.counters["oversized"] += 1
            return
        if not at_once and any(e.loss and rng.random() < e.loss for e in effects):
            self.counters["lost"] += 1
            return
        leaves = now
        if link.bandwidth < inf:
            leaves = self._lines.next_free(pair, now) + len(data) / link.bandwidth
            self._lines.occupy(pair, leaves, now)
        leaves += sum(effect.delay for effect in effects)
        copies = 1
        for chance in (link.duplicate, *(effect.duplicate for effect in effects)):
            copies += bool(chance) and rng.random() < chance
        for _ in range(copies):
            arrives = leaves + link.delay.draw(rng)
            if at_once or (link.reorder < 1 and rng.random() >= link.reorder):
                arrives = max(arrives, self._arrivals.next_free(pair, now))
                self._arrivals.occupy(pair, arrives, now)
            self._push(arrives, (to, data))

    def _arrive(self, host: Host, what: Arrival) -> None:
        if host.is_free:
            self._hand_over(host, what)
        elif host.is_gone:
            self.counters["absent"] += 1
        elif host.is_asleep:
            if len(host.backlog) < BACKLOG:
                host.backlog.append(what)
            else:
                self.counters["overflow"] += 1
        else:
            self._enqueue(host, what)

    def _hand_over(self, host: Host, what: Arrival) -> None:
        """The machine is told."""
        if not isinstance(what, bytes):
            about, evidence = what
            self._note(f"{host.peer_id} {about} {evidence.name}".encode())
            assert host.take_evidence is not None
            host.take_evidence(self.now, about, evidence)
            self._settle(host)
            return
        self._note(what)
        host.received += 1
        host.received_bytes += len(what)
        try:
            envelope = open_envelope(what)
            message = unpack(envelope)
        except Undecodable:
            self.counters["garbage"] += 1
            return
        self.counters["delivered"] += 1
        host.machine.receive(self.now, envelope.sender, message)
        self._settle(host)

    def _note(self, data: bytes) -> None:
        self.trace = crc32(data, self.trace ^ (int(self.now * 1e6) & 0xFFFFFFFF))

    # -- slow processes --

    def _enqueue(self, host: Host, what: Arrival | None) -> None:
        """A slow process comes to this (None: a tick) when it is done with what came before."""
        if what is None and host.tick_queued:
            return
        if len(host.backlog) >= BACKLOG:
            self.counters["overflow"] += 1
            return
        host.tick_queued = host.tick_queued or what is None
        host.backlog.append(what)
        self._work_on(host)

    def _work_on(self, host: Host) -> None:
        """Come to the next that waits when its cost is paid."""
        if host.backlog and not host.is_working:
            host.is_working = True
            self.at(self.now + host.cost, lambda: self._come_to_next(host))
        self._note_free(host)

    def _come_to_next(self, host: Host) -> None:
        host.is_working = False
        if host.state is State.RUNNING and host.backlog:
            what = host.backlog.popleft()
            if what is None:
                host.tick_queued = False
                self._tick(host)
            else:
                self._hand_over(host, what)
            self._work_on(host)

    def _note_free(self, host: Host) -> None:
        host.is_free = host.state is State.RUNNING and not host.cost and not host.is_working

    # -- changes --

    def _start(self, host: Host, predecessor: Host | None) -> None:
        self._hosts[host.peer_id] = host
        self._listen(host)
        self.weather.enrol(host, predecessor)
        if self._sockets is not None:
            self._sockets.host_started(host)
        self._settle(host)

    def _listen(self, host: Host) -> None:
        for address in host.addresses:
            self._address_book[address] = host.peer_id

    def _change(self, peer_id: PeerId, state: State) -> None:
        """Into another state, which those who watch its sockets may notice."""
        host = self._hosts[peer_id]
        if host.is_gone and state in ASLEEP:
            raise ValueError(f"{peer_id} is {host.state.value}: it can't be {state.value}")
        before, since = host.state, host.since
        host.state, host.since = state, self.now
        self._note_free(host)
        self._note(f"{peer_id} {state.value}".encode())
        if host.is_gone:
            host.wakeup = None
            for address in host.addresses:
                if self._address_book.get(address) == peer_id:
                    del self._address_book[address]
        elif before in GONE:
            self._listen(host)
        if self.on_change is not None:
            self.on_change(host, before)
        if self._sockets is not None:
            self._sockets.host_changed(host, before, self.now - since)


def _sockets(network: SimNetwork, wanted: SocketModel | bool, seed: int) -> Sockets | None:
    if wanted is False:
        return None
    model = SocketModel() if wanted is True else wanted
    return Sockets(network, model, random.Random(f"{seed}/sockets"))
