"""Digests of chunks: xxh3, 128 bits, over a chunk's bytes; and the thread that takes them.

Rule of this file. It reads registered memory and reports digests; it doesn't know what
they are for.

Theory. `publish` must not wait for digests, so one thread per process takes them in the
background (xxhash releases the GIL for all but tiny buffers). Chunks that somebody asked
for come first, over all jobs; the rest goes round robin among the jobs. `cancel` is a
fence: when it returns, no digest of that job is being taken or ever will be, so the
memory may change. A chunk is at most 16 MiB: a millisecond or two. Whoever hears of a
digest wakes other threads, so many are told at a time, but the first that was asked for
at once.

Bounds: a job holds two sets of its chunks and what was not told yet, which is at most
what `news_interval` brings; jobs are as many as there are published handles.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import xxhash

from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.memory import Region, view
from tensorhub_p2p.transfer.native_loops import NativeHasher, native_hasher
from tensorhub_p2p.transfer.scratch import Scratch, are_small

DIGEST_BYTES = 16
ChunkHasher = xxhash.xxh3_128
"""`update(buffer)`, then `digest()`: 16 bytes."""


class Hasher(Protocol):
    """What a read feeds with the bytes as they arrive."""

    def update(self, data: memoryview) -> object: ...


class TimedHasher:
    """A chunk's digest, and the seconds that taking it cost, where there are no native loops."""

    __slots__ = ("_hasher", "seconds")

    def __init__(self) -> None:
        self._hasher = ChunkHasher()
        self.seconds = 0.0

    def update(self, data: memoryview) -> None:
        started = time.perf_counter()
        self._hasher.update(data)
        self.seconds += time.perf_counter() - started

    def update_pieces(self, iov: array[int]) -> None:
        """The same for many pieces of memory: address, length, address, length …"""
        started = time.perf_counter()
        update_pieces(self._hasher, iov)
        self.seconds += time.perf_counter() - started

    def digest(self) -> bytes:
        """16 bytes."""
        return self._hasher.digest()


def timed_hasher() -> NativeHasher | TimedHasher:
    """What a pull reads with: it has `digest()`, and `seconds`, what taking it cost."""
    return native_hasher() or TimedHasher()


def update_pieces(hasher: Hasher, iov: array[int]) -> None:
    """Feed memory to the hasher, piece by piece: address, length, address, length …"""
    if isinstance(hasher, NativeHasher | TimedHasher):
        hasher.update_pieces(iov)
        return
    feed = hasher.update
    for address, length in zip(iov[0::2], iov[1::2], strict=True):
        feed(view(address, length))


_log = logging.getLogger(__name__)


def update(
    hasher: xxhash.xxh3_128, region: Region, start: int, length: int, scratch: Scratch
) -> None:
    """Feed the bytes [start, start + length) of the region to the hasher, in order."""
    iov = region.pieces(start, length)
    if not are_small(iov, length):
        update_pieces(hasher, iov)
        return
    end = start + length
    while start < end:
        step = min(scratch.size, end - start)
        scratch.gather(region.pieces(start, step))
        hasher.update(scratch.memory[:step])
        start += step


def digest(region: Region, chunk: int, scratch: Scratch) -> bytes:
    """The digest of one chunk as it is in memory now. StateError if its tensors moved away."""
    start, length = region.layout.chunk_range(chunk)
    region.check_in_place(start, length)
    hasher = ChunkHasher()
    update(hasher, region, start, length, scratch)
    return hasher.digest()


