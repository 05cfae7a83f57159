"""What one zone publishes the others find, pin, pull and let go again; 80 ms lie between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from cluster import LATEST, QUICK, ROLLOUT, TRAINER, version
from far_cluster import FAR, NEWS, FarCluster

from tensorhub_p2p.config import AbroadConfig, Config, DirectoryConfig, GroupConfig
from tensorhub_p2p.errors import Timeout
from tensorhub_p2p.protocol.abroad.remote_writes import FIRST_NUMBER
from tensorhub_p2p.protocol.directory.records import holders_key, versions_key
from tensorhub_p2p.protocol.envelope import WIRE_VERSION, Envelope, Undecodable, pack, unpack
from tensorhub_p2p.protocol.groups.resolving import LONGEST_REST
from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    PeerId,
    PeerInfo,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.membership.summaries import MAX_MODELS
from tensorhub_p2p.protocol.messages import (
    DirectoryMismatch,
    DirectoryWrite,
    DirectoryWritten,
    Gossip,
    HolderRecord,
    Key,
    Message,
    Phase,
    Pin,
    Question,
    Register,
    Rumour,
    SlotClaim,
    Status,
    VersionRecord,
    ViewDigest,
    ZoneAnswer,
    ZoneAsk,
    ZoneCheck,
    ZoneChecked,
    ZoneGreeting,
)
from tensorhub_p2p.protocol.shards.verbs import HoldersChanged
from tensorhub_p2p.sim.network import Link

CONFIG = AbroadConfig()
VERSIONS = versions_key("policy")
ROUND_TRIP = 2 * FAR.delay.typical
AT_HOME = 0.05
"""Seconds within which a call ends that needs no other zone."""


def published(number: int = 1, config: Config | None = None, **sizes: int) -> FarCluster:
    """A trainer of two shards in "east" has published; a rollout of two is open in "west"."""
    config = config or Config(swim=QUICK)
    c = FarCluster(config=config, sizes=sizes or {"east": 5, "west": 5})
    c.form(TRAINER, c.of("east")[:2])
    c.form(ROLLOUT, c.of("west")[:2])
    c.publish_all(TRAINER, c.of("east")[:2], number)
    everywhere_known(c, "east", number)
    return c


def everywhere_known(c: FarCluster, zone: str, number: int) -> None:
    for peer in (i for other in set(c.where) for i in c.of(other)):
        c.until_known(peer, zone, number)


def trainers(c: FarCluster) -> list[int]:
    return c.of("east")[:2]


def rollouts(c: FarCluster) -> list[int]:
    return c.of("west")[:2]


def pins(c: FarCluster, zone: str) -> list[Pin]:
    held = c.held(zone, VERSIONS)
    return [register.value for register in held if isinstance(register.value, Pin)]


def asked(c: FarCluster) -> int:
    """Bytes of asks so far."""
    return c.net.kinds["ZoneAsk"]


# --- finding ---


def test_a_version_of_another_zone_is_replicated_as_one_of_the_own() -> None:
    c = published()
    answer = c.replicate_all(ROLLOUT, rollouts(c))
    assert answer.publication.version == 1
    assert answer.publication.replica == "trainer"


def test_finding_pinning_and_checking_takes_three_round_trips() -> None:
    c = published()
    number = c.ask(rollouts(c)[0], Slot(ROLLOUT, 0))
    c.ask(rollouts(c)[1], Slot(ROLLOUT, 1))
    assert c.took(number) < 3 * ROUND_TRIP + 2 * AT_HOME


def test_latest_is_the_highest_of_all_zones() -> None:
    c = published(7)
    west, other = Group("policy", "west"), Group("policy", "other")
    c.form(west, c.of("west")[2:4])
    c.form(other, c.of("east")[2:4])
    c.publish_all(west, c.of("west")[2:4], 5)
    assert c.replicate_all(ROLLOUT, rollouts(c)).publication.version == 7
    assert c.replicate_all(other, c.of("east")[2:4], LATEST).publication.version == 7
    assert c.replicate_all(other, c.of("east")[2:4], version(5)).publication.version == 5


def test_latest_but_one_counts_the_versions_of_all_zones() -> None:
    c = published(7)
    west = Group("policy", "west")
    c.form(west, c.of("west")[2:4])
    c.publish_all(west, c.of("west")[2:4], 5)
    back = c.replicate_all(ROLLOUT, rollouts(c), Question("replicate", "latest-1"))
    assert back.publication.version == 5


def test_a_version_is_found_in_any_zone_once_the_news_has_crossed() -> None:
    """The stated bound: a second or two for the summary, and the gossip between."""
    c = FarCluster(sizes={"east": 12, "west": 12, "north": 3})
    c.net.link_table.between_zones = Link((0.06, 0.15), loss=0.05)
    c.form(TRAINER, trainers(c))
    waits: list[float] = []
    for number in range(1, 11):
        c.publish_all(TRAINER, trainers(c), number)
        since = c.now
        everywhere_known(c, "east", number)
        waits.append(c.now - since)
        c.wait(*(c.unpublish(peer, Slot(TRAINER, s)) for s, peer in enumerate(trainers(c))))
    assert max(waits) < NEWS, waits


def test_whoever_waits_is_woken_by_the_news_of_another_zone() -> None:
    """Were it not, it would look once in 40 s."""
    c = published(1, Config(swim=QUICK, group=GroupConfig(retry_interval=10.0)))
    newer = Question("wait_for", ">1")
    numbers = [c.ask(p, Slot(ROLLOUT, s), newer, 60.0) for s, p in enumerate(rollouts(c))]
    c.net.run_for(5)
    c.wait(*(c.unpublish(p, Slot(TRAINER, s)) for s, p in enumerate(trainers(c))))
    c.publish_all(TRAINER, trainers(c), 2)
    since = c.now
    answers = c.wait(*numbers)
    assert {answer.publication.version for answer in answers} == {2}
    assert c.now - since < NEWS + 3 * ROUND_TRIP


def test_whoever_waits_asks_another_zone_once_in_a_while() -> None:
    c = published(1)
    newer = Question("wait_for", ">1")
    numbers = [c.ask(p, Slot(ROLLOUT, s), newer, 60.0) for s, p in enumerate(rollouts(c))]
    c.net.run_for(5)
    before = asked(c)
    one = len(msgspec.msgpack.encode(ZoneAsk(1 << 16, VERSIONS))) + 100
    c.net.run_for(40)
    assert asked(c) - before <= one * (40 / LONGEST_REST + 1)
    assert asked(c) > before
    c.ends(*numbers)


def test_a_model_that_found_no_place_in_its_zones_summary_is_found_all_the_same() -> None:
    c = published(1)
    for i in range(MAX_MODELS):
        c.nodes[trainers(c)[0]].zones.hint(c.now, f"m{i}", 0, 1)
    asker = rollouts(c)[0]
    elsewhere = c.nodes[asker].abroad.records.elsewhere
    assert elsewhere("policy") == (0, 1)
    c.eventually(lambda: elsewhere("policy") is None)
    assert c.replicate_all(ROLLOUT, rollouts(c)).publication.version == 1


def test_what_exists_elsewhere_is_listed_with_its_zones() -> None:
    c = published(3)
    c.replicate_all(ROLLOUT, rollouts(c))
    asker = c.of("west")[4]
    number = c.list_versions(asker, "policy")
    (found,) = c.wait(number)
    assert [(v.version, v.whole, v.holders, v.zones) for v in found] == [
        (3, True, 4, ("east", "west"))
    ]


def test_a_timeout_says_what_exists_in_other_zones() -> None:
    c = published(3)
    numbers = [
        c.ask(p, Slot(ROLLOUT, s), version(9), timeout=4.0) for s, p in enumerate(rollouts(c))
    ]
    errors = c.errors(*numbers)
    assert all(isinstance(error, Timeout) for error in errors)
    assert all("version 3 by trainer" in str(error) for error in errors), errors


# --- what the own zone can answer ---


def test_the_own_zone_is_not_slowed_down_by_others_that_have_no_more() -> None:
    c = published(1)
    c.replicate_all(ROLLOUT, rollouts(c))
    everywhere_known(c, "west", 1)
    for zone, peers in (("west", c.of("west")[2:4]), ("east", c.of("east")[2:4])):
        late, before = Group("policy", f"late-{zone}"), asked(c)
        c.form(late, peers)
        for question in (LATEST, version(1)):
            (first, _) = numbers = [c.ask(p, Slot(late, s), question) for s, p in enumerate(peers)]
            assert c.took(first) < AT_HOME
            answers = c.wait(*numbers)
            for shard, peer in enumerate(peers):
                assert c.finish(peer, Slot(late, shard), answers[shard]) is None
        assert asked(c) == before
        assert not pins(c, "east" if zone == "west" else "west")


def test_once_a_zone_has_its_own_copy_pulls_there_are_told_of_no_other() -> None:
    c = published(1)
    answer = c.replicate_all(ROLLOUT, rollouts(c))
    puller = c.of("west")[3]
    follow = c.nodes[puller].follow(c.now, "policy", 0, answer.publication)
    c.net.run_for(3)
    told = [
        {holder.peer for holder in event.holders}
        for _, peer, event in c.events
        if peer == puller and isinstance(event, HoldersChanged) and event.follow == follow
    ]
    assert told == [{c.id(rollouts(c)[0])}]


@pytest.mark.parametrize("has_newer", [False, True])
def test_a_zone_that_is_cut_off_costs_one_short_wait_and_then_none(has_newer: bool) -> None:
    """The other zone is known to have a newer version, which nobody can get now."""
    c = published(9 if has_newer else 1)
    west = Group("policy", "west")
    c.form(west, c.of("west")[2:4])
    c.publish_all(west, c.of("west")[2:4], 5)
    c.cut("east", "west")
    c.net.run_for(1)
    lasted = []
    for _ in range(3):
        numbers = [c.ask(p, Slot(ROLLOUT, s)) for s, p in enumerate(rollouts(c))]
        lasted.append(c.took(numbers[0]))
        answers = c.wait(*numbers)
        assert {answer.publication.version for answer in answers} == {5}
        for shard, peer in enumerate(rollouts(c)):
            assert c.finish(peer, Slot(ROLLOUT, shard), answers[shard]) is None
    assert lasted[0] < (CONFIG.patience if has_newer else 0.0) + AT_HOME
    assert max(lasted[1:]) < AT_HOME


def test_a_zone_that_was_cut_off_is_found_again() -> None:
    c = published(1)
    west = Group("policy", "west")
    c.form(west, c.of("west")[2:4])
    c.publish_all(west, c.of("west")[2:4], 0)
    c.cut("east", "west")
    c.wait(*(c.unpublish(p, Slot(TRAINER, s)) for s, p in enumerate(trainers(c))))
    c.publish_all(TRAINER, trainers(c), 2)
    assert c.replicate_all(ROLLOUT, rollouts(c)).publication.version == 0
    c.net.run_for(30)
    c.net.heal()
    everywhere_known(c, "east", 2)
    c.net.run_for(CONFIG.silent_seconds)
    assert c.replicate_all(ROLLOUT, rollouts(c)).publication.version == 2


def test_three_zones_and_the_silence_of_one_hides_nothing_of_the_other() -> None:
    c = published(2, east=3, west=3, north=3)
    north = Group("policy", "north")
    c.form(north, c.of("north")[:2])
    c.publish_all(north, c.of("north")[:2], 3)
    everywhere_known(c, "north", 3)
    c.cut("north", "west")
    assert c.replicate_all(ROLLOUT, rollouts(c)).publication.version == 2


LATE = Group("policy", "late")


def silenced() -> tuple[FarCluster, int, int]:
    """West has a copy, at a peer that is stopped, and known to be; also, who asks for one."""
    c = FarCluster(sizes={"east": 3, "west": 5})
    trainer, (rollout, late, *_) = c.of("east")[0], c.of("west")
    for group, peer in ((TRAINER, trainer), (ROLLOUT, rollout), (LATE, late)):
        c.form(group, [peer])
    c.publish_all(TRAINER, [trainer], 1)
    everywhere_known(c, "east", 1)
    c.replicate_all(ROLLOUT, [rollout])
    everywhere_known(c, "west", 1)
    c.pause(rollout)
    for node in (c.nodes[i] for i in c.of("west") if i != rollout):
        claim = Rumour(c.id(rollout), 0, Status.UNRESPONSIVE)
        node.receive(c.now, c.id(late), Gossip((claim,)))
        assert node.zones.status(c.id(rollout)) is Status.UNRESPONSIVE
        c.net.settle(node.info.peer_id)
    return c, rollout, late


def test_a_copy_at_home_whose_holders_are_silent_hides_none_in_another_zone() -> None:
    c, _, late = silenced()
    (answer,) = c.ask_all(LATE, [late])
    assert answer.publication.version == 1
    assert [pin.zone for pin in pins(c, "east")] == ["west"], "kept where it can be read"
    assert not pins(c, "west")
    assert follow(c, late, answer.publication) == {c.id(c.of("east")[0])}


def test_a_silent_holder_is_still_named_where_nobody_else_has_a_copy() -> None:
    c, rollout, late = silenced()
    c.cut("east", "west")
    (answer,) = c.ask_all(LATE, [late])
    assert len(pins(c, "west")) == 1
    assert follow(c, late, answer.publication) == {c.id(rollout)}


# --- gateways ---


def test_a_silent_gateway_is_given_up_for_the_next_one() -> None:
    c = published(1)
    for gateway in c.gateways("east"):
        if gateway not in trainers(c):
            c.pause(gateway)
            break
    else:
        c.pause(c.gateways("east")[0])
    paused = {i for i in c.gateways("east") if i in c.excused}
    if paused & set(trainers(c)):
        pytest.skip("all gateways publish, for this seed")
    for peer in c.of("west")[2:]:
        c.form(Group("policy", f"r{peer}"), [peer])
        number = c.list_versions(peer, "policy")
        at_home = AT_HOME + DirectoryConfig().read_patience  # the silent one owns keys, too
        assert c.took(number) < CONFIG.retry_interval + ROUND_TRIP + at_home


def test_all_gateways_of_a_zone_die_and_the_next_ones_answer() -> None:
    c = published(1, east=7, west=3)
    publishers = set(trainers(c))
    while set(c.gateways("east")) & publishers:
        for peer in set(c.gateways("east")) - publishers:
            c.crash(peer)
        c.net.run_for(30)
        if set(c.gateways("east")) <= publishers:
            break
    dying = [peer for peer in c.gateways("east") if peer not in publishers]
    for peer in dying:
        c.crash(peer)
    c.eventually(c.is_whole, 120)
    assert c.replicate_all(ROLLOUT, rollouts(c)).publication.version == 1


def test_a_peer_that_is_no_gateway_says_who_is_and_is_not_waited_for() -> None:
    c = published(1)
    asker, plain = rollouts(c)[0], c.plain("east")[-1]
    node = c.nodes[asker]
    node.abroad._asks._speakers._last["east"] = c.id(plain)
    summary = c.summary(asker, "east")
    assert summary is not None
    stale = msgspec.structs.replace(
        summary,
        counter=summary.counter + 1,
        gateways=(c.nodes[plain].info, *summary.gateways),
    )
    node.zones.home.tell(c.now, stale)
    number = c.list_versions(asker, "policy")
    (found,) = c.wait(number)
    assert [v.version for v in found] == [1]
    assert c.took(number) < CONFIG.retry_interval + ROUND_TRIP
    assert c.net.kinds["ZoneGreeting"]


def test_a_gateway_of_a_zone_answers_no_more_than_it_may() -> None:
    c = FarCluster(
        sizes={"east": 3, "west": 3},
        config=Config(swim=QUICK, abroad=AbroadConfig(max_answer_bytes=2000)),
    )
    for i, peer in enumerate(c.of("east") * 4):
        group = Group("policy", f"trainer-{i}")
        c.form(group, [peer])
        c.publish_all(group, [peer], i)
    c.form(ROLLOUT, c.of("west")[:1])
    everywhere_known(c, "east", 11)
    assert c.replicate_all(ROLLOUT, c.of("west")[:1]).publication.version == 11
    registers = c.nodes[c.of("west")[0]].abroad._asks.registers(("east", VERSIONS))
    assert 0 < len(msgspec.msgpack.encode(registers)) <= 2000


# --- pins ---


def test_a_decision_for_another_zones_version_is_pinned_there_until_it_is_finished() -> None:
    c = published(1)
    slots = [Slot(ROLLOUT, shard) for shard in range(2)]
    answers = c.ask_all(ROLLOUT, rollouts(c))
    assert [(pin.group, pin.zone) for pin in pins(c, "east")] == [(ROLLOUT, "west")]
    assert not pins(c, "west")
    going = [c.unpublish(p, Slot(TRAINER, s), 30.0) for s, p in enumerate(trainers(c))]
    c.net.run_for(5)
    assert all(c.verbs[number].end is None for number in going)
    c.wait(*(c.hold(p, slots[s], answers[s]) for s, p in enumerate(rollouts(c))))
    for shard, peer in enumerate(rollouts(c)):
        assert c.finish(peer, slots[shard], answers[shard]) is None
    c.wait(*going)
    assert not pins(c, "east")


def waited_until_its_deadline(c: FarCluster, *numbers: int) -> bool:
    """What only pins hold back is given up at the deadline."""
    c.wait(*numbers)
    verbs = [c.verbs[number] for number in numbers]
    return all(verb.ended is not None and verb.ended >= verb.deadline for verb in verbs)


def test_an_unpublish_that_waits_says_which_zone_holds_it_back() -> None:
    c = published(1)
    c.ask_all(ROLLOUT, rollouts(c))
    going = [c.unpublish(p, Slot(TRAINER, s), 2.0) for s, p in enumerate(trainers(c))]
    c.net.run_for(1.5)
    for shard, peer in enumerate(trainers(c)):
        references = c.shard(peer, Slot(TRAINER, shard)).references
        assert "policy/rollout of zone west" in references.waiting_for()
    assert waited_until_its_deadline(c, *going)


@pytest.mark.parametrize("seed", range(16))
def test_a_decision_and_the_withdrawal_of_what_it_is_for_may_cross_between_zones(
    seed: int,
) -> None:
    c = FarCluster(seed, sizes={"east": 3, "west": 2}, far=Link((0.05, 0.15), loss=0.05))
    trainer, rollout = c.of("east")[0], c.of("west")[0]
    c.form(TRAINER, [trainer])
    c.form(ROLLOUT, [rollout])
    c.publish_all(TRAINER, [trainer], 1)
    everywhere_known(c, "east", 1)
    number = c.ask(rollout, Slot(ROLLOUT, 0), timeout=60.0)
    c.net.run_for(seed * 0.05)
    going = c.unpublish(trainer, Slot(TRAINER, 0), 60.0)
    published_again = False
    references = c.nodes[trainer].shards[Slot(TRAINER, 0)].references
    for _ in range(400):
        if c.verbs[going].end is not None and not published_again:
            c.publish_all(TRAINER, [trainer], 2)
            published_again = True
        if c.verbs[number].end is not None:
            decided = c.verbs[number].result.publication
            assert references.held is not None
            assert references.held.publication == decided, "decided for, and gone"
            if c.now > (c.verbs[number].ended or 0.0) + 5:
                break
        c.net.run_for(0.05)
    (answer,) = c.wait(number)
    c.wait(c.hold(rollout, Slot(ROLLOUT, 0), answer))
    assert c.finish(rollout, Slot(ROLLOUT, 0), answer) is None
    c.ends(going)
    c.eventually(lambda: not pins(c, "east"), 60)


def test_a_pin_that_its_zone_could_not_take_back_is_taken_back_once_it_can() -> None:
    c = published(1)
    answers = c.ask_all(ROLLOUT, rollouts(c))
    c.cut("east", "west")
    for shard, peer in enumerate(rollouts(c)):
        assert c.finish(peer, Slot(ROLLOUT, shard), answers[shard]) is None
    c.net.run_for(120)
    assert len(pins(c, "east")) == 1
    c.net.heal()
    c.eventually(lambda: not pins(c, "east"), 2 * CONFIG.withdraw_retry_limit)


def test_owners_that_changed_since_they_were_named_are_found() -> None:
    """The rollout knows the owners; then all of them but one are others."""
    c = published(1, east=6, west=3)
    asker = rollouts(c)[0]
    answers = c.ask_all(ROLLOUT, rollouts(c))
    for shard, peer in enumerate(rollouts(c)):
        assert c.finish(peer, Slot(ROLLOUT, shard), answers[shard]) is None
    c.eventually(lambda: not pins(c, "east"))
    c.wait(c.list_versions(asker, "policy"))
    node = c.nodes[asker]
    known = node.abroad._asks._known[("east", VERSIONS)]
    others = [c.nodes[i].info for i in c.of("east") if c.nodes[i].info not in known.owners]
    known.owners = (known.owners[0], *others[:2])
    numbers = [c.ask(p, Slot(ROLLOUT, s)) for s, p in enumerate(rollouts(c))]
    assert c.took(numbers[0]) < 8 * ROUND_TRIP
    assert len(pins(c, "east")) == 1


def test_a_pin_is_taken_back_though_all_who_were_named_as_its_owners_are_gone() -> None:
    """Nobody is left to say that there are others."""
    c = published(1, east=6, west=3)
    answers = c.ask_all(ROLLOUT, rollouts(c))
    leader = next(i for i in rollouts(c) if c.nodes[i].shards[Slot(ROLLOUT, 0)].part.leader)
    c.wait(c.list_versions(leader, "policy"))
    known = c.nodes[leader].abroad._asks._known[("east", VERSIONS)]
    known.owners = tuple(
        msgspec.structs.replace(o, peer_id=PeerId(f"gone-{o.peer_id}")) for o in known.owners
    )
    for shard, peer in enumerate(rollouts(c)):
        assert c.finish(peer, Slot(ROLLOUT, shard), answers[shard]) is None
    c.eventually(lambda: not pins(c, "east"), 2 * CONFIG.withdraw_retry_limit)


def test_the_ring_of_the_other_zone_changes_while_a_version_is_pinned_there() -> None:
    c = published(1, east=4, west=3)
    answers = c.ask_all(ROLLOUT, rollouts(c))
    for _ in range(4):
        c.start_in("east")
    c.eventually(c.is_whole, 60)
    assert len(pins(c, "east")) == 1
    going = [c.unpublish(p, Slot(TRAINER, s), 60.0) for s, p in enumerate(trainers(c))]
    c.net.run_for(5)
    assert all(c.verbs[number].end is None for number in going)
    for shard, peer in enumerate(rollouts(c)):
        assert c.finish(peer, Slot(ROLLOUT, shard), answers[shard]) is None
    c.wait(*going)


def test_an_owner_tells_a_writer_of_another_zone_nothing_of_its_members() -> None:
    c = published(1)
    owner, writer = c.of("east")[2], c.id(rollouts(c)[0])
    pin = Pin(Publication(0, 1, "trainer", Generation(1, 1)), ROLLOUT, Generation(1, 1), 1, "west")
    register = Register(writer, "pin/0@rollout", 1, 1, pin)
    node = c.nodes[owner]
    for abroad in (True, False):
        message = DirectoryWrite(FIRST_NUMBER, VERSIONS, 1, register, abroad=abroad)
        node.receive(c.now, writer, message)
        answers = [type(item.message) for item in node.outbox.drain() if isinstance(item, Send)]
        assert answers == [DirectoryMismatch, *([] if abroad else [ViewDigest])]


# --- deaths ---


def test_the_pin_of_a_peer_that_died_in_its_zone_holds_nothing_back() -> None:
    c = published(1)
    c.ask_all(ROLLOUT, rollouts(c))
    leader = next(i for i in rollouts(c) if c.nodes[i].shards[Slot(ROLLOUT, 0)].part.leader)
    c.crash(leader)
    going = [c.unpublish(p, Slot(TRAINER, s), 60.0) for s, p in enumerate(trainers(c))]
    c.wait(*going)
    assert len(pins(c, "east")) == 1, "nobody has taken it back"


def test_the_pins_of_a_zone_that_died_hold_nothing_back_for_long() -> None:
    c = published(1, east=3, west=2)
    c.ask_all(ROLLOUT, rollouts(c))
    for peer in c.of("west"):
        c.crash(peer)
    going = [c.unpublish(p, Slot(TRAINER, s), 60.0) for s, p in enumerate(trainers(c))]
    assert max(c.took(number) for number in going) < CONFIG.forsaken_after + 5


def test_what_the_dead_of_another_zone_held_is_not_decided_for() -> None:
    c = published(1, east=5, west=3, north=3)
    north = Group("policy", "north")
    c.form(north, c.of("north")[:2])
    c.replicate_all(north, c.of("north")[:2])
    for peer in trainers(c):
        c.crash(peer)
        c.until(
            lambda peer=peer: all(  # type: ignore[misc]
                c.nodes[i].liveness.is_gone(c.id(peer)) for i in c.of("east")
            )
        )
    c.net.run_for(CONFIG.revisit_interval)
    answers = c.ask_all(ROLLOUT, rollouts(c), timeout=20.0)
    assert {answer.publication.version for answer in answers} == {1}
    assert len(pins(c, "north")) == 1
    holders = follow(c, rollouts(c)[0], answers[0].publication)
    assert holders == {c.id(c.of("north")[0])}


# --- pulling ---


def follow(c: FarCluster, puller: int, publication: Publication, shard: int = 0) -> set[PeerId]:
    """The holders that a pull is told of last."""
    number = c.nodes[puller].follow(c.now, "policy", shard, publication)
    c.net.run_for(3)
    told: Iterable[Any] = [
        event.holders
        for _, peer, event in c.events
        if peer == puller and isinstance(event, HoldersChanged) and event.follow == number
    ]
    c.nodes[puller].unfollow(c.now, number)
    return {holder.peer for holder in list(told)[-1]}


def test_a_pull_learns_of_holders_in_another_zone_and_how_to_reach_them() -> None:
    c = published(1)
    puller, (first, second) = rollouts(c)[0], trainers(c)
    publication, _ = c.ask_all(ROLLOUT, rollouts(c))
    assert publication.sources == (), "how to reach them comes with the look at the directory"
    assert follow(c, puller, publication.publication, 0) == {c.id(first)}
    assert follow(c, puller, publication.publication, 1) == {c.id(second)}
    node = c.nodes[puller]
    assert node.info_of(c.id(first)) == c.nodes[first].info
    assert node.liveness.zone(c.id(first)) == "east"
    assert f"p{second}" in node.liveness.name(c.id(second))


def test_a_zone_that_pulled_a_version_serves_other_zones_when_its_origin_is_gone() -> None:
    c = published(1, east=3, west=3, north=3)
    c.replicate_all(ROLLOUT, rollouts(c))
    everywhere_known(c, "west", 1)
    for shard, peer in enumerate(trainers(c)):
        c.wait(c.unpublish(peer, Slot(TRAINER, shard), 30.0))
    north = Group("policy", "north")
    c.form(north, c.of("north")[:2])
    assert c.replicate_all(north, c.of("north")[:2]).publication.version == 1
    c.eventually(lambda: not pins(c, "west"))


def test_shards_that_only_two_zones_together_hold_are_pinned_in_both() -> None:
    c = published(1, east=3, west=3, north=3)
    c.replicate_all(ROLLOUT, rollouts(c))
    everywhere_known(c, "west", 1)
    going = c.unpublish(trainers(c)[0], Slot(TRAINER, 0), 30.0)
    c.wait(going)
    c.wait(c.unpublish(rollouts(c)[1], Slot(ROLLOUT, 1), 30.0))
    north = Group("policy", "north")
    c.form(north, c.of("north")[:2])
    answers = c.ask_all(north, c.of("north")[:2])
    assert answers[0].publication.version == 1
    assert [pin.shards for pin in (*pins(c, "east"), *pins(c, "west"))] == [(1,), (0,)]
    going = [
        c.unpublish(trainers(c)[1], Slot(TRAINER, 1), 30.0),
        c.unpublish(rollouts(c)[0], Slot(ROLLOUT, 0), 30.0),
    ]
    c.net.run_for(5)
    assert all(c.verbs[number].end is None for number in going)
    for shard, peer in enumerate(c.of("north")[:2]):
        assert c.finish(peer, Slot(north, shard), answers[shard]) is None
    c.wait(*going)


def test_a_zone_is_held_only_to_the_shards_that_it_is_needed_for() -> None:
    """East alone has shard 1; shard 0 is there too, and not needed: west has it, and is near."""
    c = published(1, east=4, west=4)
    c.replicate_all(ROLLOUT, rollouts(c))
    c.wait(c.unpublish(rollouts(c)[1], Slot(ROLLOUT, 1), 30.0))
    (trainer, _), (rollout, _) = trainers(c), rollouts(c)
    references = c.nodes[trainer].shards[Slot(TRAINER, 0)].references
    assert references.held is not None
    publication = references.held.publication
    pin = Pin(publication, Group("policy", "late"), publication.generation, 1, "west", (1,))
    node, taken = c.nodes[rollout], []
    node.abroad.records.write(
        c.now, VERSIONS, "pin/0@late", 1, pin, lambda _now, refused: taken.append(refused), "east"
    )
    c.net.settle(c.id(rollout))
    c.until(lambda: taken == [None])
    c.wait(c.unpublish(trainer, Slot(TRAINER, 0), 3.0))
    assert waited_until_its_deadline(c, c.unpublish(trainers(c)[1], Slot(TRAINER, 1), 3.0))


def test_a_group_of_another_zone_is_another_group_also_under_the_same_name() -> None:
    c = published(1, east=3, west=3)
    namesakes = c.of("west")[1:3]
    c.form(TRAINER, namesakes)
    c.ask_all(TRAINER, namesakes)
    going = [c.unpublish(p, Slot(TRAINER, s), 2.0) for s, p in enumerate(trainers(c))]
    assert waited_until_its_deadline(c, *going)


# --- cost ---


def test_what_a_plain_peer_receives_does_not_grow_with_the_peers_of_other_zones() -> None:
    costs = []
    for east in (4, 16):
        c = published(1, east=east, west=4)
        (idle,) = c.plain("west")[-1:]
        c.replicate_all(ROLLOUT, rollouts(c))
        c.net.run_for(20)
        before = c.net.host(c.id(idle)).received_bytes
        c.net.run_for(40)
        costs.append(c.net.host(c.id(idle)).received_bytes - before)
    assert costs[1] < 1.2 * costs[0], costs


# --- bad input ---


A = Publication(0, 8, "trainer", Generation(1, 1))
STRANGER = PeerId("f" * 16)


def asking(c: FarCluster) -> tuple[int, int, PeerId]:
    """A rollout that has just asked east: who, under which number, and whom."""
    asker = rollouts(c)[0]
    c.list_versions(asker, "policy")
    asks = c.nodes[asker].abroad._asks
    c.until(lambda: bool(asks._asked))
    ((number, place),) = asks._asked.items()
    return asker, number, asks._known[place].asked[-1]


def a_version(writer: PeerId) -> Register:
    slot = Slot(TRAINER, 0)
    return Register(writer, "0@trainer", 1, 1, VersionRecord(slot, 1, A, Phase.READY, A.generation))


@pytest.mark.parametrize("forged", ["number", "sender", "key", "twice"])
def test_an_answer_that_was_not_asked_for_is_dropped(forged: str) -> None:
    c = published(1)
    asker, number, gateway = asking(c)
    node = c.nodes[asker]
    answer = ZoneAnswer(number, VERSIONS, (a_version(STRANGER),))
    if forged == "number":
        c.tell(asker, gateway, msgspec.structs.replace(answer, request=number + 1))
    elif forged == "sender":
        c.tell(asker, c.id(c.plain("east")[0]), answer)
    elif forged == "key":
        c.tell(asker, gateway, msgspec.structs.replace(answer, key=holders_key("policy", 0)))
    else:
        c.net.run_for(1)
        c.tell(asker, gateway, answer)
    assert node.abroad.dropped["answer that was not asked for"] == 1
    assert A not in {
        getattr(register.value, "publication", None)
        for register in node.abroad._asks.registers(("east", VERSIONS))
    }


def test_what_does_not_belong_into_an_answer_is_dropped() -> None:
    c = published(1)
    asker, number, gateway = asking(c)
    node = c.nodes[asker]
    own = c.id(c.of("west")[1])
    somebody = PeerInfo(STRANGER, "s", "north", ("s:1",))
    spoofed = PeerInfo(own, "s", "east", ("s:1",))
    registers = (
        a_version(STRANGER),
        a_version(own),
        Register(NOBODY, "0@trainer", 1, 1, a_version(own).value),
        Register(STRANGER, "claim", 1, 1, SlotClaim(0, 1, 1, True)),
        Register(STRANGER, "gone", 1, 1, None),
        Register(STRANGER, "h", 1, 1, HolderRecord(Slot(TRAINER, 0), A, Phase.READY, True, 1)),
    )
    c.tell(asker, gateway, ZoneAnswer(number, VERSIONS, registers, (somebody,), (spoofed,)))
    if node.abroad.dropped["answer that was not asked for"]:
        pytest.fail("the answer came too late")
    assert node.abroad.dropped["what doesn't belong into an answer"] == 7
    assert node.abroad._asks.registers(("east", VERSIONS)) == (a_version(STRANGER),)
    assert node.info_of(STRANGER) is None
    assert node.info_of(own) == c.nodes[c.of("west")[1]].info


def test_a_giant_answer_does_not_decode() -> None:
    answer = ZoneAnswer(1, VERSIONS, (a_version(STRANGER),) * 8193)
    kind, body = pack(answer)
    with pytest.raises(Undecodable):
        unpack(Envelope(WIRE_VERSION, "", "", NOBODY, "", NOBODY, kind, body))


def test_what_is_remembered_of_other_zones_is_bounded() -> None:
    small = AbroadConfig(max_keys=4, max_registers=6, max_peers=5, max_asked=2)
    c = FarCluster(sizes={"east": 6, "west": 3}, config=Config(swim=QUICK, abroad=small))
    west = c.of("west")[0]
    for i in range(12):
        group, east = Group(f"m{i}", "trainer"), c.of("east")[i % 6]
        c.form(group, [east])
        c.publish_all(group, [east], 1)
    c.eventually(lambda: len(getattr(c.summary(west, "east"), "newest", ())) == 12)
    for _ in range(2):
        c.ends(*(c.list_versions(west, f"m{i}") for i in range(12)))
        abroad = c.nodes[west].abroad
        assert len(abroad._asks._known) <= 4
        assert len(abroad._foreigners) <= 5
        c.net.run_for(15)
    (found,) = c.wait(c.list_versions(west, "m3"))
    assert [v.version for v in found] == [1]


def test_a_gateway_works_on_so_many_asks_and_refuses_the_rest() -> None:
    c = published(1)
    (gateway, *_) = c.gateways("east")
    node = c.nodes[gateway]
    for i in range(CONFIG.max_asked + 10):
        node.receive(c.now, STRANGER, ZoneAsk(i, Key("versions", f"m{i}")))
    assert node.abroad.dropped["ask, and too many are being worked on"] >= 10
    c.net.settle(c.id(gateway))
    c.net.run_for(CONFIG.patience + 1)
    assert not node.abroad._embassy._readings


def test_groups_and_what_else_stays_in_its_zone_is_not_told() -> None:
    c = published(1)
    (gateway, *_) = c.gateways("east")
    c.tell(gateway, STRANGER, ZoneAsk(1, Key("group", "policy", "trainer")))
    assert c.nodes[gateway].abroad.dropped["ask for what stays in its zone"] == 1


@pytest.mark.parametrize(
    "message",
    [
        ZoneAnswer(7, VERSIONS, ()),
        ZoneChecked(7, (STRANGER,)),
        DirectoryWritten(FIRST_NUMBER + 7),
        DirectoryMismatch(FIRST_NUMBER + 7),
        ZoneGreeting(PeerInfo(STRANGER, "s", "east", ("s:1",))),
    ],
    ids=lambda message: type(message).__name__,
)
def test_whoever_was_asked_nothing_changes_nothing(message: Message) -> None:
    c = published(1)
    peer = c.plain("west")[0]
    c.tell(peer, STRANGER, message)
    node = c.nodes[peer]
    assert not node.liveness.is_gone(STRANGER)
    assert not node.abroad._asks._known
    assert sum(node.abroad.dropped.values()) == (0 if isinstance(message, ZoneGreeting) else 1)
    unasked = node.zones.dropped["greeting that was not asked for"]
    assert unasked == (1 if isinstance(message, ZoneGreeting) else 0)


def test_only_the_zone_of_a_peer_that_was_asked_about_says_that_it_is_gone() -> None:
    c = published(1)
    node, (leader, other) = c.nodes[trainers(c)[0]], rollouts(c)
    c.ask_all(ROLLOUT, rollouts(c))
    assert not node.liveness.is_gone(c.id(leader), "west")
    c.net.settle(node.info.peer_id)
    c.net.run_for(0.01)
    each = node.abroad._roll_call._lists["west"]
    assert each.asked is not None
    c.tell(trainers(c)[0], STRANGER, ZoneChecked(each.number, (c.id(leader),)))
    assert not node.liveness.is_gone(c.id(leader))
    c.tell(trainers(c)[0], each.asked, ZoneChecked(each.number, (c.id(leader), c.id(other))))
    assert node.liveness.is_gone(c.id(leader))
    assert not node.liveness.is_gone(c.id(other)), "nobody asked about that one"


def test_a_plain_peer_that_is_checked_with_says_who_the_gateways_are() -> None:
    c = published(1)
    (plain, *_) = c.plain("east")
    node = c.nodes[plain]
    node.receive(c.now, STRANGER, ZoneCheck(1, (c.id(plain),)))
    sent = [item.message for item in node.outbox.drain() if getattr(item, "to", 0) == STRANGER]  # type: ignore[union-attr]
    (greeting,) = sent
    assert isinstance(greeting, ZoneGreeting)
    assert {g.peer_id for g in greeting.summaries[0].gateways[:2]} == {
        c.id(i) for i in c.gateways("east")
    }
