"""What follows when the directory has answered: `Records` on top of the directory's numbers.

Rules of this file. It remembers continuations, nothing else. The directory speaks in
request numbers and events; the group protocols say `read(key, then)`. A request here has
no deadline of its own: it ends with its answer, or is cancelled by whoever asked. A write
is replaced by the next one of the same register, so there is at most one for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

from tensorhub_p2p.protocol.directory.directory import (
    Directory,
    KeyChanged,
    ReadDone,
    WriteDone,
    WriteRefused,
)
from tensorhub_p2p.protocol.directory.records import Refused, Registers
from tensorhub_p2p.protocol.messages import Key, Value, WholeMark

Read = Callable[[float, Registers], None]
Written = Callable[[float, Refused | None], None]
Changed = Callable[[float], None]


class PendingRecords:
    """The `Records` of one peer."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._reads: dict[int, Read] = {}
        self._writes: dict[int, Written] = {}
        self._newest: dict[tuple[Key, str], int] = {}
        """By register: the write under way."""
        self._registers: dict[int, tuple[Key, str]] = {}
        self._watches: dict[int, tuple[Key, Changed]] = {}
        self._watch_numbers = count(1)

    def read(self, now: float, key: Key, then: Read) -> int:
        number = self._directory.read(now, key, math.inf)
        self._reads[number] = then
        return number

    def write(
        self, now: float, key: Key, name: str, generation: int, value: Value | None, then: Written
    ) -> int:
        replaced = self._newest.get((key, name))
        if replaced is not None:
            self.cancel(replaced)
        number = self._directory.write(now, key, name, generation, value, math.inf)
        self._writes[number] = then
        self._newest[(key, name)] = number
        self._registers[number] = (key, name)
        return number

    def mark(self, now: float, key: Key, value: WholeMark, then: Written) -> int:
        number = self._directory.mark(now, key, value, math.inf)
        self._writes[number] = then
        return number

    def cancel(self, request: int) -> None:
        self._reads.pop(request, None)
        self._written(request)
        self._directory.cancel(request)

    def watch(self, now: float, key: Key, then: Changed) -> int:
        number = next(self._watch_numbers)
        if not any(watched == key for watched, _ in self._watches.values()):
            self._directory.watch(now, key)
        self._watches[number] = (key, then)
        return number

    def unwatch(self, now: float, watch: int) -> None:
        key, _ = self._watches.pop(watch, (None, None))
        if key is not None and not any(other == key for other, _ in self._watches.values()):
            self._directory.unwatch(now, key)

    def take(self, now: float, event: object) -> bool:
        """Continue whoever waited for this; False if it is no event of the directory's."""
        if isinstance(event, ReadDone):
            read = self._reads.pop(event.request, None)
            if read is not None:
                read(now, event.registers)
        elif isinstance(event, (WriteDone, WriteRefused)):
            written = self._written(event.request)
            if written is not None:
                if isinstance(event, WriteRefused):
                    written(now, Refused(event.reason, event.because))
                else:
                    written(now, None)
        elif isinstance(event, KeyChanged):
            for key, changed in list(self._watches.values()):
                if key == event.key:
                    changed(now)
        else:
            return False
        return True

    def _written(self, request: int) -> Written | None:
        """The write is over: forget it, and return who waits for it."""
        register = self._registers.pop(request, None)
        if register is not None:
            del self._newest[register]
        return self._writes.pop(request, None)