class DigestJob:
    """The digests of one publication, being taken. Made by `Digester.submit`."""

    def __init__(
        self,
        digester: Digester,
        region: Region,
        chunks: ChunkSet,
        done: Callable[[int, bytes], None],
    ) -> None:
        self._digester = digester
        self._region = region
        self._done = done
        self._waiting = chunks
        self._rest = iter(chunks.copy())
        self._asked: deque[int] = deque()
        self._untold: deque[tuple[int, bytes]] = deque()
        self._tell_at = float("-inf")
        self.failure: BaseException | None = None
        """Why the job ended early, if it did."""

    def prefer(self, chunks: Iterable[int]) -> None:
        """Somebody waits for these: take them next. Those already taken are ignored."""
        self._digester._prefer(self, chunks)

    def cancel(self) -> None:
        """Take no more. On return none is being taken; `done` is not called any more.

        Called from `done` itself it only does the former.
        """
        self._digester._cancel(self)

    def _next(self) -> int | None:
        while self._asked:
            chunk = self._asked.popleft()
            if chunk in self._waiting:
                return chunk
        return next((chunk for chunk in self._rest if chunk in self._waiting), None)

    def _taken(self, chunk: int, digest: bytes, news_interval: float) -> None:
        """Tell what was taken: the first, and the first after somebody asked, at once."""
        self._untold.append((chunk, digest))
        if self._waiting and time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + news_interval
        while self._untold:
            self._done(*self._untold.popleft())


class Digester:
    """The one thread that takes digests. It starts with the first job.

    `news_interval` is the time in seconds over which digests are collected until they are
    told.
    """

    def __init__(self, news_interval: float = 0.01) -> None:
        self._news_interval = news_interval
        self._changed = threading.Condition()
        self._jobs: deque[DigestJob] = deque()
        self._running: DigestJob | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        # Made here: a thread that found no descriptor left would end, and none be taken any more.
        self._scratch: Scratch | None = Scratch()

    def submit(
        self, region: Region, chunks: Iterable[int], done: Callable[[int, bytes], None]
    ) -> DigestJob:
        """Take the digests of these chunks; `done(chunk, digest)` is called for each, here.

        `done` runs on the digest thread and must be quick. If it raises, the job ends
        and keeps the exception as its `failure`.
        """
        job = DigestJob(self, region, ChunkSet.of(region.layout.num_chunks, chunks), done)
        with self._changed:
            if self._closed:
                raise StateError("the peer is closed: no more digests are taken")
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="tensorhub_p2p-digest", daemon=True
                )
                thread.start()
                self._thread = thread
            self._jobs.append(job)
            self._changed.notify_all()
        return job

    def close(self) -> None:
        """Cancel all jobs and end the thread."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not threading.current_thread():
            if thread is not None:
                thread.join()
            scratch, self._scratch = self._scratch, None
            if scratch is not None:
                scratch.close()

    def _prefer(self, job: DigestJob, chunks: Iterable[int]) -> None:
        with self._changed:
            if job in self._jobs:
                job._asked.extend(c for c in chunks if c in job._waiting and c not in job._asked)
                job._tell_at = float("-inf")

    def _cancel(self, job: DigestJob) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: self._running is not job)
        job._untold.clear()

    def _work(self) -> None:
        scratch = self._scratch
        assert scratch is not None
        while (step := self._take()) is not None:
            job, chunk = step
            try:
                taken = digest(job._region, chunk, scratch)
                job._taken(chunk, taken, self._news_interval)
            except Exception as error:  # noqa: BLE001  a job's fault must not end the others
                job.failure = error
                _log.exception("taking digests of %r ended early", job._region.layout)
            self._finished(job)

    def _take(self) -> tuple[DigestJob, int] | None:
        """The next chunk to take, waiting for one; None when closed."""
        with self._changed:
            while not self._closed:
                asked = next((job for job in self._jobs if job._asked), None)
                if asked is not None:  # to the front: it is next
                    self._jobs.remove(asked)
                    self._jobs.appendleft(asked)
                if not self._jobs:
                    self._changed.wait()
                    continue
                job = self._jobs[0]
                chunk = job._next()
                if chunk is None:
                    self._jobs.popleft()
                    continue
                job._waiting.discard(chunk)
                self._jobs.rotate(-1)
                self._running = job
                return job, chunk
            return None

    def _finished(self, job: DigestJob) -> None:
        with self._changed:
            self._running = None
            if job.failure is not None and job in self._jobs:
                self._jobs.remove(job)
            self._changed.notify_all()
