"""What one key holds stays small, whatever comes and goes under it."""

from __future__ import annotations

from tensorhub_p2p.protocol.directory.registers import Cell, merge, prune_pins
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication
from tensorhub_p2p.protocol.messages import Pin, Register, Value

WHAT = Publication(0, 1, "trainer", Generation(1, 1))
PIN = Pin(WHAT, Group("policy", "rollout"), Generation(1, 1), 1)


def cells(count: int, name: str, value: Value | None) -> dict[Cell, Register]:
    registers = [Register(PeerId(f"{name}{i}"), name, 1, 2, value) for i in range(count)]
    return {register.cell: register for register in registers}


def test_pins_that_were_taken_back_are_forgotten_once_there_are_many() -> None:
    held = cells(9, "pin/0@rollout", None)
    assert prune_pins(held, kept=4) == 5
    assert [writer for writer, _ in held] == [f"pin/0@rollout{i}" for i in range(5, 9)]


def test_the_pins_that_were_taken_back_first_are_forgotten_first() -> None:
    """Of the others an older copy may still be under way, which would bring them back."""
    held = cells(9, "pin/0@rollout", PIN)
    for writer, name in reversed(tuple(held)):
        merge(held, (Register(writer, name, 1, 3, None),))
    assert prune_pins(held, kept=4) == 5
    assert {writer for writer, _ in held} == {f"pin/0@rollout{i}" for i in range(4)}


def test_pins_that_stand_and_what_else_was_withdrawn_are_kept() -> None:
    held = cells(20, "pin/0@rollout", PIN) | cells(20, "0@rollout", None)
    assert prune_pins(held, kept=4) == 0
    held |= cells(9, "pin/1@rollout", None)
    assert prune_pins(held, kept=4) == 5
    assert len(held) == 44


def test_a_pin_that_was_forgotten_and_is_written_again_is_there_again() -> None:
    held = cells(9, "pin/0@rollout", None)
    prune_pins(held, kept=4)
    again = Register(PeerId("pin/0@rollout0"), "pin/0@rollout", 1, 3, PIN)
    assert merge(held, (again,)) == 1
