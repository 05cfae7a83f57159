"""A key with very many writers is spread over buckets: nobody misses anything or carries all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from directory_cluster import Cluster, Peer
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.admission import CONFLICT, FENCED, WITHDRAWN, admit
from tensorhub_p2p.protocol.directory.buckets import (
    bucket,
    bucket_of,
    chain,
    is_spread,
    number_of,
    whole_key,
)
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.directory import WriteDone
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.directory.records import (
    Refused,
    Registers,
    fence_name,
    holders_key,
    slot_name,
    values,
    versions_key,
)
from tensorhub_p2p.protocol.directory.registers import of_mark
from tensorhub_p2p.protocol.identity import Generation, Group, Member, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.messages import (
    Buckets,
    DirectoryWrite,
    GenerationRecord,
    Key,
    Phase,
    Pin,
    Retraction,
    VersionRecord,
    WholeMark,
)

KEY = versions_key("policy")
G1, G2 = Generation(1, 7), Generation(2, 7)
SMALL = DirectoryConfig(virtual_nodes=16, bucket_registers=8)


class Peers(Cluster):
    """Peers with `Records` on top of their directories."""

    def __init__(self, seed: int = 0, peers: int = 8, config: DirectoryConfig = SMALL) -> None:
        self.records: dict[str, PendingRecords] = {}
        self.newest: tuple[int, int] | None = None
        """What membership says is the newest version."""
        super().__init__(seed, peers, config, admit=admit)

    def start(self) -> Peer:
        peer = super().start()
        self.records[peer.me] = PendingRecords(
            peer.directory, self.config.max_buckets, lambda _model: self.newest
        )
        return peer

    def on_event(self, me: Any, event: Event) -> None:
        if not self.records[me].take(self.now, event):
            super().on_event(me, event)

    def of(self, index: int) -> PendingRecords:
        return self.records[self[index].me]

    def do(self, index: int, start: Callable[[Callable[..., None]], object]) -> Any:
        """Start a read or a write of this peer, and return what it ended with."""
        ends: list[Any] = []
        start(lambda _now, end: ends.append(end))
        self.net.settle(self[index].me)
        assert self.net.run_until(lambda: bool(ends), 10.0), "it hangs"
        assert len(ends) == 1
        return ends[0]

    def read_all(self, index: int, key: Key = KEY, near: str = "") -> Registers:
        records = self.of(index)
        found: Registers = self.do(index, lambda then: records.read(self.now, key, then, near=near))
        return found

    def put(
        self,
        index: int,
        replica: str,
        version: int,
        phase: Phase = Phase.READY,
        shard: int = 0,
        generation: Generation = G1,
        was_whole: bool = False,
    ) -> Refused | None:
        slot = Slot(Group("policy", replica), shard)
        what = publication(replica, version)
        record = VersionRecord(slot, 1, what, phase, generation, was_whole)
        refused: Refused | None = self.do(
            index,
            lambda then: self.of(index).write(
                self.now, KEY, slot_name(slot), generation.counter, record, then
            ),
        )
        return refused

    def fill(self, replicas: int, version: int = 1) -> None:
        """So many replicas of one shard publish, a few on each peer."""
        for number in range(replicas):
            assert self.put(number % len(self.everyone), f"r{number}", version) is None

    def held(self) -> dict[int, int]:
        """By bucket: how many standing registers an owner holds of it at most."""
        found: dict[int, int] = {}
        for peer in self.peers.values():
            for key, held in peer.directory._owner._held.items():
                if whole_key(key) == KEY:
                    number = number_of(key)
                    found[number] = max(found.get(number, 0), held.cells.standing)
        return found


def publication(replica: str, version: int) -> Publication:
    return Publication(0, version, replica, G1)


def replicas(registers: Registers, version: int) -> set[str]:
    return {
        record.slot.group.replica
        for _, record in values(registers, VersionRecord)
        if record.publication.version == version and record.phase is Phase.READY
    }


def names(count: int) -> set[str]:
    return {f"r{number}" for number in range(count)}


# --- where things belong ---


@given(st.text(max_size=20), st.integers(0, 10), st.integers(0, 10))
def test_a_replica_stays_in_its_chain_however_the_key_grows(name: str, now: int, then: int) -> None:
    small, large = sorted((2**now, 2**then))
    assert bucket_of(name, small) in chain(name, large)
    assert 0 in chain(name, large)
    assert len(chain(name, large)) <= 1 + max(now, then)


@given(st.integers(0, 1023), st.sampled_from([KEY, holders_key("policy", 3)]))
def test_a_bucket_knows_its_number_and_its_key(number: int, key: Key) -> None:
    assert number_of(bucket(key, number)) == number
    assert whole_key(bucket(key, number)) == key


def test_bucket_0_is_the_key_itself_and_other_keys_have_no_buckets() -> None:
    assert bucket(KEY, 0) == KEY
    group = Key("group", "policy", "a/3")
    assert number_of(group) == 0
    assert whole_key(group) == group


@pytest.mark.parametrize("part", ["/", "/x", "3/-1", "/99999999999999999999"])
def test_a_key_that_names_no_bucket_is_nobodys_harm(part: str) -> None:
    assert number_of(Key("versions", "policy", part)) == 0


# --- growing ---


def test_a_key_with_few_writers_stays_one() -> None:
    cluster = Peers()
    cluster.fill(SMALL.bucket_registers)
    assert cluster.held().keys() == {0}
    assert not is_spread(KEY, cluster.owners()[0].directory._owner._held[KEY].cells)


@pytest.mark.parametrize("seed", range(3))
def test_a_key_grows_with_its_writers_and_everybody_finds_everything(seed: int) -> None:
    cluster = Peers(seed)
    for number in range(100):
        assert cluster.put(number % 8, f"r{number}", 1) is None
        reader = (number * 5 + 3) % 8
        assert replicas(cluster.read_all(reader), 1) == names(number + 1), "at any moment"
    assert cluster.of(0).buckets(KEY) >= 8


def test_new_publications_go_where_they_belong_and_relieve_the_first_bucket() -> None:
    cluster = Peers(peers=16)
    cluster.fill(200)
    for number in range(200):
        index = number % 16
        assert cluster.put(index, f"r{number}", 1, Phase.HIDDEN) is None
        assert cluster.put(index, f"r{number}", 2) is None
    cluster.net.run_for(SMALL.forget_hidden_after + 5.0)
    assert replicas(cluster.read_all(3), 2) == names(200)
    held = cluster.held()
    assert len(held) >= 16
    assert max(held.values()) <= 4 * SMALL.bucket_registers


def test_a_key_does_not_grow_for_what_is_there_from_before_it_grew() -> None:
    cluster = Peers()
    cluster.fill(40)
    total = cluster.of(0).buckets(KEY)
    for _ in range(20):
        for number in range(40):
            assert cluster.put(number % 8, f"r{number}", 1) is None
    assert cluster.of(0).buckets(KEY) <= 2 * total


def test_nobody_makes_it_grow_by_more_than_the_bound() -> None:
    config = DirectoryConfig(virtual_nodes=16, bucket_registers=1, max_buckets=4)
    cluster = Peers(config=config)
    cluster.fill(60)
    assert cluster.of(0).buckets(KEY) == 4
    for count in (3, 8, 1 << 40):
        cluster[0].directory.mark(cluster.now, KEY, Buckets(count))
        cluster.net.settle(cluster[0].me)
    cluster.net.run_for(1.0)
    cluster.read_all(5)
    assert cluster.of(5).buckets(KEY) == 4
    assert replicas(cluster.read_all(5), 1) == names(60)


def test_a_writer_places_by_a_number_only_once_the_owners_know_it() -> None:
    """Or a reader that asks right after the write would not look there."""
    cluster = Peers()
    writer = next(p for p in cluster.peers.values() if p not in cluster.owners())
    index = list(cluster.peers.values()).index(writer)
    records = cluster.records[writer.me]
    second = [name for n in range(20) if bucket_of(name := f"r{n}", 2) == 1]
    records.take(cluster.now, WriteDone(0, KEY, crowded=True, buckets=1))
    slot = Slot(Group("policy", second[0]), 0)
    record = VersionRecord(slot, 1, publication(second[0], 1), Phase.READY, G1)
    records.write(cluster.now, KEY, slot_name(slot), 1, record, lambda _now, _refused: None)
    sent = [i.message for i in writer.directory.outbox.items if isinstance(i, Send)]
    written = [m for m in sent if isinstance(m, DirectoryWrite)]
    assert {m.key for m in written} == {KEY}, "nobody has heard of two buckets yet"
    assert any(isinstance(m.register.value, Buckets) for m in written)
    cluster.net.settle(writer.me)
    cluster.net.run_for(1.0)
    assert cluster.put(index, second[1], 1) is None
    assert cluster.held()[1] == 1
    assert replicas(cluster.read_all(0), 1) == set(second[:2])


# --- rules that hold in spite of it ---


def spread() -> Peers:
    cluster = Peers()
    cluster.fill(60)
    assert cluster.of(0).buckets(KEY) >= 4
    return cluster


def far(cluster: Peers) -> str:
    """A replica that belongs in another bucket than the first one."""
    total = cluster.of(0).buckets(KEY)
    return next(name for n in range(100) if bucket_of(name := f"far{n}", total) not in (0, 1))


def test_a_mark_is_refused_once_a_shard_withdraws_wherever_that_is() -> None:
    cluster = spread()
    name = far(cluster)
    assert cluster.put(0, name, 1, shard=0) is None
    assert cluster.put(1, name, 1, shard=1) is None
    assert cluster.put(1, name, 1, Phase.WITHDRAWING, shard=1) is None
    cluster.read_all(2)
    mark = WholeMark(publication(name, 1), 2)
    refused = cluster.do(2, lambda then: cluster.of(2).mark(cluster.now, KEY, mark, then))
    assert isinstance(refused, Refused)
    assert refused.reason == WITHDRAWN


def test_a_replica_publishes_nothing_below_what_it_had_whole_also_when_the_key_has_grown() -> None:
    cluster = Peers()
    assert cluster.put(0, "mine", 5, was_whole=True) is None
    assert cluster.put(0, "mine", 5, Phase.HIDDEN, was_whole=True) is None
    cluster.fill(60, version=7)
    cluster.read_all(0)
    cluster.net.run_for(1.0)
    total = cluster.of(0).buckets(KEY)
    assert bucket_of("mine", total) != 0, "or this shows nothing"
    older = cluster.put(0, "mine", 4)
    assert older is not None
    assert older.reason == CONFLICT
    assert cluster.put(0, "mine", 6) is None
    cluster.net.run_for(0.5)
    assert cluster.put(0, "mine", 6, Phase.HIDDEN) is None, "it was never whole"
    older = cluster.put(0, "mine", 4)
    assert older is not None
    assert older.reason == CONFLICT


def test_a_version_below_one_of_another_replica_is_refused_once_membership_knows_of_that() -> None:
    cluster = spread()
    name = far(cluster)
    assert cluster.put(0, name, 9, was_whole=True) is None
    total = cluster.of(1).buckets(KEY)
    other = next(n for i in range(99) if bucket_of(n := f"o{i}", total) != bucket_of(name, total))
    assert cluster.put(1, other, 8) is None, "its owners know nothing of version 9"
    assert cluster.put(1, other, 8, Phase.HIDDEN) is None
    cluster.newest = (0, 9)
    refused = cluster.put(1, other, 7)
    assert refused is not None
    assert refused.reason == CONFLICT
    assert refused.because is not None
    assert refused.because.writer == cluster[0].me
    assert cluster.put(1, other, 9) is None, "side by side"
    assert cluster.put(1, other, 9, Phase.HIDDEN) is None


def test_a_write_that_is_looked_at_first_may_be_replaced_like_any_other() -> None:
    cluster = spread()
    cluster.newest = (0, 9)
    slot = Slot(Group("policy", "r0"), 0)
    ends: list[str] = []
    for version, word in ((2, "first"), (3, "second")):
        record = VersionRecord(slot, 1, publication("r0", version), Phase.READY, G1)
        cluster.of(0).write(
            cluster.now, KEY, slot_name(slot), 1, record, lambda _n, _r, w=word: ends.append(w)
        )
    cluster.net.settle(cluster[0].me)
    cluster.net.run_for(1.0)
    assert ends == ["second"]
    assert "r0" in replicas(cluster.read_all(4), 3)


def test_a_replaced_generation_is_fenced_wherever_its_replica_lies() -> None:
    cluster = spread()
    name = far(cluster)
    group = Group("policy", name)
    fence = GenerationRecord(G2, 0, (Member(0, cluster[0].me, 1),), 0)
    assert (
        cluster.do(
            0,
            lambda then: cluster.of(0).write(cluster.now, KEY, fence_name(group), 2, fence, then),
        )
        is None
    )
    for index in range(8):
        refused = cluster.put(index, name, 1, shard=index)
        assert refused is not None
        assert refused.reason == FENCED


def test_a_retraction_is_found_by_everybody() -> None:
    cluster = spread()
    bad = Retraction(0, 1)
    assert cluster.do(0, lambda then: cluster.of(0).mark(cluster.now, KEY, bad, then)) is None
    assert [value for _, value in values(cluster.read_all(5), Retraction)] == [bad]


def test_where_no_owner_sees_all_holders_pins_are_for_their_leader_to_check() -> None:
    what = publication("trainer", 1)
    slot = Slot(Group("policy", "trainer"), 0)
    gone = VersionRecord(slot, 1, what, Phase.HIDDEN, G1, True)
    register = of_mark(WholeMark(what, 1))
    held = Cells([register, register.__class__(Peers().start().me, "0@trainer", 1, 1, gone)])
    pin = register.__class__(
        Peers().start().me, "pin/0@r", 1, 1, Pin(what, Group("policy", "r"), G1, 1)
    )
    refusal = admit(KEY, held, pin)
    assert refusal is not None
    assert refusal.reason == WITHDRAWN
    held.merge(0.0, [of_mark(Buckets(2))])
    assert admit(KEY, held, pin) is None


def test_what_lies_near_a_replica_is_read_from_one_bucket() -> None:
    cluster = spread()
    name = far(cluster)
    cluster.read_all(0)
    cluster.net.run_for(1.0)
    for shard in range(3):
        assert cluster.put(0, name, 1, shard=shard) is None
    found = [r.slot.shard for _, r in values(cluster.read_all(0, near=name), VersionRecord)]
    assert set(found) >= {0, 1, 2}
    assert len(found) < 30, "not all of it"


def test_a_watch_tells_of_changes_in_every_bucket_also_in_later_ones() -> None:
    cluster = Peers()
    told: list[float] = []
    watch = cluster.of(3).watch(cluster.now, KEY, told.append)
    cluster.net.settle(cluster[3].me)
    cluster.fill(60)
    cluster.read_all(3)
    cluster.net.run_for(0.5)
    for number in range(60, 80):
        told.clear()
        assert cluster.put(number % 8, f"r{number}", 1) is None
        cluster.net.run_for(0.1)
        assert told, number
    cluster.of(3).unwatch(cluster.now, watch)
    assert cluster[3].directory._watched == {}


def test_a_cancelled_read_of_many_buckets_ends_without_an_answer() -> None:
    cluster = spread()
    cluster.read_all(4)
    answers: list[object] = []
    number = cluster.of(4).read(cluster.now, KEY, lambda _now, found: answers.append(found))
    cluster.of(4).cancel(number)
    cluster.net.run_for(2.0)
    assert answers == []
    assert cluster[4].directory._requests == {}


def test_what_is_forgotten_goes_wherever_it_was() -> None:
    cluster = spread()
    name = far(cluster)
    slot, group = Slot(Group("policy", name), 0), Group("policy", name)
    assert cluster.put(0, name, 1) is None
    fence = GenerationRecord(G1, 0, (Member(0, cluster[0].me, 1),), 0)
    records = cluster.of(0)
    cluster.do(0, lambda then: records.write(cluster.now, KEY, fence_name(group), 1, fence, then))
    records.forget(cluster.now, KEY, slot_name(slot))
    records.forget(cluster.now, KEY, fence_name(group))
    cluster.net.run_for(SMALL.forget_hidden_after + 2.0)
    assert not [r for r in cluster.read_all(1) if name in r.name]


def test_what_a_replica_had_whole_is_known_in_its_new_bucket_before_its_next_record_is() -> None:
    """Also if that write is replaced by another one while the mark is on its way."""
    cluster = Peers()
    assert cluster.put(0, "mine", 5, was_whole=True) is None
    assert cluster.put(0, "mine", 5, Phase.HIDDEN, was_whole=True) is None
    cluster.fill(60, version=7)
    cluster.read_all(0)
    cluster.net.run_for(1.0)
    records = cluster.of(0)
    ended: list[Refused | None] = []
    for phase in (Phase.READY, Phase.HIDDEN):
        record = VersionRecord(
            Slot(Group("policy", "mine"), 0), 1, publication("mine", 6), phase, G1
        )
        then = lambda _now, refused: ended.append(refused)  # noqa: E731
        records.write(cluster.now, KEY, "0@mine", 1, record, then)
        cluster.net.settle(cluster[0].me)
    assert cluster.net.run_until(lambda: bool(ended), 5.0)
    assert ended == [None]
    place = bucket(KEY, bucket_of("mine", records.buckets(KEY)))
    for owner in cluster.peers.values():
        held = owner.directory._owner._held.get(place)
        if held is not None and (cluster[0].me, "0@mine") in held.cells:
            assert any(isinstance(r.value, WholeMark) for r in held.cells.values())


def test_a_replica_of_very_many_shards_alone_needs_no_more_buckets_with_each_version() -> None:
    """Its registers lie together, however many buckets there are."""
    cluster = Peers(config=DirectoryConfig(virtual_nodes=16))
    shards = 64
    for version in range(1, 6):
        for phase in (Phase.READY, Phase.HIDDEN):
            for shard in range(shards):
                peer = shard % len(cluster.everyone)
                assert cluster.put(peer, "trainer", version, phase, shard=shard) is None
    assert {cluster.of(peer).buckets(KEY) for peer in range(len(cluster.everyone))} == {1}
