"""What one slot holds, as the directory knows it: publishing, holding, giving up.

Rules of this file. One `References` belongs to one slot: a handle's, or a copy's (keeping.py).
It writes the slot's two registers, at the versions key and at the holders key. When what is
held may be given up, withdrawing.py decides. It moves no bytes; who is reading is serving.py's.

Theory of operation.

    EMPTY        nothing held, or hidden
    ANNOUNCING   the registers are on their way to W owners
    HELD         as PARTIAL (pulling) or READY: others find it. Of what was published here
                 comparing.py finds out whether it contradicts what the version is already
    ...          being withdrawn, by the steps of withdrawing.py
    HIDING       the last of them: hidden at W owners; what nobody waits for (withdrawing.py) is
                 EMPTY at once, and the record follows with the next `tick`
    (draining, step 5, is the server's)

A publish is one write to each key, with no barrier and no leader; owners refuse it when
they know of a higher whole version (admission.py), and it is taken back where they did
not. The mark that it is whole is no part of it (marking.py). What was never whole is aborted:
nobody pins it, so it waits for nobody who needs it. (A pin proves that it was whole: its writer has
seen all shards ready.) Until HIDING the withdrawal can be taken back (`restore`): the caller's
deadline passed.

When the group's next generation is formed, a publication that is whole is re-issued
under its id with the new generation; one that is not is aborted (`Aborted`). Whether it
is, the owners decide.
What is being withdrawn then goes on, with the generation in which it began.

Of two publications of one version whose bytes differ the higher one is hidden at once
(`Contradicted`), with no withdrawal: what is retained of the version is the lower one. Its id is
not used again, so what its hidden record says of its content stays true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import (
    Refused,
    Registers,
    holders_key,
    slot_name,
    versions_key,
)
from tensorhub_p2p.protocol.identity import Generation, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    HolderRecord,
    KeepAnswer,
    KeepAsk,
    Message,
    Phase,
    VersionRecord,
)
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import REVOCABLE, Held, RefState
from tensorhub_p2p.protocol.shards.comparing import Comparing, content_of
from tensorhub_p2p.protocol.shards.marking import Marking
from tensorhub_p2p.protocol.shards.withdrawing import Orders, Surroundings, Withdrawal


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
    """Nobody finds it here any more. `lost` names those for whom it should have been kept."""

    def __init__(
        self, publication: Publication, was_whole: bool, lost: tuple[str, ...] = ()
    ) -> None:
        self.publication = publication
        self.was_whole = was_whole
        self.lost = lost


class Whole(Event):
    """What this slot published is whole, and marked so; or it brought a copy of such a one."""

    def __init__(self, model: str, publication: Publication, *, published: bool) -> None:
        self.model = model
        self.publication = publication
        self.published = published
        """It was published here: so it is news, whatever its number."""


class Aborted(Event):
    """The publication was never whole when its generation ended: it is given up."""

    def __init__(self, publication: Publication) -> None:
        self.publication = publication


class Contradicted(Event):
    """What was published is hidden: `standing`, lower and of the same version, has other bytes."""

    def __init__(self, publication: Publication, standing: Publication) -> None:
        self.publication = publication
        self.standing = standing


class References:
    """The slot's references."""

    def __init__(
        self,
        slot: Slot,
        config: GroupConfig,
        custody: Custody,
        around: Surroundings | None = None,
    ) -> None:
        self.me: PeerId = custody.me
        self.slot = slot
        self.state = RefState.EMPTY
        self.held: Held | None = None
        self.generation = Generation(0, 0)
        self.outbox = Outbox()
        self._records = custody.records
        self._liveness = custody.liveness
        self._around = around or Surroundings()
        self._versions_key = versions_key(slot.group.model)
        self._lost: tuple[str, ...] = ()
        self._owed: Callable[[float], None] | None = None
        """Writes that it is hidden, once the caller was told: what is sent before delays that."""
        self._owed_at: float | None = None
        self.disowned = False
        """Who brought it was never told that others find it here, and may drop it any time."""
        self.withdrawal = Withdrawal(self, custody, config, self._around)
        interval = custody.config.look_interval
        self.comparing = Comparing(self, custody.records, custody.liveness, interval)
        self.marking = Marking(self, custody.records, custody.liveness, config.mark_after)

    # --- holding ---

    def publish(self, now: float, held: Held) -> None:
        """Announce an own publication: `Announced` or `Conflicts` follows."""
        self._end_wait(now)
        self.held, self.disowned = held, False
        self.state = RefState.ANNOUNCING

        def then(now: float, refused: Refused | None) -> None:
            if refused is not None:
                self._refused(now, held.publication, refused)
                return
            self.state = RefState.HELD
            self.outbox.emit(Announced(held.publication, held.phase))
            self.marking.announced(now)

        self.write(now, held.phase, then)

    def _refused(self, now: float, publication: Publication, refused: Refused) -> None:
        because = refused.because.value if refused.because else None
        existing = getattr(because, "publication", None)
        self.drop(now)
        self.outbox.emit(Conflicts(publication, existing, refused.reason))

    def is_whole(self) -> None:
        """Somebody has seen it whole, and marked so at W owners."""
        if self.held is not None and not self.held.was_whole:
            self.held = replace(self.held, was_whole=True)
            self._tell_whole(published=True)

    @property
    def knows_whole(self) -> bool:
        """Whether it knows of what it holds whether it was whole; of what it pulled, it does."""
        return not self.is_own or (self.held is not None and self.held.was_whole)

    @property
    def is_own(self) -> bool:
        """Whether what is held was published here."""
        held = self.held
        return held is not None and held.publication.replica == self.slot.group.replica

    @property
    def content(self) -> bytes:
        """What was published here consists of this (comparing.py); b"" if that isn't known yet."""
        held, server = self.held, self._around.server()
        if held is None or server is None or server.publication != held.publication:
            return b""
        return content_of(server) if self.is_own else b""

    def _tell_whole(self, *, published: bool) -> None:
        if self.held is not None:
            model, publication = self.slot.group.model, self.held.publication
            self.outbox.emit(Whole(model, publication, published=published))

    def hold(self, now: float, held: Held) -> None:
        """Announce what a pull brings (PARTIAL) or brought (READY): `Announced` follows."""
        self._end_wait(now)
        self.held, self.disowned = held, False
        self.state = RefState.ANNOUNCING

        def then(now: float, refused: Refused | None) -> None:
            self.state = RefState.HELD
            self.outbox.emit(Announced(held.publication, held.phase))
            if held.phase is Phase.READY:
                self._tell_whole(published=False)

        self.write(now, held.phase, then)

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
            self.marking.judge(now, self._keep_or_abort)

    def _keep_or_abort(self, now: float, whole: bool) -> None:
        if whole:
            self._rewrite(now)
        else:
            self._abort(now)

    def _abort(self, now: float) -> None:
        held = self.held
        assert held is not None
        self.drop(now)
        self.outbox.emit(Aborted(held.publication))

    # --- what comparing.py finds ---

    def look_at_digests(self, now: float) -> None:
        """Some may have been taken."""
        self.withdrawal.look_at_digests(now)
        self.comparing.look_at_digests(now)

    def say_content(self, now: float) -> None:
        """Others want to compare theirs with it."""
        assert self.held is not None
        self._write_version(now, self._version(self.held.phase), _nobody_waits)

    def contradicted(self, now: float, standing: Publication) -> None:
        """A lower publication of the version has other bytes: this one is nobody's any more."""
        held = self.held
        assert held is not None
        self._end_wait(now)
        self.write(now, Phase.HIDDEN, _nobody_waits, final=True)
        self._forget()
        self.outbox.emit(Contradicted(held.publication, standing))

    # --- giving up ---

    def withdraw(self, now: float, *, force: bool = False, freeing: bool = False) -> None:
        """Unpublish, steps 1 to 4: `Hidden` or `Unkept` follows, unless `restore` comes first.

        `force`: whoever needs it. `freeing`: only if nobody does, else it is taken back.
        """
        assert self.held is not None
        self._end_wait(now)
        self.withdrawal.begin(now, Orders(force, freeing))

    def close(self, now: float, by: float) -> None:
        """The slot is given back: `Hidden` follows, soon after `by` at the latest."""
        assert self.held is not None
        if self.state in REVOCABLE:
            self.withdrawal.close_by(now, by)
        elif self.state is not RefState.HIDING and self.held.phase is Phase.READY:
            self._end_wait(now)
            self.withdrawal.begin(now, Orders(closing_by=by))
        elif self.state is not RefState.HIDING:
            self._end_wait(now)
            self.state = RefState.HIDING
            self.hide(now, (), kept=False)

    def hide(
        self, now: float, lost: tuple[str, ...], *, kept: bool, confirmed: bool = True
    ) -> None:
        """Step 4, when withdrawing.py says so. `confirmed`: W owners are waited for."""
        self._lost = lost
        if confirmed:
            self.write(now, Phase.HIDDEN, lambda now, _refused: self._on_hidden(now), kept=kept)
            return
        version, holder = self._version(Phase.HIDDEN, kept=kept), self._holder(Phase.HIDDEN)
        self._owed, self._owed_at = lambda now: self._put(now, version, holder, _nobody_waits), now
        self._on_hidden(now)

    def _on_hidden(self, now: float) -> None:
        held = self.held
        if self.state is not RefState.HIDING or held is None:
            return
        self._forget()
        self.outbox.emit(Hidden(held.publication, held.was_whole, self._lost))

    def restore(self, now: float) -> bool:
        """Take a withdrawal back; False if it is too late (step 4 has begun)."""
        if self.state not in REVOCABLE or self.held is None:
            return False
        self._end_wait(now)
        self.state = RefState.HELD
        self._rewrite(now)
        return True

    def expire(self, now: float) -> bool:
        """Whoever wanted it given up waits no longer; whether it is still there.

        A version that is merely pinned is given up: the pins are void.
        """
        if self.withdrawal.is_void(now):
            self.withdrawal.give_up(now)
        elif self.restore(now):
            return True
        self.hide_unconfirmed(now)
        return False

    def bytes_for_copy(self, publication: Publication) -> int:
        """What a copy of it would take, as far as this slot may have to make one."""
        held, over = self.held, {RefState.OFFLOADING, RefState.HIDING}
        if held is None or held.publication != publication or held.phase is not Phase.READY:
            return 0
        return 0 if self.state in over else held.num_bytes

    def cut_off(self, now: float) -> None:
        """The slot's handle is closed now: count it as hidden, whatever was reached."""
        if self.state in REVOCABLE:
            self.withdrawal.give_up(now)
        if self.state is RefState.HIDING:
            self.hide_unconfirmed(now)
        self.drop(now)

    def hide_unconfirmed(self, now: float) -> None:
        """Count it as hidden, whatever the owners have answered. They go on being told."""
        self._on_hidden(now)

    def drop(self, now: float) -> None:
        """Give the references up at once, with no step in between (a torn pull, a close).

        What is owed is written too: nothing follows that would write it.
        """
        self._end_wait(now)
        if self.held is not None:
            self.write(now, Phase.HIDDEN, _nobody_waits)
        self._forget()

    # --- small parts ---

    def _forget(self) -> None:
        self.held = None
        self.state = RefState.EMPTY

    def _pay(self, now: float) -> None:
        """Write what is owed, before anything else is written."""
        owed, self._owed, self._owed_at = self._owed, None, None
        if owed is not None:
            owed(now)

    def _end_wait(self, now: float) -> None:
        self._pay(now)
        self.marking.stop(now)
        self.comparing.stop()
        self.withdrawal.stop(now)

    def _rewrite(self, now: float) -> None:
        """What is held, as it is held, by the generation that there is now."""
        assert self.held is not None
        self.write(now, self.held.phase, _nobody_waits)

    def write(
        self,
        now: float,
        phase: Phase,
        then: Callable[[float, Refused | None], None],
        *,
        kept: bool = False,
        final: bool = False,
    ) -> None:
        """Both registers; `then` is called once, when both are written or one was refused.

        A later write replaces this one: then nobody is told how it ended. `kept`: somebody
        else has promised to keep it. `final`: its id isn't used again, as
        that of one that was whole.
        """
        version = self._version(phase, kept=kept, final=final)
        self._put(now, version, self._holder(phase), then)

    def _put(
        self,
        now: float,
        version: VersionRecord,
        holder: HolderRecord,
        then: Callable[[float, Refused | None], None],
    ) -> None:
        written = _both(then)
        self._write_version(now, version, written)
        self._write_holder(now, holder, written)

    def write_and_look(
        self,
        now: float,
        phase: Phase,
        then: Callable[[float, Refused | None, Registers | None], None],
    ) -> None:
        """The register at the versions key, and what its owners hold then, if they say so at once.

        Pullers aren't told.
        """
        name, counter = slot_name(self.slot), self.generation.counter
        version = self._version(phase)
        self._records.write_and_look(now, self._versions_key, name, counter, version, then)

    def tell_pullers(self, now: float, phase: Phase) -> None:
        """They find this slot at the holders key."""
        self._write_holder(now, self._holder(phase), _nobody_waits)

    def _write_holder(
        self, now: float, holder: HolderRecord, then: Callable[[float, Refused | None], None]
    ) -> None:
        """The register at the holders key."""
        key = holders_key(self.slot.group.model, self.slot.shard)
        name, counter = slot_name(self.slot), self.generation.counter
        self._records.write(now, key, name, counter, holder, then)

    def _write_version(
        self, now: float, version: VersionRecord, then: Callable[[float, Refused | None], None]
    ) -> None:
        """The register at the versions key."""
        name, counter = slot_name(self.slot), self.generation.counter
        self._records.write(now, self._versions_key, name, counter, version, then)

    def _holder(self, phase: Phase) -> HolderRecord:
        held, around = self.held, self._around
        assert held is not None
        return HolderRecord(
            self.slot,
            held.publication,
            phase,
            held.was_whole,
            held.num_bytes,
            spot=around.spot,
            offload=around.offload,
        )

    def _version(self, phase: Phase, *, kept: bool = False, final: bool = False) -> VersionRecord:
        held, around = self.held, self._around
        assert held is not None
        # What stays of an id that may be used again, with other bytes, says nothing of them.
        says_content = final or held.was_whole or phase is not Phase.HIDDEN
        return VersionRecord(
            self.slot,
            held.num_shards,
            held.publication,
            phase,
            self.generation,
            held.was_whole,
            spot=around.spot,
            offload=around.offload,
            kept=kept,
            digests=self.content if says_content else b"",
        )

    # --- promises, messages, time ---

    def _asked(self, now: float, sender: PeerId, ask: KeepAsk) -> None:
        """Somebody wants to give up what is held here too: does this slot keep it?"""
        withdrawal, held = self.withdrawal, self.held
        same = held is not None and held.publication == ask.publication
        me = (self.me, self.slot)
        yes = same and withdrawal.promise.consider(now, withdrawal.stance(), me, sender, ask)
        why = "" if yes else f"{self.slot}: {self.state.value}"
        self.outbox.send(sender, KeepAnswer(ask.request, yes, why=why))
        if yes:
            withdrawal.promised(now)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, KeepAsk):
            self._asked(now, sender, message)
        else:
            self.withdrawal.receive(now, sender, message)

    def tick(self, now: float) -> None:
        self._pay(now)
        self.marking.tick(now)
        self.withdrawal.tick(now)
        self.comparing.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            self._owed_at,
            self.marking.next_wakeup(),
            self.withdrawal.next_wakeup(),
            self.comparing.next_wakeup(),
        )

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        if self.state in REVOCABLE:
            return self.withdrawal.waiting_for()
        return self.state.value


def _nobody_waits(_now: float, _refused: Refused | None) -> None:
    """The directory goes on telling the owners."""


def _both(
    then: Callable[[float, Refused | None], None],
) -> Callable[[float, Refused | None], None]:
    """Called for each of two writes: `then` once, after both or the first refusal."""
    pending = 2

    def written(now: float, refused: Refused | None) -> None:
        nonlocal pending
        if pending > 0:
            pending = 0 if refused is not None else pending - 1
            if pending == 0:
                then(now, refused)

    return written
