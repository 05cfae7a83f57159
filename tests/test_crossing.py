"""Each chunk crosses once a zone: the rule alone, then whole zones on virtual time."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarming_zones import ENDPOINTS, FAR, NEAR, PUBLICATION, Peer, World, digest_of

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Group, PeerId, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import Phase, PullBye, PullHello, PullOffer, PullUpdate
from tensorhub_p2p.protocol.pulls.crossing import Crossing, shares
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.ownership import weights
from tensorhub_p2p.protocol.pulls.pages import LayoutAgreement
from tensorhub_p2p.protocol.pulls.pull_events import Carrying, Fetch
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import Candidate, SourceId
from tensorhub_p2p.protocol.pulls.swarm import Swarm

CONFIG = PullConfig()
LAYOUT = Layout([TensorSpec("w", "uint8", (16 << 20,), 16 << 20)])
N = LAYOUT.num_chunks
EVERYTHING = (1 << N) - 1


def puller(name: str) -> SourceId:
    return SourceId(PeerId(name.ljust(16, "-")), Slot(Group("m", name), 0))


OWN, TRAINER = puller("own"), puller("trainer")
A, B, C = puller("a"), puller("b"), puller("c")

# --- who owns what --------------------------------------------------------------------------

NAMES = st.sets(st.sampled_from("abcdefghijkl"), min_size=1, max_size=8)


def line(names: set[str], num_chunks: int) -> dict[SourceId, array[int]]:
    return {puller(name): weights(puller(name), num_chunks + 1) for name in names}


@given(NAMES, st.integers(0, 200))
def test_every_chunk_has_exactly_one_owner_of_any_line(names: set[str], num_chunks: int) -> None:
    parts = shares(line(names, num_chunks), num_chunks)
    assert sum(part.bit_count() for part in parts.values()) == num_chunks
    assert sum(parts.values()) == (1 << num_chunks) - 1


@given(NAMES, st.data())
def test_who_drops_out_passes_its_own_chunks_on_and_no_others(
    names: set[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    before, after = shares(line(names, 128), 128), shares(line(names - {gone}, 128), 128)
    for name in names - {gone}:
        kept, new = before[puller(name)], after[puller(name)]
        assert kept & ~new == 0
        assert new & ~kept & ~before[puller(gone)] == 0


# --- one puller against scripted holders ------------------------------------------------------


class Script:
    """A pull of N chunks whose neighbours are this test."""

    def __init__(self, config: PullConfig = CONFIG) -> None:
        self.layout = LAYOUT
        self.now = 0.0
        self.swarm = Swarm(
            "p", PUBLICATION, OWN, self.layout, ["tcp"], config, random.Random(7), lambda _: NEAR
        )

    def names(self, *pullers: SourceId, own: bool = True, whole: tuple[SourceId, ...] = ()) -> None:
        """What the directory says: the trainer far, these near."""
        records = [(TRAINER, Phase.READY, FAR), *((p, Phase.PARTIAL, NEAR) for p in pullers)]
        records += [(p, Phase.READY, NEAR) for p in whole]
        if own:
            records.append((OWN, Phase.PARTIAL, NEAR))
        self.swarm.candidates(
            self.now,
            [Candidate(i.peer, i.slot, phase, far, PUBLICATION) for i, phase, far in records],
        )

    def offer(
        self,
        source: SourceId,
        have: int = 0,
        *,
        granted: bool = True,
        carrying: int | None = 0,
    ) -> None:
        manifest = Manifest(N)
        for chunk in range(N):
            manifest.put(chunk, digest_of(chunk))
        known, digests = manifest.pack()
        told = None if carrying is None else ChunkSet(N, carrying).to_bytes() if carrying else b""
        layout = self.layout
        offer = PullOffer(
            pull="p",
            slot=source.slot,
            publication=PUBLICATION,
            granted=granted,
            layout=layout.digest,
            num_bytes=layout.num_bytes,
            chunk_bytes=layout.chunk_bytes,
            have=ChunkSet(N, have).to_bytes(),
            known=known,
            digests=digests,
            endpoints=ENDPOINTS if granted else (),
            carrying=told,
        )
        self.swarm.receive(self.now, source.peer, offer)

    def update(self, source: SourceId, have: int, carrying: int = 0) -> None:
        told = ChunkSet(N, carrying).to_bytes() if carrying else b""
        have_bytes = ChunkSet(N, have).to_bytes()
        self.swarm.receive(
            self.now, source.peer, PullUpdate("p", source.slot, have_bytes, (), told)
        )

    def begin(self, *pullers: SourceId) -> None:
        """The trainer offers everything, and these are about as far as we are."""
        self.names(own=False)
        self.offer(TRAINER, EVERYTHING, carrying=None)
        self.swarm.begin(self.now, announced=True)
        self.names(*pullers)
        for each in pullers:
            self.offer(each)

    def fetched(self) -> dict[SourceId, set[int]]:
        """What was asked of whom since the last time."""
        asked: dict[SourceId, set[int]] = {}
        for output in self.swarm.outbox.drain():
            if isinstance(output, Fetch):
                asked.setdefault(output.source, set()).add(output.chunk)
        return asked

    def pull_on(self, until: float, *, deliver: bool = True) -> dict[SourceId, set[int]]:
        """Whatever is asked for comes, until that moment; what was asked of whom."""
        asked = self.fetched()
        todo = [(source, chunk) for source, chunks in asked.items() for chunk in chunks]
        while True:
            if not deliver:
                todo = []
            while todo:
                source, chunk = todo.pop()
                self.swarm.fetched(self.now, source, chunk, digest_of(chunk))
                for at, chunks in self.fetched().items():
                    asked.setdefault(at, set()).update(chunks)
                    todo += [(at, each) for each in chunks]
            due = self.swarm.next_wakeup()
            if due is None or due > until:
                self.now = until
                return asked
            self.now = max(self.now, due)
            self.swarm.tick(self.now)
            for at, chunks in self.fetched().items():
                asked.setdefault(at, set()).update(chunks)
                todo += [(at, each) for each in chunks]


def bits(chunks: set[int]) -> int:
    return sum(1 << chunk for chunk in chunks)


def share_of(who: SourceId, *others: SourceId) -> int:
    return shares({p: weights(p, N + 1) for p in (who, *others)}, N)[who]


def test_nothing_crosses_before_the_own_announcement_was_read_back() -> None:
    s = Script()
    s.names(own=False)
    s.offer(TRAINER, EVERYTHING, carrying=None)
    s.swarm.begin(s.now, announced=True)
    s.names(A, own=False)
    s.offer(A)
    assert s.fetched() == {}
    s.names(A)
    assert s.fetched().keys() == {TRAINER}


def test_nothing_crosses_before_those_who_carry_have_told_what_they_do() -> None:
    s = Script()
    s.names(own=False)
    s.offer(TRAINER, EVERYTHING, carrying=None)
    s.swarm.begin(s.now, announced=True)
    s.names(A)
    assert s.fetched() == {}
    s.offer(A)
    assert s.fetched().keys() == {TRAINER}


def test_a_directory_that_says_nothing_of_us_holds_nothing_up_for_long() -> None:
    s = Script()
    s.names(own=False)
    s.offer(TRAINER, EVERYTHING, carrying=None)
    s.swarm.begin(s.now, announced=True)
    assert s.pull_on(CONFIG.announce_patience - 0.01) == {}
    assert s.pull_on(CONFIG.announce_patience) == {TRAINER: set(range(N))}


def test_who_is_alone_fetches_everything() -> None:
    s = Script()
    s.begin()
    assert s.pull_on(0.0) == {TRAINER: set(range(N))}
    assert s.swarm.done


def test_two_pullers_fetch_what_is_theirs_and_no_more() -> None:
    s = Script()
    s.begin(A)
    assert bits(s.pull_on(1.0)[TRAINER]) == share_of(OWN, A)


def test_what_one_has_under_way_is_left_to_it_when_a_newcomer_owns_it() -> None:
    s = Script()
    s.names(own=False)
    s.offer(TRAINER, EVERYTHING, carrying=None)
    s.swarm.begin(s.now, announced=True)
    mine = share_of(OWN, A)
    under_way = mine & -mine
    s.names(A, own=False)
    s.offer(A, carrying=under_way)
    s.names(A)
    assert bits(s.pull_on(1.0)[TRAINER]) == mine & ~under_way


def test_what_somebody_near_has_does_not_cross() -> None:
    s = Script()
    s.names(A, own=False)
    s.offer(TRAINER, EVERYTHING, carrying=None)
    s.offer(A, share_of(OWN, A))
    s.swarm.begin(s.now, announced=True)
    s.names(A)
    assert bits(s.pull_on(1.0)[A]) == share_of(OWN, A)


def test_nothing_crosses_while_a_whole_holder_of_the_zone_is_about_to_offer() -> None:
    s = Script()
    s.begin()
    s.fetched()
    s.names(whole=(B,))
    in_flight = {chunk for f in s.swarm._sources for chunk in f.in_flight}
    for chunk in in_flight:
        s.swarm.fetched(s.now, TRAINER, chunk, digest_of(chunk))
    assert s.fetched() == {}
    s.offer(B, EVERYTHING, carrying=None)
    assert s.pull_on(1.0).keys() == {B}


def test_a_whole_holder_that_never_answers_holds_nothing_up_for_long() -> None:
    s = Script()
    s.begin()
    s.names(whole=(B,))
    s.pull_on(CONFIG.source_timeout - 0.01)
    assert not s.swarm.done
    s.pull_on(CONFIG.source_timeout)
    assert s.swarm.done


def test_one_that_shows_nothing_loses_its_chunks_to_us() -> None:
    s = Script()
    s.begin(A)
    s.pull_on(CONFIG.carrier_timeout - 0.01)
    assert s.swarm.held.bits == share_of(OWN, A)
    s.pull_on(CONFIG.carrier_timeout + 0.01)
    assert s.swarm.done


def test_one_that_has_something_under_way_keeps_its_chunks_as_long_as_it_says_so() -> None:
    s = Script()
    s.begin(A)
    theirs = share_of(A, OWN)
    for second in range(1, 10):
        s.pull_on(float(second))
        s.offer(A, carrying=theirs & -theirs)
    assert s.swarm.held.bits == share_of(OWN, A)
    s.pull_on(9.0 + CONFIG.carrier_timeout + 0.01)
    assert s.swarm.done


def test_one_that_was_late_and_goes_on_has_its_chunks_again() -> None:
    s = Script()
    s.begin(A)
    s.pull_on(CONFIG.carrier_timeout - 0.01)
    taken = s.pull_on(CONFIG.carrier_timeout + 0.01, deliver=False)[TRAINER]
    assert taken
    s.update(A, 0, carrying=share_of(A, OWN) & ~bits(taken))
    for chunk in taken:
        s.swarm.fetched(s.now, TRAINER, chunk, digest_of(chunk))
    assert s.fetched() == {}


def test_one_that_died_is_out_at_once() -> None:
    s = Script()
    s.begin(A)
    s.pull_on(0.5)
    s.swarm.lost(s.now, A.peer)
    s.pull_on(0.5)
    assert s.swarm.done


def test_a_torn_holder_that_pulls_no_more_carries_nothing() -> None:
    s = Script()
    s.names(A, own=False)
    s.offer(TRAINER, EVERYTHING, carrying=None)
    s.offer(A, 1, carrying=None)
    s.swarm.begin(s.now, announced=True)
    s.names(A)
    s.pull_on(0.0)
    assert s.swarm.done


def test_a_holder_that_leaves_questions_unanswered_counts_as_having_nothing() -> None:
    s = Script()
    s.begin(A)
    s.offer(A, share_of(A, OWN), granted=False)
    s.pull_on(1.0)
    assert s.swarm.held.bits == share_of(OWN, A)
    s.pull_on(6.0)
    assert s.swarm.done, "what it has and doesn't serve crosses once more"


def test_who_carries_nothing_says_goodbye_to_the_other_zone() -> None:
    config = PullConfig(carriers=1)
    line = sorted((OWN, A, B, C), key=lambda p: (weights(p, N + 1)[N], p))
    first = next(p for p in line if p != OWN)
    pullers = [first] if line[0] != OWN else [A, B, C]
    s = Script(config)
    s.begin(*pullers)
    sends = [o for o in s.swarm.outbox.drain() if isinstance(o, Send)]
    byes = [o for o in sends if isinstance(o.message, PullBye)]
    carries = min((OWN, *pullers), key=lambda p: (weights(p, N + 1)[N], p)) == OWN
    assert [bye.to for bye in byes] == ([] if carries else [TRAINER.peer])


def test_carriers_are_asked_though_all_places_are_taken() -> None:
    s = Script(PullConfig(max_sources=1))
    s.begin()
    s.names(A, B)
    asked = {
        output.to
        for output in s.swarm.outbox.drain()
        if isinstance(output, Send) and isinstance(output.message, PullHello)
    }
    assert asked >= {A.peer, B.peer}


def test_a_puller_that_was_paused_itself_waits_for_what_the_others_did_meanwhile() -> None:
    s = Script()
    s.begin(A)
    in_flight = s.fetched()[TRAINER]
    s.now = 30.0
    for chunk in in_flight:
        s.swarm.fetched(s.now, TRAINER, chunk, digest_of(chunk))
    s.swarm.tick(s.now)
    assert s.fetched() == {}
    s.update(A, share_of(OWN, A))
    assert TRAINER not in s.pull_on(30.4)


def test_offers_say_what_is_under_way_until_the_pull_is_over() -> None:
    server = ShardServer(
        A.slot, PUBLICATION, LAYOUT, ENDPOINTS, CONFIG, have=ChunkSet(N), origin=False
    )

    def told(now: float) -> bytes | None:
        hello = PullHello("p", A.slot, PUBLICATION, LAYOUT.digest, ("tcp",))
        server.receive(now, OWN.peer, hello)
        (offer,) = (o.message for o in server.outbox.drain() if isinstance(o, Send))
        assert isinstance(offer, PullOffer)
        return offer.carrying

    assert told(0.0) == b""
    server.carries(0.1, 0b101)
    server.outbox.drain()
    assert told(0.1) == ChunkSet(N, 0b101).to_bytes()
    server.carries(0.2, None)
    server.outbox.drain()
    assert told(0.2) is None


def test_a_pull_says_what_it_has_under_way() -> None:
    s = Script()
    s.begin()
    events = s.swarm.outbox.drain()
    asked = {e.chunk for e in events if isinstance(e, Fetch)}
    assert [e.chunks for e in events if isinstance(e, Carrying)] == [bits(asked)]


# --- whole zones -------------------------------------------------------------------------------

IN_FLIGHT = CONFIG.chunks_in_flight
"""Chunks that one puller has in flight across at a time."""


def zones(seed: int, each: int, mib: int = 8, names: str = "bc", **options: float) -> World:
    world = World(mib, seed=seed, **options)  # type: ignore[arg-type]
    for zone in names:
        for number in range(each):
            world.start(f"{zone}-{number}", zone, world.rng.uniform(0, 0.05))
    return world


def carriers(world: World, zone: str) -> list[Peer]:
    pulls = [p for p in world.peers.values() if p.zone == zone and p.swarm is not None]
    assert pulls[0].swarm is not None
    return [world.peers[p] for p in pulls[0].swarm._crossing._line]


@pytest.mark.parametrize("each", [1, 3, 8])
def test_each_chunk_crosses_once_a_zone(each: int) -> None:
    world = zones(0, each)
    world.run()
    for zone in "bc":
        assert len(world.crossed[zone]) == world.layout.num_chunks
        assert world.twice(zone) <= 3, "what is under way when another one comes"
    assert not [p.error for p in world.peers.values() if p.error]


def test_a_zone_of_many_pullers_reads_across_through_a_few() -> None:
    world = zones(1, 14, names="b")
    world.run()
    assert world.twice("b") <= 3
    assert sum(p.has_crossed for p in world.peers.values()) < 14


def test_who_comes_late_takes_over_a_part_and_nothing_twice() -> None:
    world = World(8, seed=3, rate=2e6)
    for number in range(4):
        world.start(f"b-{number}", "b", 0.5 * number)
    world.run()
    assert world.twice("b") <= 3


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("each", [2, 6])
def test_a_carrier_that_fails_costs_what_it_had_in_flight(each: int, fault: str) -> None:
    world = zones(2, each, names="b", rate=2e6)
    world.run(until=lambda: len(world.crossed["b"]) >= 16)
    before, victim = world.twice("b"), carriers(world, "b")[0]
    if fault == "killed":
        world.kill(victim)
    else:
        world.stop(victim)
    world.run()
    assert len(world.crossed["b"]) == world.layout.num_chunks
    slack = IN_FLIGHT if fault == "killed" else 2 * IN_FLIGHT
    assert world.twice("b") - before <= slack
    if fault == "stopped":
        world.go_on(victim)
        world.run()
        assert victim.done_at is not None
        assert victim.error is None


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(2, 5),
    st.lists(
        st.tuples(st.floats(0.2, 4.0), st.integers(0, 4), st.sampled_from(["kill", "stop", "nap"])),
        max_size=4,
    ),
)
def test_whoever_fails_all_others_get_everything(
    seed: int, each: int, faults: list[tuple[float, int, str]]
) -> None:
    world = zones(seed, each, mib=4, names="b", rate=1.5e6)
    pullers = [p for p in world.peers.values() if p is not world.trainer]
    for at, number, fault in faults:
        victim = pullers[number % each]
        if fault == "kill":
            world.later(at, lambda v=victim: world.kill(v))
        else:
            world.later(at, lambda v=victim: world.stop(v))
            if fault == "nap":
                world.later(at + 2.5, lambda v=victim: world.go_on(v))
    world.run(limit=60.0)
    assert not [p.error for p in pullers if p.error]
    assert world.twice("b") <= (1 + 2 * len(faults)) * 2 * IN_FLIGHT


def test_a_chunk_that_was_held_and_was_wrong_has_no_place_in_the_order_of_ours() -> None:
    ledger = Ledger(PUBLICATION, LayoutAgreement(None), Outbox())
    crossing = Crossing(OWN, PUBLICATION, SourceTable(OWN, PUBLICATION, 8), ledger, CONFIG)
    assert crossing.first(0b1) is None
