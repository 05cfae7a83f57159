"""One simulated process: a real `Node`, and what the runtime is around it.

Rules of this file. A `SimPeer` is to the simulated network what a driver is to a real one: it
carries messages and time to its node and what the node puts out to whoever waits for it
(verbs, pulls, the digest task). It decides nothing about them.

Theory of operation. All that this process does, it does in `receive`, `tick` and `evidence`,
which the network calls while the process runs. So a paused process, its pulls and digests
included, stands still; what would wake one of its threads (`post`) waits until it runs.
The threads of a real process are tasks here (tasks.py).

    verb       a verb of the node, as something to wait for
    at, sleep  this process's own timers
    post       from outside: do this as soon as the process runs
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Protocol

from tensorhub_p2p.config import Config
from tensorhub_p2p.errors import RetentionLost
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import Group, PeerId, PeerInfo, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox, Send, earliest
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.membership.swim_events import Evidence, Joined, MemberChanged
from tensorhub_p2p.protocol.messages import (
    Key,
    Message,
    PullOffer,
    RetainSummary,
    Status,
    Value,
    ZoneSummary,
)
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.protocol.pulls.serving import DigestsWanted
from tensorhub_p2p.protocol.shards.verbs import (
    AdoptWanted,
    Done,
    Failed,
    HoldersChanged,
    KeepFreed,
    OffloadWanted,
    PublicationLost,
    PullMessage,
    StopDigests,
    VerbId,
)
from tensorhub_p2p.sim.cluster.digesting import DigestTask
from tensorhub_p2p.sim.cluster.history import Began, Ended, HandleId, History, LeftWell, Said
from tensorhub_p2p.sim.cluster.keeping import Keeping
from tensorhub_p2p.sim.cluster.memory import Export, Memory
from tensorhub_p2p.sim.cluster.tasks import Pending, Steps, start
from tensorhub_p2p.sim.network import SimNetwork

if TYPE_CHECKING:
    from tensorhub_p2p.sim.cluster.handles import SimHandle
    from tensorhub_p2p.sim.cluster.transfer import Reads, SimPull

Start = Callable[[Node, float, VerbId, float], None]


class VerbCall(Pending):
    """A verb of the node, under way."""

    __slots__ = ("number",)

    def __init__(self, number: VerbId) -> None:
        super().__init__()
        self.number = number


class World(Protocol):
    """What peers share."""

    @property
    def network(self) -> SimNetwork: ...

    @property
    def history(self) -> History: ...

    @property
    def reads(self) -> Reads: ...

    @property
    def digest_seconds(self) -> float:
        """How long taking one digest lasts."""

    @property
    def offload_limit(self) -> int:
        """Bytes of host memory that each process has for copies."""

    @property
    def copy_seconds(self) -> float:
        """How long copying one chunk to host memory lasts."""

    @property
    def copy_fails(self) -> float:
        """The probability that a copy fails."""

    def number(self) -> int:
        """One that was never given before: verbs, exports, pulls."""


class SimPeer:
    """One process. `Membership` (sim/membership.py) is part of its face."""

    def __init__(self, info: PeerInfo, config: Config, rng: random.Random, world: World) -> None:
        self.info = info
        self.config = config
        self.world = world
        self.rng = random.Random(rng.getrandbits(64))
        self.node = Node(info, config, rng, offload_limit=world.offload_limit)
        self.outbox = Outbox()
        self.handles: list[SimHandle] = []
        """Open ones, and those that are being opened or closed."""
        self.pulls: dict[str, SimPull] = {}
        self.follows: dict[int, SimPull] = {}
        self.exports: dict[int, Export] = {}
        self.digests = DigestTask(self)
        self.keeping = Keeping(self)
        self.leaving = False
        """It closes its handles, and opens no more."""
        self.joined = Pending()
        """Settled once a seed answered, or at once for those that start converged."""
        self._verbs: dict[VerbId, VerbCall] = {}
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._pumping = False

    @property
    def peer_id(self) -> PeerId:
        return self.info.peer_id

    @property
    def now(self) -> float:
        return self.world.network.now

    # --- the machine's face ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self.node.receive(now, sender, message)
        self.pump()

    def tick(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2]()
            self.pump()
        due = self.node.next_wakeup()
        if due is not None and due <= now:
            self.node.tick(now)
        self.pump()

    def next_wakeup(self) -> float | None:
        timer = self._timers[0][0] if self._timers else None
        return earliest(self.node.next_wakeup(), timer)

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        self.node.evidence(now, peer, evidence)
        self.pump()

    def watched(self) -> Sequence[PeerId]:
        return self.node.zones.watched()

    # --- membership ---

    def join(self, now: float, seeds: Sequence[str]) -> None:
        self.node.join(now, seeds)
        self.pump()

    def leave(self, now: float) -> None:
        self.node.leave(now)
        self.pump()

    def adopt_views(
        self, now: float, views: Sequence[MemberView], summaries: Iterable[ZoneSummary] = ()
    ) -> None:
        """Take these for the zone's members since long (see `Zones.adopt_views`)."""
        self.node.zones.adopt_views(now, views, summaries)
        self.node.directory.members_changed(now, self.node.zones.responsive())
        self.joined.settle()
        self.pump()

    def members(self) -> tuple[MemberView, ...]:
        return self.node.zones.members()

    def responsive(self) -> tuple[PeerId, ...]:
        return self.node.zones.responsive()

    def status(self, peer: PeerId) -> Status | None:
        return self.node.zones.status(peer)

    def is_reachable(self, peer: PeerId) -> bool:
        return self.node.zones.is_reachable(peer)

    def hint(self, now: float, model: str, epoch: int, version: int) -> None:
        self.node.zones.hint(now, model, epoch, version)

    def copy(self, key: Key) -> Registers:
        """What this process holds of a key as one of its owners, now or formerly."""
        return self.node.directory.copy(key)

    def wanted_elsewhere(self, model: str) -> list[tuple[str, RetainSummary]]:
        """By zone: what this process has heard that users in other zones want kept."""
        return self.node.retained.elsewhere(model)

    # --- what its threads do ---

    def verb(self, timeout: float, start: Start) -> VerbCall:
        """Begin a verb of the node; what it returns or raises settles the answer."""
        call = VerbCall(self.world.number())
        self._verbs[call.number] = call
        start(self.node, self.now, call.number, self.now + timeout)
        self.pump()
        return call

    def leave_well(self, timeout: float) -> Steps[None]:
        """Close all handles side by side and have others keep what is kept, as `Peer.close`."""
        self.leaving = True
        me = HandleId(self.peer_id, Slot(Group("", "all handles"), 0), self.world.number())
        number, deadline = self.world.number(), self.now + timeout
        self.world.history.note(Began(me, number, "leave", deadline))
        leaving = self.verb(timeout, lambda node, now, n, by: node.leave_well(now, n, by))
        open_ones = [handle for handle in self.handles if not handle.closed]
        closing = [start(_close(handle, timeout)) for handle in open_ones]
        yield from closing
        lost: tuple[str, ...] = yield leaving
        self.world.history.note(Ended(me, number, "leave"))
        self.world.history.note(LeftWell(me, lost))

    def read(self, key: Key) -> Pending:
        """Read from the bare directory; the registers settle the answer."""
        pending = Pending()
        self.node.records.read(self.now, key, lambda _now, registers: pending.settle(registers))
        self._stir()
        return pending

    def write(self, key: Key, name: str, value: Value) -> Pending:
        """Write an own register; settled once it is on W owners."""
        pending = Pending()
        self.node.records.write(
            self.now, key, name, 1, value, lambda _now, _refused: pending.settle()
        )
        self._stir()
        return pending

    def _stir(self) -> None:
        """Have the node take what its parts put out."""
        self.node.tick(self.now)
        self.pump()

    def at(self, time: float, call: Callable[[], object]) -> None:
        """Do this then, or as soon afterwards as the process runs."""
        heappush(self._timers, (max(time, self.now), next(self._order), call))

    def sleep(self, seconds: float) -> Pending:
        pending = Pending()
        self.at(self.now + seconds, pending.settle)
        return pending

    def post(self, call: Callable[[], object]) -> None:
        """From outside of the process: have it do this once it runs."""
        self.at(self.now, call)
        self.world.network.settle(self.peer_id)

    def export(self, memory: Memory, allowed: ChunkSet) -> Export:
        number = self.world.number()
        export = self.exports[number] = Export(number, memory, allowed)
        return export

    def withdraw(self, export: Export) -> None:
        """No read begins there any more."""
        export.open = False
        self.exports.pop(export.number, None)

    # --- what the node put out ---

    def pump(self) -> None:
        """Hand out everything; what that leads to as well."""
        if self._pumping:
            return
        self._pumping = True
        try:
            self._look()
            while items := self.node.outbox.drain():
                for item in items:
                    if isinstance(item, Send):
                        self._tap(item.message)
                    elif isinstance(item, Event):
                        self._take(item)
                    self.outbox.items.append(item)
                self._look()
        finally:
            self._pumping = False

    def _look(self) -> None:
        """What became of the handles' generations: before any verb ends for it."""
        for handle in self.handles:
            handle.look()

    def _tap(self, message: Message) -> None:
        if isinstance(message, PullOffer) and message.granted:
            for handle in self.handles:
                if handle.slot == message.slot:
                    self.world.history.note(Said(handle.id, message))
            kept = self.keeping.kept.get(message.slot)
            if kept is not None:
                self.world.history.note(Said(kept.id, message))

    def _take(self, event: Event) -> None:
        if isinstance(event, Done):
            self._verbs.pop(event.verb).settle(event.result)
        elif isinstance(event, Failed):
            self._verbs.pop(event.verb).settle(error=event.error)
        elif isinstance(event, PullMessage):
            pull = self.pulls.get(event.pull)
            if pull is not None:
                pull.put((event.sender, event.message))
        elif isinstance(event, HoldersChanged):
            follower = self.follows.get(event.follow)
            if follower is not None:
                follower.put(event)
        elif isinstance(event, DigestsWanted):
            self.digests.prefer(event.slot, event.publication, event.chunks)
        elif isinstance(event, StopDigests):
            self.digests.stop(event.slot, event.publication)
            self.keeping.stop(event.slot, event.publication)
        elif isinstance(event, OffloadWanted):
            handles = [handle for handle in self.handles if handle.slot == event.slot]
            self.keeping.offload(event, handles[0] if handles else None)
        elif isinstance(event, AdoptWanted):
            self.keeping.adopt(event)
        elif isinstance(event, KeepFreed):
            self.keeping.free(event.keep)
        elif isinstance(event, PublicationLost):
            for handle in self.handles:
                if handle.slot == event.slot:
                    handle.lost = event.publication
        elif isinstance(event, MemberChanged) and not event.member.is_reachable:
            for pull in list(self.pulls.values()):
                pull.put(event.member.peer_id)
        elif isinstance(event, Joined):
            self.joined.settle()


def _close(handle: SimHandle, timeout: float) -> Steps[None]:
    try:
        yield from handle.close(timeout)
    except RetentionLost:
        pass  # noted by the handle; `Peer.close` raises it once for all of them
