"""Peers in this process, workers in others; each test has a cluster of its own."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from workers import Pool, Worker

import tensorhub_p2p as th


@pytest.fixture
def cluster() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def peer(cluster: str) -> Iterator[Callable[..., th.Peer]]:
    """Starts peers in this process, each joined to the first one unless told otherwise."""
    peers: list[th.Peer] = []

    def start(**options: Any) -> th.Peer:
        if peers:
            options.setdefault("seeds", [peers[0].address])
        options.setdefault("cluster", cluster)
        options.setdefault("name", f"peer-{len(peers)}")
        peers.append(th.Peer(**options))
        return peers[-1]

    yield start
    faults = [fault for peer in peers for fault in peer._driver.control.faults]
    for peer in reversed(peers):
        with contextlib.suppress(th.RetentionLost):  # the last one can't hand it on
            peer.close(10)
    assert not faults


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def take(pool: Pool) -> Iterator[Callable[[int], list[Worker]]]:
    """Worker processes for this test."""
    taken: list[Worker] = []

    def take(count: int) -> list[Worker]:
        workers = pool.take(count)
        taken.extend(workers)
        return workers

    yield take
    pool.give_back(taken)
