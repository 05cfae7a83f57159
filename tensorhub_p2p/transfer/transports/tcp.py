"""Reading over TCP: parallel streams, straight from and into tensor memory.

Rule of this file. It moves ranges that it is asked for. It serves only what `Exports`
admits, and trusts nothing that comes in on its port.

On the wire. The puller dials (in TLS 1.3 where there is a secret) and asks, one request at
a time: magic, export id, start, length. The holder answers with a header of magic,
status and length, then that many bytes. An empty range asks "do you serve this?"; `connect`
sends one. Nothing is of variable size but the bytes that were asked for, so there is no
length to lie about. Several streams are several readers.

Who waits for whom. A connection has a thread at the holder. A new one must finish its
handshake and first request within `handshake_timeout`, an idle one is closed after
`idle_timeout`, and one that takes no bytes for `stall_timeout` is broken off by the kernel
(SO_SNDTIMEO, TCP_USER_TIMEOUT). Sends are blocking and whole chunks at a call: a holder
whose GIL is held goes on sending. The puller gives up on a stream that brings no byte for
`silence` seconds. At `max_connections` new ones are closed at once.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import ssl
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from tensorhub_p2p.config import TcpConfig
from tensorhub_p2p.errors import JoinError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.credentials import Credentials
from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.exports import Exports, Refusal, Refused
from tensorhub_p2p.transfer.memory import IOV_MAX, Region, view
from tensorhub_p2p.transfer.scratch import STEP_BYTES, Scratch, are_small
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)

_MAGIC = b"THR1"
_REQUEST = struct.Struct("!4s16sQQ")
_ANSWER = struct.Struct("!4sB3xQ")
_SERVED = 0
_REFUSALS = {
    Refusal.UNKNOWN: "doesn't know these tensors (any more)",
    Refusal.REVOKED: "withdrew these tensors",
    Refusal.NOT_HELD: "doesn't hold all of this range",
    Refusal.OUT_OF_RANGE: "has a shorter layout",
}

_log = logging.getLogger(__name__)


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    addresses: tuple[str, ...]
    export: bytes
    tls: bool


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Endpoint).decode


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; ValueError if it is neither."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: put an IPv6 address in brackets, as in [::1]:7946")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address: give host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _seconds(value: float) -> bytes:
    """A struct timeval for SO_RCVTIMEO and SO_SNDTIMEO; zero would mean "for ever"."""
    micros = max(1, int(value * 1e6))
    return struct.pack("ll", micros // 1_000_000, micros % 1_000_000)


def _tls_reason(error: ssl.SSLError) -> str:
    return f"TLS failed ({error.reason or error}): do both peers have the same secret?"


def _shut(connection: socket.socket) -> None:
    """End whatever another thread does on this connection. The owner closes it."""
    with contextlib.suppress(OSError):
        # Not SSLSocket's own: that takes the TLS state away under the other thread.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes | None:
    """Exactly `size` bytes; None if the other end closed before the first one."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            if data:
                raise ConnectionError("closed in the middle of a message")
            return None
        data += more
    return data


