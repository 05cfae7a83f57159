"""A whole pull in one process: real servers, real memory, real threads, scripted transports."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import SimpleNamespace

import numpy
import pytest
import xxhash

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.errors import (
    IntegrityError,
    LayoutMismatch,
    PeerClosed,
    Timeout,
    TransferError,
    VersionUnavailable,
)
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES, Layout
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.messages import Endpoint, Message, Phase
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.pulls.sources import SourceId
from tensorhub_p2p.protocol.pulls.swarm import Swarm
from tensorhub_p2p.protocol.shards.verbs import Holder, HoldersChanged
from tensorhub_p2p.transfer.digest import digest
from tensorhub_p2p.transfer.engine import MAX_BATCH, Hooks, ShardPull
from tensorhub_p2p.transfer.links import Landed
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    SourceGone,
    SourceSilent,
    Transport,
)
from tensorhub_p2p.transfer.transports.cma import CmaTransport
from tensorhub_p2p.transfer.transports.tcp import TcpTransport

CHUNK = MIN_CHUNK_BYTES
PUBLICATION = Publication(0, 7, "trainer", Generation(1, 1))
FAST = PullConfig(unavailable_after=0.3, source_timeout=0.3, retry_interval=0.02)


def name(letter: str, replica: str) -> SourceId:
    return SourceId(PeerId(letter * 16), Slot(Group("policy", replica), 0))


ORIGIN, A, B, OWN = name("0", "trainer"), name("a", "ra"), name("b", "rb"), name("f", "rf")


def weights(
    seed: int, sizes: tuple[int, ...] = (5 * CHUNK, 3, 0, 2 * CHUNK + 17)
) -> dict[str, object]:
    rng = numpy.random.default_rng(seed)
    return {f"w{i}": rng.integers(0, 255, n, dtype=numpy.uint8) for i, n in enumerate(sizes)}


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return all(numpy.array_equal(a[k], b[k]) for k in a)  # type: ignore[call-overload]


class Scripted(Transport):
    """Reads regions of this process by name; a script says what happens before each read."""

    name = "scripted"

    def __init__(self) -> None:
        self.regions: dict[bytes, Region] = {}
        self.script: Callable[[bytes, int, ScriptedReader], None] = lambda blob, chunk, reader: None
        self.lies: set[bytes] = set()
        self.reads: list[tuple[bytes, int]] = []
        self.connected = 0

    def unavailable(self) -> str | None:
        return None

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        blob = str(len(self.regions)).encode()
        self.regions[blob] = region
        return blob

    def withdraw(self, endpoint: bytes) -> None:
        pass

    def drain(self, endpoint: bytes, deadline: float) -> None:
        pass

    def reachable(self, endpoint: bytes) -> str | None:
        return None

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        self.connected += 1
        return ScriptedReader(self, endpoint)

    def close(self) -> None:
        pass


class ScriptedReader(Reader):
    def __init__(self, transport: Scripted, blob: bytes) -> None:
        self.transport = transport
        self.blob = blob
        self.closed = threading.Event()

    def read(
        self, start: int, length: int, into: Region, deadline: float, hasher: xxhash.xxh3_128
    ) -> None:
        assert not self.closed.is_set(), "used after close"
        chunk = start // into.layout.chunk_bytes
        self.transport.reads.append((self.blob, chunk))
        self.transport.script(self.blob, chunk, self)
        source = self.transport.regions[self.blob]
        data = bytearray(_bytes_of(source, start, length))
        if self.blob in self.transport.lies:
            data[-1] ^= 1
        _write(into, start, data)
        hasher.update(data)

    def close(self) -> None:
        self.closed.set()


def _bytes_of(region: Region, start: int, length: int) -> bytes:
    scratch = Scratch(max(1, length))
    try:
        scratch.gather(region.pieces(start, length))
        return bytes(scratch.memory[:length])
    finally:
        scratch.close()


def _write(region: Region, start: int, data: bytearray) -> None:
    scratch = Scratch(max(1, len(data)))
    try:
        scratch.memory[: len(data)] = data
        scratch.scatter(region.pieces(start, len(data)))
    finally:
        scratch.close()


@dataclass
class World:
    """Servers in this thread's reach, and one puller."""

    transports: dict[str, Transport]
    config: PullConfig = FAST
    servers: dict[SourceId, ShardServer] = field(default_factory=dict)
    inbox: SimpleQueue[object] = field(default_factory=SimpleQueue)
    lock: threading.RLock = field(default_factory=threading.RLock)
    deaf: set[SourceId] = field(default_factory=set)
    lag: Callable[[], float] = lambda: 0.0

    def serve(
        self,
        id: SourceId,
        tensors: object,
        have: ChunkSet | None = None,
        publication: Publication = PUBLICATION,
    ) -> tuple[ShardServer, list[bytes]]:
        region = Region.of(tensors)
        layout = region.layout
        allowed = have or ChunkSet.full(layout.num_chunks)
        endpoints = [Endpoint(n, t.export(region, allowed)) for n, t in self.transports.items()]
        server = ShardServer(
            id.slot, publication, layout, endpoints, self.config, have=have, origin=id == ORIGIN
        )
        scratch = Scratch()
        for chunk in allowed:
            server.digested(0.0, chunk, digest(region, chunk, scratch))
        scratch.close()
        self.servers[id] = server
        return server, [e.blob for e in endpoints]

    def send(self, to: PeerId, message: Message) -> None:
        with self.lock:
            for id, server in self.servers.items():
                if id.peer == to and id not in self.deaf:
                    server.receive(time.monotonic(), OWN.peer, message)
                    self.deliver(id)

    def deliver(self, id: SourceId) -> None:
        for output in self.servers[id].outbox.drain():
            if isinstance(output, Send) and output.to == OWN.peer:
                self.inbox.put((id.peer, output.message))

    def holders(self) -> HoldersChanged:
        servers = self.servers.items()
        return HoldersChanged(
            1, tuple(Holder(id.peer, id.slot, Phase.READY, s.publication) for id, s in servers)
        )

    def pull(self, into: object, hooks: Hooks | None = None, timeout: float = 20.0) -> ShardPull:
        return self.pull_region(Region.of(into), hooks, timeout)

    def pull_region(
        self,
        region: Region | Callable[[Layout], Region],
        hooks: Hooks | None = None,
        timeout: float = 20.0,
    ) -> ShardPull:
        self.inbox.put(self.holders())
        return ShardPull(
            pull="p",
            publication=PUBLICATION,
            own=OWN,
            region=region,
            transports=self.transports,
            config=self.config,
            inbox=self.inbox,
            send=self.send,
            locate=lambda peer: 0,
            deadline=time.monotonic() + timeout,
            hooks=hooks or Hooks(),
            lag=self.lag,
            rng=random.Random(5),
        )


