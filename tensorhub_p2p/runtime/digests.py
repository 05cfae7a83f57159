"""Digests of what this peer publishes: from the digest thread to the control thread.

Rules of this file. It starts and ends digest jobs, one a slot, and hands their results on
in batches, so that the queue of the control thread never fills with digests and a
cancellation on that thread never waits for room in its own queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from typing import Generic, TypeVar

from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.transfer.digest import Digester, DigestJob
from tensorhub_p2p.transfer.memory import Region

What = TypeVar("What")


class Batch(Generic[What]):
    """What waits for the control thread about slots; at most one call of it is under way.

    `deliver(now, slot, publication, what)` is called there with what was added, in order: as many
    at a time as are of the same publication.
    """

    def __init__(
        self,
        post: Callable[[Callable[[float], object]], None],
        deliver: Callable[[float, Slot, Publication, list[What]], None],
    ) -> None:
        self._post = post
        self._deliver = deliver
        self._lock = threading.Lock()
        self._waiting: list[tuple[Slot, Publication, What]] = []

    def add(self, slot: Slot, publication: Publication, what: What) -> None:
        """From any thread."""
        with self._lock:
            self._waiting.append((slot, publication, what))
            first = len(self._waiting) == 1
        if first:
            self._post(self._flush)

    def _flush(self, now: float) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for (slot, publication), items in groupby(waiting, key=itemgetter(0, 1)):
            self._deliver(now, slot, publication, [what for _, _, what in items])


class PublishedDigests:
    """The digest jobs of one peer, by slot."""

    def __init__(self, batch: Batch[tuple[int, bytes]]) -> None:
        self._digester = Digester()
        self._jobs: dict[Slot, tuple[Publication, DigestJob]] = {}
        self._stopped: dict[Slot, Publication] = {}
        """By slot: the last publication of which no digest may be taken any more."""
        self._lock = threading.Lock()
        self._batch = batch

    def start(self, slot: Slot, publication: Publication, region: Region) -> None:
        """Take all digests of this publication in the background, unless it was stopped."""

        def done(chunk: int, digest: bytes) -> None:
            self._batch.add(slot, publication, (chunk, digest))

        chunks = range(region.layout.num_chunks)
        with self._lock:
            if self._stopped.get(slot) != publication:
                self._jobs[slot] = (publication, self._digester.submit(region, chunks, done))

    def prefer(self, slot: Slot, publication: Publication, chunks: Iterable[int]) -> None:
        """Pullers wait for these."""
        current, job = self._jobs.get(slot, (None, None))
        if job is not None and current == publication:
            job.prefer(chunks)

    def stop(self, slot: Slot, publication: Publication) -> None:
        """On return no digest of this publication is being taken, and none will be.

        Also if it comes before `start`: both threads may be on their way.
        """
        with self._lock:
            self._stopped[slot] = publication
            current, job = self._jobs.get(slot, (None, None))
            if job is None or current != publication:
                return
            del self._jobs[slot]
        job.cancel()

    def close(self) -> None:
        self._digester.close()
