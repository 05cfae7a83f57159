"""Changes are pushed; one whose push got lost is told when the watch is renewed."""

from __future__ import annotations

import pytest
from directory_cluster import KEY, Cluster, Peer, value

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import RENEWAL
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import (
    DirectoryChanged,
    DirectoryRead,
    DirectoryWatch,
    Rumour,
    Status,
)

WATCH_SECONDS = DirectoryConfig().watch_seconds


def lose(peer: Peer, kind: type, of: PeerId | None = None) -> None:
    """From now on this peer gets no message of this kind (`of`: from that one)."""
    directory = peer.directory
    receive = directory.receive

    def without(now: float, sender: PeerId, message: object) -> None:
        if not isinstance(message, kind) or of not in {None, sender}:
            receive(now, sender, message)  # type: ignore[arg-type]

    directory.receive = without  # type: ignore[method-assign]


def watching(cluster: Cluster) -> tuple[Peer, Peer]:
    """A writer, and a watcher that has read the key; neither is an owner of it."""
    writer, watcher = [p for p in cluster.peers.values() if p not in cluster.owners()][:2]
    cluster.write(writer, "a", 1)
    watcher.directory.watch(cluster.now, KEY)
    cluster.read(watcher)
    cluster.net.run_for(0.1)
    return writer, watcher


def test_a_change_is_told_two_messages_after_it_was_written() -> None:
    cluster = Cluster(peers=8, latency=(0.01, 0.01))
    writer, watcher = watching(cluster)
    before, start = cluster.changes(watcher), cluster.now
    writer.directory.write(cluster.now, KEY, "a", 0, value(2))
    cluster.net.settle(writer.me)
    assert cluster.net.run_until(lambda: cluster.changes(watcher) > before, 1.0)
    assert cluster.now - start == pytest.approx(0.02, abs=1e-6)


def test_a_change_whose_push_got_lost_is_told_when_the_watch_is_renewed() -> None:
    cluster = Cluster(peers=8)
    writer, watcher = watching(cluster)
    receive = watcher.directory.receive
    lose(watcher, DirectoryChanged)
    cluster.write(writer, "a", 2)
    cluster.net.run_for(0.1)
    watcher.directory.receive = receive  # type: ignore[method-assign]
    told = cluster.changes(watcher)
    cluster.net.run_for(RENEWAL * WATCH_SECONDS)
    assert cluster.changes(watcher) > told
    assert cluster.read(watcher) == {"a": 2}


def test_who_has_seen_all_is_told_nothing_and_reads_nothing() -> None:
    cluster = Cluster(peers=8)
    _, watcher = watching(cluster)
    cluster.read(watcher)
    told = cluster.changes(watcher)
    reads = 0
    for owner in cluster.owners():
        receive = owner.directory.receive

        def count(now: float, sender: PeerId, message: object, receive: object = receive) -> None:
            nonlocal reads
            reads += isinstance(message, DirectoryRead)
            receive(now, sender, message)  # type: ignore[operator]

        owner.directory.receive = count  # type: ignore[method-assign, assignment]
    cluster.net.run_for(60.0)
    assert cluster.changes(watcher) == told
    assert reads == 0


def test_an_owner_that_knows_too_little_to_compare_says_nothing() -> None:
    cluster = Cluster(peers=8)
    _, watcher = watching(cluster)
    owner = cluster.owners()[0]
    owner.directory._owner._held.clear()
    told = cluster.changes(watcher)
    owner.directory.receive(cluster.now, watcher.me, DirectoryWatch(KEY, 10.0, seen=77))
    cluster.net.settle(owner.me)
    cluster.net.run_for(0.1)
    assert cluster.changes(watcher) == told


def test_who_comes_beyond_the_bound_is_not_told() -> None:
    cluster = Cluster(peers=8, config=DirectoryConfig(virtual_nodes=16, max_watchers=1))
    writer, watcher = watching(cluster)
    late = next(p for p in cluster.peers.values() if p not in (*cluster.owners(), writer, watcher))
    late.directory.watch(cluster.now, KEY)
    cluster.net.run_for(0.1)
    cluster.write(writer, "a", 2)
    cluster.net.run_for(0.1)
    assert cluster.changes(watcher)
    assert not cluster.changes(late)


def test_the_return_of_a_member_counts_as_a_change_and_a_newcomer_does_not() -> None:
    """What the returned one wrote counts again, though no register has changed."""
    cluster = Cluster(peers=12)
    watcher = cluster[0]
    writer = next(
        p for p in cluster.peers.values() if p not in cluster.owners() and p is not watcher
    )
    cluster.write(writer, "a", 1)
    watcher.directory.watch(cluster.now, KEY)
    cluster.spread(Rumour(writer.me, 0, Status.DEAD))
    cluster.net.run_for(1.0)
    owners, told = watcher.directory.owners(KEY), cluster.changes(watcher)
    cluster.tell(watcher, Rumour(writer.me, 1, Status.ALIVE))
    assert watcher.directory.owners(KEY) == owners
    assert cluster.changes(watcher) == told + 1
    told += 1
    for number in range(5):
        cluster.tell(watcher, Rumour(PeerId(f"newcomer{number}"), 0, Status.ALIVE))
        if watcher.directory.owners(KEY) != owners:
            break
        assert cluster.changes(watcher) == told
