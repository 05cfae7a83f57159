"""The holder's end of TCP reads: a port, and a thread for each connection to it.

Rule of this file. It serves only what `Exports` admits, and trusts nothing that comes in.

Theory. A thread takes all requests that its connection has brought by now and answers them
together: headers and tensor memory in one list of vectors, which the kernel sends in as few
system calls as there may be (`IOV_MAX` vectors, 2 GiB each). So a puller that asks ahead keeps
the pipe full, and a holder whose GIL is held by somebody else goes on sending what was asked
for when the call began; the next requests are taken when the thread gets the GIL again. With
TLS Python encrypts 16 KiB at a time, so there it is only those.

Who waits for whom. A new connection must finish its handshake and first request within
`handshake_timeout`, an idle one is closed after `idle_timeout`, and one that takes no bytes
for `stall_timeout` is broken off by the kernel (TCP_USER_TIMEOUT: an SO_SNDTIMEO would count
all of a call's waiting together, and end long calls that get on). At `max_connections` new
ones are closed at once. A read under way is ended by shutting its connection down; all that was
asked for on it is lost.

Bounds: `MAX_REQUESTS` requests of a connection are taken at a time; what else it asks stays in
the kernel's buffer.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple

from tensorhub_p2p.config import TcpConfig
from tensorhub_p2p.transfer.exports import Exports, Refused
from tensorhub_p2p.transfer.memory import IOV_MAX, Region, view
from tensorhub_p2p.transfer.scratch import STEP_BYTES, Scratch, are_small
from tensorhub_p2p.transfer.transports.addresses import listen
from tensorhub_p2p.transfer.transports.tcp_wire import (
    ANSWER,
    MAGIC,
    REQUEST,
    SERVED,
    keep_alive,
    shut,
    timeval,
)

MAX_REQUESTS = 256
"""Requests that are taken from a connection at a time."""

_log = logging.getLogger(__name__)


class Server:
    """Listens, and gives each connection a thread."""

    def __init__(
        self, bind: str, exports: Exports, tls: ssl.SSLContext | None, config: TcpConfig
    ) -> None:
        """Raises JoinError if it can't listen at `bind`."""
        self._exports = exports
        self._tls = tls
        self._config = config
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._closed = threading.Event()
        self._listeners = listen(bind)
        self.port: int = self._listeners[0].getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._acceptor = threading.Thread(
            target=self._accept, name="tensorhub_p2p-tcp-accept", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Break all connections off and end all threads."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.close()
        self._acceptor.join()
        with self._lock:
            threads = list(self._connections)
            for connection in self._connections.values():
                shut(connection)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select():
                    if key.fileobj is not self._woken:
                        self._accept_one(key.fileobj)  # type: ignore[arg-type]
        for each in (*self._listeners, self._woken):
            each.close()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it gave up in the meantime
        except OSError as error:  # out of descriptors: let some close
            _log.warning("cannot accept a data connection: %s", error)
            self._closed.wait(0.1)
            return
        with self._lock:
            full = len(self._connections) >= self._config.max_connections
            if not full:
                thread = threading.Thread(
                    target=self._own, args=(connection,), name="tensorhub_p2p-tcp", daemon=True
                )
                self._connections[thread] = connection
        if full:
            _log.warning("refused a data connection: %d are open", self._config.max_connections)
            connection.close()
        else:
            thread.start()

    def _own(self, connection: socket.socket) -> None:
        """A connection's thread."""
        try:
            self._prepare(connection)
            deadline = time.monotonic() + self._config.handshake_timeout
            if self._tls is not None:
                connection.settimeout(self._config.handshake_timeout)
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
                with self._lock:  # wrapping took the socket away from the old object
                    self._connections[threading.current_thread()] = connection
                connection.do_handshake()
            self._serve(connection, deadline)
        except OSError as error:  # ssl's and time-outs too: the other end's fault, or its end
            _log.debug("a data connection ended: %s", error)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]
                connection.close()

    def _prepare(self, connection: socket.socket) -> None:
        stall = self._config.stall_timeout
        connection.setblocking(True)
        keep_alive(connection)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall * 1000))
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(stall))

    def _serve(self, connection: socket.socket, deadline: float) -> None:
        requests = _Requests(connection)
        scratch: Scratch | None = None

        def cut() -> None:
            shut(connection)

        while not self._closed.is_set():
            asked = requests.take(deadline)
            if asked is None:
                return
            connection.settimeout(None)
            with ExitStack() as reads:
                answers = [self._admit(request, cut, reads) for request in asked]
                if isinstance(connection, ssl.SSLSocket):
                    scratch = scratch or Scratch(STEP_BYTES)
                    for answer in answers:
                        _send_sealed(connection, answer, scratch)
                else:
                    _send(connection, answers)
            deadline = time.monotonic() + self._config.idle_timeout

    def _admit(self, request: _Request, cut: Callable[[], None], reads: ExitStack) -> _Answer:
        """What to answer. An admitted read goes on until `reads` is closed."""
        export, start, length = request
        try:
            region = reads.enter_context(self._exports.reading(export, start, length, cut))
        except Refused as refused:
            return _Answer(ANSWER.pack(MAGIC, refused.refusal, 0), None, 0, 0)
        return _Answer(ANSWER.pack(MAGIC, SERVED, length), region, start, length)


