"""A leader's question becomes a pinned publication, whatever its holders do at that moment."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from registry import Registry, admit_all

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.admission import WITHDRAWN
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.owner import Refusal
from tensorhub_p2p.protocol.directory.records import Registers, slot_name, versions_key
from tensorhub_p2p.protocol.groups.resolving import (
    LONGEST_REST,
    DirectoryResolver,
    ResolverState,
)
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR, Sources
from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    PeerId,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.messages import (
    Decision,
    Key,
    Phase,
    Pin,
    Question,
    Register,
    Source,
    VersionRecord,
    WholeMark,
)
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held, RefState
from tensorhub_p2p.protocol.shards.publishing import Hidden, References

GENERATION = Generation(1, 7)
LATEST = Question("replicate", "latest")


class Race(Registry):
    """A trainer of one shard, and the leader of a rollout that asks for the latest version.

    The owners admit every pin: as those do that have not heard of the withdrawal, or have
    heard of the next version since, and know nothing of this one any more.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        trainer, rollout = PeerId("trainer"), PeerId("rollout")
        records = self.peer(trainer)
        slot = Slot(Group("policy", "trainer"), 0)
        self.references = References(slot, GroupConfig(), Custody(trainer, records, records))
        self.references.generation = GENERATION
        records = self.peer(rollout)
        slot = Slot(Group("policy", "rollout"), 0)
        self.resolver = DirectoryResolver(slot, records, records, GroupConfig(), lambda _now: None)
        self.resolver.generation = GENERATION
        self.machines = {trainer: [self.references]}  # type: ignore[list-item]
        self.decision: Decision | None = None
        self.sources: Sources = {}

    def step(self) -> None:
        super().step()
        due = self.resolver.next_wakeup()
        if due is not None and due <= self.now:
            self.resolver.tick(self.now)

    def publish(self, version: int) -> None:
        publication = Publication(0, version, "trainer", GENERATION)
        self.references.publish(self.now, Held(publication, 1, 4096, Phase.READY, False))

    def resolve(self) -> None:
        def then(_now: float, decision: Decision, sources: Sources) -> None:
            self.decision, self.sources = decision, sources

        self.resolver.resolve(self.now, LATEST, 1, NO_FLOOR, then)

    def served(self) -> Publication | None:
        """What the trainer has, and would not give up for the asking."""
        references = self.references
        if references.held is None or references.state is RefState.HIDING:
            return None
        return references.held.publication


@pytest.mark.parametrize("seed", range(100))
def test_a_decision_and_the_withdrawal_of_what_it_is_for_may_cross(seed: int) -> None:
    race = Race(seed)
    race.publish(1)
    race.until(lambda: race.references.held is not None and race.references.held.was_whole)
    race.resolve()
    for _ in range(race.rng.randrange(8)):
        race.step()
    race.references.withdraw(race.now)

    def on_event(_peer: PeerId, event: object) -> None:
        if isinstance(event, Hidden):
            race.publish(2)

    race.on_event = on_event  # type: ignore[method-assign]
    race.until(lambda: race.decision is not None)
    assert race.resolver.state is ResolverState.PINNED
    for _ in range(300):
        assert race.decision is not None
        assert race.served() == race.decision.publication, "decided for, and gone"
        race.step()
    race.resolver.stop(race.now)
    if race.references.state is RefState.WAITING:
        decided = race.decision.publication
        race.until(lambda: race.served() != decided)


def test_a_mark_that_was_only_read_is_written_to_a_quorum_before_it_is_acted_on() -> None:
    """One owner admitted it; the others know that a shard withdraws, and refuse it."""
    race = Race()
    what = Publication(0, 1, "trainer", GENERATION)
    copies = [
        VersionRecord(Slot(Group("policy", "copy"), shard), 2, what, Phase.READY, GENERATION, False)
        for shard in (0, 1)
    ]
    mark = WholeMark(what, 2)
    held = [Register(PeerId("c"), f"{c.slot.shard}@copy", 1, 1, c) for c in copies]
    as_one_owner_has_it = Register(NOBODY, f"whole:{what!r}", 0, 1, mark)
    race.held[versions_key("policy")] = Cells([*held, as_one_owner_has_it])

    def refuse_marks(_key: object, _held: object, new: Register) -> Refusal | None:
        return Refusal(WITHDRAWN) if isinstance(new.value, WholeMark) else None

    race.admit = refuse_marks
    race.resolve()
    for _ in range(300):
        race.step()
    assert race.decision is None
    race.admit = admit_all
    race.until(lambda: race.decision is not None)


