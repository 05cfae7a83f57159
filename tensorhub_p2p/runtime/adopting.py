"""Adoptions: shards pulled into host memory for peers that leave, with no handle of ours.

Rules of this file. It runs a pull as runtime/pulling.py does, but into memory that is made
once the publication's layout is known, and announces nothing: the node does, when it has
heard that the copy is complete. Making, exporting and freeing that memory is offloading.py's.

Threads. Each adoption has one, as a pull needs; the node wants at most `max_kept`. An
adoption ends once, with `offloaded` or `offload_failed`; or with `freed`, if it was taken
back first. `close` ends all.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.pulls.sources import SourceId
from tensorhub_p2p.runtime.offloading import Offloads
from tensorhub_p2p.transfer.copying import HostMemory
from tensorhub_p2p.transfer.engine import Hooks, ShardPull
from tensorhub_p2p.transfer.memory import Region

if TYPE_CHECKING:
    from tensorhub_p2p.runtime.driver import Driver

ADOPTION_SECONDS = 600.0
"""Longest adoption; one whose sources are gone ends before, as any pull does."""


class Adoptions:
    """The adoptions of one peer that are under way."""

    def __init__(self, driver: Driver, offloads: Offloads) -> None:
        self._driver = driver
        self._offloads = offloads
        self._lock = threading.Lock()
        self._running: dict[Slot, _Adoption] = {}
        self._closed = False

    def start(self, keep: Slot, publication: Publication) -> None:
        """Pull this shard, to be kept as `keep`."""
        adoption = _Adoption(self._driver, keep, publication)
        with self._lock:
            if self._closed:
                return
            self._running[keep] = adoption
        adoption.thread = threading.Thread(
            target=self._run, args=(adoption,), name="tensorhub_p2p-adopt", daemon=True
        )
        adoption.thread.start()

    def take_back(self, keep: Slot) -> bool:
        """End this adoption; False if it has ended already."""
        with self._lock:
            adoption = self._running.pop(keep, None)
        if adoption is None:
            return False
        adoption.inbox.put(None)
        return True

    def close(self) -> None:
        """End all of them, and wait until none writes any more."""
        with self._lock:
            self._closed = True
            ending = list(self._running.values())
            self._running.clear()
        for adoption in ending:
            adoption.inbox.put(None)
        for adoption in ending:
            if adoption.thread is not None:
                adoption.thread.join()

    def _run(self, adoption: _Adoption) -> None:
        error: Exception | None = None
        try:
            adoption.run()
        except Exception as caught:  # noqa: BLE001  whatever it was, the node is told
            error = caught
        with self._lock:
            wanted = self._running.pop(adoption.keep, None) is not None
        if wanted and error is None and adoption.memory is not None:
            self._offloads.keep(adoption.keep, adoption.memory, adoption.digests_in_order())
            return
        if adoption.memory is not None:
            adoption.memory.free()
        if wanted and error is not None:
            self._offloads.failed(adoption.keep, error)
        elif not self._closed:
            self._offloads.freed(adoption.keep)


class _Adoption(Hooks):
    """One pull into memory of its own, on its own thread."""

    def __init__(self, driver: Driver, keep: Slot, publication: Publication) -> None:
        self.keep = keep
        self.memory: HostMemory | None = None
        self.thread: threading.Thread | None = None
        self._driver = driver
        self._publication = publication
        self._digests: dict[int, bytes] = {}
        self._name = f"{driver.peer_id}/{secrets.token_hex(4)}"
        self.inbox: SimpleQueue[object] = driver.open_inbox(self._name)
        """None ends it."""

    def run(self) -> None:
        """Raises as `ShardPull.run` does, and MemoryError."""
        driver, publication = self._driver, self._publication
        model, shard = self.keep.group.model, self.keep.shard
        try:
            unfollow = driver.follow(
                self.inbox, lambda now: driver.node.follow(now, model, shard, publication)
            )
            try:
                self._pull().run()
            finally:
                if driver.running:
                    unfollow()
        finally:
            driver.close_inbox(self._name)

    def _pull(self) -> ShardPull:
        driver = self._driver
        return ShardPull(
            pull=self._name,
            publication=self._publication,
            own=SourceId(driver.peer_id, self.keep),
            region=self._make_memory,
            transports=driver.transports,
            choices=driver.choices,
            config=driver.config.pull,
            inbox=self.inbox,
            send=driver.send,
            locate=driver.locality,
            deadline=time.monotonic() + ADOPTION_SECONDS,
            hooks=self,
            lag=lambda: driver.control.lag,
            rng=random.Random(secrets.randbits(64)),
        )

    def _make_memory(self, layout: Layout) -> Region:
        self.memory = HostMemory(layout)
        return self.memory.region

    def digests_in_order(self) -> tuple[bytes, ...]:
        """Of all chunks; asked once it is complete."""
        return tuple(self._digests[chunk] for chunk in range(len(self._digests)))

    def held(self, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
        self._digests[chunk] = digest

    def revoked(self, chunk: int) -> None:
        self._digests.pop(chunk, None)
