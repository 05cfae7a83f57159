"""Prefetches: a version is pulled into host memory while the handle's tensors go on being used.

Rules of this file. A `Prefetcher` belongs to one handle and takes what it asks for, the newest
request only. A `Copy` is one pull ahead of time, and the memory that it fills; it runs as
runtime/pulling.py's does, but writes no registered byte and is no call of the group. What the node
makes of it is protocol/shards/prefetching.py's; what a pull makes of it transfer/stock.py's.

Theory. A request first finds out which publication the version is. If that is what the handle
holds or is pulling, there is nothing to do; if it is what the copy there is of, the request
waits for that. Else a copy of it is begun, once the one before has given its memory back.
`replicate` stops a copy that is under way (a fence: nothing writes to its memory any more) and goes
on with what it has. Nothing that becomes of a prefetch is an error of any other verb.

    _serve: find -> Copy.run: room -> pull -> stopped -> unwanted -> gone -> freed

Threads. One for each request, which lives as long as the copy that it began. What dies when: a
copy is unwanted once a replicate brought its version or a newer one, a newer prefetch took its
place, it was cancelled or retracted, or the handle ended; then the node hides it and lets its
readers go, for as long as others have decided to pull it, and it is freed. `close` ends all.

Bounds: one copy a handle, and one more on its way out; `prefetch_limit` bytes a peer.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tensorhub_p2p.errors import (
    LayoutMismatch,
    NotEnoughMemory,
    PeerClosed,
    StateError,
    TensorHubError,
    Timeout,
    VersionUnavailable,
)
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR
from tensorhub_p2p.protocol.identity import Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.pulls.sources import SourceId
from tensorhub_p2p.protocol.shards.verbs import Found
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.runtime.misfits import misfit
from tensorhub_p2p.runtime.verbs import Running
from tensorhub_p2p.transfer.copying import HostMemory, usable_bytes
from tensorhub_p2p.transfer.engine import Hooks, ShardPull
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.stock import Stock

if TYPE_CHECKING:
    from tensorhub_p2p.runtime.driver import Driver

DRAIN_SECONDS = 1.0
"""For reads that are still under way when a copy is freed: the node waited for leases."""
LIMIT_PART = 4
"""By default copies take up to one part in so many of the memory."""


class Prefetch:
    """One `handle.prefetch`, under way or done. Thread-safe."""

    def __init__(self, prefetcher: Prefetcher, what: str) -> None:
        self.version: int | None = None
        """Which version it is, once that is found out."""
        self._what = what
        self._prefetcher = prefetcher
        self._future: Future[int] = Future()
        self._finding: Running | None = None
        self._copy: Copy | None = None

    @property
    def bytes(self) -> int:
        """Bytes that have come, and were verified."""
        return self._copy.moved if self._copy is not None else 0

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float = 120.0) -> int:
        """Wait until all of it is here; the version.

        Raises what ended it: VersionUnavailable, TransferError, IntegrityError, LayoutMismatch,
        NotEnoughMemory, Timeout; StateError if it was cancelled, or something took its
        place. Timeout, too, if it is still under way after `timeout` seconds.
        """
        self._prefetcher.check_process()
        try:
            return self._future.result(timeout)
        except TimeoutError as error:
            if self._future.done():
                raise
            what = f"{self._what} is still under way, {self.bytes} bytes have come"
            raise Timeout(what) from error

    def cancel(self) -> None:
        """End it, and give its memory back. Harmless when repeated, and once it is done."""
        self._prefetcher.cancel(self)

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"<{self._what}: {state}, {self.bytes} bytes>"

    def _succeed(self, version: int) -> None:
        self.version = version
        with contextlib.suppress(Exception):  # it was ended meanwhile
            self._future.set_result(version)

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            self._future.set_exception(error)


class Copy(Hooks):
    """One pull into host memory. `run` is its thread's; the rest belongs to whoever has it."""

    def __init__(
        self,
        driver: Driver,
        slot: Slot,
        found: Found,
        registered: Region,
        deadline: float,
        before: Copy | None,
    ) -> None:
        """`registered` is what the version has to fit; `before` has to be freed first."""
        self.slot = slot
        self.publication = found.publication
        self.failure: BaseException | None = None
        self._driver = driver
        self._found = found
        self._registered = registered
        self._deadline = deadline
        self._before = before
        self._lock = threading.Lock()
        self._requests: list[Prefetch] = []
        """Who waits for it."""
        self._stopped_by: TensorHubError | None = None
        """Why it was stopped, if somebody did."""
        self._memory: HostMemory | None = None
        self._exported: Exported | None = None
        self._digests: dict[int, bytes] = {}
        """Of the chunks that are here."""
        self._pull: ShardPull | None = None
        self._name = f"{driver.peer_id}/{secrets.token_hex(4)}"
        self._inbox: SimpleQueue[object] = driver.open_inbox(self._name)
        self._go_on = threading.Event()
        """The one before is freed, or it need not wait for that."""
        self._ended = threading.Event()
        """Nothing is written to its memory any more."""
        self._unwanted = threading.Event()
        self._gone = threading.Event()
        """Nobody else finds or reads it."""
        self.freed = threading.Event()

    # --- whoever has it ------------------------------------------------------------------

    @property
    def moved(self) -> int:
        """Bytes that have come."""
        return self._pull.moved if self._pull is not None else 0

    @property
    def usable(self) -> bool:
        """It is here, or may come yet."""
        return self.failure is None and not self._unwanted.is_set()

    def tell(self, request: Prefetch) -> None:
        """This one waits for it, too."""
        request._copy = self
        with self._lock:
            if not self._ended.is_set():
                self._requests.append(request)
                return
        self._end(request)

    def _end(self, request: Prefetch) -> None:
        if self.failure is not None:
            request._fail(self.failure)
        else:
            request._succeed(self.publication.version)

    def stop(self, why: str) -> None:
        """Pull no more. On return nothing writes to its memory."""
        self._break_off(StateError(why))
        self._ended.wait()

    def _break_off(self, error: TensorHubError) -> None:
        self._stopped_by = self._stopped_by or error
        self._inbox.put(None)
        self._go_on.set()

    def release(self, why: str) -> None:
        """Nobody wants it any more: it ends by itself, and frees its memory."""
        self._break_off(StateError(why))
        self._unwanted.set()

    def gone(self) -> None:
        """The node has hidden it, and nobody reads it."""
        if not self._unwanted.is_set():
            self._break_off(VersionUnavailable(f"{self.publication} was retracted"))
            self._unwanted.set()
        self._gone.set()

    def close(self) -> None:
        """The peer is closed: there is no node any more."""
        self.release("its peer was closed")
        self._gone.set()

    def stock(self) -> Stock | None:
        """What of it is here; None if nothing is. It was stopped, or is complete."""
        if self._memory is None or not self._digests or self._unwanted.is_set():
            return None
        source = SourceId(self._driver.peer_id, self.slot)
        return Stock(source, self.publication, self._memory.region, dict(self._digests))

    # --- its thread ----------------------------------------------------------------------

    def run(self) -> None:
        """From its begin until its memory is given back."""
        try:
            self._fetch()
        except BaseException as error:  # noqa: BLE001  whatever it was: whoever waits is told
            self.failure = self._stopped_by or error
        finally:
            self._driver.close_inbox(self._name)
            with self._lock:
                self._ended.set()
        for request in self._requests:
            self._end(request)
        if not self._digests and self.failure is not None:
            self._unwanted.set()
        self._unwanted.wait()
        self._let_go()

    def _fetch(self) -> None:
        self._await_room()
        driver, found, publication = self._driver, self._found, self.publication
        model, shard = self.slot.group.model, self.slot.shard
        unfollow = driver.follow(
            self._inbox,
            lambda now: driver.node.follow(now, model, shard, publication, found.sources),
        )
        self._pull = self._make_pull()
        try:
            self._pull.run()
        except LayoutMismatch as error:
            raise misfit(model, publication, self._pull.sources, driver.name, str(error)) from error
        finally:
            if driver.running:
                unfollow()
                self.carrying(None)
        driver.control.post(lambda now: driver.node.prefetched(now, self.slot))

    def _await_room(self) -> None:
        """Until the copy before has given its memory back: others may have decided for it."""
        before = self._before
        if before is None:
            return
        self._before = None
        before.when_freed(self._go_on)
        if not self._go_on.wait(max(0.0, self._deadline - time.monotonic())):
            raise Timeout(
                f"prefetching {self.publication}: {before.publication}, which was prefetched "
                "before, is still being pulled by others"
            )
        if self._stopped_by is not None:
            raise self._stopped_by

    def when_freed(self, flag: threading.Event) -> None:
        """Have the flag set once its memory is given back."""
        with self._lock:
            self._waiting = flag
            if self.freed.is_set():
                flag.set()

    _waiting: threading.Event | None = None

    def _make_pull(self) -> ShardPull:
        driver = self._driver
        return ShardPull(
            pull=self._name,
            publication=self.publication,
            own=SourceId(driver.peer_id, self.slot),
            region=self._make_memory,
            transports=driver.transports,
            choices=driver.choices,
            config=driver.config.pull,
            inbox=self._inbox,
            send=driver.send,
            locate=driver.locality,
            deadline=self._deadline,
            hooks=self,
            lag=lambda: driver.control.lag,
            rng=random.Random(secrets.randbits(64)),
            layout=self._registered.layout,
        )

    def _make_memory(self, layout: Layout) -> Region:
        self._registered.arranged(layout)  # raises LayoutMismatch
        self._driver.prefetches.take(self, layout.num_bytes)
        try:
            self._memory = HostMemory(layout)
        except MemoryError as error:
            raise NotEnoughMemory(f"prefetching {self.publication}: {error}") from error
        return self._memory.region

    def _let_go(self) -> None:
        if self._exported is not None:
            try:
                self._driver.control.post(
                    lambda now: self._driver.node.end_prefetch(now, self.slot)
                )
                self._gone.wait()
            except PeerClosed:
                pass  # nobody reads any more
            self._exported.drain(time.monotonic() + DRAIN_SECONDS)
            self._exported.release()
        if self._memory is not None:
            self._memory.free()
        self._driver.prefetches.give_back(self)
        with self._lock:
            self.freed.set()
            if self._waiting is not None:
                self._waiting.set()

    # --- hooks of the engine -------------------------------------------------------------

    def begin(self, into: Region) -> bool:
        driver, layout = self._driver, into.layout
        exported = Exported(driver.transports, into, ChunkSet(layout.num_chunks))
        self._exported = exported
        publication, num_shards = self.publication, self._found.num_shards
        driver.control.post(
            lambda now: driver.node.prefetching(
                now, self.slot, publication, num_shards, layout, exported.endpoints
            )
        )
        return True

    def carrying(self, chunks: int | None) -> None:
        node, slot, publication = self._driver.node, self.slot, self.publication
        self._driver.control.post(lambda now: node.carries(now, slot, publication, chunks))

    def digests(self, digests: tuple[tuple[int, bytes], ...]) -> None:
        for chunk, known in digests:
            self._driver.learnt.add(self.slot, self.publication, (chunk, known))

    def held(self, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
        assert self._exported is not None
        self._exported.allowed.add(chunk)
        self._digests[chunk] = digest
        self._driver.verified.add(self.slot, self.publication, (chunk, digest, known_to))

    def revoked(self, chunk: int) -> None:
        assert self._exported is not None
        self._exported.allowed.discard(chunk)
        self._digests.pop(chunk, None)
        node, slot, publication = self._driver.node, self.slot, self.publication
        self._driver.control.post(lambda now: node.revoked(now, slot, publication, chunk))


class Prefetches:
    """What one peer has prefetched, over all its handles."""

    def __init__(self, driver: Driver, limit: int | None) -> None:
        """`limit` in bytes; None: a part of the memory that this process may use."""
        self._driver = driver
        self._limit = usable_bytes() // LIMIT_PART if limit is None else limit
        self._lock = threading.Lock()
        self._copies: dict[Slot, Copy] = {}
        self._taken: dict[Slot, int] = {}
        """Bytes, by copy."""
        self._numbers = count(1)
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def taken(self) -> int:
        """Bytes that copies have at present."""
        with self._lock:
            return sum(self._taken.values())

    def start(self, work: Callable[[], None]) -> None:
        """Run this on a thread that `close` waits for."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="tensorhub_p2p-prefetch", daemon=True)
        with self._lock:
            if self._closed:
                raise PeerClosed("this peer is closed: it prefetches nothing")
            self._threads.add(thread)
            thread.start()

    def slot(self, model: str, shard: int) -> Slot:
        """Of a copy; never given twice."""
        name = f"prefetched/{self._driver.peer_id}/{next(self._numbers)}"
        return Slot(Group(model, name), shard)

    def add(self, copy: Copy) -> None:
        """From here on it is ended with the peer, and hears of what the node does with it."""
        with self._lock:
            self._copies[copy.slot] = copy
            closed = self._closed
        if closed:
            copy.close()

    def take(self, copy: Copy, num_bytes: int) -> None:
        """Memory for it. Raises NotEnoughMemory."""
        with self._lock:
            others = sum(self._taken.values())
            if others + num_bytes > self._limit:
                raise NotEnoughMemory(
                    f"prefetching {copy.publication} takes {num_bytes} bytes; of the "
                    f"prefetch_limit of {self._limit} other prefetches have {others}: replicate "
                    "those, or raise PullConfig.prefetch_limit"
                )
            self._taken[copy.slot] = num_bytes

    def give_back(self, copy: Copy) -> None:
        with self._lock:
            self._taken.pop(copy.slot, None)
            self._copies.pop(copy.slot, None)

    def gone(self, slot: Slot) -> None:
        """The node has hidden this copy, and nobody reads it."""
        copy = self._copies.get(slot)
        if copy is not None:
            copy.gone()

    def close(self) -> None:
        """End all of them, and wait until all memory is given back."""
        with self._lock:
            self._closed = True
            copies, threads = list(self._copies.values()), list(self._threads)
        for copy in copies:
            copy.close()
        for thread in threads:
            thread.join()


class Prefetcher:
    """The prefetches of one handle. `holds` says what it has, or is pulling, at this moment."""

    def __init__(
        self, driver: Driver, slot: Slot, num_shards: int, holds: Callable[[], Publication | None]
    ) -> None:
        self._driver = driver
        self._slot = slot
        self._num_shards = num_shards
        self._holds = holds
        self._lock = threading.Lock()
        self._asked: Prefetch | None = None
        self._copy: Copy | None = None

    def check_process(self) -> None:
        """Raises PeerClosed in a forked child."""
        self._driver.check_process()

    # --- the handle ----------------------------------------------------------------------

    def ask(self, selector: str, timeout: float, registered: Region) -> Prefetch:
        """Begin, and return at once; what was asked before is given up if it is another one."""
        request = Prefetch(self, f"prefetch({selector}) of {self._slot}")
        with self._lock:
            before, self._asked = self._asked, request
        if before is not None:
            self._stop_finding(before, "a newer prefetch took its place")
        deadline = time.monotonic() + timeout
        self._driver.prefetches.start(lambda: self._serve(request, selector, deadline, registered))
        return request

    def stock_for(self, publication: Publication) -> Stock | None:
        """What may help to pull this one; nothing writes to it any more."""
        with self._lock:
            copy = self._copy
        if copy is None or copy.publication.order > publication.order:
            return None
        copy.stop(f"replicate() of {publication} took over")
        return copy.stock()

    def replicated(self, publication: Publication) -> None:
        """The handle has this one now: a copy of it, or of an older one, is of no more use."""
        with self._lock:
            copy = self._copy
            if copy is None or copy.publication.order > publication.order:
                return
            self._copy = None
        copy.release(f"{publication} was replicated")

    def end(self, why: str) -> None:
        """Nothing is prefetched any more; memory is given back once nobody reads it."""
        with self._lock:
            asked, self._asked = self._asked, None
            copy, self._copy = self._copy, None
        if asked is not None:
            self._stop_finding(asked, why)
        if copy is not None:
            copy.release(why)

    def cancel(self, request: Prefetch) -> None:
        """End this one, unless something else is asked for by now."""
        with self._lock:
            if self._asked is not request:
                return
        if not self._driver.foreign:
            self.end("the prefetch was cancelled")

    # --- a request's thread --------------------------------------------------------------

    def _serve(self, request: Prefetch, selector: str, deadline: float, registered: Region) -> None:
        try:
            found = self._find(request, selector, deadline)
            copy = self._choose(request, found, deadline, registered)
        except BaseException as error:  # noqa: BLE001  raised by request.result()
            request._fail(error)
            return
        if copy is not None:
            copy.run()

    def _find(self, request: Prefetch, selector: str, deadline: float) -> Found:
        node, slot = self._driver.node, self._driver.prefetches.slot(*self._of)
        held = self._holds()
        floor = held.order if held is not None else NO_FLOOR
        running = self._driver.verb(
            max(0.01, deadline - time.monotonic()),
            lambda now, number, by: node.find(now, number, by, slot, selector, floor),
        )
        request._finding = running
        if self._asked is not request:
            self._stop_finding(request, "a newer prefetch took its place")
        found: Found = running.future.result()
        return found

    def _stop_finding(self, request: Prefetch, why: str) -> None:
        running = request._finding
        if running is not None and not running.future.done():
            with contextlib.suppress(PeerClosed):
                self._driver.control.post(
                    lambda now: self._driver.node.stop_finding(now, running.number, why)
                )

    @property
    def _of(self) -> tuple[str, int]:
        return self._slot.group.model, self._slot.shard

    def _choose(
        self, request: Prefetch, found: Found, deadline: float, registered: Region
    ) -> Copy | None:
        """The copy that is to be pulled for it; None if there is nothing to do."""
        publication = found.publication
        request.version = publication.version
        if publication == self._holds():
            request._succeed(publication.version)
            return None
        self._check_shards(found)
        with self._lock:
            if self._asked is not request:
                raise StateError("the prefetch was cancelled, or a newer one took its place")
            before = self._copy
            if before is not None and before.publication == publication and before.usable:
                copy, new = before, False
            else:
                slot = self._driver.prefetches.slot(*self._of)
                copy = Copy(self._driver, slot, found, registered, deadline, before)
                self._copy, new = copy, True
        copy.tell(request)
        if not new:
            return None
        self._driver.prefetches.add(copy)
        if before is not None:
            before.release(f"a prefetch of {publication} took its place")
        return copy

    def _check_shards(self, found: Found) -> None:
        if found.num_shards != self._num_shards:
            raise misfit(
                self._slot.group.model,
                found.publication,
                found.sources,
                self._driver.name,
                f"it has {found.num_shards} shards, {self._slot} is one of {self._num_shards}",
            )
