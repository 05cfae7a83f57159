"""References: announced, marked whole, withdrawn, taken back, re-issued, aborted."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from registry import Admit, Registry

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.admission import FENCED, WITHDRAWN, admit
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.owner import Refusal
from tensorhub_p2p.protocol.directory.records import fence_name, holders_key, versions_key
from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    Member,
    PeerId,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    HolderRecord,
    Key,
    Phase,
    Pin,
    Register,
    VersionRecord,
    WholeMark,
)
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held, RefState
from tensorhub_p2p.protocol.shards.publishing import (
    Aborted,
    Announced,
    Conflicts,
    Hidden,
    References,
    Whole,
)

TRAINER, ROLLOUT = Group("policy", "trainer"), Group("policy", "rollout")
KEY = versions_key("policy")
G1, G2 = Generation(1, 7), Generation(2, 7)


def publication(version: int, generation: Generation = G1) -> Publication:
    return Publication(0, version, "trainer", generation)


def held(what: Publication, phase: Phase = Phase.READY, was_whole: bool = False) -> Held:
    return Held(what, 2, 4096, phase, was_whole)


@dataclass
class Shards(Registry):
    """The shards of one trainer, and what became of their publications."""

    admit: Admit = admit
    ready_at_once: set[Publication] = field(default_factory=set)
    """What every shard had ready at one moment."""

    def shard(self, shard: int, group: Group = TRAINER) -> References:
        me = PeerId(f"{group.replica}{shard}")
        records = self.peer(me)
        references = References(Slot(group, shard), GroupConfig(), Custody(me, records, records))
        references.generation = G1
        self.machines[me] = [references]
        return references

    def put(self, key: Key, register: Register) -> Refusal | None:
        refusal = super().put(key, register)
        ready: dict[Publication, set[int]] = {}
        for value in (r.value for r in self.registers(KEY)):
            if isinstance(value, VersionRecord) and value.phase is Phase.READY:
                ready.setdefault(value.publication, set()).add(value.slot.shard)
        self.ready_at_once |= {p for p, shards in ready.items() if shards == {0, 1}}
        return refusal

    def marks(self) -> set[Publication]:
        values = (r.value for r in self.registers(KEY))
        return {v.publication for v in values if isinstance(v, WholeMark)}

    def phase(self, references: References) -> Phase | None:
        """What the versions key says of the slot; the holders key must say the same."""
        phases: list[Phase] = []
        for key in (KEY, holders_key("policy", references.slot.shard)):
            for register in self.registers(key):
                if register.writer == references.me:
                    assert isinstance(register.value, (VersionRecord, HolderRecord))
                    phases.append(register.value.phase)
        assert len(set(phases)) <= 1, phases
        return phases[0] if phases else None

    def pin(self, what: Publication, group: Group = ROLLOUT, ended: bool = False) -> None:
        value = None if ended else Pin(what, group, G1, 1)
        self.put(KEY, Register(PeerId("leader"), "pin/0@rollout", 1, 2 if ended else 1, value))

    def told(self, references: References) -> list[type[Event]]:
        return [type(e) for peer, e in self.events if peer == references.me]

    def rest(self) -> None:
        """Until nothing is under way."""
        self.settle()
        self.until(lambda: not self.steps)


def two(registry: Shards, what: Publication) -> list[References]:
    shards = [registry.shard(shard) for shard in range(2)]
    for shard in shards:
        shard.publish(registry.now, held(what))
    registry.until(lambda: what in registry.marks())
    registry.rest()
    return shards


# --- publishing ---


@pytest.mark.parametrize("seed", range(40))
def test_whoever_is_ready_last_marks_the_version_whole(seed: int) -> None:
    registry = Shards(seed)
    first, last = registry.shard(0), registry.shard(1)
    first.publish(0.0, held(publication(1)))
    for _ in range(seed % 9):
        registry.step()
    assert not registry.marks()
    last.publish(registry.now, held(publication(1)))
    registry.until(lambda: publication(1) in registry.marks())
    registry.rest()
    assert Announced in registry.told(first)
    assert Whole in registry.told(last) + registry.told(first)
    assert registry.phase(first) is registry.phase(last) is Phase.READY


@pytest.mark.parametrize("published", [True, False])
def test_what_was_pulled_is_no_news_of_the_model(published: bool) -> None:
    """A group that goes back to an older version must not be taken for its publisher."""
    registry = Shards()
    if published:
        two(registry, publication(1))
    else:
        shard = registry.shard(0)
        shard.hold(0.0, held(publication(1), was_whole=True))
        registry.rest()
    whole = [e for _, e in registry.events if isinstance(e, Whole)]
    assert whole
    assert all(event.published == published for event in whole)


def test_a_publish_below_a_whole_version_is_taken_back_and_told_what_exists() -> None:
    registry = Shards()
    two(registry, publication(5))
    late = registry.shard(0, Group("policy", "late"))
    late.publish(registry.now, held(Publication(0, 4, "late", G1)))
    registry.rest()
    (conflict,) = [e for _, e in registry.events if isinstance(e, Conflicts)]
    assert conflict.existing == publication(5)
    assert registry.phase(late) is Phase.HIDDEN
    assert late.state is RefState.EMPTY


def test_a_publish_by_a_replaced_generation_is_refused_as_fenced() -> None:
    registry = Shards()
    newer = GenerationRecord(G2, 0, (Member(0, PeerId("x"), 2),), 0)
    registry.put(KEY, Register(PeerId("x"), fence_name(TRAINER), 2, 1, newer))
    late = registry.shard(0)
    late.publish(0.0, held(publication(5)))
    registry.rest()
    (conflict,) = [e for _, e in registry.events if isinstance(e, Conflicts)]
    assert conflict.why == FENCED


# --- withdrawing ---


@pytest.mark.parametrize("seed", range(60))
def test_what_is_marked_was_ready_everywhere_at_once_whoever_withdraws_when(seed: int) -> None:
    registry = Shards(seed)
    first, last = registry.shard(0), registry.shard(1)
    first.publish(0.0, held(publication(1)))
    registry.until(lambda: Announced in registry.told(first))
    for _ in range(seed % 6):
        registry.step()
    first.withdraw(registry.now)
    for _ in range(seed % 5):
        registry.step()
    last.publish(registry.now, held(publication(1)))
    registry.rest()
    assert registry.marks() <= registry.ready_at_once
    assert Hidden in registry.told(first)


@pytest.mark.parametrize("seed", range(80))
def test_whoever_withdraws_knows_whether_the_version_was_whole(seed: int) -> None:
    registry = Shards(seed)
    first, last = registry.shard(0), registry.shard(1)
    for shard in (first, last):
        shard.publish(registry.now, held(publication(1)))
    registry.until(lambda: Announced in registry.told(first))
    for _ in range(seed % 8):
        registry.step()
    first.withdraw(registry.now)
    registry.rest()
    (hidden,) = [e for _, e in registry.events if isinstance(e, Hidden)]
    assert hidden.was_whole == (publication(1) in registry.marks())


def test_what_was_never_whole_is_withdrawn_with_no_wait() -> None:
    registry = Shards()
    only = registry.shard(0)
    only.publish(0.0, held(publication(1)))
    registry.rest()
    only.withdraw(registry.now)
    registry.rest()
    (hidden,) = [e for _, e in registry.events if isinstance(e, Hidden)]
    assert not hidden.was_whole
    assert registry.phase(only) is Phase.HIDDEN


def test_a_pin_proves_that_it_was_whole_to_a_shard_that_saw_no_mark() -> None:
    registry = Shards()
    only = registry.shard(0)
    only.publish(0.0, held(publication(1)))
    registry.rest()
    registry.pin(publication(1))
    only.withdraw(registry.now)
    for _ in range(150):
        registry.step()
    assert only.state is RefState.WAITING, "it is being pulled"
    registry.pin(publication(1), ended=True)
    registry.until(lambda: Hidden in registry.told(only))
    (hidden,) = [e for _, e in registry.events if isinstance(e, Hidden)]
    assert hidden.was_whole


def test_a_mark_on_one_owner_does_not_make_a_version_whole() -> None:
    """As an owner's that admitted it while the others knew that a shard withdraws."""

    def others_know_better(_key: object, _held: object, new: Register) -> Refusal | None:
        return Refusal(WITHDRAWN) if isinstance(new.value, WholeMark) else None

    registry = Shards(admit=others_know_better)
    what = publication(1)
    mark = Register(NOBODY, f"whole:{what!r}", 0, 1, WholeMark(what, 2))
    registry.held[KEY] = Cells([mark])
    shard = registry.shard(0)
    shard.publish(0.0, held(what))
    registry.rest()
    assert Announced in registry.told(shard)
    assert Whole not in registry.told(shard)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("end", ["a reader is done", "the pin ends", "the group is gone"])
