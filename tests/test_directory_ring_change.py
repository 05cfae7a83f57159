"""Joins, leaves, deaths and views that differ: what was written is still read.

`PULL_ONLY` clusters never rewrite, so that only merging by new owners can carry a register over.
"""

from __future__ import annotations

import random

from directory_cluster import KEY, Cluster, Peer, numbers, value
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import ReadDone, RequestExpired, WriteDone
from tensorhub_p2p.protocol.messages import Key, Rumour, Status

PULL_ONLY = DirectoryConfig(virtual_nodes=16, repair_interval=1e6, rewrite_jitter=1e6)
KEYS = [Key("holders", "policy", str(shard)) for shard in range(30)]


def joined(cluster: Cluster) -> Peer:
    """A newcomer, known to everyone at once."""
    peer = cluster.start()
    cluster.join(peer, cluster[0])
    cluster.spread(Rumour(peer.me, 0, Status.ALIVE))
    return peer


def test_new_owners_fetch_what_the_earlier_ones_hold() -> None:
    cluster = Cluster(seed=1, peers=4, config=PULL_ONLY)
    for number, key in enumerate(KEYS):
        cluster.write(cluster[number % 4], "a", number, key)
    for _ in range(6):
        joined(cluster)
    for old in range(4):
        cluster.spread(Rumour(cluster[old].me, 0, Status.LEFT))
        cluster.net.run_for(1.0)
        for number, key in enumerate(KEYS):
            assert cluster.read(cluster[4 + number % 6], key) == {"a": number}
        cluster.crash(cluster[old])


def test_a_key_that_nobody_touched_through_several_changes_is_still_found() -> None:
    cluster = Cluster(seed=2, peers=3, config=PULL_ONLY)
    for number, key in enumerate(KEYS):
        cluster.write(cluster[0], "a", number, key)
    for _ in range(12):
        joined(cluster)
        cluster.net.run_for(0.2)
    reader = cluster[14]
    for number, key in enumerate(KEYS):
        assert cluster.read(reader, key) == {"a": number}


def test_an_owner_is_not_believed_before_it_merged() -> None:
    cluster = Cluster(seed=3, peers=3, config=PULL_ONLY, latency=(0.01, 0.01))
    cluster.write(cluster[0], "a", 1)
    newcomers = [joined(cluster) for _ in range(9)]
    fresh = [p for p in newcomers if p in cluster.owners()]
    assert fresh, "the seed gives the key a new owner"
    request = fresh[0].directory.read(cluster.now, KEY, cluster.now + 5)
    assert request not in fresh[0].ended
    event = cluster.ended(fresh[0], request)
    assert isinstance(event, ReadDone)
    assert numbers(event.registers) == {"a": 1}


def test_newcomers_that_join_an_empty_cluster_at_once_never_wait_for_each_other() -> None:
    cluster = Cluster(seed=4, config=PULL_ONLY)
    first = cluster.start()
    others = [cluster.start() for _ in range(7)]
    for peer in others:
        cluster.join(peer, first)
    for peer in list(cluster.peers.values()):
        for other in others:
            cluster.tell(peer, Rumour(other.me, 0, Status.ALIVE))
    for number, peer in enumerate(others):
        cluster.write(peer, peer.me, number)
    assert len(cluster.read(first)) == 7


def test_differing_views_are_settled_by_the_request_that_meets_them() -> None:
    cluster = Cluster(seed=5)
    first = cluster.start()
    others = [cluster.start() for _ in range(6)]
    for peer in others:
        cluster.join(peer, first)
        cluster.net.run_for(0.05)
    # The first peer knows all, each other one only those that came before it.
    start = cluster.now
    for peer in others:
        cluster.write(peer, "a", 1)
        assert cluster.read(peer)["a"] == 1
    assert cluster.now - start < 5.0
    assert len({peer.directory.members for peer in cluster.owners()}) == 1


