"""How a peer finds its zone: what ends the search, and whom it calls meanwhile; who tells it."""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.messages import ZoneGreeting, ZoneSummary
from tensorhub_p2p.protocol.zones.arriving import MAX_NAMED, Arrival, Contact
from tensorhub_p2p.protocol.zones.greeting import (
    CALLERS,
    CALLING_ZONES,
    HEARSAY,
    MAX_CALLER_BYTES,
    REMEMBERED,
    Greeter,
    is_alone,
)

ALONE_AFTER, RETRY = 3.0, 0.5
CONTACT = Contact("seed:1", PeerId("stranger"))


def peer(name: str, zone: str = "west") -> PeerInfo:
    return PeerInfo(PeerId(name), name, zone, (f"{name}:1",))


def arrival() -> Arrival:
    return Arrival(ALONE_AFTER, RETRY)


# -- looking --


def test_without_any_sign_it_looks_for_ever() -> None:
    looking = arrival()
    assert looking.due(1e6) == ()
    assert looking.at is None
    assert looking.next_wakeup() is None


def test_a_greeting_that_names_nobody_makes_it_the_first() -> None:
    looking = arrival()
    looking.greeted(1.0, CONTACT, ())
    assert looking.at == 1.0
    assert looking.contact == CONTACT


def test_those_named_are_called_again_and_again_and_then_it_is_alone() -> None:
    looking = arrival()
    looking.greeted(1.0, CONTACT, (peer("a"), peer("b")))
    calls, now = [], 1.0
    while looking.at is None:
        calls += [info.name for info in looking.due(now)]
        now = looking.next_wakeup() or now
    assert looking.at == 1.0 + ALONE_AFTER
    assert calls == ["a", "b"] * int(ALONE_AFTER / RETRY)
    assert looking.next_wakeup() is None
    assert looking.due(now) == ()


def test_it_waits_no_longer_because_it_is_greeted_again() -> None:
    looking = arrival()
    for now in (1.0, 2.0, 3.0):
        looking.greeted(now, CONTACT, (peer("a"),))
    looking.due(1.0 + ALONE_AFTER)
    assert looking.at == 1.0 + ALONE_AFTER


def test_a_later_greeting_that_names_nobody_does_not_end_the_search() -> None:
    looking = arrival()
    looking.greeted(1.0, CONTACT, (peer("a"),))
    looking.greeted(1.1, CONTACT, ())
    assert looking.at is None


def test_who_knows_nobody_itself_is_asked_again() -> None:
    looking = arrival()
    looking.greeted(1.0, CONTACT, (), is_alone=True)
    assert looking.at is None
    looking.greeted(1.5, CONTACT, (peer("a"),))
    assert looking.due(1.5) == (peer("a"),)
    assert looking.at is None


def test_who_is_greeted_by_lonely_peers_only_is_alone_after_a_while() -> None:
    looking = arrival()
    for now in (1.0, 1.5, 2.0):
        looking.greeted(now, CONTACT, (), is_alone=True)
    assert looking.next_wakeup() == 1.0 + ALONE_AFTER
    looking.due(1.0 + ALONE_AFTER)
    assert looking.at == 1.0 + ALONE_AFTER


def test_those_named_late_are_called_for_as_long_as_those_named_at_once() -> None:
    looking = arrival()
    looking.greeted(1.0, CONTACT, (), is_alone=True)
    looking.greeted(3.9, CONTACT, (peer("a"),))
    looking.due(1.0 + ALONE_AFTER)
    assert looking.at is None
    looking.due(3.9 + ALONE_AFTER)
    assert looking.at == 3.9 + ALONE_AFTER


def test_a_greeting_shows_whether_its_sender_knows_anybody_of_its_zone() -> None:
    me, other = peer("e", "east"), peer("f", "east")
    assert is_alone(ZoneGreeting(me))
    assert is_alone(ZoneGreeting(me, (ZoneSummary("east", 1, (me,)), WEST)))
    assert not is_alone(ZoneGreeting(me, (ZoneSummary("east", 1, (me, other)),)))


def test_a_peer_that_is_its_own_seed_waits_for_others_first() -> None:
    looking = arrival()
    looking.may_be_alone(1.0)
    looking.may_be_alone(2.0)
    assert looking.next_wakeup() == 1.0 + ALONE_AFTER
    looking.due(1.0 + ALONE_AFTER)
    assert looking.at == 1.0 + ALONE_AFTER


def test_who_has_arrived_stays_so() -> None:
    looking = arrival()
    looking.arrive(1.0)
    looking.arrive(2.0)
    looking.greeted(3.0, CONTACT, (peer("a"),))
    assert looking.at == 1.0
    assert looking.contact is None
    assert looking.due(9.0) == ()


def test_only_so_many_named_ones_are_remembered() -> None:
    looking = arrival()
    looking.greeted(1.0, CONTACT, [peer(f"p{i}") for i in range(10 * MAX_NAMED)])
    assert len(looking.due(1.0)) == MAX_NAMED


# -- being told --


EAST = ZoneSummary("east", 3, (peer("e", "east"),))
WEST = ZoneSummary("west", 5, (peer("w"),))
NORTH = ZoneSummary("north", 2, (peer("n", "north"),))


def test_a_caller_is_told_what_its_zone_and_this_one_say() -> None:
    assert Greeter("east").answer(0.0, peer("a"), (NORTH, EAST, WEST)) == (EAST, WEST)


def test_a_caller_whose_zone_has_said_nothing_is_told_who_called_before() -> None:
    greeter = Greeter("east")
    assert greeter.answer(0.0, peer("a"), (EAST,)) == (EAST,)
    greeter.answer(0.1, peer("x", "north"), (EAST,))
    assert greeter.answer(0.2, peer("b"), (EAST,)) == (
        EAST,
        ZoneSummary("west", HEARSAY, (peer("a"),)),
    )
    (_, told) = greeter.answer(0.3, peer("a"), (EAST,))
    assert told.gateways == (peer("b"),), "not of itself"


def test_callers_are_forgotten_in_time_and_once_their_zone_speaks() -> None:
    greeter = Greeter("east")
    greeter.answer(0.0, peer("a"), ())
    assert greeter.answer(REMEMBERED, peer("b"), ()) == ()
    greeter.answer(REMEMBERED, peer("c"), (WEST,))
    assert greeter.answer(REMEMBERED, peer("d"), ()) == ()


def test_the_memory_of_callers_is_bounded() -> None:
    greeter = Greeter("east")
    for number in range(10 * CALLERS):
        greeter.answer(0.0, peer(f"p{number}"), ())
    (told,) = greeter.answer(0.0, peer("last"), ())
    assert [info.name for info in told.gateways] == [f"p{40 - i}" for i in range(CALLERS, 0, -1)]
    for number in range(10 * CALLING_ZONES):
        greeter.answer(0.0, peer("p", f"zone-{number}"), ())
    assert greeter.answer(0.0, peer("b"), ()) == (), "the zone that called longest ago goes first"
    huge = PeerInfo(PeerId("huge"), "h" * MAX_CALLER_BYTES, "south", ())
    greeter.answer(0.0, huge, ())
    assert greeter.answer(0.0, peer("s", "south"), ()) == ()
