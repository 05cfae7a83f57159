"""When what one slot published is marked whole (G3), and by whom that is found out.

Rules of this file. A `Marking` belongs to one slot's references (publishing.py). It finds out
whether all shards of a publication are ready, and writes the mark; what follows from it,
publishing.py and withdrawing.py do. Owners have the last word: they refuse the mark once a shard
was withdrawn (directory/admission.py).

Theory of operation. To *judge* is to read what the replica's shards have on record, and, if all
are ready and it isn't marked yet, to write the mark to W owners. That is done

    mark_after a publish    so that who waits for the version can do it first, beside its pin
                            (groups/resolving.py). The shard that was ready last sees all of them
    at a new generation     whole is kept, else it is aborted: all shards ask for the mark, and one
                            that aborted makes it refused
    before it is withdrawn  what never was whole is nobody's loss

What has one shard is whole as soon as W owners have its record. Its mark outlives that record, so
that nothing lower is published later: it is written at the same time after the publish, or when
the record begins to go, and nobody waits for it.

Where a key is spread over buckets, the replica's registers belong into one, and mostly lie there
(directory/buckets.py). After a publish only that one is read; whoever gives something up reads all,
as its shards may have known of different numbers.

What bounds it: one read and one write of a mark under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    versions_key,
)
from tensorhub_p2p.protocol.messages import WholeMark
from tensorhub_p2p.protocol.retention.needs import need

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.shards.publishing import References

Judged = Callable[[float, bool], None]
"""`then(now, whole)`."""


class Marking:
    """Of one slot; `mark_after` in seconds."""

    def __init__(
        self, references: References, records: Records, liveness: Liveness, mark_after: float
    ) -> None:
        slot = references.slot
        self._references = references
        self._records = records
        self._liveness = liveness
        self._mark_after = mark_after
        self._key = versions_key(slot.group.model)
        self._everywhere = Inquiry(records, self._key, self._saw)
        self._near = Inquiry(records, self._key, self._saw_near, near=slot.group.replica)
        self._then: Judged = _nobody_waits
        """For whom it is being judged."""
        self._judge_at: float | None = None
        self._owes_mark = False
        """It is whole, and nobody here has written so."""

    def announced(self, now: float) -> None:
        """W owners have the slot's record of what was published here."""
        held = self._references.held
        if held is not None and held.num_shards == 1:
            self._owes_mark = True
            self._references.is_whole()
        self._judge_at = now + self._mark_after

    def judge(self, now: float, then: Judged, *, near: bool = False) -> None:
        """Find out whether it was whole, and mark it if it is; `then` once that is known."""
        self._judge_at = None
        self._then = then
        self._everywhere.stop()
        self._near.stop()
        (self._near if near else self._everywhere).look(now)

    def stop(self, now: float) -> None:
        """The record changes: nothing that was read of it counts any more."""
        self._judge_at = None
        self._pay_mark(now)
        self._everywhere.stop()
        self._near.stop()

    def _saw_near(self, now: float, registers: Registers) -> None:
        self._judge(now, registers)
        self._references.comparing.saw_near(now, registers)

    def _saw(self, now: float, registers: Registers) -> None:
        self._judge(now, registers)
        self._references.comparing.saw(now, registers)

    def _judge(self, now: float, registers: Registers) -> None:
        references, then = self._references, self._then
        held, state = references.held, references.state
        if held is None:
            return

        def judged(now: float, refused: Refused | None) -> None:
            if references.held is held and references.state is state:
                if refused is None:
                    references.is_whole()
                then(now, refused is None)

        me, slot = references.me, references.slot
        found = need(registers, (), held.publication, me, slot, self._liveness)
        if references.knows_whole or found.marked:
            judged(now, None)
        elif found.whole:
            self._records.mark(now, self._key, WholeMark(held.publication, held.num_shards), judged)
        else:
            then(now, False)

    def _pay_mark(self, now: float) -> None:
        held = self._references.held
        if self._owes_mark and held is not None:
            mark = WholeMark(held.publication, held.num_shards)
            self._records.mark(now, self._key, mark, lambda _now, _refused: None)
        self._owes_mark = False

    def tick(self, now: float) -> None:
        if self._judge_at is not None and now >= self._judge_at:
            self._pay_mark(now)
            self.judge(now, _nobody_waits, near=True)

    def next_wakeup(self) -> float | None:
        return self._judge_at


def _nobody_waits(_now: float, _whole: bool) -> None:
    """What was found is on record."""
