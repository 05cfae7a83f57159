"""Who holds a shard of a version, told to pulls for as long as they run.

Rules of this file. A `Following` reads the holders keys and says what it finds. It knows
nothing of what a pull does with that; it decides nothing.

Theory of operation. A follow reads its shard's key at once, again a moment later, when it begins
to watch it, and every `holders_interval`, as news of changes may be lost and deaths change no
key. Of a change the directory tells what is new, or else the key is read again. A follow has at
most one read under way (inquiry.py): reads that are not answered, as in a partition, don't pile
up, and no late answer follows a newer one.
Whoever decided that the pull may begin has just looked who has the shard, and may have named a
few (`sources`). Of these, those that answer are told as holders at once, and the key is read only
when it begins to be watched, `UNWATCHED` seconds later: a pull that is over by then has cost the
directory nothing. If all of them turn out to be gone before, nothing is lost but that moment.
`HoldersChanged` is emitted for these and for the first answer, and for each that differs from the
last.
While no responsive peer of the own zone has all of the shard, holders in other zones are
looked for too. Holders that are silent are named only while no responsive one has all of it:
so they get no new readers, and keep those that they have.
Holders of another publication of the same version are named too: data-parallel trainers publish
the same bytes side by side, and a pull takes from them what its own publication's list allows
(pulls/sources.py). They make up for nobody: whether all of the shard is there is asked of the
followed publication alone.
What bounds it: one follow for each pull that runs; it ends with `stop`.
"""

from __future__ import annotations

from itertools import count

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Registers,
    holders_key,
    values,
)
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.manifest import DIGEST_BYTES
from tensorhub_p2p.protocol.messages import DigestList, HolderRecord, Key, Phase, Source
from tensorhub_p2p.protocol.shards.verbs import Holder, HoldersChanged

UNWATCHED = 0.05
"""Seconds for which a pull's holders aren't watched: many a pull is over by then."""


class Follow:
    """One pull that wants to know who holds its shard."""

    def __init__(
        self,
        now: float,
        number: int,
        model: str,
        shard: int,
        publication: Publication,
        records: Records,
        liveness: Liveness,
        interval: float,
        sources: tuple[Source, ...],
    ) -> None:
        self.outbox = Outbox()
        self._number = number
        self._publication = publication
        self._holders: tuple[Holder, ...] | None = None
        self._digests: tuple[bytes, ...] = ()
        self._records = records
        self._liveness = liveness
        self._interval = interval
        self._key = holders_key(model, shard)
        self._inquiry = Inquiry(records, self._key, self._on_registers)
        self._watch: int | None = None
        named = tuple(
            Holder(source.peer, source.slot, Phase.READY, publication)
            for source in sources
            if liveness.is_responsive(source.peer)
        )
        if named:
            self._tell(named, ())
        else:
            self._look(now)
        self._look_at = now + UNWATCHED

    def look(self, now: float, key: Key) -> None:
        """If this is its key, look at once, with a watch from now on."""
        if key == self._key:
            self._look_at = now
            self.tick(now)

    def _look(self, now: float) -> None:
        self._look_at = now + self._interval
        self._inquiry.look(now, self._is_held_whole)

    def _changed(self, now: float) -> None:
        known = self._records.known(self._key)
        if known is not None and self._is_held_whole(known):
            self._on_registers(now, known)
        else:
            self._look(now)

    def _is_held_whole(self, registers: Registers) -> bool:
        return any(
            record.publication == self._publication
            and record.phase is Phase.READY
            and not self._liveness.is_gone(register.writer)
            for register, record in values(registers, HolderRecord)
        )

    def _on_registers(self, _now: float, registers: Registers) -> None:
        holders = tuple(
            Holder(register.writer, record.slot, record.phase, record.publication)
            for register, record in values(registers, HolderRecord)
            if record.publication.order == self._publication.order
            and record.phase is not Phase.HIDDEN
            and not self._liveness.is_gone(register.writer)
        )
        answering = [h for h in holders if self._liveness.is_responsive(h.peer)]
        if any(h.phase is Phase.READY and h.publication == self._publication for h in answering):
            holders = tuple(answering)
        self._tell(holders, self._digests_left(registers))

    def _tell(self, holders: tuple[Holder, ...], digests: tuple[bytes, ...]) -> None:
        if (holders, digests) != (self._holders, self._digests):
            self._holders, self._digests = holders, digests
            self.outbox.emit(HoldersChanged(self._number, holders, digests))

    def _digests_left(self, registers: Registers) -> tuple[bytes, ...]:
        """The origin's list, which stays when the origin has gone (sealing.py)."""
        for _, left in values(registers, DigestList):
            if left.publication == self._publication:
                starts = range(0, len(left.digests), DIGEST_BYTES)
                return tuple(left.digests[at : at + DIGEST_BYTES] for at in starts)
        return self._digests

    def stop(self, now: float) -> None:
        self._inquiry.stop()
        if self._watch is not None:
            self._records.unwatch(now, self._watch)

    def tick(self, now: float) -> None:
        if now >= self._look_at:
            if self._watch is None:
                self._watch = self._records.watch(now, self._key, self._changed)
            self._look(now)

    def next_wakeup(self) -> float | None:
        return self._look_at


class Following:
    """The follows of one peer, by number."""

    def __init__(self, records: Records, liveness: Liveness, config: PullConfig) -> None:
        self.outbox = Outbox()
        self._follows: dict[int, Follow] = {}
        self._numbers = count(1)
        self._records = records
        self._liveness = liveness
        self._config = config

    def start(
        self,
        now: float,
        model: str,
        shard: int,
        publication: Publication,
        sources: tuple[Source, ...] = (),
    ) -> int:
        """Begin a follow; its number is in each of its `HoldersChanged`.

        `sources` are known to have the shard: the pull begins with them.
        """
        number = next(self._numbers)
        self._follows[number] = Follow(
            now,
            number,
            model,
            shard,
            publication,
            self._records,
            self._liveness,
            self._config.holders_interval,
            sources,
        )
        return number

    def stop(self, now: float, number: int) -> None:
        """End it; an unknown one is ignored."""
        follow = self._follows.pop(number, None)
        if follow is not None:
            follow.stop(now)

    def look(self, now: float, model: str, shard: int) -> None:
        """Who follows this looks at once: this peer has written there, of which nobody tells it."""
        for follow in self._follows.values():
            follow.look(now, holders_key(model, shard))

    def pump(self) -> None:
        """Take what the follows put out."""
        for follow in self._follows.values():
            self.outbox.items += follow.outbox.drain()

    def tick(self, now: float) -> None:
        for follow in list(self._follows.values()):
            follow.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(*(follow.next_wakeup() for follow in self._follows.values()))
