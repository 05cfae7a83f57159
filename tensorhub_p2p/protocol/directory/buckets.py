"""A key with many writers, spread over buckets, so that no owner has to carry it all.

Rules of this file. Pure: which bucket something belongs in. When a key grows is pending.py's
and owner.py's, who reads what is pending.py's.

Theory of operation. Keys of kind "versions" and "holders" are *wide*: what is written under one
lies in B buckets, each a key of its own with owners of its own. Bucket 0 is the key itself, so
that B = 1 is a key as any other. A replica's registers, its fence and its marks lie together in
bucket `hash(replica) mod B`: so each rule about one replica is judged by owners that know all
that it takes (admission.py).

B is a register in bucket 0 that only doubles. Readers read bucket 0, which says B, then the
others. A writer learns B from its writes and reads, and places *new* publications by it once it
knows that B is on W owners: so whoever reads after a write was acknowledged finds its bucket.
What was written by a smaller B stays where it is; hence a replica's registers may lie in any
bucket of its `chain`. Where one cell is found in two buckets the higher register counts, as ever.

A bucket is crowded when more than `bucket_registers` of its registers would be in it by the B
that its writer knows: what is there from before the last growth doesn't count, nor does the replica
with the most of them, since no growth would part what is one replica's.

Limits. With B > 1 no owner sees all publications: a publish below a whole version of a replica
in another bucket is not refused by owners. Its writer looks at all buckets first if the hint that
is gossiped of each model's newest version names a higher one (pending.py): what was published
before that hint came may stand below it; floors keep a group from going back. And no owner sees
all holders: pins are admitted, and the leader that pins looks by itself whether somebody still
holds it (resolving.py). Pins and marks by other zones lie in bucket 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mmh3 import hash as hash32

from tensorhub_p2p.protocol.directory.registers import BUCKETS_NAME
from tensorhub_p2p.protocol.identity import NOBODY
from tensorhub_p2p.protocol.messages import (
    Buckets,
    DigestList,
    GenerationRecord,
    HolderRecord,
    Key,
    Phase,
    Pin,
    Register,
    Value,
    VersionRecord,
    WholeMark,
)

WIDE = frozenset(("versions", "holders"))
"""Kinds of keys that can be spread."""
_SEPARATOR = "/"


def bucket(key: Key, number: int) -> Key:
    """The key of one bucket of a wide key."""
    return Key(key.kind, key.model, f"{key.part}{_SEPARATOR}{number}") if number else key


def number_of(key: Key) -> int:
    """Which bucket this key is."""
    number = key.part.partition(_SEPARATOR)[2] if key.kind in WIDE else ""
    return int(number) if number.isdecimal() and len(number) < 9 else 0


def whole_key(key: Key) -> Key:
    """The wide key that this is a bucket of."""
    if key.kind not in WIDE:
        return key
    return Key(key.kind, key.model, key.part.partition(_SEPARATOR)[0])


def bucket_of(replica: str, count: int) -> int:
    """Where a replica's registers belong if there are so many buckets."""
    return hash32(replica, 0, signed=False) % count if count > 1 else 0


def chain(replica: str, count: int) -> tuple[int, ...]:
    """Where a replica's registers may lie: where they belong, now or when there were fewer."""
    found: dict[int, None] = {}
    while count:
        found[bucket_of(replica, count)] = None
        count //= 2
    return tuple(found)


def replica_of(value: Value | None, name: str = "") -> str | None:
    """Whose replica decides where a register lies; None: it lies in bucket 0."""
    if isinstance(value, (VersionRecord, HolderRecord)):
        return value.slot.group.replica
    if isinstance(value, Pin):
        return value.group.replica
    if isinstance(value, (WholeMark, DigestList)):
        return value.publication.replica
    if isinstance(value, GenerationRecord):
        return name.partition(_SEPARATOR)[2]
    return None


def count_in(registers: Iterable[Register]) -> int:
    """B, as bucket 0 says it."""
    for register in registers:
        if isinstance(register.value, Buckets):
            return register.value.count
    return 1


def is_valid(count: int, most: int) -> bool:
    """A power of two, and not too many."""
    return 1 < count <= most and count & (count - 1) == 0


def is_crowded(key: Key, registers: Iterable[Register], count: int, most: int) -> bool:
    """Whether more than `most` of these belong into this bucket if there are `count`.

    The replica that has the most of them isn't counted: what is one replica's lies together,
    however many buckets there are.
    """
    number = number_of(key)
    here: Counter[str] = Counter()
    for register in registers:
        value = register.value
        if register.writer == NOBODY or getattr(value, "phase", None) is Phase.HIDDEN:
            continue
        replica = replica_of(value, register.name)
        if replica is not None and bucket_of(replica, count) == number:
            here[replica] += 1
    return here.total() - max(here.values(), default=0) > most


def is_spread(key: Key, cells: Iterable[tuple[str, str]]) -> bool:
    """Whether this bucket of a wide key is not the only one."""
    return number_of(key) > 0 or (NOBODY, BUCKETS_NAME) in cells
