"""Several zones whose pullers want the same shard, under a virtual clock.

The decisions are those of the real `Swarm` and `ShardServer`; here is what stands between
them: messages that travel, the directory's news, reads that take time. All far reads of a zone
share its one line to the others, as flows of TCP would; near reads take a fixed time.

A peer may be killed (its reads end, who reads from it is told), or stopped (nothing of it
moves, and nobody is told). One seed: a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    LayoutPage,
    Message,
    Phase,
    PullGone,
    PullOffer,
    PullUpdate,
)
from tensorhub_p2p.protocol.pulls.pull_events import (
    Carrying,
    ChunkHeld,
    Completed,
    Corrupt,
    DigestsLearnt,
    Fetch,
    SourceFound,
    Starved,
)
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.pulls.sources import Candidate, Fault, SourceId
from tensorhub_p2p.protocol.pulls.swarm import Swarm

PUBLICATION = Publication(0, 1, "trainer", Generation(1, 1))
NEAR, FAR = 2, 3
TO_PULLERS = (PullOffer, PullUpdate, PullGone, LayoutPage)
ENDPOINTS = (Endpoint("tcp", b""),)


def digest_of(chunk: int) -> bytes:
    return chunk.to_bytes(16, "big")


@dataclass(eq=False)
class Flow:
    """A read over a zone's line."""

    left: float
    done: Callable[[], None]
    cut: bool = False


class Line:
    """A zone's way to the others: `rate` bytes a second, shared by all that cross it."""

    def __init__(self, world: World, rate: float) -> None:
        self.rate = rate
        self._world = world
        self._flows: list[Flow] = []
        self._at = 0.0
        self._turn = 0

    def read(self, num_bytes: int, done: Callable[[], None]) -> Flow:
        self._advance()
        flow = Flow(num_bytes, done)
        self._flows.append(flow)
        self._plan()
        return flow

    def cut(self, flow: Flow) -> None:
        self._advance()
        flow.cut = True
        self._flows = [f for f in self._flows if f is not flow]
        self._plan()

    def _advance(self) -> None:
        moved = (self._world.now - self._at) * self.rate
        self._at = self._world.now
        for flow in self._flows:
            flow.left -= moved / len(self._flows)

    def _plan(self) -> None:
        self._turn += 1
        if self._flows and self.rate:
            turn = self._turn
            least = min(flow.left for flow in self._flows)
            wait = max(0.0, least) * len(self._flows) / self.rate
            self._world.later(wait, lambda: self._finish(turn))

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        through = [flow for flow in self._flows if flow.left < 1]
        self._flows = [flow for flow in self._flows if flow.left >= 1]
        self._plan()
        for flow in through:
            flow.done()


@dataclass(eq=False)
class Peer:
    """One process with one handle."""

    id: SourceId
    zone: str
    swarm: Swarm | None = None
    server: ShardServer | None = None
    phase: Phase | None = None
    connected: set[SourceId] = field(default_factory=set)
    begun: bool = False
    stopped: bool = False
    killed: bool = False
    has_crossed: bool = False
    """It has asked another zone for a chunk."""
    done_at: float | None = None
    error: Event | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """What happened to it while it stood still."""
    reads: list[tuple[Line, Flow]] = field(default_factory=list)


