"""One model, one whole source, many pullers, each on a cable of its own: who gets what when.

Rule of this file. The decisions are those of the real `Swarm` and `ShardServer`; here is what
stands between them: messages that take a moment, the directory, reader threads, cables
(cables.py). Virtual time, one seed: a run can be repeated exactly.

Theory of operation. A host has a server once it begins (the source from the start). A
pull's events are carried out as transfer/engine.py does: news of verified chunks reaches the
own server collected over `news_interval`; each link reads one chunk at a time and has
others queued. The directory tells every puller of all holders `DIRECTORY_DELAY` after one
announced itself.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Event, Outbox, Send
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    Message,
    Phase,
    PullGone,
    PullOffer,
    PullUpdate,
)
from tensorhub_p2p.protocol.pulls.pull_events import (
    ChunkHeld,
    Completed,
    Fetch,
    SourceLost,
    TakeBack,
)
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.pulls.sources import Candidate, Fault, SourceId
from tensorhub_p2p.protocol.pulls.swarm import Swarm
from tensorhub_p2p.sim.swarming.cables import Cable, Flow

PUBLICATION = Publication(0, 1, "trainer", Generation(1, 1))
LATENCY = 0.002
"""Seconds from one peer's machine to another's."""
ROUND_TRIP = 0.001
"""Seconds between two reads of one link."""
DIRECTORY_DELAY = 0.03
"""Seconds from an announcement until pullers hear of it."""
SAME_ZONE = 2


def digest_of(chunk: int) -> bytes:
    return chunk.to_bytes(16, "big")


@dataclass
class Outcome:
    """What a run came to. Times in seconds, sizes in bytes."""

    finished: list[float]
    """When each puller had all of it, in their order; those that died are missing."""
    source_sent: list[int]
    """Bytes that left each whole source."""
    received: list[int]
    """Bytes that each puller received."""
    messages: Counter[str]
    """Sent, by kind."""

    @property
    def slowest(self) -> float:
        return max(self.finished)


@dataclass(eq=False)
class Reading:
    """One read under way; it has no flow before its request has arrived."""

    fetch: Fetch
    flow: Flow | None = None

    def cut(self) -> None:
        if self.flow is not None:
            self.flow.cut = True


@dataclass(eq=False)
class Host:
    """One peer of the swarm."""

    id: SourceId
    cable: Cable
    server: ShardServer | None = None
    swarm: Swarm | None = None
    alive: bool = True
    began: bool = False
    done_at: float | None = None
    planned: dict[str, float] = field(default_factory=dict)
    links: dict[SourceId, deque[Fetch]] = field(default_factory=dict)
    reading: dict[tuple[SourceId, int], Reading] = field(default_factory=dict)
    """By source and chunk."""
    news: list[ChunkHeld] = field(default_factory=list)
    news_at: float = float("-inf")


class SwarmRun:
    """Sources that have all of it, and pullers that begin together."""

    def __init__(
        self,
        *,
        pullers: int,
        num_bytes: int,
        rate: float,
        config: PullConfig | None = None,
        seed: int = 0,
        sources: int = 1,
    ) -> None:
        """`rate` is each cable's, in bytes a second each way."""
        self.now = 0.0
        self.messages: Counter[str] = Counter()
        self.config = config or PullConfig()
        self.layout = Layout([TensorSpec("w", "uint8", (num_bytes,), num_bytes)])
        self._rate = rate
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hosts: dict[PeerId, Host] = {}
        self._holders: list[tuple[Host, Phase]] = []
        self.sources = [self._whole(index) for index in range(sources)]
        self.pullers = [self._puller(index) for index in range(pullers)]

    def later(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), do))

    def _host(self, kind: str, index: int) -> Host:
        peer = PeerId(f"{kind}{index:015x}")
        slot = Slot(Group("policy", f"{'trainer' if kind == 'a' else 'rollout'}-{index}"), 0)
        if kind == "a" and index == 0:
            slot = Slot(Group("policy", "trainer"), 0)
        host = Host(SourceId(peer, slot), Cable(self._rate, self.later))
        self._hosts[peer] = host
        return host

    def _whole(self, index: int) -> Host:
        host = self._host("a", index)
        host.server = self._server(host, ChunkSet.full(self.layout.num_chunks))
        for chunk in range(self.layout.num_chunks):
            host.server.digested(0.0, chunk, digest_of(chunk))
        host.server.outbox.drain()
        self._holders.append((host, Phase.READY))
        return host

    def _server(self, host: Host, have: ChunkSet) -> ShardServer:
        endpoints = (Endpoint("tcp", b""),)
        origin = host.id.slot.group.replica == PUBLICATION.replica
        return ShardServer(
            host.id.slot,
            PUBLICATION,
            self.layout,
            endpoints,
            self.config,
            have=have,
            origin=origin,
        )

    def _puller(self, index: int) -> Host:
        host = self._host("b", index)
        rng = random.Random(self._rng.random())
        host.swarm = Swarm(
            f"{host.id.peer}/1", PUBLICATION, host.id, self.layout, ["tcp"], self.config, rng
        )
        self.later(self._rng.random() * 0.01, lambda: self._tell(host))
        return host

    # --- the directory ---

    def _tell(self, host: Host) -> None:
        if host.swarm is None or not host.alive or host.swarm.done:
            return
        named = [
            Candidate(other.id.peer, other.id.slot, phase, SAME_ZONE, PUBLICATION)
            for other, phase in self._holders
            if other.alive
        ]
        host.swarm.candidates(self.now, named)
        self._settle(host)

    def _announce(self, host: Host) -> None:
        def known() -> None:
            self._holders.append((host, Phase.PARTIAL))
            for other in self.pullers:
                self._tell(other)

        self.later(DIRECTORY_DELAY, known)

    # --- machines ---

    def _settle(self, host: Host) -> None:
        """Carry out what the machines of a host decided, and plan their next wake-up."""
        if not host.alive:
            return
        for machine in (host.swarm, host.server):
            if machine is not None:
                self._drain(host, machine.outbox)
        for name, machine in (("swarm", host.swarm), ("server", host.server)):
            due = machine.next_wakeup() if machine is not None else None
            if due is not None and not self.now < host.planned.get(name, -1.0) <= due:
                host.planned[name] = max(due, self.now)
                self.later(max(0.0, due - self.now), partial(self._wake, host, name))

    def _wake(self, host: Host, name: str) -> None:
        machine = host.swarm if name == "swarm" else host.server
        due = machine.next_wakeup() if machine is not None else None
        if host.alive and machine is not None and due is not None and due <= self.now + 1e-9:
            machine.tick(self.now)
            self._settle(host)
        elif due is not None and host.alive:
            self._settle(host)

    def _drain(self, host: Host, outbox: Outbox) -> None:
        for output in outbox.drain():
            if isinstance(output, Send):
                self._send(host, output)
            elif isinstance(output, Event):
                self._event(host, output)

    def _send(self, host: Host, send: Send) -> None:
        self.messages[type(send.message).__name__] += 1
        to = self._hosts[send.to]
        self.later(LATENCY, lambda: self._deliver(host, to, send.message))

    def _deliver(self, sender: Host, to: Host, message: Message) -> None:
        if not to.alive:
            return
        if isinstance(message, (PullOffer, PullUpdate, PullGone)):
            machine: Swarm | ShardServer | None = to.swarm
        else:
            machine = to.server
        if machine is not None:
            machine.receive(self.now, sender.id.peer, message)
            self._settle(to)

    def _event(self, host: Host, event: Event) -> None:
        assert host.swarm is not None or host.server is not None
        if isinstance(event, Fetch):
            host.links.setdefault(event.source, deque()).append(event)
            self._read_next(host, event.source)
        elif isinstance(event, ChunkHeld):
            host.news.append(event)
            if self.now >= host.news_at:
                self._tell_news(host)
            elif len(host.news) == 1:
                self.later(host.news_at - self.now, lambda: self._tell_news(host))
        elif isinstance(event, TakeBack):
            self.later(0.0, partial(self._take_back, host, event))
        elif isinstance(event, SourceLost):
            self._break_off(host, event.source)
        elif isinstance(event, Completed):
            host.done_at = self.now
        elif type(event).__name__ == "SourceFound" and not host.began:
            host.began = True
            host.server = self._server(host, ChunkSet(self.layout.num_chunks))
            self._announce(host)
            self.later(ROUND_TRIP, lambda: self._begin(host))
        elif type(event).__name__ in ("Starved", "Corrupt"):
            raise AssertionError(f"{host.id} at {self.now}: {event}")
        elif type(event).__name__ == "DigestsLearnt" and host.server is not None:
            for chunk, digest in event.digests:  # type: ignore[attr-defined]
                host.server.digested(self.now, chunk, digest)

    def _begin(self, host: Host) -> None:
        assert host.swarm is not None
        assert host.server is not None
        manifest = host.swarm._ledger.manifest
        for chunk in manifest.known:
            host.server.digested(self.now, chunk, manifest[chunk])
        host.swarm.begin(self.now)
        self._settle(host)

    def _tell_news(self, host: Host) -> None:
        if not host.alive or host.server is None or not host.news:
            return
        host.news_at = self.now + self.config.news_interval
        news, host.news = host.news, []
        for held in news:
            host.server.verified(self.now, held.chunk, held.digest, held.known_to)
        self._settle(host)

    # --- bytes ---

    def _read_next(self, host: Host, source: SourceId) -> None:
        """A link reads one chunk at a time; the only one in use reads two."""
        queue = host.links.setdefault(source, deque())
        while queue:
            here = sum(key[0] == source for key in host.reading)
            if here >= (1 if len(host.reading) > here else 2):
                return
            fetch = queue.popleft()
            host.reading[source, fetch.chunk] = reading = Reading(fetch)
            self.later(ROUND_TRIP, partial(self._read, host, reading))

    def _read(self, host: Host, reading: Reading) -> None:
        fetch = reading.fetch
        if host.reading.get((fetch.source, fetch.chunk)) is not reading or not host.alive:
            return
        there = self._hosts[fetch.source.peer]
        if not there.alive or there.server is None or fetch.chunk not in there.server.have:
            self._end(host, reading, Fault.GONE if not there.alive else Fault.WITHDREW)
            return
        size = self.layout.chunk_range(fetch.chunk)[1]
        reading.flow = host.cable.read(there.cable, size, partial(self._end, host, reading, None))

    def _end(self, host: Host, reading: Reading, fault: Fault | None) -> None:
        fetch = reading.fetch
        if host.reading.get((fetch.source, fetch.chunk)) is not reading or not host.alive:
            return
        del host.reading[fetch.source, fetch.chunk]
        assert host.swarm is not None
        if fault is None:
            host.swarm.fetched(self.now, fetch.source, fetch.chunk, fetch.digest)
        else:
            reading.cut()
            host.swarm.failed(self.now, fetch.source, fetch.chunk, fault)
        self._settle(host)
        self._read_next(host, fetch.source)

    def _take_back(self, host: Host, back: TakeBack) -> None:
        reading = host.reading.get((back.source, back.chunk))
        if reading is not None:
            self._end(host, reading, Fault.GIVEN_UP)
            return
        queue = host.links.get(back.source, deque())
        fetch = next((fetch for fetch in queue if fetch.chunk == back.chunk), None)
        if fetch is not None and host.swarm is not None and host.alive:
            queue.remove(fetch)
            host.swarm.failed(self.now, back.source, back.chunk, Fault.GIVEN_UP)
            self._settle(host)

    def _break_off(self, host: Host, source: SourceId) -> None:
        """Reads there end, and what waits for its turn."""
        given_up, host.links[source] = list(host.links.get(source, ())), deque()
        for reading in [r for r in host.reading.values() if r.fetch.source == source]:
            self._end(host, reading, Fault.GONE)
        for fetch in given_up:
            assert host.swarm is not None
            host.swarm.failed(self.now, source, fetch.chunk, Fault.GONE)
        self._settle(host)

    def kill(self, host: Host, notice: float = 0.5) -> None:
        """It is gone, with its connections; membership tells everybody `notice` seconds later."""
        host.alive = False
        for reading in host.reading.values():
            reading.cut()
        for other in self._hosts.values():
            for reading in [r for r in other.reading.values() if r.fetch.source == host.id]:
                self._end(other, reading, Fault.GONE)
        self.later(notice, lambda: self._lost(host))

    def _lost(self, dead: Host) -> None:
        for other in self._hosts.values():
            if other.alive and other.swarm is not None:
                other.swarm.lost(self.now, dead.id.peer)
            if other.alive and other.server is not None:
                other.server.forget_peer(self.now, dead.id.peer)
            self._settle(other)

    # --- the run ---

    def run(self, limit: float = 600.0, until: Callable[[], bool] | None = None) -> Outcome:
        """Until every puller has all of it, or `until` says so."""
        while self._heap and not (until() if until is not None else self._over()):
            self.now, _, do = heapq.heappop(self._heap)
            if self.now > limit:
                raise AssertionError(f"not done after {limit} s: {self._missing()}")
            do()
        return Outcome(
            finished=[h.done_at for h in self.pullers if h.done_at is not None],
            source_sent=[host.cable.sent for host in self.sources],
            received=[host.cable.received for host in self.pullers],
            messages=self.messages,
        )

    def _over(self) -> bool:
        return all(host.done_at is not None for host in self._living())

    def _living(self) -> Iterable[Host]:
        return (host for host in self.pullers if host.alive)

    def _missing(self) -> list[str]:
        return [
            f"{host.id}: {len(host.swarm.held)} of {self.layout.num_chunks}"
            for host in self._living()
            if host.done_at is None and host.swarm is not None
        ]
