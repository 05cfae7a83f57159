"""Several zones on virtual time: joins through strangers, gateways that die, zones cut off."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zones_cluster import FAR, ZonesCluster, addresses

from tensorhub_p2p.config import WIDE_AREA, Config, SwimConfig
from tensorhub_p2p.protocol.envelope import pack
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Send, SendTo
from tensorhub_p2p.protocol.membership.summaries import is_obituary, obituary
from tensorhub_p2p.protocol.membership.swim_events import (
    Evidence,
    Joined,
    Left,
    MemberChanged,
    NewerVersion,
    Refuted,
    SeedIsSelf,
    WasAbsent,
    ZoneNews,
)
from tensorhub_p2p.protocol.messages import (
    Gossip,
    Message,
    PushPull,
    PushPullReply,
    Rumour,
    Status,
    VersionHint,
    WideArea,
    ZoneGreeting,
    ZoneSummary,
)
from tensorhub_p2p.protocol.zones.calls import ANSWERED_WITHIN, MAX_CALLS, Calls
from tensorhub_p2p.protocol.zones.wide_area import WRAPPED, unwrap, wrap
from tensorhub_p2p.protocol.zones.zones import FIRST_VIEW, GatewayChanged, Zones
from tensorhub_p2p.sim.link import Link

SEEDS = range(3)
MINUTES = 60.0


def started(seed: int = 0, **sizes: int) -> ZonesCluster:
    cluster = ZonesCluster(seed)
    cluster.start_zones(**sizes)
    return cluster


# -- starting --


@pytest.mark.parametrize("seed", SEEDS)
def test_zones_that_start_at_once_through_one_seed_sort_themselves_out(seed: int) -> None:
    cluster = ZonesCluster(seed)
    for zone in ("east", "west", "north", "south"):
        for _ in range(6):
            cluster.start(zone)
    assert cluster.until(cluster.homes_agree, 5), cluster.describe()
    assert cluster.until(lambda: knows_all(cluster), 5), cluster.describe()
    assert cluster.until(cluster.is_whole, 60), cluster.describe()
    assert not cluster.deaths()


def knows_all(cluster: ZonesCluster) -> bool:
    return all(set(cluster.knows(peer)) == set(cluster.zones) for peer in cluster.machines)


def test_the_home_pool_holds_peers_of_the_own_zone_only() -> None:
    cluster = started(east=4, west=4)
    for peer, machine in cluster.machines.items():
        zones = {view.info.zone for view in machine.members()}
        assert zones == {machine.zone}, peer
        assert set(machine.watched()) <= set(cluster.of(machine.zone))


def test_a_newcomer_finds_its_zone_through_a_seed_of_another_one() -> None:
    cluster = started(east=4, west=4)
    newcomer = cluster.start("west", seeds=addresses(cluster.of("east")[-1:]))
    assert cluster.until(cluster.homes_agree, 3), cluster.describe()
    assert [e for _, p, e in cluster.events if p == newcomer and isinstance(e, Joined)]


def test_whoever_waits_for_its_join_waits_until_its_own_zone_answers() -> None:
    cluster = started(east=4, west=4)
    newcomer = cluster.start("west", seeds=addresses(cluster.of("east")[:1]))
    known = []

    def joined() -> bool:
        known.append(cluster.machines[newcomer].responsive())
        return any(p == newcomer and isinstance(e, Joined) for _, p, e in cluster.events)

    assert cluster.network.run_until(joined, 5)
    assert set(known[-1]) == set(cluster.of("west"))


@pytest.mark.parametrize("seed", range(10))
def test_two_first_peers_of_a_zone_that_start_at_once_find_each_other(seed: int) -> None:
    cluster = started(seed, east=3)
    east = cluster.of("east")
    cluster.start("west", seeds=addresses(east[:1]))
    cluster.start("west", seeds=addresses(east[1:2]))
    assert cluster.until(cluster.is_whole, 60), cluster.describe()
    assert not cluster.deaths()


def test_of_two_first_peers_at_one_seed_the_second_is_sent_to_the_first() -> None:
    cluster = started(east=3)
    cluster.start("west")
    cluster.start("west")
    assert cluster.until(cluster.homes_agree, 1.5), cluster.describe()


@pytest.mark.parametrize("east", [1, 3])
def test_a_seed_of_another_zone_that_was_just_restarted_makes_nobody_the_first(east: int) -> None:
    """It knows of no zone yet; so what it doesn't name may be there all the same."""
    cluster = started(east=east, west=4)
    cluster.crash(PeerId("east-0"))
    seed = ("east-0:1",)
    others = addresses(cluster.of("east")[-1:])
    cluster.start("east", seeds=others or addresses(cluster.of("west")[-1:]), address=seed[0])
    newcomer = cluster.start("west", seeds=seed)

    def joined() -> bool:
        return any(p == newcomer and isinstance(e, Joined) for _, p, e in cluster.events)

    assert cluster.network.run_until(joined, 10)
    assert set(cluster.machines[newcomer].responsive()) == set(cluster.of("west"))


