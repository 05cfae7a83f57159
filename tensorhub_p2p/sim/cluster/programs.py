"""What the users of a simulated cluster do: training loops, rollouts, and those that come and go.

Rules of this file. A program is a task of one process that calls the verbs of one handle, and
goes on after every error, as the guide says a worker should. Which process runs which
program, and who follows a process that is gone, is stage.py's.

    trainer     publishes the version of the hour, holds it, takes it back, writes new tensors
    rollout     replicates "latest" again and again
    elastic     the same, of one shard, under a new name each time it comes
    follower    waits for something newer, then asks for it by number, or for the one before
    retainer    a rollout that wants versions kept, takes an old one at times, and comes anew
                under other wishes now and then
    herd        a rollout that gives up what it has at each beat, about when all others do
    wisher      wants versions kept of which it holds none
    turn        one of several trainers that take turns: what is newest is never taken back
    scribe      writes a number to the bare directory, and one more, and reads all others' too

Whoever is told that giving a version up would lose it for others tries again, or forces it; in
the calm not before `PATIENCE`, as trainers that always do it at once starve those who pull.
A program ends when its slot was taken, or its handle closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorhub_p2p.errors import RetentionLost, SlotTaken, StateError, TensorHubError, Timeout
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import Group, Publication, Slot
from tensorhub_p2p.protocol.messages import Key, Retain, SlotClaim
from tensorhub_p2p.sim.cluster.handles import SimHandle
from tensorhub_p2p.sim.cluster.history import Probed
from tensorhub_p2p.sim.cluster.memory import Memory, layout_of
from tensorhub_p2p.sim.cluster.peer import SimPeer
from tensorhub_p2p.sim.cluster.tasks import Steps

MODEL = "policy"
PROBE_KEY = Key("probe", MODEL)
PACE = 0.25
"""Seconds that a worker computes between two verbs, about."""
OPENS_WITHIN = 5.0
FORCES = 0.5
"""How likely a worker that can't give a version up without losing it does so all the same."""
PATIENCE = 4.0
"""Seconds for which a worker tries again in the calm before it forces anything."""
RETRACTS = 0.2
"""How likely a version turns out to be bad."""
JITTER = 0.1
"""Seconds within which those give up what they have who do so at once."""
VERB_TIMEOUT = 4.0
"""Seconds. Short, so that many verbs meet a fault with their deadline."""


@dataclass(frozen=True)
class Job:
    """What one worker is there for: it outlives the processes that do it."""

    kind: str
    replica: str
    shard: int
    num_shards: int
    chunks: int
    zone: int = 0
    """A replica is inside of one zone: the number of that zone."""
    period: float = 1.0
    """Seconds between two versions."""
    side_by_side: bool = False
    """Several replicas publish the same bytes."""
    deviates: bool = False
    """It should, but publishes other bytes as each second version."""
    keeps: bool = False
    """A trainer that takes a version back only to publish the next one."""

    spot: bool = False
    """Its copies don't count as kept."""
    newest: int = 0
    """Of a retainer or wisher: how many of the newest versions it wants kept."""
    retracts: bool = False
    """A trainer that takes some versions back as bad."""
    turn: int = 0
    turns: int = 1
    """Of trainers that take turns: which, of how many."""

    @property
    def slot(self) -> Slot:
        return Slot(Group(MODEL, self.replica), self.shard)


@dataclass
class Board:
    """What the application's processes know of each other by its own means, not by ours."""

    calm: bool = False
    """The faults are over."""
    resting: bool = False
    """Nobody is to do anything any more."""
    shards: dict[int, set[int]] = field(default_factory=dict)
    """By version: which are still to be published, for trainers that take turns."""

    def published(self, version: int, shard: int, num_shards: int) -> None:
        self.shards.setdefault(version, set(range(num_shards))).discard(shard)

    def is_whole(self, version: int) -> bool:
        """All shards of it, or of a later one, were published; version -1 counts as whole."""
        return version < 0 or any(v >= version and not left for v, left in self.shards.items())


