"""What checks of whole clusters count as a failure, and what they excuse: facts made by hand."""

from __future__ import annotations

from itertools import count
from math import inf

import pytest

from tensorhub_p2p.errors import Timeout
from tensorhub_p2p.protocol.identity import Generation, Group, Member, Publication, Slot
from tensorhub_p2p.protocol.messages import GenerationRecord, Question, Retain, RetainSummary
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster import checks
from tensorhub_p2p.sim.cluster.accounts import ClusterCheck
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    Ended,
    Fact,
    HandleId,
    InForce,
    LetGo,
    Lost,
    Offered,
    Opened,
    Probed,
    Withdraws,
)
from tensorhub_p2p.sim.cluster.programs import Job
from tensorhub_p2p.sim.cluster.stage import ClusterSim

LATEST, OLDER_ONE = (Question("replicate", selector) for selector in ("latest", "latest-1"))
JOBS = [Job("turn", "t", 0, 1, 1), Job("rollout", "r", 0, 1, 1)]


class Facts:
    """Tells one check what happened, at the times that the test says."""

    def __init__(self, kind: type[ClusterCheck], *, zones: int = 1) -> None:
        self.sim = ClusterSim(4, JOBS, zones=zones)
        self.check = kind(self.sim)
        self._numbers = count(1)

    def handle(self, place: int, replica: str) -> HandleId:
        slot = Slot(Group("policy", replica), 0)
        return HandleId(self.sim.peers[place], slot, next(self._numbers))

    def generation(self, handle: HandleId, counter: int = 1) -> GenerationRecord:
        members = (Member(0, handle.peer, 1),)
        return GenerationRecord(Generation(counter, 7), 0, members, 0)

    def tell(self, now: float, *facts: Fact) -> None:
        for fact in facts:
            self.check.on_fact(now, fact)

    def publish(self, handle: HandleId, version: int, began: float, ended: float) -> Publication:
        replica = handle.slot.group.replica
        publication = Publication(0, version, replica, Generation(1, 7))
        self.begin(began, handle, "publish", version=version)
        self.tell(began, Offered(handle, version, (f"v{version}",)))
        self.tell(ended, Ended(handle, 0, "publish", None, publication))
        return publication

    def begin(
        self,
        now: float,
        handle: HandleId,
        verb: str,
        *,
        version: int = -1,
        question: Question | None = None,
    ) -> None:
        self.tell(now, Began(handle, 0, verb, now + 4.0, version, question))

    def answer(
        self, handle: HandleId, publication: Publication, began: float, now: float, call: int = 1
    ) -> None:
        """The group, of one, gets this for its call."""
        self.begin(began, handle, "replicate", question=LATEST)
        record = self.generation(handle)
        self.tell(now, Answered(handle, 0, LATEST, publication, 1, record, call))

    def let_go(self, now: float, handle: HandleId, publication: Publication) -> None:
        self.begin(now, handle, "unpublish")
        self.tell(now, Withdraws(handle, publication))
        self.tell(now + 0.1, LetGo(handle, publication))


# --- what is kept for calls ---


def let_go_before_it_was_answered(facts: Facts) -> tuple[HandleId, HandleId, Publication]:
    trainer, rollout = facts.handle(0, "t"), facts.handle(1, "r")
    publication = facts.publish(trainer, 3, 1.0, 1.1)
    facts.let_go(2.0, trainer, publication)
    return trainer, rollout, publication


def test_an_answer_that_nobody_has_any_more_is_a_failure() -> None:
    facts = Facts(checks.KeptForCalls)
    _, rollout, publication = let_go_before_it_was_answered(facts)
    with pytest.raises(Violation, match="the last copy was let go"):
        facts.answer(rollout, publication, 1.9, 2.2)


def test_a_version_whose_retraction_has_begun_is_kept_for_nobody() -> None:
    facts = Facts(checks.KeptForCalls)
    trainer, rollout, publication = let_go_before_it_was_answered(facts)
    facts.begin(1.5, trainer, "retract", version=3)
    facts.answer(rollout, publication, 1.9, 2.2)


def test_what_its_user_forced_away_is_excused() -> None:
    facts = Facts(checks.KeptForCalls)
    trainer, rollout, publication = let_go_before_it_was_answered(facts)
    facts.tell(2.1, Lost(trainer, publication, "forced"))
    facts.answer(rollout, publication, 1.9, 2.2)