def test_a_pinned_version_is_kept_until(end: str, seed: int) -> None:
    registry = Shards(seed)
    first, _ = two(registry, publication(1))
    registry.pin(publication(1))
    first.withdraw(registry.now)
    for _ in range(150):
        registry.step()
    assert first.state is RefState.WAITING
    assert "being pulled by policy/rollout" in first.waiting_for()
    assert registry.phase(first) is Phase.WITHDRAWING
    if end == "a reader is done":
        reader = registry.shard(0, ROLLOUT)
        reader.hold(registry.now, held(publication(1), was_whole=True))
    elif end == "the pin ends":
        registry.pin(publication(1), ended=True)
    else:
        registry.declare_dead(PeerId("leader"))
    registry.until(lambda: Hidden in registry.told(first))
    (hidden,) = [e for _, e in registry.events if isinstance(e, Hidden)]
    assert hidden.was_whole


def test_a_reader_that_has_only_a_part_does_not_keep_it() -> None:
    registry = Shards()
    first, _ = two(registry, publication(1))
    registry.pin(publication(1))
    reader = registry.shard(0, ROLLOUT)
    reader.hold(registry.now, held(publication(1), Phase.PARTIAL, was_whole=True))
    first.withdraw(registry.now)
    for _ in range(150):
        registry.step()
    assert first.state is RefState.WAITING