class World:
    """The trainer in zone "home", pullers elsewhere; run `start` for each, then `run`."""

    def __init__(
        self,
        mib: int,
        *,
        seed: int = 0,
        rate: float = 12.5e6,
        near_seconds: float = 0.01,
        far_latency: float = 0.04,
        directory: tuple[float, float] = (0.002, 0.02),
        config: PullConfig | None = None,
    ) -> None:
        self.config = config or PullConfig()
        self.rng = random.Random(seed)
        self.now = 0.0
        size = mib << 20
        self.layout = Layout([TensorSpec("w", "uint8", (size,), size)])
        self.peers: dict[SourceId, Peer] = {}
        self.crossed: dict[str, Counter[int]] = {}
        """By zone: how often each chunk was asked for in another zone."""
        self._rate = rate
        self._near_seconds = near_seconds
        self._far_latency = far_latency
        self._directory = directory
        self._lines: dict[str, Line] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ticks: dict[SourceId, float] = {}
        trainer = self._add("trainer", "home")
        trainer.server = ShardServer(
            trainer.id.slot, PUBLICATION, self.layout, ENDPOINTS, self.config
        )
        for chunk in range(self.layout.num_chunks):
            trainer.server.digested(0.0, chunk, digest_of(chunk))
        trainer.phase = Phase.READY
        self.trainer = trainer

    # --- the cast ---

    def _add(self, name: str, zone: str) -> Peer:
        peer = Peer(SourceId(PeerId(name.ljust(16, "-")), Slot(Group("m", name), 0)), zone)
        self.peers[peer.id] = peer
        self.crossed.setdefault(zone, Counter())
        if zone not in self._lines:
            self._lines[zone] = Line(self, self._rate)
        return peer

    def start(self, name: str, zone: str, at: float = 0.0) -> Peer:
        """A puller that begins then."""
        peer = self._add(name, zone)
        self.later(at - self.now, lambda: self._begin_pull(peer))
        return peer

    def kill(self, peer: Peer, *, told_after: float = 1.0) -> None:
        peer.killed = True
        for line, flow in peer.reads:
            line.cut(flow)
        for reader in self.peers.values():
            self.later(0.005, lambda r=reader: self._at(r, lambda: self._break_off(r, peer)))
        self.later(told_after, lambda: self._bury(peer))

    def _break_off(self, reader: Peer, dead: Peer) -> None:
        """Its connections are reset."""
        source = reader.swarm and reader.swarm._sources.get(dead.id)
        for chunk in list(source.in_flight) if reader.swarm and source else ():
            reader.swarm.failed(self.now, dead.id, chunk, Fault.GONE)

    def _bury(self, dead: Peer) -> None:
        dead.phase = None
        for peer in self.peers.values():
            self._at(peer, lambda p=peer: p.swarm and p.swarm.lost(self.now, dead.id.peer))
            self._at(peer, lambda p=peer: p.server and p.server.forget_peer(self.now, dead.id.peer))
            self._tell(peer)

    def stop(self, peer: Peer) -> None:
        peer.stopped = True

    def go_on(self, peer: Peer) -> None:
        peer.stopped = False
        waiting, peer.waiting = peer.waiting, []
        for each in waiting:
            self._at(peer, each)

    # --- time ---

    def later(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + max(0.0, delay), next(self._numbers), do))

    def _at(self, peer: Peer, do: Callable[[], object]) -> None:
        """Something happens to this peer: now, if it runs."""
        if peer.killed:
            return
        if peer.stopped:
            peer.waiting.append(lambda: self._at(peer, do))
            return
        do()
        self._pump(peer)

    def run(self, until: Callable[[], bool] = lambda: False, limit: float = 600.0) -> None:
        """Until then, or until all that can have finished; AssertionError at the limit."""
        while self._heap and not until():
            at, _, do = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            assert self.now < limit, self.describe()
            do()
            if until is not None and not self.pulling:
                return

    @property
    def pulling(self) -> list[Peer]:
        return [
            p
            for p in self.peers.values()
            if p is not self.trainer and p.done_at is None and not p.killed and not p.stopped
        ]

    def describe(self) -> str:
        return "\n".join(
            f"{p.id.slot}: {len(p.swarm.held) if p.swarm else '-'} of {self.layout.num_chunks}"
            for p in self.pulling
        )

    # --- messages ---

    def _pump(self, peer: Peer) -> None:
        for machine in (peer.server, peer.swarm):
            if machine is not None:
                for output in machine.outbox.drain():
                    if isinstance(output, Send):
                        self._send(peer, output.to, output.message)
                    elif isinstance(output, Event):
                        self._on_event(peer, output)
        self._plan(peer)

    def _plan(self, peer: Peer) -> None:
        machines = [m for m in (peer.server, peer.swarm) if m is not None]
        due = min((d for m in machines if (d := m.next_wakeup()) is not None), default=None)
        planned = self._ticks.get(peer.id)
        if due is None or (planned is not None and self.now < planned <= due):
            return
        self._ticks[peer.id] = due
        self.later(due - self.now, lambda: self._at(peer, lambda: self._tick(peer)))

    def _tick(self, peer: Peer) -> None:
        for machine in (peer.server, peer.swarm):
            due = machine.next_wakeup() if machine is not None else None
            if machine is not None and due is not None and due <= self.now:
                machine.tick(self.now)

    def _send(self, sender: Peer, to: PeerId, message: Message) -> None:
        peer = next(p for p in self.peers.values() if p.id.peer == to)
        machine: Callable[[], ShardServer | Swarm | None] = (
            (lambda: peer.swarm) if isinstance(message, TO_PULLERS) else (lambda: peer.server)
        )

        def deliver() -> None:
            receiver = machine()
            if receiver is not None:
                receiver.receive(self.now, sender.id.peer, message)

        latency = 0.001 if sender.zone == peer.zone else self._far_latency
        self.later(latency, lambda: self._at(peer, deliver))

    # --- the directory ---

    def _announce(self, peer: Peer, phase: Phase) -> None:
        """Its record stands, and is read; the others hear of it."""
        peer.phase = phase
        self._tell(peer)
        for other in self.peers.values():
            if other.zone == peer.zone and other is not peer:
                self.later(self.rng.uniform(*self._directory), lambda p=other: self._tell(p))

    def _tell(self, peer: Peer) -> None:
        """Tell a pull whom the directory names."""
        near = [p for p in self.peers.values() if p.phase is not None and p.zone == peer.zone]
        far = [p for p in self.peers.values() if p.phase is not None and p.zone != peer.zone]
        whole = any(p.phase is Phase.READY for p in near)
        holders = near if whole else near + far
        candidates = [
            Candidate(p.id.peer, p.id.slot, p.phase, self._locality(peer, p.id.peer), PUBLICATION)
            for p in holders
            if p.phase is not None
        ]
        self._at(peer, lambda: peer.swarm and peer.swarm.candidates(self.now, candidates))

    def _locality(self, peer: Peer, other: PeerId) -> int:
        zone = next(p.zone for p in self.peers.values() if p.id.peer == other)
        return NEAR if zone == peer.zone else FAR

    # --- a pull ---

    def _begin_pull(self, peer: Peer) -> None:
        peer.swarm = Swarm(
            f"pull/{peer.id.peer}",
            PUBLICATION,
            peer.id,
            self.layout,
            ("tcp",),
            self.config,
            random.Random(self.rng.getrandbits(64)),
            lambda other: self._locality(peer, other),
        )
        self._tell(peer)

    def _on_event(self, peer: Peer, event: Event) -> None:
        if isinstance(event, SourceFound):
            self._connect(peer, event.source)
        elif isinstance(event, Fetch):
            self._fetch(peer, event)
        elif isinstance(event, DigestsLearnt):
            self._news(peer, lambda s: [s.digested(self.now, c, d) for c, d in event.digests], 0.0)
        elif isinstance(event, ChunkHeld):
            self._news(peer, lambda s: s.verified(self.now, event.chunk, event.digest))
        elif isinstance(event, Carrying):
            self._news(peer, lambda s: s.carries(self.now, event.chunks), 0.0)
        elif isinstance(event, Completed):
            peer.done_at = self.now
            assert peer.swarm is not None
            assert peer.swarm.held.is_full
            self.later(0.003, lambda: self._announce(peer, Phase.READY))
        elif isinstance(event, (Starved, Corrupt)):
            peer.error, peer.done_at = event, self.now

    def _news(
        self, peer: Peer, tell: Callable[[ShardServer], object], after: float = 0.002
    ) -> None:
        self.later(after, lambda: self._at(peer, lambda: peer.server and tell(peer.server)))

    def _connect(self, peer: Peer, source: SourceId) -> None:
        if peer.begun or peer.connected:
            return
        peer.connected.add(source)
        far = self.peers[source].zone != peer.zone
        self.later(2 * self._far_latency if far else 0.001, lambda: self._at(peer, begin))

        def begin() -> None:
            if peer.begun:
                return
            peer.begun = True
            peer.server = ShardServer(
                peer.id.slot,
                PUBLICATION,
                self.layout,
                ENDPOINTS,
                self.config,
                have=ChunkSet(self.layout.num_chunks),
                origin=False,
            )
            assert peer.swarm is not None
            for chunk in peer.swarm._ledger.manifest.known:
                peer.server.digested(self.now, chunk, digest_of(chunk))
            peer.swarm.begin(self.now, announced=True)
            self.later(
                self.rng.uniform(*self._directory),
                lambda: self._at(peer, lambda: self._announce(peer, Phase.PARTIAL)),
            )

    def _fetch(self, peer: Peer, event: Fetch) -> None:
        source = self.peers[event.source]
        _, length = self.layout.chunk_range(event.chunk)

        def landed() -> None:
            if source.stopped or source.killed:
                return  # it fails, when its time is over
            self._at(peer, lambda: self._land(peer, event))

        patience = self.config.source_timeout + length / self.config.slowest_rate
        patience = 0.01 if source.killed else patience

        def failed() -> None:
            if peer.swarm:
                peer.swarm.failed(self.now, event.source, event.chunk, Fault.SILENT)

        self.later(patience, lambda: self._at(peer, failed))
        if source.zone == peer.zone:
            self.later(self._near_seconds, landed)
            return
        self.crossed[peer.zone][event.chunk] += 1
        peer.has_crossed = True
        line = self._lines[peer.zone]

        def ask() -> None:
            if not peer.killed:
                peer.reads.append((line, line.read(length, landed)))

        self.later(2 * self._far_latency, ask)

    def _land(self, peer: Peer, event: Fetch) -> None:
        if peer.swarm is not None:
            peer.swarm.fetched(self.now, event.source, event.chunk, event.digest)

    # --- what it came to ---

    def twice(self, zone: str) -> int:
        """Crossings beyond one for each chunk."""
        return self.crossed[zone].total() - len(self.crossed[zone])
