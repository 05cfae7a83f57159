"""Tensors beyond 4 GiB, and what lies behind them: sparse memory, of which little is touched."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.digest import ChunkHasher, digest
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import Transport
from tensorhub_p2p.transfer.transports.cma import CmaTransport
from tensorhub_p2p.transfer.transports.tcp import TcpTransport

GIB = 1 << 30
SIZE = 5 * GIB + 12345
NORESERVE = 0x4000


def sparse() -> dict[str, torch.Tensor]:
    """A tensor of 5 GiB that nobody has touched yet, one of another shape, and a small one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, SIZE, flags=flags), dtype=torch.uint8)
    return {"large": memory, "window": memory[4 * GIB - 8 : 4 * GIB + 8], "after": torch.zeros(99)}


def fill(tensors: dict[str, torch.Tensor]) -> None:
    tensors["window"].copy_(torch.arange(1, 17))
    tensors["large"][-100:] = torch.arange(100)
    tensors["after"].copy_(torch.arange(99.0))


@contextmanager
def transport(name: str) -> Iterator[Transport]:
    made: Transport = CmaTransport() if name == "cma" else TcpTransport("127.0.0.1:0")
    try:
        yield made
    finally:
        made.close()


def resident() -> int:
    """Bytes of memory that this process really has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("name", ["cma", "tcp"])
def test_chunks_beyond_four_gib_arrive_where_they_belong(name: str) -> None:
    before = resident()
    theirs, mine, scratch = sparse(), sparse(), Scratch()
    fill(theirs)
    source, target = Region.of(theirs), Region.of(mine)
    layout = source.layout
    assert layout.num_bytes == SIZE + 99 * 4
    wanted = [*layout.chunks_of(4 * GIB - 1, 2), layout.num_chunks - 1]
    with transport(name) as t:
        endpoint = t.export(source, ChunkSet.full(layout.num_chunks))
        reader = t.connect(endpoint, time.monotonic() + 10)
        for chunk in wanted:
            hasher = ChunkHasher()
            start, length = layout.chunk_range(chunk)
            reader.read(start, length, target, time.monotonic() + 30, hasher)
            assert hasher.digest() == digest(source, chunk, scratch)
        reader.close()
        t.drain(endpoint, time.monotonic() + 10)
    scratch.close()
    for part in ("window", "after"):
        assert torch.equal(mine[part], theirs[part])
    assert torch.equal(mine["large"][-100:], theirs["large"][-100:])
    assert resident() - before < GIB // 4, "what nobody needs is never touched"
