"""Bytes in a simulation: how long a read takes, what it sees, and one pull of one shard.

Rules of this file. What a pull decides is the real `Swarm`'s; here is what the engine
(transfer/engine.py) and the readers do with it, with tokens instead of bytes. The order of
steps is runtime/pulling.py's.

Theory of operation. A read of a chunk waits for its turn on the source's line, then sees
the chunk at its start and at its end: if the two differ it is torn. The puller takes a digest
of what came, as it does of bytes. What else a read may meet:

    the source      two-sided (tcp)               one-sided (cma, RDMA)
    RUNNING         reads                         reads
    STALLED         reads (its kernel sends on)   reads
    PAUSED          hangs                         reads
    CRASHED         is broken off                 is broken off
    DOWN, cut off   hangs                         hangs
    withdrawn       is refused, or broken off     refused; one that runs sees what comes
                    by the end of the drain

A read that hangs is given up after `source_timeout`. With probability `damage` a read comes
out wrong.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from tensorhub_p2p.errors import (
    IntegrityError,
    PeerClosed,
    TensorHubError,
    Timeout,
    VersionUnavailable,
)
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.messages import Endpoint, Message
from tensorhub_p2p.protocol.pulls.pull_events import (
    Carrying,
    ChunkHeld,
    ChunkRevoked,
    Completed,
    Corrupt,
    DigestsLearnt,
    Fetch,
    LayoutFound,
    SourceFound,
    SourceLost,
    Starved,
    TakeBack,
)
from tensorhub_p2p.protocol.pulls.sources import Candidate, Fault, SourceId
from tensorhub_p2p.protocol.pulls.swarm import Swarm
from tensorhub_p2p.protocol.shards.verbs import Answer, HoldersChanged
from tensorhub_p2p.sim.cluster.history import HandleId, ReadBegan
from tensorhub_p2p.sim.cluster.memory import (
    TRANSPORT,
    Export,
    Memory,
    Token,
    damaged,
    digest_of,
    torn,
)
from tensorhub_p2p.sim.cluster.tasks import Pending, Steps, start
from tensorhub_p2p.sim.host import State
from tensorhub_p2p.sim.network import SimNetwork

if TYPE_CHECKING:
    from tensorhub_p2p.sim.cluster.peer import SimPeer, VerbCall

ROUND_TRIP = 0.002
"""Seconds until a read's first byte, and until a refusal."""
SAME_ZONE, FAR = 2, 3
INCOMING: Token = "incoming"
"""A chunk that is being written by a read."""


@dataclass(frozen=True)
class Connected:
    source: SourceId


@dataclass(frozen=True)
class Landed:
    source: SourceId
    chunk: int
    token: Token


@dataclass(frozen=True)
class Failed:
    """A read, or with chunk -1 a connection, that came to nothing."""

    source: SourceId
    chunk: int
    fault: Fault


@dataclass(eq=False)
class Reading:
    """One read under way."""

    pull: SimPull
    source: SourceId
    export: int
    chunk: int
    asked: float
    seen: Token = ""
    over: bool = False
    """It was reported, or broken off."""