def test_with_all_earlier_owners_dead_the_new_ones_serve_what_is_left() -> None:
    cluster = Cluster(seed=6, peers=8, config=PULL_ONLY)
    survivors = [p for p in cluster.peers.values() if p not in cluster.owners()]
    cluster.write(survivors[0], "a", 1)
    cluster.net.run_for(0.1)  # until all owners have said that they have it
    for owner in cluster.owners():
        cluster.crash(owner)
    dead = [p for p in cluster.everyone.values() if p.me not in cluster.peers]
    for peer in dead:
        cluster.spread(Rumour(peer.me, 0, Status.DEAD))
    assert cluster.read(survivors[0]) == {}
    cluster.write(survivors[1], "b", 2)
    assert cluster.read(survivors[2]) == {"b": 2}


def test_live_writers_write_again_when_all_owners_died() -> None:
    cluster = Cluster(seed=6, peers=8)
    survivors = [p for p in cluster.peers.values() if p not in cluster.owners()]
    cluster.write(survivors[0], "a", 1)
    for owner in cluster.owners():
        cluster.crash(owner)
    for peer in [p for p in cluster.everyone.values() if p.me not in cluster.peers]:
        cluster.spread(Rumour(peer.me, 0, Status.DEAD))
    cluster.net.run_for(0.3)
    assert cluster.read(survivors[1]) == {"a": 1}


def test_a_watcher_hears_of_changes_at_new_owners() -> None:
    cluster = Cluster(seed=7, peers=3)
    watcher = cluster[0]
    watcher.directory.watch(cluster.now, KEY)
    for _ in range(6):
        joined(cluster)
    cluster.net.run_for(1.0)
    told = cluster.changes(watcher)
    cluster.write(cluster[5], "a", 1)
    cluster.net.run_for(0.1)
    assert cluster.changes(watcher) > told


def test_a_request_under_way_follows_the_ring() -> None:
    cluster = Cluster(seed=8, peers=6, config=PULL_ONLY)
    owners = cluster.owners()
    client = next(p for p in cluster.peers.values() if p not in owners)
    for owner in owners[:2]:
        cluster.crash(owner)
    request = client.directory.write(cluster.now, KEY, "a", 0, value(1), cluster.now + 20)
    cluster.net.run_for(2.0)
    assert request not in client.ended
    for owner in owners[:2]:
        cluster.spread(Rumour(owner.me, 0, Status.DEAD))
    assert isinstance(cluster.ended(client, request, 1.0), WriteDone)


def test_after_a_partition_both_halves_are_merged() -> None:
    cluster = Cluster(seed=9, peers=6, config=PULL_ONLY)
    halves = [[cluster[i] for i in range(3)], [cluster[i] for i in range(3, 6)]]
    cluster.net.partition([p.me for p in halves[0]], [p.me for p in halves[1]])
    for half, other in (halves, halves[::-1]):
        for peer in half:
            cluster.tell(peer, *[Rumour(p.me, 0, Status.DEAD) for p in other])
    cluster.write(halves[0][0], "a", 1)
    cluster.write(halves[1][0], "b", 2)
    assert cluster.read(halves[0][1]) == {"a": 1}
    cluster.net.heal()
    for peer in cluster.everyone.values():
        cluster.spread(Rumour(peer.me, 1, Status.ALIVE))
    for peer in cluster.everyone.values():
        assert cluster.read(peer) == {"a": 1, "b": 2}


def test_a_member_that_returns_and_says_nothing_delays_a_key_by_a_second_at_most() -> None:
    cluster = Cluster(seed=10, peers=4, config=PULL_ONLY)
    silent = cluster.owners()[0]
    reader = next(p for p in cluster.peers.values() if p is not silent)
    cluster.write(reader, "a", 1)
    for status, incarnation in ((Status.DEAD, 0), (Status.ALIVE, 1)):
        cluster.spread(Rumour(silent.me, incarnation, status))
    cluster.net.pause(silent.me)
    start = cluster.now
    assert cluster.read(reader) == {"a": 1}
    assert cluster.now - start < 1.5


