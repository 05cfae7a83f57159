"""What a peer makes of garbage from other zones: messages of the right types that are forged,
mislabelled, replayed or come much too often. It is counted and dropped, and nothing grows."""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz_membership import weight
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.asking import Asks, Found, Place
from tensorhub_p2p.protocol.abroad.embassy import Embassy
from tensorhub_p2p.protocol.abroad.foreigners import Foreigners
from tensorhub_p2p.protocol.abroad.remote_writes import FIRST_NUMBER, RemoteWrites
from tensorhub_p2p.protocol.abroad.roll_call import RollCall
from tensorhub_p2p.protocol.abroad.speakers import Speakers
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    PeerId,
    PeerInfo,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.messages import (
    DirectoryMismatch,
    DirectoryRefused,
    DirectoryValue,
    DirectoryWrite,
    DirectoryWritten,
    HolderRecord,
    Key,
    Message,
    Phase,
    Pin,
    Register,
    Status,
    Value,
    VersionHint,
    VersionRecord,
    WholeMark,
    ZoneAnswer,
    ZoneAsk,
    ZoneCheck,
    ZoneChecked,
    ZoneGreeting,
    ZoneSummary,
)

CONFIG = AbroadConfig(max_asked=6, max_keys=6, max_registers=40, max_peers=20)
MAX_WEIGHT = 1500
"""Entries of all tables, with these bounds."""
KEYS = (Key("versions", "policy"), Key("holders", "policy", "0"), Key("group", "policy", "a"))
PLACES = tuple((zone, key) for zone in ("east", "north") for key in KEYS[:2])
GATEWAYS = {zone: tuple(PeerId(f"{zone}-g{i}") for i in range(2)) for zone in ("east", "north")}
OWNERS = {zone: tuple(PeerId(f"{zone}-o{i}") for i in range(3)) for zone in ("east", "north")}
AT_HOME = (PeerId("me"), PeerId("neighbour"))


def info(peer: PeerId, zone: str) -> PeerInfo:
    return PeerInfo(peer, peer, zone, (f"{peer}:1",))


PUBLICATION = Publication(0, 1, "t", Generation(1, 1))
SLOT = Slot(Group("policy", "t"), 0)
VALUES: tuple[Value | None, ...] = (
    VersionRecord(SLOT, 1, PUBLICATION, Phase.READY, PUBLICATION.generation),
    HolderRecord(SLOT, PUBLICATION, Phase.READY, True, 10),
    WholeMark(PUBLICATION, 1),
    Pin(PUBLICATION, Group("policy", "w"), Generation(1, 1), 1, "west"),
    None,
)


