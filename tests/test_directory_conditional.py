"""Writes that other registers may forbid, while the owners change."""

from __future__ import annotations

from random import Random

import pytest
from directory_cluster import KEY, Cluster, Peer, value

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.admission import CONFLICT, FENCED, WITHDRAWN, admit
from tensorhub_p2p.protocol.directory.directory import WriteDone, WriteRefused
from tensorhub_p2p.protocol.directory.owner import Owner
from tensorhub_p2p.protocol.directory.records import fence_name
from tensorhub_p2p.protocol.directory.ring import Ring, owners_hash
from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    Member,
    PeerId,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.messages import (
    DirectoryMerge,
    DirectoryMerged,
    DirectoryRead,
    DirectoryRefused,
    DirectoryValue,
    DirectoryWrite,
    GenerationRecord,
    Message,
    Phase,
    Register,
    Rumour,
    Status,
    Value,
    VersionRecord,
    WholeMark,
)

TRAINER = Group("policy", "trainer")
G1, G2 = Generation(1, 7), Generation(2, 7)
PULL_ONLY = DirectoryConfig(virtual_nodes=16, repair_interval=1e6, rewrite_jitter=1e6)
"""Nobody writes again: what new owners don't merge they don't have."""


def publication(version: int, replica: str = "trainer") -> Publication:
    return Publication(0, version, replica, G1)


def record(what: Publication, phase: Phase = Phase.READY, shard: int = 0) -> VersionRecord:
    slot = Slot(Group("policy", what.replica), shard)
    return VersionRecord(slot, 2, what, phase, G1, False)


def fence() -> GenerationRecord:
    return GenerationRecord(G2, 0, (Member(0, PeerId("w"), 1),), 0)


def joined_by_two(cluster: Cluster) -> Peer:
    """Two newcomers that own the key too, and know nothing of it; returns one of them."""
    for _ in range(2):
        cluster.join(cluster.start(), cluster[0])
    newcomers = [cluster[1], cluster[2]]
    for peer in cluster.peers.values():
        for newcomer in newcomers:
            if newcomer is not peer:
                cluster.tell(peer, Rumour(newcomer.me, 0, Status.ALIVE))
    assert {p.me for p in cluster.owners()} == {p.me for p in cluster.peers.values()}
    return cluster[2]


REASONS: dict[str, tuple[str, Value]] = {
    CONFLICT: ("", WholeMark(publication(7), 2)),
    FENCED: (fence_name(TRAINER), fence()),
    WITHDRAWN: ("1@trainer", record(publication(5), Phase.WITHDRAWING, shard=1)),
}


def put(cluster: Cluster, peer: Peer, name: str, what: Value) -> object:
    if isinstance(what, WholeMark):
        request = peer.directory.mark(cluster.now, KEY, what, cluster.now + 8)
    else:
        request = peer.directory.write(cluster.now, KEY, name, 1, what, cluster.now + 8)
    return cluster.ended(peer, request)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("reason", REASONS)
def test_owners_that_are_new_for_a_key_do_not_admit_what_the_earlier_one_forbids(
    reason: str, seed: int
) -> None:
    cluster = Cluster(seed=seed, peers=1, config=PULL_ONLY, latency=(0.001, 0.05), admit=admit)
    assert isinstance(put(cluster, cluster[0], *REASONS[reason]), WriteDone)
    newcomer = joined_by_two(cluster)
    what = WholeMark(publication(5), 2) if reason == WITHDRAWN else record(publication(5))
    event = put(cluster, newcomer, "0@trainer", what)
    assert isinstance(event, WriteRefused), "two owners that knew nothing made a majority"
    assert event.reason == reason


@pytest.mark.parametrize("seed", range(10))
def test_what_nothing_forbids_is_admitted_as_soon_as_the_new_owners_know(seed: int) -> None:
    cluster = Cluster(seed=seed, peers=1, config=PULL_ONLY, latency=(0.001, 0.05), admit=admit)
    assert isinstance(put(cluster, cluster[0], "", WholeMark(publication(7), 2)), WriteDone)
    newcomer = joined_by_two(cluster)
    start = cluster.now
    assert isinstance(put(cluster, newcomer, "0@trainer", record(publication(8))), WriteDone)
    assert cluster.now - start < 1.0


def test_a_plain_write_waits_for_nobody() -> None:
    cluster = Cluster(seed=1, peers=1, config=PULL_ONLY, latency=(0.01, 0.01), admit=admit)
    cluster.write(cluster[0], "a", 1)
    newcomer = joined_by_two(cluster)
    cluster.crash(cluster[0])  # silent, and not declared dead: nobody can merge from it
    start = cluster.now
    cluster.write(newcomer, "b", 2)
    assert cluster.now - start < 0.05


