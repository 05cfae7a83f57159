"""One membership machine alone: what it believes, refutes, answers and refuses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub_p2p.config import ConfigError, SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Output, Send, SendTo
from tensorhub_p2p.protocol.membership.opinions import MAX_INCARNATION
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import (
    Joined,
    MemberChanged,
    MemberForgotten,
    NewerVersion,
    Refuted,
    WasAbsent,
)
from tensorhub_p2p.protocol.messages import (
    Ack,
    DirectoryWritten,
    Gossip,
    Message,
    Nack,
    Ping,
    PingRequest,
    PushPull,
    PushPullReply,
    Rumour,
    Status,
    VersionHint,
    ViewDigest,
    ZoneSummary,
)

ME, FRIEND, OTHER, THIRD = (PeerId(name) for name in ("me", "friend", "other", "third"))
ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status


def info(peer: PeerId) -> PeerInfo:
    return PeerInfo(peer, f"name of {peer}", "here", (f"{peer}:1",))


def alive(peer: PeerId, incarnation: int = 0) -> Rumour:
    return Rumour(peer, incarnation, ALIVE, info(peer))


def claim(peer: PeerId, status: Status, incarnation: int = 0, accuser: str = "friend") -> Rumour:
    return Rumour(peer, incarnation, status, None, PeerId(accuser))


def swim(*others: PeerId, config: SwimConfig | None = None) -> Swim:
    machine = Swim(info(ME), config or SwimConfig(), random.Random(1))
    hear(machine, *(alive(peer) for peer in (FRIEND, *others)))
    machine.outbox.drain()
    return machine


def hear(machine: Swim, *rumours: Rumour, now: float = 0.0) -> list[Output]:
    machine.receive(now, FRIEND, Gossip(rumours))
    return machine.outbox.drain()


def events(items: Sequence[Output]) -> list[Event]:
    return [item for item in items if isinstance(item, Event)]


def sent(items: Sequence[Output], kind: type[Message], to: PeerId | None = None) -> list[Message]:
    return [
        item.message
        for item in items
        if isinstance(item, Send) and isinstance(item.message, kind) and to in (None, item.to)
    ]


def rumours(items: Sequence[Output]) -> list[Rumour]:
    return [
        rumour
        for item in items
        if isinstance(item, Send)
        for rumour in getattr(item.message, "rumours", ())
    ]


# -- what it believes --


def test_a_newcomer_becomes_a_member_and_is_announced() -> None:
    machine = swim()
    items = hear(machine, alive(OTHER))
    (change,) = events(items)
    assert isinstance(change, MemberChanged)
    assert change.old is None
    assert change.member.info == info(OTHER)
    assert machine.responsive() == (FRIEND, ME, OTHER)
    machine.tick(0.5)
    assert alive(OTHER) in rumours(machine.outbox.drain())


def test_what_was_heard_before_changes_nothing_and_is_not_passed_on() -> None:
    machine = swim()
    for now in range(100):
        machine.tick(now * 0.1)
    machine.outbox.drain()
    hear(machine, alive(FRIEND), now=10.0)
    machine.tick(10.1)
    assert alive(FRIEND) not in rumours(machine.outbox.drain())


@pytest.mark.parametrize(
    ("first", "second", "holds"),
    [
        ((0, SUSPECT), (0, ALIVE), (0, SUSPECT)),
        ((0, SUSPECT), (1, ALIVE), (1, ALIVE)),
        ((0, DEAD), (0, ALIVE), (0, DEAD)),
        ((0, DEAD), (0, SUSPECT), (0, DEAD)),
        ((0, DEAD), (1, ALIVE), (1, ALIVE)),
        ((1, ALIVE), (0, DEAD), (1, ALIVE)),
        ((1, ALIVE), (0, SUSPECT), (1, ALIVE)),
        ((0, ALIVE), (0, UNRESPONSIVE), (0, UNRESPONSIVE)),
        ((0, UNRESPONSIVE), (0, ALIVE), (0, UNRESPONSIVE)),
        ((0, SUSPECT), (0, UNRESPONSIVE), (0, UNRESPONSIVE)),
        ((0, UNRESPONSIVE), (0, SUSPECT), (0, UNRESPONSIVE)),
        ((0, UNRESPONSIVE), (1, ALIVE), (1, ALIVE)),
        ((0, LEFT), (0, DEAD), (0, LEFT)),
        ((0, LEFT), (0, ALIVE), (0, LEFT)),
    ],
)
def test_the_higher_incarnation_wins_and_then_the_graver_status(
    first: tuple[int, Status], second: tuple[int, Status], holds: tuple[int, Status]
) -> None:
    machine = swim(OTHER)
    for incarnation, status in (first, second):
        hear(machine, claim(OTHER, status, incarnation))
    assert next(v.rank for v in machine.members() if v.peer_id == OTHER) == holds


@given(st.permutations([(i, s) for i in range(2) for s in Status]))
def test_the_order_in_which_claims_arrive_does_not_matter(
    claims: list[tuple[int, Status]],
) -> None:
    machine = swim(OTHER)
    for incarnation, status in claims:
        hear(machine, claim(OTHER, status, incarnation))
    assert next(v.rank for v in machine.members() if v.peer_id == OTHER) == (1, LEFT)


def test_an_unresponsive_member_is_reachable_but_owns_no_keys() -> None:
    machine = swim(OTHER)
    hear(machine, claim(OTHER, UNRESPONSIVE))
    assert machine.is_reachable(OTHER)
    assert machine.responsive() == (FRIEND, ME)


def test_a_death_that_is_the_first_news_of_a_peer_makes_no_member() -> None:
    machine = swim()
    assert hear(machine, claim(OTHER, DEAD)) == []
    assert OTHER not in [view.peer_id for view in machine.members()]
    hear(machine, alive(OTHER))
    assert not machine.is_reachable(OTHER), "an alive at the same incarnation proves nothing"
    hear(machine, alive(OTHER, incarnation=1))
    assert machine.is_reachable(OTHER)


def test_nobody_becomes_a_member_without_an_introduction() -> None:
    machine = swim()
    hear(machine, Rumour(OTHER, 0, ALIVE), claim(OTHER, SUSPECT))
    assert machine.status(OTHER) is None


def test_only_an_introduction_under_the_right_name_counts() -> None:
    machine = swim()
    hear(machine, Rumour(OTHER, 0, ALIVE, info(THIRD)))
    assert machine.status(OTHER) is None
    assert machine.status(THIRD) is None
    assert machine.dropped["malformed rumour"] == 1


def test_beyond_the_limit_newcomers_are_refused_unless_the_gone_make_room() -> None:
    machine = swim(OTHER, config=SwimConfig(max_members=2))
    hear(machine, alive(THIRD))
    assert machine.status(THIRD) is None
    assert machine.dropped["newcomer beyond max_members"] == 1
    hear(machine, claim(OTHER, DEAD), alive(THIRD))
    assert machine.is_reachable(THIRD)
    assert machine.status(OTHER) is DEAD, "a tombstone is left"


def test_one_that_came_back_is_compared_with_and_never_forgotten() -> None:
    machine = swim(OTHER, config=SwimConfig(forget_dead_after=60))
    hear(machine, claim(OTHER, DEAD))
    assert sent(hear(machine, alive(OTHER, 1)), ViewDigest, OTHER)
    machine.tick(61)
    assert machine.is_reachable(OTHER)
    assert machine.info(OTHER) == info(OTHER)


def test_the_gone_are_forgotten_in_the_end_and_still_cannot_come_back_by_hearsay() -> None:
    machine = swim(OTHER, config=SwimConfig(forget_dead_after=60))
    hear(machine, claim(OTHER, LEFT))
    machine.tick(59)
    machine.outbox.drain()
    assert machine.info(OTHER) is not None
    machine.tick(61)
    assert MemberForgotten(OTHER) in machine.outbox.drain()
    assert machine.info(OTHER) is None
    hear(machine, alive(OTHER), now=62)
    assert not machine.is_reachable(OTHER)


def forgotten(machine: Swim) -> list[PeerId]:
    return [e.peer for e in machine.outbox.drain() if isinstance(e, MemberForgotten)]


def test_who_died_before_this_peer_came_is_forgotten_as_long_after_that_was_heard() -> None:
    machine = swim(config=SwimConfig(forget_dead_after=60))
    hear(machine, claim(OTHER, DEAD), now=10)
    hear(machine, claim(THIRD, DEAD), now=10)
    hear(machine, alive(THIRD, 1), now=20)
    machine.tick(69)
    assert forgotten(machine) == []
    machine.tick(71)
    assert forgotten(machine) == [OTHER], "the other one came back"
    machine.tick(200)
    assert forgotten(machine) == [], "once"
    hear(machine, alive(OTHER), now=200)
    assert not machine.is_reachable(OTHER), "its tombstone is still there"


def test_who_makes_room_in_the_table_is_forgotten() -> None:
    machine = swim(OTHER, config=SwimConfig(max_members=2))
    hear(machine, claim(OTHER, DEAD))
    machine.receive(1.0, FRIEND, Gossip((alive(THIRD),)))
    assert machine.is_reachable(THIRD)
    assert forgotten(machine) == [OTHER]


def test_a_tombstone_that_makes_room_is_of_one_that_is_forgotten() -> None:
    machine = swim(config=SwimConfig(max_members=2))
    for number, told in ((0, []), (1, []), (2, [PeerId("dead-0")])):
        machine.receive(0.0, FRIEND, Gossip((claim(PeerId(f"dead-{number}"), DEAD),)))
        assert forgotten(machine) == told


# -- what it says of itself --


@pytest.mark.parametrize("status", [UNRESPONSIVE, SUSPECT, DEAD, LEFT])
def test_it_never_believes_its_own_death(status: Status) -> None:
    machine = swim()
    items = hear(machine, claim(ME, status, 4))
    assert events(items)[-1] == Refuted(5, status)
    assert isinstance(events(items)[0], WasAbsent)
    refutation = rumours(items)[0]
    assert (refutation.peer, refutation.incarnation, refutation.status) == (ME, 5, ALIVE)
    assert machine.status(ME) is ALIVE
    assert hear(machine, claim(ME, status, 4)) == []


def test_it_refutes_what_a_view_says_of_it_in_the_reply() -> None:
    machine = swim()
    machine.receive(0.0, OTHER, PushPull(info(OTHER), (alive(OTHER), claim(ME, DEAD))))
    (reply,) = sent(machine.outbox.drain(), PushPullReply)
    assert isinstance(reply, PushPullReply)
    assert reply.view[0] == alive(ME, 1)


def test_an_absurd_incarnation_is_dropped() -> None:
    machine = swim()
    assert hear(machine, claim(ME, DEAD, MAX_INCARNATION + 1)) == []
    assert machine.dropped["malformed rumour"] == 1


# -- suspicion --


def run(machine: Swim, start: float, end: float, answering: Sequence[PeerId]) -> list[Output]:
    """Tick through a time in which only some members answer; returns all that came out."""
    seen: list[Output] = []
    now = start
    while now <= end:
        machine.tick(now)
        items = machine.outbox.drain()
        seen += items
        for item in items:
            if isinstance(item, Send) and isinstance(item.message, Ping) and item.to in answering:
                machine.receive(now, item.to, Ack(item.message.seq))
        now += 0.05
    return seen


def test_a_silent_member_becomes_suspect_and_then_dead() -> None:
    machine = swim(OTHER)
    seen = run(machine, 0, 20, answering=[FRIEND])
    changes = [e for e in events(seen) if isinstance(e, MemberChanged)]
    assert [(c.member.peer_id, c.member.status, c.old) for c in changes] == [
        (OTHER, SUSPECT, ALIVE),
        (OTHER, DEAD, SUSPECT),
    ]
    # With three members nobody is left to confirm: the shortest suspicion, 4 s, holds.
    assert changes[1].member.since - changes[0].member.since == pytest.approx(4, abs=0.1)


def test_whoever_pings_a_suspect_tells_it_so() -> None:
    machine = swim(OTHER)
    hear(machine, claim(OTHER, SUSPECT))
    pings = sent(run(machine, 0, 3, answering=[FRIEND]), Ping, OTHER)
    assert isinstance(pings[0], Ping)
    assert pings[0].rumours[0] == claim(OTHER, SUSPECT, accuser="me")


def test_confirmations_by_others_shorten_a_suspicion_and_are_passed_on_once() -> None:
    others = [PeerId(f"p{i}") for i in range(8)]
    machine = swim(OTHER, *others)
    hear(machine, claim(OTHER, SUSPECT, accuser="p0"))
    alone = machine._opinions.verdicts.deadline(OTHER)
    hear(machine, claim(OTHER, SUSPECT, accuser="p1"), claim(OTHER, SUSPECT, accuser="p1"))
    confirmed = machine._opinions.verdicts.deadline(OTHER)
    assert alone is not None
    assert confirmed is not None
    assert confirmed < alone
    hear(machine, claim(OTHER, SUSPECT, accuser="p0"))
    assert machine._opinions.verdicts.deadline(OTHER) == confirmed


def test_a_refutation_ends_the_suspicion() -> None:
    machine = swim(OTHER)
    hear(machine, claim(OTHER, SUSPECT))
    hear(machine, alive(OTHER, 1))
    seen = run(machine, 0, 30, answering=[FRIEND, OTHER])
    assert not [e for e in events(seen) if isinstance(e, MemberChanged)]


def test_a_death_in_somebodys_view_is_only_an_accusation() -> None:
    machine = swim(OTHER)
    machine.receive(0.0, FRIEND, PushPull(info(FRIEND), (claim(OTHER, DEAD),)))
    assert machine.status(OTHER) is SUSPECT


def test_after_an_own_pause_it_probes_again_before_it_judges() -> None:
    machine = swim(OTHER)
    run(machine, 0, 1.9, answering=[])
    assert SUSPECT in (machine.status(OTHER), machine.status(FRIEND))
    machine.outbox.drain()
    machine.tick(100.0)
    items = machine.outbox.drain()
    assert {type(event) for event in events(items)} == {WasAbsent}
    assert sent(items, Ping)
    assert sent(items, ViewDigest)
    seen = run(machine, 100.05, 120, answering=[FRIEND])
    assert {e.member.status for e in events(seen) if isinstance(e, MemberChanged)} >= {DEAD}


def test_one_that_hears_nobody_from_the_first_moment_on_accuses_nobody_for_a_while() -> None:
    machine = Swim(info(ME), SwimConfig(), random.Random(1))
    machine.adopt(0.0, map(info, (ME, FRIEND, OTHER, THIRD, PeerId("fourth"))))
    seen = run(machine, 0, 20, answering=[])
    assert not [e for e in events(seen) if isinstance(e, MemberChanged)]


def test_a_verdict_that_was_due_in_an_own_pause_waits_for_what_was_said_meanwhile() -> None:
    machine = swim(OTHER)
    hear(machine, claim(OTHER, SUSPECT))
    verdict = machine._opinions.verdicts.deadline(OTHER)
    assert verdict is not None
    while (planned := machine.next_wakeup()) is not None and planned < verdict:
        run(machine, planned, planned, answering=[FRIEND])
    assert planned == verdict, "nothing else was due when the process stopped"
    machine.tick(verdict + 2.0)
    assert machine.status(OTHER) is SUSPECT
    hear(machine, alive(OTHER, 1), now=verdict + 2.1)
    assert machine.status(OTHER) is ALIVE


@pytest.mark.parametrize(
    "first", ["a comparison", "a zone's summary", "a call", "a contact", "a notice"]
)
def test_whatever_comes_first_after_an_own_pause_is_not_taken_for_the_usual(first: str) -> None:
    machine = swim(OTHER)
    run(machine, 0, 1.9, answering=[FRIEND, OTHER])
    machine.outbox.drain()
    if first == "a comparison":
        machine.compare(100.0, OTHER)
    elif first == "a zone's summary":
        machine.tell(100.0, ZoneSummary("there", 1, ()))
    elif first == "a call":
        machine.dial(100.0, "there:1")
    elif first == "a contact":
        machine.note_contact(100.0, "there:1", THIRD)
    else:
        machine.notice(100.0)
    assert [type(event) for event in events(machine.outbox.drain())].count(WasAbsent) == 1


# -- probing --


def test_a_ping_is_acknowledged_also_to_a_stranger_which_is_asked_who_it_is() -> None:
    machine = swim()
    machine.receive(0.0, OTHER, Ping(9))
    items = machine.outbox.drain()
    assert [m.seq for m in sent(items, Ack, OTHER) if isinstance(m, Ack)] == [9]
    assert sent(items, PushPull, OTHER)
    machine.receive(0.01, THIRD, Ping(9))
    assert not sent(machine.outbox.drain(), PushPull), "but never in storms"


def test_a_buried_peer_that_writes_learns_what_it_must_refute() -> None:
    machine = swim()
    hear(machine, claim(OTHER, DEAD, 3))
    machine.receive(0.0, OTHER, Ping(9))
    items = machine.outbox.drain()
    assert claim(OTHER, DEAD, 3, accuser="me") in rumours(items)
    (exchange,) = sent(items, PushPull, OTHER)
    assert isinstance(exchange, PushPull)
    assert Rumour(OTHER, 3, DEAD) in exchange.view


def test_a_relay_passes_on_the_answer() -> None:
    machine = swim(OTHER)
    machine.receive(0.0, FRIEND, PingRequest(7, OTHER))
    (ping,) = sent(machine.outbox.drain(), Ping, OTHER)
    assert isinstance(ping, Ping)
    machine.receive(0.1, THIRD, Ack(ping.seq))
    assert not sent(machine.outbox.drain(), Ack), "only the target's answer counts"
    machine.receive(0.1, OTHER, Ack(ping.seq))
    (ack,) = sent(machine.outbox.drain(), Ack, FRIEND)
    assert isinstance(ack, Ack)
    assert ack.seq == 7


def test_a_relay_says_when_it_got_no_answer_and_passes_on_a_late_one() -> None:
    machine = swim(OTHER)
    machine.receive(0.0, FRIEND, PingRequest(7, OTHER))
    (ping,) = sent(machine.outbox.drain(), Ping, OTHER)
    assert isinstance(ping, Ping)
    machine.tick(0.41)
    nacks = sent(machine.outbox.drain(), Nack, FRIEND)
    assert [m.seq for m in nacks if isinstance(m, Nack)] == [7]
    machine.receive(0.6, OTHER, Ack(ping.seq))
    assert sent(machine.outbox.drain(), Ack, FRIEND)


def test_relayed_probes_are_bounded() -> None:
    machine = swim(OTHER, config=SwimConfig(max_relayed_probes=3))
    for seq in range(10):
        machine.receive(0.0, FRIEND, PingRequest(seq, OTHER))
    assert len(sent(machine.outbox.drain(), Ping, OTHER)) == 3


def test_messages_of_other_machines_are_left_alone() -> None:
    machine = swim()
    machine.receive(0.0, FRIEND, DirectoryWritten(1))
    assert machine.outbox.drain() == []


def test_views_that_differ_are_compared_but_not_while_news_is_on_its_way() -> None:
    machine = swim()
    same = machine._fingerprint()

    def exchanges(now: float, fingerprint: int) -> int:
        machine.receive(now, FRIEND, Ack(0, (), fingerprint))
        return len(sent(machine.outbox.drain(), ViewDigest, FRIEND))

    assert exchanges(0.0, same + 1) == 0, "the news of the newcomer is still being spread"
    run(machine, 0.0, 2.0, answering=[FRIEND])
    assert exchanges(2.0, same) == 0
    assert exchanges(2.0, 0) == 0, "it does not say"
    assert exchanges(2.0, same + 1) == 1
    assert exchanges(3.9, same + 1) == 0, "not in storms"
    assert exchanges(4.1, same + 1) == 1


def test_peers_with_the_same_view_have_the_same_fingerprint() -> None:
    mine, theirs = swim(OTHER), Swim(info(FRIEND), SwimConfig(), random.Random(2))
    theirs.receive(0.0, ME, Gossip((alive(THIRD), alive(OTHER), alive(ME))))
    assert mine._fingerprint() != theirs._fingerprint()
    theirs.receive(0.0, ME, Gossip((claim(THIRD, DEAD),)))
    assert mine._fingerprint() == theirs._fingerprint()
    theirs.receive(0.0, ME, Gossip((claim(OTHER, SUSPECT),)))
    assert mine._fingerprint() != theirs._fingerprint()


# -- joining --


def test_all_seeds_are_dialled_until_one_answers() -> None:
    machine = Swim(info(ME), SwimConfig(redial_interval=2.0), random.Random(1))
    machine.join(0.0, ["a:1", "b:1"])

    def dialled() -> list[str]:
        return [item.address for item in machine.outbox.drain() if isinstance(item, SendTo)]

    assert dialled() == ["a:1", "b:1"]
    assert machine.next_wakeup() == 0.5
    machine.tick(0.5)
    assert dialled() == ["a:1", "b:1"]
    view = (alive(OTHER), alive(FRIEND))
    machine.receive(0.6, OTHER, PushPullReply(info(OTHER), view, dialled="b:1"))
    assert Joined(OTHER) in machine.outbox.drain()
    assert machine.responsive() == (FRIEND, ME, OTHER)
    machine.tick(1.1)
    assert dialled() == []
    for now in range(2, 5):
        machine.tick(float(now))
    assert set(dialled()) == {"a:1"}, "the seed at which nobody answered is still looked for"


def joining() -> Swim:
    machine = Swim(info(ME), SwimConfig(), random.Random(1))
    machine.join(0.0, ["seed:1"])
    machine.outbox.drain()
    return machine


def brief(peer: PeerId, dialled: str, *named: PeerId) -> PushPullReply:
    view = (alive(peer), *(alive(each) for each in named))
    return PushPullReply(info(peer), view, dialled=dialled, hello=True)


def test_who_is_sent_on_by_a_busy_seed_has_joined_once_somebody_told_its_view() -> None:
    machine = joining()
    machine.receive(0.1, FRIEND, brief(FRIEND, "seed:1", OTHER))
    (hello,) = [item for item in machine.outbox.drain() if isinstance(item, SendTo)]
    assert hello.address == "other:1"
    assert isinstance(hello.message, PushPull)
    assert hello.message.joining
    machine.receive(0.2, OTHER, PushPullReply(info(OTHER), (alive(THIRD),), dialled="other:1"))
    assert [item for item in machine.outbox.drain() if isinstance(item, Joined)] == [Joined(FRIEND)]
    assert machine.is_reachable(THIRD)


def test_those_whom_a_busy_one_names_send_nobody_on_in_turn() -> None:
    machine = joining()
    machine.receive(0.1, FRIEND, brief(FRIEND, "seed:1", OTHER))
    machine.outbox.drain()
    machine.receive(0.2, OTHER, brief(OTHER, "other:1", THIRD))
    items = machine.outbox.drain()
    assert not [item for item in items if isinstance(item, (SendTo, Joined))]
    assert [item.to for item in items if isinstance(item, Send)] == [OTHER], "it compares"
    machine.tick(0.6)
    assert [i.address for i in machine.outbox.drain() if isinstance(i, SendTo)] == ["seed:1"]


def test_a_comparison_tells_a_view_as_well() -> None:
    machine = joining()
    machine.receive(0.1, FRIEND, brief(FRIEND, "seed:1"))
    assert not [item for item in machine.outbox.drain() if isinstance(item, Joined)]
    machine.receive(0.2, FRIEND, PushPull(info(FRIEND), (alive(OTHER),), parts=(1,)))
    assert Joined(FRIEND) in machine.outbox.drain()


def test_who_found_its_cluster_in_another_zone_asks_its_own_first_whom_it_has() -> None:
    machine = joining()
    hear(machine, alive(OTHER))
    for now in (0.1, 0.6):
        machine.note_contact(now, "seed:1", PeerId("stranger"))
        items = machine.outbox.drain()
        assert not [item for item in items if isinstance(item, Joined)]
        assert "other:1" in [item.address for item in items if isinstance(item, SendTo)]
    machine.receive(0.7, OTHER, PushPullReply(info(OTHER), (alive(OTHER),), dialled="other:1"))
    assert Joined(PeerId("stranger")) in machine.outbox.drain()


def test_who_found_its_cluster_in_another_zone_and_knows_nobody_has_joined() -> None:
    machine = joining()
    machine.note_contact(0.1, "seed:1", PeerId("stranger"))
    assert Joined(PeerId("stranger")) in machine.outbox.drain()


def test_a_reply_that_speaks_for_somebody_else_is_dropped() -> None:
    machine = swim()
    machine.receive(0.0, FRIEND, PushPullReply(info(OTHER), (alive(OTHER),)))
    machine.receive(0.0, FRIEND, PushPull(info(OTHER), (alive(OTHER),)))
    assert machine.status(OTHER) is None
    assert machine.dropped["forged view"] == 2


def test_a_rejoin_from_the_dead_proves_nothing() -> None:
    machine = swim()
    heir, late = PeerInfo(OTHER, "", "here", ("x:1",)), PeerInfo(THIRD, "", "here", ("x:1",))
    hear(machine, claim(THIRD, DEAD))
    machine.receive(0.0, OTHER, PushPull(heir, (Rumour(OTHER, 0, ALIVE, heir),), joining=True))
    machine.receive(0.0, THIRD, PushPull(late, (Rumour(THIRD, 0, ALIVE, late),), joining=True))
    assert machine.is_reachable(OTHER)
    assert not machine.is_reachable(THIRD)


# -- leaving --


def test_after_the_goodbye_it_is_silent() -> None:
    machine = swim(OTHER)
    machine.leave(1.0)
    items = machine.outbox.drain()
    assert {i.to for i in items if isinstance(i, Send)} == {FRIEND, OTHER}
    assert Rumour(ME, 0, LEFT, info(ME)) in rumours(items)
    machine.tick(2.0)
    machine.receive(3.0, FRIEND, Ping(1))
    machine.leave(4.0)
    assert machine.outbox.drain() == []
    assert machine.next_wakeup() is None
    assert machine.responsive() == (FRIEND, OTHER)
    assert not machine.is_reachable(ME)


# -- hints --


def test_only_a_higher_version_is_news() -> None:
    machine = swim()

    def told(*hints: VersionHint) -> list[Event]:
        machine.receive(0.0, FRIEND, Gossip(hints=hints))
        return events(machine.outbox.drain())

    assert told(VersionHint("m", 0, 5)) == [NewerVersion("m", 0, 5)]
    assert told(VersionHint("m", 0, 5), VersionHint("m", 0, 4)) == []
    assert told(VersionHint("m", 1, 0)) == [NewerVersion("m", 1, 0)]
    machine.hint(0.0, "m", 1, 7)
    assert told(VersionHint("m", 1, 6)) == []


def test_hints_of_too_many_models_are_dropped() -> None:
    machine = swim(config=SwimConfig(max_hinted_models=2))
    hints = tuple(VersionHint(f"m{i}", 0, 1) for i in range(5))
    machine.receive(0.0, FRIEND, Gossip(hints=hints))
    assert len(events(machine.outbox.drain())) == 2


def test_a_flood_of_rumours_does_not_hold_up_a_hint() -> None:
    machine = swim()
    hear(machine, *(alive(PeerId(f"p{i}")) for i in range(500)))
    machine.hint(0.0, "m", 0, 1)
    machine.tick(0.2)
    gossip = [m for m in sent(machine.outbox.drain(), Gossip) if isinstance(m, Gossip)]
    assert gossip
    assert all(m.hints == (VersionHint("m", 0, 1),) for m in gossip)


def test_a_rumour_finds_its_limit_of_bytes_on_every_message() -> None:
    machine = swim()
    hear(machine, *(alive(PeerId(f"p{i}")) for i in range(500)))
    machine.receive(0.1, FRIEND, Ping(1))
    (ack,) = sent(machine.outbox.drain(), Ack)
    assert isinstance(ack, Ack)
    assert 10 < len(ack.rumours) < 60


# -- whatever comes --

peers = st.sampled_from([ME, FRIEND, OTHER, THIRD, PeerId("")])
any_rumour = st.builds(
    Rumour,
    peers,
    st.integers(0, 3) | st.just(2**63),
    st.sampled_from(Status),
    st.none() | peers.map(info),
    peers,
)
views = st.lists(any_rumour, max_size=6).map(tuple)
seqs = st.integers(0, 10)
any_message = st.one_of(
    st.builds(Ping, seqs, views),
    st.builds(PingRequest, seqs, peers, views),
    st.builds(Ack, seqs, views),
    st.builds(Nack, seqs, views),
    st.builds(Gossip, views),
    st.builds(PushPull, peers.map(info), views, st.booleans(), dialled=st.sampled_from(["", "x"])),
    st.builds(PushPullReply, peers.map(info), views, dialled=st.sampled_from(["", "x"])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), peers, any_message), max_size=20))
def test_nothing_that_arrives_breaks_it_or_kills_it_or_lowers_a_rank(
    arrivals: list[tuple[float, PeerId, Message]],
) -> None:
    machine = swim()
    machine.join(0.0, ["x"])
    now = 0.0
    for pause, sender, message in arrivals:
        before = {view.peer_id: view.rank for view in machine.members()}
        now += pause
        machine.receive(now, sender, message)
        machine.tick(now)
        after = {view.peer_id: view.rank for view in machine.members()}
        assert all(after[peer] >= rank for peer, rank in before.items())
        assert machine.status(ME) is ALIVE
        assert ME in machine.responsive()
        wakeup = machine.next_wakeup()
        assert wakeup is None or wakeup > now


def test_views_merge_to_the_same_whatever_the_order() -> None:
    claims = [alive(OTHER), claim(OTHER, SUSPECT), alive(OTHER, 1), claim(OTHER, DEAD, 0)]
    results = set()
    for order in permutations(claims):
        machine = swim(OTHER)
        hear(machine, *order)
        results.add(next(v.rank for v in machine.members() if v.peer_id == OTHER))
    assert results == {(1, ALIVE)}


def test_a_probe_timeout_beyond_the_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="probe_timeout"):
        SwimConfig(probe_timeout=1.0, probe_interval=1.0)
