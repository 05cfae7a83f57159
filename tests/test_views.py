"""What is known of a watched key is what a read would say, as long as every change is told."""

from __future__ import annotations

import random

from directory_cluster import KEY, Cluster, Peer, numbers, value
from test_directory_push import lose, watching

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import RENEWAL
from tensorhub_p2p.protocol.directory.views import Views
from tensorhub_p2p.protocol.directory.watchers import MOST_TOLD, Watchers
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import DirectoryChanged, DirectoryWatch, Key, Register


def register(name: str, sequence: int, version: int | None) -> Register:
    held = value(version) if version is not None else None
    return Register(PeerId("w"), name, 1, sequence, held)


def known(watcher: Peer) -> dict[str, int] | None:
    registers = watcher.directory.known(KEY)
    return None if registers is None else numbers(registers)


def test_a_change_is_known_without_a_read() -> None:
    cluster = Cluster(peers=8)
    writer, watcher = watching(cluster)
    assert known(watcher) == {"a": 1}
    cluster.write(writer, "a", 2)
    cluster.write(writer, "b", 3)
    cluster.net.run_for(0.1)
    assert known(watcher) == {"a": 2, "b": 3}
    writer.directory.withdraw(cluster.now, KEY, "b", 0)
    cluster.net.settle(writer.me)
    cluster.net.run_for(0.1)
    assert known(watcher) == {"a": 2}


def test_own_writes_are_known_once_they_are_done_and_are_not_told_by_the_owners() -> None:
    cluster = Cluster(peers=8)
    _, watcher = watching(cluster)
    told = 0
    receive = watcher.directory.receive

    def count(now: float, sender: PeerId, message: object) -> None:
        nonlocal told
        told += isinstance(message, DirectoryChanged)
        receive(now, sender, message)  # type: ignore[arg-type]

    watcher.directory.receive = count  # type: ignore[method-assign, assignment]
    changes = cluster.changes(watcher)
    cluster.write(watcher, "mine", 5)
    cluster.net.run_for(0.1)
    assert known(watcher) == {"a": 1, "mine": 5}
    assert cluster.changes(watcher) == changes + 1
    assert told == 0


def test_nothing_is_known_before_the_first_read_and_after_a_change_of_the_owners() -> None:
    cluster = Cluster(peers=8)
    _, watcher = watching(cluster)
    other = cluster.peers[next(p for p in cluster.peers if p != watcher.me)]
    other.directory.watch(cluster.now, KEY)
    assert other.directory.known(KEY) is None
    owners = watcher.directory.owners(KEY)
    members = [m for m in watcher.directory.members if m != owners[0]]
    watcher.directory.members_changed(cluster.now, members)
    assert watcher.directory.known(KEY) is None


def test_of_many_changes_at_once_it_is_told_only_that_there_were_some() -> None:
    told: list[DirectoryChanged] = []
    watchers = Watchers(DirectoryConfig(), lambda _now, _peer, message: told.append(message))
    watchers.watch(0.0, PeerId("watcher"), DirectoryWatch(KEY, 10.0), 0)
    for count in (MOST_TOLD, MOST_TOLD + 1):
        news = [register(f"n{number}", count, 1) for number in range(count)]
        watchers.changed(1.0, KEY, news, PeerId("w"))
        watchers.tick(1.0)
    assert [len(message.registers) for message in told] == [MOST_TOLD, 0]


def test_a_change_that_is_not_told_ends_what_is_known_until_the_next_read() -> None:
    cluster = Cluster(peers=8)
    _, watcher = watching(cluster)
    owner = cluster.owners()[0]
    changes = cluster.changes(watcher)
    watcher.directory.receive(cluster.now, owner.me, DirectoryChanged(KEY))
    cluster.net.settle(watcher.me)
    assert cluster.changes(watcher) == changes + 1
    assert known(watcher) is None
    cluster.read(watcher)
    assert known(watcher) == {"a": 1}


def test_a_lost_push_ends_what_is_known_when_the_watch_is_renewed() -> None:
    cluster = Cluster(peers=8)
    writer, watcher = watching(cluster)
    receive = watcher.directory.receive
    lose(watcher, DirectoryChanged)
    cluster.write(writer, "a", 2)
    cluster.net.run_for(0.1)
    watcher.directory.receive = receive  # type: ignore[method-assign]
    assert known(watcher) == {"a": 1}
    cluster.net.run_for(RENEWAL * cluster.config.watch_seconds + 0.1)
    assert known(watcher) is None
    assert cluster.read(watcher) == {"a": 2}
    assert known(watcher) == {"a": 2}


def test_an_older_read_takes_nothing_back_that_was_told() -> None:
    views, key = Views(), Key("versions", "policy")
    views.begin(key)
    views.read(key, [register("a", 1, 1), register("b", 1, 1)])
    views.tell(key, [register("a", 3, 3), register("b", 2, None)])
    views.read(key, [register("a", 2, 2), register("b", 1, 1)])
    known = views.known(key)
    assert known is not None
    assert [(r.name, r.sequence) for r in known] == [("a", 3)]


def test_in_whatever_order_it_is_told_the_newest_is_known() -> None:
    key = Key("versions", "policy")
    news = [register(name, s, s) for name in "abc" for s in range(1, 5)]
    for seed in range(50):
        rng = random.Random(seed)
        views = Views()
        views.begin(key)
        views.read(key, [])
        shuffled = rng.sample(news, len(news))
        for each in shuffled:
            views.tell(key, [each])
        assert {r.name: r.sequence for r in views.known(key) or ()} == {"a": 4, "b": 4, "c": 4}
