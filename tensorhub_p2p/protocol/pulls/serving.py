"""The source's side of pulls: who may read this shard of this publication, and its news.

Rule of this file. A `ShardServer` knows leases, bitmaps and digests. It may not know how
bytes move (endpoints are opaque), whether the publication is whole, or who else holds it.
It lives on the control thread, one for each handle that holds a publication, whole or in
part, and ends with the holding.

Theory of operation (DESIGN, "Swarm" and "Sealing"). A puller says `PullHello` and gets a
`PullOffer`: what we have, the digests that we know, and, if an upload slot is free, the
endpoints to read from: a *lease* (leases.py). If the slots are full, it waits, and is told who is
being served instead. Leases only pace; what makes bytes right is the digest. A lease ends with
`PullBye`, with the puller's death, or after `lease_seconds` of silence.

Granted pullers get `PullUpdate`s with what is new, at most one each `update_interval`, or
each `news_interval` when it carries digests that they asked for. A lost update is not
repeated: a puller that lacks something says `PullHello` again, and the offer is the whole
state.

What ends: withdrawing answers everybody with `PullGone` and is `Drained` when the last
leaseholder has said goodbye, or after one lease time. Time in which this process did not run counts
for no lease. What bounds it: leases as leases.py says;
pages of the layout below `PAGE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    LayoutPage,
    LayoutRequest,
    Message,
    PullBye,
    PullGone,
    PullHello,
    PullOffer,
    PullProgress,
    PullUpdate,
)
from tensorhub_p2p.protocol.pulls.leases import Lease, Leases, LeaseState
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots

PAGE_BYTES = 1 << 20
"""Rough size at which a page of the layout is full; far below the largest message."""


@dataclass(frozen=True)
class DigestsWanted(Event):
    """Pullers wait for these chunks' digests: please take them first."""

    slot: Slot
    publication: Publication
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Sealed(Event):
    """All digests are taken, and somebody else knows them all. Emitted once, at the origin."""

    slot: Slot
    publication: Publication


@dataclass(frozen=True)
class Drained(Event):
    """After `withdraw`: no puller reads any more, or one lease time has passed. Emitted once."""

    slot: Slot
    publication: Publication


TALK = 16
"""Of the last so-manieth part of the chunks everybody hears at once."""
NOBODY: frozenset[PeerId] = frozenset()


