"""What one key holds stays small, whatever comes and goes under it; two copies compare quickly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.directory.cells import (
    OF_ONE_WRITER,
    RETRACTIONS_KEPT,
    WITHDRAWN_KEPT,
    Cells,
)
from tensorhub_p2p.protocol.directory.registers import fingerprint, of_mark
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication
from tensorhub_p2p.protocol.messages import Pin, Register, Retraction, Value, WholeMark

WHAT = Publication(0, 1, "trainer", Generation(1, 1))
PIN = Pin(WHAT, Group("policy", "rollout"), Generation(1, 1), 1)
MANY = 3 * WITHDRAWN_KEPT


def pins(count: int, value: Value | None, sequence: int = 2) -> list[Register]:
    return [Register(PeerId(f"{i}"), "pin/0@rollout", 1, sequence, value) for i in range(count)]


def test_what_was_withdrawn_is_forgotten_once_there_is_much_of_it() -> None:
    held = Cells(pins(MANY, None))
    assert WITHDRAWN_KEPT <= len(held) <= 2 * WITHDRAWN_KEPT
    assert (PeerId(f"{MANY - 1}"), "pin/0@rollout") in held


def test_what_was_withdrawn_first_is_forgotten_first() -> None:
    """Of the others an older copy may still be under way, which would bring them back."""
    held = Cells(pins(MANY, PIN))
    for register in reversed(pins(MANY, None, sequence=3)):
        held.merge(0.0, (register,))
    assert (PeerId("0"), "pin/0@rollout") in held
    assert (PeerId(f"{MANY - 1}"), "pin/0@rollout") not in held


def test_one_writer_that_withdraws_much_does_not_push_out_what_others_withdrew() -> None:
    held = Cells(pins(10, None))
    for number in range(MANY):
        held.merge(0.0, (Register(PeerId("w"), f"{number}@trainer", 1, 2, None),))
    assert len(held) <= 10 + 2 * OF_ONE_WRITER
    assert all(register.cell in held for register in pins(10, None))


def test_what_stands_is_kept_however_much_it_is() -> None:
    assert len(Cells(pins(MANY, PIN))) == MANY


def test_what_was_withdrawn_long_ago_is_forgotten() -> None:
    held = Cells(pins(2, PIN))
    held.merge(10.0, pins(1, None, sequence=3))
    held.merge(20.0, (Register(PeerId("w"), "a", 1, 1, None),))
    assert held.forget_withdrawn(15.0) == 1
    assert set(held) == {(PeerId("1"), "pin/0@rollout"), (PeerId("w"), "a")}


def test_what_was_forgotten_and_is_written_again_is_there_again() -> None:
    held = Cells(pins(MANY, None))
    again = Register(PeerId("0"), "pin/0@rollout", 1, 3, PIN)
    assert held.merge(0.0, (again,)) == [again]
    assert held[again.cell] == again


def test_the_newest_retractions_are_kept() -> None:
    held = Cells()
    for version in range(10 * RETRACTIONS_KEPT):
        held.merge(0.0, (of_mark(Retraction(0, version)),))
    assert len(held) <= 2 * RETRACTIONS_KEPT
    assert held.reasons.retraction((0, 10 * RETRACTIONS_KEPT - 1)) is not None
    assert held.reasons.retraction((0, 0)) is None


values = st.sampled_from([None, PIN, WholeMark(WHAT, 1)])
some = st.lists(
    st.builds(
        lambda writer, name, sequence, value: Register(PeerId(writer), name, 1, sequence, value),
        st.sampled_from("abc"),
        st.sampled_from(["x", "y"]),
        st.integers(1, 5),
        values,
    ),
    # One writer says one thing under one order.
    unique_by=lambda r: (r.cell, r.order),
)


@given(some, st.randoms())
def test_copies_that_merged_the_same_in_any_order_are_equal_and_have_one_fingerprint(
    registers: list[Register], rng: object
) -> None:
    one = Cells(registers)
    other = Cells()
    rng.shuffle(registers)  # type: ignore[attr-defined]
    for register in registers:
        other.merge(0.0, (register,))
    assert dict(one) == dict(other)
    assert one.fingerprint == other.fingerprint == fingerprint(one.values())
    for writer in map(PeerId, "abc"):
        assert one.print_by(writer) == fingerprint(one.live_by(writer))


@given(some)
def test_nothing_is_left_of_what_was_dropped(registers: list[Register]) -> None:
    held = Cells(registers)
    for cell in list(held):
        held.drop(cell)
    empty = Cells()
    assert vars(held.reasons) == vars(empty.reasons)
    assert {k: v for k, v in vars(held).items() if k != "reasons"} == {
        k: v for k, v in vars(empty).items() if k != "reasons"
    }
