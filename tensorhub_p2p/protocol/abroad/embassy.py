"""What a gateway tells peers of other zones about its own.

Rules of this file. It answers `ZoneAsk` from the zone's directory, as any peer of the zone
would read it, and `ZoneCheck` from membership. It asks nothing of other zones, and passes
nothing on that it heard of them.

Who sends what when:

    ZoneAsk   -> ZoneAnswer     once the key's owners have answered this peer
              -> ZoneGreeting   at once, from a peer that is no gateway: who they are
    ZoneCheck -> ZoneChecked    at once; or ZoneGreeting

An answer holds what others may use. Registers whose writers are gone, what is hidden, and
marks of what nobody holds are left out: what a gateway leaves out counts as gone elsewhere.
Holders come with what is needed to reach them.

Bounds: `max_asked` asks at a time, one a key and asker, each for `patience`; more are dropped,
and askers turn to the other gateway. An answer has `max_answer_bytes`; it starts with the
newest publications.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Asked:
    """One ask that is being worked on."""

    number: int
    request: int
    """The directory's."""
    until: float


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
        self._asked: dict[tuple[PeerId, Key], Asked] = {}

    # -- questions --

    def receive(self, now: float, sender: PeerId, message: ZoneAsk | ZoneCheck) -> None:
        if not self._home.is_gateway:
            own = tuple(s for s in self._home.zones() if s.zone == self._me.zone)
            self._outbox.send(sender, ZoneGreeting(self._me, own))
        elif isinstance(message, ZoneCheck):
            gone = tuple(p for p in message.peers if self._home.status(p) in GONE)
            unknown = tuple(p for p in message.peers if self._home.status(p) is None)
            self._outbox.send(sender, ZoneChecked(message.request, gone, unknown))
        else:
            self._on_ask(now, sender, message)

    def _on_ask(self, now: float, sender: PeerId, ask: ZoneAsk) -> None:
        place = (sender, ask.key)
        if ask.key.kind not in CROSSING:
            self.dropped["ask for what stays in its zone"] += 1
            return
        before = self._asked.pop(place, None)
        if before is not None:
            self._records.cancel(before.request)
        if len(self._asked) >= self._config.max_asked:
            self.dropped["ask, and too many are being worked on"] += 1
            return

        def then(_now: float, registers: Registers) -> None:
            asked = self._asked.pop(place, None)
            if asked is not None:
                self._answer(sender, asked.number, ask.key, registers)

        request = self._records.read(now, ask.key, then)
        until = now + self._config.patience
        self._asked[place] = Asked(ask.request, request, until)

    # -- answers --

    def _answer(self, to: PeerId, number: int, key: Key, registers: Registers) -> None:
        shown, infos = self._fitting(key, self._shown(registers))
        owners = [self._home.info(peer) for peer in self._owners(key)]
        known = tuple(info for info in owners if info is not None)
        answer = ZoneAnswer(number, key, shown, infos, known if len(known) == len(owners) else ())
        self._outbox.send(to, answer)

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
        """Give up what the owners don't answer in time: nobody waits for it any more."""
        for place, asked in list(self._asked.items()):
            if now >= asked.until:
                del self._asked[place]
                self._records.cancel(asked.request)

    def next_wakeup(self) -> float | None:
        return earliest(*(asked.until for asked in self._asked.values()))


MAX_REGISTERS = 8192
"""Registers, and infos, of one answer, as messages.py has it."""