@pytest.mark.parametrize("cut", [True, False])
def test_who_is_silent_is_excused_only_if_a_cut_made_him_so(cut: bool) -> None:
    facts = Facts(checks.KeptForCalls)
    network, (one, other, *_) = facts.sim.network, facts.sim.peers
    if cut:
        network.partition([one], [other, *facts.sim.peers[2:]])
    else:
        network.pause(one)
    network.run_for(8.0)
    assert one not in facts.sim.process(other).responsive()
    _, rollout, publication = let_go_before_it_was_answered(facts)
    if cut:
        facts.answer(rollout, publication, 1.9, 2.2)
    else:
        with pytest.raises(Violation):
            facts.answer(rollout, publication, 1.9, 2.2)


@pytest.mark.parametrize("retracted", [True, False])
def test_a_pull_under_way_holds_back_the_last_copy_unless_it_is_retracted(retracted: bool) -> None:
    facts = Facts(checks.KeptForCalls)
    trainer, rollout = facts.handle(0, "t"), facts.handle(1, "r")
    publication = facts.publish(trainer, 3, 1.0, 1.1)
    facts.answer(rollout, publication, 1.2, 1.3)
    if retracted:
        facts.begin(1.5, facts.handle(2, "other"), "retract", version=3)
        facts.let_go(2.0, trainer, publication)
    else:
        with pytest.raises(Violation, match="was told of"):
            facts.let_go(2.0, trainer, publication)


# --- what is retained ---