@contextmanager
def transports(*names: str) -> Iterator[dict[str, Transport]]:
    made: dict[str, Transport] = {}
    for n in names:
        if n == "cma":
            made[n] = CmaTransport()
        elif n == "tcp":
            made[n] = TcpTransport("127.0.0.1:0", silence=0.3)
        else:
            made[n] = Scripted()
    try:
        yield made
    finally:
        for transport in made.values():
            transport.close()


def reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tensorhub_p2p-reader"]


@pytest.mark.parametrize("by", ["cma", "tcp", "scripted"])
def test_a_pull_brings_every_byte_and_says_from_where(by: str) -> None:
    source, target = weights(1), weights(2)
    with transports(by) as ts:
        world = World(ts)
        server, _ = world.serve(ORIGIN, source)
        pull = world.pull(target)
        pull.run()
        assert same(source, target)
        outcome = pull.outcome()
        assert outcome.bytes == outcome.total == 7 * CHUNK + 20
        [one] = outcome.sources
        assert (one.facts.source, one.transport) == (ORIGIN, by)
        assert one.facts.chunks == server.layout.num_chunks
        assert outcome.moving > 0
        assert server.readers() == (), "it said goodbye"
        assert server.sealed


def test_names_decide_and_not_the_order_of_registration() -> None:
    source = weights(1)
    target = dict(reversed(weights(2).items()))
    with transports("cma") as ts:
        world = World(ts)
        world.serve(ORIGIN, source)
        world.pull(target).run()
    assert same(source, target)


def test_memory_may_be_made_once_the_layout_is_known() -> None:
    source = weights(1, (5 * CHUNK, *([3] * 3000), 2 * CHUNK + 17))
    made: list[Region] = []

    def make(layout: Layout) -> Region:
        made.append(Region.of_buffer(layout, bytearray(layout.num_bytes)))
        return made[0]

    with transports("cma") as ts:
        world = World(ts)
        world.serve(ORIGIN, source)
        world.pull_region(make).run()
    (region,) = made
    expected = Region.of(source)
    assert region.layout == expected.layout
    size = expected.layout.num_bytes
    assert _bytes_of(region, 0, size) == _bytes_of(expected, 0, size)


