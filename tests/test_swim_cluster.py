"""Membership among many peers, on virtual time: joins, deaths, lies, partitions, pauses."""

from __future__ import annotations

import random

import pytest

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import (
    Evidence,
    Joined,
    Left,
    MemberChanged,
    NewerVersion,
    Refuted,
    SeedIsSelf,
)
from tensorhub_p2p.protocol.messages import Status
from tensorhub_p2p.sim.network import Link, SimNetwork

SEEDS = range(3)
REPAIR = 8
"""Seconds in which fingerprints surely showed, and an exchange closed, what gossip missed."""
ONE_EXCHANGE = 60
"""Seconds in which everyone surely took part in a regular exchange."""
LOSSY = Link(latency=(0.0005, 0.02), loss=0.05)


class Cluster:
    """A few peers on one simulated network, and what each has noticed."""

    def __init__(self, seed: int, size: int = 0, link: Link | None = None) -> None:
        self.seed = seed
        self.network = SimNetwork(seed, link=link, on_event=self._note)
        self.swims: dict[PeerId, Swim] = {}
        self.events: dict[PeerId, list[tuple[float, Event]]] = {}
        for _ in range(size):
            self.start()
        if size:
            assert self.network.run_until(self.agree, REPAIR), self.opinions()

    def _note(self, peer: PeerId, event: Event) -> None:
        self.events[peer].append((self.network.now, event))

    def start(
        self,
        *,
        seeds: tuple[str, ...] = ("host-0:1",),
        address: str = "",
        config: SwimConfig | None = None,
    ) -> PeerId:
        number = len(self.events)
        peer = PeerId(f"peer-{number}")
        addresses = (address or f"host-{number}:1",)
        info = PeerInfo(peer, f"name-{number}", "here", addresses)
        swim = Swim(info, config or SwimConfig(), random.Random(f"{self.seed}/{number}"))
        self.events[peer] = []
        self.swims[peer] = swim
        swim.join(self.network.now, seeds)
        self.network.add(peer, addresses, swim)
        return peer

    def crash(self, *peers: PeerId) -> None:
        for peer in peers:
            self.network.crash(peer)
            del self.swims[peer]

    @property
    def peers(self) -> list[PeerId]:
        return list(self.swims)

    def status(self, of: PeerId) -> list[Status | None]:
        return [swim.status(of) for peer, swim in self.swims.items() if peer != of]

    def agree(self) -> bool:
        """Everyone running holds exactly those running for alive, and all others for gone."""
        running = tuple(sorted(self.swims))
        return all(
            swim.responsive() == running
            and sum(view.is_reachable for view in swim.members()) == len(running)
            for swim in self.swims.values()
        )

    def opinions(self) -> dict[PeerId, str]:
        return {
            peer: " ".join(f"{v.peer_id}={v.status.name}:{v.incarnation}" for v in swim.members())
            for peer, swim in self.swims.items()
        }

    def of(self, kind: type[Event], peer: PeerId | None = None) -> list[Event]:
        return [
            event
            for owner, events in self.events.items()
            if peer in (None, owner)
            for _, event in events
            if isinstance(event, kind)
        ]

    def deaths(self) -> set[PeerId]:
        return {
            event.member.peer_id
            for event in self.of(MemberChanged)
            if isinstance(event, MemberChanged) and event.member.status is Status.DEAD
        }


def declared(cluster: Cluster, peer: PeerId, status: Status = Status.DEAD) -> bool:
    return set(cluster.status(peer)) == {status}


# -- joining --


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 10, 50])
def test_all_who_join_through_one_seed_know_each_other(seed: int, size: int) -> None:
    cluster = Cluster(seed, size, LOSSY)
    cluster.network.run_for(2)
    for peer in cluster.peers[1:]:
        assert cluster.of(Joined, peer) == [Joined(PeerId("peer-0"))]
    assert cluster.of(Joined, PeerId("peer-0")) == []
    assert cluster.of(SeedIsSelf, PeerId("peer-0")) == [SeedIsSelf("host-0:1")]
    assert not cluster.deaths()