class Waiting:
    """A leader whose question nothing answers; what its own zone holds, and how far it looks."""

    def __init__(self) -> None:
        self.race = Race()
        self.race.tick = 0.001
        self.crossed: list[float] = []
        """When other zones were looked at."""
        self.enough: Callable[[Registers], bool] | None = None
        self.changed: Callable[[float], None] = lambda _now: None
        self.then: Callable[[float, Registers], None] | None = None
        self.told: Registers | None = None
        """What owners have told of the key, if they have."""
        self.named: tuple[int, int] | None = None
        """The newest version in other zones."""
        self.written: list[object] = []
        self.thens: list[Callable[[float, None], None]] = []
        slot = Slot(Group("policy", "rollout"), 0)
        liveness = self.race.peer(PeerId("rollout"))
        self.resolver = DirectoryResolver(
            slot,
            self,  # type: ignore[arg-type]
            liveness,
            GroupConfig(),
            lambda _now: None,
        )
        self.resolver.resolve(0.0, LATEST, 1, NO_FLOOR, lambda _now, _decision, _sources: None)

    def read(
        self,
        now: float,
        _key: Key,
        then: Callable[[float, Registers], None],
        enough: Callable[[Registers], bool] | None = None,
        near: str = "",
        *,
        agreed: bool = False,
    ) -> int:
        self.then, self.enough = then, enough
        return 1

    def watch(self, _now: float, _key: Key, then: Callable[[float], None]) -> int:
        self.changed = then
        return 1

    def known(self, _key: Key) -> Registers | None:
        return self.told

    def write(
        self,
        _now: float,
        _key: Key,
        _name: str,
        _counter: int,
        value: object,
        then: Callable[[float, None], None],
        _zone: str,
    ) -> int:
        self.written.append(value)
        self.thens.append(then)
        return 2

    def mark(
        self,
        _now: float,
        _key: Key,
        value: object,
        then: Callable[[float, None], None],
        _zone: str,
    ) -> int:
        self.written.append(value)
        self.thens.append(then)
        return 3

    def write_and_look(
        self,
        _now: float,
        _key: Key,
        _name: str,
        _counter: int,
        value: object,
        then: Callable[[float, None, None], None],
        *,
        agreed: bool,
    ) -> int:
        assert agreed
        self.written.append(value)
        self.thens.append(lambda now, refused: then(now, refused, None))
        return 4

    def cancel(self, _request: int) -> None:
        self.then = None

    def unwatch(self, _now: float, _watch: int) -> None:
        self.changed = lambda _now: None

    def elsewhere(self, _model: str) -> tuple[int, int] | None:
        return self.named

    def answer(self, now: float) -> None:
        """The own zone has nothing, and so have the others, if they are looked at."""
        then, self.then = self.then, None
        if then is not None:
            assert self.enough is not None
            if not self.enough(()):
                self.crossed.append(now)
            then(now, ())

    def go_on(self, until: float) -> list[float]:
        """When other zones were looked at meanwhile."""
        self.crossed.clear()
        while (due := self.resolver.next_wakeup()) is not None and due <= until:
            self.resolver.tick(due)
            self.answer(due)
        return list(self.crossed)


def test_who_waits_looks_at_growing_pauses_as_it_is_told_of_changes() -> None:
    waiting = Waiting()
    waiting.answer(0.0)
    assert waiting.crossed == [0.0]
    looks = [0.0, *waiting.go_on(60.0)]
    pauses = [b - a for a, b in pairwise(looks)]
    assert pauses[:3] == sorted(pauses[:3])
    assert max(pauses) <= LONGEST_REST
    assert len(looks) <= 60 / LONGEST_REST + 4
    due = waiting.resolver.next_wakeup()
    assert due is not None
    assert due <= 60.0 + LONGEST_REST


def test_who_waits_looks_at_other_zones_at_once_when_there_is_news() -> None:
    waiting = Waiting()
    waiting.answer(0.0)
    waiting.go_on(60.0)
    waiting.crossed.clear()
    waiting.told, waiting.named = (), (0, 1)
    waiting.changed(60.1)
    waiting.answer(60.1)
    assert waiting.crossed == [60.1]


