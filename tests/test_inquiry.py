"""Questions to the directory: none is asked twice at a time, and only the last write counts."""

from __future__ import annotations

import random

from registry import Registry

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.directory import Directory
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.owner import admit_all
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.directory.records import Refused, Registers
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Key, Register, SlotClaim

ME = PeerId("0" * 16)
KEY = Key("group", "policy", "rollout")


def claim(counter: int) -> SlotClaim:
    return SlotClaim(0, 1, counter, True)


class Asked:
    """An inquiry, and the counters that its answers told."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.answers: list[list[int]] = []
        self.inquiry = Inquiry(registry.peer(ME), KEY, self.answered)

    def answered(self, now: float, registers: Registers) -> None:
        claims = [r.value for r in registers]
        self.answers.append([c.counter for c in claims if isinstance(c, SlotClaim)])

    def put(self, counter: int) -> None:
        self.registry.put(KEY, Register(ME, "0", 0, counter, claim(counter)))

    def rest(self) -> None:
        self.registry.until(lambda: not self.registry.steps)


def test_looks_during_a_read_are_one_more_read_after_it() -> None:
    asked = Asked(Registry())
    asked.inquiry.look(0.0)
    asked.registry.step()
    asked.put(7)
    for _ in range(10):
        asked.inquiry.look(0.0)
    assert len(asked.registry.steps) == 1
    asked.rest()
    assert asked.answers == [[], [7]], "the second read began after the last look"
    asked.inquiry.look(0.0)
    asked.rest()
    assert len(asked.answers) == 3


def test_looking_anew_drops_the_answer_that_is_under_way() -> None:
    asked = Asked(Registry())
    asked.inquiry.look(0.0)
    asked.inquiry.look(0.0)
    asked.registry.step()
    asked.put(7)
    asked.inquiry.look_anew(0.0)
    asked.rest()
    assert asked.answers == [[7]]


def test_nothing_is_told_after_stop() -> None:
    asked = Asked(Registry())
    asked.inquiry.look(0.0)
    asked.inquiry.look(0.0)
    asked.inquiry.stop()
    asked.rest()
    assert asked.answers == []


def test_a_later_write_of_a_register_replaces_the_one_under_way() -> None:
    directory = Directory(ME, DirectoryConfig(), random.Random(1), admit_all)
    records = PendingRecords(directory)
    ended: list[str] = []

    def write(name: str, what: str) -> None:
        def then(now: float, refused: Refused | None) -> None:
            ended.append(what)

        records.write(0.0, KEY, name, 1, claim(1), then)

    write("a", "first")
    write("a", "second")
    write("b", "other")
    for event in directory.outbox.drain():
        records.take(0.0, event)
    assert ended == ["second", "other"]
    write("a", "third")
    for event in directory.outbox.drain():
        records.take(0.0, event)
    assert ended[-1] == "third"
