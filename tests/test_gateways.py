"""Who speaks for a zone: the rule, the short list that it is applied to, and one's own part."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import ZonesConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.messages import Status
from tensorhub_p2p.protocol.zones.gateways import (
    KEPT,
    KEPT_OLDEST,
    TOO_FEW,
    Candidate,
    Candidates,
    choose,
    weight,
)
from tensorhub_p2p.protocol.zones.line import CHANGES_SETTLE, Line

ZONE = "east"
PEERS = [PeerId(f"peer-{i}") for i in range(300)]
BY_HASH = sorted(PEERS, key=lambda peer: weight(ZONE, peer))


def member(peer: PeerId, status: Status = Status.ALIVE, since: float = 0.0) -> MemberView:
    return MemberView(PeerInfo(peer, peer, ZONE, (f"{peer}:1",)), 0, status, since)


def known(*members: MemberView) -> Candidates:
    candidates = Candidates(ZONE)
    for each in members:
        candidates.note(each)
    return candidates


def chosen(candidates: Candidates, settled_since: float = 0.0, count: int = 2) -> list[PeerId]:
    return list(choose(ZONE, candidates, settled_since, count))


# -- the rule --


@given(st.permutations([Candidate(peer, 0.0) for peer in PEERS[:20]]))
def test_all_choose_the_same_settled_members_whatever_order_they_met_them_in(
    met: list[Candidate],
) -> None:
    expected = sorted(PEERS[:20], key=lambda peer: weight(ZONE, peer))[:2]
    assert list(choose(ZONE, met, 0.0, 2)) == expected


def test_a_newcomer_is_not_chosen_while_there_are_enough_settled_ones() -> None:
    newcomer, *settled = BY_HASH[:10]
    candidates = [Candidate(newcomer, 5.0), *(Candidate(peer, 0.0) for peer in settled)]
    assert list(choose(ZONE, candidates, 4.9, 2)) == settled[:2]
    assert list(choose(ZONE, candidates, 5.0, 2)) == [newcomer, settled[0]]


def test_the_oldest_fill_up_while_too_few_are_settled() -> None:
    settled, young, old = BY_HASH[2], BY_HASH[0], BY_HASH[1]
    candidates = [Candidate(young, 9.0), Candidate(settled, 0.0), Candidate(old, 8.0)]
    assert list(choose(ZONE, candidates, 5.0, 2)) == [settled, old]


def test_of_equally_old_ones_the_first_named_comes_first() -> None:
    candidates = [Candidate(peer, 7.0) for peer in (BY_HASH[5], BY_HASH[0], BY_HASH[9])]
    assert list(choose(ZONE, candidates, 5.0, 2)) == [BY_HASH[5], BY_HASH[0]]


def test_a_death_replaces_just_the_one_that_died() -> None:
    candidates = [Candidate(peer, 0.0) for peer in BY_HASH]
    before = choose(ZONE, candidates, 0.0, 4)
    for dead in before:
        after = choose(ZONE, [c for c in candidates if c.peer != dead], 0.0, 4)
        assert after == (*(peer for peer in before if peer != dead), BY_HASH[4])


def test_a_zone_with_one_candidate_has_one_gateway_and_an_empty_one_none() -> None:
    assert choose(ZONE, [Candidate(PEERS[0], 0.0)], 9.0, 2) == (PEERS[0],)
    assert choose(ZONE, [], 9.0, 2) == ()


def test_zones_order_the_same_peers_differently() -> None:
    orders = {
        tuple(sorted(PEERS[:20], key=lambda peer: weight(zone, peer)))
        for zone in ("east", "west", "north")
    }
    assert len(orders) == 3


# -- the short list --


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.ALIVE])
def test_only_who_is_alive_is_a_candidate(status: Status) -> None:
    candidates = known(*map(member, BY_HASH[:3]))
    assert candidates.note(member(BY_HASH[0], status))
    assert chosen(candidates) == BY_HASH[1:3]
    assert not candidates.note(member(BY_HASH[0], status)), "no change the second time"
    assert candidates.note(member(BY_HASH[0], since=3.0))
    assert chosen(candidates) == BY_HASH[1:3], "it has to settle anew"
    assert chosen(candidates, settled_since=3.0) == BY_HASH[:2]


@given(st.randoms(use_true_random=False), st.integers(0, 280))
def test_the_short_list_chooses_what_the_whole_table_would(rng: random.Random, dead: int) -> None:
    order = list(PEERS)
    rng.shuffle(order)
    candidates = known(*map(member, order))
    alive = {peer: member(peer) for peer in order}
    for peer in rng.sample(BY_HASH, dead):
        alive[peer] = member(peer, Status.DEAD)
        candidates.note(alive[peer])
        if candidates.too_few:
            candidates.refill(alive.values())
    expected = [peer for peer in BY_HASH if alive[peer].status is Status.ALIVE]
    assert chosen(candidates, count=4) == expected[:4]


def test_the_short_list_stays_short() -> None:
    candidates = known(*map(member, PEERS))
    assert len(list(candidates)) <= KEPT + KEPT_OLDEST
    candidates.refill(map(member, PEERS))
    assert len(list(candidates)) <= KEPT + KEPT_OLDEST


def test_the_oldest_stay_on_the_short_list_whatever_their_hash() -> None:
    first, second = BY_HASH[-2:]
    others = [member(peer, since=2.0 + i) for i, peer in enumerate(BY_HASH[:200])]
    candidates = known(member(first, since=0.0), member(second, since=1.0), *others)
    assert chosen(candidates, settled_since=-5.0) == [first, second]


def test_a_small_zone_is_never_looked_through_again() -> None:
    candidates = known(*map(member, PEERS[: TOO_FEW + 3]))
    for peer in PEERS[: TOO_FEW + 3]:
        candidates.note(member(peer, Status.DEAD))
        assert not candidates.too_few
    assert chosen(candidates) == []


# -- the own part in it --

CONFIG = ZonesConfig()
SETTLED = CONFIG.settle_seconds
LOW, *OTHERS = BY_HASH


def line(me: PeerId, *others: MemberView, since: float = 0.0) -> Line:
    """A peer's view of its zone that came at `since` and met these."""
    mine = Line(member(me).info, CONFIG, lambda: others)
    for each in others:
        mine.note(since, each)
    mine.enter(since)
    return mine


