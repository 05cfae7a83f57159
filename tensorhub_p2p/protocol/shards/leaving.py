"""A peer leaves well: what it keeps is handed on before it goes.

Rules of this file. `Leaving` is the one verb of a peer that goes; it waits for the handles'
closes, which are verbs of their own, and sees to the copies (keeping.py).

Theory of operation. From its begin the peer promises, copies and adopts nothing. Copies are
asked about like anything else that is given up: who keeps it? who takes a copy? It ends once
all handles are closed and no copy is left, or at the deadline; what was lost is its result.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.shards.keeping import Keeps
from tensorhub_p2p.protocol.shards.verbs import Done, Failed, VerbId


@dataclass(frozen=True)
class Departure:
    number: VerbId
    deadline: float


class Leaving:
    """At most one departure."""

    def __init__(self, custody: Custody, keeps: Keeps, lease_seconds: float) -> None:
        self.outbox = Outbox()
        self._custody = custody
        self._keeps = keeps
        self._lease_seconds = lease_seconds
        self._departure: Departure | None = None

    def begin(self, now: float, number: VerbId, deadline: float) -> None:
        if self._custody.leaving:
            error = StateError("leaving: it has begun, or is over")
            self.outbox.emit(Failed(number, error))
            return
        self._custody.leaving = True
        self._departure = Departure(number, deadline)
        lease = min(self._lease_seconds, (deadline - now) / 2)
        self._keeps.leave(now, deadline - lease)

    def look(self, handles_closed: bool) -> None:
        """It ends once there is nothing left."""
        if self._departure is not None and handles_closed and not len(self._keeps):
            self._end()

    def _end(self) -> None:
        departure, self._departure = self._departure, None
        assert departure is not None
        self.outbox.emit(Done(departure.number, tuple(self._keeps.lost)))

    def tick(self, now: float) -> None:
        if self._departure is not None and now >= self._departure.deadline:
            self._keeps.cut_off(now)
            self._end()

    def next_wakeup(self) -> float | None:
        return self._departure.deadline if self._departure is not None else None