def test_two_clusters_of_one_zone_each_that_are_each_others_seed_find_each_other() -> None:
    cluster = ZonesCluster()
    for zone, other in (("east", "west"), ("west", "east")):
        cluster.start(zone, seeds=(f"{other}-0:1",))
    assert cluster.until(cluster.is_whole, 20), cluster.describe()


def test_a_cluster_of_one_speaks_for_its_zone() -> None:
    cluster = ZonesCluster()
    alone = cluster.start("east", seeds=())
    cluster.network.run_for(30)
    assert cluster.machines[alone].is_gateway
    assert cluster.machines[alone].gateways() == (alone,)
    assert cluster.knows(alone)["east"].members == 1


def test_a_peer_that_is_its_own_seed_starts_its_zone() -> None:
    cluster = ZonesCluster()
    seed = cluster.start("east", seeds=("east-0:1",))
    assert cluster.until(lambda: cluster.machines[seed].is_gateway, 5)
    assert SeedIsSelf("east-0:1") in [event for _, _, event in cluster.events]


def test_a_peer_whose_seeds_are_silent_speaks_for_nobody() -> None:
    cluster = ZonesCluster()
    lost = cluster.start("east", seeds=("nowhere:1",))
    cluster.network.run_for(60)
    assert not cluster.machines[lost].is_gateway
    assert cluster.machines[lost].zones() == ()


def test_a_zone_of_one_is_known_to_all_and_knows_all() -> None:
    cluster = started(east=5, north=1)
    cluster.network.run_for(120)
    assert cluster.is_whole()
    assert not cluster.deaths()


def test_a_zone_whose_peers_are_all_replaced_starts_anew() -> None:
    cluster = started(east=4, west=2)
    before = cluster.knows(PeerId("east-0"))["west"].counter
    cluster.crash(*cluster.of("west"))
    cluster.network.run_for(30)
    for _ in range(3):
        cluster.start("west")
    assert cluster.until(cluster.is_whole, 60), cluster.describe()
    assert cluster.knows(PeerId("east-0"))["west"].counter > before


FORGETFUL = Config(
    swim=SwimConfig(forget_dead_after=200.0),
    wan=replace(WIDE_AREA, forget_dead_after=200.0),
)


def last_word(zones: Zones, zone: str) -> ZoneSummary:
    (summary,) = (summary for summary in zones.home.summaries() if summary.zone == zone)
    return summary


def test_a_dead_zone_is_forgotten_and_a_quiet_one_is_not_and_it_may_start_anew() -> None:
    cluster = ZonesCluster()
    for zone in ("east", "west", "north"):
        for _ in range(3):
            cluster.start(zone, config=FORGETFUL)
    assert cluster.until(cluster.is_whole)
    before = cluster.knows(PeerId("east-0"))["west"].counter
    cluster.crash(*cluster.of("west"))
    cluster.network.run_for(100)
    assert all("west" in cluster.knows(peer) for peer in cluster.machines)
    cluster.network.run_for(200)
    assert all(set(cluster.knows(peer)) == {"east", "north"} for peer in cluster.machines)
    last_words = {last_word(cluster.machines[peer], "west") for peer in cluster.machines}
    cluster.network.run_for(1000)
    assert cluster.is_whole(), "those that live are renewed"
    assert {last_word(cluster.machines[p], "west") for p in cluster.machines} == last_words
    assert len(last_words) == 1, "it is said once"
    for _ in range(2):
        cluster.start("west", config=FORGETFUL)
    assert cluster.until(cluster.is_whole), cluster.describe()
    assert cluster.knows(PeerId("east-0"))["west"].counter > before


def test_those_named_by_a_zone_that_is_forgotten_are_called_now_and_then() -> None:
    zones = Zones(stranger("me", "east"), FORGETFUL, random.Random(1))
    zones.join(0.0, [])
    zones.tick(0.0)
    told = ZoneSummary("west", 1, (stranger("w"),), 1)
    zones.receive(0.0, PeerId("somebody"), Gossip(summaries=(told,)))
    called = []
    while (now := zones.next_wakeup()) is not None and now < 2200:
        zones.tick(now)
        called += [now for item in zones.outbox.drain() if isinstance(item, SendTo)]
    assert [summary.zone for summary in zones.zones()] == ["east"]
    assert sum(now < 200 for now in called) > 20
    assert 20 <= sum(now > 200 for now in called) <= 60


def test_zones_that_were_apart_for_longer_than_zones_are_remembered_find_each_other() -> None:
    """The seed that all were given is gone for good, so they have but each other's last words."""
    cluster = ZonesCluster(4)
    for zone in ("east", "west"):
        for _ in range(4):
            cluster.start(zone, config=FORGETFUL)
    assert cluster.until(cluster.is_whole)
    cluster.crash(PeerId("east-0"))
    cluster.network.run_for(60)
    cluster.cut_off("west")
    cluster.network.run_for(400)
    assert all(len(cluster.knows(peer)) == 1 for peer in cluster.machines)
    newcomer = cluster.start("west", seeds=["west-1:1"], config=FORGETFUL)
    cluster.network.run_for(30)
    cluster.crash(*(peer for peer in cluster.of("west") if peer != newcomer))
    cluster.network.run_for(60)
    cluster.network.heal()
    assert cluster.until(cluster.is_whole, 3 * FORGETFUL.wan.push_pull_interval)


