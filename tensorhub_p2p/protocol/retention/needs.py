"""Who needs what a slot holds: two keys read, and summed up.

Rules of this file. `Needs` reads the retains and the versions key for one slot and says who
retains, pins, reads or also has what the slot holds; it decides nothing.

Theory of operation. The wishes of retainers are read first, together with the "withdrawing"
that is being written: a retain that was on record before the withdrawal began is seen. The
versions key is read after that was written, or its owners have said with their answers what they
held then: so of any who withdraw at once the last one sees all others (quorum.py). Other zones'
retains come with their summaries.
Other zones' holders are looked for only if the version is retained, and nobody here could keep
it. Pins are kept by the zone that they are written to.
A read that isn't answered says nothing: then nothing is given up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Registers,
    retains_key,
    values,
    versions_key,
)
from tensorhub_p2p.protocol.groups.selection import Copy, Holding, holdings
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import Phase, Pin, VersionRecord
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.retention import Wish, protected, wishes_in


@dataclass(frozen=True)
class Need:
    """What is known of a publication, as seen from one of its holders."""

    found: Holding | None
    retained: tuple[str, ...] = ()
    """For whom the version is to be kept."""
    pinned: tuple[str, ...] = ()
    """Other groups that have decided to pull it."""
    copies: tuple[Copy, ...] = ()
    """Others that have all of this shard and mean to stay."""
    ready: bool = False
    """Somebody else of this zone has all of this shard, if only for a while. (What other zones
    say of theirs may be a few seconds old.)"""
    read: bool = False
    """Somebody is bringing this shard."""

    @property
    def whole(self) -> bool:
        """All its shards were ready at once: whoever pins it has seen that."""
        return bool(self.pinned) or (self.found is not None and self.found.whole)

    @property
    def retracted(self) -> bool:
        """It is to be used by nobody, whatever else is on record."""
        return self.found is not None and self.found.retracted

    @property
    def marked(self) -> bool:
        """Its mark is on W owners for sure; a pin, which comes with it, is no proof of that."""
        return self.found is not None and self.found.marked


def need(
    registers: Registers,
    wishes: tuple[Wish, ...],
    publication: Publication,
    me: PeerId,
    slot: Slot,
    liveness: Liveness,
) -> Need:
    """Sum up what the versions key holds about this publication's shard."""
    everything = holdings(registers, liveness.is_gone)
    found = everything.get(publication)
    others = [
        record
        for register, record in values(registers, VersionRecord)
        if record.publication == publication
        and record.slot.shard == slot.shard
        and (register.writer, record.slot) != (me, slot)
        and not liveness.is_gone(register.writer)
        and liveness.zone(register.writer) == liveness.home
    ]
    return Need(
        found,
        protected(everything, wishes).get(publication, ()),
        pins_of_others(registers, publication, slot, liveness),
        tuple(
            copy
            for copy in (found.copies.get(slot.shard, ()) if found is not None else ())
            if (copy.peer, copy.slot) != (me, slot)
        ),
        any(record.phase is Phase.READY for record in others),
        any(record.phase is Phase.PARTIAL for record in others),
    )


def pins_of_others(
    registers: Registers, publication: Publication, slot: Slot, liveness: Liveness
) -> tuple[str, ...]:
    """The groups, other than the slot's own, that have pinned the publication for this shard."""
    return tuple(
        f"{pin.group} of zone {pin.zone}" if pin.zone else str(pin.group)
        for register, pin in values(registers, Pin)
        if pin.publication == publication
        and (pin.zone or pin.group != slot.group)
        and (not pin.shards or slot.shard in pin.shards)
        and not liveness.is_gone(register.writer, pin.zone)
    )


class Needs:
    """Reads them for one slot, on demand; `then(now, need)` gets each answer."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        custody: Custody,
        then: Callable[[float, Need], None],
    ) -> None:
        self._me = me
        self._slot = slot
        records, self._liveness = custody.records, custody.liveness
        self._custody = custody
        self._then = then
        self._retains = Inquiry(records, retains_key(slot.group.model), self._on_retains)
        self._versions = Inquiry(records, versions_key(slot.group.model), self._on_versions)
        self._publication: Publication | None = None
        self._wishes: tuple[Wish, ...] | None = None
        self._wanted = False
        self._seen: Registers | None = None
        """What the owners of the versions key have said, while it isn't known what is retained."""
        self.asked_at = 0.0
        """When the read of what is retained began whose answer counts."""
        self._began_at = 0.0
        self.retainers: frozenset[PeerId] = frozenset()
        """Peers of the own zone that retain something of the model, as read last."""

    def begin(self, now: float, publication: Publication) -> None:
        """Ask what is retained; whatever was known before is forgotten."""
        self.stop()
        self._publication, self._wishes = publication, None
        self._began_at = now
        self._retains.look(now)

    def look(self, now: float, *, anew: bool = False, seen: Registers | None = None) -> None:
        """Read the versions key, once it is known what is retained (`anew`: both again).

        `seen`: its owners held this when they took the "withdrawing".
        """
        self._wanted = True
        self._seen = seen
        if anew:
            self._began_at = now
            self._retains.look_anew(now)
        elif self._wishes is not None:
            self._look_at_versions(now)

    def _look_at_versions(self, now: float) -> None:
        seen, self._seen = self._seen, None
        near = [r for r in seen or () if self._liveness.is_responsive(r.writer)]
        if seen is not None and self._is_enough(tuple(near)):
            self._on_versions(now, seen)
        else:
            self._versions.look(now, self._is_enough)

    def stop(self) -> None:
        self._wanted = False
        self._seen = None
        self._retains.stop()
        self._versions.stop()

    def _on_retains(self, now: float, registers: Registers) -> None:
        self.asked_at = self._began_at
        self.retainers = frozenset(register.writer for register in registers)
        names = {peer: self._liveness.name(peer) for peer in self.retainers}
        model = self._slot.group.model
        others = tuple(register for register in registers if register.writer != self._me)
        self._wishes = (*wishes_in(others, names), *self._own(model))
        self._wishes += self._custody.elsewhere(model)
        if self._wanted:
            self._look_at_versions(now)

    def _own(self, model: str) -> tuple[Wish, ...]:
        """As they are now: what is on record of them may be on its way to be withdrawn.

        Who leaves wants nothing any more, whichever of its handles closes first.
        """
        retain = self._custody.own(model) if not self._custody.leaving else None
        return () if retain is None else (Wish("this peer", retain.newest, retain.versions),)

    def _is_enough(self, registers: Registers) -> bool:
        """The own zone's registers do: nobody needs it, or somebody near may keep it."""
        found = self._sum_up(registers)
        staying = any(not copy.withdrawing for copy in found.copies)
        return staying or not found.retained

    def _sum_up(self, registers: Registers) -> Need:
        assert self._publication is not None
        assert self._wishes is not None
        return need(
            registers, self._wishes, self._publication, self._me, self._slot, self._liveness
        )

    def _on_versions(self, now: float, registers: Registers) -> None:
        self._wanted = False
        self._then(now, self._sum_up(registers))
