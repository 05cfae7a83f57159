"""What a gateway tells peers of other zones about its own.

Rules of this file. It answers `ZoneAsk` from the zone's directory, as any peer of the zone
would read it, and `ZoneCheck` from membership. It asks nothing of other zones, and passes
nothing on that it heard of them.

Who sends what when:

    ZoneAsk   -> ZoneAnswer     once the key's owners have answered this peer
              -> ZoneGreeting   at once, from a peer that is no gateway, or a busy one: who
                                else may answer
    ZoneCheck -> ZoneChecked    at once; or ZoneGreeting

An answer holds what others may use. Registers whose writers are gone, what is hidden, and
marks of what nobody holds are left out: what a gateway leaves out counts as gone elsewhere.
Holders come with what is needed to reach them.

Many may ask for one key at a time: all groups of a zone that wait for its next version, say.
One read answers all who asked before it began. Who asks while it runs, or within `SPACING` of
its beginning, is answered by the next one, never by one that is older than the question: a
pin is followed by a look that has to come after it. Who repeats a question, under its number,
stays with the read that will answer it.

Bounds: `max_asked` keys at a time, each read for `patience`; `MAX_ASKERS` askers, each with one
question a key, the last. Whoever asks beyond that is told at once to ask another gateway. An
answer has `max_answer_bytes`; it starts with the newest publications.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.asking import CROSSING
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo, Publication
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.membership.members import GONE
from tensorhub_p2p.protocol.messages import (
    HolderRecord,
    Key,
    Phase,
    Register,
    Status,
    VersionRecord,
    WholeMark,
    ZoneAnswer,
    ZoneAsk,
    ZoneCheck,
    ZoneChecked,
    ZoneGreeting,
    ZoneSummary,
)

_size = msgspec.msgpack.Encoder().encode


class Home(Protocol):
    """What is asked of membership."""

    @property
    def is_gateway(self) -> bool: ...

    def zones(self) -> tuple[ZoneSummary, ...]: ...

    def status(self, peer: PeerId) -> Status | None: ...

    def info(self, peer: PeerId) -> PeerInfo | None: ...


@dataclass
class Reading:
    """One key that is read for askers, or was just now."""

    began: float = -math.inf
    request: int = 0
    """The directory's; 0 if none is under way."""
    askers: dict[PeerId, int] = field(default_factory=dict)
    """Whom this read answers, and their numbers."""
    later: dict[PeerId, int] = field(default_factory=dict)
    """Who asked since it began: the next one answers them."""


