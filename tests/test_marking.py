"""Whether what was published is whole is judged by what was read for that, and by its owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from registry import Registry

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.admission import WITHDRAWN
from tensorhub_p2p.protocol.directory.records import Refused, Registers, slot_name
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import Phase, Register, VersionRecord, WholeMark
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held, RefState
from tensorhub_p2p.protocol.shards.publishing import References

ME, TRAINER = PeerId("trainer"), Group("policy", "trainer")
GENERATION = Generation(1, 7)
V1 = Publication(0, 1, "trainer", GENERATION)
AFTER = GroupConfig().mark_after


def ready(*shards: int, num_shards: int = 2) -> Registers:
    slots = [Slot(TRAINER, shard) for shard in shards]
    return tuple(
        Register(
            PeerId(f"t{slot.shard}"),
            slot_name(slot),
            1,
            1,
            VersionRecord(slot, num_shards, V1, Phase.READY, GENERATION),
        )
        for slot in slots
    )


class Shard:
    """Shard 0 of a trainer, which has published; what it reads and writes is answered by hand."""

    def __init__(self, num_shards: int) -> None:
        self.reads: dict[str, Callable[[float, Registers], None]] = {}
        """By what lies near whom it is asked, "" for all: who waits."""
        self.marks: list[Callable[[float, Refused | None], None]] = []
        self.judged: list[bool] = []
        liveness = Registry().peer(ME)
        custody = Custody(ME, self, liveness)  # type: ignore[arg-type]
        self.references = References(Slot(TRAINER, 0), GroupConfig(), custody)
        self.references.generation = GENERATION
        self.references.held = Held(V1, num_shards, 4096, Phase.READY, False)
        self.references.state = RefState.HELD
        self.references.marking.announced(0.0)

    def read(
        self, _now: float, _key: object, then: Any, *_: object, near: str, **__: object
    ) -> int:
        self.reads[near] = then
        return 1 if near else 2

    def cancel(self, request: int) -> None:
        self.reads.pop("trainer" if request == 1 else "", None)

    def mark(self, _now: float, _key: object, mark: WholeMark, then: Any, _zone: str = "") -> int:
        assert mark == WholeMark(V1, self.num_shards)
        self.marks.append(then)
        return 3

    @property
    def num_shards(self) -> int:
        assert self.references.held is not None
        return self.references.held.num_shards

    @property
    def was_whole(self) -> bool:
        assert self.references.held is not None
        return self.references.held.was_whole

    def judge(self) -> None:
        self.references.marking.judge(1.0, lambda _now, whole: self.judged.append(whole))


@pytest.mark.parametrize("refused", [None, Refused(WITHDRAWN, None)])
def test_the_owners_have_the_last_word(refused: Refused | None) -> None:
    shard = Shard(2)
    shard.judge()
    shard.reads[""](1.0, ready(0, 1))
    assert not shard.judged
    shard.marks[0](1.0, refused)
    assert shard.judged == [refused is None]
    assert shard.was_whole is (refused is None)


def test_what_lies_near_says_nothing_to_who_asks_for_everything() -> None:
    """A shard may have written where another one doesn't look."""
    shard = Shard(2)
    shard.references.tick(AFTER)
    assert "trainer" in shard.reads
    shard.judge()
    assert "trainer" not in shard.reads, "it isn't waited for any more"
    shard.reads[""](1.0, ready(0, 1))
    shard.marks[0](1.0, None)
    assert shard.judged == [True]


def test_a_shard_that_is_not_the_last_one_marks_nothing() -> None:
    shard = Shard(2)
    shard.references.tick(AFTER)
    shard.reads["trainer"](AFTER, ready(0))
    assert not shard.marks
    assert not shard.was_whole


@pytest.mark.parametrize("ends", ["after a while", "before that"])
def test_the_mark_of_a_single_shard_is_written_in_any_case_and_once(ends: str) -> None:
    shard = Shard(1)
    assert shard.was_whole
    assert not shard.marks
    if ends == "after a while":
        shard.references.tick(AFTER)
        shard.reads["trainer"](AFTER, ready(0, num_shards=1))
        assert len(shard.marks) == 1
    shard.references.marking.stop(1.0)
    shard.references.marking.stop(2.0)
    assert len(shard.marks) == 1
