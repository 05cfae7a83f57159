"""The directory as group protocols see it: the own zone's, and the others' where they matter.

Rules of this file. `WideRecords` is `Records` (records.py) over several zones. It joins what
the own directory and other zones' gateways answered, and sends writes where they belong; it
decides neither what a read needs nor in which zones a write belongs: callers say.

Theory of operation. A read asks the own zone first, and is done with that if the caller finds it
`enough`. What peers hold that don't answer now (unresponsive or suspect ones) is no part of what
the caller judges, though of the answer: such a copy may be of no use for a minute, while another
zone has one that can be read. Else the zones whose summaries name the model are asked, all at
once, and the read ends with the last answer: zones that are silent, or not through within
`patience`, are left out (asking.py). So another zone costs a read nothing while the own zone has
the answer, a round trip when it hasn't, and `patience` once in `silent_seconds` when it doesn't
answer.

A watched versions key counts as changed when another zone's summary names a newer version of
the model than before.

Bounds: reads and writes by their callers, as in pending.py; a read of several zones lasts
`patience` longer than one of the own zone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.asking import CROSSING, Asks, Found, Place
from tensorhub_p2p.protocol.abroad.remote_writes import FIRST_NUMBER as REMOTE
from tensorhub_p2p.protocol.abroad.remote_writes import RemoteWrites
from tensorhub_p2p.protocol.abroad.speakers import Order, Speakers
from tensorhub_p2p.protocol.directory.pending import (
    Changed,
    Looked,
    PendingRecords,
    Read,
    Written,
)
from tensorhub_p2p.protocol.directory.records import Enough, Registers
from tensorhub_p2p.protocol.directory.registers import Mark, of_mark
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.messages import Key, Value, ZoneSummary

FIRST_NUMBER = 1 << 39
"""Numbers of reads of several zones: above the own directory's, below remote writes'."""


@dataclass
class WideRead:
    """A read that may need other zones."""

    key: Key
    then: Read
    enough: Enough
    at_home: int = 0
    """The number of the own directory's part, while it is under way."""
    own: Registers = ()
    zones: list[str] = field(default_factory=list)
    """That are in the answer."""
    waits: dict[str, None] = field(default_factory=dict)
    """That have been asked."""
    until: float = math.inf


class WideRecords:
    """The `Records` of one peer."""

    def __init__(
        self,
        zone: str,
        home: PendingRecords,
        speakers: Speakers,
        asks: Asks,
        writes: RemoteWrites,
        config: AbroadConfig,
        is_silent: Callable[[PeerId], bool],
    ) -> None:
        self._zone = zone
        self._home = home
        self._speakers = speakers
        self._asks = asks
        self._remote = writes
        self._config = config
        self._is_silent = is_silent
        self._numbers = count(FIRST_NUMBER)
        self._reads: dict[int, WideRead] = {}
        self._watches: dict[int, tuple[Key, Changed]] = {}
        self._named: dict[str, dict[str, Order]] = {}
        """By zone and model: the newest version when watchers were last told."""

    # -- reading --

    def read(
        self,
        now: float,
        key: Key,
        then: Read,
        enough: Enough | None = None,
        near: str = "",
        *,
        agreed: bool = False,
    ) -> int:
        if enough is None or key.kind not in CROSSING or not self._speakers.with_model(key.model):
            return self._home.read(now, key, then, near=near, agreed=agreed)
        number = next(self._numbers)
        self._reads[number] = read = WideRead(key, then, enough)

        def at_home(now: float, registers: Registers) -> None:
            read.at_home, read.own = 0, registers
            if not read.enough(tuple(r for r in registers if not self._is_silent(r.writer))):
                self._ask_others(now, read)
            self._end_if_through(now, number, read)

        read.at_home = self._home.read(now, key, at_home, agreed=agreed)
        return number

    def _ask_others(self, now: float, read: WideRead) -> None:
        read.until = now + self._config.patience
        for zone in self._speakers.with_model(read.key.model):
            read.waits[zone] = None
            self._look(now, read, zone)

    def _look(self, now: float, read: WideRead, zone: str) -> None:
        """Wait no longer for this zone if it has answered, or won't."""
        found = self._asks.look(now, (zone, read.key))
        if found is not Found.ASKED:
            del read.waits[zone]
        if found is Found.FRESH:
            read.zones.append(zone)

    def answered(self, now: float, place: Place) -> None:
        """A gateway answered for this key, or the zone was given up."""
        zone, key = place
        for number, read in list(self._reads.items()):
            if read.key == key and zone in read.waits and number in self._reads:
                self._look(now, read, zone)
                self._end_if_through(now, number, read)

    def _end_if_through(self, now: float, number: int, read: WideRead) -> None:
        if read.waits and now < read.until:
            return
        del self._reads[number]
        others = (self._asks.registers((zone, read.key)) for zone in read.zones)
        read.then(now, (*read.own, *(register for each in others for register in each)))

    def elsewhere(self, model: str) -> Order | None:
        return self._speakers.elsewhere(model)

    # -- writing --

    def write(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value | None,
        then: Written,
        zone: str = "",
    ) -> int:
        if self._is_home(zone):
            return self._home.write(now, key, name, generation, value, then)
        return self._remote.write(now, (zone, key), name, generation, value, then)

    def write_and_look(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value,
        then: Looked,
        *,
        agreed: bool = False,
    ) -> int:
        return self._home.write_and_look(now, key, name, generation, value, then, agreed=agreed)

    def mark(self, now: float, key: Key, value: Mark, then: Written, zone: str = "") -> int:
        if self._is_home(zone):
            return self._home.mark(now, key, value, then)
        return self._remote.put(now, (zone, key), of_mark(value), then)

    def forget(self, now: float, key: Key, name: str) -> None:
        self._home.forget(now, key, name)

    def _is_home(self, zone: str) -> bool:
        return zone in ("", self._zone)

    def cancel(self, request: int) -> None:
        read = self._reads.pop(request, None)
        if read is not None:
            self._home.cancel(read.at_home)
        elif request >= REMOTE:
            self._remote.cancel(request)
        else:
            self._home.cancel(request)

    # -- watching --

    def watch(self, now: float, key: Key, then: Changed, *, pins: bool = False) -> int:
        number = self._home.watch(now, key, then, pins=pins)
        self._watches[number] = (key, then)
        return number

    def unwatch(self, now: float, watch: int) -> None:
        self._watches.pop(watch, None)
        self._home.unwatch(now, watch)

    def known(self, key: Key) -> Registers | None:
        return self._home.known(key)

    def heard(self, now: float, summary: ZoneSummary) -> None:
        """Another zone says what it has: tell who watches for a newer version."""
        self._asks.heard_from(summary.zone)
        named = {hint.model: (hint.epoch, hint.version) for hint in summary.newest}
        before = self._named.get(summary.zone, {})
        self._named[summary.zone] = named
        for key, then in list(self._watches.values()):
            if key.kind == "versions" and named.get(key.model) != before.get(key.model):
                then(now)

    # -- time --

    def tick(self, now: float) -> None:
        for number, read in list(self._reads.items()):
            if now >= read.until and number in self._reads:
                self._end_if_through(now, number, read)

    def next_wakeup(self) -> float | None:
        return earliest(*(read.until for read in self._reads.values() if read.until < math.inf))