def test_a_zone_that_is_gone_is_gone_for_newcomers_too_however_many_come() -> None:
    cluster = ZonesCluster()
    for zone in ("east", "west", "north"):
        for _ in range(3):
            cluster.start(zone, config=FORGETFUL)
    assert cluster.until(cluster.is_whole)
    cluster.crash(*cluster.of("west"))
    for _ in range(8):  # in each generation some who were told of west just now
        cluster.start("east", seeds=addresses(cluster.of("east")), config=FORGETFUL)
        cluster.network.run_for(50)
        cluster.crash(cluster.of("east")[0])
    assert all(set(cluster.knows(peer)) == {"east", "north"} for peer in cluster.machines)
    east = [cluster.machines[peer] for peer in cluster.of("east")]
    assert len({zones.home._summaries.fingerprint for zones in east}) == 1
    assert all(is_obituary(last_word(zones, "west")) for zones in east), "and they know that"


def test_a_zone_that_hears_of_its_own_end_says_that_it_lives() -> None:
    zones = gateway()
    (said,) = zones.zones()
    neighbour = stranger("neighbour", "east")
    for step in range(3):
        zones.receive(10.0 + 10 * step, neighbour.peer_id, Gossip(summaries=(obituary(said),)))
        zones.tick(12.0 + 10 * step)
        (again,) = zones.zones()
        assert again.counter == said.counter + 2
        said = again


def test_a_gateway_alone_in_its_zone_that_did_not_run_takes_nobody_for_gone() -> None:
    """Before it hears anybody, too; and only the pool of gateways shows that it did not run."""
    zones = Zones(stranger("me", "east"), FORGETFUL, random.Random(1))
    zones.join(0.0, [])
    zones.tick(0.0)
    caller = stranger()
    zones.receive(0.1, caller.peer_id, wrap(hello(caller)))
    told = ZoneSummary("west", 1, (caller,), 1)
    zones.receive(0.2, caller.peer_id, wrap(Gossip(summaries=(told,))))
    zones.tick(0.3)
    zones.tick(0.3 + 2 * FORGETFUL.swim.forget_dead_after)
    assert {summary.zone for summary in zones.zones()} == {"east", "west"}


def test_who_slept_longer_than_zones_are_remembered_takes_nobody_for_gone() -> None:
    """Alone in its zone, too: then only the pool of gateways shows that it slept."""
    cluster = ZonesCluster()
    lone = cluster.start("east", config=FORGETFUL)
    for _ in range(3):
        cluster.start("west", config=FORGETFUL)
    assert cluster.until(cluster.is_whole)
    cluster.network.pause(lone)
    cluster.network.run_for(FORGETFUL.swim.forget_dead_after + 30)
    cluster.network.resume(lone)
    cluster.network.run_for(0.01)
    assert set(cluster.knows(lone)) == {"east", "west"}
    assert cluster.until(cluster.is_whole)


# -- what is told --


def test_the_newest_versions_of_a_zone_are_known_in_all_others() -> None:
    cluster = started(east=5, west=5, north=1)
    for version in range(1, 4):
        cluster.machines[PeerId("east-3")].hint(cluster.network.now, "policy", 0, version)
        cluster.network.run_for(0.3)
    hint = VersionHint("policy", 0, 3)

    def everyone_knows() -> bool:
        return all(hint in cluster.knows(peer)["east"].newest for peer in cluster.machines)

    assert cluster.until(everyone_knows, 10), cluster.describe()
    assert all(cluster.knows(p)["west"].newest == () for p in cluster.machines)
    news = [e for _, p, e in cluster.events if p == PeerId("west-2") and isinstance(e, ZoneNews)]
    assert any(hint in event.summary.newest for event in news)


def test_a_quiet_zone_writes_nothing() -> None:
    cluster = started(east=5, west=5)
    cluster.network.run_for(30)
    before = {zone: s.counter for zone, s in cluster.knows(PeerId("west-2")).items()}
    cluster.network.run_for(10 * MINUTES)
    assert {zone: s.counter for zone, s in cluster.knows(PeerId("west-2")).items()} == before


def test_a_busy_zone_writes_at_most_once_each_interval() -> None:
    cluster = started(east=5, west=5)
    cluster.network.run_for(10)
    before = cluster.knows(PeerId("west-2"))["east"].counter
    for version in range(300):
        cluster.machines[PeerId("east-3")].hint(cluster.network.now, "policy", 0, version)
        cluster.network.run_for(0.1)
    assert before + 5 < cluster.knows(PeerId("west-2"))["east"].counter <= before + 31


