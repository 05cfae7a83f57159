"""Writing to another zone's directory: pins and marks, and taking pins back.

Rules of this file. A `RemoteWrites` sends registers to the owners of a key in another zone and
counts their answers; what is written and where is decided by resolving.py. The owners'
judgement is that of owner.py and admission.py, as for writers of their own zone.

Theory of operation. A gateway's answer for the key names its owners (asking.py). The register
goes straight to them, as a `DirectoryWrite` with the hash of that list; W of them must take it
(quorum.py). To those that stay silent it is sent again each `retry_interval`. An owner that has
another list says so: then the gateway is asked for the list anew.

    AIMING    the owners aren't known, or have changed: wait for the gateway's answer
    WRITING   until W owners have it, or one refuses

A pin or mark that isn't done within `write_patience` counts as refused: whoever decides reads
again, without a zone that is silent. A *withdrawal* is tried until it is done, at growing
pauses: a pin that stays behind would hold the version there for as long as this peer lives. Each
time the gateway is asked for the list as well, as those that are silent may be gone for good.

Limits. The fence of a replaced generation is known in its own zone only: here its pins are
taken. They hold a version back until that leader learns of its end; no member acts on them.
When all owners of a key die at once, the pins there are gone; nobody writes them again.

Bounds: one write for each zone, key and register; a later one replaces it. Answers to what was
never written, or of others than its owners, are counted in `dropped`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.asking import Asks, Found, Place
from tensorhub_p2p.protocol.directory.quorum import Request
from tensorhub_p2p.protocol.directory.records import Refused
from tensorhub_p2p.protocol.directory.ring import owners_hash
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    DirectoryMismatch,
    DirectoryRefused,
    DirectoryValue,
    DirectoryWrite,
    DirectoryWritten,
    Register,
    Value,
)

FIRST_NUMBER = 1 << 40
"""Numbers of requests to other zones' owners: the own directory never counts that far."""
ANSWERS = (DirectoryWritten, DirectoryRefused, DirectoryMismatch, DirectoryValue)
NO_ANSWER = "no answer from there"

Then = Callable[[float, "Refused | None"], None]
Cell = tuple[Place, str]


@dataclass
class RemoteWrite:
    """One write under way."""

    request: Request
    cell: Cell
    then: Then
    until: float
    aimed: bool = False
    """The owners are known, as far as anybody has said otherwise."""
    pause: float = 0.0

    @property
    def withdraws(self) -> bool:
        """It is tried until it is done."""
        return self.until == math.inf

    @property
    def place(self) -> Place:
        return self.cell[0]


class RemoteWrites:
    """The writes of one peer."""

    def __init__(self, me: PeerId, asks: Asks, config: AbroadConfig, outbox: Outbox) -> None:
        self.dropped: Counter[str] = Counter()
        self._me = me
        self._asks = asks
        self._config = config
        self._outbox = outbox
        self._next = FIRST_NUMBER
        self._sequences = count(1)
        self._writes: dict[int, RemoteWrite] = {}
        self._newest: dict[Cell, int] = {}

    # -- writing --

    def write(
        self, now: float, place: Place, name: str, generation: int, value: Value | None, then: Then
    ) -> int:
        """Write the own register `name` there; ends in `then`, unless it is replaced."""
        register = Register(self._me, name, generation, next(self._sequences), value)
        return self.put(now, place, register, then)

    def put(self, now: float, place: Place, register: Register, then: Then) -> int:
        """Write this register there."""
        cell = (place, register.name)
        self.cancel(self._newest.get(cell, 0))
        number, self._next = self._next, self._next + 1
        until = math.inf if register.value is None else now + self._config.write_patience
        request = Request(number, place[1], until, register)
        write = RemoteWrite(request, cell, then, until)
        self._writes[number] = write
        self._newest[cell] = number
        self._aim(now, write)
        return number

    def cancel(self, number: int) -> None:
        """Nobody waits for it any more; it may still happen."""
        write = self._writes.pop(number, None)
        if write is not None:
            del self._newest[write.cell]

    def _aim(self, now: float, write: RemoteWrite) -> None:
        """Send it to the owners; if they aren't known, have the gateway asked."""
        owners = self._asks.owners(write.place)
        if not write.aimed and self._asks.look(now, write.place) is Found.FRESH and owners:
            write.request.aim(owners)
            write.aimed = True
        if write.aimed:
            self._send(now, write)
        else:
            write.request.retry_at = now + self._lengthened(write)

    def _send(self, now: float, write: RemoteWrite) -> None:
        request = write.request
        assert request.register is not None
        seal = owners_hash(request.owners)
        message = DirectoryWrite(request.number, request.key, seal, request.register, abroad=True)
        for owner in request.to_ask(self._me):
            self._outbox.send(owner, message)
        request.retry_at = now + self._lengthened(write)

    def _lengthened(self, write: RemoteWrite) -> float:
        """The pause until the next try: always the same one, but for withdrawals."""
        shortest = self._config.retry_interval
        limit = self._config.withdraw_retry_limit if write.withdraws else shortest
        write.pause = min(max(2 * write.pause, shortest), limit)
        return write.pause

    def answered(self, now: float, place: Place) -> None:
        """A gateway answered for this key, or the zone was given up."""
        owners = self._asks.owners(place)
        for write in list(self._writes.values()) if owners else ():
            if write.place != place:
                continue
            if not write.aimed:
                self._aim(now, write)
            elif write.request.owners != owners:
                write.request.aim(owners)
                self._send(now, write)

    # -- owners' answers --

    def receive(
        self,
        now: float,
        sender: PeerId,
        message: DirectoryWritten | DirectoryRefused | DirectoryMismatch | DirectoryValue,
    ) -> None:
        write = self._writes.get(message.request)
        if write is None and message.request < self._next:
            return  # a majority was enough
        if write is None or sender not in write.request.owners:
            self.dropped["answer to no write of this peer"] += 1
        elif isinstance(message, DirectoryWritten):
            write.request.answer(sender)
            if write.request.done:
                self._end(now, write, None)
        elif isinstance(message, DirectoryRefused):
            self._end(now, write, Refused(message.reason, message.because))
        elif isinstance(message, DirectoryMismatch):
            self._disagreed(now, sender, write)

    def _disagreed(self, now: float, sender: PeerId, write: RemoteWrite) -> None:
        """The owners have changed, or are changing: find out who they are."""
        if write.aimed and sender not in write.request.answers:
            write.aimed = False
            self._asks.invalidate(now, write.place)
            shortest = self._config.retry_interval / 10
            write.request.disagree(now, sender, shortest, self._config.retry_interval)

    def _end(self, now: float, write: RemoteWrite, refused: Refused | None) -> None:
        self.cancel(write.request.number)
        if not write.withdraws:
            # A pin is followed by a look that has to come after it.
            self._asks.invalidate(now, write.place)
        write.then(now, refused)

    # -- time --

    def tick(self, now: float) -> None:
        for write in list(self._writes.values()):
            if now >= write.until:
                self._end(now, write, Refused(f"zone {write.place[0]}: {NO_ANSWER}", None))
            elif now >= write.request.retry_at:
                self._aim(now, write)
                if write.withdraws:
                    self._asks.look(now, write.place)

    def next_wakeup(self) -> float | None:
        return earliest(
            *(min(write.request.retry_at, write.until) for write in self._writes.values())
        )
