"""One source of one pull, and the threads that read from it.

Rule of this file. A `Link` reads the chunks that it is given, through the first transport
that works, checks each against its digest, and reports. It doesn't choose chunks or
sources, and never retries a chunk anywhere but here through the next transport.

Threads. A link starts a thread with its first chunk, and more while the pull's `Readers`
have room, or as many as its transport says make it faster (streams.py), so that a silent
source holds up nobody but itself. A thread owns one reader at a time. While it reads, its
reader may want to know what comes next: then it takes further orders, as many as are its
share among the threads, and reads them in that order. `close` is a fence: when it returns,
no byte of the target is being written by this link, or will be; a thread that is still busy
connecting ends by itself and writes nothing.

Choice of transport. In the order that `Choices` has for the link; a CannotReach at any moment,
also in the middle of a chunk, is remembered with its reason and the next one takes over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.protocol.pulls.sources import Fault, SourceId
from tensorhub_p2p.transfer.choosing import Choices
from tensorhub_p2p.transfer.digest import timed_hasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.streams import StreamCount
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)

BALANCE_SECONDS = 2.0
"""Reader seconds that are left, as it seems, when streams take no more than half their share."""

FAULTS: dict[type[ReadFailed], Fault] = {
    SourceGone: Fault.GONE,
    SourceWithdrew: Fault.WITHDREW,
    SourceSilent: Fault.SILENT,
    CannotReach: Fault.UNREACHABLE,
}


@dataclass(frozen=True)
class Connected:
    """The link works: a reader is at hand."""

    source: SourceId


@dataclass(frozen=True)
class ConnectFailed:
    source: SourceId
    fault: Fault
    why: str


@dataclass(frozen=True)
class Landed:
    """The chunk is in place and matches its digest.

    `seconds` it took to move and verify, of them `hashing` for the digest.
    """

    source: SourceId
    chunk: int
    digest: bytes
    num_bytes: int
    seconds: float
    hashing: float
    transport: str = ""


@dataclass(frozen=True)
class ReadFault:
    source: SourceId
    chunk: int
    fault: Fault
    why: str


@dataclass(frozen=True)
class Crashed:
    """A reader thread met what it should never meet; the pull must raise it."""

    error: BaseException


Report = Connected | ConnectFailed | Landed | ReadFault | Crashed


@dataclass(frozen=True)
class Order:
    """Read this chunk; without a digest: only connect."""

    chunk: int
    digest: bytes | None


class Readers:
    """What the links of one pull share: the target, the limits, where reports go."""

    def __init__(
        self,
        into: Region,
        transports: Mapping[str, Transport],
        config: PullConfig,
        deadline: float,
        report: Callable[[Report], None],
        choices: Choices | None = None,
    ) -> None:
        """`choices` orders the transports; without it their own order does."""
        self.choices = choices or Choices(tuple(transports))
        self.into = into
        self.transports = transports
        self.config = config
        self.deadline = deadline
        self.report = report
        self.threads = 0
        """Reader threads of all links; counted by the pull's own thread and theirs."""
        self.lock = threading.Lock()


class _Stream:
    """What one thread has in hand."""

    __slots__ = ("broken", "left", "orders", "reader", "told")

    def __init__(self) -> None:
        self.broken = False
        """Something that it has in hand was taken back."""
        self.left = False
        """Its thread is not counted any more."""
        self.reader: Reader | None = None
        self.orders: deque[Order] = deque()
        """Those it took, in the order in which it reads them."""
        self.told = 0
        """How many of them the reader knows of."""

    def break_off(self) -> None:
        """End what its reader does, from another thread."""
        self.broken = True
        if self.reader is not None:
            self.reader.close()


