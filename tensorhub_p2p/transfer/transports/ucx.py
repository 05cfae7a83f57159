"""Reading through UCX messages (UCXX): RDMA where there is a device, else shared memory or TCP.

Rule of this file. The transport itself: what it exports, and the workers that read. What goes
over the wire is in ucx_wire.py, the holder's end in ucx_server.py, the puller's in
ucx_reader.py, and the library in ucx_worker.py.

Theory. UCX touches no tensor: both ends move bytes through staging buffers. So a read that was
given up, or an export that was drained, is over whatever UCX still has in flight.

What it is not. Nothing is encrypted, and whoever reaches the worker's port speaks to UCX
itself. The port is opened on the interface of the host that the data port has, no other.
"""

from __future__ import annotations

import threading

import msgspec

from tensorhub_p2p.config import UcxConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.exports import Exports
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.transports.base import CannotReach, Reader, Transport
from tensorhub_p2p.transfer.transports.borrowed import Borrowed
from tensorhub_p2p.transfer.transports.ucx_devices import devices_of
from tensorhub_p2p.transfer.transports.ucx_reader import UcxReader
from tensorhub_p2p.transfer.transports.ucx_server import Server
from tensorhub_p2p.transfer.transports.ucx_wire import Endpoint, decode, encode
from tensorhub_p2p.transfer.transports.ucx_worker import Worker, library, trouble


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
        self._server: Server | None = None
        self._idle: list[Worker] = []
        self._closed = False

    def _why_not(self, host: str) -> str | None:
        if library() is None:
            return "UCXX is not installed: pip install ucxx-cu12"
        if not self._devices:
            return f"no network interface has the address {host}"
        return trouble(self._devices)

    def unavailable(self) -> str | None:
        return self._unavailable

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        with self._lock:
            if self._server is None:
                self._server = Server(Worker(self._devices), self._exports, self.config)
        export = self._exports.add(region, allowed)
        return encode(Endpoint(self._server.address, export, self._sealed))

    def withdraw(self, endpoint: bytes) -> None:
        self._exports.revoke(decode(endpoint).export)

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self._exports.drain(decode(endpoint).export, deadline)

    def reachable(self, endpoint: bytes) -> str | None:
        if self._unavailable is not None:
            return self._unavailable
        try:
            sealed = decode(endpoint).sealed
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
        borrowed = Borrowed(worker, "ucx: the source", self._give_back)
        reader = UcxReader(borrowed, decode(endpoint), self.silence)
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

    def _give_back(self, worker: Worker) -> None:
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
