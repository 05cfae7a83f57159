"""A spawned process that exports known bytes and does as it is told; for transport tests."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.credentials import Credentials
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.transports import nixl, ucx
from tensorhub_p2p.transfer.transports.base import Transport
from tensorhub_p2p.transfer.transports.cma import CmaTransport
from tensorhub_p2p.transfer.transports.nixl import NixlTransport
from tensorhub_p2p.transfer.transports.tcp import TcpTransport
from tensorhub_p2p.transfer.transports.ucx import UcxTransport


def arrays(sizes: list[int], seed: int) -> dict[str, Any]:
    """Random bytes: the same in every process for the same arguments."""
    draw = numpy.random.default_rng(seed)
    return {f"t{i}": draw.integers(0, 256, n, dtype=numpy.uint8) for i, n in enumerate(sizes)}


def blank(sizes: list[int]) -> dict[str, Any]:
    return {f"t{i}": numpy.zeros(n, dtype=numpy.uint8) for i, n in enumerate(sizes)}


def blank_in_one_piece(sizes: list[int]) -> dict[str, Any]:
    """The same, but all of them adjoin in memory."""
    whole = numpy.zeros(sum(sizes), dtype=numpy.uint8)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return {f"t{i}": whole[e - n : e] for i, (n, e) in enumerate(zip(sizes, ends, strict=True))}


def unmap(region: Region) -> None:
    """Take the pages away below the tensors."""
    iov = region.pieces(0, region.layout.num_bytes)
    for address, length in zip(iov[0::2], iov[1::2], strict=True):
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = (address + length - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if pages > 0:
            ctypes.CDLL(None).munmap(ctypes.c_void_p(first), ctypes.c_size_t(pages))


def make_transport(name: str, secret: str | None = None) -> Transport:
    if name == "cma":
        return CmaTransport()
    if name == "nixl":
        return NixlTransport()
    if name == "ucx":
        return UcxTransport()
    return TcpTransport(credentials=Credentials.from_secret(secret) if secret else None)


def _hold(pipe: Connection, name: str, sizes: list[int], seed: int, secret: str | None) -> None:
    # The test's own process has tried the libraries already, which takes a second.
    nixl.trouble = lambda _module, rdma: None
    ucx.trouble = lambda _devices: None
    transport = make_transport(name, secret)
    region = Region.of(arrays(sizes, seed))
    endpoint = transport.export(region, ChunkSet.full(region.layout.num_chunks))
    pipe.send(endpoint)
    while True:
        match pipe.recv():
            case "withdraw":
                transport.withdraw(endpoint)
            case ("drain", seconds):
                transport.drain(endpoint, time.monotonic() + seconds)
            case "export":
                endpoint = transport.export(region, ChunkSet.full(region.layout.num_chunks))
                pipe.send(endpoint)
            case "unmap":  # as a user may, by mistake
                unmap(region)
            case "close":
                transport.close()
            case "unmap the middle":
                at = region.pieces(region.layout.num_bytes // 2, 1)[0]
                munmap = ctypes.CDLL(None).munmap
                assert not munmap(ctypes.c_void_p(at & -mmap.PAGESIZE), ctypes.c_size_t(1))
            case ("hold the GIL", seconds):
                pipe.send("holding")
                ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a PyDLL keeps the GIL
            case "end":
                return
        pipe.send("done")


class Holder:
    """The process, as a context manager; `endpoint` is what it exports."""

    def __init__(
        self, name: str, sizes: list[int], seed: int = 1, secret: str | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_hold, args=(theirs, name, sizes, seed, secret), daemon=True
        )
        self._process.start()
        theirs.close()
        self.endpoint: bytes = self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(30), "the holder process doesn't answer"
        return self._pipe.recv()

    def tell(self, command: object) -> None:
        self._pipe.send(command)
        self._answer()

    def export_again(self) -> bytes:
        self._pipe.send("export")
        self.endpoint = self._answer()
        self._answer()
        return self.endpoint

    def has_answered(self) -> bool:
        return self._pipe.poll()

    def signal(self, number: int) -> None:
        pid = self._process.pid
        assert pid
        os.kill(pid, number)
        while number == signal.SIGSTOP and not _stands_still(pid):
            time.sleep(0.001)  # its threads stop one by one

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()


def _stands_still(pid: int) -> bool:
    stats = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
