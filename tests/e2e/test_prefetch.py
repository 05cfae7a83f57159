"""A version pulled ahead of time, into host memory, while the tensors go on being used."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from steps import MIB, Tensors, blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p.runtime.prefetching import Copy

StartPeer = Callable[..., th.Peer]
QUICK = th.Config(
    pull=th.PullConfig(unavailable_after=1.0, lease_seconds=1.0),
    retention=th.RetentionConfig(look_interval=0.1),
)
COUNT, SIZE = 3, 8 * MIB


def open_one(
    peer: StartPeer, replica: str, version: int | None = None, **options: object
) -> tuple[th.ShardHandle, Tensors]:
    options.setdefault("config", QUICK)
    handle = peer(**options).open("m", replica=replica)
    tensors = blank(COUNT, SIZE)
    handle.register(tensors if version is None else fill(tensors, version))
    return handle, tensors


def freed(handle: th.ShardHandle) -> bool:
    """All memory of prefetches is given back, and nobody is told of any."""
    driver = handle._driver
    deadline = time.monotonic() + 20
    while driver.prefetches.taken or driver.prefetches._copies or len(driver.node.prefetches):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Pause]]:
    """Has prefetches pause once so many chunks are there: nothing more is asked for until then."""
    made: list[Pause] = []

    def pause(at: int) -> Pause:
        made.append(Pause(at))
        return made[-1]

    plain = Copy.held

    def held(self: Copy, *chunk: Any) -> None:
        plain(self, *chunk)
        for each in made:
            each.held(len(self._digests))

    monkeypatch.setattr(Copy, "held", held)
    yield pause
    for each in made:
        each.go_on.set()


class Pause:
    def __init__(self, at: int) -> None:
        self.at = at
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def held(self, count: int) -> None:
        if count >= self.at and not self.reached.is_set():
            self.reached.set()
            self.go_on.wait(20)


def test_what_was_prefetched_is_copied_and_nothing_crosses_a_link(peer: StartPeer) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, tensors = open_one(peer, "rollout")
    trainer.publish(1)
    assert rollout.replicate(timeout=20).over_links == COUNT * SIZE
    trainer.unpublish()
    fill(tensors_of(trainer), 2)
    trainer.publish(2)
    ahead = rollout.prefetch("latest")
    assert ahead.result(20) == ahead.version == 2
    assert ahead.done()
    assert ahead.bytes == COUNT * SIZE
    assert not wrong(tensors, 1), "the tensors are in use until replicate()"
    assert rollout.version == 1
    pull = rollout.replicate("latest", timeout=20)
    assert pull.version == 2
    assert not wrong(tensors, 2)
    assert (pull.bytes, pull.prefetched, pull.over_links) == (COUNT * SIZE, COUNT * SIZE, 0)
    assert [report.transport for report in pull.transports] == ["memory"]
    assert freed(rollout)
    assert rollout.prefetch("latest").result(20) == 2, "it is held: there is nothing to do"
    assert rollout._driver.prefetches.taken == 0


def test_shards_that_prefetched_get_what_their_group_decides(peer: StartPeer) -> None:
    """Shard 0 has all of it ahead of time, shard 1 nothing."""
    trainers, rollouts = [], []
    for shard in range(2):
        trainer = peer(config=QUICK).open("m", replica="trainer", shard=shard, num_shards=2)
        rollout = peer(config=QUICK).open("m", replica="rollout", shard=shard, num_shards=2)
        trainer.register(fill(blank(COUNT, SIZE), 10 + shard))
        rollout.register(blank(COUNT, SIZE))
        trainers.append(trainer)
        rollouts.append(rollout)
    for wait in [trainer.publish_async(10, timeout=20) for trainer in trainers]:
        wait.result(20)
    assert rollouts[0].prefetch(10).result(20) == 10
    waits = [rollout.replicate_async("latest", timeout=20) for rollout in rollouts]
    pulls = [wait.result(30) for wait in waits]
    assert [pull.version for pull in pulls] == [10, 10]
    assert [pull.over_links for pull in pulls] == [0, COUNT * SIZE]
    for shard, rollout in enumerate(rollouts):
        assert not wrong(tensors_of(rollout), 10 + shard)


def test_what_came_of_a_prefetch_is_copied_and_the_rest_is_pulled(
    peer: StartPeer, paused: Callable[[int], Pause]
) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, tensors = open_one(peer, "rollout")
    trainer.publish(1)
    pause = paused(1)
    ahead = rollout.prefetch(1)
    assert pause.reached.wait(20)
    wait = rollout.replicate_async(1, timeout=20)
    with pytest.raises(th.Timeout, match="still under way"):
        ahead.result(0.01)
    while rollout._driver.prefetches._copies and not ahead._copy._stopped_by:
        time.sleep(0.001)
    pause.go_on.set()
    pull = wait.result(20)
    assert not wrong(tensors, 1)
    assert pull.bytes == COUNT * SIZE
    assert 0 < pull.prefetched < COUNT * SIZE
    with pytest.raises(th.StateError, match=r"replicate\(\) of version 1.*took over"):
        ahead.result(20)
    assert freed(rollout)


def test_a_prefetch_of_another_version_takes_the_place_of_the_one_before(
    peer: StartPeer, paused: Callable[[int], Pause]
) -> None:
    first, _ = open_one(peer, "first", 1)
    second, _ = open_one(peer, "second", 2)
    rollout, tensors = open_one(peer, "rollout")
    first.publish(1)
    pause = paused(1)
    old = rollout.prefetch("latest")
    assert pause.reached.wait(20)
    second.publish(2)
    new = rollout.prefetch("latest")
    while not old._copy._stopped_by:
        time.sleep(0.001)
    pause.go_on.set()
    assert new.result(20) == 2
    with pytest.raises(th.StateError, match=r"a prefetch of version 2.*took its place"):
        old.result(20)
    assert rollout._driver.prefetches.taken == COUNT * SIZE
    again = rollout.prefetch("latest")
    assert again.result(20) == 2
    assert again._copy is new._copy
    assert rollout.replicate(2, timeout=20).over_links == 0
    assert not wrong(tensors, 2)


def test_a_version_that_goes_while_it_is_prefetched_is_no_trouble_for_the_handle(
    peer: StartPeer, paused: Callable[[int], Pause]
) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, tensors = open_one(peer, "rollout")
    trainer.publish(1)
    pause = paused(1)
    ahead = rollout.prefetch("latest")
    assert pause.reached.wait(20)
    trainer.unpublish(timeout=20)
    fill(tensors_of(trainer), 2)
    pause.go_on.set()
    with pytest.raises(th.VersionUnavailable, match="version 1 by trainer"):
        ahead.result(20)
    trainer.publish(2)
    pull = rollout.replicate("latest", timeout=20)
    assert pull.version == 2
    assert not wrong(tensors, 2)
    assert freed(rollout)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_others_pull_from_what_was_prefetched_also_when_nobody_else_has_it(
    peer: StartPeer, transport: str
) -> None:
    trainer, _ = open_one(peer, "trainer", 1, transports=[transport])
    rollout, tensors = open_one(peer, "rollout", transports=[transport])
    other, others = open_one(peer, "other", transports=[transport])
    trainer.publish(1)
    assert rollout.prefetch("latest").result(20) == 1
    trainer.close()
    pull = other.replicate("latest", timeout=20)
    assert not wrong(others, 1)
    (source,) = [source for source in pull.sources if source.bytes]
    assert source.slot.startswith("m/prefetched/")
    other.close()
    assert rollout.replicate("latest", timeout=20).over_links == 0
    assert not wrong(tensors, 1)


def test_a_prefetch_stays_within_its_limit(peer: StartPeer) -> None:
    small = th.Config(pull=th.PullConfig(prefetch_limit=COUNT * SIZE - 1))
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, tensors = open_one(peer, "rollout", config=small)
    trainer.publish(1)
    ahead = rollout.prefetch("latest")
    with pytest.raises(th.NotEnoughMemory, match="prefetch_limit"):
        ahead.result(20)
    with pytest.raises(MemoryError):
        ahead.result(20)
    assert freed(rollout)
    assert rollout.replicate("latest", timeout=20).over_links == COUNT * SIZE
    assert not wrong(tensors, 1)


@pytest.mark.parametrize("how", ["unregister", "close", "close the peer", "cancel"])
def test_nothing_is_left_of_a_prefetch_that_is_ended(
    peer: StartPeer, paused: Callable[[int], Pause], how: str
) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    member = peer(config=QUICK)
    rollout = member.open("m", replica="rollout")
    rollout.register(blank(COUNT, SIZE))
    trainer.publish(1)
    pause = paused(1)
    ahead = rollout.prefetch("latest")
    assert pause.reached.wait(20)
    threading.Timer(0.05, pause.go_on.set).start()
    if how == "unregister":
        rollout.unregister()
    elif how == "close":
        rollout.close()
    elif how == "cancel":
        ahead.cancel()
    else:
        member.close()
    with pytest.raises(th.StateError):
        ahead.result(20)
    assert how == "close the peer" or freed(rollout)
    assert not rollout._driver.prefetches._copies
    assert not rollout._driver.prefetches.taken


def test_a_prefetch_waits_for_a_version_that_is_not_there_yet(peer: StartPeer) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, _ = open_one(peer, "rollout")
    ahead = rollout.prefetch(1, timeout=20)
    with pytest.raises(th.Timeout, match=r"prefetch\(1\).*still under way"):
        ahead.result(0.3)
    trainer.publish(1)
    assert ahead.result(20) == 1
    late = rollout.prefetch(5, timeout=0.3)
    with pytest.raises(th.Timeout, match=r"prefetch\(5\) of model 'm': there is version 1"):
        late.result(20)


def test_a_version_that_does_not_fit_is_found_out_before_a_byte_is_pulled(
    peer: StartPeer,
) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout = peer().open("m", replica="rollout")
    rollout.register(blank(COUNT + 1, SIZE))
    trainer.publish(1)
    ahead = rollout.prefetch("latest")
    with pytest.raises(th.LayoutMismatch, match="'layer3'"):
        ahead.result(20)
    assert ahead.bytes == 0


def test_chunks_that_did_not_change_since_the_prefetched_version_are_copied(
    peer: StartPeer,
) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, tensors = open_one(peer, "rollout")
    trainer.publish(1)
    assert rollout.prefetch("latest").result(20) == 1
    trainer.unpublish()
    changed = tensors_of(trainer)["layer1"]
    changed += 1
    trainer.publish(2)
    sealed(trainer)
    pull = rollout.replicate(2, timeout=20)
    assert pull.version == 2
    assert all((tensors[name] == mine).all() for name, mine in tensors_of(trainer).items())
    assert pull.over_links == SIZE
    assert freed(rollout)


def sealed(handle: th.ShardHandle) -> None:
    """Wait until all digests of what it published are taken."""
    server = handle._driver.node.shards[handle._slot].server
    assert server is not None
    while not server.manifest.complete:
        time.sleep(0.001)


def test_prefetched_memory_that_somebody_wrote_into_is_noticed(peer: StartPeer) -> None:
    trainer, _ = open_one(peer, "trainer", 1)
    rollout, tensors = open_one(peer, "rollout")
    trainer.publish(1)
    ahead = rollout.prefetch("latest")
    ahead.result(20)
    assert ahead._copy._memory is not None
    ahead._copy._memory._mapping[5 * MIB] ^= 1
    pull = rollout.replicate("latest", timeout=20)
    assert not wrong(tensors, 1)
    assert pull.retried
    assert pull.over_links
    assert any("sent wrong bytes" in note for source in pull.sources for note in source.notes)


def tensors_of(handle: th.ShardHandle) -> Tensors:
    assert handle._tenure.region is not None
    return {found.spec.name: found.tensor for found in handle._tenure.region._found}


FORKED = """
import os
import numpy
import tensorhub_p2p as th

with th.Peer() as first, th.Peer(seeds=[first.address]) as second:
    trainer, rollout = first.open("m", replica="t"), second.open("m", replica="r")
    trainer.register({"w": numpy.ones(1 << 22, numpy.uint8)})
    rollout.register({"w": numpy.zeros(1 << 22, numpy.uint8)})
    ahead = rollout.prefetch(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ahead.cancel()
            for use in (ahead.result, rollout.prefetch):
                try:
                    use()
                except th.PeerClosed as error:
                    assert "forked child" in str(error)
                    code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    trainer.publish(1)
    assert ahead.result(20) == 1
    assert rollout.replicate(1).over_links == 0
    trainer.unpublish()
print("fine")
"""


def test_a_forked_child_can_neither_wait_for_a_prefetch_nor_end_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "fine\n", done.stderr