def test_a_few_comings_and_goings_are_not_told_and_many_are() -> None:
    cluster = started(east=30, west=3)
    cluster.network.run_for(30)
    counter = cluster.knows(PeerId("west-0"))["east"].counter
    cluster.start("east")
    cluster.network.run_for(30)
    assert cluster.knows(PeerId("west-0"))["east"].members == 30
    for _ in range(5):
        cluster.start("east")
    cluster.network.run_for(30)
    told = cluster.knows(PeerId("west-0"))["east"]
    assert told.members >= 34
    assert told.counter <= counter + 4


def test_foreign_gateways_can_be_looked_up_by_all() -> None:
    cluster = started(east=4, west=4)
    for peer in cluster.gateways("west"):
        for machine in cluster.machines.values():
            info = machine.info(peer)
            assert info is not None
            assert info.addresses == addresses([peer])
    assert cluster.machines[PeerId("east-0")].info(PeerId("nobody")) is None


def test_what_happens_among_gateways_is_no_event_of_the_home_pool() -> None:
    cluster = started(east=4, west=4)
    cluster.crash(*sorted(cluster.gateways("west"))[:1])
    cluster.network.run_for(120)
    for _, peer, event in cluster.events:
        if isinstance(event, MemberChanged):
            assert event.member.info.zone == peer.split("-")[0]
        assert not isinstance(event, (Left, Refuted, WasAbsent, NewerVersion))
    told = [event for _, _, event in cluster.events if isinstance(event, GatewayChanged)]
    assert {event.member.info.zone for event in told} == {"east", "west"}


# -- gateways die --


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gateway_that_dies_is_replaced(seed: int) -> None:
    cluster = started(seed, east=5, west=5, north=2)
    victim = sorted(cluster.gateways("east"))[seed % 2]
    cluster.crash(victim)
    assert cluster.until(cluster.is_whole), cluster.describe()
    assert cluster.deaths() == {victim}


@pytest.mark.parametrize("seed", SEEDS)
def test_all_gateways_of_a_zone_may_die_at_once(seed: int) -> None:
    cluster = started(seed, east=6, west=6, north=2)
    for _ in range(2):
        victims = cluster.gateways("west")
        cluster.crash(*victims)
        assert cluster.until(cluster.is_whole), cluster.describe()
        assert victims <= cluster.deaths()


def test_all_gateways_of_all_zones_may_die_at_once() -> None:
    cluster = started(east=6, west=6, north=6)
    victims = {peer for zone in cluster.zones for peer in cluster.gateways(zone)}
    cluster.crash(*victims)
    assert cluster.until(cluster.is_whole), cluster.describe()
    assert cluster.deaths() == victims


def test_a_gateway_that_leaves_is_replaced_at_once() -> None:
    cluster = started(east=5, west=5)
    leaver = sorted(cluster.gateways("east"))[0]
    cluster.machines[leaver].leave(cluster.network.now)
    assert cluster.machines[leaver].next_wakeup() is None
    assert not cluster.machines[leaver].is_gateway
    cluster.network.run_for(1)
    cluster.crash(leaver)
    assert cluster.until(cluster.is_whole, 20), cluster.describe()


def test_home_tells_the_gateways_pool_who_died() -> None:
    cluster = started(east=5, west=5)
    victim, survivor = sorted(cluster.gateways("east"))
    cluster.crash(victim)
    machine = cluster.machines[survivor]
    assert cluster.until(lambda: machine.status(victim) is Status.DEAD, 10)
    witness = min(cluster.gateways("west"))
    assert cluster.until(lambda: victim not in cluster.wide(witness), 10)


def test_a_gateway_that_is_silent_is_none_until_it_has_settled_again() -> None:
    cluster = started(east=5, west=5)
    victim = min(cluster.gateways("east"))
    cluster.network.pause(victim)
    others = [peer for peer in cluster.of("east") if peer != victim]
    assert cluster.until(lambda: all(victim not in cluster.machines[p].gateways() for p in others))
    cluster.network.resume(victim)
    assert cluster.until(cluster.is_whole), cluster.describe()
    assert victim in cluster.gateways("east")
    assert not cluster.deaths()


def test_a_newcomer_replaces_no_gateway_before_it_has_settled() -> None:
    cluster = started(east=4, west=4)
    cluster.network.run_for(30)
    before = cluster.gateways("east")
    for _ in range(12):
        cluster.start("east")
    for _ in range(18):
        cluster.network.run_for(0.5)
        assert cluster.gateways("east") == before
    cluster.network.run_for(10)
    assert cluster.until(cluster.is_whole), cluster.describe()
    assert cluster.gateways("east") != before, "some newcomer has a lower hash"


# -- partitions --


@pytest.mark.parametrize("seed", SEEDS)
def test_a_zone_cut_off_for_ten_minutes_comes_back(seed: int) -> None:
    cluster = started(seed, east=4, west=4, north=4)
    cluster.cut_off("west")
    cluster.network.run_for(10 * MINUTES)
    assert not cluster.deaths()
    assert cluster.homes_agree()
    cluster.network.heal()
    assert cluster.until(cluster.is_whole, 60), cluster.describe()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_zone_that_replaced_its_gateways_while_cut_off_comes_back(seed: int) -> None:
    cluster = started(seed, east=6, west=6)
    cluster.cut_off("west")
    cluster.network.run_for(2 * MINUTES)
    cluster.crash(*cluster.gateways("west"))
    cluster.crash(*cluster.gateways("east"))
    cluster.network.run_for(8 * MINUTES)
    cluster.network.heal()
    assert cluster.until(cluster.is_whole), cluster.describe()


