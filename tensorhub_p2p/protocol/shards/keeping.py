"""Copies in host memory that keep versions alive: a peer's offload replicas.

Rules of this file. A `Keep` is one such copy, of one shard of one publication. It is a holder
like any other: it has references, and serves. `Keeps` is a peer's table of them. The driver
moves the bytes; here is decided when a copy is made, what it is good for, and when it ends.

    COPYING     the driver copies what a slot here holds (`OffloadWanted`), or pulls what somebody
                holds who leaves (`AdoptWanted`)
    ANNOUNCING  it is there, and right: its references are on their way to W owners
    HELD        others find it
    ENDING      hidden; readers get their lease
    FREEING     the driver frees the memory (`KeepFreed`), and says so

A copy is made in memory that was taken for it before (reserving.py), and of what was verified:
its digests have to be the publication's, or somebody wrote into published tensors.

A copy that is HELD asks, now and then, whether it is still needed: retained, pinned, or
promised. If not it is given up, by the same steps as any other copy (withdrawing.py); those
look again, and take it back if it is needed after all. When the peer leaves, each copy is
handed on by these steps too, or lost at the deadline.

What makes it ask: a change of what is retained, or of who has which version, as it watches both
keys; and a death, as what the dead pinned holds nothing any more. However much happens, it asks
once in `look_interval`. Of what other zones want, and of promises that lapse, nobody tells: for
these, and should news be lost, it asks each `rare_look_interval`.

Adopting. A peer that leaves asks others to take what nobody else keeps. Who has memory for it,
and means to stay, says that it is working on it, pulls the copy, and says yes once others find
it here: that is a promise like any other. It says no if that failed.

Bounds: `max_kept` copies, and the bytes of the reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from itertools import count

import mmh3

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import retains_key, versions_key
from tensorhub_p2p.protocol.groups.forgetting import forget_references
from tensorhub_p2p.protocol.identity import Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Outbox, Output, earliest
from tensorhub_p2p.protocol.messages import Endpoint, KeepAnswer, KeepAsk, Message, Phase
from tensorhub_p2p.protocol.pulls.served import Served
from tensorhub_p2p.protocol.pulls.serving import NOBODY, Drained, ShardServer
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held, RefState
from tensorhub_p2p.protocol.retention.needs import Need, Needs
from tensorhub_p2p.protocol.retention.reserving import no_room
from tensorhub_p2p.protocol.shards.publishing import Announced, Hidden, References
from tensorhub_p2p.protocol.shards.verbs import AdoptWanted, KeepFreed, OffloadWanted
from tensorhub_p2p.protocol.shards.withdrawing import Surroundings

Made = Callable[[float, str], None]
"""Told once how the making of a copy ended; "" means well."""
CHANGED = "its tensors were written to while they were published: the copy has other digests"


class KeepState(Enum):
    COPYING = "being copied"
    ANNOUNCING = "writing the references"
    HELD = "held"
    ENDING = "letting readers go"
    FREEING = "being freed"


class Keep:
    """One copy. `digests` are the publication's, where they are known: () if not."""

    def __init__(
        self,
        slot: Slot,
        held: Held,
        digests: tuple[bytes, ...],
        custody: Custody,
        group: GroupConfig,
        uploads: UploadSlots,
        made: Made,
    ) -> None:
        self.slot = slot
        self.held = replace(held, phase=Phase.READY, was_whole=True)
        self.state = KeepState.COPYING
        self.outbox = Outbox()
        self.asker: tuple[PeerId, int] | None = None
        """Who waits for it to be adopted, and its request."""
        self.lost: tuple[str, ...] = ()
        """For whom it should have been kept, when it ended."""
        self._digests = digests
        self._custody = custody
        self._served = Served(slot, uploads)
        around = Surroundings(lambda: self.server, offload=True)
        self.references = References(slot, group, custody, around)
        self._made: Made | None = made
        self._watches: tuple[int, ...] = ()
        self._look_at: float | None = None
        """When to ask whether it is needed; None: it isn't HELD."""
        self._looked_at = 0.0
        self._needs = Needs(custody.me, slot, custody, self._on_need)

    @property
    def publication(self) -> Publication:
        return self.held.publication

    @property
    def server(self) -> ShardServer | None:
        """What others read from, if it is there."""
        return self._served.server

    # --- it comes ---

    def copied(
        self,
        now: float,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        digests: tuple[bytes, ...],
    ) -> None:
        """The driver has it."""
        if self.state is not KeepState.COPYING:
            return
        if len(digests) != layout.num_chunks or (self._digests and self._digests != digests):
            self._free()
            self._tell(now, CHANGED)
            return
        self._served.begin(self.publication, layout, endpoints, origin=False)
        chunks = [(chunk, digest, NOBODY) for chunk, digest in enumerate(digests)]
        self._served.verified(now, self.publication, chunks)
        self.state = KeepState.ANNOUNCING
        self.references.hold(now, self.held)

    def failed(self, now: float, why: str) -> None:
        """The driver can't make it, and has nothing of it."""
        if self.state is KeepState.COPYING:
            self._end_freed()
            self._tell(now, why)

    def _tell(self, now: float, why: str) -> None:
        made, self._made = self._made, None
        if made is not None:
            made(now, why)

    # --- it goes ---

    def cancel(self, now: float) -> None:
        """It isn't needed after all; nobody is told."""
        self._made = None
        if self.state is KeepState.COPYING:
            self._free()
        elif self.state in {KeepState.ANNOUNCING, KeepState.HELD}:
            self.references.drop(now)
            self._end(now)

    def leave(self, now: float, by: float) -> None:
        """The peer leaves: hand it on, or give it up by then."""
        if self.state is KeepState.HELD and self.references.state is RefState.HELD:
            self._stop_looking(now)
            self.references.close(now, by)

    def cut_off(self, now: float) -> None:
        """The peer is leaving now."""
        if self.state in {KeepState.ANNOUNCING, KeepState.HELD}:
            self.references.cut_off(now)
            self.pump(now)

    def _end(self, now: float) -> None:
        self.state = KeepState.ENDING
        self._stop_looking(now)
        self._served.stop(now, "no longer kept")

    def _free(self) -> None:
        self.state = KeepState.FREEING
        self.outbox.emit(KeepFreed(self.slot))

    def _end_freed(self) -> None:
        self.state = KeepState.FREEING
        self.is_freed = True

    is_freed = False
    """Its memory is free: the table may forget it."""

    def freed(self) -> None:
        if self.state is KeepState.FREEING:
            self.is_freed = True

    # --- whether it is needed ---

    def _begin_looking(self, now: float) -> None:
        records, model = self._custody.records, self.slot.group.model
        self._watches = (
            records.watch(now, retains_key(model), self._look_soon),
            records.watch(now, versions_key(model), self._look_soon, pins=True),
        )
        self._looked_at = now
        self._look_at = now + self._custody.config.look_interval

    def _stop_looking(self, now: float) -> None:
        for watch in self._watches:
            self._custody.records.unwatch(now, watch)
        self._watches, self._look_at = (), None
        self._needs.stop()

    def _look_soon(self, _now: float) -> None:
        """Something happened that may change whether it is needed."""
        if self._look_at is not None:
            earliest_look = self._looked_at + self._custody.config.look_interval
            self._look_at = min(self._look_at, earliest_look)

    def _look(self, now: float) -> None:
        self._looked_at = now
        self._look_at = now + self._custody.config.look_interval
        if self.references.state is RefState.HELD:
            jitter = mmh3.hash(str(self.slot), signed=False) / 2**32 - 0.5
            self._look_at = now + self._custody.config.rare_look_interval * (1 + jitter / 2)
            self._needs.begin(now, self.publication)
            self._needs.look(now)

    def _on_need(self, now: float, need: Need) -> None:
        promised = self._custody.has_other_zones() and (
            self.references.withdrawal.promise.binds(now, self.publication)
        )
        needed = need.retained or need.pinned or promised
        if (need.retracted or not needed) and self.references.state is RefState.HELD:
            self.references.withdraw(now, freeing=True)

    # --- the machine ---

    def pump(self, now: float) -> None:
        """Take what its parts put out."""
        while items := self._drain():
            for item in items:
                self._take(now, item)

    def _drain(self) -> list[Output]:
        items = self.references.outbox.drain()
        return items if self.server is None else [*items, *self.server.outbox.drain()]

    def _take(self, now: float, item: Output) -> None:
        if isinstance(item, Announced):
            if self.state is KeepState.ANNOUNCING:
                self.state = KeepState.HELD
                self._begin_looking(now)
                self._tell(now, "")
        elif isinstance(item, Hidden):
            self.lost = item.lost
            self._end(now)
        elif isinstance(item, Drained):
            self._served.end()
            self._free()
        else:
            self.outbox.items.append(item)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, (KeepAsk, KeepAnswer)):
            self.references.receive(now, sender, message)
        elif self.server is not None:
            self.server.receive(now, sender, message)

    def peer_gone(self, now: float, peer: PeerId) -> None:
        self._look_soon(now)
        if self.server is not None:
            self.server.forget_peer(now, peer)

    def tick(self, now: float) -> None:
        self.references.tick(now)
        if self.server is not None:
            self.server.tick(now)
        if self._look_at is not None and now >= self._look_at:
            self._look(now)

    def next_wakeup(self) -> float | None:
        server = self.server.next_wakeup() if self.server is not None else None
        return earliest(self.references.next_wakeup(), server, self._look_at)


