"""Group calls: all shards get the same publication for the same call, or all hear of its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import Mock

import msgspec
import pytest
from registry import Registry

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.groups.calls import CallAnswered, CallFailed, CallMember
from tensorhub_p2p.protocol.groups.claims import generation_of
from tensorhub_p2p.protocol.groups.generation_gate import GenerationGate
from tensorhub_p2p.protocol.groups.group_part import TO_LEADER
from tensorhub_p2p.protocol.groups.leading import CallLeader, LeaderState
from tensorhub_p2p.protocol.groups.selection import Floor, Sources
from tensorhub_p2p.protocol.identity import Generation, Group, Member, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox, Send, earliest
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDecided,
    CallGiveUp,
    CallRecord,
    CallRecorded,
    CallVoid,
    CallWithdraw,
    Decision,
    GenerationRecord,
    GroupMessage,
    MemberLeft,
    Message,
    Question,
    Source,
)

GROUP = Group("policy", "rollout")
LATEST, FIVE, SIX = (Question("replicate", s) for s in ("latest", "5", "6"))
CONFIG = GroupConfig()


def publication(version: int) -> Publication:
    return Publication(0, version, "trainer", Generation(1, 1))


def trainer(shard: int) -> Source:
    """Who has the shard of every version."""
    return Source(PeerId(f"trainer{shard}"), Slot(Group("policy", "trainer"), shard))


@dataclass
class Resolver:
    """Answers when the test says so: `latest` with what is newest then, a number with itself."""

    newest: int | None = 1
    asked: list[tuple[Question, int, Floor]] = field(default_factory=list)
    pinned: int | None = None
    _wanted: tuple[Question, Callable[[float, Decision, Sources], None]] | None = None

    def resolve(
        self,
        now: float,
        question: Question,
        call: int,
        floor: Floor,
        then: Callable[[float, Decision, Sources], None],
    ) -> None:
        self.asked.append((question, call, floor))
        self._wanted = (question, then)

    def stop(self, now: float) -> None:
        self._wanted = self.pinned = None

    def answer(self, now: float) -> None:
        """If there is an answer, give it."""
        if self._wanted is None or self.newest is None:
            return
        (question, then), self._wanted = self._wanted, None
        self.pinned = self.newest if question == LATEST else int(question.selector)
        then(now, Decision(publication(self.pinned), 2), {s: (trainer(s),) for s in range(4)})


@dataclass
class Shard:
    """A member and, on the first one, the leader, as one machine."""

    member: CallMember
    leader: CallLeader | None
    _outbox: Outbox = field(default_factory=Outbox)

    @property
    def outbox(self) -> Outbox:
        for machine in (self.member, self.leader):
            if machine is not None:
                self._outbox.items += machine.outbox.drain()
        return self._outbox

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if not isinstance(message, TO_LEADER):
            self.member.receive(now, sender, message)
        elif self.leader is not None:
            self.leader.receive(now, sender, message)

    def tick(self, now: float) -> None:
        self.member.tick(now)
        if self.leader is not None:
            self.leader.tick(now)

    def next_wakeup(self) -> float | None:
        of_leader = self.leader.next_wakeup() if self.leader is not None else None
        return earliest(self.member.next_wakeup(), of_leader)


@dataclass
class Calls(Registry):
    """The members of one generation, and what their verbs got."""

    shards: int = 3
    got: dict[tuple[int, int], Publication] = field(default_factory=dict)
    """By (shard, call)."""
    sources: dict[int, list[tuple[Source, ...]]] = field(default_factory=lambda: defaultdict(list))
    """By shard: what its answers named to begin with."""
    failed: list[tuple[int, CallFailed]] = field(default_factory=list)
    resolver: Resolver = field(default_factory=Resolver)
    answering: bool = True
    config: GroupConfig = CONFIG

    def __post_init__(self) -> None:
        super().__post_init__()
        members = tuple(Member(s, PeerId(f"{10 + s:016x}"), 1) for s in range(self.shards))
        self.record = GenerationRecord(generation_of(1, members), 0, members, 0)
        self.members: list[CallMember] = []
        for member in members:
            slot = Slot(GROUP, member.shard)
            calls = CallMember(slot, self.config)
            calls.begin(self.record)
            leads = member.shard == self.record.leader
            leader = None
            if leads:
                leader = self.leader = CallLeader(slot, self.record, self.resolver, self.config)
            self.members.append(calls)
            self.machines[member.peer] = [Shard(calls, leader)]

    def on_event(self, peer: PeerId, event: Event) -> None:
        shard = int(peer, 16) - 10
        if isinstance(event, CallAnswered):
            key = (shard, event.call)
            found = event.decision.publication
            self.sources[shard].append(event.sources)
            assert self.got.setdefault(key, found) == found
            for (_, call), other in self.got.items():
                assert call != event.call or other == found, "two answers to one call"
        elif isinstance(event, CallFailed):
            self.failed.append((shard, event))

    def step(self) -> None:
        if self.answering and self.rng.random() < 0.3:
            self.resolver.answer(self.now)
        super().step()

    def ask(self, *questions: Question) -> None:
        for member, question in zip(self.members, questions, strict=True):
            member.ask(self.now, question)

    def answered(self, call: int) -> bool:
        return all((shard, call) in self.got for shard in range(self.shards))

    def call(self, question: Question = LATEST) -> int:
        """A call that succeeds everywhere; returns its number."""
        call = self.members[0].part.call
        self.ask(*[question] * self.shards)
        self.until(lambda: self.answered(call))
        for member in self.members:
            assert member.succeeded(self.now, call)
        return call


# --- answers ---


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(40))
def test_every_shard_gets_the_same_for_the_same_call(seed: int, loss: float) -> None:
    calls = Calls(seed, loss, shards=1 + seed % 4)
    for number in range(1, 5):
        calls.resolver.newest = number * 10
        assert calls.call() == number
        assert calls.got[(0, number)] == publication(number * 10)
    assert not calls.failed


@pytest.mark.parametrize("seed", range(40))
def test_nobody_acts_before_all_have_recorded(seed: int) -> None:
    calls = Calls(seed, 0.1)
    calls.ask(LATEST, LATEST, LATEST)

    def over() -> bool:
        recorded = [m.part.record is not None for m in calls.members]
        assert not calls.got or all(recorded)
        return calls.answered(1)

    calls.until(over)


@pytest.mark.parametrize("seed", range(20))
def test_the_next_call_waits_for_every_member_to_be_done_with_this_one(seed: int) -> None:
    calls = Calls(seed, 0.1)
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(1))
    calls.members[0].succeeded(calls.now, 1)
    calls.members[1].succeeded(calls.now, 1)
    calls.members[0].ask(calls.now, LATEST)
    for _ in range(200):
        calls.step()
    assert (0, 2) not in calls.got
    assert calls.resolver.pinned is not None, "the third one may still need it"
    assert "shard 2 has not" in calls.leader.waiting_for()
    calls.members[2].succeeded(calls.now, 1)
    for member in calls.members[1:]:
        member.ask(calls.now, LATEST)
    calls.until(lambda: calls.answered(2))


def test_a_retry_asks_the_same_call_and_gets_the_same_publication() -> None:
    calls = Calls()
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(1))
    calls.resolver.newest = 9
    calls.members[1].ask(calls.now, LATEST)
    calls.until(lambda: calls.members[1].part.question is None)
    assert calls.got[(1, 1)] == publication(1)


def test_the_floor_is_what_the_group_last_had() -> None:
    calls = Calls()
    calls.resolver.newest = 7
    calls.call()
    calls.call()
    floors = [floor for _, _, floor in calls.resolver.asked]
    assert floors == [(-1, -1), (0, 7)]
    assert {m.floor for m in calls.members} == {(0, 7)}


def test_a_call_that_was_only_recorded_does_not_succeed() -> None:
    calls = Calls()
    calls.answering = False
    calls.ask(LATEST, LATEST, LATEST)
    member = calls.members[1]
    calls.resolver.newest = 3
    calls.until(lambda: bool(calls.resolver.asked))
    calls.resolver.answer(calls.now)
    calls.until(lambda: member.part.record is not None)
    if not member.part.decided:
        assert not member.succeeded(calls.now, 1)


# --- timeouts and other questions ---


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(40))
def test_after_a_timeout_all_may_ask_something_else(seed: int, loss: float) -> None:
    calls = Calls(seed, loss)
    calls.answering = False
    calls.ask(FIVE, FIVE, FIVE)
    for _ in range(100):
        calls.step()
    # They time out one after the other, and the first asks anew while others still wait.
    for member in calls.members:
        member.withdraw()
        member.ask(calls.now, SIX)
        for _ in range(seed % 7):
            calls.step()
    calls.answering = True
    calls.until(lambda: calls.answered(1))
    assert calls.got[(0, 1)] == publication(6)
    assert not calls.failed


@pytest.mark.parametrize("seed", range(20))
def test_after_a_timeout_while_recording_all_may_ask_something_else(seed: int) -> None:
    calls = Calls(seed)
    deaf = calls.machines.pop(calls.record.members[2].peer)
    calls.ask(FIVE, FIVE, FIVE)
    calls.until(lambda: calls.leader.state is LeaderState.RECORDING)
    for _ in range(50):
        calls.step()
    for member in calls.members:
        member.withdraw()
    calls.settle()
    calls.until(lambda: len(calls.steps) < 2)
    calls.machines[calls.record.members[2].peer] = deaf
    calls.ask(SIX, SIX, SIX)
    calls.until(lambda: calls.answered(1))
    assert calls.got[(0, 1)] == publication(6)
    assert not calls.failed


def test_a_question_that_all_withdrew_is_not_decided() -> None:
    calls = Calls()
    calls.answering = False
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: len(calls.leader._asks) == 3)
    for member in calls.members:
        member.withdraw()
    calls.until(lambda: calls.leader.state is LeaderState.OPEN, 100)
    assert calls.resolver._wanted is None
    calls.resolver.newest, calls.answering = 4, True
    calls.call()
    assert calls.got[(0, 1)] == publication(4), "what is newest when they ask again"


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(30))
def test_different_questions_end_the_call_for_all_exactly_once(seed: int, loss: float) -> None:
    calls = Calls(seed, loss)
    calls.ask(*[LATEST, FIVE, FIVE][seed % 2 :], *[LATEST][: seed % 2])
    calls.until(lambda: len(calls.failed) == 3)
    for _ in range(200):
        calls.step()
    assert sorted(shard for shard, _ in calls.failed) == [0, 1, 2]
    assert all(event.diverged and event.call == 1 for _, event in calls.failed)
    assert "shard" in calls.failed[0][1].reason
    assert calls.call() == 2


def test_a_record_of_an_earlier_decision_does_not_count_for_a_later_one() -> None:
    calls = Calls(shards=2)
    leader, generation = calls.leader, calls.record.generation

    def hear(kind: type[GroupMessage], shard: int, *fields: object) -> None:
        sender = calls.record.members[shard].peer
        leader.receive(0.0, sender, kind(GROUP, generation, 0, shard, 1, *fields))

    hear(CallAsk, 0, FIVE, 1)
    calls.resolver.answer(0.0)
    hear(CallAsk, 0, SIX, 2)
    calls.resolver.answer(0.0)
    states = []
    for heard in (1, 2):
        hear(CallRecorded, 0, heard)
        hear(CallRecorded, 1, heard)
        states.append(leader.state)
    assert states == [LeaderState.RECORDING, LeaderState.DECIDED]


def test_only_questions_of_the_same_attempt_must_agree() -> None:
    calls = Calls(shards=2)
    calls.answering = False
    one, other = calls.members
    one.ask(0.0, FIVE)
    one.withdraw()
    one.ask(0.0, SIX)
    other.ask(0.0, FIVE)
    for _ in range(100):
        calls.step()
    assert not calls.failed
    told = calls.leader.waiting_for()
    assert "shard 0 waits with replicate(6), others with replicate(5)" in told
    other.withdraw()
    other.ask(calls.now, SIX)
    calls.answering = True
    calls.until(lambda: calls.answered(1))
    assert calls.got[(0, 1)] == publication(6)


def test_divergence_reaches_a_member_that_has_not_asked_yet() -> None:
    calls = Calls()
    calls.members[0].ask(0.0, LATEST)
    calls.members[1].ask(0.0, FIVE)
    calls.until(lambda: len(calls.failed) == 3)
    assert calls.members[2].part.call == 2


def test_a_decision_that_somebody_acted_on_can_not_be_asked_away() -> None:
    calls = Calls()
    calls.ask(FIVE, FIVE, FIVE)
    calls.until(lambda: calls.answered(1))
    calls.members[1].ask(calls.now, SIX)
    calls.until(lambda: len(calls.failed) == 3)
    assert all(event.diverged for _, event in calls.failed)


def test_a_replica_of_one_shard_may_change_its_mind_also_after_the_decision() -> None:
    calls = Calls(shards=1)
    calls.ask(FIVE)
    calls.until(lambda: calls.answered(1))
    calls.got.clear()
    calls.ask(SIX)
    calls.until(lambda: calls.answered(1))
    assert calls.got[(0, 1)] == publication(6)
    assert calls.members[0].succeeded(calls.now, 1)
    assert not calls.failed


def changed_its_mind(seed: int) -> Calls:
    """A group of one: 5 was decided, then the newest asked for in vain, and then 5 again."""
    calls = Calls(seed, shards=1)
    calls.ask(FIVE)
    calls.until(lambda: calls.answered(1))
    calls.answering = False
    calls.ask(LATEST)
    calls.until(lambda: calls.resolver.asked[-1][0] == LATEST)
    calls.members[0].withdraw()
    calls.until(lambda: calls.leader.state is LeaderState.OPEN)
    calls.answering = True
    calls.got.clear()
    calls.ask(FIVE)
    calls.until(lambda: calls.answered(1))
    return calls


@pytest.mark.parametrize("seed", range(20))
def test_what_a_replica_of_one_shard_asks_again_is_pinned_again(seed: int) -> None:
    assert changed_its_mind(seed).resolver.pinned == 5


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_of_one_shard_that_changed_its_mind_can_give_up(seed: int) -> None:
    calls = changed_its_mind(seed)
    calls.members[0].give_up(calls.now, 1, "no holder has answered")
    assert calls.call() == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_call_can_be_given_up_whatever_its_leader_is_doing(seed: int) -> None:
    """What was given up must end, or its member would never ask for the next one."""
    calls = changed_its_mind(seed)
    calls.answering = False
    member = calls.members[0]
    member.ask(calls.now, LATEST)
    calls.until(lambda: calls.leader.state is LeaderState.RESOLVING)
    member.withdraw()
    member.part.record, member.part.decided = (FIVE, Decision(publication(5), 2)), True
    member.give_up(calls.now, 1, "no holder has answered")
    calls.answering = True
    assert calls.call() == 2


# --- a publication that can't be had ---


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(40))
def test_a_void_fails_one_verb_of_every_other_member(seed: int, loss: float) -> None:
    calls = Calls(seed, loss)
    calls.resolver.newest = 3
    calls.call()
    calls.resolver.newest = 4
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(2))
    calls.members[0].succeeded(calls.now, 2)
    calls.members[1].give_up(calls.now, 2, "no chunk 17")
    if seed % 2:
        calls.members[2].give_up(calls.now, 2, "no chunk 17 either")
    calls.until(lambda: all(m.part.call == 3 and m._voiding is None for m in calls.members))
    for _ in range(100):
        calls.step()
    assert sorted(shard for shard, _ in calls.failed) == ([0] if seed % 2 else [0, 2])
    assert all("no chunk 17" in event.reason for _, event in calls.failed)
    assert {m.floor for m in calls.members} == {(0, 3)}, "restored, also where it succeeded"
    assert not calls.members[0].succeeded(calls.now, 2)
    assert calls.call() == 3


def test_a_void_ends_the_pin() -> None:
    calls = Calls()
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(1))
    assert calls.resolver.pinned == 1
    calls.members[2].give_up(calls.now, 1, "gone")
    calls.until(lambda: calls.resolver.pinned is None, 200)


# --- a group that never asks again ---

SOON = GroupConfig(pin_idle_seconds=20.0)


def sleep(calls: Calls, seconds: float) -> None:
    until = calls.now + seconds
    calls.until(lambda: calls.now >= until)


def decided(shards: int = 3, loss: float = 0.0) -> Calls:
    calls = Calls(shards=shards, loss=loss, config=SOON)
    calls.ask(*[LATEST] * shards)
    calls.until(lambda: calls.answered(1))
    return calls


@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_a_call_that_nobody_comes_back_to_is_void_and_its_pin_ends(loss: float) -> None:
    calls = decided(loss=loss)
    sleep(calls, 15)
    calls.members[0].succeeded(calls.now, 1)
    sleep(calls, 15)
    assert calls.resolver.pinned == 1, "the first one's end was a sign"
    sleep(calls, 15)
    assert calls.resolver.pinned is None
    assert sorted(shard for shard, _ in calls.failed) == [0, 1, 2], "all fail a verb for it, once"
    assert all("shard 1, 2 showed no sign" in event.reason for _, event in calls.failed)
    assert calls.call() == 2


def test_a_pull_that_goes_on_is_a_sign_of_its_call() -> None:
    calls = decided(loss=0.2)
    before = len(calls.sent)
    for chunks in range(60):
        calls.members[2].pulling(calls.now, chunks)
        sleep(calls, 1)
    assert calls.resolver.pinned == 1
    signs = [1 for _, item in calls.sent[before:] if isinstance(item.message, CallAsk)]
    assert len(signs) < 20, "one each few seconds, however fast the chunks come"
    for _ in range(60):
        calls.members[2].pulling(calls.now, chunks)
        sleep(calls, 0.5)
    assert calls.resolver.pinned is None, "a pull that stands still is none"


def test_a_retry_is_a_sign_of_its_call() -> None:
    calls = decided()
    for _ in range(4):
        sleep(calls, 15)
        calls.members[1].ask(calls.now, LATEST)
    assert calls.resolver.pinned == 1


def test_who_is_done_and_asks_for_the_next_call_does_not_keep_the_pin() -> None:
    calls = decided()
    calls.members[0].succeeded(calls.now, 1)
    calls.members[0].ask(calls.now, LATEST)
    sleep(calls, 22)
    assert calls.resolver.pinned is None
    assert [shard for shard, _ in calls.failed].count(0) == 1, "its verb need not wait on"


def test_in_a_group_of_one_nobody_is_told_that_the_pin_ended() -> None:
    calls = decided(shards=1)
    sleep(calls, 22)
    assert calls.resolver.pinned is None
    assert not calls.failed
    assert not calls.members[0].succeeded(calls.now, 1), "a pull that ends now comes too late"
    assert calls.call() == 2


def half_done(seed: int) -> Calls:
    """Three members: call 2 is decided, and done by all but shard 1."""
    calls = Calls(seed)
    calls.resolver.newest = 3
    calls.call()
    calls.resolver.newest = 4
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(2))
    for shard in (0, 2):
        calls.members[shard].succeeded(calls.now, 2)
    calls.settle()
    calls.until(lambda: not calls.steps)
    return calls


def keep_from(calls: Calls, shard: int, kind: type[Message], until: Callable[[], bool]) -> None:
    """Such messages to that shard are lost until then."""
    post, peer = calls._post, calls.record.members[shard].peer

    def loses(sender: PeerId, send: Send) -> None:
        if until() or not isinstance(send.message, kind) or send.to != peer:
            post(sender, send)

    calls._post = loses  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(20))
def test_who_asks_for_the_next_call_hears_of_a_void_whatever_is_lost(seed: int) -> None:
    calls = half_done(seed)
    heard_at = calls.now + 1.0
    keep_from(calls, 2, CallVoid, lambda: calls.now > heard_at)
    calls.members[2].ask(calls.now, LATEST)
    calls.settle()
    calls.members[1].give_up(calls.now, 2, "no chunk 17")
    for _ in range(600):
        calls.step()
    assert calls.now > heard_at
    assert {shard for shard, _ in calls.failed} == {0, 2}
    assert {member.floor for member in calls.members} == {(0, 3)}


@pytest.mark.parametrize("seed", range(20))
def test_what_was_asked_before_a_void_was_heard_of_is_not_asked_after_it(seed: int) -> None:
    calls = half_done(seed)
    calls.answering = False
    heard_at = calls.now + 1.0
    keep_from(calls, 2, CallVoid, lambda: calls.now > heard_at)
    calls.members[1].give_up(calls.now, 2, "no chunk 17")
    calls.until(lambda: calls.leader.state is LeaderState.ENDING)
    calls.members[2].ask(calls.now, FIVE)
    calls.until(lambda: len(calls.failed) == 2 and calls.leader.state is LeaderState.OPEN)
    calls.ask(SIX, SIX, SIX)
    calls.answering = True
    calls.until(lambda: calls.answered(3))
    assert not any(failed.diverged for _, failed in calls.failed)


# --- the generation breaks ---


@pytest.mark.parametrize("dead", range(3))
@pytest.mark.parametrize("seed", range(40))
def test_survivors_finish_what_one_of_them_heard_decided(seed: int, dead: int) -> None:
    calls = Calls(seed, 0.05)
    calls.ask(LATEST, LATEST, LATEST)
    for _ in range(seed):
        calls.step()
    gone = calls.record.members[dead].peer
    calls.crash(gone)
    survivors = [m for m in calls.members if m.slot.shard != dead]
    for _ in range(50):
        calls.step()
    if dead == 0:
        calls.answering = False
    for member in survivors:
        member.broke(calls.now, "it is gone")
        if member.slot.shard == 0:
            calls.leader.broke(calls.now)
    calls.until(lambda: all(m.part.question is None for m in survivors))
    got = [m.slot.shard for m in survivors if (m.slot.shard, 1) in calls.got]
    told = [shard for shard, _ in calls.failed if shard != dead]
    assert sorted([*got, *told]) == [m.slot.shard for m in survivors]
    assert len(got) in (0, 2), "all of them, or none"


def test_a_survivor_that_is_through_with_the_call_still_tells_of_it() -> None:
    calls = Calls()
    leader = calls.record.members[0].peer
    deaf = calls.machines.pop(calls.record.members[2].peer)
    hear = deaf[0].receive

    def receive(now: float, sender: PeerId, message: Message) -> None:
        if not (isinstance(message, CallDecided) and sender == leader):
            hear(now, sender, message)

    deaf[0].receive = receive  # type: ignore[method-assign]
    calls.machines[calls.record.members[2].peer] = deaf
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: (1, 1) in calls.got)
    calls.members[1].succeeded(calls.now, 1)
    calls.crash(leader)
    for member in calls.members[1:]:
        member.broke(calls.now, "the leader is gone")
    calls.until(lambda: (2, 1) in calls.got)
    assert calls.sources[2] == [()], "who held it then is long ago"


# --- whom to begin with ---


def test_each_member_is_told_who_has_its_own_shard() -> None:
    calls = Calls()
    calls.call()
    assert calls.sources == {shard: [(trainer(shard),)] for shard in range(3)}


def test_who_asks_after_the_decision_came_is_told_too_but_no_second_time() -> None:
    """A retry has seen that they are of no use, or they are long gone."""
    calls = Calls(shards=2)
    calls.members[0].ask(calls.now, LATEST)
    calls.until(lambda: calls.members[1].part.decided)
    for _ in range(2):
        calls.members[1].ask(calls.now, LATEST)
        calls.until(lambda: calls.members[1].part.question is None)
    calls.step()
    assert calls.sources[1] == [(trainer(1),), ()]


def test_a_decision_that_names_too_many_is_not_understood() -> None:
    decision = Decision(publication(1), 2)
    for number in (8, 9):
        sources = (trainer(0),) * number
        said = CallDecided(GROUP, Generation(1, 1), 0, 1, 1, LATEST, decision, sources)
        packed = msgspec.msgpack.encode(said)
        if number == 8:
            assert msgspec.msgpack.decode(packed, type=CallDecided) == said
        else:
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(packed, type=CallDecided)


def test_a_decision_of_a_peer_that_knows_of_no_sources_names_none() -> None:
    decision = Decision(publication(1), 2)
    said = CallDecided(GROUP, Generation(1, 1), 0, 1, 1, LATEST, decision)
    *fields, _sources = msgspec.msgpack.decode(msgspec.msgpack.encode(said))
    old = msgspec.msgpack.encode(fields)
    assert msgspec.msgpack.decode(old, type=CallDecided).sources == ()


def test_nothing_is_decided_any_more_once_the_generation_broke() -> None:
    calls = Calls()
    calls.answering = False
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: bool(calls.resolver.asked))
    calls.leader.broke(calls.now)
    calls.resolver.answer(calls.now)
    for _ in range(100):
        calls.step()
    assert calls.leader.state is LeaderState.OVER
    assert not calls.got


def test_a_member_that_knows_of_the_break_records_no_more() -> None:
    calls = Calls()
    calls.answering = False
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: bool(calls.resolver.asked))
    calls.members[2].broke(calls.now, "somebody is gone")
    calls.answering = True
    calls.until(lambda: bool(calls.failed))
    for _ in range(100):
        calls.step()
    assert not calls.got
    assert calls.leader.state is LeaderState.RECORDING


def test_once_the_generation_broke_nobody_is_told_anything_for_ever() -> None:
    calls = Calls()
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(1))
    calls.crash(calls.record.members[0].peer)
    calls.members[1].succeeded(calls.now, 1)
    calls.members[2].give_up(calls.now, 1, "gone")
    for member in calls.members[1:]:
        member.broke(calls.now, "the leader is gone")
    for _ in range(100):
        calls.step()
    assert [member.next_wakeup() for member in calls.members[1:]] == [None, None]


@pytest.mark.parametrize("ends", ["succeeded", "give_up"])
def test_a_pull_that_ends_after_the_break_is_told_to_nobody(ends: str) -> None:
    calls = Calls()
    calls.ask(LATEST, LATEST, LATEST)
    calls.until(lambda: calls.answered(1))
    calls.crash(calls.record.members[0].peer)
    member = calls.members[1]
    member.broke(calls.now, "the leader is gone")
    if ends == "succeeded":
        assert member.succeeded(calls.now, 1)
    else:
        member.give_up(calls.now, 1, "no chunk 17")
    assert member.next_wakeup() is None


@pytest.mark.parametrize("kind", [CallAsk, CallGiveUp, CallRecord])
def test_who_goes_on_in_a_broken_generation_is_told_that_it_is(kind: type[GroupMessage]) -> None:
    calls, outbox = Calls(), Outbox()
    election = Mock(broken=True, record=calls.record)
    gate = GenerationGate(Slot(GROUP, 0), election, outbox)
    fields: dict[type[GroupMessage], dict[str, object]] = {
        CallAsk: {"question": LATEST, "attempt": 1, "floor": (0, 0)},
        CallGiveUp: {"reason": "no chunk 17"},
        CallRecord: {
            "question": LATEST,
            "decision": Decision(publication(1), 2),
            "round": 1,
        },
    }
    said = kind(GROUP, calls.record.generation, 0, 1, 1, **fields[kind])  # type: ignore[arg-type]
    assert gate.admits(0.0, calls.record.members[1].peer, said)
    (told,) = outbox.drain()
    assert isinstance(told, Send)
    assert isinstance(told.message, MemberLeft)


def test_a_leader_whose_generation_broke_makes_nothing_void() -> None:
    """All are told of the break, and fail for that."""
    calls = decided(shards=3)
    calls.leader.broke(calls.now)
    calls.members[1].give_up(calls.now, 1, "no chunk 17")
    for _ in range(50):
        calls.step()
    assert calls.leader.state is LeaderState.DECIDED
    assert not calls.failed


def test_a_new_generation_starts_at_call_one() -> None:
    calls = Calls()
    calls.call()
    member = calls.members[0]
    assert member.part.call == 2
    members = calls.record.members
    member.begin(GenerationRecord(generation_of(2, members), 0, members, 0, (0, 9)))
    assert (member.part.call, member.floor) == (1, (0, 9))


# --- cost ---


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_call_costs_six_messages_a_member_without_loss(shards: int) -> None:
    calls = Calls(shards=shards, tick=1e-4)
    calls.call()
    calls.settle()
    calls.until(lambda: not calls.steps)
    kinds: dict[str, int] = {}
    for _, item in calls.sent:
        assert isinstance(item.message, GroupMessage)
        kinds[type(item.message).__name__] = kinds.get(type(item.message).__name__, 0) + 1
    assert sum(kinds.values()) == 6 * shards, kinds
    assert CallWithdraw.__name__ not in kinds


def asks(calls: Calls) -> int:
    return sum(isinstance(item.message, CallAsk) for _, item in calls.sent)


def test_a_group_that_waits_for_long_asks_rarely() -> None:
    calls = Calls(shards=2)
    calls.answering = False
    calls.ask(LATEST, LATEST)
    sleep(calls, 4)
    before = asks(calls)
    sleep(calls, 60)
    assert asks(calls) - before <= 2 * (60 / CONFIG.ask_retry_limit + 1)


def test_an_answer_that_gets_lost_is_asked_for_soon_however_long_the_call_has_lasted() -> None:
    calls = Calls(shards=2)
    calls.answering = False
    calls.ask(LATEST, LATEST)
    sleep(calls, 60.1)
    hear, lost = calls.members[1].receive, 0

    def receive(now: float, sender: PeerId, message: Message) -> None:
        nonlocal lost
        lost += isinstance(message, CallDecided)
        if not isinstance(message, CallDecided) or lost > 1:
            hear(now, sender, message)

    calls.members[1].receive = receive  # type: ignore[method-assign]
    calls.resolver.answer(calls.now)
    began = calls.now
    calls.until(lambda: calls.answered(1))
    assert lost == 2
    assert calls.now - began < 2 * CONFIG.retry_interval
