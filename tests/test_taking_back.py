"""The last chunks of a pull: which reads are taken back, and what taking back does to a link."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import CHUNK, ORIGIN, OWN, PUBLICATION, A, Scripted, ScriptedReader, name, weights

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import Endpoint, Phase
from tensorhub_p2p.protocol.pulls.endgame import LATE_CHUNKS, MAX_TAKEN_BACK, Endgame
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.ownership import even_share
from tensorhub_p2p.protocol.pulls.pages import LayoutAgreement
from tensorhub_p2p.protocol.pulls.pull_events import TakeBack
from tensorhub_p2p.protocol.pulls.sharing import Sharing
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import Fault, Source, SourceState
from tensorhub_p2p.transfer.digest import digest
from tensorhub_p2p.transfer.links import Landed, Link, Readers, ReadFault
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import CannotReach, ReadFailed, SourceGone

# --- the link -----------------------------------------------------------------------------


class AskingAhead(ScriptedReader):
    """Asks ahead as tcp does: what it was told must be read, in that order."""

    def __init__(self, transport: Scripted, blob: bytes) -> None:
        super().__init__(transport, blob)
        self.told: deque[tuple[int, int]] = deque()

    def read(self, start: int, length: int, *rest: Any) -> None:
        if self.told:
            assert self.told.popleft() == (start, length), "not what it was told"
        while (following := self.ahead()) is not None:
            self.told.append(following)
        super().read(start, length, *rest)


class Ahead(Scripted):
    def connect(self, endpoint: bytes, deadline: float) -> AskingAhead:
        self.connected += 1
        return AskingAhead(self, endpoint)


class Bench:
    """A link with one thread, and a source whose reads wait until they are let go."""

    def __init__(self, breaks_with: type[ReadFailed] = SourceGone) -> None:
        self.transport = Ahead()
        self.transport.script = self._wait
        self.source, self.target = Region.of(weights(1)), Region.of(weights(2))
        chunks = range(self.source.layout.num_chunks)
        blob = self.transport.export(self.source, ChunkSet.full(len(chunks)))
        scratch = Scratch()
        self.digests = [digest(self.source, chunk, scratch) for chunk in chunks]
        scratch.close()
        self.reports: SimpleQueue[Any] = SimpleQueue()
        readers = Readers(
            self.target,
            {"scripted": self.transport},
            PullConfig(reader_threads=1),
            time.monotonic() + 30,
            self.reports.put,
        )
        self.link = Link(ORIGIN, (Endpoint("scripted", blob),), readers)
        self.begun: SimpleQueue[int] = SimpleQueue()
        self._breaks_with = breaks_with
        self._go = {chunk: threading.Event() for chunk in chunks}

    def _wait(self, _blob: bytes, chunk: int, reader: ScriptedReader) -> None:
        self.begun.put(chunk)
        while not self._go[chunk].wait(0.002):
            if reader.closed.is_set():
                raise self._breaks_with("the reader was closed")

    def order(self, *chunks: int) -> None:
        """Have the first under way, the others waiting behind it."""
        for chunk in chunks:
            self.link.submit(chunk, self.digests[chunk])
        assert self.begun.get(timeout=5) == chunks[0]

    def let_go(self, *chunks: int) -> None:
        for chunk in chunks:
            self._go[chunk].set()

    def report(self) -> Any:
        return self.reports.get(timeout=5)

    def given_up(self) -> int:
        report = self.report()
        assert isinstance(report, ReadFault)
        assert report.fault is Fault.GIVEN_UP
        return report.chunk

    def landed(self) -> int:
        report = self.report()
        assert isinstance(report, Landed), report
        return report.chunk

    def bytes_of(self, chunk: int) -> bytes:
        start, length = self.target.layout.chunk_range(chunk)
        tensors = numpy.concatenate([found.tensor for found in self.target._found])
        return bytes(tensors[start : start + length])


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*arguments: Any) -> Bench:
        made.append(Bench(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.link.close()


@pytest.mark.parametrize("breaks_with", [SourceGone, CannotReach])
def test_a_read_that_is_taken_back_is_broken_off_and_those_behind_it_come_all_the_same(
    bench: Callable[..., Bench], breaks_with: type[ReadFailed]
) -> None:
    b = bench(breaks_with)
    b.order(0, 1, 2)
    before = b.bytes_of(0)
    b.link.take_back(0)
    assert b.given_up() == 0
    b.let_go(0, 1, 2)  # whoever still read it would write now
    assert {b.landed(), b.landed()} == {1, 2}
    assert b.bytes_of(0) == before
    assert b.link.usable
    assert b.link.rejected == {}, "closing it was no fault of the transport"
    with pytest.raises(Empty):
        b.reports.get_nowait()


def test_what_was_asked_for_behind_a_read_can_be_taken_back_without_it(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.order(0, 1, 2)
    b.link.take_back(1)
    assert b.given_up() == 1
    b.let_go(0, 1, 2)
    assert {b.landed(), b.landed()} == {0, 2}
    assert b.transport.reads.count((b"0", 1)) == 0


def test_a_chunk_that_was_taken_back_can_be_asked_for_again(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.order(3)
    b.link.take_back(3)
    assert b.given_up() == 3
    b.order(3, 4)
    b.link.take_back(4)  # it is this one now
    assert b.given_up() == 4
    b.let_go(3)
    assert b.landed() == 3


def test_taking_back_what_has_landed_changes_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.order(0)
    b.let_go(0, 1)
    assert b.landed() == 0
    b.link.take_back(0)
    b.link.submit(1, b.digests[1])
    assert b.landed() == 1
    with pytest.raises(Empty):
        b.reports.get_nowait()


def test_a_link_that_is_closed_while_something_is_taken_back_reports_each_order_once(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.order(0, 1, 2)
    b.link.take_back(0)
    b.link.close()
    ends = [b.report() for _ in range(3)]
    assert sorted(end.chunk for end in ends) == [0, 1, 2]
    assert all(isinstance(end, ReadFault) for end in ends)
    with pytest.raises(Empty):
        b.reports.get(timeout=0.05)


def test_whatever_is_taken_back_whenever_each_order_ends_once(bench: Callable[..., Bench]) -> None:
    rng = random.Random(7)
    for _ in range(20):
        b = bench()
        chunks = list(range(len(b.digests)))
        rng.shuffle(chunks)
        b.order(*chunks)
        steps: list[Callable[[], None]] = [
            *(partial(b.let_go, chunk) for chunk in chunks),
            *(partial(b.link.take_back, chunk) for chunk in rng.sample(chunks, 3)),
        ]
        rng.shuffle(steps)
        for step in steps:
            step()
        ends = [b.report() for _ in chunks]
        assert sorted(end.chunk for end in ends) == sorted(chunks)
        for end in ends:
            if isinstance(end, Landed):
                start, length = b.source.layout.chunk_range(end.chunk)
                assert length <= CHUNK
                assert digest_of(b.target, end.chunk) == b.digests[end.chunk], start


def digest_of(region: Region, chunk: int) -> bytes:
    scratch = Scratch()
    try:
        return digest(region, chunk, scratch)
    finally:
        scratch.close()


# --- the decision -------------------------------------------------------------------------

CONFIG = PullConfig()


class Table:
    """A ledger of four chunks with known digests, and open sources."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.ledger = Ledger(PUBLICATION, LayoutAgreement(None), self.outbox)
        self.ledger.manifest = Manifest(4)
        for chunk in range(4):
            self.ledger.manifest.put(chunk, bytes(16))
        self.sources = SourceTable(OWN, PUBLICATION, 8)
        self.endgame = Endgame(self.ledger, CONFIG, self.outbox)

    def source(self, id: Any, have: int, locality: int = 2, chunks_a_second: int = 0) -> Source:
        source = self.sources.remember(id, locality, Phase.READY, PUBLICATION)
        assert source is not None
        source.state, source.have = SourceState.OPEN, have
        if chunks_a_second:
            for number in range(1, 20):
                source.delivered(number / chunks_a_second, 1000, (number - 1) / chunks_a_second)
            source.chunks = source.bytes = 0
        return source

    def fly(self, source: Source, chunk: int, asked: float) -> None:
        source.in_flight[chunk] = asked
        self.ledger.flying |= 1 << chunk

    def judge(self, now: float, withheld: int = 0, across: int = 0) -> list[tuple[Any, int]]:
        self.endgame.judge(now, list(self.sources.open()), withheld, across)
        events = [e for e in self.outbox.drain() if isinstance(e, TakeBack)]
        return [(event.source, event.chunk) for event in events]


