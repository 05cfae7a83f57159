"""Memory for copies: what a peer has, and how a group takes it for all its shards or for none."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub_p2p.config import RetentionConfig
from tensorhub_p2p.protocol.identity import Generation, Group, Member, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.messages import GenerationRecord, ReserveAnswer, ReserveAsk
from tensorhub_p2p.protocol.retention.reserving import GroupReserve, Reserve

G1 = Generation(1, 7)
GROUP = Group("m", "trainer")
V1 = Publication(0, 1, "trainer", G1)
CONFIG = RetentionConfig()
RECORD = GenerationRecord(G1, 0, tuple(Member(n, PeerId(f"p{n}"), 1) for n in range(3)), 0)


def what(shard: int) -> tuple[Slot, Publication]:
    return (Slot(GROUP, shard), V1)


# --- one peer ---


def test_no_more_is_taken_than_there_is() -> None:
    reserve = Reserve(10)
    assert reserve.take(0.0, what(0), 6, 30.0)
    assert not reserve.take(0.0, what(1), 5, 30.0)
    assert reserve.take(0.0, what(1), 4, 30.0)
    assert reserve.room(0.0) == 0


def test_taking_the_same_again_takes_no_more() -> None:
    reserve = Reserve(10)
    assert reserve.take(0.0, what(0), 10, 30.0)
    assert reserve.take(1.0, what(0), 10, 31.0)


def test_what_nobody_used_or_asked_for_again_lapses() -> None:
    reserve = Reserve(10)
    reserve.take(0.0, what(0), 10, 30.0)
    assert reserve.room(30.0) == 0
    assert reserve.room(30.1) == 10


def test_what_a_copy_uses_stays_until_it_is_freed() -> None:
    reserve = Reserve(10)
    reserve.take(0.0, what(0), 10, 30.0)
    assert reserve.pass_on(0.0, what(0), what(1), 10)
    reserve.release(what(1))
    assert reserve.room(1000.0) == 0
    reserve.free(what(1))
    assert reserve.room(1000.0) == 10


def test_without_memory_nothing_is_taken_not_even_nothing() -> None:
    assert not Reserve(0).take(0.0, what(0), 0, 30.0)


# --- a group ---


@dataclass
class Asking:
    ends: list[str] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)

    def __post_init__(self) -> None:
        slot, ended = Slot(GROUP, 1), lambda _now, why: self.ends.append(why)
        self.reserve = GroupReserve(self.outbox, slot, V1, 9, CONFIG, ended)

    def asks(self) -> list[tuple[PeerId, int, bool]]:
        sent = [item for item in self.outbox.drain() if isinstance(item, Send)]
        assert all(isinstance(s.message, ReserveAsk) for s in sent)
        return [(s.to, s.message.shard, s.message.ends) for s in sent]  # type: ignore[attr-defined]

    def answer(self, shard: int, granted: bool, peer: str = "", request: int = 9) -> None:
        answer = ReserveAnswer(
            group=GROUP,
            generation=G1,
            shard=1,
            sender_shard=shard,
            call=0,
            request=request,
            granted=granted,
            why="" if granted else "full",
        )
        self.reserve.receive(0.1, PeerId(peer or f"p{shard}"), answer)


def test_all_others_are_asked_and_all_have_to_grant() -> None:
    asking = Asking()
    asking.reserve.begin(0.0, RECORD)
    assert asking.asks() == [("p0", 0, False), ("p2", 2, False)]
    asking.answer(0, granted=True)
    asking.answer(0, granted=True)
    assert not asking.ends
    asking.answer(2, granted=True)
    assert asking.ends == [""]
    assert asking.reserve.next_wakeup() is None


def test_one_no_ends_it_for_all() -> None:
    asking = Asking()
    asking.reserve.begin(0.0, RECORD)
    asking.asks()
    asking.answer(0, granted=True)
    asking.answer(2, granted=False)
    assert asking.ends == ["shard 2: full"]
    assert asking.asks() == [("p0", 0, True), ("p2", 2, True)]


def test_silence_is_asked_again_and_is_a_no_in_the_end() -> None:
    asking = Asking()
    asking.reserve.begin(0.0, RECORD)
    asking.answer(0, granted=True)
    asking.asks()
    asking.reserve.tick(0.3)
    assert asking.asks() == [("p2", 2, False)]
    asking.reserve.tick(CONFIG.reserve_patience)
    (why,) = asking.ends
    assert "shard 2" in why


def test_answers_of_strangers_and_to_other_questions_do_not_count() -> None:
    asking = Asking()
    asking.reserve.begin(0.0, RECORD)
    for shard in (0, 2):
        asking.answer(shard, granted=True, peer="p7")
        asking.answer(shard, granted=True, request=8)
    asking.answer(7, granted=True)
    assert not asking.ends


def test_a_group_with_no_generation_in_force_has_nobody_to_ask() -> None:
    asking = Asking()
    asking.reserve.begin(0.0, None)
    assert asking.ends == [""]
    assert not asking.asks()
