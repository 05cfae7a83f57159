"""The demo's verdict: it must be impossible to pass when something went wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tensorhub_p2p.cli.demo.board import Board
from tensorhub_p2p.cli.demo.plan import ROLLOUTS, SHARDS, TRAINER, Plan, worker_name
from tensorhub_p2p.cli.demo.reports import Broken, Published, Pulled, Struck, Trained

PLAN = Plan(steps=4)
ACCIDENT = PLAN.accident_version


def pulled(version: int, shard: int, **changes: object) -> Pulled:
    checksum = f"sum-{version}-{shard}"
    whole = Pulled(version, 100, 0.1, 0.1, {"trainer#0": 100}, ["cma"], 0, checksum)
    return replace(whole, **changes)


def good_run(board: Board) -> None:
    """Everything that a run without a fault reports."""
    for version in range(1, PLAN.final_version + 1):
        for shard in range(SHARDS):
            name = worker_name(TRAINER, shard)
            board.take(name, Published(version, 100, 0.001, f"sum-{version}-{shard}"))
            for replica in ROLLOUTS:
                name = worker_name(replica, shard)
                if version > ACCIDENT and name == "rollout-2#1":
                    name += "'"
                if version == ACCIDENT and name == "rollout-1#1":
                    board.take(name, Struck(0.2))
                    accident = pulled(version, shard, sources={"rollout-2#1": 40}, retried=2)
                    board.take(name, accident)
                    board.take("rollout-2#0", Broken("rollout-2#1 died"))
                    continue
                board.take(name, pulled(version, shard))
        board.take("trainer#0", Trained(version, 0.2 * version, 0.0, list(ROLLOUTS)))


def test_a_run_without_a_fault_passes() -> None:
    board = Board(PLAN)
    good_run(board)
    assert board.failures() == []
    assert board.checked == PLAN.final_version * 3 * SHARDS


def test_one_wrong_checksum_fails_the_run_and_names_process_and_version() -> None:
    board = Board(PLAN)
    good_run(board)
    board.take("rollout-0#1", pulled(PLAN.final_version, 1, checksum="other"))
    (failure,) = board.failures()
    assert "rollout-0#1" in failure
    assert f"version {PLAN.final_version}" in failure


def test_a_wrong_checksum_is_found_also_when_the_pull_was_reported_before_the_publish() -> None:
    board = Board(PLAN)
    board.take("rollout-0#1", pulled(1, 1, checksum="other"))
    assert board.wrong == []
    board.take("trainer#1", Published(1, 100, 0.001, "sum-1-1"))
    assert len(board.wrong) == 1


def test_a_pulled_version_that_nobody_published_fails_the_run() -> None:
    board = Board(PLAN)
    good_run(board)
    board.take("rollout-0#0", pulled(99, 0))
    assert any("99" in failure for failure in board.failures())


def test_a_reward_that_did_not_rise_fails_the_run() -> None:
    board = Board(PLAN)
    good_run(board)
    board.rewards = [replace(t, reward=0.3) for t in board.rewards]
    (failure,) = board.failures()
    assert "reward" in failure


def test_a_replica_without_the_final_version_fails_the_run() -> None:
    board = Board(PLAN)
    good_run(board)
    board.rows["rollout-2#1'"].version -= 1
    assert board.failures() == ["only 5 rollout processes got the final version"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda b: setattr(b, "struck", None), "was not killed"),
        (lambda b: setattr(b, "struck", Struck(0.0)), "was not killed"),
        (lambda b: setattr(b, "accident_pull", None), "did not finish"),
        (lambda b: setattr(b, "accident_pull", pulled(ACCIDENT, 1)), "served nothing"),
        (lambda b: setattr(b, "broken", 0), "nobody was told"),
        (lambda b: setattr(b, "broken_off", "trainer#0 died"), "trainer#0 died"),
    ],
)
def test_an_accident_that_did_not_happen_as_planned_fails_the_run(
    damage: object, said: str
) -> None:
    board = Board(PLAN)
    good_run(board)
    assert callable(damage)
    damage(board)
    assert any(said in failure for failure in board.failures())


def test_a_pull_beside_the_accident_is_not_taken_for_the_one_that_lost_its_source() -> None:
    board = Board(PLAN)
    board.take("rollout-1#1", Struck(0.2))
    board.take("rollout-1#0", pulled(ACCIDENT, 0))
    assert board.accident_pull is None
    board.take("rollout-1#1", pulled(ACCIDENT, 1, retried=2))
    assert board.accident_pull is not None
    assert board.accident_pull.retried == 2


def test_an_empty_run_is_a_failure_and_can_be_summarised() -> None:
    summary = Board(PLAN).summary()
    assert summary["ok"] is False
    json.dumps(summary)
