"""What a pull says of itself: which source gave what and why, what was refused, and the times."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

from test_engine import (
    CHUNK,
    ORIGIN,
    OWN,
    PUBLICATION,
    A,
    B,
    Scripted,
    ScriptedReader,
    World,
    name,
    same,
    transports,
    weights,
)
from test_stock import pull as pull_with
from test_stock import stock

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.explaining import explain
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Phase, PullHello
from tensorhub_p2p.protocol.pulls.sources import Source, SourceState
from tensorhub_p2p.results import Fallback, Pull, SourceReport
from tensorhub_p2p.runtime.reporting import report
from tensorhub_p2p.transfer.engine import ShardPull
from tensorhub_p2p.transfer.transports.base import CannotReach

SECONDS, REGISTERING = 10.0, 0.5


def told(done: ShardPull) -> tuple[Pull, str]:
    """The report of a pull that was run, and its words; it can be written as JSON."""
    names = {ORIGIN.peer: "the trainer", A.peer: "a", B.peer: "b", OWN.peer: "me"}
    name_of = lambda peer: names[peer]  # noqa: E731
    pull = report("m", PUBLICATION, done.outcome(), SECONDS, REGISTERING, name_of)
    assert len(json.loads(json.dumps(pull.as_json()))["sources"]) == len(pull.sources)
    return pull, explain(pull)


def of(pull: Pull, peer: PeerId) -> SourceReport:
    (found,) = [source for source in pull.sources if source.peer_id == peer]
    return found


def test_a_source_that_served_is_told_with_bytes_rate_and_transport() -> None:
    source, target = weights(1), weights(2)
    with transports("tcp") as ts:
        world = World(ts)
        server, _ = world.serve(ORIGIN, source)
        done = world.pull(target)
        done.run()
    pull, words = told(done)
    one = of(pull, ORIGIN.peer)
    assert (one.verdict, one.why) == ("chosen", "none was nearer")
    [over] = one.transports
    assert (over.transport, over.bytes) == ("tcp", pull.bytes)
    assert over.chunks == one.chunks == server.layout.num_chunks
    assert over.rate
    assert pull.transports == (over,)
    assert "the trainer" in words
    assert f"{pull.bytes / 1e6:.1f} MB in {over.chunks} chunks over tcp" in words


def test_the_three_times_add_up_and_verifying_is_a_time_of_its_own() -> None:
    with transports("tcp") as ts:
        world = World(ts)
        world.serve(ORIGIN, weights(1))
        done = world.pull(weights(2))
        done.run()
    pull, _ = told(done)
    assert pull.registering == REGISTERING
    assert pull.moving == done.outcome().moving > 0
    assert abs(pull.waiting + pull.registering + pull.moving - SECONDS) < 1e-9
    assert 0 < pull.verifying < done.outcome().reading


def test_a_fallback_in_the_middle_says_which_transport_gave_way_to_which_and_why() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted", "tcp") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        left, lock = [3], threading.Lock()

        def refuse(blob: bytes, chunk: int, reader: ScriptedReader) -> None:
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    raise CannotReach("its cable was pulled")

        scripted.script = refuse
        world = World(ts)
        world.serve(ORIGIN, source)
        done = world.pull(target)
        done.run()
    assert same(source, target)
    pull, words = told(done)
    one = of(pull, ORIGIN.peer)
    assert one.fallbacks == (Fallback("scripted", "its cable was pulled", "tcp"),)
    by_name = {over.transport: over for over in one.transports}
    assert by_name["scripted"].chunks == 3
    assert by_name["scripted"].bytes + by_name["tcp"].bytes == one.bytes == pull.bytes
    assert "scripted failed, tcp took over: its cable was pulled" in words
    assert pull.as_json()["sources"][0]["fallbacks"][0]["instead"] == "tcp"


def test_a_transport_that_the_source_does_not_offer_is_unfit_and_no_fallback() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted", "tcp") as ts:
        world = World({"tcp": ts["tcp"]})
        world.serve(ORIGIN, source)
        world.transports = ts
        done = world.pull(target)
        done.run()
    pull, words = told(done)
    one = of(pull, ORIGIN.peer)
    assert one.unfit == {"scripted": "the source doesn't offer it"}
    assert not one.fallbacks
    assert "scripted not used: the source doesn't offer it" in words


def test_a_liar_is_rejected_with_what_it_did() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        scripted = ts["scripted"]
        assert isinstance(scripted, Scripted)
        world = World(ts)
        _, [liar] = world.serve(A, source)
        world.serve(B, source)
        scripted.lies.add(liar)
        done = world.pull(target)
        done.run()
    pull, words = told(done)
    assert of(pull, B.peer).verdict == "chosen"
    assert of(pull, A.peer).verdict == "rejected"
    assert any(note.startswith("sent wrong bytes of chunk") for note in of(pull, A.peer).notes)
    assert "rejected: sent wrong bytes" in words
    assert pull.retried >= 1


def test_a_source_whose_slots_are_full_says_so() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        world = World(ts, config=PullConfig(upload_slots=1, unavailable_after=5.0))
        full, _ = world.serve(A, source)
        world.serve(B, source)
        other = PullHello("other", A.slot, PUBLICATION, full.layout.digest, ("scripted",))
        full.receive(0.0, PeerId("e" * 16), other)
        lease = full._leases.get(PeerId("e" * 16), "other")
        assert lease is not None
        lease.seen = float("inf")
        done = world.pull(target)
        done.run()
    assert same(source, target)
    pull, words = told(done)
    one = of(pull, A.peer)
    assert (one.verdict, one.why) == ("rejected", "its upload slots are full")
    assert "rejected: its upload slots are full" in words


def test_that_a_source_was_full_at_first_stays_in_its_notes() -> None:
    source = Source(A, 0, Phase.READY, PUBLICATION, listed=True)
    source.enter(1.0, SourceState.WAITING)
    source.enter(2.0, SourceState.OPEN)
    assert source.facts().notes == ("its upload slots are full",)


def test_sources_that_were_not_asked_are_told_too() -> None:
    source, target = weights(1), weights(2)
    far = name("d", "rd")
    with transports("scripted") as ts:
        world = World(ts, config=PullConfig(max_sources=1))
        world.serve(A, source)
        world.serve(B, source)
        world.serve(far, source)
        done = world.pull(target)
        done._locate = {A.peer: 0, B.peer: 0, far.peer: 2}.__getitem__
        done.run()
    facts = {s.facts.source: replace(s.facts) for s in done.outcome().sources}
    assert set(facts) == {A, B, far}
    names = {A.peer: "a", B.peer: "b", far.peer: "d"}
    pull = report("m", PUBLICATION, done.outcome(), SECONDS, REGISTERING, names.__getitem__)
    whys = sorted(source.why for source in pull.sources if source.verdict == "not asked")
    assert whys == ["nearer ones were enough", "others as near were enough"]
    assert "not asked: nearer ones were enough (same zone; not asked)" in explain(pull)


def test_a_source_that_had_not_answered_when_all_was_there_was_not_needed() -> None:
    source, target = weights(1), weights(2)
    with transports("scripted") as ts:
        world = World(ts, config=PullConfig())
        world.serve(A, source)
        world.serve(B, source)
        world.deaf.add(A)
        done = world.pull(target)
        done.run()
    pull, words = told(done)
    assert of(pull, A.peer).verdict == "not needed"
    assert "not needed: others brought all of it first" in words
    assert "asked, no answer yet" in words


def test_what_was_prefetched_is_told_apart_from_what_crossed_a_link() -> None:
    source, target = weights(1), weights(2)
    at_hand, _ = stock(source, [0, 1])
    with transports("scripted") as ts:
        world = World(ts)
        world.serve(ORIGIN, source)
        done = pull_with(world, target, at_hand)
        done.run()
    pull, words = told(done)
    assert pull.prefetched == 2 * CHUNK
    assert pull.over_links == pull.bytes - pull.prefetched
    mine = of(pull, OWN.peer)
    assert (mine.locality, mine.transport, mine.why) == ("memory", "memory", "it was prefetched")
    assert f"{2 * CHUNK / 1e6:.1f} MB were prefetched, and copied" in words
    data = pull.as_json()
    assert {over["transport"]: over["bytes"] for over in data["transports"]} == {
        "memory": pull.prefetched,
        "scripted": pull.over_links,
    }
