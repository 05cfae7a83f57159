"""What a transport is: it exports regions, and reads ranges of regions exported elsewhere.

Rule of this file. Everything above knows transports only by these classes. An endpoint
is opaque bytes that travel in messages; only the transport that made it, or its twin at
the other end, looks inside.

Who does what. The holder calls `export` and hands the endpoint out; `withdraw` ends new
reads, `drain` ends all. The puller asks `reachable` (cheap, no traffic), calls `connect`
once per reading thread, and then `Reader.read` for each chunk. A failed read says what it
means for the source by its class; a transport never decides what happens next, and never
judges bytes: the digest does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from tensorhub_p2p.errors import TransferError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.streams import StreamCount


class ReadFailed(TransferError):
    """A read ended without its bytes. The message says what happened, and where."""


class SourceGone(ReadFailed):
    """The process at the other end isn't there any more, or the connection broke."""


class SourceWithdrew(ReadFailed):
    """The other end lives but doesn't serve this region, or this chunk, (any more)."""


class SourceSilent(ReadFailed):
    """Nothing arrived for too long, or the read's deadline passed."""


class CannotReach(ReadFailed):
    """This link doesn't work with this transport: try the next one."""


def nothing_ahead() -> None:
    """Nothing is known of what will be read next."""


class Reader(ABC):
    """A way to read one exported region. Used by one thread at a time, but for `close`.

    `ahead` is set by whoever reads. A transport that can ask for a range before the one in
    front of it has come calls it during `read`; it returns (start, length) of what will be
    read next, or None. What it returned must be read, in that order, unless the reader is
    closed. Transports that don't gain by it leave it alone.
    """

    ahead: Callable[[], tuple[int, int] | None] = staticmethod(nothing_ahead)

    @abstractmethod
    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        """Read bytes [start, start + length) of the exported region into the same of `into`.

        `into` is in the order of the exporter's layout. The hasher is fed every byte
        in order. `deadline` is on `time.monotonic`. Raises ReadFailed; then any part
        of the range may have been written. After SourceWithdrew the next range may be
        read; after anything else the reader is of no more use: close it.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what it holds. From another thread: ends a read that is under way."""


class Transport(ABC):
    """One way to move bytes. `export` and the rest may be called from any thread."""

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this transport can't be used on this machine, or None if it can."""

    @abstractmethod
    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        """Let others read the chunks of `region` in `allowed`; returns the endpoint.

        `allowed` may grow later. The region is kept alive until it is drained.
        """

    @abstractmethod
    def withdraw(self, endpoint: bytes) -> None:
        """Admit no more reads of this export. Returns at once; harmless when repeated."""

    @abstractmethod
    def drain(self, endpoint: bytes, deadline: float) -> None:
        """Withdraw, and wait for reads under way, which are cut off at `deadline`.

        On return this process sends no more bytes of it. One-sided reads can't be
        waited for: those that come later fail, or show in the digest.
        """

    def release(self, region: Region) -> None:  # noqa: B027  most have nothing to give back
        """The owner takes the memory back; nothing of it is exported, or read into, any more.

        On return this transport holds no right to it, nor has anybody one from here.
        """

    @abstractmethod
    def reachable(self, endpoint: bytes) -> str | None:
        """Why this endpoint certainly can't be read from here, or None if it may work."""

    @abstractmethod
    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        """A reader of this endpoint. Raises ReadFailed: CannotReach if another way may work."""

    def streams(self, endpoint: bytes) -> StreamCount | None:
        """How many readers a link to there should have; None: it makes no difference."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Withdraw everything and end every thread and connection of this transport."""