def test_a_late_read_is_taken_back_once_another_source_has_nothing_else_to_do() -> None:
    t = Table()
    t.ledger.held = 0b1100
    slow, _idle = t.source(ORIGIN, 0b1111), t.source(A, 0b1111)
    t.fly(slow, 0, 100.0)
    patience = CONFIG.source_timeout / 4  # it has delivered nothing yet
    assert t.judge(100.0 + patience) == [], "chunk 1 is still to be had there"
    t.fly(slow, 1, 100.2)
    assert t.judge(100.0 + patience - 0.01) == []
    assert t.endgame.next_wakeup() == pytest.approx(100.0 + patience)
    assert t.judge(100.0 + patience) == [(ORIGIN, 0)]
    assert t.judge(100.0 + patience) == [], "said once"


def test_patience_follows_from_how_fast_the_other_one_is() -> None:
    t = Table()
    t.ledger.held = 0b1110
    slow = t.source(ORIGIN, 0b1111)
    t.source(A, 0b1111, chunks_a_second=2)
    t.fly(slow, 0, 100.0)
    assert t.judge(100.0 + LATE_CHUNKS / 2 - 0.1) == []
    assert t.judge(100.0 + LATE_CHUNKS / 2 + 0.1) == [(ORIGIN, 0)]


def test_who_could_not_give_it_takes_nothing_back() -> None:
    t = Table()
    t.ledger.held = 0b1110
    slow = t.source(ORIGIN, 0b1111)
    other = t.source(A, 0b1110)
    t.fly(slow, 0, 100.0)
    assert t.judge(200.0) == [], "it hasn't the chunk"
    other.have, other.bad = 0b1111, 0b0001
    assert t.judge(200.0) == [], "it sent wrong bytes of it"
    other.bad, other.locality = 0, 3
    assert t.judge(200.0) == [], "it may not cross"
    assert t.judge(200.0, across=0b0001) == [(ORIGIN, 0)]