def published(version: int, num_shards: int) -> Registers:
    what = Publication(0, version, "trainer", GENERATION)
    slots = [Slot(Group("policy", "trainer"), shard) for shard in range(num_shards)]
    return tuple(
        Register(
            PeerId(f"t{slot.shard}"),
            slot_name(slot),
            1,
            version,
            VersionRecord(slot, num_shards, what, Phase.READY, GENERATION, False),
        )
        for slot in slots
    )


def test_who_waits_acts_on_what_it_is_told_and_marks_and_pins_at_once() -> None:
    waiting = Waiting()
    waiting.answer(0.0)
    waiting.answer(0.0)
    waiting.told = ()
    waiting.changed(0.1)
    assert waiting.then is None
    assert not waiting.written
    waiting.told = published(1, 2)
    waiting.changed(0.2)
    assert waiting.then is None, "it reads what it was told"
    assert [type(value) for value in waiting.written] == [WholeMark, Pin]


def test_who_waits_reads_what_changed_if_it_was_not_told() -> None:
    waiting = Waiting()
    waiting.answer(0.0)
    waiting.answer(0.0)
    waiting.changed(0.1)
    assert waiting.then is not None


def test_a_refusal_is_followed_by_a_look_at_other_zones_again() -> None:
    waiting = Waiting()
    waiting.answer(0.0)
    waiting.answer(0.0)
    waiting.go_on(60.0)
    waiting.resolver._again(60.0)
    (looked,) = waiting.go_on(60.0 + GroupConfig().retry_interval)
    assert looked == 60.0 + GroupConfig().retry_interval


def test_what_a_holder_had_whole_needs_no_further_mark() -> None:
    race = Race()
    what = Publication(0, 1, "trainer", GENERATION)
    slot = Slot(Group("policy", "copy"), 0)
    copy = VersionRecord(slot, 1, what, Phase.READY, GENERATION, True)
    register = Register(PeerId("c"), "0@copy", 1, 1, copy)
    race.held[versions_key("policy")] = Cells([register])
    race.resolve()
    race.until(lambda: race.decision is not None)
    values = [r.value for r in race.registers(versions_key("policy"))]
    assert not any(isinstance(value, WholeMark) for value in values)


def test_a_question_that_is_answered_at_once_watches_nothing() -> None:
    race = Race()
    race.publish(1)
    race.until(lambda: race.references.held is not None and race.references.held.was_whole)
    race.resolve()
    race.until(lambda: race.decision is not None)
    assert not race.watches


def test_who_has_waited_and_then_pulls_marks_the_version_once() -> None:
    waiting = Waiting()
    waiting.answer(0.0)
    waiting.answer(0.0)
    waiting.told = published(1, 2)
    waiting.changed(0.1)
    for then in waiting.thens:
        then(0.2, None)
    assert waiting.resolver.state is ResolverState.CHECKING
    waiting.resolver.stop(0.3)
    waiting.written.clear()
    waiting.resolver.resolve(0.3, LATEST, 2, NO_FLOOR, lambda _now, _decision, _sources: None)
    assert waiting.then is not None
    waiting.then(0.4, published(1, 2))
    assert [type(value) for value in waiting.written] == [Pin]


def test_the_answer_names_who_holds_each_shard_but_nobody_who_is_silent_or_far() -> None:
    race = Race()
    what = Publication(0, 1, "trainer", GENERATION)
    slots = {name: Slot(Group("policy", name), 0) for name in ("near", "silent", "far")}
    race.held[versions_key("policy")] = Cells(
        Register(PeerId(name), f"0@{name}", 1, 1, copy)
        for name, slot in slots.items()
        for copy in [VersionRecord(slot, 1, what, Phase.READY, GENERATION, True)]
    )
    membership = race.resolver._liveness
    membership.is_responsive = lambda peer: peer != "silent"  # type: ignore[method-assign]
    membership.zone = lambda peer: "zone" if peer != "far" else "far"  # type: ignore[method-assign]
    race.resolve()
    race.until(lambda: race.decision is not None)
    assert race.sources == {0: (Source(PeerId("near"), slots["near"]),)}