def test_a_parked_write_is_answered_once_the_silent_owner_is_declared_dead() -> None:
    cluster = Cluster(seed=1, peers=1, config=PULL_ONLY, latency=(0.01, 0.01), admit=admit)
    cluster.write(cluster[0], "a", 1)
    newcomer = joined_by_two(cluster)
    dead = cluster[0]
    cluster.crash(dead)
    what = record(publication(5))
    request = newcomer.directory.write(cluster.now, KEY, "0@trainer", 1, what, cluster.now + 8)
    cluster.net.run_for(1.0)
    assert request not in newcomer.ended, "nobody alive can tell what was whole"
    cluster.spread(Rumour(dead.me, 0, Status.DEAD))
    assert isinstance(cluster.ended(newcomer, request), WriteDone)


def test_a_parked_write_that_nobody_can_judge_names_no_owner_that_is_there_as_silent() -> None:
    cluster = Cluster(seed=1, peers=1, config=PULL_ONLY, latency=(0.01, 0.01), admit=admit)
    cluster.write(cluster[0], "a", 1)
    newcomer = joined_by_two(cluster)
    cluster.crash(cluster[0])
    what = record(publication(5))
    request = newcomer.directory.write(cluster.now, KEY, "0@trainer", 1, what, cluster.now + 1)
    event = cluster.ended(newcomer, request)
    assert getattr(event, "silent", None) == (cluster[0].me,)


def test_a_register_that_came_by_a_merge_is_judged_when_its_writer_asks() -> None:
    """Another owner lacked the mark, and took the publish; this one merges both."""
    sent: list[tuple[PeerId, Message]] = []
    me, writer, other = PeerId("me"), PeerId("writer"), PeerId("other")
    owner = Owner(
        me,
        Ring.of((me,), 16),
        PULL_ONLY,
        Random(1),
        admit,
        lambda _now, to, message: sent.append((to, message)),
        lambda _peer: None,
    )
    owner.ring_changed(0.0, Ring.of((me, writer, other), 16))
    publish = Register(writer, "0@trainer", 1, 1, record(publication(5)))
    mark = Register(NOBODY, "whole", 1, 1, WholeMark(publication(7), 2))
    seal = owners_hash(owner.owners(KEY))
    owner.receive(0.0, writer, DirectoryRead(1, KEY, seal))
    for peer, message in list(sent):
        if isinstance(message, DirectoryMerge):
            merged = DirectoryMerged(message.request, (publish, mark))
            owner.receive(0.1, peer, merged)
    assert (writer, DirectoryValue(1, (publish, mark))) in sent, "it is warm"
    owner.receive(0.2, writer, DirectoryWrite(2, KEY, seal, publish))
    assert (writer, DirectoryRefused(2, CONFLICT, mark)) in sent


def test_a_number_is_a_plain_value() -> None:
    assert not admit.is_conditional(KEY, Register(PeerId("w"), "a", 0, 1, value(1)))


def test_a_closed_owner_whose_other_debts_are_paid_meanwhile_opens_again() -> None:
    sent: list[tuple[PeerId, Message]] = []
    me, *peers = (PeerId(name) for name in ("me", "a", "b", "c", "d"))
    owner = Owner(
        me,
        Ring.of((me,), 16),
        PULL_ONLY,
        Random(1),
        admit,
        lambda _now, to, message: sent.append((to, message)),
        lambda _peer: None,
    )
    members = (me, *peers[:2])
    owner.ring_changed(0.0, Ring.of(members, 16))
    owners = owner.owners(KEY)
    seal = owners_hash(owners)
    owner.receive(0.0, peers[0], DirectoryRead(1, KEY, seal))
    assert not owner._held[KEY].debts.warm
    owner.receive(0.1, peers[2], DirectoryMerge(7, KEY, (me, *peers[2:])))
    assert owner._held[KEY].debts.closed
    larger = (Ring.of((*members, PeerId(f"e{n}")), 16) for n in range(100))
    ring = next(ring for ring in larger if ring.owners(KEY, 3) == owners)
    owner.ring_changed(0.2, ring)  # which makes it ask again, before it may reopen
    now = 0.2
    while owner._held[KEY].debts.closed:
        due = owner.next_wakeup()
        assert due is not None, "it is closed for ever"
        now = max(now, due)
        assert now < 5.0, "it is closed for ever"
        sent.clear()
        owner.tick(now)
        for to, message in list(sent):
            if isinstance(message, DirectoryMerge):
                owner.receive(now, to, DirectoryMerged(message.request, ()))
    assert owner._held[KEY].debts.warm
