"""Taking bad weights back: a version that nobody is to use any more, anywhere.

Rules of this file. `Retractions` are the verbs: of a peer, as any peer may retract any version.
`RetractionWatch` belongs to a handle that serves, and notices that what it serves was
retracted. What a retraction means to those who resolve, pin or keep is written there
(selection.py, admission.py, retention.py).

Theory of operation. A number means the newest epoch that has it, in all zones. The retraction
is written, like a mark, to W owners of the versions key at home, and then of each other zone
that has the model: it ends when all have it, or with a Timeout that names those that haven't.
From then on nobody resolves it, owners refuse pins and publishes of it, copies of it are freed.
Who holds it keeps its tensors, and finds it published; but it serves nobody. That it learns
while it has readers, soon after the first one came and each `look_interval`: a pull that began
before starves, and its call is voided.

A retracted version can't be published again in its epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorhub_p2p.errors import Timeout, VersionUnavailable
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    everywhere,
    values,
    versions_key,
)
from tensorhub_p2p.protocol.groups.selection import describe, holdings
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import Retraction
from tensorhub_p2p.protocol.shards.verbs import Done, Failed, VerbId

HOME = ""
FIRST_LOOK = 0.2
"""Seconds from a reader's coming until it is looked whether what it reads was retracted: one look
for all that come at once, and none in the way of a pull that takes a moment."""


@dataclass
class Running:
    """One verb under way."""

    model: str
    version: int
    deadline: float
    requests: dict[str, int] = field(default_factory=dict)
    """By zone, "" for the own one: what is still asked there."""
    bad: Retraction | None = None


class Retractions:
    """The retractions of one peer. `zones(model)`: the other zones that have the model."""

    def __init__(
        self, records: Records, liveness: Liveness, zones: Callable[[str], Sequence[str]]
    ) -> None:
        self.outbox = Outbox()
        self._records = records
        self._liveness = liveness
        self._zones = zones
        self._running: dict[VerbId, Running] = {}

    def begin(self, now: float, number: VerbId, deadline: float, model: str, version: int) -> None:
        """Done(None), VersionUnavailable if nobody knows it, or Timeout."""
        running = self._running[number] = Running(model, version, deadline)

        def then(now: float, registers: Registers) -> None:
            if number in self._running:
                self._found(now, number, registers)

        request = self._records.read(now, versions_key(model), then, everywhere)
        running.requests = {HOME: request}

    def _found(self, now: float, number: VerbId, registers: Registers) -> None:
        running = self._running[number]
        found = holdings(registers, self._liveness.is_gone)
        same = [p.epoch for p in found if p.version == running.version]
        if not same:
            del self._running[number]
            why = (
                f"retract({running.version}): model {running.model!r} has no version "
                f"{running.version}; {describe(found)}"
            )
            self.outbox.emit(Failed(number, VersionUnavailable(why)))
            return
        running.bad = Retraction(max(same), running.version)
        running.requests = {}
        for zone in (HOME, *self._zones(running.model)):
            self._write(now, number, running, zone)

    def _write(self, now: float, number: VerbId, running: Running, zone: str) -> None:
        assert running.bad is not None

        def then(now: float, refused: Refused | None) -> None:
            if number not in self._running:
                return
            if refused is not None:
                # A zone that can't be reached for now: until the deadline.
                self._write(now, number, running, zone)
                return
            del running.requests[zone]
            if not running.requests:
                del self._running[number]
                self.outbox.emit(Done(number, None))

        key = versions_key(running.model)
        running.requests[zone] = self._records.mark(now, key, running.bad, then, zone)

    def tick(self, now: float) -> None:
        for number, running in list(self._running.items()):
            if now >= running.deadline:
                del self._running[number]
                for request in running.requests.values():
                    self._records.cancel(request)
                self.outbox.emit(Failed(number, Timeout(self._waiting_for(running))))

    def _waiting_for(self, running: Running) -> str:
        what = f"retract({running.version}) of model {running.model!r}"
        if running.bad is None:
            return f"{what}: its owners have not answered in time"
        zones = ", ".join(zone or self._liveness.home for zone in running.requests)
        return f"{what}: not on record yet in zone {zones}; call it again"

    def next_wakeup(self) -> float | None:
        return earliest(*(running.deadline for running in self._running.values()))


class RetractionWatch:
    """Of one handle. `then(now)` is called when what it serves turns out to be retracted.

    `saw(now, registers)` gets whatever was read for that, too.
    """

    def __init__(
        self,
        model: str,
        records: Records,
        interval: float,
        then: Callable[[float], None],
        saw: Callable[[float, Registers], None],
    ) -> None:
        self._interval = interval
        self._then = then
        self._saw = saw
        self._inquiry = Inquiry(records, versions_key(model), self._on_registers)
        self._publication: Publication | None = None
        self._look_at: float | None = None

    def serve(self, now: float, publication: Publication | None) -> None:
        """It has readers of this one; None: it has none."""
        if publication is not None and publication != self._publication and self._look_at is None:
            self._look_at = now + FIRST_LOOK
        self._publication = publication

    def _look(self, now: float) -> None:
        """Also if the reader has gone by now: what is seen may matter otherwise."""
        self._look_at = now + self._interval if self._publication is not None else None
        self._inquiry.look(now)

    def _on_registers(self, now: float, registers: Registers) -> None:
        self._saw(now, registers)
        publication = self._publication
        bad = {(value.epoch, value.version) for _, value in values(registers, Retraction)}
        if publication is not None and publication.order in bad:
            self._then(now)

    def tick(self, now: float) -> None:
        if self._look_at is not None and now >= self._look_at:
            self._look(now)

    def next_wakeup(self) -> float | None:
        return self._look_at
