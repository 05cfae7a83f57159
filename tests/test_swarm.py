"""The puller's side, first alone against scripted sources, then whole swarms on virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES, Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Event, Outbox, Send
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    LayoutPage,
    LayoutRequest,
    Message,
    Phase,
    PullBye,
    PullGone,
    PullHello,
    PullOffer,
    PullProgress,
    PullUpdate,
)
from tensorhub_p2p.protocol.pulls.picking import any_of, rarest, rarity_levels, some_of
from tensorhub_p2p.protocol.pulls.pull_events import (
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
from tensorhub_p2p.protocol.pulls.serving import DigestsWanted, ShardServer
from tensorhub_p2p.protocol.pulls.sources import Candidate, Fault, Source, SourceId, SourceState
from tensorhub_p2p.protocol.pulls.swarm import Swarm

PUBLICATION = Publication(0, 7, "trainer", Generation(1, 1))
CONFIG = PullConfig(chunks_in_flight=4)
ENDPOINTS = (Endpoint("tcp", b"t"),)


def layout_of(chunks: int) -> Layout:
    return Layout([TensorSpec("w", "uint8", (chunks * MIN_CHUNK_BYTES,), chunks * MIN_CHUNK_BYTES)])


def digest(chunk: int) -> bytes:
    return chunk.to_bytes(16, "big")


def source(name: str, replica: str | None = None) -> SourceId:
    return SourceId(PeerId(name * 16), Slot(Group("policy", replica or f"rollout-{name}"), 0))


ORIGIN = source("0", "trainer")
OWN = source("f")
A, B, C = source("a"), source("b"), source("c")


def candidate(
    source: SourceId,
    locality: int = 2,
    phase: Phase = Phase.READY,
    publication: Publication = PUBLICATION,
) -> Candidate:
    return Candidate(source.peer, source.slot, phase, locality, publication)


# --- picking -------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**40 - 1), max_size=12), st.integers(1, 2**40 - 1), st.integers())
def test_the_rarest_chunk_is_one_that_no_other_is_rarer_than(
    haves: list[int], among: int, seed: int
) -> None:
    def count(chunk: int) -> int:
        return min(8, max(1, sum(have >> chunk & 1 for have in haves)))

    chunk = rarest(rarity_levels(haves), among, random.Random(seed))
    assert among >> chunk & 1
    assert count(chunk) == min(count(c) for c in ChunkSet(40, among))


def test_ties_are_broken_at_random() -> None:
    rng = random.Random(1)
    assert {any_of(0b10110, rng) for _ in range(100)} == {1, 2, 4}


@given(st.integers(0, 2**40 - 1), st.integers(0, 50), st.integers())
def test_some_of_a_set_are_distinct_members_of_it(chunks: int, count: int, seed: int) -> None:
    picked = some_of(chunks, count, random.Random(seed))
    assert len(set(picked)) == len(picked) == min(count, chunks.bit_count())
    assert all(chunks >> chunk & 1 for chunk in picked)


# --- one puller against scripted sources -----------------------------------------------------


class Script:
    """A swarm whose sources are this test."""

    def __init__(self, chunks: int = 8, config: PullConfig = CONFIG, own: Layout | None = None):
        self.layout = layout_of(chunks)
        self.now = 0.0
        self.swarm = Swarm(
            "p", PUBLICATION, OWN, own or self.layout, ["cma", "tcp"], config, random.Random(7)
        )

    def drain(self) -> tuple[list[tuple[PeerId, Message]], list[Event]]:
        sends, events = [], []
        for output in self.swarm.outbox.drain():
            if isinstance(output, Send):
                sends.append((output.to, output.message))
            elif isinstance(output, Event):
                events.append(output)
        return sends, events

    def events(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.drain()[1] if isinstance(event, kind)]

    def fetches(self) -> list[Fetch]:
        return [event for event in self.drain()[1] if isinstance(event, Fetch)]

    def sent(self, kind: type[Message]) -> list[tuple[PeerId, Message]]:
        return [(to, m) for to, m in self.drain()[0] if isinstance(m, kind)]

    def candidates(self, *candidates: Candidate) -> None:
        self.swarm.candidates(self.now, candidates)

    def offer(
        self,
        source: SourceId,
        have: Iterable[int] | None = None,
        known: Iterable[int] | None = None,
        granted: bool = True,
        others: tuple[SourceId, ...] = (),
        layout: Layout | None = None,
        digest_of: Callable[[int], bytes] = digest,
        publication: Publication = PUBLICATION,
    ) -> None:
        layout = layout or self.layout
        has = ChunkSet.full(layout.num_chunks)
        if have is not None:
            has = ChunkSet.of(layout.num_chunks, have)
        manifest = Manifest(layout.num_chunks)
        for chunk in has if known is None else known:
            manifest.put(chunk, digest_of(chunk))
        bitmap, digests = manifest.pack()
        self.receive(
            source,
            PullOffer(
                "p",
                source.slot,
                publication,
                granted,
                layout.digest,
                layout.num_bytes,
                layout.chunk_bytes,
                has.to_bytes(),
                bitmap,
                digests,
                ENDPOINTS if granted else (),
                tuple(others),
            ),
        )

    def receive(self, source: SourceId, message: Message) -> None:
        self.swarm.receive(self.now, source.peer, message)

    def pass_time(self, seconds: float) -> list[Event]:
        """Tick whenever the swarm wants to; returns the events."""
        end, events = self.now + seconds, []
        for _ in range(100_000):
            due = self.swarm.next_wakeup()
            if due is None or due > end:
                self.now = end
                return events
            assert due >= self.now or due == pytest.approx(self.now), "a wake-up in the past"
            self.now = max(self.now, due)
            self.swarm.tick(self.now)
            events += self.drain()[1]
        raise AssertionError("the swarm wants to be woken forever")

    def start(self, *sources: SourceId, **offer: object) -> list[Fetch]:
        self.candidates(*map(candidate, sources))
        for source in sources:
            self.offer(source, **offer)  # type: ignore[arg-type]
        self.swarm.begin(self.now)
        return self.fetches()

    def complete(self, fetches: list[Fetch], without: frozenset[SourceId] = frozenset()) -> None:
        """Deliver everything until the swarm is through."""
        todo = list(fetches)
        while todo:
            fetch = todo.pop(0)
            assert fetch.source not in without
            self.now += 0.001
            self.swarm.fetched(self.now, fetch.source, fetch.chunk, fetch.digest)
            todo += self.fetches()


def test_nothing_is_fetched_before_begin() -> None:
    s = Script()
    s.candidates(candidate(A))
    [(to, hello)] = s.sent(PullHello)
    assert to == A.peer
    assert isinstance(hello, PullHello)
    assert (hello.publication, hello.puller) == (PUBLICATION, OWN.slot)
    s.offer(A)
    _, events = s.drain()
    assert [type(e) for e in events] == [LayoutFound, DigestsLearnt, SourceFound]
    s.swarm.begin(s.now)
    assert len(s.fetches()) == 4


def test_different_chunks_are_in_flight_at_several_sources_at_once() -> None:
    s = Script()
    fetches = s.start(A, B)
    assert len({f.chunk for f in fetches}) == 4
    assert sorted(f.source for f in fetches) == [A, A, B, B]


def test_the_only_source_is_asked_far_ahead_once_it_delivered() -> None:
    s = Script(chunks=64)
    first = s.start(A)
    assert len(first) == 4
    usual = []
    for fetch in first[:3]:
        s.now += 1.0
        s.swarm.fetched(s.now, fetch.source, fetch.chunk, fetch.digest)
        usual += s.fetches()
    assert len(usual) == 3
    s.now += 1.0
    s.swarm.fetched(s.now, first[3].source, first[3].chunk, first[3].digest)
    ahead = s.fetches()
    assert 25 < len(ahead) < 40, "thirty seconds' worth"
    s.complete(usual + ahead)
    assert len(s.swarm.held) == 64


@pytest.mark.parametrize("asked", [True, False])
def test_nobody_is_asked_far_ahead_while_there_is_another_who_may_serve(asked: bool) -> None:
    s = Script(chunks=64)
    s.candidates(candidate(A), candidate(B))
    s.offer(A)
    if asked:
        s.offer(B, have=())
    s.swarm.begin(s.now)
    for fetch in s.fetches():
        s.now += 0.1
        s.swarm.fetched(s.now, fetch.source, fetch.chunk, fetch.digest)
        assert len(s.fetches()) <= 1


def test_what_was_gathered_is_taken_in_at_once_and_acted_on_later() -> None:
    s = Script()
    first, second, *_ = s.start(A, B)
    s.swarm.gather()
    s.swarm.fetched(0.1, first.source, first.chunk, first.digest)
    s.swarm.failed(0.1, second.source, second.chunk, Fault.SILENT)
    sends, events = s.drain()
    assert [type(event) for event in events] == [ChunkHeld]
    assert not sends
    s.swarm.act(0.1)
    assert len(s.fetches()) == 2, "one for each that came back"
    s.swarm.act(0.1)
    assert s.drain() == ([], [])


def test_the_most_that_anything_gathered_calls_for_is_done() -> None:
    s = Script()
    first, *_ = s.start(A, B)
    s.swarm.gather()
    s.offer(A, others=(C,))
    s.swarm.fetched(0.1, first.source, first.chunk, first.digest)
    s.swarm.act(0.1)
    assert [to for to, _ in s.sent(PullHello)] == [C.peer]


@given(st.lists(st.integers(1, 4), min_size=1), st.integers())
def test_a_pull_that_gathers_gets_everything_too(batches: list[int], seed: int) -> None:
    s, rng = Script(chunks=24), random.Random(seed)
    todo = s.start(A, B)
    for size in itertools.cycle(batches):
        s.now += 0.01
        s.swarm.gather()
        for fetch in rng.sample(todo, min(size, len(todo))):
            todo.remove(fetch)
            s.swarm.fetched(s.now, fetch.source, fetch.chunk, fetch.digest)
            full = ChunkSet.full(24).to_bytes()
            s.receive(fetch.source, PullUpdate("p", fetch.source.slot, full, (), None, None))
        s.swarm.act(s.now)
        events = s.drain()[1]
        todo += [event for event in events if isinstance(event, Fetch)]
        if any(isinstance(event, Completed) for event in events):
            break
    assert s.swarm.held.is_full
    assert not todo


def taken_back(s: Script, fetch: Fetch) -> Fetch:
    """It is under way for long while another source is idle; what is asked for instead."""
    events = s.pass_time(1.0)
    assert TakeBack(fetch.source, fetch.chunk) in events
    s.swarm.failed(s.now, fetch.source, fetch.chunk, Fault.GIVEN_UP)
    [instead] = s.fetches()
    assert instead.source != fetch.source
    return instead


def died(s: Script, fetch: Fetch) -> list[SourceId]:
    """Its source is dead; who is asked instead."""
    s.swarm.lost(s.now, fetch.source.peer)
    s.swarm.failed(s.now, fetch.source, fetch.chunk, Fault.GONE)
    return [instead.source for instead in s.fetches()]


def test_a_chunk_that_came_too_slowly_from_all_that_are_left_is_asked_for_all_the_same() -> None:
    s = Script(chunks=1)
    [first] = s.start(A, B, C)
    second = taken_back(s, first)
    third = taken_back(s, second)
    assert {first.source, second.source, third.source} == {A, B, C}
    assert died(s, third)[0] in (first.source, second.source)


def test_a_chunk_that_came_too_slowly_is_not_left_to_a_source_of_another_zone() -> None:
    s = Script(chunks=1)
    s.candidates(candidate(C, locality=3))
    s.offer(C)
    s.candidates(candidate(A), candidate(B), candidate(C, locality=3))
    s.offer(A)
    s.offer(B)
    s.swarm.begin(s.now)
    [first] = s.fetches()
    second = taken_back(s, first)
    assert {first.source, second.source} == {A, B}
    assert died(s, second) == [first.source]


def test_after_a_pause_of_our_own_news_come_first_and_nobody_was_silent() -> None:
    s = Script()
    s.candidates(candidate(A), candidate(B))
    s.offer(B)
    s.swarm.begin(s.now)
    s.drain()
    full = ChunkSet.full(8).to_bytes()
    s.now = 10.0
    s.receive(B, PullUpdate("p", B.slot, full, (), None, None))
    s.swarm.tick(s.now)
    states = {facts.source: facts.state for facts in s.swarm.facts()}
    assert states[A] is SourceState.ASKING


def test_a_pause_of_our_own_makes_no_read_a_late_one() -> None:
    s = Script(chunks=1)
    [fetch] = s.start(A, B)
    s.now = 10.0
    s.swarm.tick(s.now)
    assert s.events(TakeBack) == []
    assert TakeBack(fetch.source, 0) in s.pass_time(1.0)


def test_a_pause_of_our_own_makes_no_fellow_a_late_one() -> None:
    s = Script()
    s.candidates(candidate(A))
    s.offer(A, others=(B,))
    s.swarm.begin(s.now)
    sharing = s.swarm._sharing
    sharing._best = 1.0  # as if chunks had come before
    s.now = 10.0
    s.swarm.tick(s.now)
    assert sharing._late == 0
    s.pass_time(2 * CONFIG.late_after)
    assert sharing._late > 0


def test_what_comes_at_the_same_moment_is_no_sign_of_speed() -> None:
    at = Source(A, 2, Phase.READY, PUBLICATION, listed=True)
    for number in range(4):
        at.delivered(1.0 + number * 1e-5, 1 << 20, 0.0)
    assert at.rate == pytest.approx(1 << 20)
    at.delivered(2.0, 1 << 20, 0.0)  # and the three that came right after the first
    assert at.rate is not None
    assert 1 << 20 < at.rate < 4 << 20


def test_a_pull_ends_complete_and_says_goodbye_to_every_source() -> None:
    s = Script()
    todo = s.start(A, B)
    held = 0
    while todo:
        fetch = todo.pop()
        s.now += 0.001
        s.swarm.fetched(s.now, fetch.source, fetch.chunk, fetch.digest)
        sends, events = s.drain()
        held += sum(isinstance(e, ChunkHeld) for e in events)
        todo += [e for e in events if isinstance(e, Fetch)]
    assert held == 8
    assert isinstance(events[-1], Completed)
    byes = {to: m for to, m in sends if isinstance(m, PullBye)}
    assert set(byes) == {A.peer, B.peer}
    assert all(bye.complete for bye in byes.values())
    assert s.swarm.held.is_full
    assert s.swarm.next_wakeup() is None
    assert sum(f.chunks for f in s.swarm.facts()) == 8


def test_a_shard_without_bytes_is_complete_at_once() -> None:
    s = Script(chunks=0)
    s.candidates(candidate(A))
    s.offer(A)
    s.swarm.begin(s.now)
    assert s.events(Completed)


def test_the_rarest_chunks_are_fetched_first() -> None:
    s = Script(chunks=6)
    s.candidates(candidate(A), candidate(B))
    s.offer(A)
    s.offer(B, have=[0, 1, 2])
    s.swarm.begin(s.now)
    fetches = s.fetches()
    assert all(f.chunk in (3, 4, 5) for f in fetches if f.source == A)


def test_near_sources_come_first() -> None:
    s = Script(config=PullConfig(reader_threads=1, chunks_in_flight=2))
    s.candidates(candidate(A, locality=3), candidate(B, locality=0))
    s.offer(A)
    s.offer(B)
    s.swarm.begin(s.now)
    assert {f.source for f in s.fetches()} == {B}


def test_who_withdraws_is_asked_last_and_read_if_nobody_else_has_it() -> None:
    s = Script(config=PullConfig(max_sources=1))
    s.candidates(
        candidate(A, locality=0, phase=Phase.WITHDRAWING), candidate(B, phase=Phase.PARTIAL)
    )
    assert [to for to, _ in s.sent(PullHello)] == [B.peer]
    s.candidates(candidate(A, phase=Phase.WITHDRAWING))
    s.swarm.lost(s.now, B.peer)
    assert [to for to, _ in s.sent(PullHello)] == [A.peer]
    s.offer(A)
    s.swarm.begin(s.now)
    assert {f.source for f in s.fetches()} == {A}


def test_a_slow_source_is_left_alone_when_the_others_are_done_sooner() -> None:
    s = Script(chunks=128)
    takes = {A: 0.001, B: 0.03}
    finish = {(f.source, f.chunk): s.now + takes[f.source] for f in s.start(A, B)}
    while finish:
        (who, chunk), s.now = min(finish.items(), key=lambda item: item[1])
        del finish[(who, chunk)]
        s.swarm.fetched(s.now, who, chunk, digest(chunk))
        for f in s.fetches():
            finish[(f.source, f.chunk)] = s.now + takes[f.source]
    assert s.swarm.done
    assert {f.source: f.chunks for f in s.swarm.facts()}[B] == 4, "it helped while it could"
    assert s.now < 0.07, "waited for the slow one at the end"


def test_a_chunk_without_a_known_digest_is_asked_for_and_not_fetched() -> None:
    s = Script()
    s.candidates(candidate(ORIGIN))
    s.offer(ORIGIN, known=[])
    [(_, progress)] = s.sent(PullProgress)
    s.swarm.begin(s.now)
    assert s.drain() == ([], []), "asked once, and nothing to fetch"
    assert isinstance(progress, PullProgress)
    assert sorted(progress.wanted) == list(range(8))
    have = ChunkSet.full(8).to_bytes()
    s.receive(ORIGIN, PullUpdate("p", ORIGIN.slot, have, ((3, digest(3)),)))
    assert [f.chunk for f in s.fetches()] == [3]


def test_a_failed_chunk_goes_to_another_source_and_verified_ones_are_kept() -> None:
    s = Script()
    fetches = s.start(A, B)
    first = next(f for f in fetches if f.source == A)
    good = next(f for f in fetches if f.source == B)
    s.swarm.fetched(s.now, B, good.chunk, good.digest)
    again = s.fetches()
    for f in [f for f in fetches + again if f.source == A]:
        s.swarm.failed(s.now, A, f.chunk, Fault.GONE)
    again = [f for f in again if f.source == B] + s.fetches()
    assert first.chunk in [f.chunk for f in again]
    s.complete(again + [f for f in fetches if f.source == B and f != good], frozenset({A}))
    assert s.swarm.done
    assert good.chunk in s.swarm.held


def test_a_source_that_failed_is_asked_again_after_a_rest() -> None:
    s = Script()
    fetches = s.start(A)
    for f in fetches:
        s.swarm.failed(s.now, A, f.chunk, Fault.GONE)
    assert s.sent(PullHello) == []
    s.now = s.swarm.next_wakeup() or 0.0
    assert s.now == pytest.approx(CONFIG.retry_interval)
    s.swarm.tick(s.now)
    assert s.sent(PullHello)
    s.offer(A)
    assert s.fetches()


def test_two_mismatches_and_a_source_is_shunned() -> None:
    s = Script()
    fetches = s.start(A, B)
    wrong = [f for f in fetches if f.source == A]
    s.swarm.failed(s.now, A, wrong[0].chunk, Fault.MISMATCH)
    fetches += s.fetches()
    s.swarm.failed(s.now, A, wrong[1].chunk, Fault.MISMATCH)
    events = s.drain()[1]
    assert SourceLost(A) in events
    todo = [f for f in fetches if f.source == B] + [e for e in events if isinstance(e, Fetch)]
    for f in [f for f in fetches if f.source == A and f not in wrong]:
        s.swarm.fetched(s.now, A, f.chunk, f.digest)
    s.complete(todo + s.fetches(), frozenset({A}))
    assert s.swarm.done
    facts = {f.source: f for f in s.swarm.facts()}
    assert facts[A].mismatches == 2
    assert facts[A].state is SourceState.SHUNNED


def test_a_mismatch_from_a_source_that_withdrew_is_a_lost_chunk_and_no_lie() -> None:
    s = Script()
    fetches = s.start(A)
    s.receive(A, PullGone("p", A.slot, "unpublished"))
    for f in fetches:
        s.swarm.failed(s.now, A, f.chunk, Fault.MISMATCH)
    facts = s.swarm.facts()[0]
    assert facts.mismatches == 0
    assert facts.state is SourceState.RESTING


def test_the_word_of_a_withdrawal_that_comes_late_clears_the_source() -> None:
    s = Script()
    fetches = s.start(A)
    for f in fetches:
        s.swarm.failed(s.now, A, f.chunk, Fault.MISMATCH)
    s.receive(A, PullGone("p", A.slot, "unpublished"))
    ends = s.pass_time(60)
    assert [type(e) for e in ends if isinstance(e, (Starved, Corrupt))] == [Starved]


def test_the_goodbye_to_a_source_that_withdrew_follows_the_last_chunk_in_flight() -> None:
    s = Script()
    fetches = s.start(A)
    s.receive(A, PullGone("p", A.slot, "unpublished"))
    for f in fetches[:-1]:
        s.swarm.fetched(s.now, A, f.chunk, f.digest)
    assert s.sent(PullBye) == []
    s.swarm.fetched(s.now, A, fetches[-1].chunk, fetches[-1].digest)
    assert s.sent(PullBye)
    assert len(s.swarm.held) == 4


def test_wrong_bytes_from_every_source_end_in_corrupt_and_name_them() -> None:
    s = Script()
    todo = s.start(A, B)
    ends: list[Event] = []
    while todo and not ends:
        f = todo.pop()
        if f.chunk == 5:
            s.swarm.failed(s.now, f.source, 5, Fault.MISMATCH)
        else:
            s.swarm.fetched(s.now, f.source, f.chunk, f.digest)
        s.now += 0.001
        todo += s.fetches()
    [corrupt] = [e for e in s.pass_time(30) if isinstance(e, (Starved, Corrupt))]
    assert isinstance(corrupt, Corrupt)
    assert corrupt.chunk == 5
    assert set(corrupt.sources) == {A, B}
    assert len(s.swarm.held) == 7


def test_a_chunk_that_nobody_has_starves_the_pull_after_the_stated_time() -> None:
    s = Script()
    s.complete(s.start(A, have=range(7)))
    started = s.now
    s.offer(A, have=range(7))
    ends = []
    while not ends:
        s.now = s.swarm.next_wakeup() or 0.0
        s.swarm.tick(s.now)
        sends, events = s.drain()
        for to, m in sends:
            if isinstance(m, PullHello):
                s.offer(source("a") if to == A.peer else B, have=range(7))
        ends = [e for e in events if isinstance(e, (Starved, Corrupt))]
    assert ends[0].chunks == (7,)
    assert s.now - started <= CONFIG.unavailable_after + 0.1
    assert s.now >= CONFIG.unavailable_after


def dry_until(s: Script, *answering: SourceId, **offer: object) -> tuple[Starved, float]:
    """Those go on saying what they have; the verdict, and how long it took."""
    since = s.now
    while True:
        s.now = s.swarm.next_wakeup() or 0.0
        s.swarm.tick(s.now)
        sends, events = s.drain()
        for to, m in sends:
            for one in answering:
                if isinstance(m, PullHello) and to == one.peer:
                    s.offer(one, **offer)  # type: ignore[arg-type]
        for event in events:
            if isinstance(event, Starved):
                return event, s.now - since


def test_what_died_with_its_publisher_is_given_up_soon() -> None:
    s = Script()
    s.start(ORIGIN, have=range(8), known=())
    s.swarm.lost(s.now, ORIGIN.peer)
    s.candidates()
    starved, took = dry_until(s)
    assert starved.lost
    assert set(starved.chunks) == set(range(8))
    assert CONFIG.unsealed_after <= took < CONFIG.unsealed_after + 0.1


def test_it_is_given_up_soon_where_other_holders_have_said_that_they_lack_it() -> None:
    s = Script()
    s.complete(s.start(ORIGIN, A, have=range(6)))
    s.swarm.lost(s.now, ORIGIN.peer)
    s.candidates(candidate(A, phase=Phase.PARTIAL))
    starved, took = dry_until(s, A, have=range(6))
    assert starved.lost
    assert starved.chunks == (6, 7)
    assert took < CONFIG.unsealed_after + 0.75  # it is asked again meanwhile


@pytest.mark.parametrize("phase", [Phase.PARTIAL, Phase.READY])
def test_what_holders_said_before_the_death_is_not_their_last_word(phase: Phase) -> None:
    s = Script()
    s.complete(s.start(ORIGIN, A, have=range(6)))
    s.swarm.lost(s.now, ORIGIN.peer)
    s.candidates(candidate(A, phase=phase))
    said = {} if phase is Phase.PARTIAL else {"have": range(6)}
    answering = [A] if phase is Phase.READY else []  # listed as having all: not all has come yet
    starved, took = dry_until(s, *answering, **said)
    assert not starved.lost
    assert took >= CONFIG.unavailable_after - 0.1


def test_a_layout_may_still_come_from_who_answers() -> None:
    mine = Layout([TensorSpec("v", "uint8", (MIN_CHUNK_BYTES,), MIN_CHUNK_BYTES)])
    s = Script(own=mine)
    s.candidates(candidate(ORIGIN), candidate(A, phase=Phase.PARTIAL))
    s.offer(ORIGIN, known=())
    s.offer(A, have=())
    s.swarm.lost(s.now, ORIGIN.peer)
    s.candidates(candidate(A, phase=Phase.PARTIAL))
    starved, took = dry_until(s, A, have=())
    assert not starved.lost
    assert took >= CONFIG.unavailable_after - 0.1


def test_what_is_lost_counts_more_than_wrong_bytes_elsewhere() -> None:
    s = Script()
    fetches = s.start(ORIGIN, have=range(6), known=range(6))
    s.swarm.failed(s.now, ORIGIN, fetches[0].chunk, Fault.MISMATCH)
    s.swarm.lost(s.now, ORIGIN.peer)
    for fetch in fetches[1:]:
        s.swarm.failed(s.now, ORIGIN, fetch.chunk, Fault.GONE)
    s.candidates()
    starved, _ = dry_until(s)
    assert starved.lost
    assert starved.chunks == (6, 7)


def test_goodbyes_come_before_the_verdict() -> None:
    """Who carries both out stops at the verdict."""
    s = Script()
    s.start(A, have=range(7))
    while True:
        s.now = s.swarm.next_wakeup() or 0.0
        s.swarm.tick(s.now)
        outputs = s.swarm.outbox.drain()
        if any(isinstance(output, Starved) for output in outputs):
            break
        s.offer(A, have=range(7))
    kinds = [type(o.message) if isinstance(o, Send) else type(o) for o in outputs]
    assert kinds.index(PullBye) < kinds.index(Starved)


@pytest.mark.parametrize("why", ["a holder is silent", "the digests are known", "it isn't dead"])
def test_it_is_waited_for_as_long_as_ever_where_somebody_may_have_it(why: str) -> None:
    s = Script()
    known = range(8) if why == "the digests are known" else range(6)
    s.start(ORIGIN, have=range(6), known=known)
    if why == "it isn't dead":
        s.candidates()
        s.receive(ORIGIN, PullGone("p", ORIGIN.slot, "unpublished"))
    else:
        s.swarm.lost(s.now, ORIGIN.peer)
        s.candidates(*([candidate(A)] if why == "a holder is silent" else []))
    starved, took = dry_until(s)
    assert not starved.lost
    assert took >= CONFIG.unavailable_after - 0.1


def test_what_seemed_lost_is_pulled_from_a_holder_that_is_heard_of_in_time() -> None:
    s = Script()
    s.start(ORIGIN, have=range(8), known=())
    s.swarm.lost(s.now, ORIGIN.peer)
    s.candidates()
    assert not s.pass_time(CONFIG.unsealed_after * 0.8)
    s.candidates(candidate(B))
    assert not [e for e in s.pass_time(CONFIG.unsealed_after) if isinstance(e, Starved)]
    s.offer(B)
    s.complete(s.fetches())
    assert len(s.swarm.held) == 8


def test_nobody_who_answers_is_starved_too() -> None:
    s = Script()
    s.candidates(candidate(A), candidate(B))
    [end] = [e for e in s.pass_time(60) if isinstance(e, Starved)]
    assert end.chunks == ()
    assert {f.source for f in end.tried} == {A, B}
    assert s.now == 60
    assert s.swarm.done


def test_a_pause_of_the_puller_itself_is_nobodys_silence() -> None:
    s = Script()
    s.candidates(candidate(A))
    s.now += 60
    s.swarm.tick(s.now)
    assert s.events(Starved) == []
    s.offer(A)
    s.swarm.begin(s.now)
    assert s.fetches()


def test_what_could_not_be_heard_is_nobodys_silence() -> None:
    s = Script()
    s.candidates(candidate(A))
    began = s.now
    while s.now < began + 60:
        assert not [e for e in s.pass_time(0.5) if isinstance(e, Starved)]
        s.swarm.held_up(s.now, 0.5)
    [_] = [e for e in s.pass_time(60) if isinstance(e, Starved)]


def test_a_pause_that_the_driver_knows_of_too_counts_once() -> None:
    s = Script()
    s.candidates(candidate(A))
    s.pass_time(1.0)
    due = s.swarm._drought.next_wakeup()
    assert due is not None
    s.now += 10
    s.swarm.held_up(s.now, 10)
    s.swarm.tick(s.now)
    assert s.swarm._drought.next_wakeup() == pytest.approx(due + 10, abs=CONFIG.retry_interval)


def test_a_source_that_answers_but_never_delivers_ends_starved() -> None:
    s = Script()
    todo = s.start(A)
    ends: list[Event] = []
    while not ends and s.now < 60:
        for f in todo:
            s.swarm.failed(s.now, A, f.chunk, Fault.SILENT)
        sends, events = s.drain()
        s.now = s.swarm.next_wakeup() or s.now
        s.swarm.tick(s.now)
        more_sends, more_events = s.drain()
        if any(isinstance(m, PullHello) for _, m in sends + more_sends):
            s.offer(A)
        events += more_events + s.drain()[1]
        todo = [e for e in events if isinstance(e, Fetch)]
        ends = [e for e in events if isinstance(e, Starved)]
    assert ends
    assert s.now < 20


def test_redirects_become_candidates() -> None:
    s = Script()
    s.candidates(candidate(ORIGIN))
    s.offer(ORIGIN, granted=False, others=(A, B, OWN))
    assert {to for to, _ in s.sent(PullHello)} >= {A.peer, B.peer}
    assert OWN not in [f.source for f in s.swarm.facts()]


def test_a_source_that_was_full_is_used_once_it_grants() -> None:
    s = Script()
    s.candidates(candidate(A))
    s.offer(A, granted=False)
    s.swarm.begin(s.now)
    assert s.fetches() == []
    s.offer(A)
    assert s.fetches()


def test_a_grant_that_was_lost_is_asked_for_again() -> None:
    s = Script()
    s.candidates(candidate(A))
    s.offer(A, granted=False)
    s.swarm.begin(s.now)
    s.drain()
    while s.now < 1:
        s.now = s.swarm.next_wakeup() or 0.0
        s.swarm.tick(s.now)
    assert s.sent(PullHello)


def test_leases_are_renewed_in_time() -> None:
    s = Script()
    s.start(A)
    heard = [s.now]
    while s.now < 10:
        s.now = s.swarm.next_wakeup() or 0.0
        s.swarm.tick(s.now)
        for to, m in s.drain()[0]:
            assert to == A.peer
            assert isinstance(m, (PullProgress, PullHello))
            heard.append(s.now)
    assert max(b - a for a, b in itertools.pairwise(heard)) <= CONFIG.lease_seconds / 3 + 0.01


def test_the_origins_digests_count_when_two_sources_differ() -> None:
    def other(chunk: int) -> bytes:
        return b"\xff" * 16 if chunk == 2 else digest(chunk)

    s = Script()
    fetches = s.start(A, digest_of=other)
    s.complete(fetches)
    assert s.swarm.done, "with A alone, its word counts"

    s = Script(chunks=8)
    todo = s.start(A, digest_of=other)
    while 2 not in s.swarm.held:
        f = todo.pop(0)
        s.swarm.fetched(s.now, A, f.chunk, f.digest)
        todo += s.fetches()
    s.candidates(candidate(A), candidate(ORIGIN))
    s.offer(ORIGIN)
    _, events = s.drain()
    assert ChunkRevoked(2) in events
    assert 2 not in s.swarm.held
    todo += [e for e in events if isinstance(e, Fetch)]
    s.complete(todo)
    assert s.swarm.done
    assert any("another digest" in note for f in s.swarm.facts() for note in f.notes)

    s = Script()
    s.candidates(candidate(A), candidate(ORIGIN))
    s.offer(ORIGIN)
    s.offer(A, digest_of=other)
    s.swarm.begin(s.now)
    todo = s.fetches()
    while todo:
        f = todo.pop()
        assert f.digest == digest(f.chunk)
        s.swarm.fetched(s.now, f.source, f.chunk, f.digest)
        todo += s.fetches()
    assert s.swarm.done


@pytest.mark.parametrize("first", [True, False], ids=["before the offer", "after it"])
def test_digests_that_the_origin_left_behind_let_partial_holders_suffice(first: bool) -> None:
    s = Script(chunks=4)
    left = tuple(map(digest, range(4)))
    s.swarm.candidates(s.now, [candidate(A), candidate(B)], left if first else ())
    s.offer(A, have=[0, 1], known=[])
    s.offer(B, have=[2, 3], known=[])
    s.swarm.begin(s.now)
    if not first:
        assert not s.fetches(), "nobody says what their bytes should be"
        s.swarm.candidates(s.now, [candidate(A), candidate(B)], left)
    s.complete(s.fetches())
    assert s.swarm.done


def test_what_the_origin_left_behind_counts_more_than_what_others_say() -> None:
    s = Script(chunks=2)
    s.swarm.candidates(s.now, [candidate(A)])
    s.offer(A, digest_of=lambda chunk: b"\xff" * 16)
    s.swarm.candidates(s.now, [candidate(A)], tuple(map(digest, range(2))))
    s.swarm.begin(s.now)
    assert {f.digest for f in s.fetches()} == {digest(0), digest(1)}


@pytest.mark.parametrize("left", [(b"\0" * 16,), (b"\0" * 15,) * 2], ids=["too few", "too short"])
def test_a_list_of_digests_that_cannot_be_is_dropped(left: tuple[bytes, ...]) -> None:
    s = Script(chunks=2)
    s.swarm.candidates(s.now, [candidate(A)], left)
    s.offer(A)
    s.swarm.begin(s.now)
    assert s.swarm.dropped == 1
    assert {f.digest for f in s.fetches()} == {digest(0), digest(1)}


def test_a_chunk_fetched_for_a_digest_that_was_replaced_is_fetched_again() -> None:
    s = Script(chunks=1)
    [f] = s.start(A, digest_of=lambda c: b"\xff" * 16)
    s.candidates(candidate(A), candidate(ORIGIN))
    s.offer(ORIGIN)
    s.drain()
    s.swarm.fetched(s.now, A, 0, f.digest)
    [again] = s.fetches()
    assert again.digest == digest(0)
    assert not s.swarm.done


def test_a_dead_peers_chunks_wait_for_their_readers_and_then_go_elsewhere() -> None:
    s = Script(chunks=4)
    fetches = s.start(A, B)
    s.swarm.lost(s.now, A.peer)
    events = s.drain()[1]
    assert SourceLost(A) in events
    assert not [e for e in events if isinstance(e, Fetch)], "two readers on one chunk"
    for f in [f for f in fetches if f.source == A]:
        s.swarm.failed(s.now, A, f.chunk, Fault.GONE)
    s.swarm.fetched(s.now, B, *next((f.chunk, f.digest) for f in fetches if f.source == B))
    assert {f.source for f in s.fetches()} == {B}


def test_a_stalled_source_does_not_keep_others_from_being_read() -> None:
    s = Script(chunks=32)
    stuck = s.start(A)
    assert len(stuck) == 4
    s.candidates(candidate(A), candidate(B))
    s.offer(B)
    assert s.fetches() == [], "four chunks in flight are enough"
    events = s.pass_time(CONFIG.source_timeout / 4 + 0.01)
    rest = [e for e in events if isinstance(e, Fetch)]
    assert rest
    assert {f.source for f in rest} == {B}


def test_a_different_layout_is_fetched_in_pages_and_checked() -> None:
    theirs = Layout(
        [TensorSpec(f"t{i}", "uint8", (MIN_CHUNK_BYTES,), MIN_CHUNK_BYTES) for i in range(8)]
    )
    s = Script(own=layout_of(3))
    s.candidates(candidate(A), candidate(B))
    s.offer(A, layout=theirs)
    s.offer(B, layout=theirs)
    [(_, request)] = s.sent(LayoutRequest)
    assert isinstance(request, LayoutRequest)
    assert request.first == 0
    s.receive(A, LayoutPage("p", A.slot, 0, 8, theirs.tensors[:5]))
    s.receive(A, LayoutPage("p", A.slot, 0, 8, theirs.tensors[:5]))
    [(_, request)] = s.sent(LayoutRequest)
    assert isinstance(request, LayoutRequest)
    assert request.first == 5
    s.receive(A, LayoutPage("p", A.slot, 5, 8, theirs.tensors[5:]))
    [found] = s.events(LayoutFound)
    assert isinstance(found, LayoutFound)
    assert found.layout == theirs


def test_a_lost_page_is_asked_for_again_elsewhere() -> None:
    theirs = Layout([TensorSpec("t", "uint8", (MIN_CHUNK_BYTES,), MIN_CHUNK_BYTES)])
    s = Script(own=layout_of(3))
    s.candidates(candidate(A), candidate(B))
    s.offer(A, layout=theirs)
    s.offer(B, layout=theirs)
    asked = [to for to, _ in s.sent(LayoutRequest)]
    s.now += CONFIG.retry_interval
    s.swarm.tick(s.now)
    asked += [to for to, _ in s.sent(LayoutRequest)]
    assert sorted(asked) == sorted([A.peer, B.peer])


def test_a_layout_that_does_not_match_its_digest_is_not_believed() -> None:
    theirs = Layout([TensorSpec("t", "uint8", (MIN_CHUNK_BYTES,), MIN_CHUNK_BYTES)])
    s = Script(own=layout_of(3))
    s.candidates(candidate(A), candidate(B))
    s.offer(A, layout=theirs)
    s.drain()
    s.receive(
        A,
        LayoutPage(
            "p", A.slot, 0, 1, (TensorSpec("x", "uint8", (MIN_CHUNK_BYTES,), MIN_CHUNK_BYTES),)
        ),
    )
    s.drain()
    s.offer(B, layout=theirs)
    [(to, _)] = s.sent(LayoutRequest)
    assert to == B.peer


def test_malformed_offers_are_dropped_and_counted() -> None:
    s = Script()
    s.candidates(candidate(A))
    good = PullOffer(
        "p", A.slot, PUBLICATION, True, s.layout.digest, s.layout.num_bytes,
        s.layout.chunk_bytes, b"\xff", b"", b"", ENDPOINTS,
    )  # fmt: skip
    for changes in [
        {"have": b"\xff\xff"},
        {"digests": b"x" * 16, "known": b"\x03"},
        {"known": b"\xff\xff\xff"},
        {"chunk_bytes": 0},
        {"num_bytes": 1 << 60},
        {"num_bytes": 5},
        {"layout": b"x" * 16, "num_bytes": 1 << 40, "chunk_bytes": 16 << 20},
    ]:
        message = PullOffer(**({f: getattr(good, f) for f in good.__struct_fields__} | changes))
        s.receive(A, message)
    assert s.swarm.dropped == 7
    s.receive(A, PullUpdate("p", A.slot, b"\xff\xff\xff"))
    s.receive(A, PullUpdate("p", A.slot, b"\xff", ((99, digest(1)),)))
    s.receive(A, PullUpdate("p", A.slot, b"\xff", ((1, b"short"),)))


def test_what_comes_from_strangers_or_for_other_pulls_is_ignored() -> None:
    s = Script()
    s.candidates(candidate(A))
    s.drain()
    s.offer(B)
    s.receive(A, PullGone("another pull", A.slot, "no"))
    assert s.drain() == ([], [])


# --- twins: holders of another publication of the same version ---------------------------------

TWIN_PUBLICATION = Publication(0, 7, "trainer-1", Generation(1, 1))
TWIN = source("1", "trainer-1")


def twin(source: SourceId = TWIN, locality: int = 2) -> Candidate:
    return candidate(source, locality, publication=TWIN_PUBLICATION)


def with_a_twin(
    own: Iterable[int] | None = None,
    digest_of: Callable[[int], bytes] = digest,
    known: Iterable[int] | None = None,
) -> Script:
    """A pull that has begun, from the origin, which has `own`, and a twin, which has all."""
    s = Script()
    s.candidates(candidate(ORIGIN), twin())
    s.offer(ORIGIN, have=own, known=range(8))
    s.offer(TWIN, digest_of=digest_of, known=known, publication=TWIN_PUBLICATION)
    s.swarm.begin(s.now)
    return s


def test_a_twin_is_asked_for_what_it_holds_once_the_layout_is_settled() -> None:
    s = Script()
    s.candidates(candidate(ORIGIN), twin(locality=0))
    assert [to for to, _ in s.sent(PullHello)] == [ORIGIN.peer]
    s.offer(ORIGIN)
    [(to, hello)] = s.sent(PullHello)
    assert to == TWIN.peer
    assert isinstance(hello, PullHello)
    assert hello.publication == TWIN_PUBLICATION
    assert hello.puller is None, "nobody finds that publication here"


def test_chunks_come_from_twins_as_from_others() -> None:
    s = with_a_twin()
    s.complete(s.fetches())
    facts = {f.source: f.chunks for f in s.swarm.facts()}
    assert facts[ORIGIN] > 0
    assert facts[TWIN] > 0
    assert s.swarm.held.is_full


def test_a_chunk_is_asked_of_a_twin_only_if_its_list_has_the_same_digest() -> None:
    s = with_a_twin(
        own=[], digest_of=lambda c: digest(c if c < 2 else 99), known=[0, 1, 2, 3, 4, 5]
    )
    fetches = s.fetches()
    assert {f.chunk for f in fetches} == {0, 1}
    s.complete(fetches)
    more = ((5, digest(5)), (6, digest(6)))
    s.receive(TWIN, PullUpdate("p", TWIN.slot, b"\xff", more))
    assert {f.chunk for f in s.fetches()} == {5, 6}


def test_what_a_twin_says_of_digests_is_not_believed() -> None:
    s = Script()
    s.candidates(candidate(ORIGIN), twin())
    s.offer(ORIGIN, known=[0])
    s.offer(TWIN, publication=TWIN_PUBLICATION)
    s.swarm.begin(s.now)
    learnt = [c for e in s.events(DigestsLearnt) if isinstance(e, DigestsLearnt) for c in e.digests]
    assert learnt == [(0, digest(0))]
    s.receive(ORIGIN, PullUpdate("p", ORIGIN.slot, b"\xff", ((3, digest(3)),)))
    assert {f.chunk for f in s.fetches()} <= {0, 3}


def test_no_twin_is_told_that_its_digests_are_known_here() -> None:
    s = with_a_twin()
    todo, said = s.fetches(), list[tuple[PeerId, Message]]()
    while todo:
        fetch = todo.pop()
        s.now += 0.2
        s.swarm.fetched(s.now, fetch.source, fetch.chunk, fetch.digest)
        s.swarm.tick(s.now)
        sends, events = s.drain()
        said += sends
        todo += [e for e in events if isinstance(e, Fetch)]
    known = {to: m.known for to, m in said if isinstance(m, PullProgress)}
    assert known == {ORIGIN.peer: 8, TWIN.peer: 0}
    byes = {to: m.complete for to, m in said if isinstance(m, PullBye)}
    assert byes == {ORIGIN.peer: True, TWIN.peer: False}


def test_twins_get_half_of_the_places() -> None:
    s = Script(config=PullConfig(max_sources=4))
    crowd = [SourceId(PeerId(f"{i:016x}"), TWIN.slot) for i in range(16)]
    s.candidates(candidate(ORIGIN), *(twin(id, locality=0) for id in crowd))
    s.drain()
    s.offer(ORIGIN)
    assert len(s.sent(PullHello)) == 2
    s.candidates(candidate(ORIGIN), candidate(A), *(twin(id, locality=0) for id in crowd))
    assert [to for to, _ in s.sent(PullHello)] == [A.peer]


def test_with_the_origins_list_a_twin_has_all_that_is_needed() -> None:
    s = Script()
    s.candidates(candidate(ORIGIN), twin())
    s.offer(ORIGIN, known=[])
    s.offer(TWIN, publication=TWIN_PUBLICATION)
    s.swarm.begin(s.now)
    s.swarm.lost(s.now, ORIGIN.peer)
    s.swarm.candidates(s.now, [twin()], tuple(map(digest, range(8))))
    fetches = s.fetches()
    assert {f.source for f in fetches} == {TWIN}
    s.complete(fetches)
    assert s.swarm.held.is_full


def test_a_chunk_that_only_a_twin_has_and_has_otherwise_is_to_be_had_nowhere() -> None:
    s = with_a_twin(own=range(7), digest_of=lambda c: digest(c if c < 7 else 99))
    s.complete(s.fetches())
    events: list[Event] = []
    for _ in range(10):
        s.offer(ORIGIN, have=range(7))
        s.offer(TWIN, digest_of=lambda c: digest(c if c < 7 else 99), publication=TWIN_PUBLICATION)
        events += s.pass_time(1.0)
    [starved] = [e for e in events if isinstance(e, Starved)]
    assert starved.chunks == (7,)


def test_a_twin_of_another_layout_is_left_alone() -> None:
    s = Script()
    s.candidates(candidate(ORIGIN), twin())
    s.offer(ORIGIN, have=[])
    s.offer(TWIN, layout=layout_of(9), publication=TWIN_PUBLICATION)
    s.swarm.begin(s.now)
    assert not s.fetches()
    [fact] = [f for f in s.swarm.facts() if f.source == TWIN]
    assert fact.notes == ("offers another layout of the version",)


def test_a_twin_has_no_say_in_the_layout() -> None:
    s = Script(own=layout_of(9))
    s.candidates(candidate(A), twin())
    s.offer(A)
    s.offer(TWIN, publication=TWIN_PUBLICATION)
    wrong = (TensorSpec("x", "uint8", (MIN_CHUNK_BYTES,), MIN_CHUNK_BYTES),)
    s.receive(A, LayoutPage("p", A.slot, 0, 1, wrong))  # so it is asked again what the layout is
    s.drain()
    s.offer(TWIN, publication=TWIN_PUBLICATION)
    assert s.swarm.layout is None
    assert not s.sent(LayoutRequest)


def test_a_slot_that_goes_on_to_another_publication_is_asked_anew() -> None:
    s = with_a_twin(own=[])
    assert {f.source for f in s.fetches()} == {TWIN}
    s.candidates(candidate(ORIGIN), candidate(TWIN))
    [(to, hello)] = s.sent(PullHello)
    assert to == TWIN.peer
    assert isinstance(hello, PullHello)
    assert hello.publication == PUBLICATION
    s.offer(TWIN, publication=TWIN_PUBLICATION)
    assert not s.fetches(), "an answer to what was asked before"


counts = st.one_of(st.integers(0, 12), st.integers(0, 2**70))
blobs = st.one_of(st.sampled_from([b"", b"\xff", b"\x0f"]), st.binary(max_size=40))
digest_lists = st.lists(st.tuples(counts, st.binary(min_size=15, max_size=17)), max_size=3)
specs = st.builds(
    TensorSpec,
    name=st.sampled_from(["w", "v", "x" * 2000, ""]),
    dtype=st.just("uint8"),
    shape=st.just((MIN_CHUNK_BYTES,)),
    num_bytes=counts,
    alias_of=st.sampled_from([None, "w", "nobody"]),
)
junk = st.one_of(
    st.builds(
        PullOffer,
        pull=st.just("p"),
        slot=st.just(A.slot),
        publication=st.just(PUBLICATION),
        granted=st.booleans(),
        layout=st.sampled_from([layout_of(8).digest, layout_of(9).digest, b""]),
        num_bytes=st.one_of(st.sampled_from([8 * MIN_CHUNK_BYTES, 9 * MIN_CHUNK_BYTES]), counts),
        chunk_bytes=st.one_of(st.just(MIN_CHUNK_BYTES), counts),
        have=blobs,
        known=blobs,
        digests=blobs,
        endpoints=st.sampled_from([(), ENDPOINTS]),
        others=st.sampled_from([(), (B,), (OWN,)]),
    ),
    st.builds(PullUpdate, st.just("p"), st.just(A.slot), blobs, digest_lists.map(tuple)),
    st.builds(
        LayoutPage,
        st.just("p"),
        st.just(A.slot),
        counts,
        counts,
        st.lists(specs, max_size=3).map(tuple),
    ),
    st.just(PullGone("p", A.slot, "no")),
)


A_LAYOUT_WITHOUT_PAGES = PullOffer(
    pull="p",
    slot=A.slot,
    publication=PUBLICATION,
    granted=False,
    layout=layout_of(9).digest,
    num_bytes=0,
    chunk_bytes=MIN_CHUNK_BYTES,
    have=b"",
    known=b"",
    digests=b"",
    endpoints=(),
    others=(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(junk, st.floats(0, 1)), max_size=12))
@example([(A_LAYOUT_WITHOUT_PAGES, 0.0)])
def test_whatever_a_source_says_nothing_is_raised_and_the_pull_ends(
    said: list[tuple[Message, float]],
) -> None:
    s = Script()
    s.candidates(candidate(A))
    s.swarm.begin(s.now)
    for message, seconds in said:
        s.receive(A, message)
        for fetch in s.fetches():
            s.swarm.failed(s.now, fetch.source, fetch.chunk, Fault.MISMATCH)
        s.pass_time(seconds)
    for _ in range(20):
        for fetch in s.fetches():
            s.swarm.failed(s.now, fetch.source, fetch.chunk, Fault.SILENT)
        s.pass_time(5)
    assert s.swarm.done


def test_candidates_are_bounded_and_dead_wood_makes_room() -> None:
    s = Script(config=PullConfig(max_candidates=10, max_sources=2))
    crowd = [SourceId(PeerId(f"{i:016x}"), A.slot) for i in range(40)]
    s.candidates(*map(candidate, crowd))
    assert len(s.swarm.facts()) == 10
    assert len(s.sent(PullHello)) == 2
    s.candidates(*map(candidate, crowd[20:25]))
    assert set(crowd[20:25]) <= {f.source for f in s.swarm.facts()}


# --- whole swarms ----------------------------------------------------------------------------


@dataclass
class Holder:
    """A peer with a server, and maybe a swarm; what befalls it is in its fields."""

    id: SourceId
    server: ShardServer
    swarm: Swarm | None = None
    wrong: frozenset[int] = frozenset()
    """Chunks of which it delivers wrong bytes."""
    dies_at: float = float("inf")
    withdraws_at: float = float("inf")
    mute: bool = False
    """Its control plane says nothing."""
    silent: bool = False
    """Its data plane delivers nothing."""
    end: Event | None = None
    in_flight: set[int] = field(default_factory=set)
    wakes_at: float = float("inf")


class World:
    """Holders and pullers on a virtual clock, with random delays, losses and reading times."""

    def __init__(self, chunks: int, seed: int, config: PullConfig, loss: float = 0.0) -> None:
        self.chunks = chunks
        self.layout = layout_of(chunks)
        self.rng = random.Random(seed)
        self.config = config
        self.loss = loss
        self.now = 0.0
        self.holders: dict[SourceId, Holder] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    def later(self, delay: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._counter), do))

    def holder(self, id: SourceId, have: int, origin: bool = False, **fate: object) -> Holder:
        server = ShardServer(
            id.slot,
            PUBLICATION,
            self.layout,
            ENDPOINTS,
            self.config,
            have=ChunkSet(self.chunks, have),
            origin=origin,
        )
        holder = self.holders[id] = Holder(id, server, **fate)  # type: ignore[arg-type]
        if not origin:
            for chunk in ChunkSet(self.chunks, have):
                server.manifest.put(chunk, digest(chunk))
        else:
            for chunk in range(self.chunks):
                self.later(0.05 + chunk * 0.01, lambda c=chunk: self.digested(holder, c))
        if holder.withdraws_at < float("inf"):
            self.later(holder.withdraws_at, lambda: self.withdraw(holder))
        if holder.dies_at < float("inf"):
            self.later(holder.dies_at + 1.0, lambda: self.lost(holder.id.peer))
        return holder

    def puller(self, id: SourceId) -> Holder:
        puller = self.holder(id, 0)
        puller.swarm = Swarm(
            f"pull-{id}", PUBLICATION, id, self.layout, ["tcp"], self.config, self.rng
        )
        return puller

    def digested(self, holder: Holder, chunk: int) -> None:
        if self.alive(holder) and self.now < holder.withdraws_at:
            holder.server.digested(self.now, chunk, digest(chunk))
            self.settle(holder)

    def withdraw(self, holder: Holder) -> None:
        holder.server.withdraw(self.now, "unpublished")
        self.settle(holder)

    def lost(self, peer: PeerId) -> None:
        for holder in self.holders.values():
            holder.server.forget_peer(self.now, peer)
            if holder.swarm is not None:
                holder.swarm.lost(self.now, peer)
            self.settle(holder)

    def alive(self, holder: Holder) -> bool:
        return self.now < holder.dies_at

    def settle(self, holder: Holder) -> None:
        """Act on everything in the outboxes of a holder, and wake it when it wants to."""
        if not self.alive(holder):
            return
        self._drain(holder, holder.server.outbox)
        if holder.swarm is not None:
            self._drain(holder, holder.swarm.outbox)
        machines = [holder.server, *([holder.swarm] if holder.swarm else [])]
        wakeups = [machine.next_wakeup() for machine in machines]
        due = min((t for t in wakeups if t is not None), default=None)
        if due is not None and due < holder.wakes_at:
            holder.wakes_at = due
            self.later(max(0.0001, due - self.now), lambda: self.wake(holder, due))

    def wake(self, holder: Holder, due: float) -> None:
        if self.alive(holder) and holder.wakes_at == due:
            holder.wakes_at = float("inf")
            holder.server.tick(max(due, self.now))
            if holder.swarm is not None:
                holder.swarm.tick(max(due, self.now))
            self.settle(holder)

    def _drain(self, holder: Holder, outbox: Outbox) -> None:
        while items := outbox.drain():
            for item in items:
                if isinstance(item, Send):
                    self._send(holder, item)
                else:
                    assert isinstance(item, Event)
                    self._event(holder, item)

    def _send(self, holder: Holder, send: Send) -> None:
        if holder.mute or self.rng.random() < self.loss:
            return
        self.later(self.rng.uniform(0.0001, 0.005), lambda: self._deliver(holder, send))

    def _deliver(self, sender: Holder, send: Send) -> None:
        for holder in self.holders.values():
            if holder.id.peer == send.to and self.alive(holder):
                holder.server.receive(self.now, sender.id.peer, send.message)
                if holder.swarm is not None:
                    holder.swarm.receive(self.now, sender.id.peer, send.message)
                self.settle(holder)

    def _event(self, holder: Holder, event: Event) -> None:
        swarm = holder.swarm
        if isinstance(event, DigestsWanted):
            for chunk in event.chunks:
                self.later(0.002, lambda c=chunk: self.digested(holder, c))
        elif isinstance(event, LayoutFound):
            assert swarm is not None
            swarm.begin(self.now)
        elif isinstance(event, DigestsLearnt):
            for chunk, d in event.digests:
                holder.server.digested(self.now, chunk, d)
        elif isinstance(event, ChunkHeld):
            assert event.digest == digest(event.chunk)
            holder.server.verified(self.now, event.chunk, event.digest)
        elif isinstance(event, Fetch):
            assert event.chunk not in holder.in_flight, "one chunk in two readers' hands"
            holder.in_flight.add(event.chunk)
            source = self.holders[event.source]
            took = self.config.source_timeout if source.silent else self.rng.uniform(0.001, 0.02)
            self.later(took, lambda: self._read(holder, source, event))
        elif isinstance(event, (Completed, Starved, Corrupt)):
            assert holder.end is None
            holder.end = event

    def _read(self, holder: Holder, source: Holder, fetch: Fetch) -> None:
        swarm = holder.swarm
        assert swarm is not None
        holder.in_flight.discard(fetch.chunk)
        if not self.alive(source):
            swarm.failed(self.now, source.id, fetch.chunk, Fault.GONE)
        elif source.silent:
            swarm.failed(self.now, source.id, fetch.chunk, Fault.SILENT)
        elif self.now >= source.withdraws_at:
            fault = self.rng.choice([Fault.WITHDREW, Fault.MISMATCH])
            swarm.failed(self.now, source.id, fetch.chunk, fault)
        elif fetch.chunk in source.wrong:
            swarm.failed(self.now, source.id, fetch.chunk, Fault.MISMATCH)
        else:
            assert fetch.chunk in source.server.have, "asked for what it doesn't have"
            swarm.fetched(self.now, source.id, fetch.chunk, fetch.digest)
        self.settle(holder)

    def run(self, limit: float) -> None:
        """The directory names everybody to every puller; until all pulls have ended."""
        pullers = [h for h in self.holders.values() if h.swarm is not None]
        for puller in pullers:
            assert puller.swarm is not None
            holders = [h for h in self.holders.values() if h is not puller]
            puller.swarm.candidates(
                self.now,
                [
                    candidate(h.id, 2, Phase.READY if h.server.complete else Phase.PARTIAL)
                    for h in holders
                ],
            )
            self.settle(puller)
        steps = 0
        while self._events and self.now < limit and any(p.end is None for p in pullers):
            self.now, _, do = heapq.heappop(self._events)
            do()
            steps += 1
            assert steps < 500_000, "busy for ever"


fates = st.fixed_dictionaries(
    {},
    optional={
        "dies_at": st.floats(0.0, 1.0),
        "withdraws_at": st.floats(0.0, 1.0),
        "mute": st.booleans(),
        "silent": st.booleans(),
    },
)


@settings(max_examples=120, deadline=None)
@given(
    chunks=st.integers(1, 24),
    seed=st.integers(0, 2**32),
    data=st.data(),
    pullers=st.integers(1, 4),
    loss=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
    slots=st.integers(1, 4),
)
def test_a_pull_completes_if_every_chunk_is_to_be_had_and_always_ends(
    chunks: int, seed: int, data: st.DataObject, pullers: int, loss: float, slots: int
) -> None:
    everything = (1 << chunks) - 1
    world = World(chunks, seed, PullConfig(upload_slots=slots), loss)
    sets = st.integers(0, everything)
    steady = data.draw(st.lists(sets, max_size=3), label="steady holders")
    for i, have in enumerate(steady):
        world.holder(source(str(i)), have)
    if data.draw(st.booleans(), label="an origin that stays"):
        world.holder(ORIGIN._replace(peer=PeerId("origin")), everything, origin=True)
        steady.append(everything)
    doomed = data.draw(st.lists(st.tuples(sets, fates), max_size=3), label="doomed holders")
    for i, (have, fate) in enumerate(doomed):
        world.holder(source(str(5 + i)), have, **fate)
    lies = data.draw(st.lists(st.tuples(sets, sets), max_size=2), label="liars")
    for i, (have, wrong) in enumerate(lies):
        world.holder(source("xy"[i]), have, wrong=frozenset(ChunkSet(chunks, wrong)))
    pulling = [world.puller(source("pqrs"[i])) for i in range(pullers)]
    world.run(limit=300.0)

    had = reachable = 0
    for have in steady:
        had |= have
    reachable = had
    for have, _ in doomed:
        reachable |= have
    for have, wrong in lies:
        reachable |= have & ~wrong
    for puller in pulling:
        assert puller.end is not None, "a pull that never ends"
        if had == everything and loss < 0.3:
            assert isinstance(puller.end, Completed)
        if reachable != everything:
            assert isinstance(puller.end, (Starved, Corrupt))
        assert puller.swarm is not None
        if isinstance(puller.end, Completed):
            assert puller.swarm.held.is_full


def test_pullers_of_one_source_trade_chunks_among_themselves() -> None:
    world = World(64, 1, PullConfig(upload_slots=2))
    origin = world.holder(ORIGIN, (1 << 64) - 1, origin=True)
    pulling = [world.puller(source("pqrstuvw"[i])) for i in range(8)]
    world.run(limit=60.0)
    assert all(isinstance(p.end, Completed) for p in pulling)
    from_origin = 0
    for puller in pulling:
        assert puller.swarm is not None
        from_origin += sum(f.chunks for f in puller.swarm.facts() if f.source == ORIGIN)
    assert from_origin < 8 * 64 / 2
    assert origin.server.sealed


def test_pullers_that_hold_everything_between_them_finish_without_the_origin() -> None:
    world = World(32, 3, PullConfig())
    quarter = (1 << 8) - 1
    pulling = [world.puller(source("pqrs"[i])) for i in range(4)]
    for i, puller in enumerate(pulling):
        mine = ChunkSet(32, quarter << 8 * i)
        helper = world.holder(source(str(i)), mine.bits)
        assert helper.server.have == mine
        assert puller.swarm is not None
    world.run(limit=60.0)
    assert all(isinstance(p.end, Completed) for p in pulling)