class Desk:
    """All parts of one peer, a gateway of "west", that deal with other zones; and its zone."""

    is_gateway = True

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.now = 0.0
        self.reads: dict[int, Callable[[float, Registers], None]] = {}
        self._began = 0
        self.ended: list[Place] = []
        self.written: list[object] = []
        foreigners = Foreigners(CONFIG.max_peers)
        speakers = Speakers(AT_HOME[0], "west", 2, self.zones)
        self.asks = Asks(
            speakers, foreigners, CONFIG, self.outbox, AT_HOME.__contains__, self._answered
        )
        self.writes = RemoteWrites(AT_HOME[0], self.asks, CONFIG, self.outbox)
        self.roll_call = RollCall(speakers, foreigners, CONFIG, self.outbox)
        me = info(AT_HOME[0], "west")
        self.embassy = Embassy(me, self, self, lambda _: AT_HOME, CONFIG, self.outbox)  # type: ignore[arg-type]
        self.foreigners = foreigners
        self.parts = (self.asks, self.writes, self.roll_call, self.embassy)

    def _answered(self, now: float, place: Place) -> None:
        self.writes.answered(now, place)
        self.ended.append(place)

    # membership and the directory at home

    def zones(self) -> tuple[ZoneSummary, ...]:
        newest = (VersionHint("policy", 0, 1),)
        named = {zone: tuple(info(p, zone) for p in peers) for zone, peers in GATEWAYS.items()}
        return tuple(ZoneSummary(zone, 1, infos, 4, newest) for zone, infos in named.items())

    def status(self, peer: PeerId) -> Status | None:
        return Status.ALIVE if peer in AT_HOME else None

    def info(self, peer: PeerId) -> PeerInfo | None:
        return info(peer, "west") if peer in AT_HOME else None

    def read(self, _now: float, _key: Key, then: Callable[[float, Registers], None]) -> int:
        self._began += 1
        self.reads[self._began] = then
        return self._began

    def cancel(self, request: int) -> None:
        self.reads.pop(request, None)

    # what happens

    def receive(self, sender: PeerId, message: Message) -> None:
        if isinstance(message, (ZoneAsk, ZoneCheck)):
            self.embassy.receive(self.now, sender, message)
        elif isinstance(message, ZoneAnswer):
            self.asks.receive(self.now, sender, message)
        elif isinstance(message, ZoneChecked):
            self.roll_call.receive(self.now, sender, message)
        elif isinstance(message, ZoneGreeting):
            self.asks.not_a_gateway(self.now, sender)
        elif isinstance(
            message, (DirectoryWritten, DirectoryRefused, DirectoryMismatch, DirectoryValue)
        ):
            self.writes.receive(self.now, sender, message)

    def run(self, seconds: float) -> None:
        """Tick whenever something is due; nobody wants to be called in the past for ever."""
        end = self.now + seconds
        for _ in range(10_000):
            due = [w for part in self.parts if (w := part.next_wakeup()) is not None]
            if not due or min(due) > end:
                self.now = end
                return
            self.now = max(self.now, min(due))
            for part in self.parts:
                part.tick(self.now)
        raise AssertionError("it spins")

    def run_with_others(self, seconds: float) -> None:
        """The other zones are there, and answer. Whom a liar had named, is nowhere."""
        for _ in range(int(10 * seconds)):
            self.run(0.1)
            for to, message in self.sent():
                zone = to.partition("-")[0]
                if isinstance(message, ZoneAsk) and to in GATEWAYS.get(zone, ()):
                    owners = tuple(info(peer, zone) for peer in OWNERS[zone])
                    self.receive(to, ZoneAnswer(message.request, message.key, (), (), owners))
                elif isinstance(message, DirectoryWrite) and to in OWNERS.get(zone, ()):
                    self.receive(to, DirectoryWritten(message.request))

    def sent(self) -> list[tuple[PeerId, Message]]:
        return [(i.to, i.message) for i in self.outbox.drain() if isinstance(i, Send)]

    def dropped(self) -> int:
        return sum(sum(part.dropped.values()) for part in self.parts)

    def work(self) -> None:
        """All that such a peer does itself."""
        for place in PLACES:
            self.asks.look(self.now, place)
        for zone, peers in OWNERS.items():
            self.roll_call.wonder(zone, peers[0])
        for number, (zone, key) in enumerate(PLACES):
            for value in (VALUES[3], None):
                name = f"{number}{value is None}"
                self.writes.write(self.now, (zone, key), name, 1, value, self._wrote)

    def _wrote(self, _now: float, refused: object) -> None:
        self.written.append(refused)


PEERS = (*AT_HOME, NOBODY, *GATEWAYS["east"], *GATEWAYS["north"], *OWNERS["east"])
ZONES = ("east", "north", "west", "nowhere")


