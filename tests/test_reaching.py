"""Whom a gateway calls so that no zone stays out, and how often."""

from __future__ import annotations

import random
from itertools import pairwise

from tensorhub_p2p.config import WIDE_AREA
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.summaries import obituary
from tensorhub_p2p.protocol.messages import ZoneSummary
from tensorhub_p2p.protocol.zones.reaching import MAX_CALLS, MAX_REMEMBERED, Pacing, Rounds


def peer(name: str, zone: str = "west") -> PeerInfo:
    return PeerInfo(PeerId(name), name, zone, (f"{name}:1",))


def summary(zone: str, *names: str) -> ZoneSummary:
    return ZoneSummary(zone, 1, tuple(peer(name, zone) for name in names), members=len(names))


WEST, NORTH = summary("west", "w1", "w2"), summary("north", "n1")


def rounds() -> Rounds:
    return Rounds(WIDE_AREA, random.Random(1))


def test_who_is_named_by_a_zone_that_nobody_speaks_for_is_called() -> None:
    assert set(rounds().due(0.0, (), (WEST, NORTH), {"north"}, ())) == {"w1:1", "w2:1"}


def test_fellow_gateways_that_are_missing_are_called() -> None:
    assert rounds().due(0.0, (peer("fellow"),), (NORTH,), {"north"}, ()) == ["fellow:1"]


def test_a_round_calls_a_few_only_however_many_are_missing() -> None:
    crowd = tuple(summary(f"zone-{i}", f"g{i}", f"h{i}") for i in range(50))
    called = rounds().due(0.0, (), crowd, set(), ())
    assert len(called) == len(set(called)) == MAX_CALLS


def test_all_of_them_are_called_in_time() -> None:
    crowd = tuple(summary(f"zone-{i}", f"g{i}") for i in range(50))
    calls, called = rounds(), set()
    for _ in range(100):
        called |= set(calls.due(calls.next, (), crowd, set(), ()))
    assert len(called) == 50


def test_of_zones_that_are_taken_for_gone_one_is_called_now_and_then_in_turn() -> None:
    calls, now = rounds(), 0.0
    gone = [obituary(each) for each in (WEST, NORTH)]
    called = []
    while now < 10 * WIDE_AREA.push_pull_interval:
        called.append(tuple(calls.due(now, (), gone, {"south"}, ())))
        now = calls.next
    called = [each for each in called if each]
    assert 6 <= len(called) <= 20
    assert set(called) == {("w1:1", "w2:1"), ("n1:1",)}
    assert all(one != other for one, other in pairwise(called))


def test_a_seed_is_called_each_round_while_a_zone_is_missing() -> None:
    calls = rounds()
    for _ in range(5):
        assert "s:1" in calls.due(max(0.0, calls.next), (), (WEST,), set(), ("s:1",))


def test_a_seed_is_called_now_and_then_while_none_is_missing() -> None:
    calls, now, times = rounds(), 0.0, 0
    while now < 10 * WIDE_AREA.push_pull_interval:
        times += len(calls.due(now, (), (WEST,), {"west"}, ("s:1",)))
        now = calls.next
    assert 6 <= times <= 20


def test_rounds_start_fast_and_slow_down() -> None:
    calls, times = rounds(), [0.0]
    for _ in range(20):
        calls.due(times[-1], (), (), set(), ())
        times.append(calls.next)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] <= 1.5 * WIDE_AREA.join_retry
    assert min(pauses[5:]) >= 0.5 * WIDE_AREA.redial_interval
    assert max(pauses) <= 1.5 * WIDE_AREA.redial_interval


def test_nothing_is_due_before_its_time() -> None:
    calls = rounds()
    calls.due(0.0, (), (WEST,), set(), ())
    assert calls.due(calls.next - 0.01, (), (WEST,), set(), ("s:1",)) == []


def test_an_address_is_not_called_again_too_soon() -> None:
    pacing = Pacing(2.0)
    assert pacing.allows(0.0, "a:1")
    assert pacing.allows(0.0, "b:1")
    assert not pacing.allows(1.9, "a:1")
    assert pacing.allows(2.0, "a:1")
    assert not pacing.allows(3.9, "a:1"), "it counts from the last call that was made"


def test_the_memory_of_calls_is_bounded() -> None:
    pacing = Pacing(2.0)
    for number in range(10 * MAX_REMEMBERED):
        assert pacing.allows(0.0, f"{number}:1")
    assert pacing.allows(0.1, "0:1"), "the longest ago is forgotten first"
    assert not pacing.allows(0.1, f"{10 * MAX_REMEMBERED - 1}:1")