class Reads:
    """All reads of one simulation."""

    def __init__(
        self,
        network: SimNetwork,
        rng: random.Random,
        *,
        rate: float,
        one_sided: bool,
        damage: float,
        timeout: float,
    ) -> None:
        self.damage = damage
        self._network = network
        self._rng = rng
        self._rate = rate
        self._one_sided = one_sided
        self._timeout = timeout
        self._free_at: dict[PeerId, float] = {}
        """When a source's line has sent what it was asked for."""

    @property
    def one_sided(self) -> bool:
        return self._one_sided

    def connect(self, pull: SimPull, source: SourceId) -> None:
        """`Connected` or `Failed` is put into the pull."""
        fault = self._obstacle(pull, source)
        wait = self._timeout if fault is Fault.SILENT else ROUND_TRIP
        report = Connected(source) if fault is None else Failed(source, -1, Fault.UNREACHABLE)
        self._network.at(self._network.now + wait, lambda: pull.deliver(report))

    def read(
        self, pull: SimPull, source: SourceId, endpoints: tuple[Endpoint, ...], chunk: int
    ) -> None:
        """`Landed` or `Failed` is put into the pull, exactly once."""
        now, lasts = self._network.now, pull.memory.layout.chunk_range(chunk)[1] / self._rate
        begins = max(now, self._free_at.get(source.peer, now))
        self._free_at[source.peer] = begins + lasts
        reading = Reading(pull, source, int(endpoints[0].blob), chunk, now)
        pull.readings[source, chunk] = reading
        self._network.at(begins, lambda: self._begin(reading, lasts))

    def take_back(self, reading: Reading) -> None:
        """Break it off, unless it was reported; it writes nothing from here on."""
        if not reading.over:
            self._report(reading, Fault.GIVEN_UP)
            reading.over = True

    def _begin(self, reading: Reading, lasts: float) -> None:
        pull, source = reading.pull, reading.source
        if pull.over or reading.over or self._is_stopped(reading):
            return
        export = self._export(reading)
        if export is None or not export.admits(reading.chunk):
            self._report(reading, Fault.WITHDREW)
            return
        there = pull.holders.get(source, pull.publication)
        fact = ReadBegan(pull.handle.id, source.peer, source.slot, there, reading.chunk)
        pull.peer.world.history.note(fact)
        pull.memory.tokens[reading.chunk] = INCOMING
        reading.seen = export.memory.tokens[reading.chunk]
        export.reads += 1
        self._network.at(self._network.now + lasts + ROUND_TRIP, lambda: self._end(reading, export))

    def _end(self, reading: Reading, export: Export) -> None:
        export.reads -= 1
        if reading.pull.over or reading.over or self._is_stopped(reading):
            return
        if not export.open and not self._one_sided:
            self._report(reading, Fault.WITHDREW)
            return
        token = export.memory.tokens[reading.chunk]
        if token != reading.seen:
            token = torn(reading.seen, token)
        if self.damage and self._rng.random() < self.damage:
            token = damaged(token)
        reading.over = True
        reading.pull.deliver(Landed(reading.source, reading.chunk, token))

    def _is_stopped(self, reading: Reading) -> bool:
        """Something is in the way; the pull hears of it, at once or in time."""
        fault = self._obstacle(reading.pull, reading.source)
        if fault is not None:
            self._report(reading, fault)
        return fault is not None

    def _obstacle(self, pull: SimPull, source: SourceId) -> Fault | None:
        network = self._network
        there, here = network.find(source.peer), network.host(pull.peer.peer_id)
        if there is None or there.state is State.CRASHED:
            return Fault.GONE
        silent = there.state is State.DOWN
        silent = silent or (there.state is State.PAUSED and not self._one_sided)
        weather = network.weather
        if silent or weather.cuts(there, here) or weather.cuts(here, there):
            return Fault.SILENT
        return None

    def _report(self, reading: Reading, fault: Fault) -> None:
        report = Failed(reading.source, reading.chunk, fault)
        when = self._network.now + ROUND_TRIP
        if fault is Fault.SILENT:
            when = max(self._network.now, reading.asked + self._timeout)

        def deliver() -> None:
            if fault is Fault.GIVEN_UP or not reading.over:
                reading.over = True
                reading.pull.deliver(report)

        self._network.at(when, deliver)

    def _export(self, reading: Reading) -> Export | None:
        machine = self._network.host(reading.source.peer).machine
        exports: dict[int, Export] = getattr(machine, "exports", {})
        return exports.get(reading.export)


Item = object
"""(sender, message), HoldersChanged, a PeerId that is dead, Connected, Landed, Failed; READY: the
old version is given up; or None: the handle is being closed."""
READY = object()


