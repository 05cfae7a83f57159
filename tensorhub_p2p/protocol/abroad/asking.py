"""Reading another zone's directory, through one of its gateways.

Rules of this file. `Asks` keeps what other zones answered, and decides when a zone is asked
anew and when it is given up; whom to ask is speakers.py's. It knows keys and registers, but
not what they are read for.

Theory of operation. A zone is asked for one key at a time (`ZoneAsk`); each `retry_interval`
without an answer, the next gateway is; sooner if who was asked is no gateway, or a busy one, but
each time it takes twice as long. The first answer counts, whoever of them gave it. After
`patience` the zone is *silent*: for `silent_seconds` it is not asked at all, and nobody waits
for it.

An answer is *fresh* for `revisit_interval`, unless the zone's summary names a newer version
of the model than when it was asked, or this peer wrote to the key there (`invalidate`). So
what was whole in a zone before its summary said so is in every answer that is used after.

    look says   FRESH    what is known will do
                ASKED    the zone has been asked: `on_end` tells when that is over
                SILENT   it is left out

Bounds: `max_keys` keys, `max_registers` registers; the ones used least lately go first. Where
all of them are being asked for, a further one is SILENT. Answers that nobody asked for, of
other peers than were asked, or about another key are dropped; and of an answer, registers
that don't belong under the key, that are by peers of this zone, and infos of other zones'
peers. All of that is counted in `dropped`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.foreigners import Foreigners
from tensorhub_p2p.protocol.abroad.speakers import Order, Speakers
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    HolderRecord,
    Key,
    Register,
    Retraction,
    VersionRecord,
    WholeMark,
    ZoneAnswer,
    ZoneAsk,
)

CROSSING = {"versions": (VersionRecord, WholeMark, Retraction), "holders": (HolderRecord,)}
"""By kind of key: what crosses between zones. Groups live in one zone."""
Place = tuple[str, Key]
"""A zone, and a key of its directory."""


class Found(Enum):
    FRESH = auto()
    ASKED = auto()
    SILENT = auto()


@dataclass
class Known:
    """One key of one zone, as far as it is known here."""

    registers: Registers = ()
    owners: tuple[PeerInfo, ...] = ()
    fresh_until: float = -math.inf
    named: Order | None = None
    """The newest version that the zone's summary named when it was asked."""
    number: int = 0
    """Of the ask under way; 0 if there is none."""
    asked: list[PeerId] = field(default_factory=list)
    retry_at: float = 0.0
    ends_at: float = 0.0


