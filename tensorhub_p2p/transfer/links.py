"""One source of one pull, and the threads that read from it.

Rule of this file. A `Link` reads the chunks that it is given, through the first transport
that works, checks each against its digest, and reports. It doesn't choose chunks or
sources, and never retries a chunk anywhere but here through the next transport.

Threads. A link starts a thread with its first chunk, and more while the pull's `Readers`
have room, so that a silent source holds up nobody but itself. A thread owns one reader at
a time. `close` is a fence: when it returns, no byte of the target is being written by
this link, or will be; a thread that is still busy connecting ends by itself and writes
nothing.

Choice of transport. In our order of preference; a CannotReach at any moment, also in
the middle of a chunk, is remembered with its reason and the next one takes over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.protocol.pulls.sources import Fault, SourceId
from tensorhub_p2p.transfer.digest import TimedHasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)

_log = logging.getLogger(__name__)

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
    ) -> None:
        self.into = into
        self.transports = transports
        self.config = config
        self.deadline = deadline
        self.report = report
        self.threads = 0
        """Reader threads of all links; counted by the pull's own thread and theirs."""
        self.lock = threading.Lock()


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
        self._under_way: dict[int, Reader | None] = {}
        """Chunks in the threads' hands, with the reader once there is one."""
        self._taken_back: set[int] = set()
        """Of these, those that are to be broken off."""
        self._open: dict[Reader, str] = {}
        """Readers in the threads' hands, with their transport."""
        self._threads = 0
        self._idle = 0
        self._writing = 0
        self._closed = False
        self._usable = deque(self._choices())
        self.transport = self._usable[0][0] if self._usable else ""
        """The transport that is in use."""

    def _choices(self) -> list[tuple[str, bytes]]:
        """Transports of both sides that may work, in our order; the others are explained."""
        offered = {endpoint.transport: endpoint.blob for endpoint in self.endpoints}
        choices = []
        for name, transport in self._readers.transports.items():
            if name not in offered:
                self.rejected[name] = "the source doesn't offer it"
                continue
            reason = transport.unavailable() or transport.reachable(offered[name])
            if reason is None:
                choices.append((name, offered[name]))
            else:
                self.rejected[name] = reason
        return choices

    @property
    def usable(self) -> bool:
        """Some transport may still work."""
        return bool(self._usable)

    @property
    def writing(self) -> bool:
        """Some thread of this link is writing into the target."""
        with self._changed:
            return self._writing > 0

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
            if self._idle >= len(self._orders) or not self._may_grow():
                self._changed.notify()
                return
            self._threads += 1
        threading.Thread(target=self._work, name="tensorhub_p2p-reader", daemon=True).start()

    def _may_grow(self) -> bool:
        """The first thread always; more only while the pull has few, and this link not many."""
        limit = self._readers.config.reader_threads
        with self._readers.lock:
            grow = not self._threads or (self._threads < limit and self._readers.threads < limit)
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
                reader = self._under_way[chunk]
                if reader is not None:
                    reader.close()
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
        reader: Reader | None = None
        try:
            while (order := self._next()) is not None:
                try:
                    reader = self._do(order, reader)
                except ReadFailed as error:
                    reader = None
                    given_up = self._settle(order)
                    fault = Fault.GIVEN_UP if given_up else _fault(error)
                    self._give_back(order, fault, str(error))
        except BaseException as error:  # noqa: BLE001  the pull's own thread raises it
            self._readers.report(Crashed(error))
        finally:
            if reader is not None:
                self._drop(reader)
            with self._changed:
                self._threads -= 1
            with self._readers.lock:
                self._readers.threads -= 1

    def _next(self) -> Order | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._orders or self._closed)
            self._idle -= 1
            if not self._orders:
                return None
            order = self._orders.popleft()
            self._under_way[order.chunk] = None
            return order

    def _settle(self, order: Order) -> bool:
        """The order is done, or failed; whether it was taken back."""
        with self._changed:
            self._under_way.pop(order.chunk, None)
            given_up = order.chunk in self._taken_back
            self._taken_back.discard(order.chunk)
            return given_up

    def _do(self, order: Order, reader: Reader | None) -> Reader | None:
        """Carry out one order, falling back from transport to transport.

        Returns the reader to go on with."""
        while True:
            reader = reader or self._connect()
            if order.digest is None:
                self._settle(order)
                self._readers.report(Connected(self.source))
                return reader
            try:
                self._read(order.chunk, order.digest, reader)
            except CannotReach as error:
                if order.chunk in self._taken_back:  # closing it is no fault of the transport
                    self._drop(reader)
                    raise SourceGone("the chunk was taken back") from error
                self._reject(reader, error)
                reader = None
            except BaseException:
                self._drop(reader)
                raise
            else:
                if not self._settle(order):
                    return reader
                self._drop(reader)  # it was closed when all had come
                return None

    def _connect(self) -> Reader:
        """A reader of the best transport that connects; CannotReach if there is none."""
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
            if self._adopt(name, reader):
                return reader

    def _adopt(self, name: str, reader: Reader) -> bool:
        """Let `abort` know of this reader; False (and it is closed) if that came first."""
        with self._changed:
            if not self._closed:
                self.transport = name
                self._open[reader] = name
                return True
        reader.close()
        return False

    def _reject(self, reader: Reader, error: CannotReach) -> None:
        with self._changed:
            name = self._open[reader]
        self._drop(reader)
        self._exclude(name, error)

    def _exclude(self, name: str, error: CannotReach) -> None:
        """Don't use this transport on this link any more."""
        with self._changed:
            if self._usable and self._usable[0][0] == name:
                self._usable.popleft()
                self.rejected[name] = str(error)
                _log.info("%s can't be read through %s: %s", self.source, name, error)

    def _drop(self, reader: Reader) -> None:
        with self._changed:
            self._open.pop(reader, None)
        reader.close()

    def _read(self, chunk: int, digest: bytes, reader: Reader) -> None:
        """Read one chunk into place and report it. ReadFailed if it doesn't come."""
        into = self._readers.into
        start, length = into.layout.chunk_range(chunk)
        began = time.monotonic()
        config = self._readers.config
        longest = config.source_timeout + length / config.slowest_rate
        deadline = min(self._readers.deadline, began + longest)
        hasher = TimedHasher()
        with self._changed:
            if self._closed:
                raise SourceGone("the link is closed")
            if chunk in self._taken_back:
                raise SourceGone("the chunk was taken back")
            self._under_way[chunk] = reader
            self._writing += 1
        try:
            reader.read(start, length, into, deadline, hasher)
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()
        if hasher.digest() == digest:
            seconds = time.monotonic() - began
            self._readers.report(
                Landed(self.source, chunk, digest, length, seconds, hasher.seconds)
            )
        else:
            why = f"through {self.transport}"
            self._readers.report(ReadFault(self.source, chunk, Fault.MISMATCH, why))


def _fault(error: ReadFailed) -> Fault:
    return next((f for kind, f in FAULTS.items() if isinstance(error, kind)), Fault.GONE)