def test_the_pin_of_the_own_group_keeps_no_shard_back() -> None:
    registry = Shards()
    reader = registry.shard(0, ROLLOUT)
    reader.hold(0.0, held(publication(1), was_whole=True))
    registry.rest()
    registry.pin(publication(1), ROLLOUT)
    reader.withdraw(registry.now)
    registry.until(lambda: Hidden in registry.told(reader))


@pytest.mark.parametrize("seed", range(40))
def test_of_two_that_withdraw_at_once_one_keeps_it(seed: int) -> None:
    registry = Shards(seed)
    first, _ = two(registry, publication(1))
    reader = registry.shard(0, Group("policy", "copy"))
    reader.hold(registry.now, held(publication(1), was_whole=True))
    registry.rest()
    registry.pin(publication(1))
    first.withdraw(registry.now)
    reader.withdraw(registry.now)
    for _ in range(150):
        registry.step()
    assert RefState.WAITING in {first.state, reader.state}, "neither relies on one that withdraws"


@pytest.mark.parametrize("steps", range(12))
def test_a_withdrawal_is_taken_back_until_hiding_begins(steps: int) -> None:
    registry = Shards(steps)
    first, _ = two(registry, publication(1))
    registry.pin(publication(1))
    first.withdraw(registry.now)
    for _ in range(steps):
        registry.step()
    assert first.restore(registry.now)
    registry.rest()
    assert first.state is RefState.HELD
    assert registry.phase(first) is Phase.READY
    assert not first.restore(registry.now)


def test_hiding_can_not_be_taken_back_but_need_not_be_confirmed() -> None:
    registry = Shards()
    only = registry.shard(0)
    only.publish(0.0, held(publication(1)))
    registry.rest()
    only.withdraw(registry.now, freeing=True)
    registry.until(lambda: only.state is RefState.HIDING)
    assert not only.restore(registry.now)
    only.hide_unconfirmed(registry.now)
    registry.rest()
    assert registry.told(only).count(Hidden) == 1
    assert registry.phase(only) is Phase.HIDDEN


# --- whatever order answers come in ---


@pytest.mark.parametrize("seed", range(150))
def test_the_last_thing_that_was_asked_for_is_what_stays(seed: int) -> None:
    registry = Shards(seed, admit=admit)
    references = registry.shard(0)
    version = 0
    for _ in range(12):
        state = references.state
        choice = registry.rng.randrange(4)
        if state is RefState.EMPTY:
            version += 1
            if choice:
                references.publish(registry.now, held(publication(version)))
            else:
                references.hold(registry.now, held(publication(version), was_whole=True))
        elif state is RefState.HELD and choice == 0:
            references.withdraw(registry.now)
        elif state is RefState.HELD and choice == 1:
            references.reissue(registry.now, Generation(1 + version, 7))
        elif choice == 2:
            references.drop(registry.now)
        elif choice == 3:
            references.restore(registry.now)
        for _ in range(registry.rng.randrange(6)):
            registry.step()
    registry.until(lambda: references.state in {RefState.EMPTY, RefState.HELD})
    registry.rest()
    phase = registry.phase(references)
    if references.state is RefState.EMPTY:
        assert phase in (None, Phase.HIDDEN)
    else:
        assert phase is Phase.READY


# --- the next generation ---


@pytest.mark.parametrize("seed", range(20))
def test_a_whole_publication_is_reissued_by_the_next_generation(seed: int) -> None:
    registry = Shards(seed)
    shards = two(registry, publication(1))
    for shard in shards:
        shard.reissue(registry.now, G2)
    registry.rest()
    for shard in shards:
        assert shard.held is not None
        assert shard.held.was_whole
    records = [r.value for r in registry.registers(KEY) if isinstance(r.value, VersionRecord)]
    assert all((r.generation, r.publication) == (G2, publication(1)) for r in records)
    assert all(r.was_whole for r in records)


@pytest.mark.parametrize("seed", range(20))
def test_one_that_is_not_whole_is_aborted(seed: int) -> None:
    registry = Shards(seed)
    only = registry.shard(0)
    only.publish(0.0, held(publication(1)))
    for _ in range(seed % 7):
        registry.step()
    only.reissue(registry.now, G2)
    registry.rest()
    assert registry.told(only).count(Aborted) == 1
    assert registry.phase(only) is Phase.HIDDEN
    assert only.state is RefState.EMPTY


@pytest.mark.parametrize("seed", range(80))
def test_shards_that_are_kept_are_marked_whole_whenever_the_group_breaks(seed: int) -> None:
    registry = Shards(seed)
    shards = [registry.shard(shard) for shard in range(2)]
    for shard in shards:
        shard.publish(registry.now, held(publication(1)))
    for _ in range(seed % 16):
        registry.step()
    for shard in shards:
        shard.reissue(registry.now, G2)
        for _ in range(seed % 4):
            registry.step()
    registry.rest()
    kept = [shard for shard in shards if shard.held is not None]
    assert not kept or publication(1) in registry.marks()
    assert registry.marks() <= registry.ready_at_once
    for shard in kept:
        assert shard.held is not None
        assert shard.held.was_whole
        assert registry.phase(shard) is Phase.READY
