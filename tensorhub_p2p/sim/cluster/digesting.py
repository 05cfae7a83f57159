"""The digest thread of one simulated process: it takes a digest, then the next one.

Rules of this file. It reads tokens at the time at which their digest is taken, and tells the
node. Chunks that pullers wait for come first; after `stop` none of that publication is taken.
Each takes `digest_seconds`; one thread works for all handles of the process, in turn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.sim.cluster.history import DigestTaken
from tensorhub_p2p.sim.cluster.memory import digest_of

if TYPE_CHECKING:
    from tensorhub_p2p.sim.cluster.handles import SimHandle
    from tensorhub_p2p.sim.cluster.peer import SimPeer


@dataclass
class Job:
    """The digests of one publication that are still to be taken."""

    handle: SimHandle
    publication: Publication
    chunks: deque[int]


class DigestTask:
    """All digest jobs of one process, by slot."""

    def __init__(self, peer: SimPeer) -> None:
        self._peer = peer
        self._jobs: dict[Slot, Job] = {}
        self._stopped: dict[Slot, Publication] = {}
        self._busy = False

    def start(self, handle: SimHandle, publication: Publication) -> None:
        """Take all digests of what the handle published, unless it was stopped already."""
        if self._stopped.get(handle.slot) != publication:
            chunks = deque(range(handle.memory.layout.num_chunks))
            self._jobs[handle.slot] = Job(handle, publication, chunks)
            self._go_on()

    def prefer(self, slot: Slot, publication: Publication, chunks: tuple[int, ...]) -> None:
        """Pullers wait for these."""
        job = self._jobs.get(slot)
        if job is not None and job.publication == publication:
            first = [chunk for chunk in chunks if chunk in job.chunks]
            job.chunks = deque(dict.fromkeys((*first, *job.chunks)))

    def stop(self, slot: Slot, publication: Publication) -> None:
        """No digest of it is taken from here on."""
        self._stopped[slot] = publication
        job = self._jobs.get(slot)
        if job is not None and job.publication == publication:
            del self._jobs[slot]

    def _go_on(self) -> None:
        if self._jobs and not self._busy:
            self._busy = True
            self._peer.at(self._peer.now + self._peer.world.digest_seconds, self._take)

    def _take(self) -> None:
        self._busy = False
        if not self._jobs:
            return
        slot, job = next(iter(self._jobs.items()))
        del self._jobs[slot]
        chunk, publication = job.chunks.popleft(), job.publication
        if job.chunks:
            self._jobs[slot] = job  # behind the others
        peer, handle = self._peer, job.handle
        holds = peer.node.holds(slot)
        peer.world.history.note(DigestTaken(handle.id, publication, chunk, holds))
        digest = digest_of(handle.memory.tokens[chunk])
        peer.node.digested(peer.now, slot, publication, [(chunk, digest)])
        self._go_on()
