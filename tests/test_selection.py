"""Which publication answers a question, read from registers alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.protocol.directory.registers import of_mark
from tensorhub_p2p.protocol.groups.selection import (
    MAX_SOURCES,
    NO_FLOOR,
    Copy,
    describe,
    holdings,
    newer_than,
    select,
    selector_of,
    sources_for,
)
from tensorhub_p2p.protocol.identity import NOBODY, Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import (
    Phase,
    Question,
    Register,
    Retraction,
    Source,
    VersionRecord,
    WholeMark,
)

GENERATION = Generation(1, 7)


def publication(version: int, epoch: int = 0, replica: str = "trainer") -> Publication:
    return Publication(epoch, version, replica, GENERATION)


def held(
    what: Publication,
    shard: int,
    phase: Phase = Phase.READY,
    writer: str = "w",
    replica: str | None = None,
    num_shards: int = 2,
    was_whole: bool = False,
    generation: Generation = GENERATION,
    **more: Any,
) -> Register:
    slot = Slot(Group("policy", replica or what.replica), shard)
    record = VersionRecord(slot, num_shards, what, phase, generation, was_whole, **more)
    return Register(PeerId(f"{writer}{shard}"), f"{shard}@{slot.group.replica}", 1, 1, record)


def whole(what: Publication, num_shards: int = 2, **options: object) -> list[Register]:
    return [held(what, s, num_shards=num_shards, **options) for s in range(num_shards)]  # type: ignore[arg-type]


def marked(what: Publication, num_shards: int = 2) -> Register:
    return Register(NOBODY, f"whole:{what!r}", 1, 1, WholeMark(what, num_shards))


def nobody(_peer: PeerId) -> bool:
    return False


def answer(
    selector: str,
    *registers: Register,
    floor: tuple[int, int] = NO_FLOOR,
    gone: frozenset[str] = frozenset(),
) -> Publication | None:
    found = holdings(registers, lambda peer: peer in gone)
    chosen = select(Question("replicate", selector), found, floor)
    return chosen.publication if chosen is not None else None


# --- what people may ask for ---


@pytest.mark.parametrize(
    ("wanted", "selector"),
    [
        (7, "7"),
        ("7", "7"),
        ("007", "7"),
        (0, "0"),
        ("latest", "latest"),
        ("latest-2", "latest-2"),
        ("latest-0", "latest"),
        ("latest-07", "latest-7"),
    ],
)
def test_a_selector_has_one_text_so_that_equal_questions_compare_equal(
    wanted: int | str, selector: str
) -> None:
    assert selector_of(wanted) == selector


@pytest.mark.parametrize(
    "wanted", [-1, "", "newest", "latest-", "latest--1", ">7", "7.0", 7.0, None, True, "9" * 30]
)
def test_what_is_no_version_is_refused_by_name(wanted: object) -> None:
    with pytest.raises(ConfigError, match="version"):
        selector_of(wanted)  # type: ignore[arg-type]


# --- whole and covered (G3) ---


def test_a_publication_is_whole_once_every_shard_of_its_replica_is_ready() -> None:
    v1 = publication(1)
    assert answer("latest", held(v1, 0)) is None
    assert answer("latest", held(v1, 0), held(v1, 1)) == v1


@pytest.mark.parametrize("phase", [Phase.PARTIAL, Phase.WITHDRAWING, Phase.HIDDEN])
def test_a_shard_that_is_not_ready_makes_nothing_whole(phase: Phase) -> None:
    v1 = publication(1)
    assert answer("latest", held(v1, 0), held(v1, 1, phase)) is None


def test_copies_in_other_replicas_make_nothing_whole() -> None:
    v1 = publication(1)
    assert answer("latest", held(v1, 0), held(v1, 1, replica="rollout")) is None


def test_a_shard_that_is_ready_in_another_generation_makes_nothing_whole() -> None:
    v1 = publication(1)
    other = held(v1, 1, generation=Generation(2, 7))
    assert answer("latest", held(v1, 0), other) is None


def test_what_was_whole_once_is_covered_by_whoever_holds_it() -> None:
    v1 = publication(1)
    copies = whole(v1, replica="rollout", was_whole=True)
    assert answer("latest", *copies) == v1
    mixed = [held(v1, 0), held(v1, 1, writer="r", replica="rollout", was_whole=True)]
    assert answer("latest", *mixed) == v1


def test_a_mark_alone_covers_nothing() -> None:
    v1 = publication(1)
    assert answer("latest", marked(v1), held(v1, 0)) is None
    assert answer("latest", marked(v1), *whole(v1, replica="rollout")) == v1


def test_the_dead_cover_nothing_but_strangers_do() -> None:
    v1 = publication(1)
    registers = [marked(v1), *whole(v1)]
    assert answer("latest", *registers, gone=frozenset({"w1"})) is None
    assert answer("latest", *registers, gone=frozenset({"x1"})) == v1
    spare = held(v1, 1, writer="r", replica="rollout", was_whole=True)
    assert answer("latest", *registers, spare, gone=frozenset({"w1"})) == v1


# --- which one ---


V1, V2, V3 = (publication(n) for n in (1, 2, 3))
R1, R5 = publication(1, epoch=1), publication(5, epoch=1)


def all_of(*publications: Publication) -> list[Register]:
    return [
        register
        for p in publications
        for register in whole(p, writer=f"{p.replica}{p.version}.{p.epoch}.")
    ]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("latest", V3),
        ("latest-1", V2),
        ("latest-2", V1),
        ("latest-3", None),
        ("2", V2),
        ("4", None),
        (newer_than(2), V3),
        (newer_than(3), None),
    ],
)
def test_selectors_in_one_epoch(selector: str, expected: Publication | None) -> None:
    assert answer(selector, *all_of(V1, V2, V3)) == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("latest", R5), ("latest-1", R1), ("latest-2", None), ("1", R1), ("3", V3), ("5", R5)],
)
def test_a_rewind_opens_an_epoch_that_hides_the_one_before(
    selector: str, expected: Publication | None
) -> None:
    assert answer(selector, *all_of(V1, V2, V3, R1, R5)) == expected


def test_waiting_for_something_newer_ends_also_by_a_rewind() -> None:
    assert answer(newer_than(3), *all_of(V3), floor=(0, 3)) is None
    assert answer(newer_than(3), *all_of(V3, R1), floor=(0, 3)) == R1
    assert answer(newer_than(3), *all_of(V3, R1), floor=(1, 1)) is None


def test_latest_never_goes_below_the_floor() -> None:
    assert answer("latest", *all_of(V1, V2), floor=(0, 3)) is None
    assert answer("latest", *all_of(V1, V2, V3), floor=(0, 3)) == V3
    assert answer("2", *all_of(V1, V2), floor=(0, 3)) == V2, "a number asks for just that"


def test_of_several_publications_of_one_version_the_lowest_answers() -> None:
    other = publication(3, replica="trainer-b")
    assert answer("latest", *all_of(other, V3)) == V3
    assert answer("3", *all_of(other)) == other


@given(st.permutations(all_of(V1, V2, V3, R1, publication(3, replica="trainer-b"))))
def test_the_order_of_the_registers_changes_nothing(registers: list[Register]) -> None:
    assert answer("latest", *registers) == R1
    assert answer("3", *registers) == V3


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=8),
    st.tuples(st.integers(0, 2), st.integers(0, 6)),
)
def test_latest_is_the_highest_that_is_not_below_the_floor(
    orders: list[tuple[int, int]], floor: tuple[int, int]
) -> None:
    registers = all_of(*(publication(version, epoch) for epoch, version in sorted(set(orders))))
    highest = max(orders, default=NO_FLOOR)
    chosen = answer("latest", *registers, floor=floor)
    if highest >= floor:
        assert chosen is not None
        assert chosen.order == highest
    else:
        assert chosen is None


def test_what_exists_is_told_with_what_keeps_it_from_being_used() -> None:
    assert describe({}) == "nothing is published"
    text = describe(holdings((*all_of(V1), held(V2, 0)), nobody))
    assert "version 2 by trainer (not whole yet, no reachable holder of shard 1)" in text
    assert "version 1 by trainer (whole)" in text


def test_what_was_retracted_answers_nothing_and_hides_nothing() -> None:
    retraction = of_mark(Retraction(0, 3))
    registers = [*all_of(V1, V2, V3), retraction]
    assert answer("latest", *registers) == V2
    assert answer("latest-1", *registers) == V1
    assert answer("3", *registers) is None
    assert answer("3", *all_of(publication(3, epoch=1)), retraction) == publication(3, epoch=1)
    assert "version 3 by trainer (retracted)" in describe(holdings(registers, nobody))


# --- whom a pull may begin with ---


def test_those_who_have_all_of_a_shard_and_are_near_are_named_for_it() -> None:
    registers = [
        *whole(V1, writer="t"),
        held(V1, 0, writer="far", replica="elsewhere"),
        held(V1, 0, Phase.PARTIAL, writer="p", replica="partial"),
        held(V1, 1, Phase.WITHDRAWING, writer="w", replica="leaving"),
        held(V2, 1, writer="n", replica="newer"),
    ]
    found = holdings(registers, nobody)[V1]
    sources = sources_for(Group("policy", "r"), found, lambda peer: peer != "far0")
    trainer = Group("policy", "trainer")
    assert sources == {s: (Source(PeerId(f"t{s}"), Slot(trainer, s)),) for s in (0, 1)}


def test_groups_that_may_begin_with_many_holders_spread_over_them() -> None:
    holders = [held(V1, 0, writer=f"h{i}-", replica=f"h{i}", num_shards=1) for i in range(8)]
    found = holdings(holders, nobody)[V1]
    first: dict[Source, int] = {}
    for number in range(1000):
        chosen = sources_for(Group("policy", f"rollout-{number}"), found, lambda _peer: True)[0]
        assert len(set(chosen)) == MAX_SOURCES
        first[chosen[0]] = first.get(chosen[0], 0) + 1
    assert len(first) == 8
    assert max(first.values()) < 1.5 * 1000 / 8


def test_nobody_is_named_where_replicas_publish_the_version_side_by_side() -> None:
    beside = publication(1, replica="trainer-2")
    found = holdings([*whole(V1), *whole(beside, writer="b"), *whole(V2, writer="n")], nobody)
    group = Group("policy", "r")
    assert sources_for(group, found[V1], lambda _peer: True) == {}
    assert set(sources_for(group, found[V2], lambda _peer: True)) == {0, 1}
    left = holdings([*whole(V1), marked(beside)], nobody)[V1]
    assert set(sources_for(group, left, lambda _peer: True)) == {0, 1}, "nobody has it any more"


# --- what a withdrawal may count on ---


def test_reliable_are_ready_holders_that_mean_to_stay() -> None:
    registers = [
        held(V1, 0, writer="t"),
        held(V1, 0, writer="r", replica="rollout"),
        held(V1, 0, writer="s", replica="spot", spot=True),
        held(V1, 0, Phase.PARTIAL, writer="p", replica="partial"),
        held(V1, 0, Phase.WITHDRAWING, writer="w", replica="leaving"),
        held(V1, 0, writer="g", replica="gone"),
    ]
    holding = holdings(registers, lambda peer: peer == "g0")[V1]
    assert holding.reliable == {0: {"t0", "r0"}}
    assert [(copy.peer, copy.withdrawing) for copy in holding.copies[0]] == [
        ("t0", False),
        ("r0", False),
        ("w0", True),
    ]


def test_a_version_is_safe_once_each_shard_is_elsewhere_than_in_the_publishers_tensors() -> None:
    def safe(*registers: Register) -> bool:
        return holdings(registers, nobody)[V1].safe

    live = whole(V1, writer="t")
    pulled = [held(V1, shard, writer="r", replica="rollout") for shard in range(2)]
    assert not safe(*live)
    assert not safe(*live, pulled[0])
    assert safe(*live, *pulled)
    assert safe(*pulled)
    kept = held(V1, 1, writer="t", replica="kept/t/1", offload=True)
    assert safe(*live, pulled[0], kept), "an offload counts, in the publisher's process too"
    withdrawing = held(V1, 1, Phase.WITHDRAWING, writer="r", replica="rollout")
    assert not safe(*live, pulled[0], withdrawing)


def test_a_copy_says_by_which_slot_it_is_held_and_as_what() -> None:
    kept = held(V1, 1, writer="t", replica="kept/t/1", offload=True)
    found = holdings([*whole(V1, writer="t"), kept], nobody)[V1]
    live = Slot(Group("policy", "trainer"), 1)
    assert set(found.copies[1]) == {
        Copy(PeerId("t1"), live, offload=False, live=True, withdrawing=False),
        Copy(
            PeerId("t1"),
            Slot(Group("policy", "kept/t/1"), 1),
            offload=True,
            live=False,
            withdrawing=False,
        ),
    }


A, B = b"a" * 16, b"b" * 16
LOWER, THIRD = publication(1, replica="other"), publication(1, replica="zebra")
"""Of the same version as V1, by a replica below and above the trainer."""


def contradicted(*registers: Register, is_gone: Any = nobody) -> dict[Publication, Any]:
    """By publication: what it is contradicted by. The others were whole once."""
    marks = [marked(what) for what in (LOWER, THIRD)]
    found = holdings([*registers, *marks], is_gone)
    return {p: h.contradicted_by for p, h in found.items() if h.contradicted_by is not None}


def test_of_publications_whose_bytes_differ_the_higher_one_is_contradicted() -> None:
    mine, lower = held(V1, 0, digests=A), held(LOWER, 0, writer="o", digests=B)
    assert holdings([mine], nobody)[V1].digests == {0: A}
    assert contradicted(mine, lower) == {V1: LOWER}
    assert contradicted(mine, held(LOWER, 0, writer="o", digests=A)) == {}
    assert contradicted(mine, held(LOWER, 0, writer="o")) == {}, "it has not said what it is"


def test_bytes_are_compared_shard_by_shard_of_replicas_that_are_cut_alike() -> None:
    lower = held(LOWER, 0, writer="o", digests=B)
    assert contradicted(held(V1, 1, digests=A), lower) == {}
    assert contradicted(held(V1, 0, digests=A, num_shards=4), lower) == {}
    assert contradicted(held(publication(2), 0, digests=A), lower) == {}
    assert contradicted(held(V1, 0, digests=A, replica="rollout"), lower) == {}, "it pulled it"


def test_who_agrees_with_the_lowest_is_not_contradicted_by_one_between() -> None:
    lowest = held(LOWER, 0, writer="o", digests=A)
    between, third = held(V1, 0, digests=B), held(THIRD, 0, writer="z", digests=A)
    assert contradicted(third, between, lowest) == {V1: LOWER}
    more = [held(V1, 1, digests=B), held(THIRD, 1, writer="z", digests=A)]
    assert contradicted(third, between, lowest, *more) == {V1: LOWER}, "nor in other shards"


def test_what_is_contradicted_answers_nobody_whoever_has_a_copy_of_it() -> None:
    pulled = [held(V1, s, replica="rollout", writer="r", was_whole=True) for s in range(2)]
    hidden = held(V1, 0, phase=Phase.HIDDEN, digests=A)
    assert answer("latest", *pulled, hidden) == V1
    lower = [held(LOWER, 0, writer="o", digests=B), marked(LOWER)]
    assert answer("latest", *pulled, hidden, *lower) is None
    assert f"other bytes than {LOWER}" in describe(holdings([*pulled, hidden, *lower], nobody))
    assert answer("latest", *pulled, hidden, *whole(LOWER, digests=B)) == LOWER


def test_a_publication_that_is_not_whole_contradicts_nobody() -> None:
    mine, lower = held(V1, 0, digests=A), held(LOWER, 0, writer="o", digests=B)
    found = holdings([mine, lower, *whole(V1, writer="t")], nobody)
    assert found[V1].contradicted_by is None
    assert answer("latest", *whole(V1, digests=A), lower) == V1


def test_a_publication_that_nobody_has_any_more_contradicts_nobody() -> None:
    mine, lower = held(V1, 0, digests=A), held(LOWER, 0, writer="o", digests=B)
    gone = held(LOWER, 0, phase=Phase.HIDDEN, writer="o", digests=B)
    pulled = held(LOWER, 0, replica="rollout", writer="r")
    assert contradicted(mine, gone) == {}
    assert contradicted(mine, gone, pulled) == {V1: LOWER}
    assert contradicted(mine, lower, is_gone=lambda peer: peer == "o0") == {}
