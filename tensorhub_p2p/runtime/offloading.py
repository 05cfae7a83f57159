"""Offloads: copies of published shards in host memory, made beside whoever waits for them.

Rules of this file. One thread a peer, which starts with the first copy. The node says
what to copy and when to free it (protocol/shards/keeping.py); nothing is decided here. Every
`copy` has one answer to the node, `offloaded` or `offload_failed`, unless `free` came
first; every `free` has one, `freed`.

Theory. Jobs are done in their order, so a `free` finds the copy before it either made or
given up. A copy goes chunk by chunk. `stop` is a fence, as it is for digests: when it
returns, no byte of that publication is being copied from the slot, nor will be, so the
tensors may change. What keeps the memory here is the table `_kept`; `free` ends its
export first and gives the pages back at once (copying.py).

What dies when: `close` gives up what is under way and frees everything.

Bounds: the node wants at most `max_kept` at a time, and reserved the bytes before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tensorhub_p2p.errors import PeerClosed
from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.transfer.copying import HostMemory, copy_chunk
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import Transport

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 1.0
"""For reads that are still under way when an offload is freed: the node waited for leases."""


class Keeper(Protocol):
    """What is told of copies: the node, on the control thread."""

    def offloaded(
        self,
        now: float,
        keep: Slot,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        digests: tuple[bytes, ...],
    ) -> None:
        """The copy is complete and may be read there; `digests` are the copy's."""

    def offload_failed(self, now: float, keep: Slot, why: str) -> None:
        """There is no copy, and nothing of it is left."""

    def freed(self, now: float, keep: Slot) -> None:
        """The memory is given back."""


Post = Callable[[Callable[[float], object]], None]
"""Have something called on the control thread, with the time."""


@dataclass
class _Copy:
    slot: Slot
    keep: Slot
    publication: Publication
    region: Region
    stopped: bool = False


@dataclass
class _Free:
    keep: Slot


class Offloads:
    """The kept copies of one peer."""

    def __init__(self, transports: Mapping[str, Transport], post: Post, keeper: Keeper) -> None:
        self._transports = transports
        self._post = post
        self._keeper = keeper
        self._changed = threading.Condition()
        self._jobs: deque[_Copy | _Free] = deque()
        self._copying: _Copy | None = None
        self._reading = False
        """A chunk is being copied at this moment."""
        self._kept: dict[Slot, tuple[HostMemory, Exported]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        # Made here: a thread that found no descriptor left would end, and no copy be made any more.
        self._scratch: Scratch | None = Scratch()

    # --- from the control thread ---------------------------------------------------------

    def copy(self, slot: Slot, keep: Slot, publication: Publication, region: Region) -> None:
        """Copy what the slot holds, as `keep`."""
        self._submit(_Copy(slot, keep, publication, region))

    def free(self, keep: Slot) -> None:
        """End this copy, or give it up if it isn't made yet."""
        with self._changed:
            for job in self._copies():
                if job.keep == keep:
                    job.stopped = True
        self._submit(_Free(keep))

    def stop(self, slot: Slot, publication: Publication) -> None:
        """Copy no more of this publication from the slot; on return nothing is being copied."""
        with self._changed:
            for job in self._copies():
                if (job.slot, job.publication) == (slot, publication):
                    job.stopped = True
            self._changed.wait_for(lambda: not (self._reading and _is_stopped(self._copying)))

    def _copies(self) -> list[_Copy]:
        jobs = [job for job in self._jobs if isinstance(job, _Copy)]
        return jobs if self._copying is None else [*jobs, self._copying]

    def _submit(self, job: _Copy | _Free) -> None:
        with self._changed:
            if self._closed:
                return
            self._jobs.append(job)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="tensorhub_p2p-offload", daemon=True
                )
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    # --- from any thread -----------------------------------------------------------------

    def keep(self, keep: Slot, memory: HostMemory, digests: tuple[bytes, ...]) -> None:
        """Export this memory and keep it; the node is told."""
        exported = Exported.whole(self._transports, memory.region)
        with self._changed:
            if not self._closed:
                self._kept[keep] = (memory, exported)
                kept = True
            else:
                kept = False
        if not kept:
            _end(memory, exported)
            return
        layout, endpoints = memory.region.layout, exported.endpoints
        self._tell(lambda now: self._keeper.offloaded(now, keep, layout, endpoints, digests))

    def failed(self, keep: Slot, error: BaseException) -> None:
        """Tell the node that there will be no copy."""
        why = f"{type(error).__name__}: {error}"
        taken_back = isinstance(error, (InterruptedError, PeerClosed))
        level = logging.INFO if taken_back else logging.WARNING
        _log.log(level, "no copy of what %s was to keep: %s", keep, why)
        self._tell(lambda now: self._keeper.offload_failed(now, keep, why))

    def freed(self, keep: Slot) -> None:
        """Tell the node that the memory is given back."""
        self._tell(lambda now: self._keeper.freed(now, keep))

    def _tell(self, what: Callable[[float], object]) -> None:
        with contextlib.suppress(PeerClosed):  # then nobody wants to know
            self._post(what)

    def close(self) -> None:
        """Give up what is under way, free everything, end the thread."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            if self._copying is not None:
                self._copying.stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()
        while self._kept:
            _, (memory, exported) = self._kept.popitem()
            _end(memory, exported)

    # --- the thread ----------------------------------------------------------------------

    def _work(self) -> None:
        scratch = self._scratch
        assert scratch is not None
        while (job := self._next()) is not None:
            if isinstance(job, _Free):
                self._free(job.keep)
            else:
                self._copy(job, scratch)

    def _next(self) -> _Copy | _Free | None:
        with self._changed:
            self._copying = None
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            job = self._jobs.popleft()
            if isinstance(job, _Copy):
                self._copying = job
            return job

    def _copy(self, job: _Copy, scratch: Scratch) -> None:
        memory: HostMemory | None = None
        try:
            memory = HostMemory(job.region.layout)
            digests = self._copy_into(job, memory, scratch)
        except Exception as error:  # noqa: BLE001  whatever it was, the version stays published
            if memory is not None:
                memory.free()
            self.failed(job.keep, error)
        else:
            self.keep(job.keep, memory, digests)

    def _copy_into(self, job: _Copy, memory: HostMemory, scratch: Scratch) -> tuple[bytes, ...]:
        digests = []
        for chunk in range(job.region.layout.num_chunks):
            with self._changed:
                if job.stopped:
                    raise InterruptedError(f"{job.publication} was withdrawn from {job.slot}")
                self._reading = True
            try:
                digests.append(copy_chunk(job.region, memory, chunk, scratch))
            finally:
                with self._changed:
                    self._reading = False
                    self._changed.notify_all()
        return tuple(digests)

    def _free(self, keep: Slot) -> None:
        with self._changed:
            kept = self._kept.pop(keep, None)
        if kept is not None:
            _end(*kept)
        self.freed(keep)


def _is_stopped(job: _Copy | None) -> bool:
    return job is not None and job.stopped


def _end(memory: HostMemory, exported: Exported) -> None:
    """Nobody reads it any more; the pages are the system's again."""
    exported.drain(time.monotonic() + DRAIN_SECONDS)
    exported.release()
    memory.free()
