"""What one key holds: registers that merge by a maximum.

Rules of this file. Values and their merging only; who may write what, and who stores it
where, is decided elsewhere.

Theory of operation. Each register is a cell (writer, name) that only its writer writes,
ordered by (generation, sequence). Merging two copies of a key is the maximum per cell:
commutative, associative and idempotent, so copies can be merged in any order, any number
of times, and lost or repeated messages do no harm (a state-based CRDT, Shapiro et al. 2011).
Withdrawing is a register without a value and of a higher order. It is kept for a while, so
that an older copy from elsewhere can't bring the value back.

*Marks* (`WholeMark`, `Retraction`, `Buckets`) belong to nobody and are never withdrawn: all write
the same, or, of `Buckets`, the highest number counts.

Two copies are compared by a *fingerprint*: the XOR of the prints of what was written by peers
and not withdrawn. So a copy that still has, or lacks, what only matters for a while is no other
one; and it can be kept in step, register by register.
"""

from __future__ import annotations

from collections.abc import Iterable

from mmh3 import hash64

from tensorhub_p2p.protocol.identity import NOBODY, PeerId
from tensorhub_p2p.protocol.messages import Buckets, Register, Retraction, WholeMark

Cell = tuple[PeerId, str]
Mark = WholeMark | Retraction | Buckets
PIN_NAME = "pin/"
"""How the names of registers that hold pins begin."""
BUCKETS_NAME = "buckets"
_BITS = (1 << 63) - 1


def of_mark(mark: Mark) -> Register:
    """The register of a mark: the same one, whoever writes it."""
    if isinstance(mark, Retraction):
        return Register(NOBODY, f"retracted:{mark.epoch}.{mark.version}", 0, 1, mark)
    if isinstance(mark, Buckets):
        return Register(NOBODY, BUCKETS_NAME, mark.count, 1, mark)
    name = f"whole:{mark.publication!r}"
    return Register(NOBODY, name, mark.publication.generation.counter, 1, mark)


def merge(cells: dict[Cell, Register], registers: Iterable[Register]) -> None:
    """Take the maximum per cell into `cells`."""
    for register in registers:
        held = cells.get(register.cell)
        if held is None or register.order > held.order:
            cells[register.cell] = register


def is_pin(register: Register) -> bool:
    """Whether it holds a pin, or did."""
    return register.name.startswith(PIN_NAME)


def print_of(register: Register) -> int:
    """63 bits that tell this register from others; 0 for one that doesn't count."""
    if register.value is None or register.writer == NOBODY:
        return 0
    text = f"{register.writer}\0{register.name}\0{register.generation}\0{register.sequence}"
    return hash64(text, 3, True, signed=False)[0] & _BITS


def fingerprint(registers: Iterable[Register]) -> int:
    """Of all these together, in whatever order, without the pins."""
    total = 0
    for register in registers:
        if not is_pin(register):
            total ^= print_of(register)
    return total