@dataclass(eq=False)
class Worker:
    """One process that does a job."""

    job: Job
    place: int
    peer: SimPeer
    board: Board
    over: bool = False
    """It has ended, for whatever reason."""
    _refused: Publication | None = None
    """What it can't give up, and since when."""
    _refused_at: float = 0.0

    def run(self) -> Steps[None]:
        yield self.peer.joined
        try:
            yield from PROGRAMS[self.job.kind](self)
        except (SlotTaken, StateError):
            pass  # somebody else has the slot, or the handle was closed
        finally:
            self.over = True

    def handle(self, slot: Slot | None = None, retain: Retain | None = None) -> SimHandle:
        """A new one; another slot than the job's is one of a made-up name."""
        job = self.job
        return SimHandle(
            self.peer,
            slot or job.slot,
            job.num_shards,
            Memory(layout_of(job.chunks)),
            spot=job.spot,
            retain=retain,
            elastic=slot is not None,
        )

    def pause(self, seconds: float = PACE) -> Steps[None]:
        yield self.peer.sleep(seconds * self.peer.rng.uniform(0.5, 1.5))
        while self.board.resting:
            yield self.peer.sleep(1.0)

    def opened(self, slot: Slot | None = None, retain: Retain | None = None) -> Steps[SimHandle]:
        """An open handle, however often that takes."""
        while True:
            handle = self.handle(slot, retain)
            try:
                yield from handle.open(OPENS_WITHIN)
                return handle
            except Timeout:
                yield from self.pause()

    def closed(self, handle: SimHandle) -> Steps[None]:
        """Close it, whatever is lost by that."""
        try:
            yield from handle.close(VERB_TIMEOUT)
        except RetentionLost:
            pass  # the history has it, from the handle

    def goes_on(self, error: TensorHubError, handle: SimHandle) -> Steps[None]:
        """After an error a worker tries again, unless that is of no use."""
        if isinstance(error, (SlotTaken, StateError)):
            raise error
        if isinstance(error, RetentionLost) and self._forces(handle):
            try:
                yield from handle.unpublish(VERB_TIMEOUT, force=True)
            except Timeout:
                pass  # it still has the version, and comes here again

    def _forces(self, handle: SimHandle) -> bool:
        """Whether it gives up what it holds all the same, now that it was refused."""
        if handle.holds != self._refused:
            self._refused, self._refused_at = handle.holds, self.peer.now
        waited = self.peer.now - self._refused_at
        return self.peer.rng.random() < FORCES and (not self.board.calm or waited >= PATIENCE)


def trainer(worker: Worker) -> Steps[None]:
    job, peer = worker.job, worker.peer
    handle = yield from worker.opened()
    last = 0
    while True:
        version = 1 + int(peer.now / job.period)
        try:
            if handle.holds is not None and handle.lost != handle.holds:
                if job.keeps and version == last:
                    yield from worker.pause()
                    continue
                yield from handle.unpublish(VERB_TIMEOUT)
            if version > last:
                handle.write(_content(job, peer, version))
                yield from handle.publish(version, VERB_TIMEOUT)
                last = version
                if job.retracts and job.shard == 0 and peer.rng.random() < RETRACTS:
                    yield from handle.retract(version, VERB_TIMEOUT)
                if not job.keeps:
                    yield from worker.pause(job.period / 2)
        except TensorHubError as error:
            yield from worker.goes_on(error, handle)
        yield from worker.pause()


def _content(job: Job, peer: SimPeer, version: int) -> str:
    if job.side_by_side and not (job.deviates and version % 2):
        return f"v{version} #{job.shard}"
    return f"v{version} by {job.slot} in {peer.peer_id[:4]}, write {peer.world.number()}"


def rollout(worker: Worker) -> Steps[None]:
    handle = yield from worker.opened()
    while True:
        try:
            yield from handle.replicate("latest", VERB_TIMEOUT)
        except TensorHubError as error:
            yield from worker.goes_on(error, handle)
        yield from worker.pause()


def elastic(worker: Worker) -> Steps[None]:
    peer = worker.peer
    while True:
        name = f"{worker.job.replica}-{peer.world.number()}"
        handle = yield from worker.opened(Slot(Group(MODEL, name), 0))
        for _ in range(peer.rng.randint(1, 4)):
            try:
                yield from handle.replicate("latest", VERB_TIMEOUT)
            except TensorHubError as error:
                yield from worker.goes_on(error, handle)
            yield from worker.pause()
        yield from worker.closed(handle)
        yield from worker.pause()


