"""What an owner of the versions key refuses to write, and why.

Rules of this file. One pure function over what this owner holds of the key; reasons.py finds
in it what may forbid a write, so that a key with thousands of writers costs no more. W owners must
take a write, so a rule that one of them knows a reason for is kept: whatever made the
reason was on W owners too, and the two sets meet. After a change of owners they need not:
so what may be refused is judged by warm owners only (owner.py), who have merged what a
majority of each earlier set took.

    a publish below an existing whole version                     conflict (G4)
    a publish of a version that the same replica once had whole   conflict (G1)
    a publish or pin by a generation that was replaced            fenced (G7)
    a "whole" mark for what its publisher is withdrawing          withdrawn (G3)
    a pin on what was withdrawn, with nobody known to keep it     withdrawn (G6)
    a publish, mark or pin of what was retracted                  retracted

Only what began after its reason was on W owners is sure to be refused. Of two that cross,
an owner refuses the later one if it has heard of the earlier, and both may be admitted:
so a publish that began before a higher version was whole may stand below it.

"Known to keep it" is said by its holders, or by who withdrew it because another one promised
to keep it: that one's own record may have come to other owners first.

Where a key is spread over buckets, some of this can't be judged: buckets.py says what.

The reasons themselves are plain writes: fences, withdrawals, retractions, and the references of
what was whole are taken by any owner at any time.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.directory.buckets import is_spread
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.owner import Admit, Refusal
from tensorhub_p2p.protocol.directory.records import fence_name
from tensorhub_p2p.protocol.identity import Generation, Group, Publication
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    Key,
    Phase,
    Pin,
    Register,
    VersionRecord,
    WholeMark,
)

CONFLICT = "conflict"
WITHDRAWN = "withdrawn"
FENCED = "fenced"
RETRACTED = "retracted"


def _is_conditional(key: Key, new: Register) -> bool:
    """Whether any of the rules concerns the register."""
    if key.kind != "versions":
        return False
    if isinstance(new.value, VersionRecord):
        return _is_publish(new.value)
    return isinstance(new.value, (WholeMark, Pin))


def _refusal(key: Key, held: Cells, new: Register) -> Refusal | None:
    if not _is_conditional(key, new):
        return None
    value = new.value
    if isinstance(value, VersionRecord):
        return _admit_publish(held, new, value)
    if isinstance(value, WholeMark):
        return _retracted(held, value.publication) or _admit_mark(held, value)
    if isinstance(value, Pin):
        fenced = _fenced(held, value.group, value.generation)
        refused = fenced or _retracted(held, value.publication)
        return refused if refused or is_spread(key, held) else _admit_pin(held, value)
    return None


admit = Admit(_refusal, _is_conditional)
"""The policy of the versions key; None admits a register."""


def _is_publish(record: VersionRecord) -> bool:
    """By the publishing replica's own slot, as ready, of what isn't known to be whole."""
    own = record.slot.group.replica == record.publication.replica
    return own and record.phase is Phase.READY and not record.was_whole


def _admit_publish(held: Cells, new: Register, record: VersionRecord) -> Refusal | None:
    publication = record.publication
    fenced = _fenced(held, record.slot.group, record.generation)
    if fenced is not None:
        return fenced
    before = _phase_of(held.get(new.cell), publication)
    if before is not None and before is not Phase.HIDDEN:
        return None
    retracted = _retracted(held, publication)
    if retracted is not None:
        return retracted
    reasons = held.reasons
    newest = reasons.newest_whole()
    if newest is not None and newest.order > publication.order:
        return Refusal(CONFLICT, reasons.proof(newest))
    for other in reasons.whole_by(publication.replica, publication.order):
        # Its own mark forbids a publication only once it was hidden: the bytes may differ by now.
        if other != publication or before is not None:
            return Refusal(CONFLICT, reasons.proof(other))
    return None


def _retracted(held: Cells, publication: Publication) -> Refusal | None:
    retraction = held.reasons.retraction(publication.order)
    return None if retraction is None else Refusal(RETRACTED, retraction)


def _fenced(held: Cells, group: Group, generation: Generation) -> Refusal | None:
    for register in held.reasons.fences(fence_name(group)).values():
        record = register.value
        if isinstance(record, GenerationRecord) and record.generation > generation:
            return Refusal(FENCED, register)
    return None


def _admit_mark(held: Cells, mark: WholeMark) -> Refusal | None:
    publication = mark.publication
    for register in held.reasons.records_by(publication.replica).values():
        record = register.value
        if not isinstance(record, VersionRecord) or record.was_whole:
            continue
        gone = record.publication == publication and record.phase >= Phase.WITHDRAWING
        moved_on = record.publication.order > publication.order
        if record.generation >= publication.generation and (gone or moved_on):
            return Refusal(WITHDRAWN, register)
    return None


def _admit_pin(held: Cells, pin: Pin) -> Refusal | None:
    withdrawn: dict[int, Register] = {}
    kept: set[int] = set()
    for register in held.reasons.records_of(pin.publication).values():
        record = register.value
        if not isinstance(record, VersionRecord):
            continue
        if pin.shards and record.slot.shard not in pin.shards:
            continue
        if record.phase < Phase.WITHDRAWING or record.kept:
            kept.add(record.slot.shard)
        else:
            withdrawn[record.slot.shard] = register
    for shard, register in withdrawn.items():
        if shard not in kept:
            return Refusal(WITHDRAWN, register)
    return None


def _phase_of(register: Register | None, publication: Publication) -> Phase | None:
    """What the register says of the publication; None if it speaks of another, or of none."""
    record = register.value if register is not None else None
    if isinstance(record, VersionRecord) and record.publication == publication:
        return record.phase
    return None
