"""Copies in host memory of one simulated process: what the node wants copied, pulled and freed.

Rules of this file. It re-states runtime/offloading.py and runtime/adopting.py, with tokens for
bytes: it decides nothing but whether a copy fails, as one does where memory is short.

Theory of operation. One thread a process copies and frees, in the order in which that was
wanted, a chunk after the other. `stop` is a fence: no chunk of that publication is copied from
the slot any more. Each copy has one answer, `offloaded` or `offload_failed`; each `free` has
one, `freed`. An adoption is a pull of its own, into memory that nobody else writes.

What lies in host memory is in `kept`, from the first byte until it is freed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub_p2p.errors import TensorHubError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES, Layout
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.protocol.shards.verbs import AdoptWanted, Answer, OffloadWanted
from tensorhub_p2p.sim.cluster.history import DigestTaken, HandleId, Holding, LetGo
from tensorhub_p2p.sim.cluster.memory import Export, Memory, digest_of, endpoints_of, layout_of
from tensorhub_p2p.sim.cluster.tasks import Steps, start
from tensorhub_p2p.sim.cluster.transfer import SimPull

if TYPE_CHECKING:
    from tensorhub_p2p.sim.cluster.handles import SimHandle
    from tensorhub_p2p.sim.cluster.peer import SimPeer

ADOPTION_SECONDS = 600.0


@dataclass(eq=False)
class Kept:
    """One copy. As a puller (transfer.py) it announces nothing: the node does."""

    peer: SimPeer
    id: HandleId
    publication: Publication
    memory: Memory
    export: Export | None = None
    """None while it is being made."""
    stopped: bool = False
    """It is not to be made any further."""
    source: Slot | None = None
    """Of an offload: what it is copied from."""
    pull: SimPull | None = None
    """Of an adoption."""

    @property
    def slot(self) -> Slot:
        return self.id.slot

    def give_up_old(self, _timeout: float) -> Steps[None]:
        """There was nothing before."""
        yield from ()

    def keep_old(self) -> None:
        """There was nothing before."""

    def tear(self) -> None:
        """Nobody sees it before it is whole."""

    def announce_part(self, _answer: Answer, _export: Export, _timeout: float) -> None:
        """Nobody finds it before it is whole."""


class Keeping:
    """All copies of one process."""

    def __init__(self, peer: SimPeer) -> None:
        self.kept: dict[Slot, Kept] = {}
        self._peer = peer
        self._jobs: deque[Steps[None]] = deque()
        self._busy = False

    # --- what the node wants ---

    def offload(self, event: OffloadWanted, handle: SimHandle | None) -> None:
        """Copy what the handle has."""
        if handle is None:
            self._peer.node.offload_failed(self._peer.now, event.keep, "nothing is held any more")
            return
        kept = self._begin(event.keep, event.publication, handle.memory.layout)
        kept.source = event.slot
        self._submit(self._copy(kept, handle))

    def adopt(self, event: AdoptWanted) -> None:
        """Pull it."""
        kept = self._begin(
            event.keep, event.publication, layout_of(event.num_bytes // MIN_CHUNK_BYTES)
        )
        start(self._adopt(kept, Answer(0, event.publication, event.num_shards)))

    def free(self, keep: Slot) -> None:
        """Nobody needs it any more, or not after all."""
        kept = self.kept.get(keep)
        if kept is not None:
            kept.stopped = True
        if kept is not None and kept.pull is not None:
            kept.pull.put(None)
        else:
            self._submit(self._free(keep))

    def stop(self, slot: Slot, publication: Publication) -> None:
        """No chunk of it is copied from this slot from here on."""
        for kept in self.kept.values():
            if (kept.source, kept.publication) == (slot, publication) and kept.export is None:
                kept.stopped = True

    # --- how it is done ---

    def _begin(self, keep: Slot, publication: Publication, layout: Layout) -> Kept:
        id_ = HandleId(self._peer.peer_id, keep, self._peer.world.number())
        kept = self.kept[keep] = Kept(self._peer, id_, publication, Memory(layout))
        return kept

    def _submit(self, job: Steps[None]) -> None:
        self._jobs.append(job)
        if not self._busy:
            start(self._work())

    def _work(self) -> Steps[None]:
        self._busy = True
        while self._jobs:
            yield from self._jobs.popleft()
        self._busy = False

    def _copy(self, kept: Kept, handle: SimHandle) -> Steps[None]:
        peer, publication = self._peer, kept.publication
        fails = self._fails()
        for chunk in range(kept.memory.layout.num_chunks):
            yield peer.sleep(peer.world.copy_seconds)
            if kept.stopped or fails:
                self._failed(kept, "MemoryError" if fails else "it was taken back")
                return
            holds = peer.node.holds(handle.slot)
            peer.world.history.note(DigestTaken(handle.id, publication, chunk, holds))
            kept.memory.tokens[chunk] = handle.memory.tokens[chunk]
        self._made(kept)

    def _adopt(self, kept: Kept, answer: Answer) -> Steps[None]:
        peer = self._peer
        kept.pull = pull = SimPull(kept, answer, peer.now + ADOPTION_SECONDS)
        why = "MemoryError" if self._fails() else ""
        try:
            yield from pull.run()
        except TensorHubError as error:
            why = str(error)
        if pull.export is not None:
            peer.withdraw(pull.export)
        kept.pull = None
        if kept.stopped:
            yield from self._free(kept.slot)
        elif why:
            self._failed(kept, why)
        else:
            self._made(kept)

    def _fails(self) -> bool:
        return self._peer.rng.random() < self._peer.world.copy_fails

    def _made(self, kept: Kept) -> None:
        peer, layout = self._peer, kept.memory.layout
        kept.export = peer.export(kept.memory, ChunkSet.full(layout.num_chunks))
        peer.world.history.note(Holding(kept.id, kept.publication, whole=True))
        endpoints: tuple[Endpoint, ...] = endpoints_of(kept.export)
        digests = tuple(digest_of(token) for token in kept.memory.tokens)
        peer.node.offloaded(peer.now, kept.slot, layout, endpoints, digests)
        peer.pump()

    def _failed(self, kept: Kept, why: str) -> None:
        del self.kept[kept.slot]
        self._peer.node.offload_failed(self._peer.now, kept.slot, why)
        self._peer.pump()

    def _free(self, keep: Slot) -> Steps[None]:
        kept = self.kept.pop(keep, None)
        if kept is not None and kept.export is not None:
            self._peer.withdraw(kept.export)
            self._peer.world.history.note(LetGo(kept.id, kept.publication))
        self._peer.node.freed(self._peer.now, keep)
        self._peer.pump()
        yield from ()