def test_what_making_the_memory_raises_ends_the_pull() -> None:
    def make(layout: Layout) -> Region:
        raise MemoryError("none left")

    with transports("scripted") as ts:
        world = World(ts)
        server, _ = world.serve(ORIGIN, weights(1))
        with pytest.raises(MemoryError, match="none left"):
            world.pull_region(make).run()
        assert server.readers() == ()


def test_a_different_layout_is_refused_before_a_byte_is_written() -> None:
    target = weights(2, (5 * CHUNK, 4, 0, 2 * CHUNK + 17))
    before = {k: v.copy() for k, v in target.items()}  # type: ignore[attr-defined]
    began = []

    class Began(Hooks):
        def begin(self, into: Region) -> None:
            began.append(into)

    with transports("cma") as ts:
        world = World(ts)
        world.serve(ORIGIN, weights(1))
        with pytest.raises(LayoutMismatch, match="'w1' is uint8"):
            world.pull(target, Began()).run()
    assert same(before, target)
    assert began == []


@pytest.mark.parametrize(
    ("answered", "said"), [(True, "names no holder"), (False, "has not said who holds it")]
)
def test_an_error_tells_a_directory_without_holders_from_one_that_is_silent(
    answered: bool, said: str
) -> None:
    with transports("scripted") as ts:
        world = World(ts)
        pull = world.pull(weights(2), timeout=0.2)
        if not answered:
            world.inbox.get_nowait()
        with pytest.raises(Timeout, match=f"the directory {said}"):
            pull.run()


