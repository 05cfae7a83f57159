"""The bare figures: what moving the same bytes costs with nothing around it.

Rule of this file. Nothing of the library is used here. No verification, no
protocol: one system call on one thread for memory of the same machine, two plain socket
streams for TCP; with digests where it is said. Memory is given as (address, length).
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import xxhash

STREAMS = 2
HASH_STEP = 512 << 10
"""Little enough to be hashed while it is in the cache."""
_MAX_CALL = 1 << 30  # the kernel moves a little less than 2 GiB in one call
_libc = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def allow_reading() -> None:
    """Let processes of the same user read this one's memory where Yama restricts that."""
    pr_set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
    _libc.prctl(pr_set_ptracer, anyone, 0, 0, 0)


def read_memory(pid: int, remote: int, local: int, length: int, hashed: bool = False) -> float:
    """One thread's process_vm_readv from another process; returns the seconds.

    `hashed`: and take an xxh3 digest, step by step.
    """
    began = time.perf_counter()
    memory, digest, done = _memory(local, length), xxhash.xxh3_128(), 0
    while done < length:
        step = min(HASH_STEP if hashed else _MAX_CALL, length - done)
        there, here = _Vector(remote + done, step), _Vector(local + done, step)
        moved = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            raise OSError(ctypes.get_errno(), "process_vm_readv failed")
        if hashed:
            digest.update(memory[done : done + moved])
        done += moved
    return time.perf_counter() - began


def read_with_threads(
    pid: int,
    remote: int,
    local: int,
    length: int,
    threads: int,
    read: Callable[[int, int, int, int], object],
) -> float:
    """The same, or what else reads, with several threads, each for its part; the seconds."""
    cuts = [length * i // threads for i in range(threads + 1)]
    workers = [
        threading.Thread(target=read, args=(pid, remote + a, local + a, b - a))
        for a, b in pairwise(cuts)
    ]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def collapse(address: int, length: int) -> None:
    """Turn the small pages there into huge ones, where the kernel can (Linux 6.1)."""
    block, advise, collapse_now = 2 << 20, 14, 25
    start, end = -(-address // block) * block, (address + length) // block * block
    for advice in (advise, collapse_now):
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _parts(address: int, length: int) -> list[memoryview]:
    """The memory, cut into one part for each stream."""
    cuts = [length * i // STREAMS for i in range(STREAMS + 1)]
    return [_memory(address + a, b - a) for a, b in pairwise(cuts)]


class StreamSource:
    """Sends its memory over `STREAMS` connections each time it is asked to.

    `tls` wraps them in TLS, by Python's ssl.
    """

    def __init__(
        self,
        address: int,
        length: int,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._parts = _parts(address, length)
        self._tls = tls
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for part in self._parts:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            threading.Thread(target=self._serve, args=(connection, part), daemon=True).start()

    def _serve(self, connection: socket.socket, part: memoryview) -> None:
        while connection.recv(1):
            connection.sendall(part)


class StreamTarget:
    """Receives into its memory, over connections that are made beforehand."""

    def __init__(
        self,
        port: int,
        address: int,
        length: int,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._parts = _parts(address, length)
        self._connections = []
        for _ in self._parts:
            connection = socket.create_connection((host, port))
            self._connections.append(tls.wrap_socket(connection) if tls else connection)

    def receive(self, hashed: bool = False) -> float:
        """All of it, once; returns the seconds. `hashed`: and take xxh3 digests, step by step."""
        fill = self._fill_and_hash if hashed else self._fill
        began = time.perf_counter()
        threads = [
            threading.Thread(target=fill, args=pair)
            for pair in zip(self._connections, self._parts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    @staticmethod
    def _fill(connection: socket.socket, part: memoryview) -> None:
        connection.sendall(b"\0")
        while part:
            part = part[connection.recv_into(part) :]

    @staticmethod
    def _fill_and_hash(connection: socket.socket, part: memoryview) -> None:
        connection.sendall(b"\0")
        digest = xxhash.xxh3_128()
        while part:
            step, part = part[:HASH_STEP], part[HASH_STEP:]
            left = step
            while left:
                left = left[connection.recv_into(left, len(left), socket.MSG_WAITALL) :]
            digest.update(step)


class Echo:
    """Sends back what comes, on a thread of its own: the other end of a bare round trip."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        while data := connection.recv(4096):
            connection.sendall(data)


def round_trip(connection: socket.socket, message: bytes) -> float:
    """Seconds until a small message has come back."""
    began = time.perf_counter()
    connection.sendall(message)
    if connection.recv(4096) != message:
        raise OSError("something else came back")
    return time.perf_counter() - began
