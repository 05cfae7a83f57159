"""Reading through UCX messages (UCXX): RDMA where there is a device, else shared memory or TCP.

Rule of this file. It serves only what `Exports` admits, trusts nothing that comes in, and
lets UCX touch no tensor: both ends move bytes through staging buffers. So a read that was
given up, or an export that was drained, is over whatever UCX still has in flight.

On the wire. An endpoint leads to the holder's worker. The puller sends it a request: magic,
a tag of its own, export id, start, length, and the address of its worker. Everything comes
back under that tag, in order: a header of magic, status and length, then the bytes in
steps of STEP_BYTES. A tag is a new random number for each request: what comes late fits
nothing. Requests are of bounded size, and few are taken in at a time.

Who waits for whom. The holder has one thread, which serves all readers in turn, a step at a
time: one that takes nothing holds up nobody, and is given up after `stall_timeout`. A puller
gives up on a source that brings no step for `silence` seconds. Both sleep in the kernel
while nothing happens.

What it is not. Nothing is encrypted, and whoever reaches the worker's port speaks to UCX
itself. The port is opened on the interface of the host that the data port has, no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import ipaddress
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tensorhub_p2p.config import UcxConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.exports import Exports, Refused
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)
from tensorhub_p2p.transfer.transports.optional import installed, try_apart

STEP_BYTES = 1 << 20
MAX_ADDRESS = 4096
"""Bytes of a worker's address."""
AHEAD = 2
"""Steps on their way at a time, and staging buffers of one stream."""
TRY_SECONDS = 20.0
CLOSE_NANOSECONDS = 10_000_000
"""What each of three tries to part in order may take."""
LOOK_SECONDS = 0.05
"""How often a sleeping reader looks whether it was closed."""

_MAGIC = b"THU1"
_REQUEST_TAG = 0x5448554250325052
_REQUEST = struct.Struct("!4sQ16sQQH")
_HEADER = struct.Struct("!4sB3xQ")
_SERVED = 0
_FULL = 255
_SIOCGIFADDR = 0x8915

_TRY = """
from tensorhub_p2p.transfer.transports.ucx import Worker
Worker({devices!r}).close()
"""