class Asks:
    """What one peer asked of other zones. `is_home` tells the peers of this zone."""

    def __init__(
        self,
        speakers: Speakers,
        foreigners: Foreigners,
        config: AbroadConfig,
        outbox: Outbox,
        is_home: Callable[[PeerId], bool],
        on_end: Callable[[float, Place], None],
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._speakers = speakers
        self._foreigners = foreigners
        self._config = config
        self._outbox = outbox
        self._is_home = is_home
        self._on_end = on_end
        self._known: OrderedDict[Place, Known] = OrderedDict()
        self._numbers = count(1)
        self._asked: dict[int, Place] = {}
        self._silent: dict[str, float] = {}
        """Zones that did not answer, and until when they are left alone."""

    # -- asking --

    def look(self, now: float, place: Place) -> Found:
        """See to it that the key is known as it is now in that zone."""
        known = self._known.get(place)
        if known is not None and self._is_fresh(now, place, known):
            self._known.move_to_end(place)
            return Found.FRESH
        if known is not None and known.number:
            return Found.ASKED
        if now < self._silent.get(place[0], -math.inf):
            return Found.SILENT
        full = known is None and len(self._asked) >= self._config.max_keys
        if full or self._speakers.speaker(place[0], 0) is None:
            return Found.SILENT
        self._begin(now, place, self._known.setdefault(place, Known()))
        return Found.ASKED

    def _begin(self, now: float, place: Place, known: Known) -> None:
        self._known.move_to_end(place)
        known.number = next(self._numbers)
        known.named = self._speakers.named(place[0], place[1].model)
        known.asked = []
        known.ends_at = now + self._config.patience
        self._asked[known.number] = place
        self._ask(now, place, known)

    def _ask(self, now: float, place: Place, known: Known) -> None:
        """Ask the next gateway."""
        known.retry_at = now + self._config.retry_interval
        speaker = self._speakers.speaker(place[0], len(known.asked))
        if speaker is not None:
            known.asked.append(speaker)
            self._outbox.send(speaker, ZoneAsk(known.number, place[1]))

    def invalidate(self, now: float, place: Place) -> None:
        """This peer changed the key there: what was read of it, or is being read, is old."""
        known = self._known.get(place)
        if known is None:
            return
        known.fresh_until = -math.inf
        if known.number:
            self._end(known)
            self._begin(now, place, known)

    # -- what is known --

    def _is_fresh(self, now: float, place: Place, known: Known) -> bool:
        named = self._speakers.named(place[0], place[1].model)
        return now < known.fresh_until and named == known.named

    def registers(self, place: Place) -> Registers:
        """What the zone answered last."""
        known = self._known.get(place)
        return known.registers if known is not None else ()

    def owners(self, place: Place) -> tuple[PeerId, ...]:
        """Who owned the key there, by the last answer; () if that isn't known."""
        known = self._known.get(place)
        return tuple(info.peer_id for info in known.owners) if known is not None else ()

    # -- answers --

    def receive(self, now: float, sender: PeerId, answer: ZoneAnswer) -> None:
        place = self._asked.get(answer.request)
        known = self._known.get(place) if place is not None else None
        if place is None or known is None or sender not in known.asked or answer.key != place[1]:
            self.dropped["answer that was not asked for"] += 1
            return
        self._end(known)
        self._take(now, place, known, answer)
        self._speakers.answered(place[0], sender)
        self._silent.pop(place[0], None)
        self._trim()
        self._on_end(now, place)

    def _take(self, now: float, place: Place, known: Known, answer: ZoneAnswer) -> None:
        zone, key = place
        self._known.move_to_end(place)
        known.registers = tuple(r for r in answer.registers if self._belongs(key, r))
        infos = [i for i in (*answer.infos, *answer.owners) if self._is_of(zone, i)]
        known.owners = tuple(info for info in answer.owners if self._is_of(zone, info))
        known.fresh_until = now + self._config.revisit_interval
        unfit = len(answer.registers) - len(known.registers)
        unfit += len(answer.infos) + len(answer.owners) - len(infos)
        if unfit:
            self.dropped["what doesn't belong into an answer"] += unfit
        for register in known.registers:
            if register.writer != NOBODY:
                self._foreigners.meet(zone, register.writer)
        for info in infos:
            self._foreigners.meet(zone, info.peer_id, info)

    def _belongs(self, key: Key, register: Register) -> bool:
        if not isinstance(register.value, CROSSING.get(key.kind, ())):
            return False
        by_nobody = register.writer == NOBODY
        is_mark = isinstance(register.value, (WholeMark, Retraction))
        return by_nobody == is_mark and not self._is_home(register.writer)

    def _is_of(self, zone: str, info: PeerInfo) -> bool:
        return info.zone == zone and not self._is_home(info.peer_id)

    def awaits(self, peer: PeerId) -> bool:
        """Whether an answer of this peer would count."""
        return any(peer in self._known[place].asked for place in self._asked.values())

    def not_a_gateway(self, now: float, sender: PeerId) -> None:
        """This peer answered that it doesn't speak for its zone, or is busy: ask the next one."""
        for place in list(self._asked.values()):
            known = self._known[place]
            if known.asked and known.asked[-1] == sender:
                self._speakers.is_mute(place[0], sender)
                pause = self._config.retry_interval / 20 * 2 ** len(known.asked)
                known.retry_at = min(known.retry_at, now + pause)

    def heard_from(self, zone: str) -> None:
        """There is news from this zone: it needn't be left alone any longer."""
        self._silent.pop(zone, None)

    # -- the end of an ask --

    def _end(self, known: Known) -> None:
        if known.number:
            del self._asked[known.number]
            known.number = 0

    def _give_up(self, now: float, place: Place, known: Known) -> None:
        """The zone does not answer."""
        self._end(known)
        for peer in known.asked:
            self._speakers.is_mute(place[0], peer)
        self._silent[place[0]] = now + self._config.silent_seconds
        known.registers, known.owners, known.fresh_until = (), (), -math.inf
        self._on_end(now, place)

    def _trim(self) -> None:
        """Forget what was used least lately, beyond the bounds."""
        total = sum(len(known.registers) for known in self._known.values())
        config = self._config
        for place, known in list(self._known.items()):
            if len(self._known) <= config.max_keys and total <= config.max_registers:
                return
            if not known.number and place != next(reversed(self._known)):
                total -= len(known.registers)
                del self._known[place]

    # -- time --

    def tick(self, now: float) -> None:
        for place in list(self._asked.values()):
            known = self._known[place]
            if not known.number:
                continue
            if now >= known.ends_at:
                self._give_up(now, place, known)
            elif now >= known.retry_at:
                self._ask(now, place, known)
        self._silent = {zone: until for zone, until in self._silent.items() if now < until}

    def next_wakeup(self) -> float | None:
        waiting = [self._known[place] for place in self._asked.values()]
        return earliest(*(min(known.retry_at, known.ends_at) for known in waiting))
