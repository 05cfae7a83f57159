"""One read or write of one key, asked of its owners until a majority has answered.

Rules of this file. A `Request` keeps the tally of one request: whom to ask, who answered
what, whether that is enough. It sends nothing and knows no ring; the directory aims it
at an owner list, and aims it anew when the list changes.

Theory of operation. A write is asked of all n owners at once; a read of R of them, this peer
first if it is one, and of the others only if those let it wait for `read_patience` or can't say.
A write is done at W = ⌊n/2⌋+1
acknowledgements; which of them a warming owner gives is owner.py's. A read is done at
R = W values of owners that are not warming, merged by the maximum per cell. W + R > n, so
a read sees each write that was done before it began (quorum intersection, Gifford 1979). It may
also see one that is under way, and the next read may not: who acts on what it read, so that
others must see it too, wants what is `agreed`. That is asked of all owners, and done at R answers
if they are the same, else with the last one, or when those that don't answer were asked twice
more.

Owners that have not answered are asked again every retry interval; those that disagree on the
owner list, after a shorter pause that doubles. What ends it: enough answers, one refusal, the
deadline, or being cancelled.

A write that *looks* brings along what each owner held right after it had taken it, if all n say so
within `read_patience`; else its writer reads afterwards. Of two that write and then look, or read,
one sees the other's write:

    both look     each owner that took both took one first, and its answer tells the later one
    both read     the one whose write was done later begins its read after that
    one looks     if the looker doesn't see the reader's write, it came first at all of the W owners
                  that took that; so it stood there when the read began, and R meets those W

The last row needs the look at all n: at W of them it may miss just the owner that would have told.
Of any number at once, the last one sees all others, by the same three rows.

Answers from before the request was aimed anew still count when their sender is an owner
in the new list too: what it stored, it still has.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tensorhub_p2p.protocol.directory.registers import Cell, is_pin, merge
from tensorhub_p2p.protocol.directory.ring import Owners, majority, owners_hash
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import DirectoryRead, DirectoryWrite, Key, Register


@dataclass
class Request:
    """A request under way. `register` is what is written, None for a read."""

    number: int
    key: Key
    deadline: float
    register: Register | None = None
    agreed: bool = False
    """Only what a majority of owners holds is wanted: every later read sees that, too."""
    looks: bool = False
    """Of a write: what every owner held right after it is wanted, too."""
    quiet: bool = False
    """Repair: nobody waits for it, and its end is no event."""
    lags: bool = False
    """A write that is done, but for owners that haven't answered: they are asked on for a while."""
    before: Register | None = None
    """What the own register was before this write."""
    buckets: int = 1
    """Over how many the key is spread, as far as its writer is sure."""
    known: dict[PeerId, int] = field(default_factory=dict)
    """By owner that acknowledged a write: of how many buckets it knows."""
    crowded: bool = False
    """Some owner says that this bucket is."""
    owners: Owners = ()
    answers: dict[PeerId, tuple[Register, ...]] = field(default_factory=dict)
    """By owner; an acknowledged write that doesn't look has no registers."""
    heard: dict[PeerId, None] = field(default_factory=dict)
    """Owners that said anything, if only that they can't answer yet."""
    retry_at: float = 0.0
    rounds: int = 0
    """How often those that hadn't answered were asked."""
    widened: bool = False
    """All were, as somebody can't answer yet."""
    pause: float = 0.0
    """The last one before an owner that disagreed was asked again; it doubles."""

    def aim(self, owners: Owners) -> None:
        """Ask these owners from now on."""
        if owners != self.owners:
            self.pause = 0.0
            self.looks = self.looks and not self.answers
        self.owners = owners
        self.answers = {p: a for p, a in self.answers.items() if p in owners}
        self.heard = {p: None for p in self.heard if p in owners}

    def message(self) -> DirectoryRead | DirectoryWrite:
        seal = owners_hash(self.owners)
        if self.register is None:
            return DirectoryRead(self.number, self.key, seal)
        register, buckets = self.register, self.buckets
        return DirectoryWrite(
            self.number, self.key, seal, register, buckets=buckets, looks=self.looks
        )

    def answer(self, sender: PeerId, registers: tuple[Register, ...] | None = None) -> None:
        if sender in self.owners:
            self.heard[sender] = None
            self.answers[sender] = registers or ()
            self.looks = self.looks and registers is not None

    def disagree(self, now: float, sender: PeerId, shortest: float, longest: float) -> None:
        """The sender has another owner list, or has closed this one: ask again soon."""
        if sender in self.owners and sender not in self.answers:
            self.heard[sender] = None
            self.pause = min(max(2 * self.pause, shortest), longest)
            self.retry_at = min(self.retry_at, now + self.pause)

    @property
    def done(self) -> bool:
        if not self.owners:
            return False
        enough = len(self.answers) >= majority(len(self.owners))
        if self.lags or len(self.answers) == len(self.owners):
            return len(self.answers) == len(self.owners)
        if self.looks:
            return enough and self.rounds > 1
        if self.agreed and self.register is None:
            return enough and (self.rounds > 2 or self._is_unanimous)
        return enough

    @property
    def seen(self) -> tuple[Register, ...] | None:
        """Of a write that is done: what its owners held right after it, if all have said so."""
        complete = self.looks and len(self.answers) == len(self.owners)
        return self.merged() if complete else None

    @property
    def _is_unanimous(self) -> bool:
        """All answers say the same, pins aside."""
        said = {
            frozenset((r.cell, r.order) for r in registers if not is_pin(r))
            for registers in self.answers.values()
        }
        return len(said) == 1

    @property
    def sure_buckets(self) -> int:
        """So many buckets are known to every owner that acknowledged: a majority, once done."""
        return min((self.known.get(peer, 1) for peer in self.answers), default=1)

    @property
    def due(self) -> float:
        """When to ask again, or to end it."""
        return min(self.retry_at, self.deadline)

    def to_ask(self, me: PeerId) -> Owners:
        """Owners to ask (again), this peer first."""
        waiting = [peer for peer in self.owners if peer not in self.answers]
        if self.register is None and not self.rounds and not self.agreed:
            # Not the same ones in each read of the key.
            turn = self.number % len(waiting) if waiting else 0
            waiting = sorted(waiting[turn:] + waiting[:turn], key=me.__ne__)
            return tuple(waiting[: majority(len(self.owners)) - len(self.answers)])
        return tuple(sorted(waiting, key=me.__ne__))

    def silent(self) -> Owners:
        """Owners that have said nothing at all."""
        return tuple(peer for peer in self.owners if peer not in self.heard)

    def merged(self) -> tuple[Register, ...]:
        """What the key holds by the answers so far, without what was withdrawn."""
        cells: dict[Cell, Register] = {}
        for registers in self.answers.values():
            merge(cells, registers)
        if self.agreed:
            held = Counter(
                register.cell
                for registers in self.answers.values()
                for register in registers
                if register.order == cells[register.cell].order
            )
            enough = majority(len(self.owners))
            cells = {cell: each for cell, each in cells.items() if held[cell] >= enough}
        return tuple(register for register in cells.values() if register.value is not None)
