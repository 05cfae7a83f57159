"""Processes die, stop and are interrupted in the middle of things; the others go on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import steps
from steps import MIB, blank, fill
from workers import Worker

import tensorhub_p2p as th
from tensorhub_p2p.transfer.links import Link
from tensorhub_p2p.transfer.transports.tcp_reader import TcpReader

pytestmark = pytest.mark.processes
Take = Callable[[int], list[Worker]]
IMPATIENT = th.Config(pull=th.PullConfig(unavailable_after=1.0))
"""Gives a version up sooner, so that the tests are shorter."""
BIG = {"count": 3, "size": 8 * MIB}
"""96 chunks of 256 KiB: enough for a middle."""


class Team:
    """Workers in one cluster; the first one is the seed."""

    def __init__(self, take: Take, cluster: str, count: int, **options: Any) -> None:
        self.take, self.cluster, self.options = take, cluster, options
        self.workers = take(count)
        self.seed = self.workers[0].do(steps.start, cluster, name="worker-0", **options)
        for number, worker in enumerate(self.workers[1:], 1):
            worker.begin(steps.start, cluster, [self.seed], name=f"worker-{number}", **options)
        for worker in self.workers[1:]:
            worker.finish()

    def newcomer(self, seeds: list[str] | None = None) -> Worker:
        (worker,) = self.take(1)
        self.workers.append(worker)
        worker.do(steps.start, self.cluster, seeds or [self.seed], name="newcomer", **self.options)
        return worker

    def assert_no_faults(self) -> None:
        for worker in self.workers:
            if worker.alive:
                assert not worker.do(steps.faults)


@pytest.fixture
def team(take: Take, cluster: str) -> Callable[..., Team]:
    def start(count: int, **options: Any) -> Team:
        options.setdefault("config", IMPATIENT)
        return Team(take, cluster, count, **options)

    return start


# --- sources and pullers -----------------------------------------------------------------


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_source_that_dies_in_the_middle_of_a_pull_is_replaced(
    team: Callable[..., Team], transport: str
) -> None:
    t = team(3, transports=[transport])
    trainer, holder, puller = t.workers
    trainer.do(steps.open_shard, "trainer", **BIG)
    trainer.do(steps.publish, 1)
    for worker, replica in ((holder, "holder"), (puller, "puller")):
        worker.do(steps.open_shard, replica, **BIG)
    holder.do(steps.replicate, 1)
    puller.begin(steps.replicate_pausing, 1)
    puller.wait_paused("in the middle of the pull")
    trainer.kill()
    puller.go_on()
    pull = puller.finish()
    assert pull.bytes >= 24 * MIB
    assert "holder" in {source.slot.split("#")[0].split("/")[1] for source in pull.sources}
    t.assert_no_faults()


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_when_the_only_source_dies_the_pull_fails_and_another_version_works(
    team: Callable[..., Team], transport: str
) -> None:
    t = team(3, transports=[transport])
    puller, trainer, other = t.workers
    for worker, replica in ((trainer, "trainer"), (puller, "puller"), (other, "other")):
        worker.do(steps.open_shard, replica, **BIG)
    trainer.do(steps.publish, 1)
    puller.begin(steps.replicate_pausing_at_first, 1)
    puller.wait_paused("before the first byte")
    trainer.kill()
    puller.go_on()
    with pytest.raises(th.VersionUnavailable, match=r"version 1 by trainer.*chunks"):
        puller.finish()
    assert puller.do(steps.state) is th.HandleState.TORN
    other.do(steps.publish, 2)
    assert puller.do(steps.replicate, "latest").version == 2
    assert puller.do(steps.state) is th.HandleState.PUBLISHED
    t.assert_no_faults()


def test_a_stopped_source_holds_a_pull_up_for_a_moment_only(team: Callable[..., Team]) -> None:
    t = team(3, transports=["tcp"])
    holder, trainer, puller = t.workers
    for worker, replica in ((trainer, "trainer"), (holder, "holder"), (puller, "puller")):
        worker.do(steps.open_shard, replica, **BIG)
    trainer.do(steps.publish, 1)
    holder.do(steps.replicate, 1)
    puller.begin(steps.replicate_pausing, 1)
    puller.wait_paused("in the middle of the pull")
    trainer.signal(signal.SIGSTOP)
    try:
        puller.go_on()
        pull = puller.finish()
    finally:
        trainer.signal(signal.SIGCONT)
    assert pull.version == 1
    t.assert_no_faults()


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_puller_that_dies_holds_unpublish_up_until_it_is_known_to_be_dead_at_most(
    team: Callable[..., Team], transport: str
) -> None:
    t = team(2, transports=[transport])
    trainer, puller = t.workers
    for worker, replica in ((trainer, "trainer"), (puller, "puller")):
        worker.do(steps.open_shard, replica, **BIG)
    trainer.do(steps.publish, 1)
    puller.begin(steps.replicate_pausing, 1)
    puller.wait_paused("in the middle of the pull")
    puller.kill()
    assert trainer.do(steps.unpublish, timeout=30) < 15
    trainer.do(steps.publish, 2)
    t.assert_no_faults()


def test_a_version_outlives_its_trainer_at_a_rollout(team: Callable[..., Team]) -> None:
    t = team(4)
    trainer, first, second, third = t.workers
    for worker, replica in zip(t.workers, ("trainer", "a", "b", "c"), strict=True):
        worker.do(steps.open_shard, replica)
    trainer.do(steps.publish, 5)
    first.do(steps.replicate, 5)
    trainer.kill()
    second.begin(steps.replicate, "latest")
    third.begin(steps.replicate, 5)
    assert second.finish().version == third.finish().version == 5
    found = first.do(steps.versions)
    assert [(version.version, version.whole) for version in found] == [(5, True)]
    t.assert_no_faults()


def test_a_torn_handle_that_tried_again_serves_what_it_got(team: Callable[..., Team]) -> None:
    t = team(3)
    trainer, puller, third = t.workers
    for worker, replica in zip(t.workers, ("trainer", "puller", "third"), strict=True):
        worker.do(steps.open_shard, replica, **BIG)
    trainer.do(steps.publish, 1)
    puller.begin(steps.replicate_pausing, 1)
    puller.wait_paused("in the middle of the pull")
    puller.signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        puller.finish()
    assert puller.do(steps.state) is th.HandleState.TORN
    assert puller.do(steps.replicate, 1).version == 1
    trainer.kill()
    assert third.do(steps.replicate, 1).version == 1
    t.assert_no_faults()


# --- groups ------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [0, 1], ids=["the leader dies", "a follower dies"])
def test_a_shard_that_dies_breaks_its_group_once_and_a_replacement_heals_it(
    team: Callable[..., Team], dies: int
) -> None:
    t = team(4)
    trainer, *shards = t.workers
    shards, spare = shards[:2], shards[2]
    trainer.do(steps.open_shard, "trainer", shard=0, num_shards=2, name="0")
    trainer.do(steps.open_shard, "trainer", shard=1, num_shards=2, name="1")
    trainer.do(steps.publish_both, 1)
    for number, worker in enumerate(shards):
        worker.do(steps.open_shard, "rollout", shard=number, num_shards=2)
    for worker in shards:
        worker.begin(steps.replicate, "latest")
    assert [worker.finish().version for worker in shards] == [1, 1]

    survivor = shards[1 - dies]
    shards[dies].kill()
    trainer.do(steps.unpublish_both)
    trainer.do(steps.publish_both, 2)
    # Before the death is known it may still be the old group's call, and succeed.
    with pytest.raises(th.GroupBroken, match=f"shard {dies}"):
        survivor.do(steps.replicate_until_ended, 20.0)
    survivor.begin(steps.replicate, "latest")
    spare.do(steps.open_shard, "rollout", shard=dies, num_shards=2)
    spare.begin(steps.replicate, "latest")
    assert [worker.finish().version for worker in (survivor, spare)] == [2, 2]
    for worker in (survivor, spare):
        worker.begin(steps.wait_for, 1)
    assert [worker.finish() for worker in (survivor, spare)] == [2, 2]
    t.assert_no_faults()


def test_a_restarted_worker_gets_its_slot_back(team: Callable[..., Team]) -> None:
    t = team(2)
    first, second = t.workers
    second.do(steps.open_shard, "rollout")
    second.kill()
    again = t.newcomer()
    started = time.monotonic()
    again.do(steps.open_shard, "rollout", timeout=30)
    assert time.monotonic() - started < 20
    first.do(steps.open_shard, "trainer")
    first.do(steps.publish, 1)
    assert again.do(steps.replicate, 1).version == 1
    t.assert_no_faults()


# --- seeds -------------------------------------------------------------------------------


def test_a_seed_that_dies_is_missed_by_nobody(team: Callable[..., Team]) -> None:
    t = team(3)
    seed, trainer, rollout = t.workers
    trainer.do(steps.open_shard, "trainer")
    rollout.do(steps.open_shard, "rollout")
    other = trainer.do(steps.address)
    seed.kill()
    trainer.do(steps.publish, 1)
    assert rollout.do(steps.replicate, 1).version == 1
    newcomer = t.newcomer([t.seed, other])
    newcomer.do(steps.open_shard, "newcomer")
    assert newcomer.do(steps.replicate, 1).version == 1
    t.assert_no_faults()


# --- signals -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [steps.replicate, steps.wait_for], ids=["replicate", "wait_for"])
def test_control_c_ends_a_wait_at_once_and_the_handle_works_on(
    team: Callable[..., Team], step: Callable[..., Any]
) -> None:
    t = team(2)
    trainer, rollout = t.workers
    for worker, replica in zip(t.workers, ("trainer", "rollout"), strict=True):
        worker.do(steps.open_shard, replica)
    trainer.do(steps.publish, 1)
    rollout.do(steps.say_when_in_verb)
    rollout.begin(step, 7)
    rollout.wait_said("in verb")
    rollout.signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        rollout.finish(10)
    assert rollout.do(steps.state) is th.HandleState.REGISTERED
    assert rollout.do(steps.replicate, "latest").version == 1
    assert rollout.do(steps.wait_for, 0) == 1
    t.assert_no_faults()


def test_control_c_in_unpublish_leaves_it_published(team: Callable[..., Team]) -> None:
    """It waits for a puller that has the version pinned and nobody else to get it from: with room
    for a copy it would be done soon, also before the signal comes.
    """
    t = team(3, offload_limit=0)
    trainer, puller, _ = t.workers
    for worker, replica in zip(t.workers[:2], ("trainer", "puller"), strict=True):
        worker.do(steps.open_shard, replica, **BIG)
    trainer.do(steps.publish, 1)
    puller.begin(steps.replicate_pausing, 1)
    puller.wait_paused("in the middle of the pull")
    trainer.do(steps.say_when_in_verb)
    trainer.begin(steps.unpublish, 60)
    trainer.wait_said("in verb")
    trainer.signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.finish(10)
    assert trainer.do(steps.state) is th.HandleState.PUBLISHED
    puller.go_on()
    assert puller.finish().version == 1
    trainer.do(steps.unpublish)
    assert trainer.do(steps.state) is th.HandleState.REGISTERED
    t.assert_no_faults()


def test_sigterm_closes_the_peer_and_then_ends_the_process(team: Callable[..., Team]) -> None:
    t = team(2)
    staying, leaving = t.workers
    leaving.do(steps.open_shard, "rollout")
    leaving.do(steps.close_on_sigterm)
    leaving.do(steps.say_when_in_verb)
    leaving.begin(steps.replicate, 7)
    leaving.wait_said("in verb")
    leaving.signal(signal.SIGTERM)
    assert leaving.wait_ended() == -signal.SIGTERM
    assert staying.do(steps.wait_for_state, "worker-1") == "left"
    t.assert_no_faults()


# --- the fence ---------------------------------------------------------------------------


def test_closing_a_handle_waits_for_the_last_byte_that_its_pull_writes(
    peer: Callable[..., th.Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = peer(transports=["tcp"]).open("m")
    rollout, copy = peer(transports=["tcp"]).open("m"), blank(4, 16 * MIB)
    trainer.register(fill(blank(4, 16 * MIB), 1))
    rollout.register(copy)
    trainer.publish(1)
    middle, go_on, plain = threading.Event(), threading.Event(), TcpReader._take

    def take(self: TcpReader, *arguments: Any) -> None:
        middle.set()
        assert go_on.wait(30)
        plain(self, *arguments)

    monkeypatch.setattr(TcpReader, "_take", take)
    pulling = rollout.replicate_async(1, timeout=30)
    assert middle.wait(20)
    closing = threading.Thread(target=rollout.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive(), "a reader may still write"
    go_on.set()
    closing.join(10)
    assert not closing.is_alive()
    for tensor in copy.values():
        tensor[:] = 77
    with pytest.raises(th.StateError, match="closed"):
        pulling.result(10)
    assert all((tensor == 77).all() for tensor in copy.values())
    trainer.unpublish(timeout=10)


def test_closing_a_handle_ends_a_pull_that_does_not_get_on(
    peer: Callable[..., th.Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = peer().open("m"), peer().open("m")
    trainer.register(fill(blank(), 1))
    rollout.register(blank())
    trainer.publish(1)
    asked = threading.Event()
    monkeypatch.setattr(Link, "submit", lambda *_: asked.set())
    pulling = rollout.replicate_async(1, timeout=30)
    assert asked.wait(20)
    started = time.monotonic()
    rollout.close()
    with pytest.raises(th.StateError, match="closed"):
        pulling.result(10)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_no_mix_of_versions_is_ever_seen_however_fast_they_change(
    team: Callable[..., Team], transport: str
) -> None:
    """The trainer overwrites its tensors as soon as `unpublish` has returned."""
    t = team(3, transports=[transport])
    trainer, *rollouts = t.workers
    for worker, replica in zip(t.workers, ("trainer", "a", "b"), strict=True):
        worker.do(steps.open_shard, replica, count=4, size=2 * MIB)
    trainer.begin(steps.publish_for, 4.0)
    for worker in rollouts:
        worker.begin(steps.replicate_until_ended, 4.0)
    published = trainer.finish()
    seen = [worker.finish() for worker in rollouts]
    assert published >= 3
    for versions in seen:
        assert versions == sorted(versions), "never backwards"
        assert len(set(versions)) >= 2
    t.assert_no_faults()


# --- silence -----------------------------------------------------------------------------


def test_a_stopped_member_holds_nobody_up(team: Callable[..., Team]) -> None:
    t = team(4)
    _, trainer, rollout, idle = t.workers
    for worker, replica in ((trainer, "trainer"), (rollout, "rollout")):
        worker.do(steps.open_shard, replica)
    # A key that nobody has touched yet is read from the earliest members too, so touch it.
    trainer.do(steps.publish, 0)
    trainer.do(steps.unpublish)
    idle.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        for version in range(1, 4):
            trainer.do(steps.publish, version)
            assert rollout.do(steps.replicate, "latest").version == version
            trainer.do(steps.unpublish)
        assert time.monotonic() - started < 10
    finally:
        idle.signal(signal.SIGCONT)
    idle.do(steps.open_shard, "another")
    assert idle.do(steps.replicate, "latest").version == 3
    t.assert_no_faults()


def test_control_c_just_after_a_verb_was_handed_over_ends_it_too(
    peer: Callable[..., th.Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = peer().open("m", replica="alone")
    handle.register(blank(1, 1000))
    control = handle._driver.control
    post = control.post

    def interrupted(function: Callable[[float], object]) -> None:
        post(function)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait_for(7, timeout=60)
    handle.publish(1)
    assert handle.wait_for(0, timeout=10) == 1


def test_short_attempts_in_vain_find_out_that_a_version_cannot_be_had(
    team: Callable[..., Team],
) -> None:
    """As one long attempt would; otherwise a group that retries quickly is stuck with it."""
    t = team(3)
    trainer, puller, _ = t.workers
    for worker, replica in zip(t.workers[:2], ("trainer", "puller"), strict=True):
        worker.do(steps.open_shard, replica, **BIG)
    trainer.do(steps.publish, 1)
    puller.begin(steps.replicate_pausing, 1)
    puller.wait_paused("in the middle of the pull")
    trainer.kill()
    puller.signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        puller.finish()
    for _ in range(30):
        with pytest.raises((th.Timeout, th.VersionUnavailable)) as caught:
            puller.do(steps.replicate, 1, 0.5)
        if "call 2 of" in str(caught.value):  # call 1 was given up, and the next one asked
            break
    else:
        pytest.fail(f"it is still bound to the version: {caught.value}")
    t.assert_no_faults()