class Embassy:
    """The answers of one peer. `owners` names a key's owners in this zone."""

    def __init__(
        self,
        me: PeerInfo,
        home: Home,
        records: PendingRecords,
        owners: Callable[[Key], tuple[PeerId, ...]],
        config: AbroadConfig,
        outbox: Outbox,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._me = me
        self._home = home
        self._records = records
        self._owners = owners
        self._config = config
        self._outbox = outbox
        self._readings: dict[Key, Reading] = {}

    # -- questions --

    def receive(self, now: float, sender: PeerId, message: ZoneAsk | ZoneCheck) -> None:
        if not self._home.is_gateway:
            self._send_elsewhere(sender)
        elif isinstance(message, ZoneCheck):
            gone = tuple(p for p in message.peers if self._home.status(p) in GONE)
            unknown = tuple(p for p in message.peers if self._home.status(p) is None)
            self._outbox.send(sender, ZoneChecked(message.request, gone, unknown))
        else:
            self._on_ask(now, sender, message)

    def _on_ask(self, now: float, sender: PeerId, ask: ZoneAsk) -> None:
        key = ask.key
        if key.kind not in CROSSING:
            self.dropped["ask for what stays in its zone"] += 1
            return
        readings = self._readings
        if (key not in readings and len(readings) >= self._config.max_asked) or (
            sum(len(r.askers) + len(r.later) for r in readings.values()) >= MAX_ASKERS
        ):
            self.dropped["ask, and too many are being worked on"] += 1
            self._send_elsewhere(sender)
            return
        reading = readings.setdefault(key, Reading())
        if reading.askers.get(sender) == ask.request:
            return  # it asks again because the read takes long: that one will answer it
        reading.askers.pop(sender, None)
        reading.later[sender] = ask.request
        if not reading.request and now >= reading.began + SPACING:
            self._begin(now, key, reading)

    def _begin(self, now: float, key: Key, reading: Reading) -> None:
        """Read for all who have asked by now: what they get is no older than their question."""
        reading.began = now
        reading.askers, reading.later = reading.later, {}

        def then(_now: float, registers: Registers) -> None:
            reading.request = 0
            askers, reading.askers = reading.askers, {}
            self._answer(askers, key, registers)

        reading.request = self._records.read(now, key, then)

    # -- answers --

    def _send_elsewhere(self, to: PeerId) -> None:
        """Name the gateways: one of them may answer."""
        own = tuple(s for s in self._home.zones() if s.zone == self._me.zone)
        self._outbox.send(to, ZoneGreeting(self._me, own))

    def _answer(self, askers: dict[PeerId, int], key: Key, registers: Registers) -> None:
        shown, infos = self._fitting(key, self._shown(registers))
        owners = [self._home.info(peer) for peer in self._owners(key)]
        known = tuple(info for info in owners if info is not None)
        if len(known) < len(owners):
            known = ()
        for to, number in askers.items():
            self._outbox.send(to, ZoneAnswer(number, key, shown, infos, known))

    def _shown(self, registers: Registers) -> list[tuple[Publication, Register]]:
        """What others may use, the newest first."""
        shown = [
            (value.publication, register)
            for register in registers
            if isinstance(value := register.value, (VersionRecord, HolderRecord))
            and value.phase is not Phase.HIDDEN
            and self._home.status(register.writer) not in GONE
        ]
        named = {publication for publication, _ in shown}
        marks = [
            (value.publication, register)
            for register in registers
            if isinstance(value := register.value, WholeMark) and value.publication in named
        ]
        return sorted(marks + shown, key=lambda each: each[0], reverse=True)

    def _fitting(
        self, key: Key, shown: Iterable[tuple[Publication, Register]]
    ) -> tuple[Registers, tuple[PeerInfo, ...]]:
        """As much as an answer may hold; of holders, also how to reach them."""
        room = self._config.max_answer_bytes
        fitting: list[Register] = []
        infos: dict[PeerId, PeerInfo] = {}
        for _, register in shown:
            info = None
            if key.kind == "holders" and register.writer != NOBODY:
                info = self._home.info(register.writer)
                if info is None:
                    continue
            room -= len(_size(register))
            if info is not None and register.writer not in infos:
                room -= len(_size(info))
            if room < 0 or len(fitting) >= MAX_REGISTERS:
                break
            fitting.append(register)
            if info is not None:
                infos[register.writer] = info
        return tuple(fitting), tuple(infos.values())

    # -- time --

    def tick(self, now: float) -> None:
        """Give up what the owners don't answer in time; read what was asked for since."""
        for key, reading in list(self._readings.items()):
            if reading.request and now >= reading.began + self._config.patience:
                self._records.cancel(reading.request)
                reading.request, reading.askers = 0, {}
            if reading.request or now < reading.began + SPACING:
                continue
            if reading.later:
                self._begin(now, key, reading)
            else:
                del self._readings[key]

    def next_wakeup(self) -> float | None:
        patience = self._config.patience
        return earliest(
            *(r.began + (patience if r.request else SPACING) for r in self._readings.values())
        )


MAX_REGISTERS = 8192
"""Registers, and infos, of one answer, as messages/abroad.py has it."""
MAX_ASKERS = 4096
"""Askers that wait at a time."""
SPACING = 0.02
"""Seconds from one read of a key to the next: who asks in between shares it."""