class Liar:
    """Says what has the right form."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def peer(self) -> PeerId:
        rng = self._rng
        return rng.choice(PEERS) if rng.random() < 0.8 else PeerId(f"p{rng.randrange(1000)}")

    def peers(self, most: int) -> tuple[PeerId, ...]:
        return tuple(self.peer() for _ in range(self._rng.randrange(most + 1)))

    def _info(self) -> PeerInfo:
        return info(self.peer(), self._rng.choice(ZONES))

    def _infos(self) -> tuple[PeerInfo, ...]:
        return tuple(self._info() for _ in range(self._rng.randrange(5)))

    def _number(self) -> int:
        """Of a request: often one that there is or was."""
        rng = self._rng
        first = rng.choice((0, 0, FIRST_NUMBER - 2, FIRST_NUMBER, 2**63))
        return first + rng.randrange(40)

    def _key(self) -> Key:
        if self._rng.random() < 0.8:
            return self._rng.choice(KEYS)
        return Key(self._rng.choice(("versions", "nonsense")), f"m{self._rng.randrange(1000)}")

    def _registers(self) -> Registers:
        rng = self._rng
        return tuple(
            Register(self.peer(), f"{rng.randrange(1000)}", 1, rng.randrange(3), rng.choice(VALUES))
            for _ in range(rng.randrange(30))
        )

    def message(self) -> Message:
        number = self._number()
        lies: tuple[Callable[[], Message], ...] = (
            lambda: ZoneAsk(number, self._key()),
            lambda: ZoneCheck(number, self.peers(64)),
            lambda: ZoneAnswer(
                number, self._key(), self._registers(), self._infos(), self._infos()
            ),
            lambda: ZoneChecked(number, self.peers(64), self.peers(64)),
            lambda: ZoneGreeting(self._info()),
            lambda: DirectoryWritten(number),
            lambda: DirectoryRefused(number, "no"),
            lambda: DirectoryMismatch(number),
            lambda: DirectoryValue(number, self._registers()),
        )
        return self._rng.choice(lies)()

    def pause(self) -> float:
        return self._rng.choice((0.0, 0.01, 0.3, 3.0))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
@example(1_468_821_562)  # it names an owner whose name is empty
def test_garbage_of_the_right_types_breaks_nothing_and_fills_nothing(seed: int) -> None:
    """What a gateway answers in earnest still counts afterwards."""
    desk, liar = Desk(), Liar(seed)
    said: list[tuple[PeerId, Message]] = []
    for step in range(400):
        if step % 80 == 0:
            desk.work()
        said.append((liar.peer(), liar.message()))
        desk.receive(*said[-1])
        desk.receive(*said[step // 2])  # replayed
        if step % 4 == 0:
            desk.run(liar.pause())
        if step % 100 == 99:
            desk.outbox.drain()
            assert weight(desk.parts) < MAX_WEIGHT
    assert desk.dropped() > 100
    desk.outbox.drain()
    desk.run_with_others(CONFIG.silent_seconds + 2 * CONFIG.withdraw_retry_limit)
    desk.asks.look(desk.now, PLACES[0])
    desk.run_with_others(1.0)
    assert desk.asks.owners(PLACES[0]) == OWNERS["east"]
    assert desk.asks.look(desk.now, PLACES[0]) is Found.FRESH
    assert desk.writes.next_wakeup() is None, "all is written"
    desk.run(100.0)
    assert desk.embassy.next_wakeup() is desk.roll_call.next_wakeup() is None


def asked(desk: Desk, place: Place) -> tuple[PeerId, int]:
    assert desk.asks.look(desk.now, place) is Found.ASKED
    ((to, message),) = [(to, m) for to, m in desk.sent() if isinstance(m, ZoneAsk)]
    return to, message.request


def test_an_answer_under_another_label_is_dropped_and_so_is_its_replay() -> None:
    desk = Desk()
    to, number = asked(desk, PLACES[0])
    stranger, good = PeerId("stranger"), ZoneAnswer(number, KEYS[0], ())
    for sender, message in (
        (stranger, good),
        (GATEWAYS["north"][0], good),
        (to, ZoneAnswer(number + 1, KEYS[0], ())),
        (to, ZoneAnswer(number, KEYS[1], ())),
    ):
        desk.receive(sender, message)
    assert desk.asks.dropped["answer that was not asked for"] == 4
    assert desk.ended == []
    for _ in range(10):
        desk.receive(to, good)
    assert desk.ended == [PLACES[0]], "once"
    assert desk.asks.dropped["answer that was not asked for"] == 13


def test_of_an_answer_only_what_its_zone_can_say_is_taken() -> None:
    desk = Desk()
    to, number = asked(desk, PLACES[1])
    good = Register(OWNERS["east"][0], "x", 1, 1, VALUES[1])
    bad = (
        Register(AT_HOME[1], "x", 1, 1, VALUES[1]),
        Register(NOBODY, "x", 1, 1, VALUES[1]),
        Register(OWNERS["east"][0], "x", 1, 1, VALUES[0]),
        Register(OWNERS["east"][0], "x", 1, 1, VALUES[3]),
        Register(OWNERS["east"][0], "x", 1, 1, None),
    )
    lies = (info(AT_HOME[1], "east"), info(OWNERS["north"][0], "north"))
    desk.receive(to, ZoneAnswer(number, KEYS[1], (*bad, good), lies, lies))
    assert desk.asks.registers(PLACES[1]) == (good,)
    assert desk.asks.owners(PLACES[1]) == ()
    assert desk.asks.dropped["what doesn't belong into an answer"] == len(bad) + 2 * len(lies)
    assert len(desk.foreigners) == 1


def test_a_roll_call_counts_for_those_it_asked_about_and_once() -> None:
    desk = Desk()
    victim, other = OWNERS["east"][:2]
    desk.roll_call.wonder("east", victim)
    desk.run(0.0)
    ((to, check),) = desk.sent()
    assert isinstance(check, ZoneCheck)
    for sender in (PeerId("stranger"), victim, GATEWAYS["north"][0]):
        desk.receive(sender, ZoneChecked(check.request, (victim,)))
    desk.receive(to, ZoneChecked(check.request + 1, (victim,)))
    assert desk.roll_call.dropped["check that was not asked for"] == 4
    assert not desk.foreigners.is_gone(victim)
    desk.receive(to, ZoneChecked(check.request, (other, *AT_HOME)))
    assert not any(map(desk.foreigners.is_gone, (victim, other, *AT_HOME))), "nobody asked"
    desk.receive(to, ZoneChecked(check.request, (victim,)))
    assert not desk.foreigners.is_gone(victim), "it was answered"
    assert desk.roll_call.dropped["check that was not asked for"] == 5


def test_a_write_is_done_by_its_owners_and_by_nobody_else_however_often_they_say_so() -> None:
    desk = Desk()
    to, number = asked(desk, PLACES[0])
    own = tuple(info(peer, "east") for peer in OWNERS["east"])
    desk.receive(to, ZoneAnswer(number, KEYS[0], (), (), own))
    write = desk.writes.write(desk.now, PLACES[0], "pin", 1, VALUES[3], desk._wrote)
    for _ in range(5):
        desk.receive(OWNERS["east"][0], DirectoryWritten(write))
        desk.receive(OWNERS["north"][0], DirectoryWritten(write))
        desk.receive(PeerId("stranger"), DirectoryRefused(write, "no"))
        desk.receive(OWNERS["east"][1], DirectoryWritten(write + 1))
    assert desk.written == []
    assert desk.writes.dropped["answer to no write of this peer"] == 15
    desk.receive(OWNERS["east"][1], DirectoryWritten(write))
    assert desk.written == [None]


def test_an_embassy_keeps_as_many_keys_as_it_may_whatever_is_asked() -> None:
    desk = Desk()
    asks = [Key("versions", f"model-{number}") for number in range(100)]
    for number, key in enumerate([*asks, *KEYS, Key("nonsense", "policy")]):
        desk.receive(PeerId(f"p{number}"), ZoneAsk(number, key))
    assert len(desk.reads) == CONFIG.max_asked
    greeted = [to for to, message in desk.sent() if isinstance(message, ZoneGreeting)]
    assert len(greeted) == desk.embassy.dropped["ask, and too many are being worked on"] == 96
    assert desk.embassy.dropped["ask for what stays in its zone"] == 2
    desk.run(10 * CONFIG.patience)
    assert desk.reads == {}, "what nobody answers is given up"
    assert weight(desk.embassy) < 300
