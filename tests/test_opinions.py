"""Which claims are believed, what they change, and which are passed on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.membership.health import LocalHealth
from tensorhub_p2p.protocol.membership.members import Members, MemberView
from tensorhub_p2p.protocol.membership.opinions import MAX_INCARNATION, Opinions
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged, Refuted, WasAbsent
from tensorhub_p2p.protocol.messages import Rumour, Status

ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status
ME, ANN, BOB, CID = (PeerId(name) for name in ("me", "ann", "bob", "cid"))
CONFIG = SwimConfig(
    probe_interval=1.0,
    suspicion_multiplier=4.0,
    suspicion_max_multiplier=6.0,
    suspicion_confirmations=3,
)
LOTS = 1_000_000


def info(peer: PeerId) -> PeerInfo:
    return PeerInfo(peer, peer, "here", (f"{peer}:1",))


def alive(peer: PeerId, incarnation: int = 0) -> Rumour:
    return Rumour(peer, incarnation, ALIVE, info(peer))


def claim(peer: PeerId, status: Status, incarnation: int = 0, by: PeerId = ANN) -> Rumour:
    return Rumour(peer, incarnation, status, None, by)


class Mind:
    """Opinions, with what they are about and what they change."""

    def __init__(self, *peers: PeerId, config: SwimConfig = CONFIG) -> None:
        self.members = Members(config.max_members)
        self.outbox = Outbox()
        self.dropped: Counter[str] = Counter()
        self.health = LocalHealth(config.max_local_health)
        self.changes: list[tuple[PeerId, Status, Status | None]] = []
        self.opinions = Opinions(
            info(ME), config, self.members, self.outbox, self.dropped, self.health, self._changed
        )
        self.opinions.hear_all(0.0, map(alive, peers))
        self.news()
        self.events()
        self.changes.clear()

    def _changed(self, now: float, member: MemberView, old: Status | None) -> None:
        self.changes.append((member.peer_id, member.status, old))

    def hear(self, *rumours: Rumour, now: float = 0.0) -> None:
        self.opinions.hear_all(now, rumours)

    def news(self) -> tuple[Rumour, ...]:
        return self.opinions.rumours.take(LOTS, 1)

    def events(self) -> list[Event]:
        return [item for item in self.outbox.drain() if isinstance(item, Event)]

    def deadline(self, peer: PeerId) -> float | None:
        return self.opinions.verdicts.deadline(peer)


MANY = tuple(PeerId(f"p{number}") for number in range(8))


# -- what is passed on --


def test_what_wins_is_stored_acted_on_and_passed_on() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(claim(BOB, SUSPECT))
    assert mind.members.rank(BOB) == (0, SUSPECT)
    assert mind.changes == [(BOB, SUSPECT, ALIVE)]
    assert mind.news() == (claim(BOB, SUSPECT),)
    (event,) = mind.events()
    assert isinstance(event, MemberChanged)
    assert (event.member.status, event.old) == (SUSPECT, ALIVE)


@pytest.mark.parametrize("status", Status)
def test_what_loses_or_is_no_news_goes_nowhere(status: Status) -> None:
    mind = Mind(ANN, BOB)
    mind.hear(claim(BOB, SUSPECT, 3))
    mind.news()
    mind.events()
    mind.changes.clear()
    mind.hear(claim(BOB, status, 2), alive(BOB, 3), claim(BOB, SUSPECT, 3))
    assert mind.members.rank(BOB) == (3, SUSPECT)
    assert (mind.changes, mind.events(), mind.news()) == ([], [], ())


def test_an_introduction_travels_with_newcomers_and_the_returned_only() -> None:
    mind = Mind(ANN)
    mind.hear(alive(BOB))
    assert mind.news() == (alive(BOB),)
    mind.hear(Rumour(BOB, 1, ALIVE, info(BOB)))
    assert mind.news() == (Rumour(BOB, 1, ALIVE),), "everybody knows it"
    mind.hear(claim(BOB, DEAD, 1))
    mind.news()
    mind.hear(Rumour(BOB, 2, ALIVE))
    assert mind.news() == (alive(BOB, 2),), "others may have forgotten it"


def test_a_newer_claim_replaces_the_older_one_on_its_way() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(claim(BOB, SUSPECT), Rumour(BOB, 1, ALIVE), claim(BOB, SUSPECT, 1))
    assert mind.news() == (claim(BOB, SUSPECT, 1),)


def test_a_higher_incarnation_with_the_same_status_is_news_but_no_event() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(Rumour(BOB, 1, ALIVE))
    assert mind.events() == []
    assert mind.members.rank(BOB) == (1, ALIVE)


def test_a_confirmation_that_counts_is_passed_on() -> None:
    mind = Mind(*MANY)
    sick, first, second = MANY[:3]
    mind.hear(claim(sick, SUSPECT, by=first))
    mind.news()
    mind.hear(claim(sick, SUSPECT, by=second))
    assert mind.news() == (claim(sick, SUSPECT, by=second),)
    mind.hear(claim(sick, SUSPECT, by=second), claim(sick, SUSPECT, by=NOBODY))
    assert mind.news() == ()


# -- strangers --


@pytest.mark.parametrize("status", [ALIVE, SUSPECT, UNRESPONSIVE])
def test_a_stranger_becomes_a_member_by_an_introduction_that_says_it_is_reachable(
    status: Status,
) -> None:
    mind = Mind(ANN)
    mind.hear(Rumour(BOB, 2, status))
    assert mind.members.rank(BOB) is None
    mind.hear(Rumour(BOB, 2, status, info(BOB)))
    assert mind.members.rank(BOB) == (2, status)
    assert mind.changes == [(BOB, status, None)]


@pytest.mark.parametrize("status", [DEAD, LEFT])
def test_the_death_of_a_stranger_leaves_a_tombstone_and_is_told_to_nobody(status: Status) -> None:
    mind = Mind(ANN)
    mind.hear(Rumour(BOB, 2, status, info(BOB)))
    assert BOB not in mind.members
    assert mind.members.rank(BOB) == (2, status)
    assert (mind.news(), mind.events()) == ((), [])
    mind.hear(alive(BOB, 2))
    assert BOB not in mind.members
    mind.hear(alive(BOB, 3))
    assert mind.members.rank(BOB) == (3, ALIVE)


# -- itself --


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("incarnation", [0, 7])
def test_it_says_more_than_any_claim_of_itself(status: Status, incarnation: int) -> None:
    mind = Mind(ANN)
    mind.hear(claim(ME, status, incarnation))
    if (incarnation, status) == (0, ALIVE):
        assert mind.opinions.incarnation == 0
        return
    assert mind.opinions.incarnation == incarnation + 1
    *absent, refuted = mind.events()
    assert [type(event) for event in absent] == ([WasAbsent] if status is not ALIVE else [])
    assert refuted == Refuted(incarnation + 1, status)
    (news,) = mind.news()
    assert (news.peer, news.incarnation, news.status) == (ME, incarnation + 1, ALIVE)
    assert (news.info is not None) is (status in (DEAD, LEFT)), "who was dead is introduced"
    assert ME not in mind.members


def test_to_be_held_for_silent_is_a_sign_of_ill_health() -> None:
    mind = Mind(ANN)
    mind.hear(claim(ME, SUSPECT))
    assert mind.health.score == 1
    mind.hear(claim(ME, SUSPECT), claim(ME, ALIVE, 1))
    assert mind.health.score == 1


# -- own findings --


def test_what_it_finds_itself_is_said_under_its_name_at_the_members_incarnation() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(Rumour(BOB, 4, ALIVE))
    mind.news()
    mind.opinions.accuse(0.0, BOB, SUSPECT)
    assert mind.news() == (claim(BOB, SUSPECT, 4, by=ME),)


def test_strangers_and_the_gone_are_not_accused() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(claim(BOB, DEAD))
    mind.news()
    for peer in (BOB, CID, ME):
        mind.opinions.accuse(0.0, peer, SUSPECT)
    assert mind.news() == ()
    assert mind.members.rank(BOB) == (0, DEAD)


# -- verdicts --


def test_a_suspicion_runs_from_the_longest_to_the_shortest_time() -> None:
    mind = Mind(*MANY)
    sick, *others = MANY
    assert mind.opinions.shortest_suspicion() == 4.0
    deadlines = []
    for accuser in others[:5]:
        mind.hear(claim(sick, SUSPECT, by=accuser), now=1.0)
        deadlines.append(mind.deadline(sick))
    assert deadlines == pytest.approx([25.0, 15.0, 9.15, 5.0, 5.0], abs=0.01)


@pytest.mark.parametrize(("members", "seconds"), [(8, 4.0), (99, 8.0), (999, 12.0)])
def test_the_shortest_suspicion_grows_with_the_logarithm_of_the_cluster(
    members: int, seconds: float
) -> None:
    mind = Mind(*(PeerId(f"p{number}") for number in range(members)))
    assert mind.opinions.shortest_suspicion() == pytest.approx(seconds)


def test_where_too_few_could_confirm_the_shortest_time_holds_at_once() -> None:
    mind = Mind(ANN, BOB, CID)
    mind.hear(claim(BOB, SUSPECT))
    assert mind.deadline(BOB) == pytest.approx(4.0)
    mind = Mind(*MANY[:4])
    mind.hear(claim(MANY[0], SUSPECT))
    assert mind.deadline(MANY[0]) == pytest.approx(24.0)


def test_an_unresponsive_member_has_its_limit_and_no_accuser_shortens_it() -> None:
    mind = Mind(*MANY)
    sick, *others = MANY
    mind.hear(claim(sick, UNRESPONSIVE), now=1.0)
    for accuser in others:
        mind.hear(claim(sick, UNRESPONSIVE, by=accuser), claim(sick, SUSPECT, by=accuser), now=5.0)
    assert mind.deadline(sick) == 1.0 + CONFIG.unresponsive_limit


@pytest.mark.parametrize("end", [(1, ALIVE), (0, DEAD), (0, LEFT)])
@pytest.mark.parametrize("silent", [SUSPECT, UNRESPONSIVE])
def test_refuted_or_settled_there_is_no_verdict(silent: Status, end: tuple[int, Status]) -> None:
    mind = Mind(*MANY)
    mind.hear(claim(MANY[0], silent), claim(MANY[0], end[1], end[0]))
    assert mind.deadline(MANY[0]) is None
    assert mind.opinions.verdicts.next_deadline() is None


def test_a_suspicion_at_a_higher_incarnation_starts_anew() -> None:
    mind = Mind(*MANY)
    sick, *others = MANY
    for accuser in others:
        mind.hear(claim(sick, SUSPECT, by=accuser))
    mind.opinions.verdicts.hasten(sick, 1.0)
    mind.hear(claim(sick, SUSPECT, 1), now=0.5)
    assert mind.deadline(sick) == pytest.approx(24.5)


def test_sockets_that_answered_somebody_end_the_haste() -> None:
    mind = Mind(*MANY)
    mind.hear(claim(MANY[0], SUSPECT))
    mind.opinions.verdicts.hasten(MANY[0], 0.25)
    mind.hear(claim(MANY[0], UNRESPONSIVE), now=0.1)
    assert mind.deadline(MANY[0]) == pytest.approx(60.1)


# -- views --


def test_a_death_in_a_view_is_an_accusation_by_its_sender() -> None:
    mind = Mind(*MANY)
    sick, sender = MANY[:2]
    accused = mind.opinions.hear_view(0.0, (claim(sick, DEAD, by=NOBODY),), sender)
    assert accused == [sick]
    assert mind.members.rank(sick) == (0, SUSPECT)
    assert mind.news() == (claim(sick, SUSPECT, by=sender),)
    assert mind.opinions.is_reported_dead(sick)
    assert not mind.opinions.is_reported_dead(MANY[2])


def test_an_old_death_in_a_view_is_nothing() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(Rumour(BOB, 2, ALIVE))
    mind.news()
    assert mind.opinions.hear_view(0.0, (claim(BOB, DEAD, 1),), ANN) == []
    assert mind.members.rank(BOB) == (2, ALIVE)
    assert not mind.opinions.is_reported_dead(BOB)


def test_a_reported_death_is_off_once_the_member_refuted() -> None:
    mind = Mind(ANN, BOB)
    mind.opinions.hear_view(0.0, (claim(BOB, DEAD),), ANN)
    mind.hear(Rumour(BOB, 1, ALIVE))
    assert not mind.opinions.is_reported_dead(BOB)
    mind.hear(claim(BOB, SUSPECT, 1))
    assert not mind.opinions.is_reported_dead(BOB)


def test_who_is_gone_by_a_view_and_gone_here_stays_so() -> None:
    mind = Mind(ANN, BOB)
    mind.hear(claim(BOB, DEAD))
    assert mind.opinions.hear_view(0.0, (claim(BOB, DEAD, 1),), ANN) == []
    assert mind.members.rank(BOB) == (1, DEAD)


def test_a_goodbye_in_a_view_is_a_goodbye() -> None:
    mind = Mind(ANN, BOB)
    mind.opinions.hear_view(0.0, (claim(BOB, LEFT),), ANN)
    assert mind.members.rank(BOB) == (0, LEFT)


def test_its_own_death_in_a_view_is_refuted() -> None:
    mind = Mind(ANN)
    mind.opinions.hear_view(0.0, (claim(ME, DEAD, 3),), ANN)
    assert mind.opinions.incarnation == 4


# -- bounds --


@pytest.mark.parametrize(
    "bad",
    [
        Rumour(BOB, MAX_INCARNATION + 1, DEAD),
        Rumour(ME, MAX_INCARNATION + 1, SUSPECT),
        Rumour(CID, MAX_INCARNATION + 1, ALIVE, info(CID)),
        Rumour(CID, 0, ALIVE, info(BOB)),
        Rumour(BOB, 1, ALIVE, info(CID)),
        Rumour(NOBODY, 0, ALIVE, info(NOBODY)),
        Rumour(PeerId("x" * 65), 0, DEAD),
        Rumour(BOB, 0, SUSPECT, None, PeerId("x" * 65)),
    ],
)
def test_what_is_malformed_is_counted_and_changes_nothing(bad: Rumour) -> None:
    mind = Mind(ANN, BOB)
    mind.hear(bad)
    assert (mind.changes, mind.events(), mind.news()) == ([], [], ())
    assert mind.opinions.incarnation == 0
    assert mind.members.rank(bad.peer) == (None if bad.peer != BOB else (0, ALIVE))
    assert mind.dropped == {"malformed rumour": 1}


def test_newcomers_beyond_the_table_are_counted_and_told_to_nobody() -> None:
    mind = Mind(ANN, BOB, config=SwimConfig(max_members=2))
    mind.hear(alive(CID))
    assert mind.dropped == {"newcomer beyond max_members": 1}
    assert (mind.changes, mind.events(), mind.news()) == ([], [], ())


ranks = st.tuples(st.integers(0, 3), st.sampled_from(Status))


@given(st.lists(ranks, min_size=1, max_size=8))
def test_what_is_held_is_the_highest_claim(claims: list[tuple[int, Status]]) -> None:
    mind = Mind(*MANY)
    highest = (0, ALIVE)
    for incarnation, status in claims:
        mind.hear(claim(MANY[0], status, incarnation))
        highest = max(highest, (incarnation, status))
        assert mind.members.rank(MANY[0]) == highest
        assert (mind.deadline(MANY[0]) is not None) is (highest[1] in (SUSPECT, UNRESPONSIVE))


def test_deaths_declared_when_nobody_was_left_are_not_told_as_news_later() -> None:
    mind = Mind(*MANY)
    mind.news()
    for peer in MANY:
        mind.hear(claim(peer, DEAD))
    mind.hear(alive(MANY[0], 1), now=300.0)
    assert {(news.peer, news.status) for news in mind.news()} == {(MANY[0], ALIVE)}