def test_a_zone_none_of_whose_named_peers_lives_is_found_through_a_seed() -> None:
    cluster = started(east=4, west=4)
    cluster.cut_off("west")
    cluster.network.run_for(1 * MINUTES)
    cluster.crash(*cluster.of("west"))
    for number in range(3):
        cluster.start(
            "west", seeds=("east-0:1", "west-anew:1"), address="west-anew:1" if number == 0 else ""
        )
    cluster.network.run_for(9 * MINUTES)
    cluster.network.heal()
    assert cluster.until(cluster.is_whole), cluster.describe()


def test_halves_of_a_zone_whose_own_network_is_cut_are_one_again_afterwards() -> None:
    cluster = started(east=8, west=4)
    east = cluster.of("east")
    cluster.network.partition(east[:4], east[4:])
    cluster.network.run_for(5 * MINUTES)
    counter = cluster.knows(PeerId("west-0"))["east"].counter
    cluster.network.run_for(1 * MINUTES)
    flips = cluster.knows(PeerId("west-0"))["east"].counter - counter
    assert flips <= 1 * MINUTES / Config().zones.takeover_seconds + 1, "they outbid each other"
    cluster.network.heal()
    assert cluster.until(cluster.is_whole), cluster.describe()


def test_the_far_network_may_lose_a_third_of_everything() -> None:
    cluster = ZonesCluster()
    cluster.network.link_table.between_zones = Link(FAR.latency, loss=0.3)
    for zone in ("east", "west", "north"):
        for _ in range(4):
            cluster.start(zone)
    cluster.network.run_for(2 * MINUTES)
    assert cluster.homes_agree()
    assert cluster.summaries_agree(), cluster.describe()
    assert not cluster.deaths()


# -- cost --


def plain_bytes(sizes: dict[str, int]) -> float:
    """Bytes that a peer of the east that is no gateway sends in a quiet minute, on average."""
    cluster = started(1, **sizes)
    cluster.network.run_for(60)
    plain = [peer for peer in cluster.of("east") if not cluster.machines[peer].is_gateway]
    before = sum(cluster.network.host(peer).sent_bytes for peer in plain)
    cluster.network.run_for(60)
    return (sum(cluster.network.host(peer).sent_bytes for peer in plain) - before) / len(plain)


def test_a_peers_cost_does_not_grow_with_the_peers_of_other_zones() -> None:
    alone = plain_bytes({"east": 8, "west": 1, "north": 1})
    crowded = plain_bytes({"east": 8, "west": 20, "north": 20})
    assert crowded <= 1.1 * alone


# -- strangers, liars and garbage --


def machine(peer: str = "me", zone: str = "east", **changes: object) -> Zones:
    """A peer on its own, with nobody to talk to."""
    info = PeerInfo(PeerId(peer), peer, zone, (f"{peer}:1",))
    return Zones(info, Config(), random.Random(1))


def gateway() -> Zones:
    """The only peer of its zone."""
    alone = machine()
    alone.join(0.0, [])
    alone.tick(0.0)
    alone.outbox.drain()
    assert alone.is_gateway
    return alone


def stranger(name: str = "stranger", zone: str = "west") -> PeerInfo:
    return PeerInfo(PeerId(name), name, zone, (f"{name}:1",))


def sent(zones: Zones, kind: type[Message]) -> list[Message]:
    items = zones.outbox.drain()
    return [
        item.message for item in items if isinstance(item, Send) and isinstance(item.message, kind)
    ]


def called(zones: Zones, kind: type[Message]) -> list[str]:
    """The bare addresses that such messages go to."""
    items = [item for item in zones.outbox.drain() if isinstance(item, SendTo)]
    return [item.address for item in items if isinstance(item.message, kind)]


def hello(info: PeerInfo, dialled: str = "me:1") -> PushPull:
    claim = Rumour(info.peer_id, 0, Status.ALIVE, info)
    return PushPull(info, (claim,), joining=True, dialled=dialled, hello=True)


def test_a_caller_from_another_zone_is_greeted_and_not_taken_in() -> None:
    zones = gateway()
    caller = stranger()
    zones.receive(0.1, caller.peer_id, hello(caller))
    (greeting,) = sent(zones, ZoneGreeting)
    assert isinstance(greeting, ZoneGreeting)
    assert greeting.dialled == "me:1"
    assert [summary.zone for summary in greeting.summaries] == ["east"]
    assert len(zones.members()) == 1
    assert zones.status(caller.peer_id) is None


def test_a_greeting_names_both_zones_and_no_others() -> None:
    zones = gateway()
    for zone in ("west", "north", "south"):
        zones.home.tell(0.1, ZoneSummary(zone, 1, (stranger(f"g-{zone}", zone),), 1))
    zones.receive(0.2, PeerId("stranger"), hello(stranger()))
    (greeting,) = sent(zones, ZoneGreeting)
    assert isinstance(greeting, ZoneGreeting)
    assert {summary.zone for summary in greeting.summaries} == {"east", "west"}


