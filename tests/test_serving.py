"""The source's side of pulls, on virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES, Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.manifest import Manifest, unpack
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    LayoutPage,
    LayoutRequest,
    Message,
    PullBye,
    PullGone,
    PullHello,
    PullOffer,
    PullProgress,
    PullUpdate,
)
from tensorhub_p2p.protocol.pulls.leases import LeaseState
from tensorhub_p2p.protocol.pulls.serving import (
    NOBODY,
    DigestsWanted,
    Drained,
    Sealed,
    ShardServer,
)
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots

CHUNKS = 4
LAYOUT = Layout([TensorSpec("w", "uint8", (CHUNKS * MIN_CHUNK_BYTES,), CHUNKS * MIN_CHUNK_BYTES)])
PUBLICATION = Publication(0, 7, "trainer", Generation(1, 1))
SLOT = Slot(Group("policy", "trainer"), 0)
CONFIG = PullConfig(upload_slots=2, max_waiting=3)
FOUR = PullConfig(upload_slots=4)
ENDPOINTS = (Endpoint("cma", b"c"), Endpoint("tcp", b"t"))
A, B, C, D = (PeerId(name * 16) for name in "abcd")


def digest(chunk: int) -> bytes:
    return bytes([chunk]) * 16


def server(**options: object) -> ShardServer:
    return ShardServer(SLOT, PUBLICATION, LAYOUT, ENDPOINTS, CONFIG, **options)  # type: ignore[arg-type]


def slot_of(peer: PeerId) -> Slot:
    return Slot(Group("policy", f"rollout-{peer[0]}"), 0)


def hello(peer: PeerId, have: bytes = b"", publication: Publication = PUBLICATION) -> PullHello:
    return PullHello(
        pull=f"pull-{peer[0]}",
        slot=SLOT,
        publication=publication,
        layout=LAYOUT.digest,
        transports=("tcp",),
        have=have,
        puller=slot_of(peer),
    )


def progress(peer: PeerId, have: bytes, wanted: tuple[int, ...] = (), known: int = 0) -> Message:
    return PullProgress(f"pull-{peer[0]}", SLOT, have, wanted, known)


def sends(s: ShardServer) -> list[tuple[PeerId, Message]]:
    return [(o.to, o.message) for o in s.outbox.drain() if isinstance(o, Send)]


def granted(s: ShardServer) -> dict[PeerId, bool]:
    """The last verdict that each peer was told, from what is in the outbox now."""
    return {to: m.granted for to, m in sends(s) if isinstance(m, PullOffer)}


def states(s: ShardServer) -> dict[PeerId, LeaseState]:
    return {lease.peer: lease.state for lease in s._leases}


def server_of(model: str, uploads: UploadSlots) -> ShardServer:
    slot = Slot(Group(model, "trainer"), 0)
    return ShardServer(slot, PUBLICATION, LAYOUT, ENDPOINTS, FOUR, uploads=uploads)


def test_models_that_are_pulled_from_one_peer_share_its_slots_evenly() -> None:
    uploads = UploadSlots(FOUR)
    many, few = server_of("many", uploads), server_of("few", uploads)
    peers = [PeerId(f"{letter}" * 16) for letter in "123456"]
    for now, peer in enumerate(peers):
        many.receive(float(now) / 10, peer, hello(peer))
    assert sum(granted(many).values()) == 4
    few.receive(1.0, A, hello(A))
    assert granted(few) == {A: True}

    some = ChunkSet.of(CHUNKS, [1]).to_bytes()
    many.receive(1.0, peers[1], progress(peers[1], some))
    many.tick(1.0)
    kept = [peer for peer, state in states(many).items() if state is LeaseState.GRANTED]
    assert len(kept) == 2
    assert peers[1] not in kept, "it has something to trade"
    assert sum(lease.rotating for lease in many._leases) == 1
    assert list(granted(many).values()) == [False, False]

    few.receive(1.1, A, PullBye(f"pull-{A[0]}", few.slot, True))
    many.receive(1.2, peers[5], hello(peers[5]))
    assert list(states(many).values()).count(LeaseState.GRANTED) == 4


def test_a_reader_makes_room_for_another_model_as_soon_as_anybody_says_anything() -> None:
    uploads = UploadSlots(FOUR)
    many, few = server_of("many", uploads), server_of("few", uploads)
    for peer in (A, B, C, D):
        many.receive(0.0, peer, hello(peer))
    few.receive(0.1, A, hello(A))
    many.outbox.drain()
    many.receive(0.2, A, progress(A, b""))
    assert list(granted(many).values()) == [False, False]


def test_a_model_that_nobody_pulls_any_more_takes_no_slots() -> None:
    uploads = UploadSlots(FOUR)
    many, few = server_of("many", uploads), server_of("few", uploads)
    for s in (many, few):
        s.receive(0.0, A, hello(A))
    assert uploads.each() == 2
    few.tick(PullConfig().lease_seconds)  # nothing was heard of it
    assert uploads.each() == 4
    many.withdraw(5.0, "unpublished")
    many.tick(5.0 + PullConfig().lease_seconds)
    few.receive(9.0, A, hello(A))
    few.end()
    assert uploads.each() == 4
    assert not uploads._shards, "what is served no more is forgotten"


def test_an_offer_carries_what_is_held_the_known_digests_and_the_endpoints_asked_for() -> None:
    s = server()
    s.digested(0.0, 2, digest(2))
    s.receive(0.0, A, hello(A))
    [(to, offer)] = sends(s)
    assert to == A
    assert isinstance(offer, PullOffer)
    assert offer.granted
    assert offer.layout == LAYOUT.digest
    assert ChunkSet.from_bytes(CHUNKS, offer.have).is_full
    assert unpack(CHUNKS, offer.known, offer.digests) == [(2, digest(2))]
    assert offer.endpoints == (Endpoint("tcp", b"t"),)


def test_a_hello_for_another_publication_is_told_what_is_held_instead() -> None:
    s = server()
    s.receive(0.0, A, hello(A, publication=Publication(0, 6, "trainer", Generation(1, 1))))
    [(_, gone)] = sends(s)
    assert isinstance(gone, PullGone)
    assert "version 7" in gone.reason
    assert s.readers() == ()


def test_a_full_source_names_those_whom_it_serves() -> None:
    s = server()
    for peer in (A, B, C):
        s.receive(0.0, peer, hello(peer))
    offers = {to: m for to, m in sends(s) if isinstance(m, PullOffer)}
    assert [offers[peer].granted for peer in (A, B, C)] == [True, True, False]
    assert set(offers[C].others) == {(A, slot_of(A)), (B, slot_of(B))}
    assert offers[C].endpoints == ()
    assert set(s.readers()) == {A, B}


def test_a_slot_that_becomes_free_goes_to_who_waits_longest() -> None:
    s = server()
    for now, peer in enumerate((A, B, C, D)):
        s.receive(now / 10, peer, hello(peer))
    s.outbox.drain()
    s.receive(0.5, A, PullBye("pull-a", SLOT))
    assert granted(s) == {C: True}
    s.forget_peer(0.6, B)
    assert granted(s) == {D: True}


def test_one_slot_rotates_to_pullers_that_have_nothing_once_its_puller_has_something() -> None:
    s = server()
    for peer in (A, B, C):
        s.receive(0.0, peer, hello(peer))
    s.outbox.drain()
    s.receive(0.1, A, progress(A, b"\x01"))
    assert granted(s) == {}, "A sits on a regular slot and keeps it"
    s.receive(0.2, B, progress(B, b"\x02"))
    assert granted(s) == {B: False, C: True}
    s.receive(0.3, C, progress(C, b"\x04"))
    assert granted(s) == {}, "B waits, but it has something already"


def pass_time(s: ShardServer, until: float) -> None:
    """Tick whenever it wants to."""
    for due in iter(s.next_wakeup, None):
        if due >= until:
            break
        s.tick(due)


def test_a_lease_lapses_without_progress_and_not_with_it() -> None:
    s = server()
    s.receive(0.0, A, hello(A))
    s.receive(0.0, B, hello(B))
    pass_time(s, 1.5)
    s.receive(1.5, A, progress(A, b""))
    s.tick(1.5)
    s.outbox.drain()
    assert s.next_wakeup() == pytest.approx(2.0)
    s.tick(2.0)
    assert s.readers() == (A,)
    assert [to for to, message in sends(s) if isinstance(message, PullGone)] == [B]


def test_what_pullers_say_during_a_pause_of_our_own_keeps_their_leases() -> None:
    s = server()
    for each in (A, B):
        s.receive(0.0, each, hello(each))
    s.tick(0.0)
    s.outbox.drain()
    s.receive(30.0, A, progress(A, b""))  # B's is still to be read
    s.tick(30.0)
    assert set(s.readers()) == {A, B}
    s.receive(30.0, B, progress(B, b""))
    for now in (30.2, 30.4, 30.6):  # and no longer than that
        s.tick(now)
    s.receive(30.7, A, progress(A, b""))
    pass_time(s, 32.5)
    assert s.readers() == (A,)


@pytest.mark.parametrize("every", [0.1, 0.3, 0.6, 1.0])
def test_slow_news_of_our_own_keeps_no_silent_puller(every: float) -> None:
    s = server(have=ChunkSet(LAYOUT.num_chunks))
    s.receive(0.0, A, hello(A))
    for chunk in range(LAYOUT.num_chunks):
        if every * (chunk + 1) >= 2.0:
            break
        pass_time(s, every * (chunk + 1))
        s.verified(every * (chunk + 1), chunk, bytes(16))
    pass_time(s, 2.5)
    assert s.readers() == ()


def test_progress_without_a_lease_is_told_that_there_is_none() -> None:
    s = server()
    s.receive(0.0, A, progress(A, b""))
    [(_, gone)] = sends(s)
    assert isinstance(gone, PullGone)


def test_updates_carry_only_what_is_new_and_at_most_one_an_interval() -> None:
    s = server(have=ChunkSet(CHUNKS), origin=False)
    s.receive(0.0, A, hello(A))
    s.outbox.drain()
    s.verified(0.005, 0, digest(0))
    s.verified(0.006, 1, digest(1))
    assert sends(s) == []
    assert s.next_wakeup() == pytest.approx(CONFIG.update_interval)
    s.tick(0.02)
    [(_, update)] = sends(s)
    assert isinstance(update, PullUpdate)
    assert list(ChunkSet.from_bytes(CHUNKS, update.have)) == [0, 1]
    assert update.digests == ((0, digest(0)), (1, digest(1)))
    s.verified(0.05, 3, digest(3))
    [(_, update)] = sends(s)
    assert isinstance(update, PullUpdate)
    assert update.digests == ((3, digest(3)),)


def test_what_was_verified_together_is_told_together() -> None:
    s = server(have=ChunkSet(CHUNKS), origin=False)
    s.receive(0.0, A, hello(A))
    s.outbox.drain()
    s.verified_all(0.1, [(chunk, digest(chunk), NOBODY) for chunk in (0, 1, 3)])
    [(_, update)] = sends(s)
    assert isinstance(update, PullUpdate)
    assert list(ChunkSet.from_bytes(CHUNKS, update.have)) == [0, 1, 3]


def test_a_wanted_digest_is_asked_for_once_and_sent_the_moment_it_is_taken() -> None:
    s = server()
    s.receive(0.0, A, hello(A))
    s.outbox.drain()
    s.receive(0.001, A, progress(A, b"", wanted=(3, 1, 99)))
    s.receive(0.002, A, progress(A, b"", wanted=(3, 1)))
    assert s.outbox.drain() == [DigestsWanted(SLOT, PUBLICATION, (3, 1))]
    s.digested(0.003, 3, digest(3))
    [(_, update)] = sends(s)
    assert isinstance(update, PullUpdate)
    assert update.digests == ((3, digest(3)),)


def test_wanted_digests_that_are_taken_fast_travel_together() -> None:
    s = server()
    s.receive(0.0, A, hello(A))
    s.receive(0.0, A, progress(A, b"", wanted=(0, 1, 2, 3)))
    s.digested(0.001, 3, digest(3))
    s.outbox.drain()
    s.digested(0.002, 1, digest(1))
    s.digested(0.003, 2, digest(2))
    assert sends(s) == []
    assert s.next_wakeup() == pytest.approx(0.001 + CONFIG.news_interval)
    s.tick(0.001 + CONFIG.news_interval)
    [(_, update)] = sends(s)
    assert isinstance(update, PullUpdate)
    assert update.digests == ((1, digest(1)), (2, digest(2)))


@pytest.mark.parametrize("witness", ["progress", "bye"])
def test_sealed_needs_all_digests_taken_and_known_to_somebody_else(witness: str) -> None:
    s = server()
    s.receive(0.0, A, hello(A))
    for chunk in range(CHUNKS):
        s.digested(0.1, chunk, digest(chunk))
    assert not s.sealed
    s.outbox.drain()
    if witness == "progress":
        s.receive(0.2, A, progress(A, b"", known=CHUNKS - 1))
        assert not s.sealed
        s.receive(0.2, A, progress(A, b"", known=CHUNKS))
    else:
        s.receive(0.2, A, PullBye("pull-a", SLOT, complete=True))
    assert s.sealed
    assert s.outbox.drain() == [Sealed(SLOT, PUBLICATION)]


def test_withdrawing_sends_everybody_away_and_drains_with_the_last_goodbye() -> None:
    s = server()
    for peer in (A, B, C):
        s.receive(0.0, peer, hello(peer))
    s.outbox.drain()
    s.withdraw(1.0, "unpublished")
    assert {to for to, m in sends(s) if isinstance(m, PullGone)} == {A, B, C}
    assert set(s.readers()) == {A, B}
    s.receive(1.1, D, hello(D))
    s.receive(1.1, A, progress(A, b""))
    assert [type(m) for _, m in sends(s)] == [PullGone, PullGone]
    s.receive(1.2, A, PullBye("pull-a", SLOT))
    assert s.outbox.drain() == []
    s.receive(1.3, B, PullBye("pull-b", SLOT))
    assert s.outbox.drain() == [Drained(SLOT, PUBLICATION)]
    assert s.next_wakeup() is None


def test_withdrawing_waits_one_lease_time_at_most() -> None:
    s = server()
    s.receive(0.0, A, hello(A))
    s.withdraw(1.0, "unpublished")
    s.outbox.drain()
    assert s.next_wakeup() == pytest.approx(3.0)
    s.tick(2.9)
    assert s.outbox.drain() == []
    s.tick(3.0)
    assert s.outbox.drain() == [Drained(SLOT, PUBLICATION)]
    assert s.readers() == ()


def test_withdrawing_with_no_reader_is_drained_at_once() -> None:
    s = server()
    s.withdraw(1.0, "unpublished")
    assert s.outbox.drain() == [Drained(SLOT, PUBLICATION)]


def test_a_malformed_bitmap_is_dropped_and_counted() -> None:
    s = server()
    s.receive(0.0, A, hello(A, have=b"\x00" * 9))
    s.receive(0.0, A, hello(A, have=b"\xff"))
    assert s.dropped == 2
    assert s.outbox.drain() == []


counts = st.one_of(st.integers(0, 5), st.integers(0, 2**70))
bitmaps = st.one_of(st.sampled_from([b"", b"\x0f", b"\x01"]), st.binary(max_size=4))


@given(
    st.lists(
        st.one_of(
            bitmaps.map(lambda have: hello(A, have)),
            st.builds(progress, st.just(A), bitmaps, st.lists(counts).map(tuple), counts),
            st.builds(LayoutRequest, st.just("pull-a"), st.just(SLOT), counts),
            st.builds(PullBye, st.just("pull-a"), st.just(SLOT), st.booleans()),
        )
    )
)
def test_whatever_a_puller_says_nothing_is_raised(said: list[Message]) -> None:
    s = server()
    for i, message in enumerate(said):
        s.receive(i / 10, A, message)
        s.tick(i / 10)
    assert len(s.readers()) <= 1
    s.withdraw(100.0, "over")
    s.tick(102.0)
    assert Drained(SLOT, PUBLICATION) in s.outbox.drain()


def test_nobody_can_end_somebody_elses_lease() -> None:
    s = server()
    s.receive(0.0, A, hello(A))
    s.receive(0.1, B, PullBye("pull-a", SLOT))
    assert s.readers() == (A,)


def test_at_the_bound_a_puller_is_answered_but_not_remembered() -> None:
    s = server()
    for i in range(20):
        s.receive(0.0, PeerId(f"{i:016x}"), hello(PeerId(f"{i:016x}")))
    assert len(sends(s)) == 20
    assert len(s._leases) == CONFIG.upload_slots + CONFIG.max_waiting


def test_the_layout_comes_in_pages_that_add_up() -> None:
    tensors = tuple(TensorSpec(f"{i:04d}" * 200, "uint8", (1,), 1) for i in range(3000))
    layout = Layout(tensors)
    s = ShardServer(SLOT, PUBLICATION, layout, ENDPOINTS, CONFIG)
    s.receive(0.0, A, hello(A))
    s.outbox.drain()
    got: list[TensorSpec] = []
    pages = 0
    while len(got) < len(tensors):
        s.receive(0.0, A, LayoutRequest("pull-a", SLOT, len(got)))
        [(_, page)] = sends(s)
        assert isinstance(page, LayoutPage)
        assert (page.first, page.total) == (len(got), len(tensors))
        got.extend(page.tensors)
        pages += 1
    assert tuple(got) == tensors
    assert pages > 1


def test_a_manifest_survives_its_packing_and_refuses_what_does_not_fit() -> None:
    m = Manifest(CHUNKS)
    m.put(3, digest(3))
    m.put(0, digest(0))
    known, blob = m.pack()
    assert unpack(CHUNKS, known, blob) == [(0, digest(0)), (3, digest(3))]
    for bad in [(known, blob[:-1]), (b"\xff", blob), (b"", blob), (known + b"\0", blob)]:
        with pytest.raises(ValueError, match=r"bytes|chunks"):
            unpack(CHUNKS, *bad)
    with pytest.raises(ValueError, match="digest of 3 bytes"):
        m.put(0, b"abc")
    with pytest.raises(ValueError, match="chunk 4 of 4"):
        m.put(4, digest(4))
