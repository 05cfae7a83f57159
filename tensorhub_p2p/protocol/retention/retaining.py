"""What this peer's open handles want kept, on record.

Rules of this file. `Retaining` belongs to one peer. It keeps one register a model, at the
retains key, up to date with what its handles say; what follows from it is retention.py's.

Theory of operation. The register says the most of the handles' "newest", and all of their
single versions (the newest `MAX_VERSIONS` of them). Whoever changes a handle's part is told
once a register that has it is on W owners: a later one has it too, so that one write may answer
several. It is never withdrawn by others: what a dead peer wanted stays on record until the
peer is forgotten. What bounds it: one register a model, one part a handle.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.protocol.directory.records import Records, Refused, retains_key
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.messages import Retain
from tensorhub_p2p.protocol.retention.retention import RETAIN

MAX_VERSIONS = 64


class Retaining:
    """The retains of one peer."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._parts: dict[Slot, Retain] = {}
        self._waiting: dict[str, list[Callable[[float], None]]] = {}
        """By model: who waits until what is being written is on record."""

    def set(
        self, now: float, slot: Slot, retain: Retain | None, then: Callable[[float], None]
    ) -> None:
        """From now on the slot's handle wants this; `then` once it is on record, if it changed."""
        if retain == self._parts.get(slot):
            then(now)
            return
        if retain is None:
            del self._parts[slot]
        else:
            self._parts[slot] = retain
        model = slot.group.model
        self._waiting.setdefault(model, []).append(then)

        def written(now: float, _refused: Refused | None) -> None:
            for each in self._waiting.pop(model, []):
                each(now)

        self._records.write(now, retains_key(model), RETAIN, 0, self.of(model), written)

    def of(self, model: str) -> Retain | None:
        """What the handles want kept of this model, all together; None if nothing."""
        parts = [part for slot, part in self._parts.items() if slot.group.model == model]
        if not parts:
            return None
        versions = sorted({version for part in parts for version in part.versions})
        return Retain(max(part.newest for part in parts), tuple(versions[-MAX_VERSIONS:]))
