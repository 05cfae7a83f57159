"""News leaves with every message, and in rounds of its own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.membership.dissemination import Dissemination, retransmit_limit
from tensorhub_p2p.protocol.membership.gossip import Gossiper
from tensorhub_p2p.protocol.membership.hints import Hints
from tensorhub_p2p.protocol.membership.members import Members, MemberView
from tensorhub_p2p.protocol.membership.summaries import Summaries
from tensorhub_p2p.protocol.messages import (
    Ack,
    Gossip,
    Message,
    Ping,
    Rumour,
    Status,
    VersionHint,
    ZoneSummary,
)

ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status
ME, ANN, BOB, CID, DAN, EVE = (PeerId(n) for n in ("me", "ann", "bob", "cid", "dan", "eve"))
CONFIG = SwimConfig()
NEWS = Rumour(PeerId("who"), 1, SUSPECT, None, ANN)
OWN = Rumour(ME, 3, ALIVE)


def info(peer: PeerId) -> PeerInfo:
    return PeerInfo(peer, peer, "here", (f"{peer}:1",))


class Mouth:
    """A gossiper, what it may say and whom it may tell."""

    def __init__(self, *peers: PeerId, config: SwimConfig = CONFIG) -> None:
        self.members = Members(1000)
        for peer in peers:
            self.holds(peer, ALIVE)
        self.rumours: Dissemination[PeerId, Rumour] = Dissemination()
        self.hints = Hints(1000)
        self.summaries = Summaries(1000, Counter())
        self.outbox = Outbox()
        self.gossiper = Gossiper(
            lambda: Rumour(ME, 3, ALIVE, info(ME)),
            lambda: 4711,
            self.members,
            self.rumours,
            self.hints,
            self.summaries,
            config,
            random.Random(1),
            self.outbox,
        )
        self.gossiper.start(0.0)

    def holds(self, peer: PeerId, status: Status, now: float = 0.0) -> None:
        self.members.put(MemberView(info(peer), 5, status, now))

    def hears(self, number: int = 1) -> None:
        for each in range(number):
            peer = PeerId(f"who{each}")
            self.rumours.put(peer, Rumour(peer, 1, SUSPECT, None, ANN))

    def sent(self) -> list[tuple[PeerId, Message]]:
        return [(item.to, item.message) for item in self.outbox.drain() if isinstance(item, Send)]

    def rumours_to(self, peer: PeerId, message: Message) -> tuple[Rumour, ...]:
        self.gossiper.send(peer, message)
        ((to, sent),) = self.sent()
        assert to == peer
        assert type(sent) is type(message)
        return tuple(getattr(sent, "rumours", ()))


# -- rounds --


def test_in_a_calm_nothing_is_sent_and_nothing_is_due() -> None:
    mouth = Mouth(ANN, BOB)
    assert mouth.gossiper.next_wakeup() is None
    mouth.gossiper.tick(5.0)
    assert mouth.sent() == []


def test_the_first_news_after_a_calm_leaves_at_once_and_then_round_by_round() -> None:
    mouth = Mouth(ANN, BOB, CID, DAN, EVE)
    mouth.hears()
    assert mouth.gossiper.next_wakeup() == 0.0
    mouth.gossiper.tick(7.0)
    assert len(mouth.sent()) == CONFIG.gossip_nodes
    assert mouth.gossiper.next_wakeup() == 7.0 + CONFIG.gossip_interval
    mouth.gossiper.tick(7.0 + CONFIG.gossip_interval / 2)
    assert mouth.sent() == []
    mouth.gossiper.tick(7.0 + CONFIG.gossip_interval)
    assert mouth.sent()


def test_a_round_goes_to_different_members() -> None:
    mouth = Mouth(ANN, BOB, CID, DAN, EVE)
    mouth.hears()
    mouth.gossiper.tick(0.0)
    told = [to for to, _ in mouth.sent()]
    assert len(set(told)) == len(told) == CONFIG.gossip_nodes


def test_news_is_sent_as_often_as_the_retransmit_limit_says() -> None:
    mouth = Mouth(ANN, BOB, CID, DAN, EVE, config=SwimConfig(retransmit_multiplier=5))
    mouth.hears()
    times = 0
    now = 0.0
    while mouth.gossiper.next_wakeup() is not None:
        mouth.gossiper.tick(now)
        times += len(mouth.sent())
        now += CONFIG.gossip_interval
    assert times == retransmit_limit(5, 6) == 5


def test_with_nobody_to_tell_news_waits() -> None:
    mouth = Mouth()
    mouth.hears()
    assert mouth.gossiper.next_wakeup() is None
    mouth.gossiper.tick(0.0)
    assert mouth.sent() == []
    assert len(mouth.rumours) == 1


# -- every message --


def test_rumours_ride_on_every_message() -> None:
    mouth = Mouth(ANN, BOB)
    for message in (Ping(1), Ack(1), Gossip()):
        mouth.rumours.put(NEWS.peer, NEWS)
        assert mouth.rumours_to(ANN, message) == (NEWS,)
    mouth.rumours.put(NEWS.peer, NEWS)
    assert mouth.rumours_to(PeerId("stranger"), Ping(2)) == (NEWS,)


def test_a_message_keeps_its_own_fields_and_an_ack_tells_the_fingerprint() -> None:
    mouth = Mouth(ANN)
    mouth.gossiper.send(ANN, Ping(8))
    mouth.gossiper.send(ANN, Ack(9))
    assert mouth.sent() == [(ANN, Ping(8)), (ANN, Ack(9, (), 4711))]


def test_each_kind_of_news_has_a_budget_of_its_own() -> None:
    mouth = Mouth(ANN)
    mouth.hears(500)
    for number in range(500):
        mouth.hints.note(0.0, VersionHint(f"model-{number}", 0, 1))
        mouth.summaries.note(ZoneSummary(f"zone-{number}", 1, ()))
    mouth.gossiper.gossip_to(ANN)
    ((_, gossip),) = mouth.sent()
    assert isinstance(gossip, Gossip)
    assert 10 < len(gossip.rumours) < 100
    assert 10 < len(gossip.hints) < 60
    assert 10 < len(gossip.summaries) < 250


def test_only_gossip_carries_hints_and_summaries() -> None:
    mouth = Mouth(ANN)
    mouth.hints.note(0.0, VersionHint("model", 0, 1))
    mouth.summaries.note(ZoneSummary("zone", 1, ()))
    mouth.gossiper.send(ANN, Ping(1))
    assert mouth.sent() == [(ANN, Ping(1))]
    mouth.gossiper.tick(0.0)
    ((_, gossip),) = mouth.sent()
    assert gossip == Gossip((), (VersionHint("model", 0, 1),), (ZoneSummary("zone", 1, ()),))


# -- the silent and the gone --


@pytest.mark.parametrize("status", [SUSPECT, UNRESPONSIVE, DEAD, LEFT])
def test_who_is_held_for_silent_or_gone_hears_that_first_and_that_the_sender_is_there(
    status: Status,
) -> None:
    mouth = Mouth(ANN, BOB)
    mouth.holds(BOB, status)
    for message in (Ping(1), Ack(1), Gossip()):
        assert mouth.rumours_to(BOB, message) == (Rumour(BOB, 5, status, None, ME), OWN)
    assert mouth.rumours_to(ANN, Ping(1)) == ()


def test_a_buried_peer_hears_it_too() -> None:
    mouth = Mouth(ANN)
    mouth.members.bury(BOB, (5, DEAD), 0.0)
    assert mouth.rumours_to(BOB, Ack(1)) == (Rumour(BOB, 5, DEAD, None, ME), OWN)


def test_no_news_is_wasted_on_the_silent() -> None:
    mouth = Mouth(ANN, BOB)
    mouth.holds(BOB, SUSPECT)
    mouth.hears()
    mouth.hints.note(0.0, VersionHint("model", 0, 1))
    for _ in range(100):
        mouth.gossiper.gossip_to(BOB)
    mouth.sent()
    mouth.gossiper.gossip_to(ANN)
    ((_, gossip),) = mouth.sent()
    assert isinstance(gossip, Gossip)
    assert len(gossip.rumours) == 1
    assert len(gossip.hints) == 1


def test_each_round_one_of_the_recently_dead_hears_that_it_is_held_for_dead() -> None:
    mouth = Mouth(ANN, BOB, CID, DAN)
    mouth.holds(CID, DEAD, now=10.0)
    mouth.holds(DAN, LEFT, now=10.0)
    told = []
    for now in (10.0, 39.9, 40.1):
        mouth.hears()
        mouth.gossiper.tick(now)
        told.append([to for to, _ in mouth.sent() if to in (CID, DAN)])
    assert told == [[CID], [CID], []], "for 30 s, and none that left"