def test_who_is_not_in_line_yet_is_no_gateway() -> None:
    mine = Line(member(LOW).info, CONFIG, tuple)
    mine.note(0.0, member(OTHERS[0]))
    assert not mine.look(0.0, ())
    assert mine.gateways == ()
    assert mine.next_look is None


def test_the_only_peer_of_a_zone_is_its_gateway_at_once() -> None:
    mine = line(LOW)
    assert mine.look(0.0, ())
    assert mine.gateways == (LOW,)


def test_a_newcomer_leaves_the_duty_to_those_who_speak_already_until_it_has_settled() -> None:
    old = [member(peer, since=-100.0) for peer in OTHERS[:3]]
    mine = line(LOW, *old)
    late = Line(member(LOW).info, CONFIG, tuple)
    late.enter(0.0)
    assert not mine.look(1.0, OTHERS[:2]), "they are older"
    assert not late.look(1.0, OTHERS[:2]), "it has not met them yet, but is told of them"
    assert late.look(1.1, OTHERS[:1]), "one is too few"
    assert mine.look(SETTLED, OTHERS[:2])
    assert mine.gateways == (LOW, OTHERS[0])


def test_who_is_replaced_lingers_for_a_while() -> None:
    me = OTHERS[-1]
    mine = line(me)
    assert mine.look(0.0, ())
    for peer in OTHERS[:3]:
        mine.note(1.0, member(peer, since=1.0))
    assert mine.look(10.9, ())
    assert mine.look(11.0, ())
    assert me not in mine.gateways
    assert mine.look(10.9 + CONFIG.linger_seconds - 0.1, ())
    assert not mine.look(10.9 + CONFIG.linger_seconds, ())


def test_the_line_is_looked_at_when_something_changes_and_when_someone_settles() -> None:
    mine = line(LOW)
    mine.look(0.0, ())
    mine.look(SETTLED, ())
    assert mine.next_look is None, "nothing will change by itself"
    mine.note(50.0, member(OTHERS[0], since=50.0))
    assert mine.next_look == 50.0 + CHANGES_SETTLE
    mine.look(50.1, ())
    assert mine.next_look == 50.0 + SETTLED
    mine.look(50.0 + SETTLED, ())
    assert mine.next_look is None


def test_a_line_that_is_looked_at_never_asks_for_the_same_moment_again() -> None:
    mine = line(LOW, *(member(peer, since=i / 7) for i, peer in enumerate(OTHERS[:20])))
    now, looks = 0.0, 0
    while mine.next_look is not None and looks < 100:
        now, looks = mine.next_look, looks + 1
        mine.look(now, ())
    assert looks < 30
    assert now == pytest.approx(19 / 7 + SETTLED, abs=CHANGES_SETTLE)


def test_a_zone_adopted_whole_has_settled_long_ago() -> None:
    mine = Line(member(OTHERS[0]).info, CONFIG, tuple)
    mine.adopt(0.0, map(member, (LOW, *OTHERS[1:])))
    assert mine.look(0.0, ())
    assert mine.gateways == (LOW, OTHERS[0])
    assert mine.next_look is None
