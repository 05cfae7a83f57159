"""Two dozen simulated clusters under faults, and every run that once failed.

A seed that fails prints its faults; `python -m tensorhub_p2p.sim.cluster.seeds --first SEED
--seeds 1 --failures tests/regressions/cluster` keeps it, shrunk, for the second test here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorhub_p2p.errors import VersionConflict
from tensorhub_p2p.sim.cluster.faults import Leave
from tensorhub_p2p.sim.cluster.history import Ended, Fact, Holding, LeftWell, LetGo, Replicated
from tensorhub_p2p.sim.cluster.seeds import ClusterRun, Setting, main, run_seed
from tensorhub_p2p.sim.faults import Crash, Schedule

SEEDS, BLOCK = 24, 2
REGRESSIONS = sorted((Path(__file__).parent / "regressions" / "cluster").glob("*.json"))


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_a_cluster_keeps_its_promises_under_faults_and_works_afterwards(first: int) -> None:
    for seed in range(first, first + BLOCK):
        run_seed(seed)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_once_failed_does_not_fail_again(path: Path) -> None:
    ClusterRun.from_json(json.loads(path.read_text())).carry_out()


def test_a_seed_decides_the_whole_run() -> None:
    one, again, other = run_seed(11), run_seed(11), run_seed(12)
    assert one.network.trace == again.network.trace
    assert one.history.count == again.history.count
    assert one.network.trace != other.network.trace


def test_a_run_that_was_kept_as_a_file_is_the_same_run() -> None:
    setting = Setting.drawn(7)
    run = ClusterRun(setting, setting.faults())
    again = ClusterRun.from_json(json.loads(json.dumps(run.to_json())))
    run.carry_out()
    again.carry_out()
    assert run.sim.network.trace == again.sim.network.trace


def test_seeds_draw_many_different_settings() -> None:
    drawn = [Setting.drawn(seed) for seed in range(200)]
    assert {setting.zones for setting in drawn} == {1, 2}
    assert {setting.shards for setting in drawn} == {1, 2, 3}
    for name in ("steady", "converged", "sockets", "one_sided", "cuts", "keeps", "slow_repair"):
        assert {getattr(setting, name) for setting in drawn} == {True, False}, name
    assert any(setting.elastic for setting in drawn)
    assert {setting.bucket_registers for setting in drawn} == {4, 8, 48}
    assert any(setting.deviates and setting.jobs()[-1].side_by_side for setting in drawn)
    assert any(setting.follower for setting in drawn)
    assert any(setting.steady and setting.cuts for setting in drawn)
    for name in ("retainers", "offload_chunks", "copy_fails", "spot", "retracts"):
        assert any(getattr(setting, name) for setting in drawn), name
    for name in ("herd", "wishers", "rests", "deviates"):
        assert any(getattr(setting, name) for setting in drawn), name


def test_without_faults_every_rollout_gets_version_after_version() -> None:
    seen: dict[str, list[int]] = {}

    def note(_now: float, fact: Fact) -> None:
        if isinstance(fact, Replicated):
            seen.setdefault(str(fact.handle.slot), []).append(fact.publication.version)

    run = ClusterRun(Setting(1, rollouts=2, duration=6.0), Schedule())
    run.sim.history.listeners.append(note)
    run.carry_out()
    assert len(seen) == 4
    for versions in seen.values():
        assert len(set(versions)) > 5, versions
        assert versions == sorted(versions)


def test_a_wanted_version_is_copied_when_nobody_else_has_it_and_freed_when_it_is_old() -> None:
    kept: set[str] = set()
    freed: set[str] = set()

    def note(_now: float, fact: Fact) -> None:
        if fact.handle.slot.group.replica.startswith("kept/"):
            if isinstance(fact, Holding):
                kept.add(str(fact.handle))
            elif isinstance(fact, LetGo):
                freed.add(str(fact.handle))

    setting = Setting(
        3, shards=1, keeps=False, period=0.4, retainers=1, newest=3, offload_chunks=400
    )
    run = ClusterRun(setting, Schedule())
    run.sim.history.listeners.append(note)
    run.carry_out()
    assert len(freed) > 3
    assert freed <= kept


def test_who_leaves_well_hands_on_what_it_keeps() -> None:
    left: list[tuple[str, ...]] = []

    def note(_now: float, fact: Fact) -> None:
        if isinstance(fact, LeftWell):
            left.append(fact.lost)

    setting = Setting(4, spares=2, shards=1, keeps=False, retainers=1, newest=2, offload_chunks=400)
    run = ClusterRun(setting, Schedule((Leave(1.0, 3.0, 0), Leave(5.0, 3.0, 1))))
    run.sim.history.listeners.append(note)
    run.carry_out()
    assert left == [(), ()]


def test_who_publishes_other_bytes_than_a_lower_replica_is_told_by_its_next_verb() -> None:
    # Pulls that last long enough for the higher one to be asked, too, and versions that stay long
    # enough for what is found then: of a rival that nobody asks nothing is known.
    told: list[int] = []
    seen: set[tuple[int, str]] = set()

    def note(_now: float, fact: Fact) -> None:
        if isinstance(fact, Ended) and isinstance(fact.error, VersionConflict):
            assert fact.handle.slot.group.replica == "trainer-1"
            told.append(int(str(fact.error).split()[1]))
        elif isinstance(fact, Replicated):
            seen.add((fact.publication.version, fact.publication.replica))

    setting = Setting(
        5, shards=1, trainers=2, rollouts=2, period=6.0, duration=40.0, chunks=24, deviates=True
    )
    run = ClusterRun(setting, Schedule())
    run.sim.history.listeners.append(note)
    run.carry_out()
    there = {version for version, _ in seen}
    assert {(version, "trainer-0") for version in there} <= seen
    assert told == [version for version in range(1, max(there)) if version % 2]


def test_a_job_goes_on_in_another_process_when_its_own_is_gone() -> None:
    run = ClusterRun(Setting(2, duration=6.0), Schedule((Crash(1.0, float("inf"), 3, host=True),)))
    run.carry_out()
    job = run.sim.jobs[3]
    workers = [worker for worker in run.sim.workers if worker.job == job]
    assert len(workers) == 2
    assert workers[0].place == 3
    assert run.sim.does(workers[1])


def test_the_command_runs_the_seeds_that_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--first", "5", "--seeds", "1"]) == 0
    assert capsys.readouterr().out == "1 seeds from 5: 0 failed\n"
