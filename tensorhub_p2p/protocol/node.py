"""One peer, as far as it is decided: all machines of one process under one face.

Rules of this file. A `Node` routes: messages to the machine that they are for, events to
the machine or driver that waits for them, membership news to everyone. It decides
nothing. The runtime's control thread and the simulator drive the same object.

    Zones --- who is there --------------> Directory, Abroad, every ShardNode
    Directory <-- reads, writes, watches -- Abroad (through PendingRecords)
    Abroad <----- the same, of all zones -- every ShardNode (through WideRecords)
    ShardNode -- ends of verbs, news -----> the driver

What a driver does: call the verbs with a number of its own choosing, and wait for the
`Done` or `Failed` with that number; hand `PullMessage`s and `HoldersChanged` to the pull
that they name; take the digests that are wanted, until `StopDigests`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from tensorhub_p2p.config import Config
from tensorhub_p2p.errors import PeerClosed, StateError, TensorHubError
from tensorhub_p2p.protocol.abroad.abroad import Abroad
from tensorhub_p2p.protocol.abroad.retained import Retained
from tensorhub_p2p.protocol.abroad.zone_liveness import ZoneLiveness
from tensorhub_p2p.protocol.directory.admission import admit
from tensorhub_p2p.protocol.directory.directory import Directory, OwnersDiffer
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.groups.claims import left
from tensorhub_p2p.protocol.groups.selection import Floor
from tensorhub_p2p.protocol.identity import Group, PeerId, PeerInfo, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Event, Outbox, Output, Send, SendTo, earliest
from tensorhub_p2p.protocol.membership.members import GONE
from tensorhub_p2p.protocol.membership.swim_events import (
    Evidence,
    MemberChanged,
    MemberForgotten,
    Refuted,
    WasAbsent,
    ZoneNews,
)
from tensorhub_p2p.protocol.messages import (
    DirectoryMessage,
    Endpoint,
    Formed,
    GroupMessage,
    KeepAnswer,
    KeepAsk,
    LayoutPage,
    LayoutRequest,
    MemberLeft,
    Message,
    Propose,
    PullBye,
    PullGone,
    PullHello,
    PullOffer,
    PullProgress,
    PullUpdate,
    Question,
    ReserveAnswer,
    ReserveAsk,
    Retain,
    SlotAnswer,
    SlotChallenge,
    Source,
    Vote,
    ZoneGreeting,
)
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.reserving import Reserve, nothing_to_reserve
from tensorhub_p2p.protocol.retention.retaining import Retaining
from tensorhub_p2p.protocol.retention.retention import Wish
from tensorhub_p2p.protocol.shards.finding import Finds
from tensorhub_p2p.protocol.shards.following import Following
from tensorhub_p2p.protocol.shards.keeping import Keeps
from tensorhub_p2p.protocol.shards.leaving import Leaving
from tensorhub_p2p.protocol.shards.lookup import Lookups
from tensorhub_p2p.protocol.shards.prefetching import Prefetches
from tensorhub_p2p.protocol.shards.publishing import Whole
from tensorhub_p2p.protocol.shards.retracting import Retractions
from tensorhub_p2p.protocol.shards.shard import ShardNode
from tensorhub_p2p.protocol.shards.verbs import (
    Answer,
    Failed,
    PullMessage,
    VerbId,
)
from tensorhub_p2p.protocol.zones.zones import Zones

FOR_SLOT = (PullHello, PullProgress, PullBye, LayoutRequest, SlotChallenge, SlotAnswer, KeepAsk)
"""Messages that name the slot that they are for; those of groups name group and shard."""

FOR_PULL = (PullOffer, PullUpdate, PullGone, LayoutPage)
"""Messages for a pull, which has a thread of its own."""

RESERVING = (ReserveAsk, ReserveAnswer)
"""What a handle that closes still has to say in its group."""


class Node:
    """All protocols of one peer."""

    def __init__(
        self, info: PeerInfo, config: Config, rng: random.Random, *, offload_limit: int = 0
    ) -> None:
        """`offload_limit`: bytes of host memory for copies of what others retain."""
        self.info = info
        self.outbox = Outbox()
        self.zones = Zones(info, config, random.Random(rng.getrandbits(64)))
        self.directory = Directory(
            info.peer_id,
            config.directory,
            random.Random(rng.getrandbits(64)),
            admit=admit,
            reachable=self.zones.is_reachable,
        )
        self.records = PendingRecords(self.directory, config.directory.max_buckets, self._newest_of)
        self.abroad = Abroad(
            info, self.zones, self.directory, self.records, config.abroad, config.zones.gateways
        )
        self.liveness = ZoneLiveness(self.zones, self.abroad)
        self.retained = Retained(info.peer_id, self.zones, self.abroad.records, config.retention)
        self.zones.retains = self.retained.said
        self.shards: dict[Slot, ShardNode] = {}
        self._retaining = Retaining(self.abroad.records)
        self.custody = Custody(
            info.peer_id,
            self.abroad.records,
            self.liveness,
            config.retention,
            Reserve(offload_limit),
            self._retained_elsewhere,
            self._retaining.of,
            is_responsive=self.liveness.is_responsive,
            members=self.zones.responsive,
            has_other_zones=self._has_other_zones,
        )
        self._retractions = Retractions(self.abroad.records, self.liveness, self.abroad.zones_with)
        self._uploads = UploadSlots(config.pull)
        self.keeps = Keeps(self.custody, config.group, self._uploads)
        self.custody.offloads = self.keeps
        self._leaving = Leaving(self.custody, self.keeps, config.pull.lease_seconds)
        self.following = Following(self.abroad.records, self.liveness, config.pull)
        look = self.following.look
        self.prefetches = Prefetches(self.custody, config.group, self._uploads, look)
        self.lookups = Lookups(self.abroad.records, self.liveness)
        self.finds = Finds(self.abroad.records, self.liveness, 4 * config.group.retry_interval)
        self._config = config
        self._members: tuple[PeerId, ...] = (info.peer_id,)

    def _has_other_zones(self) -> bool:
        return any(summary.zone != self.zones.zone for summary in self.zones.zones())

    def _retained_elsewhere(self, model: str) -> tuple[Wish, ...]:
        said = self.retained.elsewhere(model)
        return tuple(Wish(f"zone {zone}", each.newest, each.versions) for zone, each in said)

    # --- membership ---

    def join(self, now: float, seeds: Sequence[str]) -> None:
        """Look for the cluster through these addresses (zones.py)."""
        self.zones.join(now, seeds)
        self._settle(now)

    def leave(self, now: float) -> None:
        """Say goodbye to the members; handles are closed before."""
        self.zones.leave(now)
        self._settle(now)

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        """The connections noticed something of a peer: it is probed at once (zones.py)."""
        self.zones.evidence(now, peer, evidence)
        self._settle(now)

    def info_of(self, peer: PeerId) -> PeerInfo | None:
        """What a peer told about itself; of other zones' peers, those that matter here."""
        return self.liveness.info(peer)

    # --- verbs ---

    def open(
        self,
        now: float,
        number: VerbId,
        deadline: float,
        slot: Slot,
        num_shards: int,
        spot: bool = False,
        retain: Retain | None = None,
        elastic: bool = False,
    ) -> None:
        """Claim a slot. Done(None), SlotTaken, or Timeout; on failure it is closed again.

        `elastic`: its replica's name is made up, and never used again.
        """
        self._forget_closed()
        if self.custody.leaving:
            self.outbox.emit(
                Failed(number, PeerClosed(f"open of {slot}: its peer is being closed"))
            )
            return
        if slot in self.shards:
            state = "being closed" if self.shards[slot].closed else "open"
            why = f"{slot} is {state} in this peer: open it once its handle's close() has returned"
            self.outbox.emit(Failed(number, StateError(why)))
            return
        shard = ShardNode(
            slot,
            num_shards,
            self.custody,
            self._retaining,
            self._config.group,
            self._uploads,
            spot=spot,
            elastic=elastic,
        )
        self.shards[slot] = shard
        shard.open(now, number, deadline, retain)
        self._settle(now)

    def _forget_closed(self) -> None:
        for slot in [slot for slot, shard in self.shards.items() if shard.is_over]:
            del self.shards[slot]

    def publish(
        self,
        now: float,
        number: VerbId,
        deadline: float,
        slot: Slot,
        version: int,
        rewind: bool,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
    ) -> None:
        """Publish what the slot has. Done(Publication)."""
        self.shards[slot].publish(now, number, deadline, version, rewind, layout, endpoints)
        self._settle(now)

    def ask(
        self, now: float, number: VerbId, deadline: float, slot: Slot, question: Question
    ) -> None:
        """Make the slot's next group call. Done(Answer)."""
        self.shards[slot].ask(now, number, deadline, question)
        self._settle(now)

    def hold(
        self,
        now: float,
        number: VerbId,
        deadline: float,
        slot: Slot,
        answer: Answer,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        complete: bool,
    ) -> None:
        """Announce that a pull has begun, or is complete. Done(None)."""
        self.shards[slot].hold(now, number, deadline, answer, layout, endpoints, complete)
        self._settle(now)

    def finish(self, now: float, slot: Slot, call: int) -> TensorHubError | None:
        """The pull of this call succeeded; an error if the call was ended meanwhile."""
        error = self.shards[slot].finish(now, call)
        self._settle(now)
        return error

    def give_up(self, now: float, slot: Slot, call: int, reason: str) -> None:
        """The publication of this call can't be had: end the call for the whole group."""
        self.shards[slot].give_up(now, call, reason)
        self._settle(now)

    def unpublish(
        self, now: float, number: VerbId, deadline: float, slot: Slot, force: bool = False
    ) -> None:
        """Withdraw what the slot has. Done(for whom it was lost: nobody, unless `force`).

        RetentionLost: it is retained, can't be kept elsewhere, and is still there.
        """
        self.shards[slot].unpublish(now, number, deadline, force=force)
        self._settle(now)

    def retract(
        self, now: float, number: VerbId, deadline: float, model: str, version: int
    ) -> None:
        """Hide a bad version from everybody. Done(None), VersionUnavailable, or Timeout."""
        self._retractions.begin(now, number, deadline, model, version)
        self._settle(now)

    def leave_well(self, now: float, number: VerbId, deadline: float) -> None:
        """Open, promise and keep nothing from now on, and hand on what is kept.

        Done(what was lost). Who is still claiming a slot gives it up.
        """
        self._leaving.begin(now, number, deadline)
        for shard in list(self.shards.values()):
            shard.interrupt_open(now)
        self._settle(now)

    def offloaded(
        self,
        now: float,
        keep: Slot,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        digests: tuple[bytes, ...],
    ) -> None:
        """The copy that `OffloadWanted` or `AdoptWanted` asked for is there.

        `digests` are of the copy, one a chunk.
        """
        self.keeps.copied(now, keep, layout, endpoints, digests)
        self._settle(now)

    def offload_failed(self, now: float, keep: Slot, why: str) -> None:
        """It can't be had; nothing of it is left."""
        self.keeps.failed(now, keep, why)
        self._settle(now)

    def freed(self, now: float, keep: Slot) -> None:
        """The memory of a keep is free again, after `KeepFreed`."""
        self.keeps.freed(keep)
        self._settle(now)

    def find(
        self, now: float, number: VerbId, deadline: float, slot: Slot, selector: str, floor: Floor
    ) -> None:
        """Which publication a version is, for a prefetch to `slot`. Done(Found), or Timeout."""
        self.finds.begin(now, number, deadline, slot, selector, floor)
        self._settle(now)

    def stop_finding(self, now: float, number: VerbId, why: str) -> None:
        """End it with a StateError."""
        self.finds.stop(now, number, why)
        self._settle(now)

    def prefetching(
        self,
        now: float,
        slot: Slot,
        publication: Publication,
        num_shards: int,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
    ) -> None:
        """A pull ahead of time begins, to a slot of its own; its chunks are served on."""
        self.prefetches.begin(now, slot, publication, num_shards, layout, endpoints)
        self._settle(now)

    def prefetched(self, now: float, slot: Slot) -> None:
        """It is complete."""
        self.prefetches.whole(now, slot)
        self._settle(now)

    def end_prefetch(self, now: float, slot: Slot) -> None:
        """Its handle wants it no longer: `PrefetchGone` follows."""
        self.prefetches.release(now, slot)
        self._settle(now)

    def holds(self, slot: Slot) -> bool:
        """Whether others find a publication at this slot, or soon will."""
        shard = self.shards.get(slot)
        return shard is not None and shard.references.held is not None

    def drop(self, now: float, slot: Slot) -> None:
        """What a failed pull left is given up: hide it at once, and serve it no longer."""
        self.shards[slot].drop(now)
        self._settle(now)

    def close(self, now: float, number: VerbId, deadline: float, slot: Slot) -> None:
        """Give the slot back. Done(None), or RetentionLost and it is closed too."""
        self.shards[slot].close(now, number, deadline)
        self._settle(now)

    def interrupt(self, now: float, slot: Slot, number: VerbId) -> None:
        """Whoever waited for this verb of the slot is gone: end it as its deadline would."""
        shard = self.shards.get(slot)
        if shard is not None:
            shard.interrupt(now, number)
            self._settle(now)

    def digested(
        self,
        now: float,
        slot: Slot,
        publication: Publication,
        digests: Iterable[tuple[int, bytes]],
    ) -> None:
        """The digests of published chunks were taken: (chunk, digest)."""
        holder = self.shards.get(slot) or self.prefetches.get(slot)
        if holder is not None:
            holder.served.digested(now, publication, digests)
            self._settle(now)

    def verified(
        self,
        now: float,
        slot: Slot,
        publication: Publication,
        chunks: Iterable[tuple[int, bytes, frozenset[PeerId]]],
    ) -> None:
        """A pull verified chunks of the slot.

        Of each: its digest, and the peers that hear of it from where it came from.
        """
        holder = self.shards.get(slot) or self.prefetches.get(slot)
        if holder is not None:
            holder.served.verified(now, publication, chunks)
            self._settle(now)

    def revoked(self, now: float, slot: Slot, publication: Publication, chunk: int) -> None:
        """A chunk that a pull verified is not the origin's after all."""
        holder = self.shards.get(slot) or self.prefetches.get(slot)
        if holder is not None:
            holder.served.revoked(now, publication, chunk)
            self._settle(now)

    def carries(self, now: float, slot: Slot, publication: Publication, chunks: int | None) -> None:
        """A pull of the slot has these chunks under way from other zones; None: it is over."""
        holder = self.shards.get(slot) or self.prefetches.get(slot)
        if holder is not None:
            holder.served.carries(now, publication, chunks)
            self._settle(now)

    def versions(self, now: float, number: VerbId, deadline: float, model: str) -> None:
        """Which versions exist. Done(tuple[VersionSummary, ...]), newest first, or Timeout."""
        self.lookups.versions(now, number, deadline, model)
        self._settle(now)

    def follow(
        self,
        now: float,
        model: str,
        shard: int,
        publication: Publication,
        sources: tuple[Source, ...] = (),
    ) -> int:
        """Emit `HoldersChanged` with the returned number, now and at each change.

        `sources`, if any answer, are the first that it names, with no look at the directory.
        """
        number = self.following.start(now, model, shard, publication, sources)
        self._settle(now)
        return number

    def look_for_holders(self, now: float, model: str, shard: int) -> None:
        """Who holds it was written just now: those who follow this look at once."""
        self.following.look(now, model, shard)
        self._settle(now)

    def unfollow(self, now: float, number: int) -> None:
        self.following.stop(now, number)
        self._settle(now)

    def _newest_of(self, model: str) -> tuple[int, int] | None:
        """What this peer has heard of a model."""
        hints = (hint for hint in self.zones.newest() if hint.model == model)
        return next(((hint.epoch, hint.version) for hint in hints), None)

    # --- the machine's face ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self.zones.notice(now)
        if self.zones.outbox.items:
            self._settle(now)
        self._route(now, sender, message)
        if not isinstance(message, FOR_PULL):  # these come by the hundred, and concern no machine
            self._settle(now)

    def tick(self, now: float) -> None:
        self.zones.tick(now)
        self.directory.tick(now)
        self.abroad.tick(now)
        self.retained.tick(now)
        for shard in self.shards.values():
            shard.tick(now)
        self.keeps.tick(now)
        self._leaving.tick(now)
        self._retractions.tick(now)
        self.following.tick(now)
        self.lookups.tick(now)
        self.prefetches.tick(now)
        self.finds.tick(now)
        self._settle(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            self.zones.next_wakeup(),
            self.directory.next_wakeup(),
            self.abroad.next_wakeup(),
            self.retained.next_wakeup(),
            *(shard.next_wakeup() for shard in self.shards.values()),
            self.keeps.next_wakeup(),
            self._leaving.next_wakeup(),
            self._retractions.next_wakeup(),
            self.following.next_wakeup(),
            self.lookups.next_wakeup(),
            self.prefetches.next_wakeup(),
            self.finds.next_wakeup(),
        )

    # --- routing ---

    def _route(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, FOR_PULL):
            self.outbox.emit(PullMessage(message.pull, sender, message))
        elif isinstance(message, KeepAsk) and message.adopt:
            self.keeps.adopt(now, sender, message)
        elif isinstance(message, FOR_SLOT):
            self._route_to_slot(now, sender, message.slot, message)
        elif isinstance(message, KeepAnswer):
            # It names a request, which nobody else has under way.
            for shard in list(self.shards.values()):
                shard.receive(now, sender, message)
            self.keeps.answered(now, sender, message)
        elif isinstance(message, (Propose, Vote, Formed, MemberLeft, GroupMessage)):
            slot = Slot(Group(message.group.model, message.group.replica), message.shard)
            self._route_to_slot(now, sender, slot, message)
        elif self.abroad.takes(message):
            self.abroad.receive(now, sender, message)
        elif isinstance(message, DirectoryMessage):
            self.directory.receive(now, sender, message)
        else:
            if isinstance(message, ZoneGreeting) and self.abroad.awaits(sender):
                self.zones.expect(now, sender)
            self.zones.receive(now, sender, message)
            if isinstance(message, ZoneGreeting):
                self.abroad.receive(now, sender, message)

    def _route_to_slot(self, now: float, sender: PeerId, slot: Slot, message: Message) -> None:
        shard = self.shards.get(slot)
        copy = self.keeps.get(slot) or self.prefetches.get(slot)
        if copy is not None and copy.server is not None:
            copy.receive(now, sender, message)
            return
        closed = shard is None or shard.closed
        if isinstance(message, SlotChallenge) and closed:
            self._reply(now, sender, SlotAnswer(slot, message.counter, holds=False))
        elif isinstance(message, GroupMessage) and closed and not isinstance(message, RESERVING):
            self._reply(now, sender, left(message))
        elif isinstance(message, PullHello) and (shard is None or shard.server is None):
            self._reply(now, sender, PullGone(message.pull, slot, "nothing is held here"))
        elif isinstance(message, ReserveAsk) and (shard is None or shard.is_over):
            self._reply(now, sender, nothing_to_reserve(message))
        elif isinstance(message, KeepAsk) and shard is None:
            self._reply(now, sender, KeepAnswer(message.request, yes=False, why="it was closed"))
        elif shard is not None:
            shard.receive(now, sender, message)

    def _reply(self, now: float, to: PeerId, message: Message) -> None:
        if to == self.info.peer_id:
            self._route(now, to, message)
        else:
            self.outbox.send(to, message)

    def _settle(self, now: float) -> None:
        """Pass on what the machines put out, until all that is left is for the driver."""
        acted = True
        while acted:
            acted = False
            for item in self._drain(now):
                if isinstance(item, Send) and item.to == self.info.peer_id:
                    self._route(now, item.to, item.message)
                    acted = True
                elif isinstance(item, (Send, SendTo)):
                    self.outbox.items.append(item)
                else:
                    acted = True
                    if not self._take(now, item):
                        self.outbox.items.append(item)

    def _drain(self, now: float) -> list[Output]:
        items = [*self.zones.outbox.drain(), *self.directory.outbox.drain()]
        items += self.abroad.outbox.drain()
        for shard in self.shards.values():
            shard.pump(now)
            items.extend(shard.outbox.drain())
        self.keeps.pump(now)
        self._leaving.look(all(shard.is_over for shard in self.shards.values()))
        items += [*self.keeps.outbox.drain(), *self._leaving.outbox.drain()]
        items += self._retractions.outbox.drain()
        self.following.pump()
        items += [*self.following.outbox.drain(), *self.lookups.outbox.drain()]
        self.prefetches.pump(now)
        items += [*self.prefetches.outbox.drain(), *self.finds.outbox.drain()]
        return items

    def _take(self, now: float, event: Event) -> bool:
        """Act on an event; False if it is for the driver (too)."""
        if isinstance(event, OwnersDiffer):
            self.zones.compare(now, event.peer)
        elif isinstance(event, MemberForgotten):
            self.directory.forget((event.peer,))
            return False
        elif isinstance(event, MemberChanged):
            self._member_changed(now, event)
            return False
        elif isinstance(event, Whole):
            order, published = event.publication.order, event.published
            self.zones.hint(now, event.model, *order, published=published)
        elif isinstance(event, ZoneNews):
            self.abroad.heard(now, event.summary)
        elif isinstance(event, WasAbsent):
            self.directory.was_absent(now)
        elif isinstance(event, Refuted) and event.claim in GONE:
            for shard in self.shards.values():
                shard.declared_dead(now)
        else:
            return self.records.take(now, event)
        return True

    def _member_changed(self, now: float, event: MemberChanged) -> None:
        members = self.zones.responsive()
        if members != self._members:
            self._members = members
            self.directory.members_changed(now, members)
        if event.member.status in GONE:
            for shard in list(self.shards.values()):
                shard.peer_gone(now, event.member.peer_id)
            self.keeps.peer_gone(now, event.member.peer_id)
            self.prefetches.peer_gone(now, event.member.peer_id)
