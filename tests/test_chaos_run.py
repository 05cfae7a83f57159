"""Whom the conductor of a chaos run holds for busy, and whom it starts again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from chaos import run
from chaos.casting import Shape
from chaos.faults import CLOCK_JUMP, Fault, Struck
from chaos.run import Conductor, Plan
from chaos.schedule import Planned


class Stage:
    """What a conductor asks of an arena, with no process behind it."""

    def __init__(self) -> None:
        self.cast = {f"w{number}": None for number in range(5)}
        self.clocks: list[str] = []
        self.busy: Counter[str] = Counter()
        self.started: list[str] = []

    def start_again(self, name: str) -> None:
        self.started.append(name)

    def give_clock(self, name: str, _library: str) -> None:
        self.clocks.append(name)

    def write(self, *_args: Any, **_what: Any) -> None:
        pass


def strikes(name: str) -> Fault:
    def strike(_arena: Any, _rng: random.Random) -> Iterator[Struck]:
        yield Struck((f"{name}.1",), 1.0)

    return Fault(name, strike, "", 1.0)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def conductor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Conductor:
    kinds = {kind: strikes("w") for kind in ("long", "short")}
    monkeypatch.setattr(run, "FAULTS", kinds)
    plan = Plan(1, (), Shape(), (), 1.0)
    return Conductor(plan, stage, lambda _what: None)  # type: ignore[arg-type]


def test_who_is_under_two_faults_is_free_after_both(stage: Stage, conductor: Conductor) -> None:
    for kind in ("long", "short"):
        conductor._strike(kind, 1)
    long, short = conductor._under_way.values()
    short()
    assert "w" in stage.busy
    long()
    assert "w" not in stage.busy


def test_who_is_under_a_fault_is_started_by_nobody_else(stage: Stage, conductor: Conductor) -> None:
    conductor._strike("long", 1)
    conductor._again("w")
    assert stage.started == []
    next(iter(conductor._under_way.values()))()
    conductor._again("w")
    assert stage.started == ["w"]


@pytest.mark.parametrize(
    ("kind", "count"),
    [("loss", 0), (CLOCK_JUMP, run.WITH_CLOCKS)],
)
def test_clocks_are_given_only_where_one_is_to_be_set(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    monkeypatch.setattr(run, "faketime", lambda: "libfaketime.so")
    plan = Plan(1, (), Shape(), (Planned(1.0, kind),), 1.0)
    run._give_clocks(stage, plan)  # type: ignore[arg-type]
    assert len(stage.clocks) == count
