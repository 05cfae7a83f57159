"""Groups of shards, replicas side by side, and what each of them is told of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from steps import blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p import handle as handle_module
from tensorhub_p2p.config import RetentionConfig
from tensorhub_p2p.runtime import pulling, tenure
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.transfer.links import Link

StartPeer = Callable[..., th.Peer]


class Replica:
    """Two shards in one peer; their verbs run side by side."""

    def __init__(self, member: th.Peer, name: str) -> None:
        self.shards = [member.open("m", replica=name, shard=i, num_shards=2) for i in range(2)]
        self.tensors = [blank(2), blank(2)]
        for handle, tensors in zip(self.shards, self.tensors, strict=True):
            handle.register(tensors)

    def publish(self, version: int) -> None:
        for number, tensors in enumerate(self.tensors):
            fill(tensors, 100 * number + version)
        self._all([handle.publish_async(version, timeout=20) for handle in self.shards])

    def unpublish(self) -> None:
        self._all([handle.unpublish_async(timeout=20) for handle in self.shards])

    def replicate(self, version: int | str) -> list[int]:
        pulls = [handle.replicate_async(version, timeout=20) for handle in self.shards]
        return [pull.version for pull in self._all(pulls)]

    def wrong(self, version: int) -> list[str]:
        return [
            name
            for number, tensors in enumerate(self.tensors)
            for name in wrong(tensors, 100 * number + version)
        ]

    @staticmethod
    def _all(waits: list) -> list:
        return [wait.result(30) for wait in waits]


def test_different_questions_in_one_call_are_a_divergence_for_all(peer: StartPeer) -> None:
    trainer, rollout = Replica(peer(), "trainer"), Replica(peer(), "rollout")
    trainer.publish(1)
    waits = [
        rollout.shards[0].replicate_async(1, timeout=20),
        rollout.shards[1].replicate_async("latest", timeout=20),
    ]
    for wait in waits:
        with pytest.raises(th.GroupDivergence, match=r"shard [01].*1.*shard [01]"):
            wait.result(20)
    assert rollout.replicate(1) == [1, 1]
    assert not rollout.wrong(1)


def test_a_shard_that_cannot_take_the_version_is_noticed_by_the_other(peer: StartPeer) -> None:
    trainer, rollout = Replica(peer(), "trainer"), Replica(peer(), "rollout")
    trainer.publish(1)
    good, bad = rollout.shards
    bad.unregister()
    bad.register({"other": blank(1)["layer0"]})
    waits = [handle.replicate_async("latest", timeout=20) for handle in rollout.shards]
    with pytest.raises(th.LayoutMismatch):
        waits[1].result(20)
    first = waits[0].exception(20)
    assert first is None or isinstance(first, th.GroupBroken)
    bad.unregister()
    bad.register(rollout.tensors[1])
    if first is None:
        with pytest.raises(th.GroupBroken, match=r"(?s)shard 1.*'other'"):
            good.replicate("latest", timeout=20)
    assert rollout.replicate("latest") == [1, 1]
    assert not rollout.wrong(1)
    trainer.unpublish()


def test_trainers_side_by_side_publish_one_version_and_either_may_leave(peer: StartPeer) -> None:
    first, second = Replica(peer(), "trainer-0"), Replica(peer(), "trainer-1")
    rollout = Replica(peer(), "rollout")
    for version in (1, 2, 3):
        first.publish(version)
        second.publish(version)
        assert rollout.replicate(version) == [version, version]
        assert not rollout.wrong(version)
        (first if version % 2 else second).unpublish()
        (second if version % 2 else first).unpublish()
    for handle in first.shards:
        handle.close()
    second.publish(4)
    assert rollout.replicate("latest") == [4, 4]
    assert not rollout.wrong(4)


WATCHFUL = th.Config(retention=RetentionConfig(look_interval=0.1))


def alone(member: th.Peer, replica: str, version: int | None = None) -> tuple:
    """A replica of one shard of 32 MB, with the bytes of a version."""
    handle, tensors = member.open("m", replica=replica), blank(32)
    handle.register(tensors if version is None else fill(tensors, version))
    return handle, tensors


def test_a_version_comes_from_all_trainers_that_published_it(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Link._read

    def read(self: Link, *what: Any) -> None:
        time.sleep(0.005)  # a pull that lasts long enough for both to be asked
        plain(self, *what)

    monkeypatch.setattr(Link, "_read", read)
    trainers = [alone(peer(), f"trainer-{i}", version=1)[0] for i in range(2)]
    for trainer in trainers:
        trainer.publish(1)
    target, tensors = alone(peer(), "rollout")
    pull = target.replicate(1, timeout=30)
    assert not wrong(tensors, 1)
    assert {source.slot for source in pull.sources} == {"m/trainer-0#0", "m/trainer-1#0"}
    for trainer in trainers:
        trainer.unpublish()


def test_trainers_whose_bytes_differ_are_told_and_the_lower_ones_count(peer: StartPeer) -> None:
    first, _ = alone(peer(config=WATCHFUL), "trainer-0", version=1)
    second, seconds = alone(peer(config=WATCHFUL), "trainer-1", version=2)
    target, tensors = alone(peer(), "rollout")
    second.publish(7)
    first.publish(7)
    assert target.replicate(7, timeout=30).version == 7
    assert not wrong(tensors, 1)
    deadline = time.monotonic() + 20
    while second.version is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(th.VersionConflict, match=r"trainer-1 is not published.*by trainer-0"):
        second.unpublish()
    assert second.state is th.HandleState.REGISTERED
    assert second.replicate(7, timeout=30).version == 7
    assert not wrong(seconds, 1)
    first.unpublish()


def test_a_version_that_is_not_whole_is_nobodys_answer(peer: StartPeer) -> None:
    member = peer()
    trainer, rollout = Replica(member, "trainer"), Replica(peer(), "rollout")
    trainer.publish(1)
    assert rollout.replicate("latest") == [1, 1]
    trainer.unpublish()
    trainer.shards[0].publish(2, timeout=20)
    assert rollout.replicate("latest") == [1, 1]
    assert {v.version: v.whole for v in member.versions("m")} == {1: True, 2: False}
    with pytest.raises(th.Timeout, match=r"version 2 by trainer \(not whole yet"):
        rollout.shards[0].wait_for(1, timeout=0.6)
    trainer.shards[1].publish(2, timeout=20)
    assert rollout.replicate("latest") == [2, 2]


def test_pullers_at_once_share_the_work_and_all_get_the_same(peer: StartPeer) -> None:
    trainer = Replica(peer(transports=["tcp"]), "trainer")
    rollouts = [Replica(peer(transports=["tcp"]), f"rollout-{i}") for i in range(4)]
    waits = [h.replicate_async("latest", timeout=30) for r in rollouts for h in r.shards]
    trainer.publish(1)
    assert [wait.result(30).version for wait in waits] == [1] * 8
    assert not any(rollout.wrong(1) for rollout in rollouts)


def test_a_pull_is_explained_in_words(peer: StartPeer) -> None:
    trainer, second = peer(name="the trainer"), peer(name="the rollout")
    source, target = trainer.open("m", replica="t"), second.open("m", replica="r")
    source.register(fill(blank(), 1))
    target.register(blank())
    source.publish(1)
    pull = target.replicate(1, timeout=20)
    told = second.explain(pull)
    for part in ("version 1 of 'm'", "3.1 MB", "the trainer", "m/t#0", "cma", "same host"):
        assert part in told
    assert "nothing moved" in second.explain(target.replicate(1, timeout=20))
    assert pull.seconds >= pull.moving > 0
    assert pull.gigabytes_per_second > 0


class Clock:
    """The real one, but for jumps ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def putting_forward(self, plain: Callable, seconds: float) -> Callable:
        def wrapped(*args: object, **options: object) -> object:
            self.ahead += seconds
            return plain(*args, **options)

        return wrapped