class Puller(Protocol):
    """Whose memory a pull writes: a handle, or a copy that is kept for others."""

    @property
    def peer(self) -> SimPeer: ...
    @property
    def slot(self) -> Slot: ...
    @property
    def id(self) -> HandleId: ...
    @property
    def memory(self) -> Memory: ...

    def give_up_old(self, timeout: float) -> Steps[None]:
        """Before bytes change."""

    def keep_old(self) -> None:
        """The pull failed meanwhile: `give_up_old` is to end now, and keep it if that can be."""

    def tear(self) -> None:
        """Bytes change from here on."""

    def announce_part(self, answer: Answer, export: Export, timeout: float) -> VerbCall | None:
        """Tell others that it comes, if they may know."""


class SimPull:
    """One pull, from the group's answer to the last verified chunk. Use once."""

    def __init__(self, handle: Puller, answer: Answer, deadline: float) -> None:
        self.handle = handle
        self.peer: SimPeer = handle.peer
        self.memory = handle.memory
        self.publication = answer.publication
        self.export: Export | None = None
        """What others may read; None until bytes may change."""
        self.moved = 0
        self.moved_at = -inf
        """When the last of it came."""
        self.complete = False
        """All of it is in the tensors, and verified."""
        self.unavailable = False
        """It failed for a reason that does not pass."""
        self._answer = answer
        self._deadline = deadline
        self._name = f"{self.peer.peer_id}/{self.peer.world.number()}"
        self._swarm = Swarm(
            self._name,
            answer.publication,
            SourceId(self.peer.peer_id, handle.slot),
            handle.memory.layout,
            (TRANSPORT,),
            self.peer.config.pull,
            random.Random(self.peer.rng.getrandbits(64)),
            self._locality,
        )
        self._inbox: deque[Item] = deque()
        self._wake = Pending()
        self._timer_at = -inf
        """When the process's timer for this pull goes off next, if that is to come."""
        self._endpoints: dict[SourceId, tuple[Endpoint, ...]] = {}
        self.readings: dict[tuple[SourceId, int], Reading] = {}
        """By source and chunk: the last read."""
        self.holders: dict[SourceId, Publication] = {}
        """What the directory says they hold; others hold what is pulled."""
        self._found: list[SourceFound] = []
        self._laid_out = False
        self._prepared: Pending | None = None
        """The end of `give_up_old`, which runs beside the pull."""
        self._kept: TensorHubError | None = None
        """What kept the old version from being given up."""
        self._begun = False
        self.over = False
        """Nothing of it writes into the tensors any more."""
        self._wanted: dict[int, bytes] = {}
        """By chunk: the digest that it was last fetched for."""
        self._learnt: list[tuple[int, bytes]] = []
        self._announced: VerbCall | None = None
        self.untold: dict[int, bytes] = {}
        """Verified chunks of which the node is told once the whole is announced."""

    # --- what arrives ---

    def put(self, item: Item) -> None:
        """From inside the process."""
        self._inbox.append(item)
        self._wake.settle()

    def deliver(self, item: Connected | Landed | Failed) -> None:
        """From a reader of this pull: it goes on as soon as the process runs."""
        self.peer.post(lambda: self.put(item))

    # --- the pull ---

    def run(self) -> Steps[None]:
        """Pull. Raises VersionUnavailable, IntegrityError, Timeout, or what giving up raises."""
        peer, slot = self.peer, self.handle.slot
        peer.pulls[self._name] = self
        model, shard = slot.group.model, slot.shard
        sources = self._answer.sources
        follow = peer.node.follow(peer.now, model, shard, self.publication, sources)
        peer.follows[follow] = self
        peer.pump()
        try:
            while not self.over:
                yield from self._step()
        except TensorHubError as error:
            self.unavailable = isinstance(error, (VersionUnavailable, IntegrityError))
            if self._announced is not None:
                peer.node.interrupt(peer.now, slot, self._announced.number)
                peer.node.carries(peer.now, slot, self.publication, None)
            if self._is_preparing:
                self._stop()
                yield from self._keep_old()
            raise
        finally:
            self._stop()
            del peer.pulls[self._name], peer.follows[follow]
            peer.node.unfollow(peer.now, follow)
            peer.pump()
        if self._announced is not None:
            yield from self._settle_announcement(self._announced)

    def _step(self) -> Steps[None]:
        """Wait for something to happen, take it in, do what the swarm decided."""
        wakeup = self._swarm.next_wakeup()
        if not self._inbox:
            deadline = self._deadline if not self._is_preparing else inf
            yield self._woken(deadline if wakeup is None else min(wakeup, deadline))
        self._swarm.gather()
        while self._inbox and not self.over:
            yield from self._accept(self._inbox.popleft())
        now = self.peer.now
        self._swarm.act(now)
        if wakeup is not None and now >= wakeup:
            self._swarm.tick(now)
        if now >= self._deadline and not self._swarm.done and not self._is_preparing:
            raise Timeout(f"pulling {self.publication} timed out")
        for output in self._swarm.outbox.drain():
            if isinstance(output, Send):
                self.peer.outbox.send(output.to, output.message)
            elif isinstance(output, Event):
                self._on_event(output)

    def _woken(self, by: float) -> Pending:
        """Settled with the next item, or then; sometimes before, which does no harm."""
        self._wake = Pending()
        if not self.peer.now < self._timer_at <= by:
            self._timer_at = by
            if by < inf:
                self.peer.at(by, lambda: self._wake.settle())
        return self._wake

    def _accept(self, item: Item) -> Steps[None]:
        swarm, now = self._swarm, self.peer.now
        if item is None:
            raise PeerClosed(f"the handle was closed while it pulled {self.publication}")
        if isinstance(item, Landed):
            self._land(now, item)
        elif isinstance(item, Failed) and item.chunk < 0:
            swarm.unreachable(now, item.source, item.fault.value)
        elif isinstance(item, Failed):
            swarm.failed(now, item.source, item.chunk, item.fault)
        elif isinstance(item, Connected):
            self._prepare()
        elif item is READY:
            yield from self._begin()
        elif isinstance(item, HoldersChanged):
            self.holders |= {SourceId(h.peer, h.slot): h.publication for h in item.holders}
            swarm.candidates(
                now,
                [
                    Candidate(h.peer, h.slot, h.phase, self._locality(h.peer), h.publication)
                    for h in item.holders
                ],
                item.digests,
            )
        elif isinstance(item, tuple):
            sender, message = item
            assert isinstance(message, Message)
            swarm.receive(now, sender, message)
        else:
            assert isinstance(item, str)
            swarm.lost(now, PeerId(item))

    def _locality(self, peer: PeerId) -> int:
        info = self.peer.node.info_of(peer)
        return SAME_ZONE if info is not None and info.zone == self.peer.info.zone else FAR

    def _land(self, now: float, item: Landed) -> None:
        """The bytes are in place, whatever they are; only the digest says whether they count."""
        self.moved += 1
        self.moved_at = now
        self.memory.tokens[item.chunk] = item.token
        digest = digest_of(item.token)
        if digest == self._wanted[item.chunk]:
            self._swarm.fetched(now, item.source, item.chunk, digest)
        else:
            self._swarm.failed(now, item.source, item.chunk, Fault.MISMATCH)

    # --- what the swarm decided ---

    def _on_event(self, event: Event) -> None:
        node, slot, publication = self.peer.node, self.handle.slot, self.publication
        now = self.peer.now
        if isinstance(event, Fetch):
            self._wanted[event.chunk] = event.digest
            endpoints = self._endpoints[event.source]
            self.peer.world.reads.read(self, event.source, endpoints, event.chunk)
        elif isinstance(event, TakeBack):
            self.peer.world.reads.take_back(self.readings[event.source, event.chunk])
        elif isinstance(event, ChunkHeld):
            assert self.export is not None
            self.export.allowed.add(event.chunk)
            if self._announced is not None:
                held = (event.chunk, event.digest, event.known_to)
                node.verified(now, slot, publication, [held])
            else:
                self.untold[event.chunk] = event.digest
        elif isinstance(event, Carrying):
            if self._announced is not None:
                node.carries(now, slot, publication, event.chunks)
        elif isinstance(event, ChunkRevoked):
            assert self.export is not None
            self.export.allowed.discard(event.chunk)
            self.untold.pop(event.chunk, None)
            node.revoked(now, slot, publication, event.chunk)
        elif isinstance(event, DigestsLearnt):
            self._learnt += event.digests
            self._tell_digests()
        elif isinstance(event, LayoutFound):
            self._laid_out = True
            found, self._found = self._found, []
            for source in found:
                self._on_source(source)
        elif isinstance(event, SourceFound):
            self._on_source(event)
        elif isinstance(event, SourceLost):
            pass  # reads there are broken off, or hang and are given up
        elif isinstance(event, Completed):
            self.over = self.complete = True
        elif isinstance(event, Starved):
            raise VersionUnavailable(f"{publication} can't be had: chunks {event.chunks}")
        elif isinstance(event, Corrupt):
            raise IntegrityError(f"chunk {event.chunk} of {publication} is wrong everywhere")
        self.peer.pump()

    def _on_source(self, event: SourceFound) -> None:
        if not self._laid_out:
            self._found.append(event)
            return
        self._endpoints[event.source] = event.endpoints
        if not self._begun:
            self.peer.world.reads.connect(self, event.source)

    def _tell_digests(self) -> None:
        if self._begun and self._announced is not None:
            learnt, self._learnt = self._learnt, []
            self.peer.node.digested(self.peer.now, self.handle.slot, self.publication, learnt)

    def _prepare(self) -> None:
        """The first source within reach: bytes may change once the old version is given up."""
        if self._prepared is None:
            self._prepared = start(self._give_up_old())
            self._prepared.then(lambda: self.put(READY))

    def _give_up_old(self) -> Steps[None]:
        try:
            yield from self.handle.give_up_old(self._left)
        except TensorHubError as error:
            self._kept = error

    @property
    def _is_preparing(self) -> bool:
        return self._prepared is not None and not self._begun

    def _keep_old(self) -> Steps[None]:
        assert self._prepared is not None
        self.handle.keep_old()
        yield self._prepared

    def _begin(self) -> Steps[None]:
        assert self._prepared is not None
        yield self._prepared
        if self._kept is not None:
            raise self._kept
        if self.peer.now >= self._deadline:
            raise Timeout(f"giving up the version before {self.publication} took all the time")
        self.handle.tear()
        self.export = self.peer.export(self.memory, ChunkSet(self.memory.layout.num_chunks))
        crosses = self._swarm.crosses
        if crosses or self.memory.layout.num_chunks > 1:  # else there are no parts to share
            self._announced = self.handle.announce_part(self._answer, self.export, self._left)
        if self._announced is not None and crosses:
            self._announced.then(self._look_for_others)
        self._begun = True
        self._tell_digests()
        self._swarm.begin(self.peer.now, announced=self._announced is not None)

    def _look_for_others(self) -> None:
        group = self.handle.slot.group
        self.peer.node.look_for_holders(self.peer.now, group.model, self.handle.slot.shard)
        self.peer.pump()

    @property
    def _left(self) -> float:
        return max(0.01, self._deadline - self.peer.now)

    def _settle_announcement(self, announced: VerbCall) -> Steps[None]:
        """The first announcement ran beside the pull; a handle has one verb at a time."""
        try:
            yield announced
        except TensorHubError:
            pass  # the second announcement meets the same, and tells of it

    def _stop(self) -> None:
        self.over = True
        self._swarm.stop(self.peer.now)
        for output in self._swarm.outbox.drain():
            if isinstance(output, Send):
                self.peer.outbox.send(output.to, output.message)
