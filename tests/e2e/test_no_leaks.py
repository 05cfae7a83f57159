"""After many rounds there are as many threads, descriptors and bytes as after a few."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from steps import MIB, blank, fill, wrong

import tensorhub_p2p as th

WARM_UP = 5
ROUNDS = 50


def descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            pass  # the listing's own
    return sorted(link.split(":")[0] for link in found)


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if "tensorhub" in t.name)


def resident() -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def exports(handle: th.ShardHandle, transport: str) -> int:
    """How often the handle's memory is open to others."""
    table: Any = handle._driver.transports[transport]
    table = table._exports
    return len(table if transport == "cma" else table._exports)


def settles(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Threads and connections end by themselves, soon after what they served."""
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds(), (threads(), descriptors())


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_rounds_of_publishing_and_replicating_leave_nothing_behind(
    peer: Callable[..., th.Peer], transport: str
) -> None:
    trainer = peer(transports=[transport]).open("m")
    rollout = peer(transports=[transport]).open("m")
    weights, copy = blank(3, MIB), blank(3, MIB)
    trainer.register(weights)
    rollout.register(copy)

    def rounds(first: int, count: int) -> None:
        for version in range(first, first + count):
            fill(weights, version)
            trainer.publish(version)
            rollout.replicate(version, timeout=20)
            assert not wrong(copy, version)
            trainer.unpublish()

    rounds(0, WARM_UP)
    had_threads, had_descriptors, memory = len(threads()), len(descriptors()), resident()
    rounds(WARM_UP, ROUNDS)
    assert [exports(handle, transport) for handle in (trainer, rollout)] == [0, 1]
    settles(lambda: len(threads()) <= had_threads)
    settles(lambda: len(descriptors()) <= had_descriptors)
    assert resident() - memory < 16 * MIB


def test_handles_that_come_and_go_leave_nothing_behind(peer: Callable[..., th.Peer]) -> None:
    member = peer()
    for _ in range(20):
        with member.open("m") as handle:
            handle.register(blank())
            handle.publish(1)
    assert len(member._handles) <= 1
    assert len(member._driver.node.shards) <= 1


def test_peers_that_come_and_go_leave_neither_threads_nor_ports_behind(cluster: str) -> None:
    def come_and_go() -> tuple[str, ...]:
        with th.Peer(cluster) as first, th.Peer(cluster, [first.address]) as second:
            trainer, rollout = first.open("m"), second.open("m")
            trainer.register(fill(blank(1), 1))
            rollout.register(blank(1))
            trainer.publish(1)
            rollout.replicate(1, timeout=20)
            infos = first._driver.info, second._driver.info
            return tuple(a for i in infos for a in (*i.addresses, *i.data_addresses))

    come_and_go()
    had_threads, had_descriptors, memory = threads(), descriptors(), resident()
    assert had_threads == []
    for _ in range(10):
        addresses = come_and_go()
    settles(lambda: threads() == had_threads)
    settles(lambda: len(descriptors()) <= len(had_descriptors))
    assert resident() - memory < 16 * MIB
    for address in addresses:
        host, _, port = address.rpartition(":")
        socket.create_server((host, int(port))).close()
