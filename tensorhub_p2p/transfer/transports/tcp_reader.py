"""The puller's end of TCP reads: one stream from one holder.

Rule of this file. It takes the bytes that it is told to read, into place, and feeds the hasher.
It trusts the other end with nothing but the bytes, which the digest judges.

Theory. A range is asked for before the one in front of it has arrived (`Reader.ahead` names it),
so that the holder always has something to send and hears of much at a time. Bytes are received
straight into the tensors in steps that fit the processor's cache, and hashed while they are
there, a system call for a step (MSG_WAITALL); without the GIL (native_loops.py), but for TLS,
which is Python's. Tiny tensors go through a scratch buffer.

Who waits for whom. A stream that brings no byte for `silence` seconds is given up. A holder that
refuses a range says so in that range's place; what was asked for behind it still comes.

Bounds: `MAX_ASKED` ranges asked for ahead, which fit into the socket's buffer, so that asking
never waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator

from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.memory import Region, view
from tensorhub_p2p.transfer.native_loops import THE_END, NativeHasher
from tensorhub_p2p.transfer.scratch import STEP_BYTES, Scratch, are_small
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
)
from tensorhub_p2p.transfer.transports.tcp_wire import (
    ANSWER,
    MAGIC,
    REQUEST,
    SERVED,
    shut,
    timeval,
    tls_reason,
    why_refused,
)

MAX_ASKED = 256
"""Ranges asked for and not yet read."""
RECEIVE_BYTES = 1 << 20
"""What is received before more is asked for."""


class TcpReader(Reader):
    """One stream from one holder."""

    def __init__(
        self,
        connection: socket.socket,
        address: str,
        export: bytes,
        silence: float,
        deadline: float,
    ) -> None:
        """Takes the connection over, and asks whether `export` is served. Raises ReadFailed."""
        self._connection = connection
        self._name = f"tcp: {address}"
        self._export = export
        self._silence = silence
        self._tls = isinstance(connection, ssl.SSLSocket)
        self._asked: deque[tuple[int, int]] = deque()
        """Ranges whose answers are still to come, in their order."""
        self._armed = -1.0
        """Seconds that the kernel waits in each call."""
        self._scratch: Scratch | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False
        try:
            with self._reading():
                self._arm(deadline)
                self._ask([(0, 0)])
                self._take_header(0)
        except ReadFailed:
            self.close()
            raise

    # --- reading -------------------------------------------------------------------------

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        with self._reading():
            self._arm(deadline)
            if self._asked and self._asked[0] != (start, length):
                raise RuntimeError("ranges must be read in the order in which they were asked for")
            self._ask([] if self._asked else [(start, length)])
            self._take_header(length)
            self._take(start, start + length, into, deadline, hasher)

    def _take(self, start: int, end: int, into: Region, deadline: float, hasher: Hasher) -> None:
        """Receive [start, end) step by step."""
        while start < end:
            step = min(RECEIVE_BYTES, end - start)
            iov = into.pieces(start, step)
            if are_small(iov, step):
                step = min(STEP_BYTES, step)
                self._take_small(into.pieces(start, step), step, deadline, hasher)
            else:
                for i in range(0, len(iov), 2):
                    self._take_piece(iov[i], iov[i + 1], deadline, hasher)
            start += step
            self._ask([])

    def _take_small(self, iov: array[int], length: int, deadline: float, hasher: Hasher) -> None:
        """Take the next `length` bytes, which belong into many small pieces."""
        if self._scratch is None:
            self._scratch = Scratch(STEP_BYTES)
        self._fill(self._scratch.memory[:length], deadline)
        hasher.update(self._scratch.memory[:length])
        self._scratch.scatter(iov)

    def _take_piece(self, here: int, length: int, deadline: float, hasher: Hasher) -> None:
        if isinstance(hasher, NativeHasher) and not self._tls:
            self._take_natively(here, length, deadline, hasher)
            return
        end = here + length
        while here < end:
            step = view(here, min(STEP_BYTES, end - here))
            self._fill(step, deadline)
            hasher.update(step)
            here += len(step)

    def _take_natively(self, here: int, length: int, deadline: float, hasher: NativeHasher) -> None:
        end = here + length
        while here < end:
            got, why = hasher.receive(self._connection.fileno(), here, end - here, deadline)
            here += got
            if why == THE_END:
                raise ConnectionError("closed in the middle of a message")
            if why:
                raise OSError(why, os.strerror(why))
            if here < end:
                self._limit(deadline)

    def _fill(self, target: memoryview, deadline: float | None = None) -> None:
        """Receive until the target is full."""
        size, flags = len(target), 0 if self._tls else socket.MSG_WAITALL
        while target:
            got = self._connection.recv_into(target, len(target), flags)
            if not got:
                begun = len(target) < size
                raise ConnectionError("closed in the middle of a message" if begun else "it closed")
            target = target[got:]
            if target and deadline is not None:
                self._limit(deadline)

    # --- asking --------------------------------------------------------------------------

    def _ask(self, ranges: list[tuple[int, int]]) -> None:
        """Ask for these ranges, and at once for what is known to be read next."""
        while len(self._asked) + len(ranges) < MAX_ASKED:
            following = self.ahead()
            if following is None:
                break
            ranges.append(following)
        if ranges:
            self._asked.extend(ranges)
            requests = (REQUEST.pack(MAGIC, self._export, *each) for each in ranges)
            self._connection.sendall(b"".join(requests))

    def _take_header(self, length: int) -> None:
        """The header of the next answer, which must be for `length` bytes."""
        header = bytearray(ANSWER.size)
        self._fill(memoryview(header))
        self._asked.popleft()
        magic, status, due = ANSWER.unpack(header)
        if magic != MAGIC:
            raise CannotReach(f"{self._name} is something else: it answers {magic!r}")
        if status != SERVED:
            raise SourceWithdrew(f"{self._name} {why_refused(status)}")
        if due != length:
            raise ConnectionError(f"it offers {due} bytes where {length} were asked for")

    # --- the connection ------------------------------------------------------------------

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Own the connection, and say what its errors mean."""
        self._enter()
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            raise SourceSilent(f"{self._name} sent nothing for {self._silence:g} s") from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise SourceGone(f"{self._name} broke the connection") from error
        except ssl.SSLError as error:
            raise CannotReach(f"{self._name}: {tls_reason(error)}") from error
        except OSError as error:
            raise SourceGone(f"{self._name} broke the connection: {error}") from error
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise SourceGone(f"{self._name}: the reader was closed")
            self._busy = True

    def _leave(self) -> None:
        with self._lock:
            self._busy = False
            if self._closed:
                self._connection.close()

    def _limit(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SourceSilent(f"{self._name}: the deadline passed")
        return min(left, self._silence)

    def _arm(self, deadline: float) -> None:
        """Bound what a call may wait: in the kernel, so that one call takes a whole step."""
        limit = self._limit(deadline)
        if limit == self._armed:
            return
        self._armed = limit
        if self._tls:  # Python's ssl waits by itself
            self._connection.settimeout(limit)
            return
        self._connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, option, timeval(limit))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._busy:
                shut(self._connection)
            else:
                self._connection.close()
