"""The registers of one key as one owner holds them, with what has to be found in them quickly.

Rules of this file. Storage only: cells that merge by a maximum (registers.py), and beside
them, always in step: the fingerprint of the key and of each writer's part, what can forbid a
write (reasons.py), and how long ago something was withdrawn. It decides nothing.

What bounds it. The owner bounds the number of cells (`max_key_registers`). Of those that only
matter for a while, the key forgets by itself:

    marks        the newest `MARKS_KEPT`, and of the older ones those whose publication another
                 register still names; up to a quarter more until the next look
    retractions  the newest `RETRACTIONS_KEPT`
    withdrawn    the newest `WITHDRAWN_KEPT`, of them `OF_ONE_WRITER` of each writer; and none
                 for longer than its owner says (`forget_withdrawn`)

Something older than all of that may still be held by an owner that was absent: it brings a
withdrawn register back. Its writer finds that when it compares (own.py), if it lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from tensorhub_p2p.protocol.directory.reasons import Reasons
from tensorhub_p2p.protocol.directory.registers import Cell, is_pin, print_of
from tensorhub_p2p.protocol.identity import PeerId, Publication
from tensorhub_p2p.protocol.messages import (
    HolderRecord,
    Pin,
    Register,
    Retraction,
    VersionRecord,
    WholeMark,
)

MARKS_KEPT = 32
RETRACTIONS_KEPT = 64
WITHDRAWN_KEPT = 1024
OF_ONE_WRITER = 64


class Cells(Mapping[Cell, Register]):
    """The cells of one key; a mapping to read, `merge` and `drop` to change."""

    def __init__(self, registers: Iterable[Register] = ()) -> None:
        self.reasons = Reasons()
        self.fingerprint = 0
        """Of all the registers but the pins, of which not all watchers are told."""
        self._cells: dict[Cell, Register] = {}
        self._prints: dict[PeerId, int] = {}
        """By writer: of its registers; no entry for 0."""
        self._withdrawn: dict[Cell, float] = {}
        """Since when, the longest withdrawn first."""
        self._withdrawn_by: dict[PeerId, dict[Cell, None]] = {}
        self._named: Counter[Publication] = Counter()
        """How many registers other than marks name a publication."""
        self._marks: dict[Cell, Publication] = {}
        self._marks_allowed = 2 * MARKS_KEPT
        """When there are more, it is time to drop old ones."""
        self._retractions: dict[Cell, tuple[int, int]] = {}
        self.merge(0.0, registers)

    def __getitem__(self, cell: Cell) -> Register:
        return self._cells[cell]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def standing(self) -> int:
        """How many registers of writers stand: neither withdrawn, nor marks."""
        return len(self._cells) - len(self._withdrawn) - len(self._marks)

    def registers(self) -> tuple[Register, ...]:
        return tuple(self._cells.values())

    def print_by(self, writer: PeerId) -> int:
        """The fingerprint of what this peer wrote."""
        return self._prints.get(writer, 0)

    def live_by(self, writer: PeerId) -> list[Register]:
        """What this peer wrote and didn't withdraw, as far as is known here."""
        return [r for r in self._cells.values() if r.writer == writer and r.value is not None]

    # -- changing --

    def merge(self, now: float, registers: Iterable[Register]) -> list[Register]:
        """Take the maximum per cell; those that rose."""
        risen: list[Register] = []
        for register in registers:
            held = self._cells.get(register.cell)
            if held is None or register.order > held.order:
                if held is not None:
                    self._take(held)
                self._put(now, register)
                risen.append(register)
        self._prune(risen)
        return risen

    def drop(self, cell: Cell) -> None:
        self._take(self._cells[cell])

    def forget_withdrawn(self, before: float) -> int:
        """Drop what was withdrawn before that time; how many that were."""
        due = 0
        for since in self._withdrawn.values():
            if since >= before:
                break
            due += 1
        for cell in list(self._withdrawn)[:due]:
            self.drop(cell)
        return due

    def _put(self, now: float, register: Register) -> None:
        cell, value = register.cell, register.value
        self._cells[cell] = register
        self._mix(register)
        self.reasons.put(register)
        if value is None:
            self._withdrawn[cell] = now
            self._withdrawn_by.setdefault(register.writer, {})[cell] = None
        elif isinstance(value, WholeMark):
            self._marks[cell] = value.publication
        elif isinstance(value, Retraction):
            self._retractions[cell] = (value.epoch, value.version)
        elif isinstance(value, (VersionRecord, HolderRecord, Pin)):
            self._named[value.publication] += 1

    def _take(self, register: Register) -> None:
        cell, value = register.cell, register.value
        del self._cells[cell]
        self._mix(register)
        self.reasons.take(register)
        if value is None:
            del self._withdrawn[cell]
            by_writer = self._withdrawn_by[register.writer]
            del by_writer[cell]
            if not by_writer:
                del self._withdrawn_by[register.writer]
        elif isinstance(value, WholeMark):
            del self._marks[cell]
        elif isinstance(value, Retraction):
            del self._retractions[cell]
        elif isinstance(value, (VersionRecord, HolderRecord, Pin)):
            self._named[value.publication] -= 1
            if not self._named[value.publication]:
                del self._named[value.publication]

    def _mix(self, register: Register) -> None:
        """The register comes or goes: XOR does both."""
        bits = print_of(register)
        if bits:
            if not is_pin(register):
                self.fingerprint ^= bits
            mine = self._prints.pop(register.writer, 0) ^ bits
            if mine:
                self._prints[register.writer] = mine

    # -- bounds --

    def _prune(self, risen: list[Register]) -> None:
        """Drop what is too many of a kind that rose, once there are twice as many as are kept."""
        withdrawn = {register.writer: None for register in risen if register.value is None}
        for writer in withdrawn:
            self._cut(self._withdrawn_by.get(writer, ()), OF_ONE_WRITER)
        if withdrawn:
            self._cut(self._withdrawn, WITHDRAWN_KEPT)
        if any(isinstance(register.value, Retraction) for register in risen):
            order = self._retractions.__getitem__
            self._cut(sorted(self._retractions, key=order), RETRACTIONS_KEPT)
        if len(self._marks) > self._marks_allowed:
            oldest = sorted(self._marks, key=self._marks.__getitem__)[:-MARKS_KEPT]
            for cell in oldest:
                if self._marks[cell] not in self._named:
                    self.drop(cell)
            # Those that are named stay: they aren't looked at again with every further one.
            self._marks_allowed = len(self._marks) + max(MARKS_KEPT, len(self._marks) // 4)

    def _cut(self, cells: Collection[Cell], kept: int) -> None:
        """Of many cells, drop all but the last so many."""
        if len(cells) > 2 * kept:
            for cell in list(cells)[:-kept]:
                self.drop(cell)