def test_a_caller_with_anothers_name_is_counted_and_not_answered() -> None:
    zones = gateway()
    zones.receive(0.1, PeerId("liar"), hello(stranger()))
    zones.receive(0.1, PeerId("liar"), ZoneGreeting(stranger()))
    assert sent(zones, ZoneGreeting) == []
    assert zones.dropped["forged view"] == 1
    assert zones.dropped["forged greeting"] == 1


def test_rumours_about_peers_of_other_zones_never_enter_the_home_pool() -> None:
    zones = gateway()
    neighbour, foreigner = stranger("neighbour", "east"), stranger()
    claims = tuple(Rumour(i.peer_id, 0, Status.ALIVE, i) for i in (neighbour, foreigner))
    zones.receive(0.1, neighbour.peer_id, PushPull(neighbour, claims))
    zones.receive(0.2, neighbour.peer_id, Gossip(claims[1:]))
    zones.receive(0.3, neighbour.peer_id, Gossip(claims))
    assert [view.peer_id for view in zones.members()] == ["me", "neighbour"]
    assert zones.dropped["rumour of another zone's peer"] == 3


def test_a_view_from_another_zone_is_counted_and_dropped() -> None:
    zones = gateway()
    foreigner = stranger()
    claim = Rumour(foreigner.peer_id, 0, Status.ALIVE, foreigner)
    zones.receive(0.1, foreigner.peer_id, PushPullReply(foreigner, (claim,), dialled="seed:1"))
    assert len(zones.members()) == 1
    assert zones.dropped["view of another zone"] == 1


def test_a_greeting_that_nobody_asked_for_does_not_end_the_search_for_the_zone() -> None:
    zones = machine()
    zones.join(0.0, ["seed:1"])
    zones.outbox.drain()
    zones.receive(0.1, PeerId("stranger"), ZoneGreeting(stranger(), dialled="elsewhere:1"))
    zones.tick(0.2)
    assert not any(isinstance(item, Joined) for item in zones.outbox.drain())
    assert zones.gateways() == ()
    known = ZoneSummary("west", 1, (stranger(), stranger("another")))
    zones.receive(0.3, PeerId("stranger"), ZoneGreeting(stranger(), (known,), "seed:1"))
    assert any(isinstance(item, Joined) for item in zones.outbox.drain())


def test_a_greeting_counts_from_whom_was_called_of_late_and_from_nobody_else() -> None:
    zones = gateway()
    told = ZoneSummary("west", 1, (stranger("speaker"),), 1)
    zones.receive(0.1, PeerId("stranger"), ZoneGreeting(stranger(), (told,)))
    zones.receive(0.2, PeerId("stranger"), ZoneGreeting(stranger(), (told,), dialled="x:1"))
    zones.expect(0.3, PeerId("stranger"))
    late = 0.4 + ANSWERED_WITHIN
    zones.receive(late, PeerId("stranger"), ZoneGreeting(stranger(), (told,)))
    assert zones.dropped["greeting that was not asked for"] == 3
    assert called(zones, WideArea) == []
    assert {summary.zone for summary in zones.zones()} == {"east"}
    zones.expect(late, PeerId("stranger"))
    zones.receive(late, PeerId("stranger"), ZoneGreeting(stranger(), (told,)))
    assert {summary.zone for summary in zones.zones()} == {"east", "west"}


def test_who_greets_a_gateway_that_called_repeats_the_address_under_which_it_was_called() -> None:
    plain = machine()
    plain.join(0.0, ["seed:1"])
    plain.outbox.drain()
    plain.receive(0.1, PeerId("stranger"), wrap(hello(stranger(), dialled="me:1")))
    (greeting,) = sent(plain, ZoneGreeting)
    assert isinstance(greeting, ZoneGreeting)
    assert greeting.dialled == "me:1"


def test_calls_that_are_remembered_are_bounded_the_last_ones_stay() -> None:
    calls = Calls()
    for number in range(2 * MAX_CALLS):
        calls.note(0.0, f"a{number}:1")
    assert len(calls._at) == MAX_CALLS
    assert calls.await_answer(0.0, NOBODY, f"a{2 * MAX_CALLS - 1}:1")
    assert not calls.await_answer(0.0, NOBODY, "a0:1")


def test_the_word_of_a_writer_that_is_silent_does_not_stand() -> None:
    zones = gateway()
    other = stranger("other", "east")
    alive = Rumour(other.peer_id, 0, Status.ALIVE, other)
    zones.receive(1.0, other.peer_id, PushPull(other, (alive,)))
    assert zones._lives(other.peer_id)
    silent = Rumour(other.peer_id, 0, Status.UNRESPONSIVE)
    zones.receive(1.1, PeerId("another"), Gossip((silent,)))
    assert zones.status(other.peer_id) is Status.UNRESPONSIVE
    assert not zones._lives(other.peer_id)


