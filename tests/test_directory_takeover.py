"""New owners take keys over with nothing lost and without a storm: 10,000 references, 100 peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from directory_cluster import Cluster, Peer, numbers, value

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import ReadDone, WriteDone
from tensorhub_p2p.protocol.messages import Key, Rumour, Status

PEERS, KEYS, WRITERS_OF_A_KEY = 100, 2000, 5
REPLACED = PEERS // 10
PULL_ONLY = DirectoryConfig(virtual_nodes=16, repair_interval=1e6, rewrite_jitter=1e6)
"""Nobody writes again: what new owners don't merge they don't have."""
WITH_REPAIR = DirectoryConfig(virtual_nodes=16)
LOSS = 0.01
HALF = 0.25
"""Seconds between a death and the next newcomer, and the other way round."""


@dataclass
class Takeover:
    """A cluster with many references, whose peers are replaced."""

    config: DirectoryConfig
    keys: int = KEYS
    cluster: Cluster = field(init=False)
    written: dict[Key, dict[str, int]] = field(default_factory=dict)
    moved: Counter[Key] = field(default_factory=Counter)
    """How often a key got another owner list."""

    def __post_init__(self) -> None:
        self.cluster = Cluster(seed=7, peers=PEERS, config=self.config)
        peers = list(self.cluster.peers.values())
        requests: list[tuple[Peer, int]] = []
        for number in range(self.keys):
            key = Key("versions", f"model-{number}")
            self.written[key] = {}
            for each in range(WRITERS_OF_A_KEY):
                # The first ones are replaced later, and what they wrote stays all the same.
                writer = peers[(number + 17 * each) % PEERS]
                name = f"{each}@{writer.me}"
                content = value(1 + number)
                request = writer.directory.write(self.cluster.now, key, name, 1, content)
                self.written[key][name] = 1 + number
                requests.append((writer, request))
        for peer in peers:
            self.cluster.net.settle(peer.me)
        self.cluster.net.run_for(1.0)
        assert all(isinstance(p.ended.get(request), WriteDone) for p, request in requests)
        link = self.cluster.net.default_link
        self.cluster.net.default_link = type(link)(link.latency, LOSS)
        self.cluster.net.counters.clear()

    def owners(self) -> dict[Key, tuple[str, ...]]:
        ring = next(iter(self.cluster.peers.values())).directory
        return {key: ring.owners(key) for key in self.written}

    def settle(self, before: dict[Key, tuple[str, ...]]) -> None:
        """Everybody has heard the news; now they act on it for a while."""
        after = self.owners()
        self.moved.update(key for key in before if before[key] != after[key])
        self.cluster.net.run_for(HALF)

    def kill(self, *peers: Peer) -> None:
        before = self.owners()
        for peer in peers:
            self.cluster.crash(peer)
        for peer in peers:
            self.cluster.spread(Rumour(peer.me, 0, Status.DEAD))
        self.settle(before)

    def add(self) -> None:
        before = self.owners()
        newcomer = self.cluster.start()
        self.cluster.join(newcomer, next(iter(self.cluster.peers.values())))
        self.cluster.spread(Rumour(newcomer.me, 0, Status.ALIVE))
        self.settle(before)

    def lost(self) -> dict[Key, set[str]]:
        """By key: references that a quorum read doesn't bring."""
        link = self.cluster.net.default_link
        self.cluster.net.default_link = type(link)(link.latency, 0.0)
        readers = list(self.cluster.peers.values())
        reads: dict[Key, tuple[Peer, int]] = {}
        for number, key in enumerate(self.written):
            reader = readers[number % len(readers)]
            reads[key] = (reader, reader.directory.read(self.cluster.now, key))
        for reader in readers:
            self.cluster.net.settle(reader.me)
        self.cluster.net.run_for(9.0)
        missing: dict[Key, set[str]] = {}
        for key, (reader, request) in reads.items():
            event = reader.ended.get(request)
            found = numbers(event.registers) if isinstance(event, ReadDone) else {}
            lacks = {name for name, n in self.written[key].items() if found.get(name) != n}
            if lacks:
                missing[key] = lacks
        return missing

    def messages(self) -> int:
        return self.cluster.net.counters["sent"]


def test_peers_are_replaced_one_by_one_and_nothing_is_lost_though_no_writer_writes_again() -> None:
    takeover = Takeover(PULL_ONLY)
    first = list(takeover.cluster.peers.values())[:REPLACED]
    for peer in first:
        takeover.kill(peer)
        takeover.add()
    moved = sum(takeover.moved.values())
    assert moved > REPLACED * KEYS // PEERS, "keys did move"
    assert takeover.messages() <= 10 * moved
    assert takeover.lost() == {}


def test_peers_are_replaced_one_by_one_while_writers_repair_and_there_is_no_storm() -> None:
    takeover = Takeover(WITH_REPAIR, KEYS // 5)
    for peer in list(takeover.cluster.peers.values())[:REPLACED]:
        takeover.kill(peer)
        takeover.add()
    moved = sum(takeover.moved.values())
    assert takeover.messages() <= (10 + 3 * WRITERS_OF_A_KEY) * moved
    assert takeover.lost() == {}


def test_of_peers_that_die_at_the_same_moment_only_what_they_wrote_themselves_may_be_lost() -> None:
    """Some keys lose a majority of their owners: their living writers bring it back."""
    takeover = Takeover(WITH_REPAIR, KEYS // 5)
    victims = list(takeover.cluster.peers.values())[:REPLACED]
    takeover.kill(*victims)
    for _ in victims:
        takeover.add()
    dead = {victim.me for victim in victims}
    lost = [name for names in takeover.lost().values() for name in names]
    assert [name for name in lost if name.split("@")[1] not in dead] == []
