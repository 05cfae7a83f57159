"""Sixty simulated memberships under faults, and every run that once failed.

A seed that fails prints its faults; `python -m tensorhub_p2p.sim.seeds --first SEED --seeds 1
--failures tests/regressions` keeps it, shrunk, for the second test here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorhub_p2p.sim.seeds import Run, Setting, main, run_seed

SEEDS, BLOCK = 60, 10
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_membership_is_safe_under_faults_and_agrees_afterwards(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run_seed(seed)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_once_failed_does_not_fail_again(path: Path) -> None:
    Run.from_json(json.loads(path.read_text())).carry_out()


def test_a_seed_decides_the_whole_run() -> None:
    assert run_seed(11).network.trace == run_seed(11).network.trace
    assert run_seed(11).network.trace != run_seed(12).network.trace


def test_seeds_draw_many_different_settings() -> None:
    drawn = [Setting.drawn(seed) for seed in range(200)]
    assert {setting.zones for setting in drawn} == {1, 2, 3}
    assert {setting.converged for setting in drawn} == {True, False}
    assert {setting.sockets for setting in drawn} == {True, False}
    assert any(setting.only_stalls for setting in drawn)
    assert min(setting.peers for setting in drawn) == 3


def test_the_command_runs_the_seeds_that_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first", "5", "--seeds", "2"]) == 0
    assert capsys.readouterr().out == "2 seeds from 5: 0 failed\n"
