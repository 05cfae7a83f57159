"""What follows when the directory has answered: `Records` on top of the directory's numbers.

Rules of this file. It remembers continuations, and where the buckets of wide keys are
(buckets.py); it decides nothing else. The directory speaks in request numbers and events; the
group protocols say `read(key, then)`. A request here has no deadline of its own: it ends with
its answer, or is cancelled by whoever asked. A write is replaced by the next one of the same
register, so there is at most one for each.

Theory of operation, for a key that is spread over B buckets. A read asks all of them, as many as
are known, and those of which bucket 0 speaks besides; it ends with the last answer. A watch is
one of each bucket. A write goes to one: where this peer's register of that name is, as long as
that says something of a publication that is still to be had, or is no older; else where it
belongs by B, and then the old one is let go.

    a write finds its bucket crowded         write 2B to bucket 0
    a read, or a write's answer, says B'     write B' to bucket 0, to be sure that W owners have it
    B is on W owners                         place new publications by it

A publish below what is known to be the model's newest version is judged here, by a read of all
buckets, before it is written: no owner sees all that may forbid it.

A mark goes to each bucket where its publication's records were seen. A fence goes wherever the
replica's registers may be, again when there are more buckets. A read of what lies `near` a replica
asks one bucket: it may miss what a peer wrote that knew of fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from tensorhub_p2p.protocol.directory.admission import admit
from tensorhub_p2p.protocol.directory.buckets import (
    WIDE,
    bucket,
    bucket_of,
    chain,
    count_in,
    number_of,
    replica_of,
    whole_key,
)
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.directory import (
    Directory,
    KeyChanged,
    ReadDone,
    WriteDone,
    WriteRefused,
)
from tensorhub_p2p.protocol.directory.records import Enough, Refused, Registers
from tensorhub_p2p.protocol.directory.registers import Cell, Mark, merge
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.messages import (
    Buckets,
    GenerationRecord,
    HolderRecord,
    Key,
    Phase,
    Register,
    Value,
    VersionRecord,
    WholeMark,
)

Read = Callable[[float, Registers], None]
Written = Callable[[float, Refused | None], None]
Looked = Callable[[float, Refused | None, Registers | None], None]
Changed = Callable[[float], None]


@dataclass
class PendingRead:
    """One read, of one bucket or of many."""

    key: Key
    then: Read
    near: str = ""
    """Only what lies together with this replica's registers; "" for all."""
    agreed: bool = False
    """Only what W owners are known to hold."""
    waits: dict[int, None] = field(default_factory=dict)
    """The directory's reads that are under way."""
    asked: set[int] = field(default_factory=set)
    """Buckets."""
    cells: dict[Cell, Register] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch:
    """Somebody who is told when a key changes; of its pins, too, or not."""

    key: Key
    then: Changed
    pins: bool


@dataclass
class Spread:
    """What is known of one wide key's buckets."""

    count: int = 1
    """There are so many: read them all."""
    sure: int = 1
    """So many are on record at W owners: write by it."""
    growing: int = 0
    """To which number of them; 0 if nothing is being written of that."""


ALONE = Spread()
"""A key that is not spread, as far as is known."""
MAX_SEEN = 1024
"""Publications of which it is remembered where their records are."""


