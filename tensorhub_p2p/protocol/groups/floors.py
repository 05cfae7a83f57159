"""A group's floor on record: what its last answer was, for members that remember nothing.

Rules of this file. A `FloorKeeper` belongs to the leader of one generation and writes one
register at the group's key; `floor_on_record` reads them. What a floor forbids is selection.py's.

Theory of operation. Members remember the floor, and an election takes the highest that any of
them remembers. When all of them are replaced at once nobody does: then the candidate finds it
here, where it reads the claims anyway. It is written once *all* members are done with a call, as
a void takes the members' floors back to what they were before it; at most once in
`floor_interval`, and when the leader stops, then also what only some are done with. Nobody waits
for it. So what the last seconds brought is forgotten if all members die at once, the leader
among them.

Leaders have a register each, under one name: the highest counts, also of one that died, until
it is forgotten with all that it wrote.
"""

from __future__ import annotations

import math

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import (
    Records,
    Refused,
    Registers,
    floor_name,
    group_key,
    values,
)
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR, Floor
from tensorhub_p2p.protocol.identity import Generation, Group
from tensorhub_p2p.protocol.messages import GroupFloor


def floor_on_record(registers: Registers) -> Floor:
    """The highest floor in the registers of a group's key."""
    return max((value.floor for _, value in values(registers, GroupFloor)), default=NO_FLOOR)


class FloorKeeper:
    """Writes down the floor of one generation."""

    def __init__(
        self, group: Group, generation: Generation, records: Records, config: GroupConfig
    ) -> None:
        self._group = group
        self._generation = generation
        self._records = records
        self._config = config
        self._written = NO_FLOOR
        self._due: Floor | None = None
        self._rests_until = -math.inf

    def keep(self, now: float, floor: Floor) -> None:
        """All members are done with a call that this was the answer to, or a higher one before."""
        if floor > self._written:
            self._due = floor
            self.tick(now)

    def stop(self, now: float) -> None:
        """The leader stops: what is to be written is written now."""
        if self._due is not None:
            self._write(now, self._due)

    def tick(self, now: float) -> None:
        if self._due is not None and now >= self._rests_until:
            self._write(now, self._due)

    def next_wakeup(self) -> float | None:
        return None if self._due is None else self._rests_until

    def _write(self, now: float, floor: Floor) -> None:
        self._due, self._written = None, floor
        self._rests_until = now + self._config.floor_interval
        value = GroupFloor(self._generation, floor)

        def nobody_waits(_now: float, _refused: Refused | None) -> None:
            """The register is written again where it is missing (own.py)."""

        key, name = group_key(self._group), floor_name(self._group)
        self._records.write(now, key, name, self._generation.counter, value, nobody_waits)
