from __future__ import annotations

import timeit

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_p2p.protocol.directory.ring import Ring, majority, owners_hash
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Key

members = st.sets(st.integers(0, 10_000), min_size=1, max_size=12).map(
    lambda numbers: [PeerId(f"{n:016x}") for n in sorted(numbers)]
)
KEYS = [Key("versions", f"model-{i}") for i in range(200)]


def test_owners_are_different_members_and_as_many_as_there_can_be() -> None:
    for count, expected in ((1, 1), (2, 2), (3, 3), (9, 3)):
        ring = Ring([PeerId(f"p{i}") for i in range(count)], 16)
        for key in KEYS:
            owners = ring.owners(key, 3)
            assert len(set(owners)) == len(owners) == expected


def test_an_empty_ring_has_no_owners() -> None:
    assert Ring([], 8).owners(KEYS[0], 3) == ()


@given(members, st.integers(10_001, 20_000))
@settings(max_examples=30, deadline=None)
def test_a_joining_member_only_takes_keys_over(names: list[PeerId], number: int) -> None:
    before = Ring(names, 8)
    new = PeerId(f"{number:016x}")
    after = before.of_members([*names, new])
    for key in KEYS[:60]:
        old, now = before.owners(key, 3), after.owners(key, 3)
        assert set(now) - set(old) <= {new}
        if new not in now:
            assert now == old


@given(members, members)
@settings(max_examples=60, deadline=None)
def test_a_changed_ring_equals_one_made_afresh(one: list[PeerId], other: list[PeerId]) -> None:
    changed, fresh = Ring(one, 8).of_members(other), Ring(other, 8)
    assert changed.members == fresh.members
    assert changed._points == fresh._points
    assert changed._holders == fresh._holders


def test_a_change_leaves_the_ring_before_it_as_it_was() -> None:
    names = [PeerId(f"p{i}") for i in range(40)]
    ring = Ring(names, 16)
    before = [ring.owners(key, 3) for key in KEYS]
    ring.of_members(names[1:])
    ring.of_members([*names, PeerId("new")])
    assert [ring.owners(key, 3) for key in KEYS] == before


def test_keys_spread_evenly_over_members() -> None:
    count = 50
    ring = Ring([PeerId(f"p{i}") for i in range(count)], 64)
    load = dict.fromkeys(ring.members, 0)
    keys = [Key("holders", f"model-{i}", str(i % 8)) for i in range(20_000)]
    for key in keys:
        for owner in ring.owners(key, 3):
            load[owner] += 1
    mean = 3 * len(keys) / count
    assert max(load.values()) < 1.6 * mean
    assert min(load.values()) > 0.5 * mean


def test_parts_of_a_key_can_not_run_into_each_other() -> None:
    ring = Ring([PeerId(f"p{i}") for i in range(200)], 64)
    assert ring.owners(Key("group", "ab", "c"), 3) != ring.owners(Key("group", "a", "bc"), 3)


def test_the_hash_of_owners_is_one_of_a_set() -> None:
    a, b, c = PeerId("a"), PeerId("b"), PeerId("c")
    assert owners_hash((a, b, c)) == owners_hash((c, a, b))
    assert owners_hash((a, b)) != owners_hash((a, b, c))
    assert 0 <= owners_hash((a, b)) < 1 << 63


def test_two_majorities_always_share_a_member() -> None:
    for count in range(1, 10):
        assert 2 * majority(count) > count >= majority(count)


def test_peers_that_know_the_same_members_share_the_ring() -> None:
    names = [PeerId(f"p{i}") for i in range(64)]
    one = Ring.of(names, 8)
    assert Ring.of(reversed(names), 8) is one
    assert Ring.of(names[1:], 8).of_members(names) is one


def test_one_change_among_a_thousand_costs_a_fraction_of_a_new_ring() -> None:
    names = [PeerId(f"{i:016x}") for i in range(1000)]
    ring = Ring(names, 64)
    fresh = timeit.timeit(lambda: Ring(names, 64), number=3)
    changed = timeit.timeit(lambda: ring.of_members(names[1:]), number=3)
    assert changed < fresh
