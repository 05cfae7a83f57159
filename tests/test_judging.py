"""What a member's silence, and what its sockets show, say of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.membership.health import LocalHealth
from tensorhub_p2p.protocol.membership.judging import DEAF_INTERVALS, ENOUGH_TO_DOUBT, Judge
from tensorhub_p2p.protocol.membership.members import Members
from tensorhub_p2p.protocol.membership.opinions import Opinions
from tensorhub_p2p.protocol.membership.probing import Prober, Silence
from tensorhub_p2p.protocol.membership.suspicion import HOLD
from tensorhub_p2p.protocol.membership.swim_events import Evidence, Unheard
from tensorhub_p2p.protocol.messages import Rumour, Status

ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status
GREETED, ACCEPTED = Evidence.GREETED, Evidence.ACCEPTED
DISCONNECTED, REFUSED = Evidence.DISCONNECTED, Evidence.REFUSED
UNREACHABLE = Evidence.UNREACHABLE
ME, SICK, *OTHERS = (PeerId(name) for name in ("me", "sick", "ann", "bob", "cid", "dan"))
CONFIG = SwimConfig()


def info(peer: PeerId, address: str = "") -> PeerInfo:
    return PeerInfo(peer, peer, "here", (address or f"{peer}:1",))


class Court:
    """A judge with all that it judges by; SICK and OTHERS are members, and somebody was heard."""

    def __init__(self, *others: PeerId) -> None:
        self.members = Members(100)
        self.outbox = Outbox()
        health = LocalHealth(CONFIG.max_local_health)
        self.prober = Prober(CONFIG, random.Random(1), self.members, health)
        self.opinions = Opinions(
            info(ME), CONFIG, self.members, self.outbox, Counter(), health, lambda *_: None
        )
        self.judge = Judge(info(ME), CONFIG, self.members, self.prober, self.opinions, self.outbox)
        for peer in (SICK, *(others or OTHERS)):
            self.hear(Rumour(peer, 0, ALIVE, info(peer)))
        self.outbox.drain()
        self.judge.heard(0.0, OTHERS[0])

    def hear(self, rumour: Rumour, now: float = 0.0) -> None:
        self.opinions.hear(now, rumour)

    def shows(self, *evidence: Evidence, now: float = 0.0) -> None:
        for each in evidence:
            self.judge.evidence(now, SICK, each)

    def silent(
        self,
        now: float = 0.0,
        *,
        finding: Evidence | None = None,
        target: bool = False,
        anybody: bool = True,
    ) -> None:
        self.judge.silence(now, Silence(SICK, finding, target, anybody))

    @property
    def status(self) -> Status | None:
        rank = self.members.rank(SICK)
        return rank[1] if rank is not None else None

    @property
    def deadline(self) -> float | None:
        return self.opinions.verdicts.deadline(SICK)

    def is_probed(self) -> bool:
        return any(to == SICK for to, _ in self.prober.sends)


# -- silence --


def test_the_silent_are_suspected() -> None:
    court = Court()
    court.silent()
    assert court.status is SUSPECT


@pytest.mark.parametrize("finding", [GREETED, ACCEPTED])
def test_those_whose_sockets_answer_are_unresponsive(finding: Evidence) -> None:
    court = Court()
    court.silent(finding=finding, anybody=False)
    assert court.status is UNRESPONSIVE
    assert court.deadline == CONFIG.unresponsive_limit


@pytest.mark.parametrize("finding", [REFUSED, DISCONNECTED, UNREACHABLE])
def test_other_findings_say_nothing_for_the_silent(finding: Evidence) -> None:
    court = Court()
    court.silent(finding=finding)
    assert court.status is SUSPECT


def test_one_that_sends_but_does_not_answer_is_not_accused_whatever_else_is_known() -> None:
    court = Court()
    court.silent(target=True, finding=GREETED)
    assert court.status is ALIVE
    assert court.outbox.drain() == [Unheard(SICK)]


def test_whom_a_view_holds_for_dead_and_who_is_silent_here_too_is_dead() -> None:
    court = Court()
    court.opinions.hear_view(0.0, (Rumour(SICK, 0, DEAD),), OTHERS[0])
    assert court.status is SUSPECT
    court.silent(1.0)
    assert court.status is DEAD


def test_a_reported_death_is_overruled_by_sockets_and_by_a_refutation() -> None:
    court = Court()
    court.opinions.hear_view(0.0, (Rumour(SICK, 0, DEAD),), OTHERS[0])
    court.silent(1.0, finding=GREETED)
    assert court.status is UNRESPONSIVE
    court = Court()
    court.opinions.hear_view(0.0, (Rumour(SICK, 0, DEAD),), OTHERS[0])
    court.hear(Rumour(SICK, 1, ALIVE))
    court.silent(1.0)
    assert court.status is SUSPECT


# -- a judge that may be the sick one --


def test_while_nobody_is_heard_nobody_is_accused() -> None:
    for now, accused in ((0.9, True), (1.0, False), (29.9, False), (30.0, True)):
        court = Court()
        court.silent(now, anybody=False)
        assert court.status is (SUSPECT if accused else ALIVE), now


def test_adopted_members_count_as_heard_of_then() -> None:
    court = Court()
    court.judge.adopt(100.0)
    court.silent(102.0, anybody=False)
    assert court.status is ALIVE


def test_health_that_deafness_ruined_does_not_end_the_doubt() -> None:
    court = Court()
    court.opinions._health.note(+7)
    court.silent(2.0, anybody=False)
    assert court.status is ALIVE


def test_a_word_during_the_probe_was_enough() -> None:
    court = Court()
    court.silent(5.0, anybody=True)
    assert court.status is SUSPECT


def test_among_few_others_silence_is_no_sign_of_deafness() -> None:
    court = Court(*OTHERS[: ENOUGH_TO_DOUBT - 2])
    court.silent(5.0, anybody=False)
    assert court.status is SUSPECT


def test_while_nobody_is_heard_no_verdict_is_spoken() -> None:
    court = Court()
    court.hear(Rumour(SICK, 0, SUSPECT))
    court.opinions.verdicts.hasten(SICK, 5.0)
    court.judge.pronounce(5.0)
    assert court.status is SUSPECT
    court.judge.heard(5.5, OTHERS[0])
    court.judge.pronounce(5.9)
    assert court.status is SUSPECT, "it looks again a second later"
    court.judge.pronounce(5.0 + HOLD)
    assert court.status is DEAD


def test_verdicts_are_held_only_when_nobody_was_heard_for_some_intervals_and_not_for_ever() -> None:
    for now, held in ((DEAF_INTERVALS - 0.1, False), (DEAF_INTERVALS, True), (30.0, False)):
        court = Court()
        court.hear(Rumour(SICK, 0, SUSPECT))
        court.opinions.verdicts.hasten(SICK, 1.0)
        court.judge.pronounce(now)
        assert court.status is (SUSPECT if held else DEAD), now


# -- sockets --


def test_the_end_of_a_watch_only_probes() -> None:
    court = Court()
    court.shows(DISCONNECTED)
    assert court.status is ALIVE
    assert court.is_probed()


def test_a_refusal_accuses_and_leaves_a_moment_to_refute() -> None:
    court = Court()
    court.shows(DISCONNECTED, REFUSED, now=10.0)
    assert court.status is SUSPECT
    assert court.deadline == 10.0 + CONFIG.refused_suspicion
    assert court.is_probed()


def test_a_refusal_ends_the_patience_with_the_unresponsive() -> None:
    court = Court()
    court.hear(Rumour(SICK, 0, UNRESPONSIVE))
    court.shows(REFUSED, now=10.0)
    assert court.status is UNRESPONSIVE
    assert court.deadline == 10.0 + CONFIG.refused_suspicion


def test_out_of_reach_and_suspect_is_soon_dead() -> None:
    court = Court()
    court.shows(UNREACHABLE)
    assert court.status is ALIVE, "silence must be seen, too"
    court.hear(Rumour(SICK, 0, SUSPECT))
    court.shows(UNREACHABLE, now=10.0)
    assert court.deadline == 10.0 + CONFIG.unreachable_suspicion


def test_one_dial_out_of_reach_does_not_outweigh_sockets_that_answered_others() -> None:
    court = Court()
    court.hear(Rumour(SICK, 0, SUSPECT))
    court.shows(UNREACHABLE)
    court.hear(Rumour(SICK, 0, UNRESPONSIVE))
    assert court.deadline == CONFIG.unresponsive_limit
    court.shows(DISCONNECTED)
    court.shows(UNREACHABLE, now=10.0)
    assert court.deadline == CONFIG.unresponsive_limit
    court.shows(UNREACHABLE, now=12.0)
    assert court.deadline == 12.0 + CONFIG.unreachable_suspicion, "the second time in a row"


@pytest.mark.parametrize("answer", [GREETED, ACCEPTED])
@pytest.mark.parametrize("hard", [REFUSED, UNREACHABLE])
def test_sockets_that_answer_again_take_hard_evidence_back(
    hard: Evidence, answer: Evidence
) -> None:
    court = Court()
    court.hear(Rumour(SICK, 0, SUSPECT))
    court.shows(hard)
    court.shows(answer)
    assert court.status is UNRESPONSIVE
    assert court.deadline == CONFIG.unresponsive_limit


def test_a_watch_that_ended_and_is_not_greeted_anew_is_of_one_that_stands_still() -> None:
    court = Court()
    court.shows(DISCONNECTED)
    court.shows(ACCEPTED, now=0.5)
    assert court.status is UNRESPONSIVE
    assert court.prober.tick(10.0) == [], "there is nothing left to find out"


@pytest.mark.parametrize("shown", [(ACCEPTED,), (DISCONNECTED, GREETED), (GREETED, ACCEPTED)])
def test_nothing_less_settles_it_before_the_probes_end(shown: tuple[Evidence, ...]) -> None:
    court = Court()
    court.shows(*shown)
    assert court.status is ALIVE


@pytest.mark.parametrize("answer", [GREETED, ACCEPTED])
def test_sockets_at_an_address_where_somebody_else_lives_now_say_nothing(
    answer: Evidence,
) -> None:
    court = Court()
    heir = PeerId("heir")
    court.hear(Rumour(heir, 0, ALIVE, info(heir, f"{SICK}:1")))
    court.shows(REFUSED)
    deadline = court.deadline
    court.shows(answer)
    assert court.deadline == deadline
    ((silence),) = [s for s in court.prober.tick(10.0) if s.target == SICK]
    assert silence.finding is not answer
