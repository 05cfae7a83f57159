"""A gateway answers many askers of other zones: with few reads, none older than its question."""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.embassy import MAX_ASKERS, SPACING, Embassy
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, PeerInfo, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.messages import (
    Key,
    Phase,
    Register,
    Status,
    VersionRecord,
    ZoneAnswer,
    ZoneAsk,
    ZoneGreeting,
    ZoneSummary,
)

CONFIG = AbroadConfig()
KEY = Key("versions", "policy")
ME = PeerInfo(PeerId("me"), "me", "east", ("me:1",))
HOLDER = PeerId("holder")


class Desk:
    """A gateway's embassy, its zone's membership and the reads that it began."""

    is_gateway = True

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.reads: list[tuple[Key, Callable[[float, Registers], None]]] = []
        self.cancelled: list[int] = []
        self.embassy = Embassy(ME, self, self, lambda _key: (), CONFIG, self.outbox)  # type: ignore[arg-type]

    # membership

    def zones(self) -> tuple[ZoneSummary, ...]:
        return (ZoneSummary("east", 1, (ME,)), ZoneSummary("west", 1, ()))

    def status(self, _peer: PeerId) -> Status:
        return Status.ALIVE

    def info(self, _peer: PeerId) -> PeerInfo:
        return ME

    # the directory

    def read(self, _now: float, key: Key, then: Callable[[float, Registers], None]) -> int:
        self.reads.append((key, then))
        return len(self.reads)

    def cancel(self, request: int) -> None:
        self.cancelled.append(request)

    # what a test does

    def ask(self, now: float, asker: str, number: int = 1, key: Key = KEY) -> None:
        self.embassy.receive(now, PeerId(asker), ZoneAsk(number, key))

    def done(self, now: float, version: int, read: int = -1) -> None:
        """The owners answer a read, the last one by default, with this version."""
        what = Publication(0, version, "trainer", Generation(1, 1))
        record = VersionRecord(Slot(Group("policy", "t"), 0), 1, what, Phase.READY, what.generation)
        self.reads[read][1](now, (Register(HOLDER, "0@t", 1, version, record),))

    def go_on(self, until: float) -> None:
        while (due := self.embassy.next_wakeup()) is not None and due <= until:
            self.embassy.tick(due)

    def answers(self) -> list[tuple[str, int, int]]:
        """Who was answered since: under which number, with which version."""
        sent = [item for item in self.outbox.drain() if isinstance(item, Send)]
        return [
            (item.to, item.message.request, item.message.registers[0].value.publication.version)  # type: ignore[union-attr]
            for item in sent
            if isinstance(item.message, ZoneAnswer)
        ]


def test_all_who_ask_while_a_key_is_read_share_the_next_read() -> None:
    desk = Desk()
    for number in range(300):
        desk.ask(number * 1e-5, f"p{number}")
    assert len(desk.reads) == 1
    desk.done(0.004, version=1)
    assert desk.answers() == [("p0", 1, 1)]
    desk.go_on(SPACING)
    assert len(desk.reads) == 2
    desk.done(SPACING + 0.004, version=2)
    assert desk.answers() == [(f"p{number}", 1, 2) for number in range(1, 300)]


def test_no_answer_is_older_than_its_question() -> None:
    """The asker has written a pin, say, after the read began that is under way."""
    desk = Desk()
    desk.ask(0.0, "early")
    desk.ask(0.001, "late")
    desk.ask(0.001, "early", number=2)
    desk.done(0.002, version=1)
    assert desk.answers() == []
    desk.ask(0.003, "later")
    assert len(desk.reads) == 1, "not in a tight loop"
    desk.go_on(SPACING)
    desk.done(SPACING, version=2)
    assert sorted(desk.answers()) == [("early", 2, 2), ("late", 1, 2), ("later", 1, 2)]


def test_who_asks_again_because_a_read_takes_long_is_answered_by_it() -> None:
    desk = Desk()
    for again in range(4):
        desk.ask(again * CONFIG.retry_interval, "p")
    desk.done(3.5 * CONFIG.retry_interval, version=1)
    assert desk.answers() == [("p", 1, 1)]
    desk.go_on(10.0)
    assert len(desk.reads) == 1, "and by no other"
    assert desk.embassy.next_wakeup() is None


def test_who_asks_when_nobody_did_of_late_does_not_wait() -> None:
    desk = Desk()
    for now in (0.0, 1.0, 2.0):
        desk.ask(now, "p")
        desk.done(now, version=1)
        assert desk.answers() == [("p", 1, 1)]
        desk.go_on(now + 0.5)
    assert desk.embassy.next_wakeup() is None, "nothing is remembered"


def test_a_read_that_the_owners_do_not_answer_is_given_up_and_the_next_one_begins() -> None:
    desk = Desk()
    desk.ask(0.0, "p")
    desk.ask(1.0, "q")
    desk.go_on(CONFIG.patience)
    assert desk.cancelled == [1]
    assert len(desk.reads) == 2
    desk.go_on(2 * CONFIG.patience + SPACING)
    assert desk.cancelled == [1, 2]
    assert desk.embassy.next_wakeup() is None


def greeted(desk: Desk) -> list[str]:
    """Who was sent elsewhere since, each with the names of this zone's gateways."""
    sent = [i for i in desk.outbox.drain() if isinstance(i, Send)]
    greetings = [(i.to, i.message) for i in sent if isinstance(i.message, ZoneGreeting)]
    assert all([s.zone for s in greeting.summaries] == ["east"] for _, greeting in greetings)
    return [to for to, _ in greetings]


def test_a_busy_gateway_says_so_at_once() -> None:
    desk = Desk()
    for number in range(CONFIG.max_asked):
        desk.ask(0.0, "p", key=Key("versions", f"m{number}"))
    assert greeted(desk) == []
    desk.ask(0.0, "q", key=Key("versions", "one-more"))
    assert greeted(desk) == ["q"]
    desk.ask(0.0, "q", key=Key("versions", "m0"))
    assert greeted(desk) == [], "that one is being read anyway"
    assert desk.embassy.dropped.total() == 1


def test_askers_that_wait_are_bounded() -> None:
    desk = Desk()
    for number in range(MAX_ASKERS):
        desk.ask(0.0, f"p{number}")
    assert greeted(desk) == []
    desk.ask(0.0, "one-more")
    assert greeted(desk) == ["one-more"]
