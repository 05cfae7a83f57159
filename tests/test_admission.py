"""What owners of the versions key refuse to write."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.directory.admission import (
    CONFLICT,
    FENCED,
    RETRACTED,
    WITHDRAWN,
    admit,
)
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.records import fence_name, group_key, versions_key
from tensorhub_p2p.protocol.directory.registers import of_mark
from tensorhub_p2p.protocol.identity import (
    NOBODY,
    Generation,
    Group,
    Member,
    PeerId,
    Publication,
    Slot,
)
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    Phase,
    Pin,
    Register,
    Retraction,
    Value,
    VersionRecord,
    WholeMark,
)

KEY = versions_key("policy")
TRAINER, OTHER, ROLLOUT = (Group("policy", r) for r in ("trainer", "other", "rollout"))
G1, G2 = Generation(1, 7), Generation(2, 3)


def publication(
    version: int, group: Group = TRAINER, epoch: int = 0, generation: Generation = G1
) -> Publication:
    return Publication(epoch, version, group.replica, generation)


def record(
    what: Publication,
    group: Group = TRAINER,
    shard: int = 0,
    phase: Phase = Phase.READY,
    generation: Generation = G1,
    was_whole: bool = False,
    writer: str = "w",
    kept: bool = False,
) -> Register:
    slot = Slot(group, shard)
    value = VersionRecord(slot, 2, what, phase, generation, was_whole, kept=kept)
    return Register(PeerId(writer), f"{shard}@{group.replica}", 1, 1, value)


def mark(what: Publication) -> Register:
    return Register(NOBODY, f"whole:{what!r}", 1, 1, WholeMark(what, 2))


def fence(generation: Generation, group: Group = TRAINER) -> Register:
    value = GenerationRecord(generation, 0, (Member(0, PeerId("w"), 1),), 0)
    return Register(PeerId("leader"), fence_name(group), 1, 1, value)


def pin(what: Publication, generation: Generation = G1) -> Register:
    return Register(PeerId("l"), "pin/0@rollout", 1, 1, Pin(what, ROLLOUT, generation, 1))


def reason(new: Register, *held: Register) -> str | None:
    refusal = admit(KEY, Cells(held), new)
    if refusal is None:
        return None
    assert refusal.because in held, "it names what forbids it"
    return refusal.reason


V1, V2, V3 = (publication(n) for n in (1, 2, 3))


# --- publishing (G4) ---


def test_a_version_below_a_whole_one_is_refused() -> None:
    assert reason(record(V1), mark(V2)) == CONFLICT
    assert reason(record(V1), record(V2, ROLLOUT, was_whole=True, writer="r")) == CONFLICT
    assert reason(record(V3), mark(V2)) is None


def test_a_version_below_one_that_is_not_whole_yet_is_admitted() -> None:
    assert reason(record(V1), record(V2, shard=1)) is None


def test_a_version_whose_shards_are_all_ready_is_whole_before_it_is_marked() -> None:
    newer = [record(V2, shard=shard, writer=f"w{shard}") for shard in (0, 1)]
    assert reason(record(V1), *newer) == CONFLICT
    cells = Cells(newer)
    for phase, sequence in ((Phase.HIDDEN, 2), (Phase.READY, 3)):
        changed = record(V2, shard=0, writer="w0", phase=phase)
        cells.merge(0.0, [msgspec.structs.replace(changed, sequence=sequence)])
        refusal = admit(KEY, cells, record(V1))
        assert (refusal is not None) == (phase is Phase.READY)


def test_a_rewind_is_above_all_of_the_epoch_before() -> None:
    assert reason(record(publication(1, epoch=1)), mark(V3)) is None
    assert reason(record(V3), mark(publication(1, epoch=1))) == CONFLICT


def test_another_replica_may_publish_the_same_version_side_by_side() -> None:
    assert reason(record(publication(2, OTHER), OTHER), mark(V2)) is None


def test_the_same_replica_may_not_publish_a_version_again_that_was_whole() -> None:
    again = publication(2, generation=G2)
    assert reason(record(again, generation=G2), mark(V2)) == CONFLICT
    hidden = record(V2, phase=Phase.HIDDEN)
    assert reason(record(V2), mark(V2), hidden) == CONFLICT, "under its old id neither"


def test_the_same_replica_may_publish_a_version_again_that_never_was_whole() -> None:
    assert reason(record(V2), record(V2, phase=Phase.HIDDEN)) is None
    again = publication(2, generation=G2)
    assert reason(record(again, generation=G2), record(V2, phase=Phase.HIDDEN)) is None


def test_what_is_held_is_written_again_whatever_became_of_it() -> None:
    assert reason(record(V2), mark(V2)) is None, "a repair at an owner that lost it"
    assert reason(record(V2), mark(V3), record(V2, phase=Phase.WITHDRAWING)) is None, "restored"
    assert reason(record(V2, was_whole=True, generation=G2), mark(V3), fence(G2)) is None


def test_holding_what_others_published_is_always_admitted() -> None:
    assert reason(record(V1, ROLLOUT, phase=Phase.PARTIAL), mark(V2)) is None
    assert reason(record(V1, ROLLOUT), mark(V2)) is None


@pytest.mark.parametrize("phase", [Phase.WITHDRAWING, Phase.HIDDEN])
def test_giving_up_is_always_admitted(phase: Phase) -> None:
    assert reason(record(V1, phase=phase), mark(V2), fence(G2)) is None


# --- replaced generations (G7) ---


def test_a_publish_by_a_generation_that_was_replaced_is_fenced() -> None:
    assert reason(record(V2), fence(G2)) == FENCED
    assert reason(record(V2), fence(G1)) is None
    newer = publication(2, generation=G2)
    assert reason(record(newer, generation=G2), fence(G2), fence(G1)) is None


def test_a_fence_concerns_its_own_group_only() -> None:
    assert reason(record(V2), fence(G2, OTHER)) is None


def test_a_pin_by_a_generation_that_was_replaced_is_fenced() -> None:
    assert reason(pin(V1), fence(G2, ROLLOUT), record(V1)) == FENCED
    assert reason(pin(V1, G2), fence(G2, ROLLOUT), record(V1)) is None
    assert reason(pin(V1), fence(G2, TRAINER), record(V1)) is None


# --- marks (G3) ---


@pytest.mark.parametrize("phase", [Phase.WITHDRAWING, Phase.HIDDEN])
def test_a_mark_is_refused_once_a_shard_withdraws(phase: Phase) -> None:
    assert reason(mark(V1), record(V1), record(V1, shard=1, phase=phase)) == WITHDRAWN


def test_a_mark_is_refused_once_a_shard_has_moved_on() -> None:
    assert reason(mark(V1), record(V2)) == WITHDRAWN
    assert reason(mark(V2), record(V1)) is None, "this owner is behind"


def test_a_mark_is_admitted_also_when_a_shard_knew_of_it_before_it_withdrew() -> None:
    gone = record(V1, phase=Phase.WITHDRAWING, was_whole=True)
    assert reason(mark(V1), gone) is None


def test_a_mark_does_not_mind_what_other_replicas_do() -> None:
    assert reason(mark(V1), record(V1, ROLLOUT, phase=Phase.HIDDEN)) is None


# --- pins (G6) ---


def test_a_pin_is_refused_for_a_shard_that_nobody_keeps() -> None:
    gone = record(V1, shard=1, phase=Phase.WITHDRAWING)
    assert reason(pin(V1), record(V1), gone) == WITHDRAWN
    keeper = record(V1, ROLLOUT, shard=1, writer="r")
    assert reason(pin(V1), record(V1), gone, keeper) is None


@pytest.mark.parametrize("phase", [Phase.WITHDRAWING, Phase.HIDDEN])
def test_a_pin_is_admitted_for_what_was_withdrawn_because_another_one_keeps_it(
    phase: Phase,
) -> None:
    """The keeper's own record may have come to other owners only."""
    gone = record(V1, phase=phase, kept=True)
    assert reason(pin(V1), gone, record(V1, shard=1)) is None
    forsaken = record(V1, shard=1, phase=phase)
    assert reason(pin(V1), gone, forsaken) == WITHDRAWN