class PendingRecords:
    """The `Records` of one peer. A key has `max_buckets` at most.

    `newest` names the highest (epoch, version) of a model that this peer has heard of.
    """

    def __init__(
        self,
        directory: Directory,
        max_buckets: int = 1024,
        newest: Callable[[str], tuple[int, int] | None] = lambda _model: None,
    ) -> None:
        self._directory = directory
        self._max_buckets = max_buckets
        self._heard_of = newest
        self._numbers = count(1)
        self._reads: dict[int, PendingRead] = {}
        self._parts: dict[int, int] = {}
        """By the directory's number of a read: ours."""
        self._writes: dict[int, Written] = {}
        self._newest: dict[tuple[Key, str], int] = {}
        """By register: the write under way."""
        self._registers: dict[int, tuple[Key, str]] = {}
        self._places: dict[tuple[Key, str], Key] = {}
        """By register of a wide key: the bucket where it was written last, unless it is 0."""
        self._looked: Registers | None = None
        """What the owners held right after the write that has just ended."""
        self._unproven: dict[tuple[Key, str], WholeMark] = {}
        """By register that moved to another bucket: what its replica had whole before. Who judges
        there has to know of that before the register is written."""
        self._fences: dict[tuple[Key, str], GenerationRecord] = {}
        """Of spread keys: the fences that this peer wrote."""
        self._seen: dict[tuple[Key, Publication], set[int]] = {}
        """In which buckets records of a publication were seen, those read last at the end."""
        self._spread: dict[Key, Spread] = {}
        self._growths: dict[int, tuple[Key, int]] = {}
        """By the directory's number of a write: of which key it says how many buckets it has."""
        self._watches: dict[int, Watch] = {}
        self._watch_numbers = count(1)

    def buckets(self, key: Key) -> int:
        """Over how many buckets the key is spread, as far as this peer knows."""
        spread = self._spread.get(key)
        return spread.count if spread is not None else 1

    # -- reading --

    def read(
        self,
        now: float,
        key: Key,
        then: Read,
        _enough: Enough | None = None,
        near: str = "",
        *,
        agreed: bool = False,
    ) -> int:
        number = -next(self._numbers)
        self._reads[number] = read = PendingRead(key, then, near, agreed)
        self._ask(now, number, read)
        return number

    def _ask(self, now: float, number: int, read: PendingRead) -> None:
        """Read the buckets that are known of, and have not been read."""
        spread = self._spread.get(read.key, ALONE)
        near = (bucket_of(read.near, spread.sure),)
        for each in near if read.near else range(spread.count):
            if each not in read.asked:
                read.asked.add(each)
                place = bucket(read.key, each)
                request = self._directory.read(now, place, math.inf, agreed=read.agreed)
                read.waits[request] = None
                self._parts[request] = number

    def _answered(self, now: float, event: ReadDone) -> None:
        number = self._parts.pop(event.request, 0)
        read = self._reads.get(number)
        if read is None:
            return
        del read.waits[event.request]
        merge(read.cells, event.registers)
        if read.key.kind in WIDE:
            if event.key == read.key:
                self._learn(now, read.key, count_in(event.registers))
                self._ask(now, number, read)
            self._note_places(event)
        if not read.waits:
            del self._reads[number]
            read.then(now, tuple(read.cells.values()))

    # -- writing --

    def write(
        self, now: float, key: Key, name: str, generation: int, value: Value | None, then: Written
    ) -> int:
        replaced = self._newest.get((key, name))
        if replaced is not None:
            self.cancel(replaced)
        if self._is_doubtful(key, value):
            return self._look_first(now, key, name, generation, value, then)
        return self._write(now, key, name, generation, value, then)

    def _is_doubtful(self, key: Key, value: Value | None) -> bool:
        """A publish that others may forbid of whom the bucket's owners don't know."""
        if self.buckets(key) == 1 or not isinstance(value, VersionRecord) or value.was_whole:
            return False
        own = value.slot.group.replica == value.publication.replica
        newest = self._heard_of(key.model)
        return own and newest is not None and value.publication.order < newest

    def _look_first(
        self, now: float, key: Key, name: str, generation: int, value: Value | None, then: Written
    ) -> int:
        """Read all buckets, and judge the write by that; then write it."""

        def judge(now: float, registers: Registers) -> None:
            self._written(number)
            new = Register(self._directory.me, name, generation, 0, value)
            refusal = admit(key, Cells(registers), new)
            if refusal is not None:
                then(now, Refused(refusal.reason, refusal.because))
            else:
                self._write(now, key, name, generation, value, then)

        number = self.read(now, key, judge)
        self._newest[(key, name)] = number
        self._registers[number] = (key, name)
        return number

    def _write(
        self, now: float, key: Key, name: str, generation: int, value: Value | None, then: Written
    ) -> int:
        place = self._place(now, key, name, value)
        proof = self._unproven.get((key, name))
        if proof is None:
            return self._write_at(now, place, key, name, generation, value, then)

        def proven(now: float, _refused: Refused | None) -> None:
            self._written(number)
            self._unproven.pop((key, name), None)
            self._write_at(now, place, key, name, generation, value, then)

        number = self._directory.mark(now, place, proof, math.inf)
        self._under_way(number, key, name, proven)
        return number

    def write_and_look(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value,
        then: Looked,
        *,
        agreed: bool = False,
    ) -> int:
        def written(now: float, refused: Refused | None) -> None:
            then(now, refused, self._looked)

        if self.buckets(key) > 1:
            return self.write(now, key, name, generation, value, written)
        replaced = self._newest.get((key, name))
        if replaced is not None:
            self.cancel(replaced)
        number = self._directory.write(
            now, key, name, generation, value, math.inf, looks=True, agreed=agreed
        )
        self._under_way(number, key, name, written)
        return number

    def _under_way(self, number: int, key: Key, name: str, then: Written) -> None:
        self._writes[number] = then
        self._newest[(key, name)] = number
        self._registers[number] = (key, name)

    def _write_at(
        self,
        now: float,
        place: Key,
        key: Key,
        name: str,
        generation: int,
        value: Value | None,
        then: Written,
    ) -> int:
        sure = self._spread.get(key, ALONE).sure
        if isinstance(value, GenerationRecord) and key.kind in WIDE:
            self._fences[(key, name)] = value
            then = self._fence(now, key, name, place, then)
        number = self._directory.write(now, place, name, generation, value, math.inf, buckets=sure)
        self._under_way(number, key, name, then)
        return number

    def _fence(self, now: float, key: Key, name: str, done: Key, then: Written) -> Written:
        """Write a fence to all other buckets where its replica's registers may be.

        Returns what is to be called when the one in bucket `done` is written.
        """
        value = self._fences[(key, name)]
        numbers = chain(replica_of(value, name) or "", self.buckets(key))
        others = [place for b in numbers if (place := bucket(key, b)) != done]
        written = _after(1 + len(others), then)
        for place in others:
            counter = value.generation.counter
            number = self._directory.write(now, place, name, counter, value, math.inf)
            self._writes[number] = written
        return written

    def _place(self, now: float, key: Key, name: str, value: Value | None) -> Key:
        """The bucket in which to write this register."""
        there = self._places.get((key, name), key)
        spread, replica = self._spread.get(key), replica_of(value, name)
        if spread is None or replica is None:
            return there
        place = bucket(key, bucket_of(replica, spread.sure))
        before = self._directory.holds(there, name)
        if place == there or (before is not None and not _is_over(before, value)):
            return there
        self._directory.let_go(now, there, name)
        self._places[(key, name)] = place
        if isinstance(before, VersionRecord) and before.was_whole:
            self._unproven[(key, name)] = WholeMark(before.publication, before.num_shards)
        return place

    def mark(self, now: float, key: Key, value: Mark, then: Written) -> int:
        """In each bucket where what it is about is; `then` once all have it, or one refuses."""
        places = [key]
        if isinstance(value, WholeMark):
            places = [bucket(key, b) for b in self._buckets_with(key, value)]
        written = _after(len(places), then)
        for place in places:
            number = self._directory.mark(now, place, value, math.inf)
            self._writes[number] = written
        return number

    def _buckets_with(self, key: Key, mark: WholeMark) -> set[int]:
        """Where a publication's records are: its shards may have known of different B."""
        publication = mark.publication
        belongs = bucket_of(publication.replica, self._spread.get(key, ALONE).sure)
        return self._seen.get((key, publication), set()) | {belongs}

    def _note_places(self, event: ReadDone) -> None:
        """Remember where a replica's own records are, for marks."""
        key = whole_key(event.key)
        if self.buckets(key) == 1:
            return
        for register in event.registers:
            record = register.value
            if not isinstance(record, VersionRecord):
                continue
            if record.slot.group.replica == record.publication.replica:
                place = (key, record.publication)
                seen = self._seen.pop(place, set())
                self._seen[place] = seen | {number_of(event.key)}
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def forget(self, now: float, key: Key, name: str) -> None:
        self._unproven.pop((key, name), None)
        fence = self._fences.pop((key, name), None)
        if fence is not None:
            for each in chain(replica_of(fence, name) or "", self.buckets(key)):
                self._directory.let_go(now, bucket(key, each), name)
        self._directory.let_go(now, self._places.pop((key, name), key), name)

    def cancel(self, request: int) -> None:
        read = self._reads.pop(request, None)
        self._written(request)
        if read is not None:
            for part in read.waits:
                self._parts.pop(part, None)
                self._directory.cancel(part)
        else:
            self._directory.cancel(request)

    # -- buckets --

    def _learn(self, now: float, key: Key, total: int) -> None:
        """Somebody says that the key has so many buckets."""
        if total <= self.buckets(key) or total > self._max_buckets:
            return
        spread = self._spread.setdefault(key, Spread())
        watches = self._watches_of(key)
        pins = any(watch.pins for watch in watches)
        for number in range(spread.count, total):
            if watches:
                self._directory.watch(now, bucket(key, number), pins=pins)
        spread.count = total
        for (at, name), _ in list(self._fences.items()):
            if at == key:
                self._fence(now, key, name, self._places.get((key, name), key), _nobody_waits)
        self._grow(now, key, total)

    def _grow(self, now: float, key: Key, total: int) -> None:
        """See to it that W owners of bucket 0 know the number."""
        spread = self._spread.setdefault(key, Spread())
        if max(spread.growing, spread.sure) < total <= self._max_buckets:
            spread.growing = total
            request = self._directory.mark(now, key, Buckets(total), math.inf)
            self._growths[request] = (key, total)

    def _grown(self, now: float, key: Key, total: int) -> None:
        spread = self._spread[key]
        spread.sure = max(spread.sure, total)
        if spread.growing <= total:
            spread.growing = 0
        self._learn(now, key, total)

    def _heed(self, now: float, event: WriteDone) -> None:
        """What a write's owners say of the key's buckets."""
        key = whole_key(event.key)
        if key.kind not in WIDE:
            return
        # Only the owners of bucket 0 know more than the writer told them.
        if event.key == key and event.sure_buckets > self._spread.get(key, ALONE).sure:
            spread = self._spread.setdefault(key, Spread())
            spread.sure = event.sure_buckets
        self._learn(now, key, event.buckets)
        if event.crowded and event.buckets >= self.buckets(key):
            self._grow(now, key, 2 * event.buckets)

    # -- watching --

    def watch(self, now: float, key: Key, then: Changed, *, pins: bool = False) -> int:
        number = next(self._watch_numbers)
        self._watches[number] = Watch(key, then, pins)
        for each in range(self.buckets(key)):
            self._directory.watch(now, bucket(key, each), pins=pins)
        return number

    def unwatch(self, now: float, watch: int) -> None:
        ended = self._watches.pop(watch, None)
        if ended is not None and not self._watches_of(ended.key):
            for each in range(self.buckets(ended.key)):
                self._directory.unwatch(now, bucket(ended.key, each))

    def _watches_of(self, key: Key) -> list[Watch]:
        return [watch for watch in self._watches.values() if watch.key == key]

    def known(self, key: Key) -> Registers | None:
        parts = [self._directory.known(bucket(key, each)) for each in range(self.buckets(key))]
        cells: dict[Cell, Register] = {}
        for part in parts:
            if part is None:
                return None
            merge(cells, part)
        registers = tuple(cells.values())
        if key.kind in WIDE and count_in(registers) > self.buckets(key):
            return None  # there are buckets that nobody here has read
        return registers

    # -- what the directory says --

    def take(self, now: float, event: object) -> bool:
        """Continue whoever waited for this; False if it is no event of the directory's."""
        if isinstance(event, ReadDone):
            self._answered(now, event)
        elif isinstance(event, (WriteDone, WriteRefused)):
            self._end(now, event)
        elif isinstance(event, KeyChanged):
            for watch in self._watches_of(whole_key(event.key)):
                watch.then(now)
        else:
            return False
        return True

    def _end(self, now: float, event: WriteDone | WriteRefused) -> None:
        growth = self._growths.pop(event.request, None)
        if growth is not None:
            key, total = growth
            said = event.buckets if isinstance(event, WriteDone) else 1
            self._grown(now, key, max(total, said))
            return
        written = self._written(event.request)
        if isinstance(event, WriteDone):
            self._heed(now, event)
        if written is not None and isinstance(event, WriteRefused):
            written(now, Refused(event.reason, event.because))
        elif written is not None:
            # The answer may have told of more buckets: then this was a look at one of them.
            alone = self.buckets(whole_key(event.key)) == 1
            self._looked = event.seen if isinstance(event, WriteDone) and alone else None
            written(now, None)
            self._looked = None

    def _written(self, request: int) -> Written | None:
        """The write is over: forget it, and return who waits for it."""
        register = self._registers.pop(request, None)
        if register is not None:
            del self._newest[register]
        return self._writes.pop(request, None)


def _after(parts: int, then: Written) -> Written:
    """Called for each of so many parts: `then` once, with the last one or the first refusal."""
    missing = parts

    def written(now: float, refused: Refused | None) -> None:
        nonlocal missing
        if missing > 0:
            missing = 0 if refused is not None else missing - 1
            if not missing:
                then(now, refused)

    return written


def _nobody_waits(_now: float, _refused: Refused | None) -> None:
    """The directory goes on telling the owners."""


def _is_over(before: Value, value: Value | None) -> bool:
    """Whether what stands there is given up, and something newer is to be written.

    An older version is written where the newer one was: its owners know whether they refuse it.
    """
    if not isinstance(before, (VersionRecord, HolderRecord)) or before.phase is not Phase.HIDDEN:
        return False
    newer = isinstance(value, (VersionRecord, HolderRecord))
    return newer and value.publication.order > before.publication.order  # type: ignore[union-attr]