def test_hearsay_about_who_called_is_never_spread() -> None:
    zones = machine()
    zones.join(0.0, ["seed:1"])
    rumoured = ZoneSummary("east", 0, (stranger("first", "east"),))
    greeting = ZoneGreeting(stranger(), (rumoured,), dialled="seed:1")
    zones.receive(0.1, PeerId("stranger"), greeting)
    assert zones.zones() == ()


def test_a_peer_that_is_no_gateway_says_who_is() -> None:
    zones = machine()
    zones.join(0.0, ["seed:1"])
    zones.home.tell(0.0, ZoneSummary("east", 4, (stranger("speaker", "east"),)))
    zones.outbox.drain()
    for message in (hello(stranger()), Gossip()):
        zones.receive(0.1, PeerId("stranger"), wrap(message))
    (greeting,) = sent(zones, ZoneGreeting)
    assert isinstance(greeting, ZoneGreeting)
    assert [g.peer_id for s in greeting.summaries for g in s.gateways] == ["speaker"]
    assert zones.dropped["wide-area message, and no gateway"] == 1


def test_greetings_cause_no_storm_of_calls() -> None:
    zones = gateway()
    named = tuple(stranger(f"g{i}") for i in range(8))
    calls = []
    for step in range(100):
        summary = ZoneSummary("west", step + 1, named)
        now = 1 + step / 100
        zones.expect(now, PeerId("stranger"))
        zones.receive(now, PeerId("stranger"), ZoneGreeting(stranger(), (summary,)))
        calls += called(zones, WideArea)
    assert sorted(calls) == sorted(addresses(info.peer_id for info in named)), "each once"


def test_greetings_cause_no_storm_of_calls_home() -> None:
    zones = gateway()
    zones.join(0.5, ["seed:1"])
    zones.outbox.drain()
    named = tuple(stranger(f"e{i}", "east") for i in range(8))
    calls = []
    for step in range(100):
        told = ZoneSummary("east", 100 + step, named)
        greeting = ZoneGreeting(stranger(), (told,), dialled="seed:1")
        zones.receive(1 + step / 250, PeerId("stranger"), greeting)
        calls += called(zones, PushPull)
    assert sorted(calls) == sorted(addresses(info.peer_id for info in named))


def test_a_gateway_calls_those_that_a_greeting_names() -> None:
    zones = gateway()
    told = ZoneSummary("west", 1, (stranger("speaker"), stranger("deputy")))
    zones.expect(0.1, PeerId("stranger"))
    zones.receive(0.1, PeerId("stranger"), ZoneGreeting(stranger(), (told,)))
    assert called(zones, WideArea) == ["speaker:1", "deputy:1"]


def test_a_gateway_calls_home_whoever_of_its_zone_comes_into_the_pool_of_gateways() -> None:
    zones = gateway()
    fellow = stranger("fellow", "east")
    zones.receive(0.1, fellow.peer_id, wrap(hello(fellow)))
    assert called(zones, PushPull) == ["fellow:1"]
    zones = gateway()
    foreigner = stranger()
    zones.receive(0.1, foreigner.peer_id, wrap(hello(foreigner)))
    assert called(zones, PushPull) == []


def test_who_comes_into_the_pool_of_gateways_is_told_what_this_zone_says() -> None:
    zones = gateway()
    caller = stranger()
    zones.receive(0.1, caller.peer_id, wrap(hello(caller)))
    told = [unwrap(message) for message in sent(zones, WideArea)]
    assert [m.summaries for m in told if isinstance(m, Gossip)] == [zones.zones()]


def test_news_that_a_gateway_hears_at_home_goes_to_the_other_zones_gateways() -> None:
    zones = gateway()
    caller, neighbour = stranger(), stranger("neighbour", "east")
    zones.receive(0.1, caller.peer_id, wrap(hello(caller)))
    zones.receive(0.2, neighbour.peer_id, hello(neighbour))
    zones.tick(1.0)
    zones.outbox.drain()
    news = ZoneSummary("east", 50, (neighbour,))
    zones.receive(2.0, neighbour.peer_id, Gossip(summaries=(news,)))
    zones.tick(2.0)
    told = [unwrap(message) for message in sent(zones, WideArea)]
    assert (news,) in [m.summaries for m in told if isinstance(m, Gossip)]


def test_only_the_first_gateway_writes() -> None:
    infos = [stranger("a", "east"), stranger("b", "east")]
    machines = {info.peer_id: Zones(info, Config(), random.Random(1)) for info in infos}
    for zones in machines.values():
        zones.adopt(0.0, infos)
        assert zones.is_gateway
    first, second = (machines[peer] for peer in machines[infos[0].peer_id].gateways())
    for zones, writes in ((first, True), (second, False)):
        before = zones.zones()
        zones.hint(0.0, "policy", 0, 1)
        for now in (0.5, 1.0, 1.2):  # and nobody is suspect yet
            zones.tick(now)
        assert (zones.zones() != before) is writes