# --- retracted versions ---


def retraction(version: int, epoch: int = 0) -> Register:
    return of_mark(Retraction(epoch, version))


def test_what_was_retracted_is_neither_published_nor_marked_nor_pinned() -> None:
    assert reason(record(V2), retraction(2)) == RETRACTED
    assert reason(mark(V2), retraction(2), record(V2)) == RETRACTED
    assert reason(pin(V2), retraction(2), record(V2)) == RETRACTED
    other = publication(2, OTHER)
    assert reason(record(other, OTHER), retraction(2)) == RETRACTED, "whoever publishes it"


def test_a_retraction_concerns_its_own_version_only() -> None:
    assert reason(record(V3), retraction(2)) is None
    assert reason(record(publication(2, epoch=1)), retraction(2)) is None


def test_who_holds_what_was_retracted_may_say_so_and_give_it_up() -> None:
    held = record(V2, was_whole=True)
    assert reason(record(V2), retraction(2), record(V2)) is None, "a repair"
    assert reason(record(V2, ROLLOUT), retraction(2)) is None
    assert reason(record(V2, phase=Phase.HIDDEN), retraction(2), held) is None


def test_anybody_may_retract() -> None:
    assert reason(retraction(2), mark(V2), record(V2)) is None


# --- the index (reasons.py) ---

PUBLICATIONS = [V1, V2, publication(2, OTHER), publication(2, generation=G2), V3]
some = st.one_of(
    st.builds(
        record,
        st.sampled_from(PUBLICATIONS),
        st.sampled_from([TRAINER, OTHER, ROLLOUT]),
        st.integers(0, 1),
        st.sampled_from(Phase),
        st.sampled_from([G1, G2]),
        st.booleans(),
        st.sampled_from(["v", "w"]),
        st.booleans(),
    ),
    st.builds(mark, st.sampled_from(PUBLICATIONS)),
    st.builds(fence, st.sampled_from([G1, G2]), st.sampled_from([TRAINER, ROLLOUT])),
    st.builds(retraction, st.sampled_from([1, 2])),
    st.builds(pin, st.sampled_from(PUBLICATIONS)),
)


@given(st.lists(st.tuples(some, st.integers(1, 3))), some)
def test_a_judgement_follows_from_what_is_held_not_from_how_it_came(
    history: list[tuple[Register, int]], new: Register
) -> None:
    held = Cells()
    for register, sequence in history:
        held.merge(0.0, [msgspec.structs.replace(register, sequence=sequence)])
    fresh = Cells(held.values())
    one, other = admit(KEY, held, new), admit(KEY, fresh, new)
    assert (one is None) == (other is None)
    assert one is None or other is None or one.reason == other.reason
    for cell in list(held):
        held.drop(cell)
    assert admit(KEY, held, new) is None


def test_other_keys_and_values_are_admitted() -> None:
    value: Value = GenerationRecord(G1, 0, (), 0)
    new = Register(PeerId("w"), "generation", 1, 1, value)
    assert admit(group_key(TRAINER), Cells(), new) is None
    assert reason(Register(PeerId("w"), "0@trainer", 1, 1, None), mark(V2), fence(G2)) is None