@pytest.mark.parametrize("heard", [RetainSummary("policy", 2), RetainSummary("policy", 1), None])
def test_what_another_zone_wants_counts_from_when_the_process_has_heard_of_it(
    heard: RetainSummary | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts(checks.RetainedStays, zones=2)
    trainer, retainer = facts.handle(0, "t"), facts.handle(1, "r")
    known = [("zone-1", heard)] if heard is not None else []
    process = facts.sim.process(trainer.peer)
    monkeypatch.setattr(process, "wanted_elsewhere", lambda _model: known)
    facts.tell(0.5, Opened(retainer, False, Retain(2)))
    publication = facts.publish(trainer, 3, 1.0, 1.1)
    if heard is not None and heard.newest >= 2:
        with pytest.raises(Violation, match="gave up the last copy"):
            facts.let_go(1.2, trainer, publication)
    else:
        facts.let_go(1.2, trainer, publication)


# --- what is found after a cut ---


def cut_until(facts: Facts, time: float) -> tuple[HandleId, HandleId]:
    facts.check.together_since = time
    return facts.handle(0, "t"), facts.handle(1, "r")


def calls(facts: Facts, rollout: HandleId, publication: Publication, since: float) -> None:
    """Enough of them to count."""
    for number in range(12):
        began = since + number
        facts.answer(rollout, publication, began, began + 0.5, call=int(began))
        facts.tell(began + 0.5, Ended(rollout, 0, "replicate", None, publication))


def test_an_older_answer_is_excused_until_the_sides_of_a_cut_see_each_other() -> None:
    facts = Facts(checks.Linear)
    trainer, rollout = cut_until(facts, 10.0)
    old = facts.publish(trainer, 1, 1.0, 1.1)
    new = facts.publish(trainer, 2, 2.0, 2.1)
    facts.answer(rollout, old, 9.0, 11.0)
    facts.tell(11.0, Ended(rollout, 0, "replicate", None, old))
    calls(facts, rollout, new, 12.0)
    facts.check.conclude()


def test_what_was_published_in_a_cut_is_found_by_calls_that_begin_after_it() -> None:
    facts = Facts(checks.Linear)
    trainer, rollout = cut_until(facts, 10.0)
    old = facts.publish(trainer, 1, 1.0, 1.1)
    facts.publish(trainer, 2, 2.0, 2.1)
    calls(facts, rollout, old, 10.5)
    with pytest.raises(Violation, match="not linearizable"):
        facts.check.conclude()


def test_a_run_in_which_nobody_asks_after_the_cut_proves_nothing() -> None:
    facts = Facts(checks.Linear)
    cut_until(facts, inf)
    assert facts.check.waiting
    with pytest.raises(Violation, match="0 calls"):
        facts.check.conclude()


# --- what a group remembers ---


def had(facts: Facts, handle: HandleId, publication: Publication, at: float) -> None:
    facts.tell(at, InForce(handle, facts.generation(handle)))
    facts.answer(handle, publication, at, at)
    facts.tell(at, Ended(handle, 0, "replicate", None, publication))


def next_one_gets(facts: Facts, publication: Publication, at: float) -> None:
    handle = facts.handle(2, "r")
    record = facts.generation(handle, counter=2)
    facts.tell(at, InForce(handle, record))
    facts.tell(at, Answered(handle, 0, LATEST, publication, 1, record, 1))


NEWER, OLDER = (Publication(0, version, "t", Generation(1, 7)) for version in (5, 4))


def test_those_who_follow_all_members_of_a_group_are_not_answered_less() -> None:
    facts = Facts(checks.Remembers)
    had(facts, facts.handle(1, "r"), NEWER, 1.0)
    next_one_gets(facts, NEWER, 6.0)
    with pytest.raises(Violation, match="all of g1"):
        next_one_gets(facts, OLDER, 6.0)


def test_what_the_last_seconds_brought_may_be_forgotten_with_all_members() -> None:
    facts = Facts(checks.Remembers)
    had(facts, facts.handle(1, "r"), NEWER, 1.0)
    next_one_gets(facts, OLDER, 4.0)


def test_what_a_member_could_not_bring_does_not_count() -> None:
    facts = Facts(checks.Remembers)
    member = facts.handle(1, "r")
    facts.tell(1.0, InForce(member, facts.generation(member)))
    facts.answer(member, NEWER, 1.0, 1.0)
    facts.tell(1.0, Ended(member, 0, "replicate", Timeout("too late")))
    next_one_gets(facts, OLDER, 6.0)


# --- one answer, of the lowest replica ---


def asks(
    facts: Facts, handle: HandleId, now: float, question: Question, got: Publication | None
) -> None:
    """In call 1; without an answer it runs into its deadline."""
    facts.begin(now, handle, "replicate", question=question)
    if got is not None:
        facts.tell(now, Answered(handle, 0, question, got, 1, facts.generation(handle), 1))


@pytest.mark.parametrize("between", [OLDER, None])
def test_a_group_of_one_that_asked_something_else_may_be_answered_anew(
    between: Publication | None,
) -> None:
    facts = Facts(checks.SameAnswer)
    handle = facts.handle(1, "r")
    asks(facts, handle, 1.0, LATEST, OLDER)
    asks(facts, handle, 2.0, OLDER_ONE, between)
    asks(facts, handle, 3.0, LATEST, NEWER)
    with pytest.raises(Violation, match="call 1 of"):
        asks(facts, handle, 4.0, LATEST, OLDER)


@pytest.mark.parametrize("case", ["whole", "came later", "was withdrawn", "in another zone"])
def test_a_higher_replica_answers_only_while_the_lower_one_is_not_seen_whole(case: str) -> None:
    facts = Facts(checks.LowestStands, zones=2 if case == "in another zone" else 1)
    lower, rollout = facts.handle(0, "t"), facts.handle(1, "r")
    standing = facts.publish(lower, 3, 1.0, 2.5 if case == "came later" else 1.1)
    if case == "was withdrawn":
        facts.tell(1.5, Withdraws(lower, standing))
    higher = Publication(0, 3, "u", Generation(1, 7))
    if case == "whole":
        with pytest.raises(Violation, match="was whole all the time"):
            facts.answer(rollout, higher, 2.0, 2.6)
    else:
        facts.answer(rollout, higher, 2.0, 2.6)


def test_a_call_that_was_decided_while_there_were_cuts_is_not_judged_later() -> None:
    """A member that asks late is told what its group decided, whatever has become whole since."""
    facts = Facts(checks.LowestStands)
    lower, rollout = facts.handle(0, "t"), facts.handle(1, "r")
    higher = Publication(0, 3, "u", Generation(1, 7))
    facts.check.together_since = 2.0
    facts.answer(rollout, higher, 1.0, 1.1)
    facts.publish(lower, 3, 2.0, 2.1)
    facts.answer(rollout, higher, 2.2, 2.3)
    with pytest.raises(Violation, match="was whole all the time"):
        facts.answer(rollout, higher, 2.4, 2.5, call=2)


# --- what the directory holds ---


def test_two_registers_of_one_writer_are_judged_apart() -> None:
    facts = Facts(checks.NotLost)
    writer, reader, *_ = facts.sim.peers
    for name, value in (("one", 9), ("other", 1)):
        for ended in (False, True):
            facts.check.on_probe(1.0, Probed(writer, 1.0, name, value, ended))
    values = {(writer, "one"): 9, (writer, "other"): 1}
    facts.check.on_probe(2.0, Probed(reader, 1.5, values=values))
    with pytest.raises(Violation, match="never wrote it"):
        facts.check.on_probe(2.0, Probed(reader, 1.5, values={**values, (writer, "other"): 9}))