def test_the_hooks_hear_of_begin_then_digests_and_chunks() -> None:
    heard: list[object] = []

    class Hear(Hooks):
        def begin(self, into: Region) -> None:
            heard.append("begin")

        def digests(self, digests: tuple[tuple[int, bytes], ...]) -> None:
            heard.append(dict(digests))

        def held(self, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
            heard.append((chunk, digest))

    with transports("scripted") as ts:
        world = World(ts)
        server, _ = world.serve(ORIGIN, weights(1))
        world.pull(weights(2), Hear()).run()
    chunks = range(server.layout.num_chunks)
    digests = {c: server.manifest[c] for c in chunks}
    assert heard[:2] == ["begin", digests]
    assert sorted(heard[2:]) == [(c, digests[c]) for c in chunks]  # type: ignore[type-var]


def test_what_a_hook_raises_ends_the_pull_before_a_byte_is_written() -> None:
    target = weights(2)
    before = {k: v.copy() for k, v in target.items()}  # type: ignore[attr-defined]

    class Refuse(Hooks):
        def begin(self, into: Region) -> None:
            raise Timeout("unpublish timed out")

    with transports("scripted") as ts:
        world = World(ts)
        world.serve(ORIGIN, weights(1))
        with pytest.raises(Timeout, match="unpublish"):
            world.pull(target, Refuse()).run()
    assert same(before, target)


def test_a_link_falls_back_to_the_next_transport_and_remembers_why() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted", "tcp") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)

        together = threading.Barrier(2, timeout=5)

        def refuse(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            together.wait()
            raise CannotReach("ptrace_scope is 3")

        scripted.script = refuse
        world = World(ts)
        world.serve(ORIGIN, source)
        pull = world.pull(target)
        pull.run()
    assert same(source, target)
    [one] = pull.outcome().sources
    assert one.transport == "tcp"
    assert one.rejected == {"scripted": "ptrace_scope is 3"}
    assert one.facts.notes == ()


def test_a_source_that_dies_costs_only_its_chunks_in_flight() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        _, [dying] = world.serve(A, source)
        world.serve(B, source)
        gone = threading.Event()

        def die(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            if blob == dying:
                if gone.is_set():
                    raise SourceGone("connection reset")
                gone.set()

        scripted.script = die
        pull = world.pull(target)
        pull.run()
    assert same(source, target)
    outcome = pull.outcome()
    assert outcome.bytes == outcome.total, "nothing was moved twice"


def test_pullers_read_partial_holders_and_get_the_whole() -> None:
    source, target = weights(1), weights(2)
    with transports("tcp") as ts:
        world = World(ts)
        n = Region.of(source).layout.num_chunks
        world.serve(A, source, ChunkSet.of(n, range(0, n, 2)))
        world.serve(B, source, ChunkSet.of(n, range(1, n, 2)))
        pull = world.pull(target)
        pull.run()
    assert same(source, target)
    assert {s.facts.chunks for s in pull.outcome().sources} == {n // 2, (n + 1) // 2}


def test_what_its_own_holders_lack_comes_from_those_of_an_equal_publication() -> None:
    source, target = weights(1), weights(2)
    twin = Publication(0, 7, "trainer-1", Generation(1, 1))
    with transports("tcp") as ts:
        world = World(ts)
        layout = Region.of(source).layout
        n = layout.num_chunks
        world.serve(A, source, ChunkSet.of(n, range(0, n, 2)))
        world.serve(B, source, publication=twin)
        pull = world.pull(target)
        scratch, region = Scratch(), Region.of(source)
        left = tuple(digest(region, chunk, scratch) for chunk in range(n))
        scratch.close()
        world.inbox.put(replace(world.holders(), digests=left))
        pull.run()
    assert same(source, target)
    outcomes = {s.facts.source: s.facts for s in pull.outcome().sources}
    assert outcomes[B].chunks >= n // 2
    assert outcomes[B].mismatches == 0


def test_a_lying_source_is_shunned_and_another_one_serves() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        _, [liar] = world.serve(A, source)
        world.serve(B, source)
        scripted.lies.add(liar)
        pull = world.pull(target)
        pull.run()
    assert same(source, target)
    facts = {s.facts.source: s.facts for s in pull.outcome().sources}
    assert facts[A].chunks == 0
    assert 1 <= facts[A].mismatches <= 2


def test_tensors_changed_while_published_are_an_integrity_error_that_names_them() -> None:
    source, target = weights(1), weights(2)
    with transports("cma") as ts:
        world = World(ts)
        world.serve(ORIGIN, source)
        source["w3"][:] = 0  # type: ignore[index]
        with pytest.raises(IntegrityError, match=r"'w3'.*tensors changed"):
            world.pull(target).run()


def test_chunks_that_nobody_has_are_unavailable_and_named() -> None:
    source = weights(1)
    with transports("cma") as ts:
        world = World(ts)
        n = Region.of(source).layout.num_chunks
        world.serve(A, source, ChunkSet.of(n, range(n - 1)))
        pull = world.pull(weights(2))
        with pytest.raises(VersionUnavailable, match=f"chunks {n - 1}.*policy/ra#0"):
            pull.run()
    assert len(pull.outcome().sources) == 1


def test_nobody_who_answers_is_unavailable_too() -> None:
    with transports("cma") as ts:
        world = World(ts)
        world.serve(A, weights(1))
        world.deaf.add(A)
        with pytest.raises(VersionUnavailable, match=r"not asked|no answer|doesn't answer"):
            world.pull(weights(2)).run()


def test_what_the_control_thread_has_not_read_yet_is_nobodys_silence() -> None:
    with transports("cma") as ts:
        world = World(ts, lag=time.monotonic)  # it is stuck all the while
        world.serve(A, weights(1))
        world.deaf.add(A)
        with pytest.raises(Timeout):
            world.pull(weights(2), timeout=1.0).run()


def test_a_version_that_no_transport_can_move_is_a_transfer_error_with_reasons() -> None:
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)

        def refuse(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            raise CannotReach("not from here")

        scripted.script = refuse
        world = World(ts)
        world.serve(A, weights(1))
        with pytest.raises(TransferError, match="not from here"):
            world.pull(weights(2)).run()


def test_the_deadline_ends_a_pull_and_nothing_is_written_afterwards() -> None:
    """The readers are inside a read when the deadline comes, and would write on."""
    target = weights(2)
    inside = threading.Semaphore(0)
    finished: list[bool] = []

    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)

        def hang(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            inside.release()
            assert reader.closed.wait(10), "nobody ends this read"
            time.sleep(0.1)
            finished.append(True)

        scripted.script = hang
        world = World(ts, PullConfig())
        world.serve(A, weights(1))
        started = time.monotonic()
        with pytest.raises(Timeout, match="0 of 8 chunks"):
            world.pull(target, timeout=0.5).run()
        took = time.monotonic() - started
    assert inside.acquire(timeout=0)
    assert len(finished) == 2, "run returned before its readers were done"
    assert 0.5 <= took < 2
    after = {k: v.copy() for k, v in target.items()}  # type: ignore[attr-defined]
    for thread in reader_threads():
        thread.join(5)
    assert same(after, target)


def test_a_silent_source_delays_a_pull_by_its_timeout_and_no_more() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        _, [mute] = world.serve(A, source)
        world.serve(B, source)

        def silent(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            if blob == mute:
                reader.closed.wait(FAST.source_timeout)
                raise SourceSilent("nothing came")

        scripted.script = silent
        started = time.monotonic()
        world.pull(target).run()
        took = time.monotonic() - started
    assert same(source, target)
    assert took < 10 * FAST.source_timeout


def test_nothing_is_lost_of_what_comes_in_a_rush() -> None:
    with transports("scripted") as ts:
        world = World(ts)
        world.serve(A, weights(1))
        strangers = [PeerId(f"{number:016x}") for number in range(MAX_BATCH)]
        for stranger in strangers:
            world.inbox.put(stranger)
        pull = world.pull(target := weights(2), timeout=3.0)  # who holds it comes behind them
        pull.run()
        assert same(weights(1), target)


def test_while_readers_have_plenty_the_pull_thinks_about_many_chunks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acts = 0
    act = Swarm.act

    def counted(swarm: Swarm, now: float) -> None:
        nonlocal acts
        acts += 1
        act(swarm, now)

    monkeypatch.setattr(Swarm, "act", counted)
    with transports("scripted") as ts:
        world = World(ts)
        world.serve(A, weights(1, (64 * CHUNK,)))
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        scripted.script = lambda *_: time.sleep(0.002)
        world.pull(target := weights(2, (64 * CHUNK,))).run()
        assert same(weights(1, (64 * CHUNK,)), target)
    assert acts < 40


def test_however_much_there_is_to_do_the_pull_rests_no_longer_than_news_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    with transports("scripted") as ts:
        world = World(ts)
        world.serve(A, weights(1, (64 * CHUNK,)))
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        slow = threading.Event()
        scripted.script = lambda *_: slow.wait(0.01) and None
        world.pull(weights(2, (64 * CHUNK,))).run()
    assert rests
    assert max(rests) <= FAST.news_interval


def test_the_pull_rests_only_while_no_link_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    with transports("scripted") as ts:
        pull = World(ts).pull(weights(1))
        pull._news_at = math.inf
        busy, dry = SimpleNamespace(backlog=1.0), SimpleNamespace(backlog=0.0)
        pull._links = {A: busy, B: dry}  # type: ignore[dict-item]
        pull._let_more_come(Landed(B, 0, b"", 1, 0.1, 0.0), math.inf)
        assert not rests, "it has just brought its last: it may want more"
        pull._let_more_come(Landed(A, 0, b"", 1, 0.1, 0.0), math.inf)
        assert rests == [0.25]
        pull._let_more_come(Landed(A, 0, b"", 1, 0.1, 0.0), time.monotonic())
        assert rests == [0.25], "until then, and no longer"


def test_closing_the_peer_ends_a_pull_at_once() -> None:
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts, PullConfig())
        world.serve(A, weights(1))

        def close(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            world.inbox.put(None)
            reader.closed.wait(10)

        scripted.script = close
        started = time.monotonic()
        with pytest.raises(PeerClosed):
            world.pull(weights(2)).run()
        assert time.monotonic() - started < 2


def test_the_death_of_the_only_source_is_heard_in_the_middle_of_a_read() -> None:
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        world.serve(A, weights(1))

        def dies(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            world.inbox.put(A.peer)
            assert reader.closed.wait(10), "the read was not broken off"
            raise SourceGone("reset")

        scripted.script = dies
        with pytest.raises(VersionUnavailable, match=r"died|gone"):
            world.pull(weights(2)).run()


def test_a_bug_in_a_reader_is_raised_and_not_swallowed() -> None:
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        world.serve(A, weights(1))

        def bug(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            raise ZeroDivisionError

        scripted.script = bug
        with pytest.raises(ZeroDivisionError):
            world.pull(weights(2)).run()


def test_a_source_that_withdraws_in_the_middle_is_let_go_and_drains() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        leaving, [blob_a] = world.serve(A, source)
        world.serve(B, source)

        def withdraw(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            if blob == blob_a:
                with world.lock:
                    leaving.withdraw(time.monotonic(), "unpublished")
                    world.deliver(A)

        scripted.script = withdraw
        world.pull(target).run()
        assert leaving.readers() == ()
    assert same(source, target)


def test_no_reader_thread_outlives_its_pull_for_long() -> None:
    with transports("tcp", "cma") as ts:
        world = World(ts)
        world.serve(A, weights(1))
        world.serve(B, weights(1))
        world.pull(weights(2)).run()
        for thread in reader_threads():
            thread.join(5)
        assert reader_threads() == []