def test_a_newcomer_that_knows_one_member_only_waits_for_the_view_of_all() -> None:
    zones = machine()
    zones.join(0.0, ["seed:1"])
    neighbour = stranger("neighbour", "east")
    zones.receive(0.1, neighbour.peer_id, hello(neighbour))
    for now in (0.1, 0.5, 1.0):
        zones.tick(now)
        assert not zones.is_gateway
    zones.tick(0.1 + FIRST_VIEW)
    assert zones.is_gateway


def test_what_has_left_takes_nothing_in_and_says_nothing() -> None:
    zones = gateway()
    zones.leave(1.0)
    zones.outbox.drain()
    zones.receive(2.0, PeerId("stranger"), hello(stranger()))
    zones.receive(2.0, PeerId("stranger"), wrap(hello(stranger())))
    zones.evidence(2.0, PeerId("stranger"), Evidence.REFUSED)
    zones.tick(2.0)
    zones.leave(3.0)
    assert zones.outbox.drain() == []
    assert zones.next_wakeup() is None


@pytest.mark.parametrize("kind", [*sorted(set(Message.kinds) - WRAPPED), "", "nonsense"])
def test_only_membership_messages_travel_wrapped(kind: str) -> None:
    zones = gateway()
    zones.receive(0.1, PeerId("stranger"), WideArea(kind, b"\x90"))
    assert zones.dropped["undecodable wide-area message"] == 1
    assert zones.outbox.drain() == []


def test_a_wrapping_in_a_wrapping_is_refused() -> None:
    zones = gateway()
    kind, body = pack(wrap(hello(stranger())))
    zones.receive(0.1, PeerId("stranger"), WideArea(kind, bytes(body)))
    assert zones.dropped["undecodable wide-area message"] == 1


@given(st.sampled_from(sorted(WRAPPED)), st.binary(max_size=200))
def test_garbage_in_a_wrapping_changes_nothing(kind: str, body: bytes) -> None:
    zones = gateway()
    zones.receive(0.1, PeerId("stranger"), WideArea(kind, body))
    assert len(zones.members()) == 1
    assert [summary.zone for summary in zones.zones()] == ["east"]


NAMES = st.sampled_from(["me", "stranger", "neighbour", "other"])
ZONE_NAMES = st.sampled_from(["east", "west", ""])
INFOS = st.builds(
    lambda name, zone, where: PeerInfo(PeerId(name), name, zone, where),
    NAMES,
    ZONE_NAMES,
    st.sampled_from([(), ("a:1",), ("me:1",), ("", "b:2"), ("not an address",)]),
)
COUNTS = st.one_of(st.integers(0, 5), st.integers(0, 1 << 63))
HINTS = st.builds(VersionHint, st.sampled_from(["m", "n"]), COUNTS, COUNTS)
SUMMARIES = st.builds(
    ZoneSummary,
    ZONE_NAMES,
    COUNTS,
    st.lists(INFOS, max_size=10).map(tuple),
    COUNTS,
    st.lists(HINTS, max_size=3).map(tuple),
)
RUMOURS = st.builds(
    Rumour, NAMES.map(PeerId), COUNTS, st.sampled_from(Status), st.none() | INFOS, NAMES.map(PeerId)
)
VIEWS = st.lists(RUMOURS, max_size=4).map(tuple)
TOLD = st.lists(SUMMARIES, max_size=6).map(tuple)
DIALLED = st.sampled_from(["", "seed:1", "me:1"])
MEMBERSHIP = st.one_of(
    st.builds(Gossip, VIEWS, st.just(()), TOLD),
    st.builds(
        PushPull,
        INFOS,
        VIEWS,
        st.booleans(),
        st.just(()),
        DIALLED,
        st.just(()),
        st.booleans(),
        TOLD,
    ),
    st.builds(PushPullReply, INFOS, VIEWS, st.just(()), DIALLED, st.just(()), st.booleans(), TOLD),
)
ANY = st.one_of(MEMBERSHIP, MEMBERSHIP.map(wrap), st.builds(ZoneGreeting, INFOS, TOLD, DIALLED))


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(st.tuples(NAMES, ANY, st.floats(0, 5)), max_size=25))
def test_whatever_is_said_the_home_pool_stays_the_zones_and_tables_stay_bounded(
    alone: bool, said: list[tuple[str, Message, float]]
) -> None:
    zones = gateway() if alone else machine()
    if not alone:
        zones.join(0.0, ["seed:1"])
    now = 0.0
    for sender, message, pause in said:
        now += pause
        zones.tick(now)
        zones.receive(now, PeerId(sender), message)
        out = zones.outbox.drain()
        assert len(out) < 100
        wakeup = zones.next_wakeup()
        assert wakeup is None or wakeup == wakeup
        assert {view.info.zone for view in zones.members()} == {"east"}
        assert len(zones.zones()) <= 3
        assert all(1 <= summary.counter <= 1 << 53 for summary in zones.zones())
        assert msgspec.msgpack.encode(zones.zones())
    for _ in range(50):
        wakeup = zones.next_wakeup()
        if wakeup is not None:
            now = max(now, wakeup)
            zones.tick(now)
            zones.outbox.drain()
    assert now > 1 or zones.next_wakeup() is None, "it does not spin"