def test_a_peer_that_starts_before_its_seed_joins_once_the_seed_is_there() -> None:
    cluster = Cluster(1)
    early = cluster.start(seeds=("late:1",))
    cluster.network.run_for(30)
    assert cluster.of(Joined) == []
    late = cluster.start(seeds=("late:1",), address="late:1")
    assert cluster.network.run_until(cluster.agree, 1)
    assert cluster.of(Joined, early) == [Joined(late)]


def test_a_seed_that_started_alone_finds_the_other_seeds_later() -> None:
    seeds = ("a:1", "b:1", "c:1")
    cluster = Cluster(1)
    for address in seeds:
        cluster.start(seeds=seeds, address=address)
        cluster.network.run_for(7)
    assert cluster.agree()
    assert len(cluster.of(SeedIsSelf)) == 3


def test_a_seed_found_by_others_first_still_joins_them() -> None:
    cluster = Cluster(1)
    a = cluster.start(seeds=("b:1",), address="a:1")
    cluster.network.partition([a], [PeerId("peer-1")], one_way=True)
    b = cluster.start(seeds=("a:1",), address="b:1")
    cluster.network.run_for(0.2)
    assert cluster.swims[a].is_reachable(b)
    assert not cluster.of(Joined, a)
    cluster.network.heal()
    assert cluster.network.run_until(lambda: bool(cluster.of(Joined, a)), 2)


def test_a_seed_known_by_another_name_is_recognised_as_oneself() -> None:
    cluster = Cluster(1)
    peer = PeerId("me")
    swim = Swim(PeerInfo(peer, "", "", ("10.0.0.1:1",)), SwimConfig(), random.Random(1))
    cluster.events[peer] = []
    cluster.network.add(peer, ["10.0.0.1:1", "my-name:1"], swim)
    swim.join(0.0, ["my-name:1"])
    cluster.network.run_for(5)
    assert cluster.of(SeedIsSelf) == [SeedIsSelf("my-name:1")]
    assert swim.next_wakeup() is None


def test_two_islands_merge_when_their_seeds_hear_of_each_other() -> None:
    cluster = Cluster(3)
    for i in range(10):
        side = "ab"[i % 2]
        cluster.start(seeds=(f"{side}:1",), address=f"{side}:1" if i < 2 else "")
    cluster.network.run_for(5)
    assert not cluster.agree()
    cluster.start(seeds=("a:1", "b:1"))
    assert cluster.network.run_until(cluster.agree, 5)


