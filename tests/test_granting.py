"""A shard that another one of its group asks whether there is memory for a copy of it."""

from __future__ import annotations

from dataclasses import dataclass

from registry import Registry

from tensorhub_p2p.protocol.directory.records import slot_name, versions_key
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.messages import (
    Phase,
    Register,
    ReserveAnswer,
    ReserveAsk,
    VersionRecord,
)
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.granting import ReserveMember
from tensorhub_p2p.protocol.retention.reserving import Reserve

G1 = Generation(1, 7)
GROUP = Group("policy", "trainer")
V1 = Publication(0, 1, "trainer", G1)
ME, ASKER = PeerId("p0"), PeerId("p1")


@dataclass
class Asked(Registry):
    """Shard 0 of a trainer, with room for 10 bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        records = self.peer(ME)
        self.reserve = Reserve(10)
        self.outbox = Outbox()
        custody = Custody(ME, records, records, reserve=self.reserve)
        self.member = ReserveMember(Slot(GROUP, 0), custody, self.outbox)

    def holds(self, peer: PeerId, replica: str, phase: Phase = Phase.READY) -> None:
        """This peer has all of shard 0."""
        slot = Slot(Group("policy", replica), 0)
        record = VersionRecord(slot, 2, V1, phase, G1, was_whole=True)
        self.put(versions_key("policy"), Register(peer, slot_name(slot), 1, 1, record))

    def ask(self, num_bytes: int, *, shard: int = 1, ends: bool = False) -> None:
        message = ReserveAsk(
            group=GROUP,
            generation=G1,
            shard=0,
            sender_shard=shard,
            call=0,
            publication=V1,
            request=3,
            ends=ends,
        )
        self.member.receive(self.now, PeerId(f"p{shard}"), message, num_bytes)

    def answers(self) -> list[tuple[PeerId, bool, str]]:
        """What was said since the last time, once nothing is under way."""
        self.until(lambda: not self.steps)
        sent = [item for item in self.outbox.drain() if isinstance(item, Send)]
        told = [(item.to, item.message) for item in sent]
        assert all(isinstance(m, ReserveAnswer) and m.request == 3 for _, m in told)
        return [(to, m.granted, m.why) for to, m in told if isinstance(m, ReserveAnswer)]


def test_it_takes_memory_for_what_it_holds_and_gives_it_back() -> None:
    asked = Asked()
    asked.ask(10)
    assert asked.answers() == [(ASKER, True, "")]
    assert asked.reserve.room(0.0) == 0
    asked.ask(10, ends=True)
    assert asked.answers() == []
    assert asked.reserve.room(0.0) == 10


def test_who_has_no_more_of_it_grants_and_takes_nothing() -> None:
    asked = Asked()
    asked.ask(0)
    assert asked.answers() == [(ASKER, True, "")]
    assert asked.reserve.room(0.0) == 10


def test_without_room_the_answer_is_no_and_says_why() -> None:
    asked = Asked()
    asked.holds(ME, "trainer")
    asked.holds(PeerId("p8"), "leaver", Phase.WITHDRAWING)
    asked.ask(11)
    ((to, granted, why),) = asked.answers()
    assert (to, granted) == (ASKER, False)
    assert "offload_limit" in why


def test_without_room_it_grants_if_somebody_else_who_stays_has_the_shard() -> None:
    asked = Asked()
    asked.holds(ME, "trainer")
    asked.holds(PeerId("p8"), "rollout")
    asked.ask(11)
    assert asked.answers() == [(ASKER, True, "")]


def test_all_who_ask_while_it_looks_are_answered_each_once() -> None:
    asked = Asked()
    asked.ask(11)
    asked.ask(11)
    asked.ask(11, shard=2)
    assert [(to, granted) for to, granted, _ in asked.answers()] == [
        (ASKER, False),
        (PeerId("p2"), False),
    ]


def test_who_needs_it_no_more_is_not_answered() -> None:
    asked = Asked()
    asked.ask(11)
    asked.ask(11, ends=True)
    assert asked.answers() == []