def test_a_chunk_is_taken_back_so_often_and_no_more() -> None:
    t = Table()
    t.ledger.held = 0b1110
    slow = [t.source(name(f"{n}", f"r{n}"), 0b1111) for n in range(MAX_TAKEN_BACK + 1)]
    t.source(A, 0b1111)
    for source in slow[:MAX_TAKEN_BACK]:
        t.fly(source, 0, 100.0)
        assert t.judge(200.0) == [(source.id, 0)]
        del source.in_flight[0]
    t.fly(slow[-1], 0, 100.0)
    assert t.judge(200.0) == []


def test_who_was_too_slow_with_a_chunk_takes_it_from_nobody() -> None:
    t = Table()
    slow, idle = t.source(ORIGIN, 0b1, chunks_a_second=10), t.source(A, 0b1, chunks_a_second=10)
    t.fly(slow, 0, asked=10.0)
    idle.given_up = 0b1
    assert t.judge(60.0) == []


def test_time_behind_the_chunks_before_is_not_a_chunks_own() -> None:
    t = Table()
    slow = t.source(ORIGIN, 0b11, chunks_a_second=10)
    t.source(A, 0b10, chunks_a_second=10)
    t.fly(slow, 1, asked=2.0)
    slow.delivered(20.0, 1000, 2.0)
    assert t.judge(20.1) == []
    assert t.judge(30.0) == [(ORIGIN, 1)]


def test_fellows_that_bring_nothing_hold_up_nobody_however_many_they_are() -> None:
    t = Table()
    fellows = frozenset(name(f"{number:x}", f"f{number}") for number in range(1, 15))
    spring = t.source(ORIGIN, 0b1111)
    spring.heard = spring.spring = True
    spring.serving = fellows
    sharing = Sharing(OWN, t.sources, t.ledger, CONFIG)
    assert sharing.withheld(0.0)[-1]
    sharing.came()
    for stretch in range(1, 40):
        left = sharing.withheld(stretch * CONFIG.late_after)
    assert left[-1] == 0


@given(st.integers(1, 20), st.integers(0, 300), st.integers(1, 4))
def test_shares_are_even_and_leave_nothing_out(pullers: int, num_chunks: int, copies: int) -> None:
    ids = [name(f"{n:02}", f"r{n}") for n in range(pullers)]
    shares = [even_share(own, ids, num_chunks, copies) for own in ids]
    most = -(-num_chunks * min(copies, pullers) // pullers)
    assert all(share.bit_count() <= most for share in shares)
    for chunk in range(num_chunks):
        owners = sum(share >> chunk & 1 for share in shares)
        assert 1 <= owners <= copies