# -- death --


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [3, 10, 50])
def test_a_silent_death_is_declared_by_all_and_nobody_else_dies(seed: int, size: int) -> None:
    cluster = Cluster(seed, size, LOSSY)
    victim = cluster.peers[size // 2]
    cluster.crash(victim)
    assert cluster.network.run_until(lambda: declared(cluster, victim), 40)
    assert cluster.deaths() == {victim}
    assert cluster.network.run_until(cluster.agree, 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_refused_connection_makes_a_death_known_at_once(seed: int) -> None:
    cluster = Cluster(seed, 20)
    victim = cluster.peers[7]
    cluster.crash(victim)
    cluster.swims[PeerId("peer-3")].evidence(cluster.network.now, victim, Evidence.REFUSED)
    cluster.network.run_for(1.5)
    assert cluster.status(victim).count(Status.DEAD) >= 18, "gossip alone may miss one"
    assert cluster.network.run_until(lambda: declared(cluster, victim), REPAIR)


def test_a_living_peer_survives_a_false_refusal() -> None:
    cluster = Cluster(1, 10)
    cluster.swims[PeerId("peer-3")].evidence(
        cluster.network.now, PeerId("peer-7"), Evidence.REFUSED
    )
    cluster.network.run_for(10)
    assert cluster.agree()
    assert not cluster.deaths()
    assert cluster.of(Refuted, PeerId("peer-7"))


def test_a_bare_disconnect_only_probes() -> None:
    cluster = Cluster(1, 10)
    swim = cluster.swims[PeerId("peer-3")]
    swim.evidence(cluster.network.now, PeerId("peer-7"), Evidence.DISCONNECTED)
    assert swim.status(PeerId("peer-7")) is Status.ALIVE
    cluster.network.run_for(10)
    assert cluster.agree()
    assert not cluster.of(Refuted)


def test_a_disconnect_of_a_dead_peer_makes_it_suspect_after_one_probe() -> None:
    cluster = Cluster(1, 10)
    swim, victim = cluster.swims[PeerId("peer-3")], PeerId("peer-7")
    cluster.crash(victim)
    swim.evidence(cluster.network.now, victim, Evidence.DISCONNECTED)
    cluster.network.run_for(1.01)
    assert swim.status(victim) is Status.SUSPECT


@pytest.mark.parametrize("seed", SEEDS)
def test_a_third_of_all_dying_at_once_is_noticed_and_the_rest_stays(seed: int) -> None:
    cluster = Cluster(seed, 30)
    victims = set(cluster.peers[::3])  # the only seed is among them
    cluster.crash(*victims)
    assert cluster.network.run_until(cluster.agree, 60)
    assert cluster.deaths() == victims


def test_a_newcomer_never_takes_the_dead_for_members() -> None:
    cluster = Cluster(1, 6)
    victim = PeerId("peer-3")
    cluster.crash(victim)
    assert cluster.network.run_until(cluster.agree, 30)
    newcomer = cluster.start()
    assert cluster.network.run_until(cluster.agree, 5)
    assert cluster.swims[newcomer].info(victim) is None
    assert cluster.swims[newcomer].status(victim) is Status.DEAD


def test_whoever_joins_from_the_address_of_a_dead_peer_proves_its_death() -> None:
    cluster = Cluster(1, 6)
    victim = PeerId("peer-3")
    cluster.crash(victim)
    heir = cluster.start(address="host-3:1")
    assert cluster.network.run_until(lambda: declared(cluster, victim), 2)
    assert cluster.network.run_until(cluster.agree, 2)
    assert cluster.status(heir) == [Status.ALIVE] * 5


# -- leaving --


@pytest.mark.parametrize("seed", SEEDS)
def test_a_goodbye_reaches_everyone_and_is_not_mistaken_for_a_death(seed: int) -> None:
    cluster = Cluster(seed, 30)
    leaver = cluster.peers[11]
    cluster.swims[leaver].leave(cluster.network.now)
    cluster.network.run_for(0)
    assert cluster.of(Left, leaver) == [Left()]
    cluster.network.run_for(2)
    assert cluster.status(leaver).count(Status.LEFT) >= 28, "gossip alone may miss one"
    assert cluster.network.run_until(lambda: declared(cluster, leaver, Status.LEFT), REPAIR)
    cluster.network.run_for(30)
    assert not cluster.deaths()
    assert cluster.swims[leaver].next_wakeup() is None


# -- partitions --


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lasting", [5, 120])
def test_the_halves_of_a_partition_find_each_other_again(seed: int, lasting: float) -> None:
    cluster = Cluster(seed, 16)
    cluster.network.partition(cluster.peers[:8], cluster.peers[8:])
    cluster.network.run_for(lasting)
    cluster.network.heal()
    assert cluster.network.run_until(cluster.agree, 30), cluster.opinions()


def test_halves_without_a_seed_in_common_rejoin_too() -> None:
    cluster = Cluster(1, 8)
    cluster.network.partition(cluster.peers[:4], cluster.peers[4:])
    cluster.network.run_for(100)
    assert cluster.swims[PeerId("peer-5")].responsive() == tuple(cluster.peers[4:])
    cluster.crash(PeerId("peer-0"))  # the seed
    cluster.network.heal()
    assert cluster.network.run_until(cluster.agree, 40), cluster.opinions()


def test_relays_keep_two_peers_that_cannot_hear_each_other_alive() -> None:
    cluster = Cluster(1, 8)
    cluster.network.partition([PeerId("peer-2")], [PeerId("peer-5")])
    cluster.network.run_for(60)
    assert cluster.agree()
    assert not cluster.deaths()


# -- pauses --


@pytest.mark.parametrize("seed", SEEDS)
def test_a_short_pause_kills_nobody(seed: int) -> None:
    cluster = Cluster(seed, 12)
    cluster.network.pause(PeerId("peer-4"))
    cluster.network.run_for(3)
    cluster.network.resume(PeerId("peer-4"))
    cluster.network.run_for(10)
    assert cluster.agree()
    assert not cluster.deaths()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_that_wakes_from_a_long_pause_blames_nobody_and_comes_back(seed: int) -> None:
    cluster = Cluster(seed, 12)
    sleeper = PeerId("peer-4")
    cluster.network.pause(sleeper)
    cluster.network.run_for(60)
    cluster.network.resume(sleeper)
    assert cluster.network.run_until(cluster.agree, 10), cluster.opinions()
    assert cluster.deaths() <= {sleeper}
    assert not [
        event
        for event in cluster.of(MemberChanged, sleeper)
        if isinstance(event, MemberChanged) and event.member.status is not Status.ALIVE
    ]


# -- version hints --


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_version_is_heard_of_within_a_second(seed: int) -> None:
    cluster = Cluster(seed, 50, LOSSY)
    cluster.swims[PeerId("peer-9")].hint(cluster.network.now, "policy", 0, 7)
    cluster.network.run_for(1)
    assert len(cluster.of(NewerVersion)) >= 47, "gossip alone may miss one or two of 49"
    cluster.network.run_for(ONE_EXCHANGE)
    assert len(cluster.of(NewerVersion)) == 49
    assert cluster.of(NewerVersion, PeerId("peer-9")) == []


def test_a_newcomer_learns_the_newest_version_as_it_joins() -> None:
    cluster = Cluster(1, 3)
    cluster.swims[PeerId("peer-1")].hint(cluster.network.now, "policy", 2, 7)
    cluster.network.run_for(60)
    newcomer = cluster.start()
    cluster.network.run_for(0.1)
    assert cluster.of(NewerVersion, newcomer) == [NewerVersion("policy", 2, 7)]


# -- as a whole --


def test_what_gossip_failed_to_tell_is_found_by_comparing_fingerprints() -> None:
    config = SwimConfig(push_pull_interval=100_000)
    cluster = Cluster(1)
    for _ in range(8):
        cluster.start(config=config)
    assert cluster.network.run_until(cluster.agree, REPAIR)
    deaf = PeerId("peer-5")
    others = [peer for peer in cluster.peers if peer != deaf]
    cluster.network.partition(others, [deaf], one_way=True)
    newcomer = cluster.start(config=config)
    cluster.network.partition([newcomer], [deaf])
    cluster.network.run_for(1.9)  # by then nobody says it any more, and nobody is suspect yet
    cluster.network.heal()
    assert not cluster.swims[deaf].is_reachable(newcomer)
    assert cluster.network.run_until(lambda: cluster.swims[deaf].is_reachable(newcomer), REPAIR)


def test_a_calm_cluster_sends_little() -> None:
    cluster = Cluster(1, 20)
    cluster.network.run_for(30)
    before = cluster.network.counters["sent"]
    cluster.network.run_for(60)
    assert (cluster.network.counters["sent"] - before) / 60 / 20 < 2.2


def test_the_same_seed_gives_the_same_history() -> None:
    def history() -> list[tuple[PeerId, list[str]]]:
        cluster = Cluster(5, 12, LOSSY)
        cluster.crash(PeerId("peer-7"))
        cluster.network.run_for(20)
        return [(peer, [repr(e) for e in events]) for peer, events in cluster.events.items()]

    assert history() == history()


@pytest.mark.parametrize("seed", SEEDS)
def test_those_who_join_later_hear_of_a_death_from_those_who_never_met_the_dead(seed: int) -> None:
    """Otherwise the records of the dead would be a ghost's, waited for for ever."""
    cluster = Cluster(seed, size=3)
    dead, first, second = cluster.peers[2], *cluster.peers[:2]
    cluster.crash(dead)
    assert cluster.network.run_until(lambda: cluster.status(dead) == [Status.DEAD] * 2, 60)
    middle = cluster.start()
    assert cluster.network.run_until(cluster.agree, REPAIR)
    for old in (first, second):
        cluster.swims[old].leave(cluster.network.now)
        cluster.network.settle(old)
        cluster.crash(old)
    late = cluster.start(seeds=cluster.swims[middle].me.addresses)
    assert cluster.network.run_until(cluster.agree, REPAIR)
    assert cluster.swims[late].status(dead) is Status.DEAD
