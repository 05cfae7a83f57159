"""One peer asks another zone's gateways: who, how often, for how long, and what counts after."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.asking import Asks, Found, Place
from tensorhub_p2p.protocol.abroad.foreigners import Foreigners
from tensorhub_p2p.protocol.abroad.speakers import Speakers
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, PeerInfo, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.messages import (
    Key,
    Phase,
    Register,
    VersionHint,
    VersionRecord,
    ZoneAnswer,
    ZoneAsk,
    ZoneSummary,
)

ME = PeerId("me")
KEY = Key("versions", "policy")
EAST: Place = ("east", KEY)
NAMED = tuple(PeerId(f"g{i}") for i in range(4))
CONFIG = AbroadConfig()


def gateway(peer: PeerId) -> PeerInfo:
    return PeerInfo(peer, peer, "east", (f"{peer}:1",))


def answer(number: int, version: int = 1) -> ZoneAnswer:
    what = Publication(0, version, "trainer", Generation(1, 1))
    slot = Slot(Group("policy", "trainer"), 0)
    record = VersionRecord(slot, 1, what, Phase.READY, what.generation)
    return ZoneAnswer(number, KEY, (Register(PeerId("t"), "0@trainer", 1, version, record),))


@dataclass
class Asker:
    """The asks of one peer, whose only other zone is "east"."""

    version: int = 1
    """What east says it has."""
    gateways: tuple[PeerId, ...] = NAMED
    ended: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outbox = Outbox()
        self.speakers = Speakers(ME, "west", 2, self.summaries)
        self.asks = Asks(
            self.speakers,
            Foreigners(10),
            CONFIG,
            self.outbox,
            lambda peer: peer == ME,
            lambda _now, place: self.ended.append(place),
        )

    def summaries(self) -> tuple[ZoneSummary, ...]:
        newest = (VersionHint("policy", 0, self.version),)
        infos = tuple(gateway(peer) for peer in self.gateways)
        return (ZoneSummary("east", 1, infos, 4, newest),)

    def asked(self) -> list[tuple[PeerId, int]]:
        """Who was asked since, under which number."""
        items = [item for item in self.outbox.drain() if isinstance(item, Send)]
        return [(i.to, i.message.request) for i in items if isinstance(i.message, ZoneAsk)]

    def ask(self, now: float) -> tuple[PeerId, int]:
        assert self.asks.look(now, EAST) is Found.ASKED
        (asked,) = self.asked()
        return asked

    def go_on(self, until: float) -> list[tuple[PeerId, int]]:
        """Tick at each wake-up; who was asked."""
        while (due := self.asks.next_wakeup()) is not None and due <= until:
            self.asks.tick(due)
        return self.asked()


def test_an_answer_is_used_again_for_a_while() -> None:
    asker = Asker()
    to, number = asker.ask(0.0)
    asker.asks.receive(0.2, to, answer(number))
    assert asker.ended == [EAST]
    assert asker.asks.look(0.2 + 0.9 * CONFIG.revisit_interval, EAST) is Found.FRESH
    assert asker.asks.look(0.3 + CONFIG.revisit_interval, EAST) is Found.ASKED


def test_an_answer_is_not_used_any_more_once_the_zone_says_it_has_something_newer() -> None:
    asker = Asker()
    to, number = asker.ask(0.0)
    asker.asks.receive(0.2, to, answer(number))
    asker.version = 2
    assert asker.asks.look(0.3, EAST) is Found.ASKED


def test_an_answer_to_what_was_asked_before_the_zone_said_so_is_not_enough() -> None:
    asker = Asker()
    to, number = asker.ask(0.0)
    asker.version = 2
    asker.asks.receive(0.2, to, answer(number))
    assert asker.asks.look(0.2, EAST) is Found.ASKED


def test_all_who_look_at_a_time_share_one_ask() -> None:
    asker = Asker()
    asker.ask(0.0)
    assert asker.asks.look(0.1, EAST) is Found.ASKED
    assert not asker.asked()


def test_what_was_read_before_an_own_write_does_not_count_after_it() -> None:
    asker = Asker()
    to, number = asker.ask(0.0)
    asker.asks.receive(0.2, to, answer(number))
    asker.asks.invalidate(0.3, EAST)
    assert asker.asks.look(0.3, EAST) is Found.ASKED


def test_an_ask_that_an_own_write_overtakes_begins_anew() -> None:
    asker = Asker()
    to, number = asker.ask(0.0)
    asker.asks.invalidate(0.1, EAST)
    ((again, fresh),) = asker.asked()
    asker.asks.receive(0.2, to, answer(number))
    assert not asker.ended
    assert asker.asks.dropped.total() == 1
    asker.asks.receive(0.3, again, answer(fresh))
    assert asker.ended == [EAST]
    assert asker.asks.look(0.3, EAST) is Found.FRESH


def test_silent_gateways_are_given_up_one_after_the_other_and_then_the_zone() -> None:
    asker = Asker()
    first, _ = asker.ask(0.0)
    others = [to for to, _ in asker.go_on(CONFIG.patience - 0.01)]
    assert [first, *others] in ([NAMED[0], NAMED[1], *NAMED[2:]], [NAMED[1], NAMED[0], *NAMED[2:]])
    asker.go_on(CONFIG.patience)
    assert asker.ended == [EAST]
    end = CONFIG.patience + CONFIG.silent_seconds
    assert asker.asks.look(end - 0.01, EAST) is Found.SILENT
    assert asker.asks.look(end - 0.01, ("east", Key("holders", "policy", "0"))) is Found.SILENT
    assert not asker.asked()
    assert asker.asks.look(end, EAST) is Found.ASKED


def test_the_first_answer_counts_whoever_of_them_gave_it() -> None:
    asker = Asker()
    first, number = asker.ask(0.0)
    asker.go_on(0.6)
    asker.asks.receive(0.7, first, answer(number))
    assert asker.ended == [EAST]


def test_who_answered_last_is_asked_first() -> None:
    asker = Asker()
    asker.ask(0.0)
    ((second, number),) = asker.go_on(0.6)
    asker.asks.receive(0.7, second, answer(number))
    to, _ = asker.ask(10.0)
    assert to == second


def test_who_is_no_gateway_is_not_waited_for() -> None:
    asker = Asker()
    to, _ = asker.ask(0.0)
    asker.asks.not_a_gateway(0.2, to)
    ((other, _),) = asker.go_on(0.3)
    assert other != to


def test_peers_that_are_no_gateways_are_not_asked_in_a_tight_loop() -> None:
    asker = Asker()
    to, _ = asker.ask(0.0)
    for _ in range(100):
        asker.asks.not_a_gateway(0.2, to)
    assert len(asker.go_on(0.3)) == 1


def test_gateways_that_are_all_busy_are_asked_less_and_less_often() -> None:
    asker = Asker()
    (to, _), now, times = asker.ask(0.0), 0.0, [0.0]
    while not asker.ended:
        asker.asks.not_a_gateway(now, to)
        now = asker.asks.next_wakeup() or now
        asker.asks.tick(now)
        for other, _ in asker.asked():
            to = other
            times.append(now)
    assert len(times) <= 4 + CONFIG.patience / CONFIG.retry_interval
    pauses = [b - a for a, b in pairwise(times)]
    assert pauses == sorted(pauses)


def test_a_zone_of_which_nobody_speaks_is_silent() -> None:
    asker = Asker(gateways=())
    assert asker.asks.look(0.0, EAST) is Found.SILENT
    assert asker.asks.next_wakeup() is None


def test_half_of_the_askers_begin_with_each_gateway() -> None:
    firsts = [
        Speakers(PeerId(f"{i:016x}"), "west", 2, Asker().summaries).speaker("east", 0)
        for i in range(200)
    ]
    assert 60 < firsts.count(NAMED[0]) < 140
    assert set(firsts) == set(NAMED[:2])