class Keeps:
    """The copies of one peer: its `Offloads` (custody.py), and what it adopts."""

    def __init__(self, custody: Custody, group: GroupConfig, uploads: UploadSlots) -> None:
        self.outbox = Outbox()
        self.lost: list[str] = []
        """What was given up though it was retained."""
        self._keeps: dict[Slot, Keep] = {}
        self._custody = custody
        self._group = group
        self._uploads = uploads
        self._numbers = count(1)
        self._leaves_by: float | None = None

    def get(self, slot: Slot) -> Keep | None:
        return self._keeps.get(slot)

    def __iter__(self) -> Iterator[Keep]:
        return iter(list(self._keeps.values()))

    def __len__(self) -> int:
        """Copies there are, in whatever state."""
        return len(self._keeps)

    # --- copies of what is held here ---

    def begin(
        self, now: float, slot: Slot, held: Held, digests: tuple[bytes, ...], then: Made
    ) -> Slot | None:
        keep = self._new(now, slot, held, digests, then)
        if keep is not None:
            self.outbox.emit(OffloadWanted(slot, keep.slot, held.publication))
        return keep.slot if keep is not None else None

    def _new(
        self, now: float, slot: Slot, held: Held, digests: tuple[bytes, ...], made: Made
    ) -> Keep | None:
        """In memory that is taken for this slot already."""
        publication = held.publication
        name = f"kept/{self._custody.me}/{next(self._numbers)}"
        kept = Slot(Group(slot.group.model, name), slot.shard)
        if len(self._keeps) >= self._custody.config.max_kept:
            return None
        was, will = (slot, publication), (kept, publication)
        if not self._custody.reserve.pass_on(now, was, will, held.num_bytes):
            return None
        keep = Keep(kept, held, digests, self._custody, self._group, self._uploads, made)
        self._keeps[kept] = keep
        return keep

    def cancel(self, now: float, keep: Slot) -> None:
        kept = self._keeps.get(keep)
        if kept is not None:
            kept.cancel(now)

    # --- copies of what others hold ---

    def adopt(self, now: float, sender: PeerId, ask: KeepAsk) -> None:
        """A peer that leaves asks this one to take a copy."""
        keep = self._kept(ask.publication, ask.slot)
        if keep is not None and keep.state is KeepState.HELD:
            keep.receive(now, sender, ask)
            return
        why = "" if keep is not None else self._refusal(now, ask)
        if keep is None and not why:
            keep = self._begin_adopting(now, ask)
            why = "" if keep is not None else "it keeps as many copies as it may"
        if keep is None or keep.state not in {KeepState.COPYING, KeepState.ANNOUNCING}:
            self.outbox.send(sender, KeepAnswer(ask.request, yes=False, why=why[:250]))
            return
        keep.asker = (sender, ask.request)
        self.outbox.send(sender, KeepAnswer(ask.request, yes=False, working=True))

    def _kept(self, publication: Publication, slot: Slot) -> Keep | None:
        for keep in self._keeps.values():
            same = keep.slot.group.model == slot.group.model and keep.slot.shard == slot.shard
            if same and keep.publication == publication and not keep.is_freed:
                return keep
        return None

    def _refusal(self, now: float, ask: KeepAsk) -> str:
        if self._custody.leaving:
            return "it leaves too"
        if self._custody.spots:
            return "it may be gone at any time"
        until = now + self._custody.config.reserve_seconds
        what = (ask.slot, ask.publication)
        if not self._custody.reserve.take(now, what, ask.num_bytes, until):
            return no_room(now, self._custody.reserve, ask.num_bytes)
        return ""

    def _begin_adopting(self, now: float, ask: KeepAsk) -> Keep | None:
        held = Held(ask.publication, ask.num_shards, ask.num_bytes, Phase.READY, was_whole=True)
        keep: Keep | None = None

        def made(now: float, why: str) -> None:
            if keep is not None and keep.asker is not None:
                self._answer_asker(now, keep, why)

        keep = self._new(now, ask.slot, held, (), made)
        if keep is None:
            self._custody.reserve.release((ask.slot, ask.publication))
        else:
            wanted = AdoptWanted(keep.slot, ask.publication, ask.num_shards, ask.num_bytes)
            self.outbox.emit(wanted)
        return keep

    def _answer_asker(self, now: float, keep: Keep, why: str) -> None:
        """The yes is a promise; who asked anew meanwhile is answered when it does so again."""
        assert keep.asker is not None
        peer, request = keep.asker
        if not why:
            keep.references.withdrawal.promise.bind(now, keep.publication)
        self.outbox.send(peer, KeepAnswer(request, yes=not why, why=why[:250]))

    # --- the driver's answers ---

    def copied(
        self,
        now: float,
        slot: Slot,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        digests: tuple[bytes, ...],
    ) -> None:
        keep = self._keeps.get(slot)
        if keep is not None:
            keep.copied(now, layout, endpoints, digests)

    def failed(self, now: float, slot: Slot, why: str) -> None:
        keep = self._keeps.get(slot)
        if keep is not None:
            keep.failed(now, why)

    def freed(self, slot: Slot) -> None:
        keep = self._keeps.get(slot)
        if keep is not None:
            keep.freed()

    # --- the peer leaves ---

    def leave(self, now: float, by: float) -> None:
        """Hand on what is kept; what nobody takes is given up by then."""
        self._leaves_by = by
        for keep in self._keeps.values():
            if keep.asker is not None and keep.state is KeepState.COPYING:
                keep.cancel(now)
        self._hand_on(now)

    def _hand_on(self, now: float) -> None:
        if self._leaves_by is not None:
            for keep in self._keeps.values():
                keep.leave(now, self._leaves_by)

    def cut_off(self, now: float) -> None:
        """The time is over."""
        for keep in self._keeps.values():
            keep.cut_off(now)
        self._forget(now)

    # --- the machine ---

    def pump(self, now: float) -> None:
        """Take what the copies put out."""
        for keep in list(self._keeps.values()):
            keep.pump(now)
            self.outbox.items += keep.outbox.drain()
        self._hand_on(now)
        self._forget(now)

    def _forget(self, now: float) -> None:
        for slot, keep in list(self._keeps.items()):
            self.lost += keep.lost
            keep.lost = ()
            if keep.is_freed:
                del self._keeps[slot]
                forget_references(self._custody.records, now, slot)
                self._custody.reserve.free((slot, keep.publication))

    def answered(self, now: float, sender: PeerId, answer: KeepAnswer) -> None:
        """It may be for any of them."""
        for keep in list(self._keeps.values()):
            keep.receive(now, sender, answer)

    def peer_gone(self, now: float, peer: PeerId) -> None:
        for keep in list(self._keeps.values()):
            keep.peer_gone(now, peer)

    def tick(self, now: float) -> None:
        for keep in list(self._keeps.values()):
            keep.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(*(keep.next_wakeup() for keep in self._keeps.values()))
