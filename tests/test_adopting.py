"""Adoptions: a shard pulled into host memory with no handle, between real peers.

What the node decides is left out: the tests say what the node would, and hear what it hears.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import numpy
import pytest

import tensorhub_p2p as th
from tensorhub_p2p.protocol.identity import Group, Publication, Slot
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES
from tensorhub_p2p.protocol.shards.verbs import AdoptWanted, KeepFreed
from tensorhub_p2p.runtime import adopting
from tensorhub_p2p.transfer.digest import digest
from tensorhub_p2p.transfer.engine import ShardPull
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch

CHUNK = MIN_CHUNK_BYTES
PATIENCE = 20.0
KEEP = Slot(Group("m", "kept/b/1"), 0)


class Two:
    """A trainer that published version 1, and a peer that may adopt it."""

    def __init__(self, leaver: th.Peer, adopter: th.Peer, patch: pytest.MonkeyPatch) -> None:
        self.adopter = adopter
        self.driver = adopter._driver
        self.news: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        for name in ("offloaded", "offload_failed", "freed"):
            patch.setattr(self.driver.node, name, self.note(name))
        self.tensor = numpy.random.default_rng(1).integers(0, 255, 3 * CHUNK + 1, dtype=numpy.uint8)
        self.handle = leaver.open("m", replica="trainer")
        self.handle.register({"w": self.tensor})
        self.handle.publish(1)

    @property
    def publication(self) -> Publication:
        published = self.handle._tenure.holds
        assert published is not None
        return published

    def note(self, name: str) -> Callable[..., None]:
        return lambda _now, *args: self.news.put((name, *args))

    def next(self) -> tuple[Any, ...]:
        return self.news.get(timeout=PATIENCE)

    def tell(self, event: object) -> None:
        self.driver.ask(lambda _now: self.driver._on_event(event))  # type: ignore[arg-type]

    def adopt(self) -> None:
        size = self.tensor.nbytes
        self.tell(AdoptWanted(KEEP, self.publication, 1, size))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    with (
        th.Peer(cluster="adopting") as leaver,
        th.Peer(cluster="adopting", seeds=[leaver.address]) as adopter,
        monkeypatch.context() as patch,
    ):
        yield Two(leaver, adopter, patch)


class Halt:
    """Pulls stop before they begin, until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        plain = ShardPull.run

        def run(pull: ShardPull) -> None:
            self.reached.set()
            assert self.go.wait(PATIENCE)
            plain(pull)

        patch.setattr(ShardPull, "run", run)


def test_what_is_adopted_has_the_publishers_bytes_and_can_be_read(two: Two) -> None:
    two.adopt()
    what, keep, layout, endpoints, digests = two.next()
    assert (what, keep) == ("offloaded", KEEP)
    published, scratch = Region.of({"w": two.tensor}), Scratch()
    assert layout == published.layout
    assert {e.transport for e in endpoints} == {"cma", "tcp"}
    assert list(digests) == [digest(published, c, scratch) for c in range(layout.num_chunks)]
    memory, _ = two.driver.offloads._kept[KEEP]
    assert [digest(memory.region, c, scratch) for c in range(layout.num_chunks)] == list(digests)
    scratch.close()
    two.tell(KeepFreed(KEEP))
    assert two.next() == ("freed", KEEP)
    assert not two.driver.offloads._kept


def test_what_nobody_has_any_more_is_a_failure_with_its_reason(two: Two) -> None:
    gone = two.publication
    two.handle.unpublish()
    two.tell(AdoptWanted(KEEP, gone, 1, two.tensor.nbytes))
    what, keep, why = two.next()
    assert (what, keep) == ("offload_failed", KEEP)
    assert "VersionUnavailable" in why


def test_memory_that_is_not_there_is_a_failure_with_its_reason(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(layout: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(adopting, "HostMemory", none_left)
    two.adopt()
    assert two.next() == ("offload_failed", KEEP, "MemoryError: none left")


def test_one_that_is_taken_back_ends_with_its_memory_freed(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt = Halt(monkeypatch)
    two.adopt()
    assert halt.reached.wait(PATIENCE)
    two.tell(KeepFreed(KEEP))
    halt.go.set()
    assert two.next() == ("freed", KEEP)
    with pytest.raises(Empty):
        two.news.get(timeout=0)
    assert not two.driver.offloads._kept


def test_closing_the_peer_ends_adoptions_under_way(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    halt = Halt(monkeypatch)
    two.adopt()
    assert halt.reached.wait(PATIENCE)
    closing = threading.Thread(target=two.adopter.close)
    closing.start()
    halt.go.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert not any(t.name == "tensorhub_p2p-adopt" for t in threading.enumerate())