def retainer(worker: Worker) -> Steps[None]:
    """Shards must ask for the same, so only one that is alone asks for what is old, or leaves."""
    job, rng = worker.job, worker.peer.rng
    alone, seen = job.num_shards == 1, -1
    while True:
        versions = (seen,) if alone and seen >= 0 and rng.random() < 0.5 else ()
        handle = yield from worker.opened(retain=Retain(job.newest, versions))
        left = rng.randint(4, 12)
        while left or not alone:
            left -= 1
            old = alone and job.newest > 1 and rng.random() < 0.3
            try:
                got = yield from handle.replicate("latest-1" if old else "latest", VERB_TIMEOUT)
                seen = got.version
            except TensorHubError as error:
                yield from worker.goes_on(error, handle)
            yield from worker.pause()
        yield from worker.closed(handle)
        yield from worker.pause()


def herd(worker: Worker) -> Steps[None]:
    job, peer = worker.job, worker.peer
    handle = yield from worker.opened()
    while True:
        try:
            yield from handle.replicate("latest", VERB_TIMEOUT)
            beat = (1 + int(peer.now / job.period)) * job.period
            yield peer.sleep(beat + peer.rng.uniform(0.0, JITTER) - peer.now)
            if handle.holds is not None:
                yield from handle.unpublish(VERB_TIMEOUT)
        except TensorHubError as error:
            yield from worker.goes_on(error, handle)
        yield from worker.pause()


def wisher(worker: Worker) -> Steps[None]:
    yield from worker.opened(retain=Retain(worker.job.newest, ()))
    while True:
        yield from worker.pause(1.0)


def turn(worker: Worker) -> Steps[None]:
    """Version v is published by replica v mod `turns`, and taken back when v + 1 is whole."""
    job, peer, board = worker.job, worker.peer, worker.board
    handle = yield from worker.opened()
    version = job.turn
    while True:
        yield from worker.pause(0.3)
        try:
            while handle.holds is None and board.is_whole(version):
                version += job.turns  # somebody before us got that far
            if handle.holds is None and board.is_whole(version - 1):
                handle.write(_content(job, peer, version))
                yield from handle.publish(version, VERB_TIMEOUT)
                board.published(version, job.shard, job.num_shards)
            if handle.holds is not None and board.is_whole(version + 1):
                yield from worker.pause(job.period)
                yield from handle.unpublish(VERB_TIMEOUT)
        except TensorHubError as error:
            yield from worker.goes_on(error, handle)


def scribe(worker: Worker) -> Steps[None]:
    """Several may come to be in one process: each has a register of its own."""
    peer, name = worker.peer, worker.job.replica
    number = 0
    while True:
        number += 1
        began = peer.now
        peer.world.history.note_probe(Probed(peer.peer_id, began, name, number))
        yield peer.write(PROBE_KEY, name, SlotClaim(0, 1, number, True))
        peer.world.history.note_probe(Probed(peer.peer_id, began, name, number, ended=True))
        for _ in range(3):
            yield from worker.pause(0.15)
            began = peer.now
            registers: Registers = yield peer.read(PROBE_KEY)
            values = {
                (r.writer, r.name): r.value.counter
                for r in registers
                if isinstance(r.value, SlotClaim)
            }
            peer.world.history.note_probe(Probed(peer.peer_id, began, values=values))


def follower(worker: Worker) -> Steps[None]:
    handle = yield from worker.opened()
    seen = -1
    while True:
        try:
            seen = yield from handle.wait_for(seen, VERB_TIMEOUT)
            wanted: int | str = seen if worker.peer.rng.random() < 0.7 else "latest-1"
            yield from handle.replicate(wanted, VERB_TIMEOUT)
        except TensorHubError as error:
            yield from worker.goes_on(error, handle)
        yield from worker.pause()


PROGRAMS: dict[str, Callable[[Worker], Steps[None]]] = {
    "trainer": trainer,
    "rollout": rollout,
    "elastic": elastic,
    "retainer": retainer,
    "follower": follower,
    "herd": herd,
    "wisher": wisher,
    "turn": turn,
    "scribe": scribe,
}
