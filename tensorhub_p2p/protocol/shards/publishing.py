"""What one slot holds, as the directory knows it: publishing, holding, withdrawing.

Rules of this file. One `References` belongs to one handle. It writes the slot's two
registers, at the versions key and at the holders key, and it decides when a publication
may be given up. It moves no bytes; who is reading is serving.py's.

Theory of operation.

    EMPTY        nothing held, or hidden
    ANNOUNCING   the registers are on their way to W owners
    HELD         as PARTIAL (pulling) or READY: others find it
    MARKING      step 1 of unpublishing: "withdrawing" to W owners, who refuse later marks
    KEEPING      step 2: pinned by another group, and no other whole holder of this shard
                 is reachable: wait until a reader has it all, or the pin ends
    HIDING       step 4: hidden at W owners; from here on no digest is taken
    (draining, step 5, is the server's)

A publish is one write to each key, with no barrier and no leader; owners refuse it when
they know of a higher whole version (admission.py), and it is taken back where they did
not. What was never whole is aborted: nobody pins it, so it goes from MARKING to HIDING
with no wait. (A pin proves that it was whole: the mark is on W owners before a pin is
written, though a shard may not have seen it yet.) Before
HIDING the withdrawal can be taken back (`restore`): the caller's deadline passed.

When the group's next generation is formed, a publication that is whole is re-issued
under its id with the new generation; one that is not is aborted (`Aborted`). Whether it
is, the owners decide: all shards ask for the mark, and one that aborted makes it refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    holders_key,
    slot_name,
    values,
    versions_key,
)
from tensorhub_p2p.protocol.groups.selection import Holding, holdings
from tensorhub_p2p.protocol.identity import Generation, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.messages import (
    HolderRecord,
    Phase,
    Pin,
    VersionRecord,
    WholeMark,
)


class RefState(Enum):
    EMPTY = "nothing held"
    ANNOUNCING = "writing the references"
    HELD = "held"
    MARKING = "writing that it withdraws"
    KEEPING = "waiting for a reader that keeps the version"
    HIDING = "hiding the references"


class Announced(Event):
    """The references are on W owners."""

    def __init__(self, publication: Publication, phase: Phase) -> None:
        self.publication = publication
        self.phase = phase


class Conflicts(Event):
    """An owner refused the publish: `existing` stands in its way."""

    def __init__(self, publication: Publication, existing: Publication | None, why: str) -> None:
        self.publication = publication
        self.existing = existing
        self.why = why


class Hidden(Event):
    def __init__(self, publication: Publication, was_whole: bool) -> None:
        self.publication = publication
        self.was_whole = was_whole


class Whole(Event):
    """What this slot published is whole, and marked so; or it brought a copy of such a one."""

    def __init__(self, model: str, publication: Publication) -> None:
        self.model = model
        self.publication = publication


class Aborted(Event):
    """The publication was never whole when its generation ended: it is given up."""

    def __init__(self, publication: Publication) -> None:
        self.publication = publication


@dataclass(frozen=True)
class Held:
    """What the slot holds, and as what."""

    publication: Publication
    num_shards: int
    num_bytes: int
    phase: Phase
    was_whole: bool


class References:
    """The slot's references."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        records: Records,
        liveness: Liveness,
        config: GroupConfig,
        *,
        spot: bool = False,
    ) -> None:
        self.me = me
        self.slot = slot
        self.state = RefState.EMPTY
        self.held: Held | None = None
        self.generation = Generation(0, 0)
        self.outbox = Outbox()
        self.keeper_needed_by: tuple[str, ...] = ()
        """While KEEPING: the groups whose pins hold the withdrawal back."""
        self._watch: int | None = None
        self._retry_at: float | None = None
        self._records = records
        self._liveness = liveness
        self._config = config
        self._spot = spot
        self._versions_key = versions_key(slot.group.model)
        self._inquiry = Inquiry(records, self._versions_key, self._on_registers)
        self._doing: Callable[[float, Holding | None], None] = self._after_announcing
        """What the versions key is being read for."""

    # --- holding ---

    def publish(self, now: float, held: Held) -> None:
        """Announce an own publication: `Announced` or `Conflicts` follows."""
        self._end_wait(now)
        self.held = held
        self.state = RefState.ANNOUNCING

        def then(now: float, refused: Refused | None) -> None:
            if refused is not None:
                self._refused(now, held.publication, refused)
                return
            self.state = RefState.HELD
            self.outbox.emit(Announced(held.publication, held.phase))
            # The shard that is ready last sees all of them, and marks the version whole.
            self._doing = self._after_announcing
            self._inquiry.look_anew(now)

        self._write(now, held.phase, then)

    def _refused(self, now: float, publication: Publication, refused: Refused) -> None:
        because = refused.because.value if refused.because else None
        existing = getattr(because, "publication", None)
        self.drop(now)
        self.outbox.emit(Conflicts(publication, existing, refused.reason))

    def _after_announcing(self, now: float, found: Holding | None) -> None:
        if found is not None and found.marked:
            self._is_whole()
        elif found is not None and found.whole:
            self._mark(now, self._marked_after_announcing)

    def _marked_after_announcing(self, now: float, marked: bool) -> None:
        if marked:
            self._is_whole()
            # The record proves that the mark is on W owners: whoever resolves need not write it.
            self._rewrite(now)

    def _mark(self, now: float, then: Callable[[float, bool], None]) -> None:
        """Mark it whole, which the owners refuse if one of its shards was withdrawn."""
        held = self.held
        assert held is not None

        def written(now: float, refused: Refused | None) -> None:
            if self.held is held and self.state is RefState.HELD:
                then(now, refused is None)

        mark = WholeMark(held.publication, held.num_shards)
        self._records.mark(now, self._versions_key, mark, written)

    def _is_whole(self) -> None:
        if self.held is not None and not self.held.was_whole:
            self.held = replace(self.held, was_whole=True)
            self.outbox.emit(Whole(self.slot.group.model, self.held.publication))

    def hold(self, now: float, held: Held) -> None:
        """Announce what a pull brings (PARTIAL) or brought (READY): `Announced` follows."""
        self._end_wait(now)
        self.held = held
        self.state = RefState.ANNOUNCING

        def then(now: float, refused: Refused | None) -> None:
            self.state = RefState.HELD
            self.outbox.emit(Announced(held.publication, held.phase))
            if held.phase is Phase.READY:
                self.outbox.emit(Whole(self.slot.group.model, held.publication))

        self._write(now, held.phase, then)

    def reissue(self, now: float, generation: Generation) -> None:
        """A new generation was formed: keep what is whole, abort what is not."""
        self.generation = generation
        if self.held is None:
            return
        if self.state is RefState.ANNOUNCING and not self.held.was_whole:
            self._abort(now)
        elif self.state is RefState.HELD and self.held.was_whole:
            self._rewrite(now)
        elif self.state is RefState.HELD:
            self._doing = self._after_new_generation
            self._inquiry.look_anew(now)

    def _after_new_generation(self, now: float, found: Holding | None) -> None:
        if found is not None and found.whole and not found.marked:
            self._mark(now, self._keep_or_abort)
        else:
            self._keep_or_abort(now, found is not None and found.marked)

    def _keep_or_abort(self, now: float, whole: bool) -> None:
        if whole:
            self._is_whole()
            self._rewrite(now)
        else:
            self._abort(now)

    def _abort(self, now: float) -> None:
        held = self.held
        assert held is not None
        self.drop(now)
        self.outbox.emit(Aborted(held.publication))

    # --- withdrawing ---

    def withdraw(self, now: float) -> None:
        """Unpublish, steps 1 to 4: `Hidden` follows, unless `restore` comes first."""
        assert self.held is not None
        self._end_wait(now)
        self.state = RefState.MARKING
        self._write(now, Phase.WITHDRAWING, self._on_marked)

    def _on_marked(self, now: float, refused: Refused | None) -> None:
        self.state = RefState.KEEPING
        self._watch = self._records.watch(now, self._versions_key, self._look_for_keeper)
        self._doing = self._after_withdrawing
        self._retry_at = now + 4 * self._config.retry_interval
        self._inquiry.look_anew(now)

    def _look_for_keeper(self, now: float) -> None:
        if self.state is RefState.KEEPING:
            self._retry_at = now + 4 * self._config.retry_interval
            self._inquiry.look(now)

    def _after_withdrawing(self, now: float, found: Holding | None) -> None:
        if found is not None and found.whole:
            self._is_whole()
        held = self.held
        if self.state is not RefState.KEEPING or held is None:
            return
        # Our own record says "withdrawing", and counts no more.
        kept = found is not None and bool(found.ready.get(self.slot.shard))
        if kept or not self.keeper_needed_by:
            self._hide(now)

    def _hide(self, now: float) -> None:
        self._end_wait(now)
        self.state = RefState.HIDING
        self._write(now, Phase.HIDDEN, lambda now, _refused: self._on_hidden(now))

    def _on_hidden(self, now: float) -> None:
        held = self.held
        if self.state is not RefState.HIDING or held is None:
            return
        self._forget()
        self.outbox.emit(Hidden(held.publication, held.was_whole))

    def restore(self, now: float) -> bool:
        """Take a withdrawal back; False if it is too late (step 4 has begun)."""
        if self.state not in {RefState.MARKING, RefState.KEEPING} or self.held is None:
            return False
        self._end_wait(now)
        self.state = RefState.HELD
        self._rewrite(now)
        return True

    def hide_unconfirmed(self, now: float) -> None:
        """The owners don't answer: count it as hidden. They go on being told."""
        self._on_hidden(now)

    def drop(self, now: float) -> None:
        """Give the references up at once, with no step in between (a torn pull, a close)."""
        if self.held is not None:
            self._write(now, Phase.HIDDEN, lambda _now, _refused: None)
        self._end_wait(now)
        self._forget()

    # --- small parts ---

    def _forget(self) -> None:
        self.held = None
        self.state = RefState.EMPTY

    def _end_wait(self, now: float) -> None:
        self._retry_at = None
        self._inquiry.stop()
        self.keeper_needed_by = ()
        if self._watch is not None:
            self._records.unwatch(now, self._watch)
            self._watch = None

    def _on_registers(self, now: float, registers: Registers) -> None:
        held = self.held
        if held is None:
            return
        pins = [
            (register.writer, pin)
            for register, pin in values(registers, Pin)
            if pin.publication == held.publication
        ]
        self.keeper_needed_by = tuple(
            f"{pin.group} of zone {pin.zone}" if pin.zone else str(pin.group)
            for writer, pin in pins
            if (pin.zone or pin.group != self.slot.group)
            and (not pin.shards or self.slot.shard in pin.shards)
            and not self._liveness.is_gone(writer, pin.zone)
        )
        found = holdings(registers, self._liveness.is_gone).get(held.publication)
        if found is not None and pins:
            found.whole = found.marked = True
        self._doing(now, found)

    def _rewrite(self, now: float) -> None:
        """What is held, as it is held, by the generation that there is now."""
        assert self.held is not None
        self._write(now, self.held.phase, lambda _now, _refused: None)

    def _write(
        self, now: float, phase: Phase, then: Callable[[float, Refused | None], None]
    ) -> None:
        """Both registers; `then` is called once, when both are written or one was refused.

        A later write replaces this one: then nobody is told how it ended.
        """
        held = self.held
        assert held is not None
        pending = 2

        def written(now: float, refused: Refused | None) -> None:
            nonlocal pending
            if pending > 0:
                pending = 0 if refused is not None else pending - 1
                if pending == 0:
                    then(now, refused)

        version = VersionRecord(
            self.slot, held.num_shards, held.publication, phase, self.generation, held.was_whole
        )
        holder = HolderRecord(
            self.slot, held.publication, phase, held.was_whole, held.num_bytes, spot=self._spot
        )
        name, counter = slot_name(self.slot), self.generation.counter
        self._records.write(now, self._versions_key, name, counter, version, written)
        key = holders_key(self.slot.group.model, self.slot.shard)
        self._records.write(now, key, name, counter, holder, written)

    def tick(self, now: float) -> None:
        if self._retry_at is not None and now >= self._retry_at:
            self._look_for_keeper(now)

    def next_wakeup(self) -> float | None:
        return self._retry_at

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        if self.state is RefState.KEEPING and self.keeper_needed_by:
            groups = ", ".join(self.keeper_needed_by)
            return (
                f"{self.held and self.held.publication} is being pulled by {groups}, "
                f"and nobody else has shard {self.slot.shard} yet"
            )
        return self.state.value