class ShardServer:
    """Serves one shard of one publication to pullers; a `Machine` with a few inputs more.

    The origin starts with `have` full (the default) and learns digests as they are taken;
    a holder that still pulls starts with an empty one and reports what it verified.
    `endpoints` are handed out as they are; `uploads` are the slots of the peer.
    """

    def __init__(
        self,
        slot: Slot,
        publication: Publication,
        layout: Layout,
        endpoints: Iterable[Endpoint],
        config: PullConfig,
        *,
        have: ChunkSet | None = None,
        origin: bool = True,
        uploads: UploadSlots | None = None,
    ) -> None:
        self.slot = slot
        self.publication = publication
        self.layout = layout
        self.endpoints = tuple(endpoints)
        self.have = ChunkSet.full(layout.num_chunks) if have is None else have
        self.manifest = Manifest(layout.num_chunks)
        self.dropped = 0
        """Malformed messages that were dropped."""
        self._config = config
        self._origin = origin
        self._witnessed = layout.num_chunks == 0
        self._announced = self._witnessed
        self._carrying: int | None = None if self.have.is_full else 0
        """What we are fetching from other zones; None: we don't pull."""
        self._withdrawn: str | None = None
        self._drain_by: float | None = None
        self._leases = Leases(slot.group.model, uploads or UploadSlots(config))
        self._called = float("-inf")
        """When it last heard of anything, or of the time."""
        self._outbox = Outbox()

    # --- what the driver may ask ---------------------------------------------------------

    @property
    def outbox(self) -> Outbox:
        return self._outbox

    @property
    def sealed(self) -> bool:
        """All digests are known, here and in somebody else's hands."""
        return self.manifest.complete and (self._witnessed or not self._origin)

    @property
    def complete(self) -> bool:
        """Every chunk is held."""
        return self.have.is_full

    def readers(self) -> tuple[PeerId, ...]:
        """Who may be reading right now, in the order in which they were granted."""
        return tuple(lease.peer for lease in self._leases if lease.state is not LeaseState.WAITING)

    # --- inputs of the holder ------------------------------------------------------------

    def digested(self, now: float, chunk: int, digest: bytes) -> None:
        """The origin took this chunk's digest, or a pull learnt it. ValueError if malformed."""
        self.digested_all(now, [(chunk, digest)])

    def digested_all(self, now: float, digests: Iterable[tuple[int, bytes]]) -> None:
        """The same of many chunks, told of together."""
        self._hold_verdicts(now)  # before there is news that is due at once
        for chunk, digest in digests:
            self._learn(chunk, digest)
        self._check_sealed()
        self.tick(now)

    def verified(
        self, now: float, chunk: int, digest: bytes, known_to: frozenset[PeerId] = NOBODY
    ) -> None:
        """This chunk's bytes are here and match `digest`: serve it from now on.

        The peers in `known_to` hear of it from where it came from: for them it can wait.
        """
        self.verified_all(now, [(chunk, digest, known_to)])

    def verified_all(
        self, now: float, chunks: Iterable[tuple[int, bytes, frozenset[PeerId]]]
    ) -> None:
        """The same of many chunks, told of together."""
        self._hold_verdicts(now)
        granted = self._leases.granted()
        for chunk, digest, known_to in chunks:
            self.have.add(chunk)
            self._learn(chunk, digest)
            for lease in granted:
                lease.pressing = lease.pressing or lease.peer not in known_to
        if self.have.missing().bits.bit_count() * TALK <= self.layout.num_chunks:
            for lease in granted:
                lease.pressing = True
        self._check_sealed()
        self.tick(now)

    def _learn(self, chunk: int, digest: bytes) -> None:
        changed = self.manifest.get(chunk) != digest
        self.manifest.put(chunk, digest)
        for lease in self._leases.granted() if changed else ():
            lease.digests_told &= ~(1 << chunk)
            if lease.wanted >> chunk & 1:
                lease.urgent = True

    def revoked(self, now: float, chunk: int) -> None:
        """The chunk turned out to be wrong after all: serve it no longer."""
        self._hold_verdicts(now)
        self.have.discard(chunk)
        self.tick(now)

    def carries(self, now: float, chunks: int | None) -> None:
        """These are on their way from other zones; None: the pull is over."""
        self._hold_verdicts(now)
        self._carrying = chunks
        self.tick(now)

    def withdraw(self, now: float, reason: str) -> None:
        """Grant nothing from now on and send all pullers elsewhere; ends with `Drained`."""
        if self._withdrawn is not None:
            return
        self._withdrawn = reason
        self._drain_by = now + self._config.lease_seconds
        for lease in self._leases:
            self._outbox.send(lease.peer, PullGone(lease.pull, self.slot, reason))
        self._leases.withdraw(now)
        self._check_drained(now)

    def end(self) -> None:
        """Nobody is served any more, whoever still reads."""
        self._leases.end()

    def forget_peer(self, now: float, peer: PeerId) -> None:
        """The peer died: its leases end at once."""
        for lease in self._leases:
            if lease.peer == peer:
                self._end(now, lease)

    # --- the machine ---------------------------------------------------------------------

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self._hold_verdicts(now)
        if isinstance(message, PullHello):
            self._hello(now, sender, message)
        elif isinstance(message, PullProgress):
            self._progress(now, sender, message)
        elif isinstance(message, PullBye):
            self._bye(now, sender, message)
        elif isinstance(message, LayoutRequest):
            self._layout_request(now, sender, message)

    def tick(self, now: float) -> None:
        self._hold_verdicts(now)
        for lease in self._leases:
            if lease.state is not LeaseState.LEAVING and now >= self._lapses(lease):
                self._outbox.send(lease.peer, PullGone(lease.pull, self.slot, "the lease lapsed"))
                self._end(now, lease)
        self._seat(now)
        for lease in self._leases.granted():
            if self._has_news(lease) and now >= self._update_due(lease):
                self._update(now, lease)
        self._check_drained(now)

    def _hold_verdicts(self, now: float) -> None:
        """After a pause of our own, what pullers said is still unread: none was silent."""
        called, self._called = self._called, now
        if now - called <= self._config.retry_interval:
            return
        planned = self.next_wakeup()
        late = 0.0 if planned is None else now - max(planned, called)
        if late > self._config.retry_interval:
            for lease in self._leases:
                lease.seen += late

    def next_wakeup(self) -> float | None:
        active = [lease for lease in self._leases if lease.state is not LeaseState.LEAVING]
        return earliest(
            self._drain_by,
            *(self._lapses(lease) for lease in active),
            *(self._update_due(lease) for lease in self._leases.granted() if self._has_news(lease)),
        )

    # --- pullers -------------------------------------------------------------------------

    def _hello(self, now: float, sender: PeerId, hello: PullHello) -> None:
        """Answer with the whole state; a hello from a known pull renews and refreshes it."""
        if hello.publication != self.publication or self._withdrawn is not None:
            reason = self._withdrawn or f"{self.slot} holds {self.publication} instead"
            self._outbox.send(sender, PullGone(hello.pull, self.slot, reason))
            return
        has_something = self._has_something(hello.have)
        if has_something is None:
            return
        lease = self._leases.get(sender, hello.pull) or self._new_lease(now, sender, hello)
        lease.seen, lease.has_something = now, has_something
        if lease not in self._seat(now):
            self._offer(now, lease)

    def _progress(self, now: float, sender: PeerId, progress: PullProgress) -> None:
        lease = self._leases.get(sender, progress.pull)
        if lease is None or lease.state is LeaseState.LEAVING:
            reason = self._withdrawn or "no lease here"
            self._outbox.send(sender, PullGone(progress.pull, self.slot, reason))
            return
        has_something = self._has_something(progress.have)
        if has_something is None:
            return
        lease.seen, lease.has_something = now, has_something
        if progress.known == self.layout.num_chunks:
            self._witness()
        if lease.state is LeaseState.GRANTED:
            self._want(lease, progress.wanted)
        self._seat(now)

    def _bye(self, now: float, sender: PeerId, bye: PullBye) -> None:
        lease = self._leases.get(sender, bye.pull)
        if lease is None:
            return
        if bye.complete:
            self._witness()
        self._end(now, lease)

    def _layout_request(self, now: float, sender: PeerId, request: LayoutRequest) -> None:
        lease = self._leases.get(sender, request.pull)
        if lease is None:
            reason = self._withdrawn or "no lease here"
            self._outbox.send(sender, PullGone(request.pull, self.slot, reason))
            return
        lease.seen = now
        total = len(self.layout.tensors)
        if request.first < total:
            page = _page(self.layout.tensors, request.first)
            answer = LayoutPage(request.pull, self.slot, request.first, total, page)
            self._outbox.send(sender, answer)
        else:
            self.dropped += 1

    def _has_something(self, bitmap: bytes) -> bool | None:
        """Whether the puller has any chunk; None (and counted) if the bitmap isn't one."""
        try:
            return bool(bitmap) and bool(ChunkSet.from_bytes(self.layout.num_chunks, bitmap))
        except ValueError:
            self.dropped += 1
            return None

    def _new_lease(self, now: float, sender: PeerId, hello: PullHello) -> Lease:
        """A waiting lease; at the bound it is answered but not remembered."""
        lease = Lease(sender, hello.pull, hello.puller, hello.transports, seen=now, since=now)
        self._leases.add(lease)
        return lease

    def _seat(self, now: float) -> list[Lease]:
        """Give the upload slots to those whose turn it is; tell them, and return them."""
        changed = self._leases.seat(now)
        for lease in changed:
            self._offer(now, lease)
        return changed

    def _end(self, now: float, lease: Lease) -> None:
        self._leases.remove(lease)
        self._seat(now)
        self._check_drained(now)

    # --- what pullers are told -----------------------------------------------------------

    def _offer(self, now: float, lease: Lease) -> None:
        granted = lease.state is LeaseState.GRANTED
        known, digests = self.manifest.pack()
        self._tell(now, lease)
        self._outbox.send(
            lease.peer,
            PullOffer(
                pull=lease.pull,
                slot=self.slot,
                publication=self.publication,
                granted=granted,
                layout=self.layout.digest,
                num_bytes=self.layout.num_bytes,
                chunk_bytes=self.layout.chunk_bytes,
                have=self.have.to_bytes(),
                known=known,
                digests=digests,
                endpoints=self._endpoints_for(lease) if granted else (),
                others=self._others(lease),
                carrying=self._under_way(),
            ),
        )

    def _endpoints_for(self, lease: Lease) -> tuple[Endpoint, ...]:
        return tuple(e for e in self.endpoints if e.transport in lease.transports)

    def _others(self, lease: Lease) -> tuple[tuple[PeerId, Slot], ...]:
        """Who is being served now, and can serve in turn."""
        return tuple(
            (other.peer, other.puller)
            for other in self._leases.granted()
            if other.puller is not None and other.peer != lease.peer
        )

    def _update(self, now: float, lease: Lease) -> None:
        new = self._chunks(self.manifest.known.bits & ~lease.digests_told)
        digests = tuple((chunk, self.manifest[chunk]) for chunk in new)
        changed = self._others(lease) if lease.crowd_told != self._leases.crowd else None
        self._tell(now, lease)
        self._outbox.send(
            lease.peer,
            PullUpdate(
                pull=lease.pull,
                slot=self.slot,
                have=self.have.to_bytes(),
                digests=digests,
                carrying=self._under_way(),
                others=changed,
            ),
        )

    def _under_way(self) -> bytes | None:
        if self._carrying is None or self.complete:
            return None
        return self._chunks(self._carrying).to_bytes() if self._carrying else b""

    @property
    def _carries(self) -> bool:
        return bool(self._carrying)

    def _tell(self, now: float, lease: Lease) -> None:
        lease.have_told, lease.digests_told = self.have.bits, self.manifest.known.bits
        lease.carrying_told, lease.crowd_told = self._carries, self._leases.crowd
        lease.wanted &= ~self.manifest.known.bits
        lease.updated, lease.pressing = now, False
        if lease.urgent:
            lease.urgent, lease.answered = False, now

    def _has_news(self, lease: Lease) -> bool:
        told = (lease.have_told, lease.digests_told, lease.carrying_told, lease.crowd_told)
        return told != (self.have.bits, self.manifest.known.bits, self._carries, self._leases.crowd)

    def _chunks(self, bits: int) -> ChunkSet:
        return ChunkSet(self.layout.num_chunks, bits)

    def _update_due(self, lease: Lease) -> float:
        if lease.urgent:
            return lease.answered + self._config.news_interval
        news_of_others = (lease.digests_told, lease.crowd_told)
        if lease.pressing or news_of_others != (self.manifest.known.bits, self._leases.crowd):
            return lease.updated + self._config.update_interval
        return lease.updated + self._config.lease_seconds / 4

    def _lapses(self, lease: Lease) -> float:
        return lease.seen + self._config.lease_seconds

    def _want(self, lease: Lease, wanted: tuple[int, ...]) -> None:
        """Note which digests it waits for, and have the origin take the new ones first."""
        new = [
            chunk
            for chunk in wanted
            if chunk < self.layout.num_chunks
            and chunk not in self.manifest.known
            and not lease.wanted >> chunk & 1
        ]
        for chunk in new:
            lease.wanted |= 1 << chunk
        if new and self._origin:
            self._outbox.emit(DigestsWanted(self.slot, self.publication, tuple(new)))

    # --- sealing and the end -------------------------------------------------------------

    def _witness(self) -> None:
        """Somebody else knows every digest. Only true if there is nothing left to take here."""
        if self.manifest.complete and not self._witnessed:
            self._witnessed = True
            self._check_sealed()

    def _check_sealed(self) -> None:
        if self._origin and self.sealed and not self._announced:
            self._announced = True
            self._outbox.emit(Sealed(self.slot, self.publication))

    def _check_drained(self, now: float) -> None:
        if self._drain_by is not None and (not self._leases or now >= self._drain_by):
            self.end()
            self._drain_by = None
            self._outbox.emit(Drained(self.slot, self.publication))


def _page(tensors: tuple[TensorSpec, ...], first: int) -> tuple[TensorSpec, ...]:
    """At least one tensor, and as many more as fit a page."""
    size = 0
    for end in range(first, len(tensors)):
        spec = tensors[end]
        names = len(spec.name.encode()) + len((spec.alias_of or "").encode())
        size += 64 + names + 20 * len(spec.shape)
        if size > PAGE_BYTES and end > first:
            return tensors[first:end]
    return tensors[first:]
