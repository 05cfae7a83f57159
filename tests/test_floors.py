"""A group's floor outlives its members: written when all are done, read by who stands next."""

from __future__ import annotations

import pytest
from registry import Registry
from test_calls import LATEST, Calls, publication
from test_election import KEY, Claimants, formed_alike, peer

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import floor_name
from tensorhub_p2p.protocol.groups.floors import FloorKeeper, floor_on_record
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR
from tensorhub_p2p.protocol.identity import NO_GENERATION, Generation, Group, PeerId
from tensorhub_p2p.protocol.messages import GroupFloor, Register

GROUP = Group("policy", "rollout")
LEADER = PeerId("leader")


def keeper(registry: Registry) -> FloorKeeper:
    return FloorKeeper(GROUP, Generation(1, 7), registry.peer(LEADER), GroupConfig())


def on_record(registry: Registry) -> tuple[int, int]:
    return floor_on_record(registry.registers(KEY))


def run(registry: Registry) -> None:
    registry.until(lambda: not registry.steps)


def test_the_first_floor_is_written_at_once_and_the_next_ones_at_a_slow_pace() -> None:
    registry = Registry()
    floors = keeper(registry)
    floors.keep(10.0, (0, 1))
    run(registry)
    assert on_record(registry) == (0, 1)
    for version in range(2, 9):
        floors.keep(10.1, (0, version))
    run(registry)
    assert on_record(registry) == (0, 1)
    due = floors.next_wakeup()
    assert due == 10.0 + GroupConfig().floor_interval
    floors.tick(due)
    run(registry)
    assert on_record(registry) == (0, 8)
    assert floors.next_wakeup() is None


def test_a_leader_that_stops_writes_what_is_still_to_be_written() -> None:
    registry = Registry()
    floors = keeper(registry)
    floors.keep(10.0, (0, 1))
    floors.keep(10.1, (0, 2))
    floors.stop(10.2)
    run(registry)
    assert on_record(registry) == (0, 2)


def test_a_floor_that_does_not_rise_is_not_written_again() -> None:
    registry = Registry()
    floors = keeper(registry)
    floors.keep(10.0, (1, 1))
    run(registry)
    floors.keep(20.0, (1, 1))
    assert registry.steps == []
    assert floors.next_wakeup() is None


def test_of_several_leaders_the_highest_floor_counts() -> None:
    registry = Registry()
    for name, floor in (("a", (0, 9)), ("b", (1, 2)), ("c", (1, 1))):
        value = GroupFloor(NO_GENERATION, floor)
        registry.put(KEY, Register(PeerId(name), floor_name(GROUP), 1, 1, value))
    assert on_record(registry) == (1, 2)
    assert floor_on_record(()) == NO_FLOOR


@pytest.mark.parametrize("seed", range(10))
def test_a_floor_is_on_record_only_once_every_member_is_done(seed: int) -> None:
    """Or a void, which takes the members' floors back, would leave the record above them."""
    calls = Calls(seed, shards=3)
    calls.leader._keeper = FloorKeeper(
        calls.leader.slot.group, Generation(1, 7), calls.peer(LEADER), GroupConfig()
    )
    calls.resolver.newest = 5
    calls.ask(*[LATEST] * 3)
    calls.until(lambda: calls.answered(1))
    for member in calls.members[:2]:
        assert member.succeeded(calls.now, 1)
    for _ in range(200):
        calls.step()
    assert on_record(calls) == NO_FLOOR
    assert calls.members[2].succeeded(calls.now, 1)
    calls.until(lambda: on_record(calls) == publication(5).order)


@pytest.mark.parametrize("some", [False, True])
def test_a_leader_that_stops_in_a_call_writes_its_answer_down_if_a_member_has_it(
    some: bool,
) -> None:
    calls = Calls(1, shards=3)
    calls.leader._keeper = FloorKeeper(
        calls.leader.slot.group, Generation(1, 7), calls.peer(LEADER), GroupConfig()
    )
    calls.resolver.newest = 5
    calls.ask(*[LATEST] * 3)
    calls.until(lambda: calls.answered(1))
    if some:
        assert calls.members[1].succeeded(calls.now, 1)
    for _ in range(200):
        calls.step()
    calls.leader.stop(calls.now)
    for _ in range(20):
        calls.step()
    assert on_record(calls) == (publication(5).order if some else NO_FLOOR)


@pytest.mark.parametrize("seed", range(10))
def test_members_that_remember_nothing_start_from_the_floor_on_record(seed: int) -> None:
    group = Claimants(seed, 0.1 * (seed % 3))
    value = GroupFloor(NO_GENERATION, (0, 5))
    group.put(KEY, Register(PeerId("gone"), floor_name(GROUP), 1, 1, value))
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]
    group.until(lambda: formed_alike(*elections))
    group.check()
    assert {election.floor for election in elections} == {(0, 5)}
    assert all(e.record is not None and e.record.floor == (0, 5) for e in elections)


def test_what_a_member_remembers_counts_if_it_is_above_the_record() -> None:
    group = Claimants()
    value = GroupFloor(NO_GENERATION, (0, 5))
    group.put(KEY, Register(peer(99), floor_name(GROUP), 1, 1, value))
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]
    elections[2].floor = (0, 7)
    group.until(lambda: formed_alike(*elections))
    assert {election.floor for election in elections} == {(0, 7)}