def test_the_times_of_a_pull_are_where_they_were_spent(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that is put forward: in what should count as waiting, and as registering."""
    clock = Clock()
    source, target = peer().open("m", replica="t"), peer().open("m", replica="r")
    source.register(fill(blank(), 1))
    target.register(blank())
    source.publish(1)
    monkeypatch.setattr(handle_module, "time", clock)
    monkeypatch.setattr(pulling, "time", clock)
    monkeypatch.setattr(target, "_ask", clock.putting_forward(target._ask, 100.0))
    old = tenure.OldVersion
    monkeypatch.setattr(old, "end", clock.putting_forward(old.end, 1000.0))
    monkeypatch.setattr(pulling, "Exported", clock.putting_forward(pulling.Exported, 10_000.0))
    pull = target.replicate(1, timeout=100_000)
    assert 1100 <= pull.waiting < 1150
    assert 10_000 <= pull.registering < 10_050
    assert 0 < pull.moving < 50
    assert pull.waiting + pull.registering + pull.moving == pytest.approx(pull.seconds)
    assert 0 < pull.verifying < 50


@pytest.mark.parametrize(
    ("took", "interrupted", "left"),
    [(0.0, False, 0.1), (7.0, False, 0.1), (0.0, True, 2.0), (5.0, True, 1.0), (7.0, True, 0.1)],
)
def test_readers_get_one_lease_and_not_another_one_for_their_sockets(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch, took: float, interrupted: bool, left: float
) -> None:
    """One that has ended has waited for them; what was left of one that hasn't is theirs."""
    clock, given = Clock(), []
    handle = peer().open("m", replica="t")
    handle.register(fill(blank(), 1))
    handle.publish(1)
    drain, run = Exported.drain, handle._driver.run

    def watched(exported: Exported, deadline: float) -> None:
        given.append(deadline - clock.monotonic())
        drain(exported, 0.0)

    def interrupting(*arguments: Any) -> object:
        ended = run(*arguments)
        if interrupted:
            raise KeyboardInterrupt
        return ended

    monkeypatch.setattr(Exported, "drain", watched)
    monkeypatch.setattr(tenure, "time", clock)
    monkeypatch.setattr(handle._driver, "run", clock.putting_forward(interrupting, took))
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        handle.unpublish(timeout=4.0)  # of which the lease is 2 s
    assert given == [pytest.approx(left, abs=0.5 * left)]
    assert handle.state is th.HandleState.REGISTERED


def test_no_byte_is_written_if_giving_up_the_old_version_took_all_the_time(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tensors = Clock(), blank()
    source, target = peer().open("m", replica="s"), peer().open("m", replica="t")
    source.register(fill(blank(), 2))
    target.register(fill(tensors, 1))
    target.publish(1)
    source.publish(2)
    end = tenure.OldVersion.end
    with monkeypatch.context() as patch:
        patch.setattr(pulling, "time", clock)
        patch.setattr(tenure.OldVersion, "end", clock.putting_forward(end, 30.0))
        with pytest.raises(th.Timeout, match="give up the version before"):
            target.replicate(2, timeout=20)
    assert target.state is th.HandleState.REGISTERED
    assert not wrong(tensors, 1)
    assert target.replicate(2, timeout=20).version == 2


def test_an_interrupt_as_the_old_version_has_just_been_given_up_leaves_no_doubt(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = peer().open("m", replica="s"), peer().open("m", replica="t")
    source.register(fill(blank(), 2))
    target.register(fill(blank(), 1))
    target.publish(1)
    source.publish(2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tenure.Tenure, "_look_after", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.replicate(2, timeout=20)
    assert target.state is th.HandleState.REGISTERED
    assert target.replicate(2, timeout=20).version == 2


def test_two_that_pull_what_the_other_gives_up_do_not_wait_for_each_other(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads from the other, and from a third; each waits until it is read no more."""
    patient = th.Config(pull=th.PullConfig(lease_seconds=120.0))
    handles = [peer(config=patient).open("m", replica=f"r-{number}") for number in range(4)]
    for number, handle in enumerate(handles):
        handle.register(fill(blank(), 1 + number // 2))
        handle.publish(1 + number // 2)
    both = threading.Barrier(2)
    prepare = pulling.PullRun.prepare

    def together(run: pulling.PullRun, ready: Callable[[], None]) -> None:
        both.wait(30.0)
        prepare(run, ready)

    monkeypatch.setattr(pulling.PullRun, "prepare", together)
    one = handles[0].replicate_async(2, timeout=20)
    other = handles[2].replicate_async(1, timeout=20)
    assert (one.result(40).version, other.result(40).version) == (2, 1)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_pull_that_ends_while_the_old_version_is_given_up_leaves_the_tensors_alone(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch, withdrawn: bool
) -> None:
    source, target = peer().open("m", replica="s"), peer().open("m", replica="t")
    tensors = blank()
    source.register(fill(blank(), 2))
    target.register(fill(tensors, 1))
    target.publish(1)
    source.publish(2)

    def ends(run: pulling.PullRun, _ready: Callable[[], None]) -> None:
        begun = threading.Event()
        run._old.begin(20.0, begun.set)
        if withdrawn:
            assert begun.wait(20.0)
        run.cancel()

    with monkeypatch.context() as patch:
        patch.setattr(pulling.PullRun, "prepare", ends)
        if not withdrawn:
            patch.setattr(tenure.Tenure, "_withdrawal", lambda *_, **__: lambda *_: None)
        with pytest.raises(th.PeerClosed):
            target.replicate(2, timeout=20)
    state = th.HandleState.REGISTERED if withdrawn else th.HandleState.PUBLISHED
    assert (target.state, target.version) == (state, None if withdrawn else 1)
    assert not wrong(tensors, 1)
    assert target.replicate(2, timeout=20).version == 2


def test_a_version_that_was_decided_for_stays_until_it_was_pulled(peer: StartPeer) -> None:
    """Its holders withdraw at the very moment, again and again; small tensors, so often."""
    quick = th.Config(pull=th.PullConfig(unavailable_after=1.0))
    members = [peer(config=quick) for _ in range(3)]
    handles = [member.open("m") for member in members]
    tensors = [blank(1, 1000) for _ in members]
    for handle, mine in zip(handles, tensors, strict=True):
        handle.register(mine)
    until = time.monotonic() + 2.0

    def publish() -> int:
        version = 0
        while True:
            version += 1
            fill(tensors[0], version)
            handles[0].publish(version)
            if time.monotonic() > until:
                return version
            handles[0].unpublish(timeout=30)

    def replicate(rollout: int) -> int:
        version = 0
        while time.monotonic() < until:
            version = handles[rollout].replicate("latest", timeout=30).version
            assert not wrong(tensors[rollout], version)
        return version

    with ThreadPoolExecutor() as threads:
        published = threads.submit(publish)
        reached = [threads.submit(replicate, rollout) for rollout in (1, 2)]
        # How far they get depends on luck; that nothing decided for is lost does not.
        assert all(0 < each.result(60) <= published.result(60) for each in reached)