class TcpTransport(Transport):
    """Serves exports on a port of its own, and reads those of others."""

    name = "tcp"

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        advertise: Sequence[str] = (),
        credentials: Credentials | None = None,
        config: TcpConfig | None = None,
        silence: float = 2.0,
    ) -> None:
        """`bind` is host:port (port 0: any); `advertise` are the hosts, or host:port, to tell.

        Without `advertise` it is the bound host. `silence`: seconds without a byte after
        which a source counts as silent. Raises JoinError if the port can't be had.
        """
        self.config = config or TcpConfig()
        self.silence = silence
        self._exports = Exports()
        self._client_tls = credentials.client_context() if credentials else None
        server_tls = credentials.server_context() if credentials else None
        self._server = _Server(bind, self._exports, server_tls, self.config)
        host, port = split_address(bind)[0], self._server.port
        self.addresses: tuple[str, ...] = tuple(
            _with_port(told, port) for told in (advertise or (host,))
        )

    def unavailable(self) -> str | None:
        return None

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        export = self._exports.add(region, allowed)
        return _encode(_Endpoint(self.addresses, export, self._client_tls is not None))

    def withdraw(self, endpoint: bytes) -> None:
        self._exports.revoke(_decode(endpoint).export)

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self._exports.drain(_decode(endpoint).export, deadline)

    def reachable(self, endpoint: bytes) -> str | None:
        try:
            tls = _decode(endpoint).tls
        except msgspec.DecodeError as error:
            return f"its endpoint can't be read: {error}"
        if tls != (self._client_tls is not None):
            return "only it has a cluster secret" if tls else "only this peer has a cluster secret"
        return None

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        reason = self.reachable(endpoint)
        if reason is not None:
            raise CannotReach(f"tcp: {reason}")
        remote = _decode(endpoint)
        refused = []
        for address in remote.addresses:
            try:
                connection = self._dial(address, deadline)
            except (OSError, ValueError) as error:
                refused.append(f"{address}: {error}")
                continue
            try:
                return TcpReader(connection, address, remote.export, self.silence, deadline)
            except (CannotReach, SourceGone, SourceSilent) as error:
                refused.append(str(error))
        raise CannotReach("tcp: " + ("; ".join(refused) or "it told no address"))

    def _dial(self, address: str, deadline: float) -> socket.socket:
        limit = min(self.config.handshake_timeout, deadline - time.monotonic())
        connection = socket.create_connection(split_address(address), timeout=max(1e-3, limit))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._client_tls is not None:
                return self._client_tls.wrap_socket(connection)
        except ssl.SSLError as error:
            connection.close()
            raise ConnectionError(
                f"{error.reason or error}: do both have the same secret?"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._server.close()


def _with_port(told: str, port: int) -> str:
    """`told` as host:port: it may be a bare host, name or IPv6 literal."""
    try:
        return join_address(split_address(told)[0], split_address(told)[1] or port)
    except ValueError:
        return join_address(told.strip("[]"), port)


# --- the puller's end --------------------------------------------------------------------


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
        self._connection = connection
        self._name = f"tcp: {address}"
        self._export = export
        self._silence = silence
        self._tls = isinstance(connection, ssl.SSLSocket)
        self._scratch: Scratch | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False
        try:
            with self._reading():
                self._ask(0, 0, deadline)
        except ReadFailed:
            self.close()
            raise

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        with self._reading():
            self._ask(start, length, deadline)
            self._arm(deadline)
            end = start + length
            while start < end:
                # A big tensor's part of the range in one call, anything else step by step.
                iov = into.pieces(start, end - start, 1)
                step = iov[1]
                if step < STEP_BYTES or self._tls:
                    step = min(STEP_BYTES, end - start)
                    iov = into.pieces(start, step)
                self._step(iov, step, deadline, hasher)
                start += step

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
            raise CannotReach(f"{self._name}: {_tls_reason(error)}") from error
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

    def _ask(self, start: int, length: int, deadline: float) -> None:
        """Send a request and take the header of its answer."""
        limit = self._limit(deadline)
        self._connection.settimeout(limit)
        self._connection.sendall(_REQUEST.pack(_MAGIC, self._export, start, length))
        header = _receive(self._connection, _ANSWER.size, time.monotonic() + limit)
        if header is None:
            raise ConnectionError("it was closed")
        magic, status, due = _ANSWER.unpack(header)
        if magic != _MAGIC:
            raise CannotReach(f"{self._name} is something else: it answers {header[:4]!r}")
        if status != _SERVED:
            known = status in Refusal._value2member_map_
            why = _REFUSALS[Refusal(status)] if known else f"refuses with status {status}"
            raise SourceWithdrew(f"{self._name} {why}")
        if due != length:
            raise ConnectionError(f"it offers {due} bytes where {length} were asked for")

    def _limit(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise SourceSilent(f"{self._name}: the deadline passed")
        return min(left, self._silence)

    def _arm(self, deadline: float) -> None:
        """Let receives wait in the kernel, so that one call takes a whole step."""
        if self._tls:
            self._connection.settimeout(self._limit(deadline))
        else:
            self._connection.settimeout(None)
            self._connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, _seconds(self._limit(deadline))
            )

    def _step(self, iov: array[int], length: int, deadline: float, hasher: Hasher) -> None:
        """Take the next `length` bytes into these pieces."""
        if are_small(iov, length):
            if self._scratch is None:
                self._scratch = Scratch(STEP_BYTES)
            self._fill(self._scratch.memory[:length], deadline)
            hasher.update(self._scratch.memory[:length])
            self._scratch.scatter(iov)
            return
        for i in range(0, len(iov), 2):
            piece = view(iov[i], iov[i + 1])
            self._fill(piece, deadline)
            hasher.update(piece)

    def _fill(self, target: memoryview, deadline: float) -> None:
        flags = 0 if self._tls else socket.MSG_WAITALL
        while target:
            got = self._connection.recv_into(target, len(target), flags)
            if not got:
                raise ConnectionError("it was closed")
            target = target[got:]
            if target:
                self._limit(deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._busy:
                _shut(self._connection)
            else:
                self._connection.close()


# --- the holder's end --------------------------------------------------------------------


class _Server:
    """Listens, and gives each connection a thread."""

    def __init__(
        self, bind: str, exports: Exports, tls: ssl.SSLContext | None, config: TcpConfig
    ) -> None:
        self._exports = exports
        self._tls = tls
        self._config = config
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._closed = threading.Event()
        self._listeners = _listen(bind)
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
                _shut(connection)
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
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _seconds(stall))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall * 1000))

    def _serve(self, connection: socket.socket, deadline: float) -> None:
        scratch: Scratch | None = None
        while not self._closed.is_set():
            request = _receive(connection, _REQUEST.size, deadline)
            if request is None:
                return
            magic, export, start, length = _REQUEST.unpack(request)
            if magic != _MAGIC:
                _log.debug("a data connection doesn't speak this protocol: %r", request[:4])
                return
            connection.settimeout(None)
            try:
                with self._exports.reading(
                    export, start, length, lambda: _shut(connection)
                ) as region:
                    if isinstance(connection, ssl.SSLSocket):
                        scratch = scratch or Scratch(STEP_BYTES)
                        _send_sealed(connection, region, start, length, scratch)
                    else:
                        _send(connection, region, start, length)
            except Refused as refused:
                connection.sendall(_ANSWER.pack(_MAGIC, refused.refusal, 0))
            deadline = time.monotonic() + self._config.idle_timeout