class Link:
    """Reads from one source. `submit` and `close` belong to the thread of the pull."""

    def __init__(self, source: SourceId, endpoints: tuple[Endpoint, ...], readers: Readers) -> None:
        self.source = source
        self.endpoints = endpoints
        self.rejected: dict[str, str] = {}
        """Transport → why it isn't used here."""
        self._readers = readers
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._under_way: dict[int, _Stream] = {}
        """Chunks in the threads' hands."""
        self._taken_back: set[int] = set()
        """Of these, those that are to be broken off."""
        self._open: dict[Reader, str] = {}
        """Readers in the threads' hands, with their transport."""
        self._threads = 0
        self._idle = 0
        self._in_hand = 0
        """Orders that threads took and are not through with."""
        self._chunk_seconds = 0.0
        """How long the last chunk took."""
        self._writing = 0
        self._closed = False
        self._usable = deque(self._choices())
        self._unfit = frozenset(self.rejected)
        """Transports that were not even tried."""
        self.transport = self._usable[0][0] if self._usable else ""
        """The transport that is in use."""
        self._streams: StreamCount | None = None
        if self._usable:
            self._count_streams(*self._usable[0])

    def _count_streams(self, name: str, blob: bytes) -> None:
        self._streams = self._readers.transports[name].streams(blob)
        if self._streams is not None:
            self._streams.begin()

    def _choices(self) -> list[tuple[str, bytes]]:
        """Transports of both sides that may work, in our order; the others are explained."""
        offered = {endpoint.transport: endpoint.blob for endpoint in self.endpoints}
        choices, failed = [], []
        for name in self._readers.choices.order(self.source.peer):
            reason = self._why_unfit(name, offered)
            if reason is not None:
                self.rejected[name] = reason
            elif self._readers.choices.failed_lately(self.source.peer, name) is None:
                choices.append((name, offered[name]))
            else:
                failed.append((name, offered[name]))
        if choices:
            for name, _ in failed:
                reason = self._readers.choices.failed_lately(self.source.peer, name)
                self.rejected[name] = f"it failed on this link lately: {reason}"
        return choices or failed

    def _why_unfit(self, name: str, offered: Mapping[str, bytes]) -> str | None:
        transport = self._readers.transports.get(name)
        if transport is None:
            return "this peer doesn't use it"
        if name not in offered:
            return "the source doesn't offer it"
        return transport.unavailable() or transport.reachable(offered[name])

    @property
    def usable(self) -> bool:
        """Some transport may still work."""
        return bool(self._usable)

    @property
    def choice(self) -> str:
        """The transport that is used from here on; "" if none may work any more."""
        return self._usable[0][0] if self._usable else ""

    @property
    def failed(self) -> tuple[str, ...]:
        """Transports that were tried and gave way to the next one, in that order."""
        return tuple(name for name in self.rejected if name not in self._unfit)

    @property
    def writing(self) -> bool:
        """Some thread of this link is writing into the target."""
        with self._changed:
            return self._writing > 0

    @property
    def backlog(self) -> float:
        """Seconds that what it was told to read will take, by the last chunk; 0 if unknown."""
        left = len(self._orders) + self._in_hand
        return left * self._chunk_seconds / max(1, self._threads)

    def serves(self, endpoints: tuple[Endpoint, ...]) -> bool:
        """This link reads from there already, and may go on doing so."""
        return self.endpoints == endpoints and not self._closed and self.usable

    def why_not(self) -> str:
        """What speaks against each transport."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.rejected.items())

    # --- the pull's thread ---------------------------------------------------------------

    def submit(self, chunk: int, digest: bytes) -> None:
        """Read this chunk; a `Landed` or a `ReadFault` will be reported."""
        self._submit(Order(chunk, digest))

    def connect(self) -> None:
        """Only see whether it works; `Connected` or `ConnectFailed` will be reported."""
        self._submit(Order(-1, None))

    def _submit(self, order: Order) -> None:
        with self._changed:
            if self._closed:
                self._give_back(order, Fault.GONE, "the link is closed")
                return
            self._orders.append(order)
            self._changed.notify()
        self._grow()

    def _grow(self) -> None:
        """Start a thread if there is something for it to do."""
        with self._changed:
            if self._idle >= len(self._orders) or self._closed or not self._may_grow():
                return
            self._threads += 1
        threading.Thread(target=self._work, name="tensorhub_p2p-reader", daemon=True).start()

    @property
    def _limit(self) -> int:
        """Threads that this link should have."""
        return self._streams.count if self._streams else self._readers.config.reader_threads

    def _may_grow(self) -> bool:
        """The first thread always; more only while the pull has few, and this link not many.

        A link that is faster with more streams than the pull's readers gets those.
        """
        limit, usual = self._limit, self._readers.config.reader_threads
        with self._readers.lock:
            room = self._readers.threads < usual or limit > usual
            grow = not self._threads or (self._threads < limit and room)
            self._readers.threads += grow
        return grow

    def take_back(self, chunk: int) -> None:
        """Break this read off; a `Landed` may come all the same, if it was done before."""
        with self._changed:
            order = next((o for o in self._orders if o.chunk == chunk), None)
            if order is not None:
                self._orders.remove(order)
            elif chunk in self._under_way:
                self._taken_back.add(chunk)
                self._under_way[chunk].break_off()
        if order is not None:
            self._give_back(order, Fault.GIVEN_UP, "it was not begun")

    def abort(self) -> None:
        """Read no more here: reads under way are broken off, and reported as failed."""
        with self._changed:
            self._closed = True
            orders, self._orders = list(self._orders), deque()
            for reader in self._open:
                reader.close()
            self._changed.notify_all()
        for order in orders:
            self._give_back(order, Fault.GONE, "the source was given up")

    def close(self) -> None:
        """`abort`, and wait until no thread of this link is writing."""
        self.abort()
        with self._changed:
            self._changed.wait_for(lambda: not self._writing)

    def _give_back(self, order: Order, fault: Fault, why: str) -> None:
        if order.digest is None:
            self._readers.report(ConnectFailed(self.source, fault, why))
        else:
            self._readers.report(ReadFault(self.source, order.chunk, fault, why))

    # --- reader threads ------------------------------------------------------------------

    def _work(self) -> None:
        stream = _Stream()
        try:
            while self._take(stream):
                try:
                    self._do(stream.orders[0], stream)
                except ReadFailed as error:
                    if not stream.broken:
                        self._fail(stream, error)
                else:
                    self._put_down(stream)
                if stream.broken:
                    self._begin_anew(stream)
        except BaseException as error:  # noqa: BLE001  the pull's own thread raises it
            self._readers.report(Crashed(error))
        finally:
            self._drop(stream)
            with self._changed:
                self._leave(stream)
            with self._readers.lock:
                self._readers.threads -= 1

    def _leave(self, stream: _Stream) -> None:
        if not stream.left:
            stream.left = True
            self._threads -= 1
            self._changed.notify()  # another one may take what woke this one

    def _take(self, stream: _Stream) -> bool:
        """Have an order in hand, waiting for one; False once there will be none."""
        if stream.orders:
            return True
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._orders or self._closed)
            self._idle -= 1
            if not self._orders or self._threads > max(1, self._limit):
                self._leave(stream)
                return False
            self._pick_up(stream)
            return True

    def _pick_up(self, stream: _Stream) -> None:
        order = self._orders.popleft()
        stream.orders.append(order)
        self._under_way[order.chunk] = stream
        self._in_hand += 1

    def _put_down(self, stream: _Stream) -> Order:
        """The first order in hand is done with; returns it."""
        with self._changed:
            stream.told = max(0, stream.told - 1)
            order = stream.orders.popleft()
            self._forget(order)
            return order

    def _fail(self, stream: _Stream, error: ReadFailed) -> None:
        """The first order in hand failed, and those with it that won't come either."""
        alone = isinstance(error, SourceWithdrew)
        for _ in range(1 if alone else len(stream.orders)):
            self._give_back(self._put_down(stream), _fault(error), str(error))

    def _forget(self, order: Order) -> None:
        """It is in nobody's hands any more."""
        self._in_hand -= 1
        self._under_way.pop(order.chunk, None)
        self._taken_back.discard(order.chunk)

    def _begin_anew(self, stream: _Stream) -> None:
        """Chunks of it were taken back, and its reader closed: the others are read by a new one."""
        self._drop(stream)
        with self._changed:
            stream.broken = False
            back = [order for order in stream.orders if order.chunk in self._taken_back]
            for order in back:
                stream.orders.remove(order)
                self._forget(order)
        for order in back:
            self._give_back(order, Fault.GIVEN_UP, "it was taken back")

    def _ahead(self, stream: _Stream) -> tuple[int, int] | None:
        """What this thread will read next, of which its reader doesn't know yet."""
        if stream.told == len(stream.orders):
            if not self._orders:  # mostly: not worth the lock
                return None
            with self._changed:
                if not self._may_take_ahead(stream):
                    return None
                self._pick_up(stream)
        order = stream.orders[stream.told]
        stream.told += 1
        return self._readers.into.layout.chunk_range(order.chunk)

    def _may_take_ahead(self, stream: _Stream) -> bool:
        """An order is there that no idle thread is about to take, and this thread's share."""
        waiting = len(self._orders)
        if self._closed or waiting <= self._idle or self._orders[0].digest is None:
            return False
        if len(stream.orders) > 1 and self._streams and not self._streams.settled:
            return False  # streams that are still to come want something to do, too
        mine, all_of_it = len(stream.orders) * self._threads, waiting + self._in_hand
        if len(stream.orders) > 1 and all_of_it * self._chunk_seconds < BALANCE_SECONDS:
            mine *= 2  # near the end a faster stream takes what a slower one left
        return mine < all_of_it

    def _do(self, order: Order, stream: _Stream) -> None:
        """Carry out one order, falling back from transport to transport."""
        while True:
            reader = stream.reader or self._connect(stream)
            if order.digest is None:
                self._readers.report(Connected(self.source))
                return
            try:
                stream.told = max(1, stream.told)
                self._read(order.chunk, order.digest, stream, reader)
                return
            except CannotReach as error:
                if stream.broken:  # closing it is no fault of the transport
                    raise SourceGone("a chunk of this stream was taken back") from error
                self._reject(stream, error)
            except SourceWithdrew:  # only this chunk, perhaps: others were asked for
                raise
            except BaseException:
                self._drop(stream)
                raise

    def _connect(self, stream: _Stream) -> Reader:
        """Give it a reader of the best transport that connects; CannotReach if there is none."""
        while True:
            with self._changed:
                if self._closed:
                    raise SourceGone("the link is closed")
                if not self._usable:
                    raise CannotReach(self.why_not())
                name, blob = self._usable[0]
            deadline = time.monotonic() + self._readers.config.source_timeout
            try:
                reader = self._readers.transports[name].connect(blob, deadline)
            except CannotReach as error:
                self._exclude(name, error)
                continue
            if self._adopt(name, blob, reader):
                stream.reader, stream.told = reader, 0
                reader.ahead = lambda: self._ahead(stream)
                return reader

    def _adopt(self, name: str, blob: bytes, reader: Reader) -> bool:
        """Let `abort` know of this reader; False (and it is closed) if that came first."""
        with self._changed:
            if not self._closed:
                if name != self.transport:
                    self._count_streams(name, blob)
                self.transport = name
                self._open[reader] = name
                return True
        reader.close()
        return False

    def _reject(self, stream: _Stream, error: CannotReach) -> None:
        assert stream.reader is not None
        with self._changed:
            name = self._open[stream.reader]
        self._drop(stream)
        self._exclude(name, error)

    def _exclude(self, name: str, error: CannotReach) -> None:
        """Don't use this transport on this link any more."""
        with self._changed:
            if self._usable and self._usable[0][0] == name:
                self._usable.popleft()
                self.rejected[name] = str(error)
                instead = self._usable[0][0] if self._usable else ""
                self._readers.choices.failed(self.source.peer, name, str(error), instead)

    def _drop(self, stream: _Stream) -> None:
        reader, stream.reader, stream.told = stream.reader, None, 0
        if reader is not None:
            with self._changed:
                self._open.pop(reader, None)
            reader.close()

    def _read(self, chunk: int, digest: bytes, stream: _Stream, reader: Reader) -> None:
        """Read one chunk into place and report it. ReadFailed if it doesn't come."""
        into = self._readers.into
        start, length = into.layout.chunk_range(chunk)
        began = time.monotonic()
        config = self._readers.config
        longest = config.source_timeout + length / config.slowest_rate
        deadline = min(self._readers.deadline, began + longest)
        hasher = timed_hasher()
        with self._changed:
            if self._closed:
                raise SourceGone("the link is closed")
            transport = self._open[reader]
            if stream.broken:
                raise SourceGone("a chunk of this stream was taken back")
            self._writing += 1
        try:
            reader.read(start, length, into, deadline, hasher)
        finally:
            self._wrote()
        if hasher.digest() == digest:
            now = time.monotonic()
            self._chunk_seconds = seconds = now - began
            if self._streams is not None:
                self._streams.landed(now, length)
            self._readers.report(
                Landed(self.source, chunk, digest, length, seconds, hasher.seconds, transport)
            )
            self._grow()
        else:
            why = f"through {transport}"
            self._readers.report(ReadFault(self.source, chunk, Fault.MISMATCH, why))

    def _wrote(self) -> None:
        """Some read is over; only `close` waits for that."""
        with self._changed:
            self._writing -= 1
            if self._closed:
                self._changed.notify_all()


def _fault(error: ReadFailed) -> Fault:
    return next((f for kind, f in FAULTS.items() if isinstance(error, kind)), Fault.GONE)
