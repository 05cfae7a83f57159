"""What a closed handle leaves in the directory, and how that goes away again.

Rules of this file. Names of registers, nothing else: when something is withdrawn is the
directory's business (own.py), and whoever closes a handle says that it is over.

Theory of operation. A hidden reference stays for a while, so that owners can refuse late marks
and pins (admission.py); a released claim, so that the next one's counter is higher (slots.py).
The references are forgotten `forget_hidden_after` seconds after their handle closed: longer than
a pull retries, or a pin can be on its way. Claim, generation, floor and fence stay for as long
as their writer lives, as counters must not fall while a name can be used again: but a name that
was made up for one handle is never used again, and then they are forgotten as well.

What is written again meanwhile, by the next handle of the slot, stays.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.directory.records import (
    Records,
    fence_name,
    floor_name,
    group_key,
    holders_key,
    slot_name,
    versions_key,
)
from tensorhub_p2p.protocol.identity import Slot


def forget_references(records: Records, now: float, slot: Slot) -> None:
    """The handle of this slot is closed: what it held concerns nobody any more."""
    model, name = slot.group.model, slot_name(slot)
    records.forget(now, versions_key(model), name)
    records.forget(now, holders_key(model, slot.shard), name)


def forget_group(records: Records, now: float, slot: Slot) -> None:
    """The replica's name is never used again: forget the slot's part of its group too."""
    group = slot.group
    key = group_key(group)
    for name in (slot_name(slot), "generation", floor_name(group)):
        records.forget(now, key, name)
    records.forget(now, versions_key(group.model), fence_name(group))
