"""Copies that were pulled ahead of time: what a prefetch brings is served like anything else.

Rules of this file. A `Prefetched` is one such copy, of one shard of one publication, in host
memory of the driver's, which moves the bytes and says what is there. Here is decided how others
find it and when it may go. `Prefetches` is a peer's table of them.

    COMING      chunks arrive; others find a partial holder
    HERE        all of it is there: a whole holder
    RELEASED    its handle wants it no longer; a group of others has pinned it, and there is
                nobody else who has it all: it stays until that changes
    ENDING      hidden; readers get their lease
    GONE        the driver may free the memory (`PrefetchGone`)

It is a spot copy: others pull from it, and it makes a version resolvable, but it never counts as
a safe copy, and promises nothing. So what is retained doesn't hold it back. What others have
decided to pull does, once it is whole: it is given up by the steps of withdrawing.py, `freeing`,
which take that back where it is pinned; then it looks again each `look_interval`. Pins end by
themselves (`pin_idle_seconds`), and so does the wait. A partial one goes at once, as nobody can
have decided by it; so does one that was retracted, as soon as somebody reads it.

Bounds: the driver has at most one for each handle, and bounds their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.groups.forgetting import forget_references
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Outbox, Output, earliest
from tensorhub_p2p.protocol.messages import Endpoint, KeepAnswer, KeepAsk, Message, Phase
from tensorhub_p2p.protocol.pulls.served import Served
from tensorhub_p2p.protocol.pulls.serving import Drained, ShardServer
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held, RefState
from tensorhub_p2p.protocol.shards.publishing import Announced, Hidden, References
from tensorhub_p2p.protocol.shards.retracting import RetractionWatch
from tensorhub_p2p.protocol.shards.verbs import PrefetchGone
from tensorhub_p2p.protocol.shards.withdrawing import Surroundings

Look = Callable[[float, str, int], object]
"""Have who follows the holders of this shard of a model look at once: ours is on record now."""


class PrefetchState(Enum):
    COMING = "being pulled"
    HERE = "all there"
    RELEASED = "kept for a group that pulls it"
    ENDING = "letting readers go"
    GONE = "given up"


class Prefetched:
    """One copy; `served` is told of its chunks."""

    def __init__(
        self,
        slot: Slot,
        publication: Publication,
        num_shards: int,
        custody: Custody,
        group: GroupConfig,
        uploads: UploadSlots,
        look: Look,
    ) -> None:
        self.slot = slot
        self.publication = publication
        self.state = PrefetchState.COMING
        self.served = Served(slot, uploads)
        self.outbox = Outbox()
        # Whether the version is marked whole is for those to say who decide for it.
        self._held = Held(publication, num_shards, 0, Phase.PARTIAL, was_whole=False)
        self._custody = custody
        self._look = look
        around = Surroundings(lambda: self.server, spot=True)
        self._references = References(slot, group, custody, around)
        interval = custody.config.look_interval
        self._retraction = RetractionWatch(
            slot.group.model, custody.records, interval, self._end, lambda _now, _seen: None
        )
        self._look_at: float | None = None
        """RELEASED: when to look again whether it may go."""

    @property
    def server(self) -> ShardServer | None:
        """What others read from, if it is there."""
        return self.served.server

    # --- it comes ---

    def begin(self, now: float, layout: Layout, endpoints: tuple[Endpoint, ...]) -> None:
        """Chunks are about to arrive."""
        self.served.begin(self.publication, layout, endpoints, origin=False)
        self._held = replace(self._held, num_bytes=layout.num_bytes)
        self._references.hold(now, self._held)

    def whole(self, now: float) -> None:
        """All of it is here, and verified."""
        if self.state is PrefetchState.COMING:
            self.state = PrefetchState.HERE
            self._references.hold(now, replace(self._held, phase=Phase.READY))

    # --- it goes ---

    def release(self, now: float) -> None:
        """Its handle wants it no longer."""
        if self.state is PrefetchState.COMING:
            self._end(now)
        elif self.state is PrefetchState.HERE:
            self.state = PrefetchState.RELEASED
            self._withdraw(now)

    def _withdraw(self, now: float) -> None:
        """If nobody has decided to pull it, or somebody else has it: `Hidden` follows."""
        self._look_at = now + self._custody.config.look_interval
        if self._references.state is RefState.HELD:
            self._references.withdraw(now, freeing=True)

    def _end(self, now: float) -> None:
        """Hide it at once, if that was not done, and send its readers elsewhere."""
        if self.state not in {PrefetchState.ENDING, PrefetchState.GONE}:
            self.state = PrefetchState.ENDING
            self._look_at = None
            self._references.drop(now)
            self.served.stop(now, "no longer kept")

    # --- the machine ---

    def pump(self, now: float) -> None:
        """Take what its parts put out."""
        server = self.server
        read = self.publication if server is not None and server.readers() else None
        self._retraction.serve(now, read if self.state is not PrefetchState.ENDING else None)
        while items := self._drain():
            for item in items:
                self._take(now, item)

    def _drain(self) -> list[Output]:
        items = self._references.outbox.drain()
        return items if self.server is None else [*items, *self.server.outbox.drain()]

    def _take(self, now: float, item: Output) -> None:
        if isinstance(item, Announced):
            if self.state is PrefetchState.RELEASED:
                self._withdraw(now)
            elif self.state is PrefetchState.COMING and self._custody.has_other_zones():
                self._look(now, self.slot.group.model, self.slot.shard)
        elif isinstance(item, Hidden):
            self._end(now)
        elif isinstance(item, Drained):
            self.served.end()
            self.state = PrefetchState.GONE
            self.outbox.emit(PrefetchGone(self.slot))
        else:
            self.outbox.items.append(item)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, (KeepAsk, KeepAnswer)):
            self._references.receive(now, sender, message)
        elif self.server is not None:
            self.server.receive(now, sender, message)

    def peer_gone(self, now: float, peer: PeerId) -> None:
        if self.server is not None:
            self.server.forget_peer(now, peer)

    def tick(self, now: float) -> None:
        self._references.tick(now)
        self._retraction.tick(now)
        if self.server is not None:
            self.server.tick(now)
        if self._look_at is not None and now >= self._look_at:
            self._withdraw(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            self._references.next_wakeup(),
            self._retraction.next_wakeup(),
            self.server.next_wakeup() if self.server is not None else None,
            self._look_at,
        )


class Prefetches:
    """The copies of one peer, by the slot that each goes by."""

    def __init__(
        self, custody: Custody, group: GroupConfig, uploads: UploadSlots, look: Look
    ) -> None:
        self.outbox = Outbox()
        self._look = look
        self._custody = custody
        self._group = group
        self._uploads = uploads
        self._copies: dict[Slot, Prefetched] = {}

    def get(self, slot: Slot) -> Prefetched | None:
        return self._copies.get(slot)

    def __len__(self) -> int:
        """Copies there are, in whatever state."""
        return len(self._copies)

    def begin(
        self,
        now: float,
        slot: Slot,
        publication: Publication,
        num_shards: int,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
    ) -> None:
        """A pull into memory of the driver's begins; the slot is used for nothing else, ever."""
        copy = Prefetched(
            slot, publication, num_shards, self._custody, self._group, self._uploads, self._look
        )
        self._copies[slot] = copy
        copy.begin(now, layout, endpoints)

    def whole(self, now: float, slot: Slot) -> None:
        copy = self._copies.get(slot)
        if copy is not None:
            copy.whole(now)

    def release(self, now: float, slot: Slot) -> None:
        """Nobody here wants it any more: `PrefetchGone` follows, again if it went before."""
        copy = self._copies.get(slot)
        if copy is not None:
            copy.release(now)
        else:
            self.outbox.emit(PrefetchGone(slot))

    def peer_gone(self, now: float, peer: PeerId) -> None:
        for copy in self._copies.values():
            copy.peer_gone(now, peer)

    def pump(self, now: float) -> None:
        """Take what the copies put out."""
        for slot, copy in list(self._copies.items()):
            copy.pump(now)
            self.outbox.items += copy.outbox.drain()
            if copy.state is PrefetchState.GONE:
                del self._copies[slot]
                forget_references(self._custody.records, now, slot)

    def tick(self, now: float) -> None:
        for copy in list(self._copies.values()):
            copy.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(*(copy.next_wakeup() for copy in self._copies.values()))
