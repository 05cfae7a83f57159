"""Which versions of a model exist: a question that belongs to no handle.

Rules of this file. `Lookups` read a versions key once for each question, in all zones, with the
asker's deadline, and sum up what is there; they decide nothing. Each ends with `Done` or `Failed`
under its verb's number, once: by its answer, or by its deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_p2p.errors import Timeout
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Registers,
    everywhere,
    values,
    versions_key,
)
from tensorhub_p2p.protocol.groups.selection import holdings
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import Phase, VersionRecord
from tensorhub_p2p.protocol.shards.verbs import Done, Failed, VerbId, VersionSummary


@dataclass(frozen=True)
class Lookup:
    """One question under way."""

    deadline: float
    request: int
    model: str


class Lookups:
    """The questions of one peer."""

    def __init__(self, records: Records, liveness: Liveness) -> None:
        self.outbox = Outbox()
        self._lookups: dict[VerbId, Lookup] = {}
        self._records = records
        self._liveness = liveness

    def versions(self, now: float, number: VerbId, deadline: float, model: str) -> None:
        """Done(tuple[VersionSummary, ...]), newest first, or Failed(Timeout)."""

        def then(_now: float, registers: Registers) -> None:
            if self._lookups.pop(number, None) is not None:
                self.outbox.emit(Done(number, self._summaries(registers)))

        request = self._records.read(now, versions_key(model), then, everywhere)
        self._lookups[number] = Lookup(deadline, request, model)

    def _summaries(self, registers: Registers) -> tuple[VersionSummary, ...]:
        """One for each (epoch, version), over all its publications."""
        zones = self._zones(registers)
        merged: dict[tuple[int, int], VersionSummary] = {}
        for publication, holding in holdings(registers, self._liveness.is_gone).items():
            if not holding.slots or holding.retracted:
                continue
            order = publication.order
            before = merged.get(order, VersionSummary(*order, False, 0, ()))
            merged[order] = VersionSummary(
                *order,
                before.whole or (holding.whole and holding.covered),
                before.holders + holding.slots,
                tuple(sorted({*before.zones, *zones.get(publication, ())})),
            )
        return tuple(merged[order] for order in sorted(merged, reverse=True))

    def _zones(self, registers: Registers) -> dict[Publication, set[str]]:
        zones: dict[Publication, set[str]] = {}
        for register, record in values(registers, VersionRecord):
            if record.phase is not Phase.HIDDEN:
                zone = self._liveness.zone(register.writer)
                zones.setdefault(record.publication, set()).add(zone)
        return zones

    def tick(self, now: float) -> None:
        for number, lookup in list(self._lookups.items()):
            if now >= lookup.deadline:
                del self._lookups[number]
                self._records.cancel(lookup.request)
                what = f"reading versions of model {lookup.model!r}"
                error = Timeout(f"{what}: its owners have not answered in time")
                self.outbox.emit(Failed(number, error))

    def next_wakeup(self) -> float | None:
        return earliest(*(lookup.deadline for lookup in self._lookups.values()))