def found(owner: Peer) -> dict[str, int]:
    """What this peer holds of the key, as an owner or former one."""
    held = owner.directory._owner._held.get(KEY)
    return numbers(held.cells.registers()) if held else {}


class Churn:
    """Random writes and reads while members come and go, with news that travels slowly.

    Each writer writes growing numbers; a read that began after a write was done must see
    that number or a higher one. At most one member dies between two times of rest, and never
    the last one that holds some register, as that is rightly lost.
    """

    def __init__(self, seed: int, loss: float, slowest: float) -> None:
        self.draw = random.Random(seed)
        self.cluster = Cluster(seed, peers=self.draw.randint(1, 5), config=PULL_ONLY, loss=loss)
        self.slowest = slowest
        self.news: list[tuple[float, Peer, Rumour]] = []
        self.writing: list[tuple[Peer, int, int]] = []
        self.reading: list[tuple[Peer, int, dict[str, int]]] = []
        self.last: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.reads = 0

    def run(self, seconds: float) -> None:
        end = self.cluster.now + seconds
        while self.cluster.now < end:
            self.cluster.net.run_for(self.draw.random() * 0.02)
            self.hear_news()
            self.check()
            self.ask(self.draw.choice(list(self.cluster.peers.values())))

    def ask(self, peer: Peer) -> None:
        now = self.cluster.now
        idle = not any(writer is peer for writer, _, _ in self.writing)
        if idle and self.draw.random() < 0.5:
            number = self.last[peer.me] = self.last.get(peer.me, 0) + 1
            request = peer.directory.write(now, KEY, peer.me, 0, value(number), now + 30)
            self.writing.append((peer, request, number))
        else:
            request = peer.directory.read(now, KEY, now + 30)
            self.reading.append((peer, request, dict(self.done)))
        self.cluster.net.settle(peer.me)
        self.check()

    def check(self) -> None:
        for write in list(self.writing):
            peer, request, number = write
            if request in peer.ended or peer.me not in self.cluster.peers:
                self.writing.remove(write)
                if isinstance(peer.ended.get(request), WriteDone):
                    self.done[peer.me] = max(number, self.done.get(peer.me, 0))
        for item in list(self.reading):
            reader, request, before = item
            if request in reader.ended or reader.me not in self.cluster.peers:
                self.reading.remove(item)
                event = reader.ended.get(request)
                assert not isinstance(event, RequestExpired), f"{event} at {self.cluster.now}"
                if isinstance(event, ReadDone):
                    self.reads += 1
                    read = numbers(event.registers)
                    lost = {w: n for w, n in before.items() if read.get(w, 0) < n}
                    assert not lost, f"{reader.me} missed {lost}, read {read}"

    def announce(self, rumour: Rumour) -> None:
        for peer in list(self.cluster.peers.values()):
            delay = self.draw.random() * self.slowest
            self.news.append((self.cluster.now + delay, peer, rumour))

    def hear_news(self) -> None:
        for item in [item for item in self.news if item[0] <= self.cluster.now]:
            self.news.remove(item)
            self.cluster.tell(item[1], item[2])

    def join(self) -> None:
        through = self.draw.choice(list(self.cluster.peers.values()))
        peer = self.cluster.start()
        self.cluster.join(peer, through)
        self.announce(Rumour(peer.me, 0, Status.ALIVE))

    def die(self) -> None:
        victims = [peer for peer in self.cluster.peers.values() if not self.is_last_holder(peer)]
        if len(self.cluster.peers) > 2 and victims:
            peer = self.draw.choice(victims)
            self.cluster.crash(peer)
            self.check()
            self.announce(Rumour(peer.me, 0, Status.DEAD))

    def is_last_holder(self, victim: Peer) -> bool:
        others = [peer for peer in self.cluster.peers.values() if peer is not victim]
        held = [found(peer) for peer in others]
        return any(all(h.get(w, 0) < n for h in held) for w, n in self.done.items())

    def rest(self) -> None:
        """Until all news has arrived, and the key is warm again at its owners."""
        self.run(self.slowest + 1.0)
        assert not self.news
        assert self.cluster.net.run_until(
            lambda: all(p.directory._owner._warming == {} for p in self.cluster.owners()), 5.0
        ), "owners stay cold"