class _Request(NamedTuple):
    export: bytes
    start: int
    length: int


class _Answer(NamedTuple):
    header: bytes
    region: Region | None
    start: int
    length: int

    def parts(self) -> Iterator[bytes | memoryview]:
        """What to send: the header, then the memory itself."""
        yield self.header
        if self.region is not None:
            iov = self.region.pieces(self.start, self.length)
            for i in range(0, len(iov), 2):
                yield view(iov[i], iov[i + 1])


class _Requests:
    """What one connection asks, as it comes in."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray(MAX_REQUESTS * REQUEST.size)
        self._filled = 0

    def take(self, deadline: float) -> list[_Request] | None:
        """Those that are there by now, waiting for the first; None if the other end closed.

        Raises OSError if none comes by the deadline, or something else than requests.
        """
        with memoryview(self._buffer) as buffer:
            while self._filled < REQUEST.size:
                self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
                got = self._connection.recv_into(buffer[self._filled :])
                if not got and self._filled:
                    raise ConnectionError("closed in the middle of a request")
                if not got:
                    return None
                self._filled += got
        end = self._filled - self._filled % REQUEST.size
        whole, rest = self._buffer[:end], self._buffer[end : self._filled]
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)
        asked = []
        for magic, export, start, length in REQUEST.iter_unpack(whole):
            if magic != MAGIC:
                raise ConnectionError(f"it doesn't speak this protocol: {magic!r}")
            asked.append(_Request(export, start, length))
        return asked


def _send(connection: socket.socket, answers: list[_Answer]) -> None:
    """All answers, straight from the tensors, in as few system calls as there may be."""
    parts = (part for answer in answers for part in answer.parts())
    while batch := list(islice(parts, IOV_MAX)):
        while batch:
            _drop(batch, connection.sendmsg(batch))


def _drop(batch: list[bytes | memoryview], sent: int) -> None:
    """Take the first `sent` bytes off the batch."""
    done = 0
    while done < len(batch) and sent >= len(batch[done]):
        sent -= len(batch[done])
        done += 1
    del batch[:done]
    if sent:
        batch[0] = batch[0][sent:]


def _send_sealed(connection: ssl.SSLSocket, answer: _Answer, scratch: Scratch) -> None:
    """One answer through TLS, which takes one buffer at a time."""
    connection.sendall(answer.header)
    if answer.region is None:
        return
    start, end = answer.start, answer.start + answer.length
    while start < end:
        step = min(scratch.size, end - start)
        iov = answer.region.pieces(start, step)
        if are_small(iov, step):
            scratch.gather(iov)
            connection.sendall(scratch.memory[:step])
        else:
            for i in range(0, len(iov), 2):
                connection.sendall(view(iov[i], iov[i + 1]))
        start += step
