"""Comparing views: when, with whom, and how much of them travels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.envelope import pack
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, Send, SendTo
from tensorhub_p2p.protocol.membership.anti_entropy import (
    ANSWER_INTERVALS,
    MAX_ANSWERS,
    MAX_ASKED,
    MAX_TOLD,
    NAMED,
    SETTLED,
    SMALL_CLUSTER,
    AntiEntropy,
)
from tensorhub_p2p.protocol.membership.hints import Hints
from tensorhub_p2p.protocol.membership.members import PARTS, Members, MemberView, part_of
from tensorhub_p2p.protocol.membership.summaries import Summaries
from tensorhub_p2p.protocol.messages import (
    Message,
    PushPull,
    PushPullReply,
    Rumour,
    Status,
    VersionHint,
    ViewDigest,
    ZoneSummary,
)

ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status
ME, ANN, BOB = (PeerId(name) for name in ("me", "ann", "bob"))
CONFIG = SwimConfig()


def info(peer: PeerId) -> PeerInfo:
    return PeerInfo(peer, peer, "here", (f"{peer}:1",))


OWN = Rumour(ME, 0, ALIVE, info(ME))


class Desk:
    """The comparisons of one peer, with its view."""

    def __init__(self, *peers: PeerId, config: SwimConfig = CONFIG, seed: int = 1) -> None:
        self.members = Members(100_000)
        for peer in peers:
            self.holds(peer, ALIVE)
        self.hints = Hints(10)
        self.summaries = Summaries(10, Counter())
        self.outbox = Outbox()
        self.views = AntiEntropy(
            info(ME),
            lambda: OWN,
            self.view,
            lambda: list(self.members.part_fingerprints),
            self.members,
            self.hints,
            self.summaries,
            config,
            random.Random(seed),
            self.outbox,
        )

    def holds(self, peer: PeerId, status: Status) -> None:
        self.members.put(MemberView(info(peer), 0, status, 0.0))

    def view(self, parts: Collection[int]) -> tuple[Rumour, ...]:
        members = self.members.of_parts(parts) if parts else self.members
        return (OWN, *(Rumour(v.peer_id, v.incarnation, v.status, v.info) for v in members))

    def sent(self) -> list[tuple[str, Message]]:
        items = self.outbox.drain()
        return [
            (item.to if isinstance(item, Send) else item.address, item.message)
            for item in items
            if isinstance(item, (Send, SendTo))
        ]

    def digest(self) -> tuple[int, ...]:
        return tuple(self.members.part_fingerprints)


def peers(number: int) -> list[PeerId]:
    return [PeerId(f"{each:016x}") for each in range(number)]


# -- when --


@pytest.mark.parametrize(
    ("size", "scale"), [(2, 1), (SMALL_CLUSTER, 1), (33, 2), (64, 2), (128, 3), (1000, 6)]
)
def test_the_interval_grows_with_each_doubling_of_the_cluster(size: int, scale: int) -> None:
    for seed in range(10):
        desk = Desk(*peers(size), seed=seed)
        desk.views.start(100.0)
        due = desk.views.next_wakeup()
        assert due is not None
        jittered = (due - 100.0) / CONFIG.push_pull_interval
        assert 0.5 * scale <= jittered <= 1.5 * scale


def test_each_interval_it_asks_one_member() -> None:
    desk = Desk(ANN, BOB)
    desk.views.start(0.0)
    asked = []
    for _ in range(20):
        due = desk.views.next_wakeup()
        assert due is not None
        desk.views.tick(due - 0.01)
        assert desk.sent() == []
        desk.views.tick(due)
        ((to, message),) = desk.sent()
        assert message == ViewDigest(desk.digest())
        asked.append(to)
    assert set(asked) == {ANN, BOB}


def test_it_is_due_at_once_after_a_pause_but_only_if_there_is_anybody() -> None:
    desk = Desk(ANN)
    desk.views.hasten(5.0)
    assert desk.views.next_wakeup() is None
    desk.views.start(5.0)
    desk.views.hasten(5.0)
    assert desk.views.next_wakeup() == 5.0


def test_starting_twice_moves_nothing() -> None:
    desk = Desk(ANN)
    desk.views.start(0.0)
    due = desk.views.next_wakeup()
    desk.views.start(10.0)
    assert desk.views.next_wakeup() == due


def test_a_mismatch_is_followed_up_but_not_in_storms() -> None:
    desk = Desk(ANN)

    def follows(now: float, ours: int, theirs: int) -> bool:
        desk.views.mismatch(now, ANN, ours, theirs)
        return bool(desk.sent())

    assert not follows(0.0, 5, 5)
    assert not follows(0.0, 5, 0), "it doesn't say"
    assert follows(0.0, 5, 6)
    assert not follows(CONFIG.mismatch_interval - 0.01, 5, 6)
    assert follows(CONFIG.mismatch_interval, 5, 6)


# -- the three steps --


def test_equal_views_cost_one_message_however_large_they_are() -> None:
    desk, other = Desk(*peers(3000)), Desk(*peers(3000))
    desk.views.compare_with(ANN)
    ((_, digest),) = desk.sent()
    _, body = pack(digest)
    assert len(bytes(body)) < 700
    assert isinstance(digest, ViewDigest)
    assert other.views.answer_digest(0.0, ME, digest.parts, digest.news)
    assert other.sent() == []


def test_of_different_views_only_the_parts_that_differ_travel() -> None:
    everyone = peers(3000)
    desk, other = Desk(*everyone), Desk(*everyone)
    odd = everyone[7]
    other.holds(odd, DEAD)
    desk.views.compare_with(ANN)
    ((_, digest),) = desk.sent()
    assert isinstance(digest, ViewDigest)
    assert other.views.answer_digest(0.0, ME, digest.parts, digest.news)
    ((to, answer),) = other.sent()
    assert to == ME
    assert isinstance(answer, PushPull)
    assert answer.parts == (part_of(odd),)
    assert {part_of(r.peer) for r in answer.view[1:]} == {part_of(odd)}
    assert Rumour(odd, 0, DEAD, info(odd)) in answer.view
    assert len(answer.view) < 3000 / PARTS * 2
    desk.views.reply(0.0, ANN, answer)
    ((to, reply),) = desk.sent()
    assert to == ANN
    assert isinstance(reply, PushPullReply)
    assert reply.parts == answer.parts
    assert len(reply.view) == len(answer.view)
    assert not reply.hello


def test_hints_and_summaries_travel_with_both_halves() -> None:
    desk = Desk(ANN)
    hint, summary = VersionHint("model", 0, 7), ZoneSummary("zone", 1, ())
    desk.hints.note(0.0, hint)
    desk.summaries.note(summary)
    desk.views.answer_digest(0.0, ANN, (1,) * PARTS, 0)
    desk.views.reply(0.0, ANN, PushPull(info(ANN), ()))
    for _, message in desk.sent():
        assert isinstance(message, (PushPull, PushPullReply))
        assert message.hints == (hint,)
        assert message.summaries == (summary,)


def test_digests_are_answered_a_few_times_an_interval_whoever_sends_them() -> None:
    desk = Desk(ANN)
    answered = [desk.views.answer_digest(1.0, peer, (1,) * PARTS, 0) for peer in peers(20)]
    assert answered == [True] * MAX_ANSWERS + [False] * (20 - MAX_ANSWERS)
    assert len(desk.sent()) == MAX_ANSWERS
    assert desk.views.answer_digest(1.0 + 2 * CONFIG.gossip_interval, ANN, (1,) * PARTS, 0)


@pytest.mark.parametrize("length", [0, 1, PARTS - 1, PARTS + 1])
def test_a_digest_of_another_length_is_not_answered(length: int) -> None:
    desk = Desk(ANN)
    assert not desk.views.answer_digest(0.0, ANN, (1,) * length, 0)
    assert desk.sent() == []


def test_those_who_take_others_for_owners_are_asked_a_few_an_interval_whoever_they_are() -> None:
    desk = Desk(ANN)
    for peer in peers(20):
        desk.views.differs(1.0, peer)
    assert [to for to, _ in desk.sent()] == peers(MAX_ANSWERS)
    desk.views.differs(1.0 + 2 * CONFIG.gossip_interval, ANN)
    assert desk.sent() == [(ANN, ViewDigest(desk.digest()))]


@pytest.mark.parametrize("asked", [(), tuple(range(PARTS))])
@pytest.mark.parametrize("joining", [False, True])
def test_whole_views_are_told_up_to_a_bound_however_many_ask(
    asked: tuple[int, ...], joining: bool
) -> None:
    desk = Desk(*peers(1000))
    desk.hints.note(0.0, VersionHint("model", 0, 7))
    told = []
    for _ in range(100):
        desk.views.reply(1.0, ANN, PushPull(info(ANN), (), joining, dialled="me:1", parts=asked))
        ((_, reply),) = desk.sent()
        assert isinstance(reply, PushPullReply)
        assert reply.dialled == "me:1"
        told.append(len(reply.view))
        assert reply.hello is (told[-1] < 1001), "it says so if it isn't whole"
        assert bool(reply.hints) is not reply.hello
    assert told == [1001] * 9 + [1 + (NAMED if joining else 0)] * 91, "who joins may ask others"
    assert sum(told[:8]) < MAX_TOLD < sum(told[:9])
    assert not desk.views.answer_digest(1.0, ANN, (1,) * PARTS, 0), "nor in answer to digests"
    later = 1.0 + 2 * CONFIG.gossip_interval
    assert desk.views.answer_digest(later, ANN, (1,) * PARTS, 0)
    ((_, answer),) = desk.sent()
    assert isinstance(answer, PushPull)
    assert len(answer.view) == 1001


def test_a_busy_peer_sends_those_that_join_to_some_that_live_and_have_joined_themselves() -> None:
    young, silent, old = PeerId("young"), PeerId("silent"), peers(NAMED - 1)
    desk = Desk(*peers(1000), ANN)
    desk.views.reply(1.0, ANN, PushPull(info(ANN), (), True, hello=True))
    for _ in range(8):
        desk.views.reply(1.0, ANN, PushPull(info(ANN), (), True, hello=True))
    desk.sent()
    for peer in (*peers(1000)[len(old) :], silent):
        desk.holds(peer, SUSPECT)
    desk.members.put(MemberView(info(young), 0, ALIVE, 1.05 - SETTLED))
    named: set[PeerId] = set()
    for _ in range(2000):
        desk.views.reply(1.0, ANN, PushPull(info(ANN), (), True, hello=True))
        ((_, reply),) = desk.sent()
        assert isinstance(reply, PushPullReply)
        assert reply.hello
        assert len(reply.view) <= 1 + NAMED
        named |= {claim.peer for claim in reply.view[1:]}
    assert named == set(old)


# -- replies --


def reply(peer: PeerId, dialled: str = "") -> PushPullReply:
    return PushPullReply(info(peer), (), dialled=dialled)


def test_a_reply_is_owed_by_whom_was_asked_and_once() -> None:
    desk = Desk(ANN, BOB)
    desk.views.greet(0.0, ANN)
    desk.views.answer_digest(0.0, BOB, (1,) * PARTS, 0)
    desk.views.dial(0.0, "there:1", joining=True)
    assert not desk.views.is_answer(1.0, ANN, reply(ANN, "elsewhere:1"))
    for peer, dialled in ((ANN, ""), (BOB, ""), (PeerId("cid"), "there:1")):
        assert desk.views.is_answer(1.0, peer, reply(peer, dialled))
        assert not desk.views.is_answer(1.0, peer, reply(peer, dialled))


def test_a_reply_that_comes_much_later_is_owed_no_more() -> None:
    limit = ANSWER_INTERVALS * CONFIG.probe_interval
    for late, owed in ((0.0, True), (0.1, False)):
        desk = Desk(ANN)
        desk.views.greet(5.0, ANN)
        assert desk.views.is_answer(5.0 + limit + late, ANN, reply(ANN)) is owed


def test_only_the_latest_that_were_asked_are_remembered() -> None:
    desk = Desk()
    asked = peers(MAX_ASKED + 1)
    for peer in asked:
        desk.views.greet(0.0, peer)
    assert [desk.views.is_answer(0.0, peer, reply(peer)) for peer in asked] == [
        False,
        *[True] * MAX_ASKED,
    ]


# -- hellos --


def test_who_joins_is_told_everything_and_others_who_call_just_who_this_is() -> None:
    desk = Desk(*peers(50))
    for joining, told in ((True, 51), (False, 1)):
        hello = PushPull(info(ANN), (), joining, dialled="me:1", hello=True)
        desk.views.reply(0.0, ANN, hello)
        ((_, reply),) = desk.sent()
        assert isinstance(reply, PushPullReply)
        assert len(reply.view) == told
        assert reply.view[0] == OWN
        assert reply.dialled == "me:1"
        assert reply.hello is not joining, "a brief answer is followed by a comparison"


def test_a_hello_holds_nothing_but_the_sender() -> None:
    desk = Desk(*peers(50))
    desk.views.dial(0.0, "there:1", joining=True)
    desk.views.greet(0.0, ANN)
    assert desk.sent() == [
        ("there:1", PushPull(info(ME), (OWN,), True, dialled="there:1", hello=True)),
        (ANN, PushPull(info(ME), (OWN,), hello=True)),
    ]


@pytest.mark.parametrize("status", [DEAD, LEFT])
def test_who_is_held_for_gone_learns_it_from_the_first_hello(status: Status) -> None:
    desk = Desk(ANN, BOB)
    desk.holds(ANN, status)
    desk.views.greet(0.0, ANN)
    desk.views.reply(0.0, ANN, PushPull(info(ANN), (), hello=True))
    for _, message in desk.sent():
        assert isinstance(message, (PushPull, PushPullReply))
        assert message.view == (OWN, Rumour(ANN, 0, status))


def test_strangers_are_greeted_members_are_not_and_nobody_in_storms() -> None:
    desk = Desk(ANN)
    stranger = PeerId("stranger")

    def greeted(now: float, peer: PeerId) -> bool:
        desk.views.introduce(now, peer)
        return bool(desk.sent())

    assert not greeted(0.0, ANN)
    assert not greeted(0.0, ME)
    assert greeted(0.0, stranger)
    assert not greeted(0.1, PeerId("another"))
    assert greeted(CONFIG.gossip_interval, PeerId("another"))