@given(st.integers(0, 2**32), st.floats(0.0, 0.1), st.floats(0.0, 0.6))
@settings(max_examples=15, deadline=None)
def test_a_completed_write_is_seen_by_later_reads_while_one_joins_and_one_dies(
    seed: int, loss: float, slowest: float
) -> None:
    churn = Churn(seed, loss, slowest)
    churn.run(0.1)
    for _ in range(2):
        churn.join()
        churn.run(churn.draw.random() * 0.3)
        churn.die()
        churn.rest()
    assert churn.reads > 20


@given(st.integers(0, 2**32), st.floats(0.0, 0.5))
@settings(max_examples=10, deadline=None)
def test_a_completed_write_is_seen_by_later_reads_while_many_join(
    seed: int, slowest: float
) -> None:
    churn = Churn(seed, 0.0, slowest)
    churn.run(0.1)
    for _ in range(6):
        churn.join()
        churn.run(churn.draw.random() * 0.2)
    churn.rest()
    assert churn.reads > 20


def test_an_owner_that_was_held_for_silent_learns_what_the_others_took_before_it_answers() -> None:
    cluster = Cluster(seed=7, peers=5, config=PULL_ONLY)
    cluster.write(cluster[0], "a", 1)
    absent, behind, keeper = cluster.owners()
    others = [peer for peer in cluster.peers.values() if peer is not absent]
    for peer in others:
        cluster.tell(peer, Rumour(absent.me, 0, Status.UNRESPONSIVE))
    (stand_in,) = [p for p in cluster.owners_by(others[0]) if p not in (behind, keeper)]
    cluster.net.partition([stand_in.me], [behind.me])
    cluster.write(stand_in, "b", 2)  # held by the keeper and the stand-in only
    cluster.net.heal()
    for peer in others:
        cluster.tell(peer, Rumour(absent.me, 1, Status.ALIVE))
    cluster.net.pause(keeper.me)
    absent.directory.was_absent(cluster.now)
    assert cluster.read(absent) == {"a": 1, "b": 2}


def test_what_silent_owners_alone_hold_is_waited_for_and_not_taken_for_lost() -> None:
    cluster = Cluster(seed=9, peers=6, config=PULL_ONLY)
    first, second, third = cluster.owners()
    others = [p for p in cluster.peers.values() if p not in (first, second)]
    writer = next(p for p in others if p is not third)
    cluster.net.partition([writer.me], [third.me])
    cluster.write(writer, "a", 1)  # held by the two that fall silent now
    cluster.net.heal()
    silent = {first.me, second.me}
    for peer in cluster.peers.values():
        peer.directory._owner._reachable = peer.claims.__contains__  # silent ones are reachable
    for gone in (first, second):
        cluster.net.pause(gone.me)
        for peer in others:
            cluster.tell(peer, Rumour(gone.me, 0, Status.UNRESPONSIVE))
    reader = next(p for p in others if p not in (third, writer))
    request = reader.directory.read(cluster.now, KEY, cluster.now + 30)
    cluster.net.settle(reader.me)
    cluster.net.run_for(5)
    assert request not in reader.ended, f"an answer without what {silent} hold"
    cluster.net.resume(first.me)
    event = cluster.ended(reader, request, 20)
    assert isinstance(event, ReadDone)
    assert numbers(event.registers) == {"a": 1}
