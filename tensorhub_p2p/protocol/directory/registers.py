"""What one key holds: registers that merge by a maximum.

Rules of this file. Values and their merging only; who may write what, and who stores it
where, is decided elsewhere.

Theory of operation. Each register is a cell (writer, name) that only its writer writes,
ordered by (generation, sequence). Merging two copies of a key is the maximum per cell:
commutative, associative and idempotent, so copies can be merged in any order, any number
of times, and lost or repeated messages do no harm (a state-based CRDT, Shapiro et al. 2011).
Withdrawing is a register without a value and of a higher order. It is kept, so that an
older copy from elsewhere can't bring the value back.

Bounds. `WholeMark`s belong to nobody and are never withdrawn: the newest `marks_kept` are
kept, and of the older ones those whose publication another register still names. Of withdrawn
pins the last `PINS_KEPT` or more: many of their writers are of other zones, where nobody here
hears of their deaths. An older copy could bring such a pin back, and hold a withdrawal up.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub_p2p.protocol.identity import NOBODY, PeerId, Publication
from tensorhub_p2p.protocol.messages import HolderRecord, Pin, Register, VersionRecord, WholeMark

Cell = tuple[PeerId, str]
MARKS_KEPT = 32
PINS_KEPT = 1024
PIN_NAME = "pin/"
"""How the names of registers that hold pins begin."""


def of_mark(mark: WholeMark) -> Register:
    """The register of a mark: the same one, whoever writes it."""
    name = f"whole:{mark.publication!r}"
    return Register(NOBODY, name, mark.publication.generation.counter, 1, mark)


def merge(cells: dict[Cell, Register], registers: Iterable[Register]) -> int:
    """Take the maximum per cell into `cells`, what rose last at the end; how many cells rose."""
    risen = 0
    for register in registers:
        held = cells.get(register.cell)
        if held is None or register.order > held.order:
            cells.pop(register.cell, None)
            cells[register.cell] = register
            risen += 1
    return risen


def prune_marks(cells: dict[Cell, Register], kept: int = MARKS_KEPT) -> int:
    """Drop marks of old publications that nothing names any more; returns how many.

    They are looked at once there are twice as many as are kept, so that the cost spreads.
    """
    marks = [
        (value.publication, cell)
        for cell, register in cells.items()
        if isinstance(value := register.value, WholeMark)
    ]
    if len(marks) <= 2 * kept:
        return 0
    marks.sort()
    named = _named(cells.values())
    dropped = [cell for publication, cell in marks[:-kept] if publication not in named]
    for cell in dropped:
        del cells[cell]
    return len(dropped)


def prune_pins(cells: dict[Cell, Register], kept: int = PINS_KEPT) -> int:
    """Drop withdrawn pins, the longest withdrawn first, once there are twice as many; how many."""
    if len(cells) <= 2 * kept:
        return 0
    withdrawn = [
        cell
        for cell, register in cells.items()
        if register.value is None and register.name.startswith(PIN_NAME)
    ]
    if len(withdrawn) <= 2 * kept:
        return 0
    for cell in withdrawn[:-kept]:
        del cells[cell]
    return len(withdrawn) - kept


def _named(registers: Iterable[Register]) -> set[Publication]:
    return {
        register.value.publication
        for register in registers
        if isinstance(register.value, (VersionRecord, HolderRecord, Pin))
    }
