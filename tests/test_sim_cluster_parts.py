"""The parts of the whole-cluster simulator that stand in for threads, tensors and wires."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub_p2p.sim.cluster.memory import Memory, digest_of, layout_of, torn
from tensorhub_p2p.sim.cluster.programs import Job, Worker
from tensorhub_p2p.sim.cluster.stage import ClusterSim
from tensorhub_p2p.sim.cluster.tasks import Pending, Steps, start

JOBS = [Job("trainer", "t", 0, 1, 4, period=100.0, keeps=True), Job("rollout", "r", 0, 1, 4)]


def test_a_task_goes_on_when_what_it_waits_for_is_settled() -> None:
    first, second = Pending(), Pending()
    seen: list[object] = []

    def task() -> Steps[str]:
        seen.append((yield first))
        try:
            yield second
        except ValueError as error:
            seen.append(str(error))
        return "done"

    end = start(task())
    assert seen == []
    first.settle(1)
    assert seen == [1]
    second.settle(error=ValueError("no"))
    assert seen == [1, "no"]
    assert end.settled
    assert end.value == "done"


def test_only_the_first_settling_counts() -> None:
    pending = Pending()
    pending.settle(1)
    pending.settle(2)
    assert pending.value == 1


def test_a_layout_is_a_real_one_of_so_many_chunks() -> None:
    assert layout_of(5).num_chunks == 5


def test_every_write_changes_every_chunk_and_its_digest() -> None:
    memory = Memory(layout_of(3))
    memory.write("one")
    before = [digest_of(token) for token in memory.tokens]
    memory.write("two")
    after = [digest_of(token) for token in memory.tokens]
    assert len(set(before) | set(after)) == 6
    assert digest_of(torn("one", "two")) not in before + after


def _tokens_after(
    change: Callable[[ClusterSim], None], *, one_sided: bool, until: float
) -> list[str]:
    """What the rollout holds then, if this happens at 1 s, while it reads (half a second each)."""
    sim = ClusterSim(4, JOBS, seed=3, rate=5e5, one_sided=one_sided)
    sim.network.at(1.0, lambda: change(sim))
    sim.run_for(until)
    return _worker(sim, "rollout").peer.handles[0].memory.tokens


def _worker(sim: ClusterSim, kind: str) -> Worker:
    return next(worker for worker in sim.workers if worker.job.kind == kind)


def _overwrite(sim: ClusterSim) -> None:
    """Against the rules: what is published changes."""
    _worker(sim, "trainer").peer.handles[0].memory.write("other")


def _pause(sim: ClusterSim) -> None:
    sim.network.pause(sim.peers[0])


def test_a_read_that_a_write_overlaps_is_torn() -> None:
    tokens = _tokens_after(_overwrite, one_sided=True, until=1.6)
    assert sum(token.startswith("torn(v1 ") for token in tokens) == 1, tokens


@pytest.mark.parametrize(("one_sided", "whole"), [(True, True), (False, False)])
def test_only_one_sided_reads_go_on_while_the_source_is_paused(
    one_sided: bool, whole: bool
) -> None:
    tokens = _tokens_after(_pause, one_sided=one_sided, until=3.5)
    assert all(token.startswith("v1") for token in tokens) is whole, tokens