def _listen(bind: str) -> list[socket.socket]:
    """Sockets for every address that `bind` stands for, all on one port."""
    host, port = split_address(bind)
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # [::] is for IPv4 too, where that is possible
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            listener.bind((address[0], port, *address[2:]))
            listener.listen(128)
            listener.setblocking(False)
            port = listener.getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise JoinError(
            f"cannot listen for data on {bind}: {error.strerror or error}; "
            "choose another data_bind, or port 0 for any free port"
        ) from error
    return listeners


def _send(connection: socket.socket, region: Region, start: int, length: int) -> None:
    """The answer, straight from the tensors: a system call for a whole range."""
    connection.sendall(_ANSWER.pack(_MAGIC, _SERVED, length), socket.MSG_MORE if length else 0)
    while length:
        iov = region.pieces(start, length, IOV_MAX)
        sent = connection.sendmsg([view(iov[i], iov[i + 1]) for i in range(0, len(iov), 2)])
        start += sent
        length -= sent


def _send_sealed(
    connection: ssl.SSLSocket, region: Region, start: int, length: int, scratch: Scratch
) -> None:
    """The same through TLS, which takes one buffer at a time."""
    connection.sendall(_ANSWER.pack(_MAGIC, _SERVED, length))
    end = start + length
    while start < end:
        step = min(scratch.size, end - start)
        iov = region.pieces(start, step)
        if are_small(iov, step):
            scratch.gather(iov)
            connection.sendall(scratch.memory[:step])
        else:
            for i in range(0, len(iov), 2):
                connection.sendall(view(iov[i], iov[i + 1]))
        start += step