_log = logging.getLogger(__name__)


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    worker: Annotated[bytes, Meta(max_length=MAX_ADDRESS)]
    export: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sealed: bool
    """It belongs to a cluster with a secret."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Endpoint).decode


def devices_of(host: str) -> str | None:
    """What UCX calls the network devices with this address; None if there is no such one.

    "all" for 0.0.0.0 and ::.
    """
    if host in ("0.0.0.0", "::"):
        return "all"
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    if all(ipaddress.ip_address(address).is_loopback for address in map(str, wanted)):
        return "lo"
    for _, name in socket.if_nameindex():
        if _addresses(name) & wanted:
            return ",".join([name, *_rdma_of(name)])
    return None


def _addresses(interface: str) -> set[str | int]:
    found: set[str | int] = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        reply = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.add(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            words = line.split()
            if words[-1] == interface:
                found.add(str(ipaddress.IPv6Address(bytes.fromhex(words[0]))))
    return found


def _rdma_of(interface: str) -> list[str]:
    """The RDMA devices behind a network interface, as UCX names them."""
    try:
        return [
            f"{d}:1" for d in sorted(os.listdir(f"/sys/class/net/{interface}/device/infiniband"))
        ]
    except OSError:
        return []


class Worker:
    """One worker of UCX with a context of its own. Used by one thread at a time."""

    def __init__(self, devices: str) -> None:
        # The library sets variables that its own UCX then complains of.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        ucxx = importlib.import_module("ucxx._lib.libucxx")
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._tag, self._all = ucxx.UCXXTag, ucxx.UCXXTagMaskFull
        self._make_address = ucxx.UCXAddress.create_from_buffer
        features = (ucxx.Feature.TAG, ucxx.Feature.WAKEUP)
        self._context = ucxx.UCXContext({"NET_DEVICES": devices}, feature_flags=features)
        self._worker: Any = ucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._descriptor: int = self._worker.epoll_file_descriptor
        self.address: bytes = self._worker.address.tobytes()
        self._peers: OrderedDict[bytes, Any] = OrderedDict()
        self._unfinished: list[tuple[Any, bytearray | Scratch]] = []
        """Requests, and the memory that UCX may use until they are done."""

    def send(self, to: bytes, data: bytearray | Scratch, size: int, tag: int) -> Any:
        """Send `size` bytes to the worker with this address; UCX holds them until it is done."""
        request = self._peer(to).tag_send(self._array(_start(data, size)), tag=self._tag(tag))
        self._unfinished.append((request, data))
        return request

    def receive(self, into: bytearray | Scratch, size: int, tag: int) -> Any:
        """Take the next message with this tag; one that is longer than `size` is an error."""
        request = self._worker.tag_recv(
            self._array(_start(into, size)), tag=self._tag(tag), tag_mask=self._all
        )
        self._unfinished.append((request, into))
        return request

    def _peer(self, address: bytes) -> Any:
        peer = self._peers.get(address)
        if peer is not None and peer.alive:
            self._peers.move_to_end(address)
            return peer
        made = self._worker.create_endpoint_from_worker_address(
            self._make_address(address), endpoint_error_handling=True
        )
        self._peers[address] = made
        return made

    def forget(self, address: bytes) -> None:
        """Break off with this worker."""
        peer = self._peers.pop(address, None)
        # One that broke must not be closed: UCXX crashes. It goes when nobody holds it.
        if peer is not None and peer.alive:
            peer.close_blocking(period=CLOSE_NANOSECONDS, max_attempts=3)

    def forget_least_used(self, keep: int) -> None:
        while len(self._peers) > keep:
            self.forget(next(iter(self._peers)))

    def progress(self) -> None:
        self._worker.progress()
        self._unfinished = [pair for pair in self._unfinished if not pair[0].completed]

    def sleep(self, seconds: float, wake: int | None = None) -> None:
        """Until UCX has something to do, `wake` can be read, or the time is over."""
        if self._worker.arm():
            watched = [self._descriptor] if wake is None else [self._descriptor, wake]
            select.select(watched, [], [], max(0.0, seconds))

    def close(self) -> None:
        if self._worker is None:
            return
        with contextlib.suppress(Exception):
            for address in list(self._peers):
                self.forget(address)
            self._worker.cancel_inflight_requests()
            self._worker.progress()
        self._peers.clear()
        held = [memory for _, memory in self._unfinished]
        self._unfinished.clear()
        self._worker = self._context = None
        held.clear()  # only now does nobody use it any more


def _start(memory: bytearray | Scratch, size: int) -> memoryview:
    whole = memory.memory if isinstance(memory, Scratch) else memoryview(memory)
    return whole[:size]


class UcxTransport(Transport):
    """Serves exports through a worker of UCX, and reads those of others."""

    name = "ucx"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        sealed: bool = False,
        config: UcxConfig | None = None,
        silence: float = 2.0,
    ) -> None:
        """`host` is where to listen, and from where to read; `sealed`: there is a secret.

        `silence`: seconds without a step after which a source counts as silent. Takes the
        time that trying the library takes: a second.
        """
        self.config = config or UcxConfig()
        self.silence = silence
        self._sealed = sealed
        self._devices = devices_of(host) or ""
        self._unavailable = self._why_not(host)
        self._exports = Exports()
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._idle: list[Worker] = []
        self._closed = False

    def _why_not(self, host: str) -> str | None:
        if installed(("ucxx",)) is None:
            return "UCXX is not installed: pip install 'tensorhub-p2p[ucx]'"
        if not self._devices:
            return f"no network interface has the address {host}"
        return try_apart("ucxx", _TRY.format(devices=self._devices), TRY_SECONDS)

    def unavailable(self) -> str | None:
        return self._unavailable

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        with self._lock:
            if self._server is None:
                self._server = _Server(Worker(self._devices), self._exports, self.config)
        export = self._exports.add(region, allowed)
        return _encode(_Endpoint(self._server.address, export, self._sealed))

    def withdraw(self, endpoint: bytes) -> None:
        self._exports.revoke(_decode(endpoint).export)

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self._exports.drain(_decode(endpoint).export, deadline)

    def reachable(self, endpoint: bytes) -> str | None:
        if self._unavailable is not None:
            return self._unavailable
        try:
            sealed = _decode(endpoint).sealed
        except msgspec.DecodeError as error:
            return f"its endpoint can't be read: {error}"
        if sealed != self._sealed:
            return "only one of the two has a cluster secret"
        return None

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        reason = self.reachable(endpoint)
        if reason is not None:
            raise CannotReach(f"ucx: {reason}")
        try:
            worker = self._borrow()
        except Exception as error:
            raise CannotReach(f"ucx: no worker can be made: {error!r}") from error
        reader = UcxReader(self, worker, _decode(endpoint))
        try:
            reader.open(deadline)
        except BaseException:
            reader.close()
            raise
        return reader

    def _borrow(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Worker(self._devices)

    def give_back(self, worker: Worker) -> None:
        worker.forget_least_used(8)
        with self._lock:
            keep = not self._closed and len(self._idle) < 4
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if self._server is not None:
            self._server.close()
        for worker in idle:
            worker.close()


# --- the puller's end --------------------------------------------------------------------


class UcxReader(Reader):
    """One stream from one holder."""

    def __init__(self, transport: UcxTransport, worker: Worker, endpoint: _Endpoint) -> None:
        self._transport = transport
        self._worker: Worker | None = worker
        self._endpoint = endpoint
        self._name = "ucx: the source"
        self._staging: list[Scratch] = []
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False

    def open(self, deadline: float) -> None:
        """See whether the holder serves this export."""
        try:
            with self._using() as worker:
                self._ask(worker, 0, 0, deadline)
        except SourceGone as error:
            raise CannotReach(str(error)) from error

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        with self._using() as worker:
            tag = self._ask(worker, start, length, deadline)
            self._staging = self._staging or [Scratch(STEP_BYTES) for _ in range(AHEAD)]
            free, coming = list(self._staging), []
            asked, end = start, start + length
            while start < end:
                while free and asked < end:
                    size = min(STEP_BYTES, end - asked)
                    staging = free.pop()
                    coming.append((worker.receive(staging, size, tag), staging, size))
                    asked += size
                request, staging, size = coming.pop(0)
                self._await(worker, request, deadline)
                hasher.update(staging.memory[:size])
                staging.scatter(into.pieces(start, size))
                free.append(staging)
                start += size

    def _ask(self, worker: Worker, start: int, length: int, deadline: float) -> int:
        """Send a request and take the header of its answer; returns the tag of its bytes."""
        tag = secrets.randbits(63) | 1 << 63
        export, address = self._endpoint.export, worker.address
        asked = _REQUEST.pack(_MAGIC, tag, export, start, length, len(address)) + address
        header = bytearray(_HEADER.size)
        answer = worker.receive(header, len(header), tag)
        sent = worker.send(self._endpoint.worker, bytearray(asked), len(asked), _REQUEST_TAG)
        self._await(worker, sent, deadline)
        self._await(worker, answer, deadline)
        magic, status, due = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise CannotReach(f"{self._name} is something else: it answers {bytes(header[:4])!r}")
        if status == _FULL:
            raise CannotReach(f"{self._name} serves as many readers as it may")
        if status != _SERVED:
            raise SourceWithdrew(f"{self._name} doesn't serve this (any more): status {status}")
        if due != length:
            raise SourceGone(f"{self._name} offers {due} bytes where {length} were asked for")
        return tag

    def _await(self, worker: Worker, request: Any, deadline: float) -> None:
        silent_at = min(deadline, time.monotonic() + self._transport.silence)
        while True:
            worker.progress()
            if request.completed:
                request.check_error()
                return
            if self._closed:
                raise SourceGone(f"{self._name}: the reader was closed")
            left = silent_at - time.monotonic()
            if left <= 0:
                raise SourceSilent(f"{self._name} sent nothing in time")
            worker.sleep(min(left, LOOK_SECONDS))

    @contextlib.contextmanager
    def _using(self) -> Iterator[Worker]:
        """Own the worker, and say what its errors mean. After a failure it isn't used again."""
        with self._lock:
            if self._closed or self._worker is None:
                raise SourceGone(f"{self._name}: the reader was closed")
            self._busy = True
        sound = False
        try:
            yield self._worker
            sound = True
        except SourceWithdrew:
            sound = True
            raise
        except (ReadFailed, IndexError):
            raise
        except Exception as error:  # UCXX's kinds are only known once it is loaded
            raise SourceGone(f"{self._name} broke the connection: {error!r}") from error
        finally:
            self._done(sound)

    def _done(self, sound: bool) -> None:
        with self._lock:
            self._busy = False
            worker = self._worker
            if not sound:
                self._worker = None
            elif self._closed:
                self._part()
        if not sound and worker is not None:
            worker.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if not self._busy:
                self._part()

    def _part(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._transport.give_back(worker)


# --- the holder's end --------------------------------------------------------------------

_Serving = Generator[Any, None, None]


class _Session:
    """One request that is being served: what it waits for, and until when."""

    def __init__(self, reader: bytes) -> None:
        self.reader = reader
        self.steps: _Serving | None = None
        self.request: Any = None
        self.deadline = 0.0
        self.cut = False


class _Server:
    """The thread that serves."""

    def __init__(self, worker: Worker, exports: Exports, config: UcxConfig) -> None:
        self.address = worker.address
        self._worker = worker
        self._exports = exports
        self._config = config
        self._sessions: list[_Session] = []
        self._inbox: list[tuple[Any, bytearray]] = []
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tensorhub_p2p-ucx", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._rouse()
        self._thread.join()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closed:
                self._worker.progress()
                if not (self._take() | self._advance()):
                    self._worker.sleep(self._patience(), self._woken.fileno())
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
        except Exception:  # noqa: BLE001  the thread's own end
            _log.exception("serving through ucx ended; other transports go on")
        finally:
            for session in self._sessions:
                self._end(session)
            self._worker.close()
            self._wake.close()
            self._woken.close()

    def _patience(self) -> float:
        now = time.monotonic()
        return min([1.0, *(session.deadline - now for session in self._sessions)])

    def _take(self) -> bool:
        """Take in requests; whether there were any."""
        while len(self._inbox) < min(8, self._config.max_waiting):
            buffer = bytearray(_REQUEST.size + MAX_ADDRESS)
            taking = self._worker.receive(buffer, len(buffer), _REQUEST_TAG)
            self._inbox.append((taking, buffer))
        taken = [pair for pair in self._inbox if pair[0].completed]
        self._inbox = [pair for pair in self._inbox if not pair[0].completed]
        for request, buffer in taken:
            try:
                request.check_error()
                self._begin(buffer)
            except Exception as error:  # noqa: BLE001  whatever came in: the others are served
                _log.debug("a request through ucx was dropped: %r", error)
        return bool(taken)

    def _begin(self, buffer: bytearray) -> None:
        magic, tag, export, start, length, size = _REQUEST.unpack_from(buffer)
        if magic != _MAGIC or size > MAX_ADDRESS or not tag >> 63:
            raise ValueError(f"this is no request: {bytes(buffer[:4])!r}")
        session = _Session(bytes(buffer[_REQUEST.size : _REQUEST.size + size]))
        full = len(self._sessions) >= self._config.max_readers
        session.steps = (
            self._refuse(session, tag, _FULL)
            if full
            else self._serve(session, tag, export, start, length)
        )
        self._sessions.append(session)
        self._resume(session)

    def _advance(self) -> bool:
        """Go on with every session whose step is done; whether there were any."""
        moved = False
        for session in list(self._sessions):
            if session.cut or session.request.completed:
                self._resume(session)
                moved = True
            elif time.monotonic() > session.deadline:
                self._fail(session, "it takes nothing")
        return moved

    def _resume(self, session: _Session) -> None:
        assert session.steps is not None
        try:
            if session.cut:
                self._end(session)
                return
            if session.request is not None:
                session.request.check_error()
            session.request = next(session.steps)
            session.deadline = time.monotonic() + self._config.stall_timeout
        except StopIteration:
            self._end(session)
            self._worker.forget_least_used(self._config.max_readers)
        except Exception as error:  # noqa: BLE001  UCXX's kinds: this reader's trouble alone
            self._fail(session, repr(error))

    def _fail(self, session: _Session, why: str) -> None:
        _log.debug("a read through ucx ended: %s", why)
        self._end(session)
        with contextlib.suppress(Exception):
            self._worker.forget(session.reader)

    def _end(self, session: _Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
        if session.steps is not None:
            session.steps.close()

    def _refuse(self, session: _Session, tag: int, status: int) -> _Serving:
        header = bytearray(_HEADER.pack(_MAGIC, status, 0))
        yield self._worker.send(session.reader, header, len(header), tag)

    def _serve(
        self, session: _Session, tag: int, export: bytes, start: int, length: int
    ) -> _Serving:
        """The answer, step by step; what is yielded must be done before the next one."""

        def cut() -> None:
            session.cut = True
            self._rouse()

        try:
            with self._exports.reading(export, start, length, cut) as region:
                header = bytearray(_HEADER.pack(_MAGIC, _SERVED, length))
                before = self._worker.send(session.reader, header, len(header), tag)
                end = start + length
                staging = [Scratch(STEP_BYTES) for _ in range(min(AHEAD, -(-length // STEP_BYTES)))]
                while start < end:
                    size = min(STEP_BYTES, end - start)
                    staging.append(buffer := staging.pop(0))
                    buffer.gather(region.pieces(start, size))
                    request = self._worker.send(session.reader, buffer, size, tag)
                    yield before
                    before, start = request, start + size
                yield before
        except Refused as refused:
            yield from self._refuse(session, tag, refused.refusal)
