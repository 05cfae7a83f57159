"""Reads, writes, refusals and watches on a ring that stays as it is."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from directory_cluster import KEY, Cluster, Peer, numbers, value
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.directory import (
    LAGS,
    Admit,
    OwnersDiffer,
    ReadDone,
    Refusal,
    RequestExpired,
    WriteDone,
    WriteRefused,
)
from tensorhub_p2p.protocol.directory.registers import Cell, merge
from tensorhub_p2p.protocol.directory.ring import owners_hash
from tensorhub_p2p.protocol.identity import (
    NO_GENERATION,
    NOBODY,
    Generation,
    Group,
    PeerId,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.messages import (
    DirectoryMismatch,
    DirectoryRead,
    DirectoryWrite,
    Key,
    Phase,
    Register,
    VersionRecord,
    WholeMark,
)

SLOT = Slot(Group("policy", "trainer"), 0)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_one_peer_wrote_every_peer_reads(size: int) -> None:
    cluster = Cluster(peers=size)
    cluster.write(cluster[0], "a", 7)
    for peer in cluster.peers.values():
        assert cluster.read(peer) == {"a": 7}


def test_a_cluster_of_one_answers_without_a_message_or_a_tick() -> None:
    peer = Cluster().start()
    write = peer.directory.write(0.0, KEY, "a", 0, value(1))
    read = peer.directory.read(0.0, KEY)
    done, value_read = peer.directory.outbox.drain()
    assert done == WriteDone(write, KEY)
    assert isinstance(value_read, ReadDone)
    assert value_read.request == read
    assert numbers(value_read.registers) == {"a": 1}


def test_a_later_write_replaces_and_a_withdrawal_hides() -> None:
    cluster = Cluster(peers=5)
    cluster.write(cluster[0], "a", 1)
    cluster.write(cluster[0], "a", 2)
    cluster.write(cluster[1], "a", 9)
    reader = cluster[2]
    request = reader.directory.read(0.0, KEY)
    event = cluster.ended(reader, request)
    assert isinstance(event, ReadDone)
    assert sorted(r.value.counter for r in event.registers) == [2, 9]  # type: ignore[union-attr]
    gone = cluster[1].directory.withdraw(cluster.now, KEY, "a", 0)
    assert isinstance(cluster.ended(cluster[1], gone), WriteDone)
    assert cluster.read(reader) == {"a": 2}


def test_the_higher_generation_wins_whatever_the_sequence() -> None:
    low = Register(PeerId("w"), "a", 1, 99, value(1))
    high = Register(PeerId("w"), "a", 2, 1, value(2))
    for order in ((low, high), (high, low)):
        cells: dict[Cell, Register] = {}
        merge(cells, order)
        assert cells == {high.cell: high}


def test_a_silent_owner_delays_no_write_and_a_read_by_its_patience() -> None:
    cluster = Cluster(peers=6)
    client = next(p for p in cluster.peers.values() if p not in cluster.owners())
    cluster.crash(cluster.owners()[0])
    start = cluster.now
    cluster.write(client, "a", 1)
    assert cluster.now - start < 0.05
    start = cluster.now
    assert cluster.read(client) == {"a": 1}
    assert cluster.now - start < cluster.config.read_patience + 0.05


def test_a_read_asks_no_more_owners_than_have_to_answer_and_not_the_same_ones_each_time() -> None:
    cluster = Cluster(peers=8)
    client = next(p for p in cluster.peers.values() if p not in cluster.owners())
    asked: Counter[PeerId] = Counter()
    for owner in cluster.owners():
        receive = owner.directory.receive

        def count(
            now: float, sender: PeerId, message: object, owner: Peer = owner, receive: Any = receive
        ) -> None:
            asked[owner.me] += isinstance(message, DirectoryRead)
            receive(now, sender, message)

        owner.directory.receive = count  # type: ignore[method-assign, assignment]
    for _ in range(30):
        cluster.read(client)
    assert asked.total() == 60
    assert set(asked.values()) == {20}


def test_a_request_that_no_majority_answers_names_the_silent_owners() -> None:
    cluster = Cluster(peers=6)
    owners = cluster.owners()
    client = next(p for p in cluster.peers.values() if p not in owners)
    for owner in owners[:2]:
        cluster.crash(owner)
    request = client.directory.read(cluster.now, KEY, cluster.now + 1.0)
    event = cluster.ended(client, request)
    assert isinstance(event, RequestExpired)
    assert set(event.silent) == {owner.me for owner in owners[:2]}
    assert 0.99 < cluster.now < 1.01


def test_a_cancelled_request_ends_without_an_event() -> None:
    cluster = Cluster(peers=6)
    client = next(p for p in cluster.peers.values() if p not in cluster.owners())
    request = client.directory.read(0.0, KEY, 1.0)
    client.directory.cancel(request)
    cluster.net.run_for(2.0)
    assert client.events == []
    assert client.directory._requests == {}


def test_lost_messages_are_sent_again() -> None:
    cluster = Cluster(seed=3, peers=6, loss=0.3)
    for number in range(20):
        cluster.write(cluster[number % 6], "a", number)
        assert cluster.read(cluster[(number + 1) % 6])["a"] >= 0


def unlucky(key: Key, held: Cells, register: Register) -> Refusal | None:
    bad = numbers([register]).get(register.name) == 13
    return Refusal("unlucky", next(iter(held.values()), None)) if bad else None


refuse_thirteen = Admit(unlucky, lambda _key, _register: False)


def test_a_refused_write_says_why_and_leaves_what_stood_there() -> None:
    cluster = Cluster(peers=5, admit=refuse_thirteen)
    cluster.write(cluster[0], "a", 12)
    request = cluster[0].directory.write(cluster.now, KEY, "a", 0, value(13), cluster.now + 5)
    event = cluster.ended(cluster[0], request)
    assert isinstance(event, WriteRefused)
    assert event.reason == "unlucky"
    assert event.because is not None
    assert event.because.value == value(12)
    cluster.net.run_for(1.0)
    assert cluster.read(cluster[3]) == {"a": 12}


def test_a_write_refused_by_one_owner_fades_at_those_that_took_it() -> None:
    cluster = Cluster(peers=5)
    owners = cluster.owners()
    owners[0].directory._owner._admit = refuse_thirteen
    writer = next(p for p in cluster.peers.values() if p not in owners)
    request = writer.directory.write(0.0, KEY, "a", 0, value(13), 5.0)
    while request not in writer.ended:
        cluster.net.run_for(0.001)
    cluster.net.run_for(1.0)
    if isinstance(writer.ended[request], WriteRefused):
        assert cluster.read(cluster[3]) == {}
        for owner in owners:
            held = owner.directory._owner._held[KEY].cells.values()
            assert all(register.value is None for register in held)


def test_a_register_can_only_be_written_by_its_writer() -> None:
    cluster = Cluster(peers=3)
    owner = cluster[0].directory
    seal = owners_hash(owner.owners(KEY))
    for writer in (PeerId("other"), NOBODY):
        forged = Register(writer, "a", 0, 1, value(1))
        owner.receive(0.0, cluster[1].me, DirectoryWrite(1, KEY, seal, forged))
    assert owner.outbox.drain() == []
    assert cluster.read(cluster[2]) == {}


def mark(version: int) -> WholeMark:
    return WholeMark(Publication(0, version, "trainer", Generation(1, 1)), 2)


def test_anyone_may_mark_and_all_marks_of_a_publication_are_one() -> None:
    cluster = Cluster(peers=5)
    for peer in (cluster[0], cluster[1]):
        request = peer.directory.mark(cluster.now, KEY, mark(1), cluster.now + 5)
        assert isinstance(cluster.ended(peer, request), WriteDone)
    reader = cluster[2]
    event = cluster.ended(reader, reader.directory.read(cluster.now, KEY))
    assert isinstance(event, ReadDone)
    assert [register.value for register in event.registers] == [mark(1)]


def test_old_marks_are_dropped_unless_something_still_names_them() -> None:
    named = VersionRecord(SLOT, 2, mark(3).publication, Phase.READY, Generation(1, 1))
    cells = Cells([Register(PeerId("w"), "0@trainer", 1, 1, named)])
    for version in range(100):
        cells.merge(0.0, [Register(NOBODY, f"whole:{version}", 1, 1, mark(version))])
    versions = [r.value.publication.version for r in cells.values() if r.writer == NOBODY]  # type: ignore[union-attr]
    assert 32 <= len(versions) <= 65
    assert max(versions) == 99
    assert min(versions) == 3, "it is held"


def test_a_full_owner_refuses_new_registers_and_keeps_serving_old_ones() -> None:
    cluster = Cluster(peers=1, config=DirectoryConfig(max_key_registers=2))
    peer = cluster[0]
    cluster.write(peer, "a", 1)
    cluster.write(peer, "b", 1)
    event = cluster.ended(peer, peer.directory.write(0.0, KEY, "c", 0, value(1)))
    assert isinstance(event, WriteRefused)
    assert event.reason == "full"
    cluster.write(peer, "a", 2)
    assert cluster.read(peer) == {"a": 2, "b": 1}


def test_a_full_owner_is_told_of_what_is_given_up() -> None:
    """Or it would go on standing where it was published."""
    cluster = Cluster(peers=1, config=DirectoryConfig(max_key_registers=2))
    peer, publication = cluster[0], Publication(0, 1, "a", Generation(1, 7))

    def write(name: str, phase: Phase) -> Event:
        slot = Slot(Group("policy", name), 0)
        record = VersionRecord(slot, 1, publication, phase, Generation(1, 7), was_whole=True)
        return cluster.ended(peer, peer.directory.write(cluster.now, KEY, name, 0, record))

    cluster.write(peer, "a", 1)
    cluster.write(peer, "b", 1)
    assert isinstance(write("c", Phase.READY), WriteRefused)
    assert isinstance(write("c", Phase.WITHDRAWING), WriteDone)
    assert isinstance(write("d", Phase.HIDDEN), WriteDone)
    assert isinstance(write("e", Phase.HIDDEN), WriteRefused), "that has a bound, too"


def test_reading_unknown_keys_leaves_nothing_behind() -> None:
    cluster = Cluster(peers=3)
    for number in range(50):
        assert cluster.read(cluster[0], Key("versions", f"unknown-{number}")) == {}
    assert all(peer.directory._owner._held == {} for peer in cluster.peers.values())


def test_a_watcher_is_told_of_changes_until_it_unwatches() -> None:
    cluster = Cluster(peers=6)
    watcher, writer = cluster[0], cluster[1]
    watcher.directory.watch(cluster.now, KEY)
    cluster.net.run_for(0.1)
    assert cluster.changes(watcher) == 0
    cluster.write(writer, "a", 1)
    cluster.net.run_for(0.1)
    told = cluster.changes(watcher)
    assert 1 <= told <= 3
    cluster.net.run_for(60.0)
    assert cluster.changes(watcher) == told
    cluster.write(writer, "a", 2)
    cluster.net.run_for(0.1)
    assert cluster.changes(watcher) > told
    told = cluster.changes(watcher)
    watcher.directory.unwatch(cluster.now, KEY)
    cluster.net.run_for(0.1)
    cluster.write(writer, "a", 3)
    cluster.net.run_for(0.1)
    assert cluster.changes(watcher) == told


def test_a_watcher_that_died_is_forgotten() -> None:
    cluster = Cluster(peers=6)
    watcher = next(p for p in cluster.peers.values() if p not in cluster.owners())
    watcher.directory.watch(cluster.now, KEY)
    cluster.net.run_for(0.1)
    cluster.crash(watcher)
    for owner in cluster.owners():
        cluster.write(owner, "a", 1)
    cluster.net.run_for(40.0)
    assert all(owner.directory._owner._watchers._watchers == {} for owner in cluster.owners())


def test_an_owner_that_lost_everything_gets_it_back_from_the_writers() -> None:
    cluster = Cluster(peers=3)
    cluster.write(cluster[0], "a", 1)
    cluster.net.run_for(0.1)
    lost = cluster[1].directory._owner
    lost._held.clear()
    cluster.net.run_for(2 * cluster.config.repair_interval)
    assert [r.value for r in lost._held[KEY].cells.values()] == [value(1)]


def test_what_dead_writers_wrote_can_be_forgotten() -> None:
    cluster = Cluster(peers=3)
    cluster.write(cluster[0], "a", 1)
    cluster.write(cluster[1], "b", 2)
    cluster.net.run_for(0.1)
    for peer in cluster.peers.values():
        peer.directory.forget([cluster[0].me])
    assert cluster.read(cluster[2]) == {"b": 2}
    assert cluster[2].directory._owner._count == 1


def test_requests_for_another_owner_list_are_not_served() -> None:
    cluster = Cluster(peers=5)
    owner = cluster.owners()[0]
    asker = cluster[4].me
    owner.directory.receive(0.0, asker, DirectoryRead(1, KEY, 123))
    owner.directory.receive(0.0, asker, DirectoryRead(2, KEY, 123))
    assert owner.directory.outbox.drain() == [
        Send(asker, DirectoryMismatch(1)),
        OwnersDiffer(asker),
        Send(asker, DirectoryMismatch(2)),
        OwnersDiffer(asker),
    ]


@given(st.integers(0, 2**32), st.integers(1, 6), st.floats(0.0, 0.2))
@settings(max_examples=25, deadline=None)
def test_a_completed_write_is_seen_by_every_later_read(seed: int, size: int, loss: float) -> None:
    cluster = Cluster(seed, peers=size, loss=loss)
    draw = random.Random(seed)
    for number in range(1, 15):
        writer = cluster[draw.randrange(size)]
        cluster.write(writer, "a", number)
        reader = cluster[draw.randrange(size)]
        event = cluster.ended(reader, reader.directory.read(cluster.now, KEY, cluster.now + 9))
        assert isinstance(event, ReadDone)
        newest = {r.writer: r.value.counter for r in event.registers}  # type: ignore[union-attr]
        assert newest[writer.me] == number


def test_the_generation_of_a_mark_is_its_publications() -> None:
    peer = Cluster().start()
    publication = Publication(0, 1, "trainer", NO_GENERATION)
    peer.directory.mark(0.0, KEY, WholeMark(publication, 1))
    (register,) = peer.directory._owner._held[KEY].cells.values()
    assert (register.writer, register.generation, register.sequence) == (NOBODY, 0, 1)


def test_an_owner_with_another_owner_list_takes_no_write_though_it_owns_the_key() -> None:
    cluster = Cluster(peers=4)
    owner = cluster.owners()[0]
    writer = cluster.owners()[1].me
    seal = owners_hash((owner.me, writer, PeerId("unknown")))
    register = Register(writer, "a", 0, 1, value(1))
    owner.directory.receive(0.0, writer, DirectoryWrite(1, KEY, seal, register))
    assert owner.directory.outbox.drain() == [
        Send(writer, DirectoryMismatch(1)),
        OwnersDiffer(writer),
    ]
    assert KEY not in owner.directory._owner._held


def test_what_a_minority_of_owners_holds_is_no_part_of_an_agreed_read() -> None:
    """As of a write that is under way: one read may see it, and the next one not."""
    cluster = Cluster(peers=8)
    writer, reader = [p for p in cluster.peers.values() if p not in cluster.owners()][:2]
    cluster.write(writer, "old", 1)
    early = Register(writer.me, "new", 0, 1, value(2))
    owner = cluster.owners()[0]
    write = DirectoryWrite(7, KEY, owners_hash(owner.directory.owners(KEY)), early)
    owner.directory.receive(cluster.now, writer.me, write)

    def reads(agreed: bool) -> list[dict[str, int]]:
        """Several, since each asks other owners."""
        found = []
        for _ in range(6):
            event = cluster.ended(reader, reader.directory.read(cluster.now, KEY, agreed=agreed))
            assert isinstance(event, ReadDone)
            found.append(numbers(event.registers))
        return found

    assert {"old": 1, "new": 2} in reads(agreed=False)
    assert {"old": 1} in reads(agreed=False)
    assert all(read == {"old": 1} for read in reads(agreed=True))
    for other in cluster.owners()[1:2]:
        other.directory.receive(cluster.now, writer.me, write)
    assert all(read == {"old": 1, "new": 2} for read in reads(agreed=True)), "W have it"
    cluster.crash(owner)
    assert all(read == {"old": 1} for read in reads(agreed=True)), "as far as anybody can tell"


def test_an_owner_that_missed_a_write_is_told_soon_also_if_the_write_needed_it_not() -> None:
    cluster = Cluster(peers=8)
    writer = next(p for p in cluster.peers.values() if p not in cluster.owners())
    deaf = cluster.owners()[0]
    receive = deaf.directory.receive
    deaf.directory.receive = lambda *_: None  # type: ignore[method-assign]
    cluster.write(writer, "a", 1)
    cluster.net.run_for(0.1)
    assert KEY not in deaf.directory._owner._held
    deaf.directory.receive = receive  # type: ignore[method-assign]
    cluster.net.run_for(2 * cluster.config.retry_interval)
    assert numbers(deaf.directory._owner._held[KEY].cells.registers()) == {"a": 1}
    assert not writer.directory._requests
    assert not writer.directory._repairs


def test_a_later_write_of_the_register_takes_the_place_of_what_is_still_offered() -> None:
    cluster = Cluster(peers=8)
    writer = next(p for p in cluster.peers.values() if p not in cluster.owners())
    cluster.crash(cluster.owners()[0])
    for number in range(20):
        cluster.write(writer, "a", number)
    assert len(writer.directory._requests) == 1
    cluster.net.run_for((LAGS + 1) * cluster.config.retry_interval)
    assert not writer.directory._requests
    assert not writer.directory._repairs
