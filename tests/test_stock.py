"""What lies in this process's memory already: a pull copies it, and fetches only the rest."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pytest
from test_engine import (
    CHUNK,
    ORIGIN,
    OWN,
    PUBLICATION,
    A,
    Scripted,
    World,
    name,
    reader_threads,
    same,
    transports,
    weights,
)

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.errors import PeerClosed
from tensorhub_p2p.protocol.identity import Generation, PeerId, Publication
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import Message, Phase
from tensorhub_p2p.protocol.pulls.crossing import Crossing
from tensorhub_p2p.protocol.pulls.dispatch import Dispatch
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.pages import LayoutAgreement
from tensorhub_p2p.protocol.pulls.picking import best_source
from tensorhub_p2p.protocol.pulls.pull_events import Fetch
from tensorhub_p2p.protocol.pulls.sharing import Sharing
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import AT_HAND, Source, SourceId, SourceState
from tensorhub_p2p.transfer.copying import HostMemory, copy_chunk
from tensorhub_p2p.transfer.engine import Hooks, ShardPull
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.stock import Stock

STOCK = name("f", "prefetched")
BEFORE = Publication(0, 6, "trainer", Generation(1, 1))


def stock(
    tensors: object, chunks: Iterable[int] | None = None, publication: Publication = PUBLICATION
) -> tuple[Stock, HostMemory]:
    """A copy of these tensors in host memory; of some chunks only."""
    region = Region.of(tensors)
    memory = HostMemory(region.layout)
    scratch = Scratch()
    some = range(region.layout.num_chunks) if chunks is None else chunks
    digests = {chunk: copy_chunk(region, memory, chunk, scratch) for chunk in some}
    scratch.close()
    return Stock(STOCK, publication, memory.region, digests), memory


def pull(world: World, into: object, at_hand: Stock, hooks: Hooks | None = None) -> ShardPull:
    if world.servers:
        world.inbox.put(world.holders())
    return ShardPull(
        pull="p",
        publication=PUBLICATION,
        own=OWN,
        region=Region.of(into),
        transports=world.transports,
        config=world.config,
        inbox=world.inbox,
        send=world.send,
        locate=lambda peer: 0,
        deadline=time.monotonic() + 20,
        hooks=hooks or Hooks(),
        rng=random.Random(5),
        stock=at_hand,
    )


def brought(done: ShardPull) -> dict[str, int]:
    """Chunks, by the transport that brought them."""
    return {
        transport: moved.chunks
        for source in done.outcome().sources
        for transport, moved in source.moved.items()
    }


SIZES = [(5 * CHUNK, 3, 0, 2 * CHUNK + 17), (CHUNK, *([4096] * 500), 7)]


@pytest.mark.parametrize("sizes", SIZES)
def test_all_of_it_at_hand_is_copied_with_nobody_else_there(sizes: tuple[int, ...]) -> None:
    source, target = weights(1, sizes), weights(2, sizes)
    at_hand, _ = stock(source)
    with transports("scripted") as ts:
        done = pull(World(ts), target, at_hand)
        done.run()
    assert same(source, target)
    [one] = done.outcome().sources
    assert (one.transport, one.facts.locality) == ("memory", -1)
    assert done.outcome().bytes == done.outcome().total == sum(sizes)
    assert done.outcome().hashing > 0


def test_names_decide_and_not_the_order_of_registration() -> None:
    source = weights(1)
    target = dict(reversed(weights(2).items()))
    at_hand, _ = stock(source)
    with transports("scripted") as ts:
        pull(World(ts), target, at_hand).run()
    assert same(source, target)


def test_only_what_is_missing_is_fetched() -> None:
    source, target = weights(1), weights(2)
    at_hand, _ = stock(source, [0, 3, 4])
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        server, _ = world.serve(ORIGIN, source)
        done = pull(world, target, at_hand)
        done.run()
    assert same(source, target)
    assert sorted(chunk for _, chunk in scripted.reads) == [1, 2, 5, 6, 7]
    assert brought(done) == {"memory": 3, "scripted": server.layout.num_chunks - 3}


def test_of_another_version_what_did_not_change_is_copied() -> None:
    old, target = weights(1), weights(2)
    new = {name: array.copy() for name, array in old.items()}  # type: ignore[attr-defined]
    new["w0"][3 * CHUNK + 5] ^= 1
    at_hand, _ = stock(old, publication=BEFORE)
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        world.serve(ORIGIN, new)
        done = pull(world, target, at_hand)
        done.run()
    assert same(new, target)
    assert [chunk for _, chunk in scripted.reads] == [3]


def test_another_layout_is_of_no_use() -> None:
    source, target = weights(1), weights(2)
    at_hand, _ = stock(weights(1, (8 * CHUNK,)), publication=BEFORE)
    with transports("scripted") as ts:
        world = World(ts)
        world.serve(ORIGIN, source)
        done = pull(world, target, at_hand)
        done.run()
    assert same(source, target)
    assert set(brought(done)) == {"scripted"}


def test_memory_that_was_written_into_is_noticed_and_fetched_instead() -> None:
    source, target = weights(1), weights(2)
    at_hand, memory = stock(source)
    memory._mapping[2 * CHUNK] ^= 1
    with transports("scripted") as ts:
        world = World(ts)
        world.serve(A, source)
        done = pull(world, target, at_hand)
        done.run()
    assert same(source, target)
    assert brought(done)["scripted"] >= 1


@pytest.mark.parametrize("fast", [1.0, 1e12])
def test_what_is_at_hand_is_left_to_no_link_however_fast(fast: float) -> None:
    def source(id: SourceId, locality: int, have: int, rate: float) -> Source:
        found = Source(id, locality, Phase.READY, PUBLICATION, listed=True)
        found.have, found.rate = have, rate
        return found

    at_hand = source(STOCK, AT_HAND, 0b0011, 1e6)
    sources = [at_hand, source(ORIGIN, 0, 0b1111, fast)]
    rng = random.Random(1)
    assert best_source(sources, 0b0011, 0, 2, 4, rng) == (at_hand, 0b0011)
    at_hand.in_flight = {7: 0.0, 8: 0.0}
    choice = best_source(sources, 0b1111, 0, 4, 2, rng)
    assert choice is not None
    assert (choice[0].id, choice[1]) == (ORIGIN, 0b1100)


def test_what_is_at_hand_is_not_taken_from_a_source_that_many_share_either() -> None:
    class Shares(Sharing):
        def __init__(self) -> None:
            pass

        def withheld(self, now: float) -> list[int]:
            return [0b1000]

        def next_wakeup(self) -> float | None:
            return None

    outbox, agreement = Outbox(), LayoutAgreement(None)
    sources, ledger = SourceTable(OWN, PUBLICATION, 8), Ledger(PUBLICATION, agreement, outbox)
    ledger.manifest = Manifest(4)
    for chunk in range(4):
        ledger.manifest.put(chunk, bytes(16))
    for id, locality, have in ((STOCK, AT_HAND, 0b0011), (ORIGIN, 2, 0b1111)):
        source = sources.remember(id, locality, Phase.READY, PUBLICATION)
        assert source is not None
        source.state, source.have, source.spring = SourceState.OPEN, have, id == ORIGIN
    config, rng = PullConfig(), random.Random(1)
    crossing = Crossing(OWN, PUBLICATION, sources, ledger, config)
    dispatch = Dispatch(sources, ledger, crossing, config, rng, outbox, Shares())
    dispatch.hand_out(0.0)
    fetched = {(each.source, each.chunk) for each in outbox.drain() if isinstance(each, Fetch)}
    assert fetched == {(STOCK, 0), (STOCK, 1), (ORIGIN, 2)}


def test_a_pull_whose_goodbye_cannot_be_said_fences_the_tensors_all_the_same() -> None:
    source, target = weights(1), weights(2)

    class Closes(Hooks):
        def held(self, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
            world.closed = True  # type: ignore[attr-defined]
            world.inbox.put(None)

    class Closing(World):
        closed = False

        def send(self, to: PeerId, message: Message) -> None:
            if self.closed:
                raise PeerClosed("this peer is closed")
            super().send(to, message)

    with transports("scripted") as ts:
        world = Closing(ts)
        world.serve(ORIGIN, source)
        with pytest.raises(PeerClosed):
            world.pull(target, Closes()).run()
        for thread in reader_threads():
            thread.join(5)
        assert not reader_threads()
