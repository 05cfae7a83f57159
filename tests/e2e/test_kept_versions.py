"""What somebody retains stays, in host memory where no live tensor holds it any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from steps import MIB, blank, close_handle, fill, open_shard, start, wrong
from workers import Worker

import tensorhub_p2p as th

StartPeer = Callable[..., th.Peer]
LOOKS_OFTEN = th.Config(retention=th.RetentionConfig(look_interval=0.1))
PATIENCE = 20.0


@pytest.fixture
def trainer(peer: StartPeer) -> th.Peer:
    return peer(name="trainer", config=LOOKS_OFTEN)


@pytest.fixture
def rollout(trainer: th.Peer, peer: StartPeer) -> th.Peer:
    return peer(name="rollout", config=LOOKS_OFTEN)


class Replica:
    """One handle with tensors of its own."""

    def __init__(self, peer: th.Peer, replica: str, size: int = MIB, **options: object) -> None:
        self.handle = peer.open("m", replica=replica, **options)  # type: ignore[arg-type]
        self.tensors = blank(3, size)
        self.handle.register(self.tensors)

    def publish(self, version: int) -> None:
        fill(self.tensors, version)
        self.handle.publish(version)

    def replicate(self, version: int | str = "latest", timeout: float = 20.0) -> th.Pull:
        pull = self.handle.replicate(version, timeout)
        assert not wrong(self.tensors, pull.version)
        return pull

    def step(self, version: int) -> None:
        """What a trainer does: publish, unpublish, and change the weights."""
        self.publish(version)
        self.handle.unpublish()
        fill(self.tensors, 99)


def kept(peer: th.Peer) -> int:
    """How many copies are in this peer's host memory."""
    return len(peer._driver.offloads._kept)


def eventually(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_retained_versions_can_be_had_after_their_publisher_went_on(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    reader = Replica(rollout, "rollout", retain=th.newest(2))
    writer = Replica(trainer, "trainer")
    for version in (1, 2, 3):
        writer.step(version)
    assert kept(rollout) == 0, "it is the publisher's peer that keeps them"
    assert reader.replicate(2).version == 2
    assert reader.replicate("latest").version == 3
    assert reader.replicate("latest-1").version == 2


def test_an_older_version_is_freed_once_enough_newer_ones_are_safe(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    Replica(rollout, "rollout", retain=th.newest(1))
    writer = Replica(trainer, "trainer")
    writer.step(1)
    writer.publish(2)
    time.sleep(0.5)  # several looks
    assert kept(trainer) == 1, "live tensors of the publisher are no safe copy"
    writer.handle.unpublish()
    eventually(lambda: kept(trainer) == 1 and _versions(trainer) == [2])


def _versions(peer: th.Peer) -> list[int]:
    return [found.version for found in peer.versions("m")]


def test_nothing_is_kept_for_nobody(trainer: th.Peer, rollout: th.Peer) -> None:
    Replica(rollout, "rollout")
    Replica(trainer, "trainer").step(1)
    assert kept(trainer) == 0
    assert not [found for found in trainer.versions("m") if found.whole]


def test_what_a_reliable_holder_has_is_not_copied(trainer: th.Peer, rollout: th.Peer) -> None:
    reader, writer = Replica(rollout, "rollout", retain=th.newest(1)), Replica(trainer, "trainer")
    writer.publish(1)
    reader.replicate()
    writer.handle.unpublish()
    assert kept(trainer) == kept(rollout) == 0


def test_a_spot_replica_is_no_safe_copy(trainer: th.Peer, rollout: th.Peer) -> None:
    reader = Replica(rollout, "rollout", retain=th.newest(1), spot=True)
    writer = Replica(trainer, "trainer")
    writer.publish(1)
    reader.replicate()
    writer.handle.unpublish()
    assert kept(trainer) == 1


def test_the_last_holder_that_goes_on_to_another_version_keeps_the_old_one(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    reader = Replica(rollout, "rollout", retain=th.versions(1))
    writer = Replica(trainer, "trainer")
    writer.publish(1)
    reader.replicate()
    writer.handle.unpublish()
    writer.publish(2)
    assert reader.replicate(2).version == 2
    assert kept(rollout) == 1
    assert reader.replicate(1).version == 1


def test_a_retained_version_that_cannot_be_kept_stays_published(peer: StartPeer) -> None:
    trainer, rollout = peer(name="trainer", offload_limit=MIB), peer(name="rollout")
    Replica(rollout, "rollout", retain=th.newest(2))
    writer = Replica(trainer, "trainer")
    writer.publish(1)
    with pytest.raises(th.RetentionLost, match="rollout") as caught:
        writer.handle.unpublish()
    assert "force=True" in str(caught.value)
    assert writer.handle.state is th.HandleState.PUBLISHED
    assert kept(trainer) == 0
    third = Replica(peer(), "third")
    assert third.replicate().version == 1


def test_force_gives_it_up_and_says_for_whom(
    peer: StartPeer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, rollout = peer(name="trainer", offload_limit=0), peer(name="rollout")
    Replica(rollout, "rollout", retain=th.newest(2))
    writer = Replica(trainer, "trainer")
    writer.publish(1)
    writer.handle.unpublish(force=True)
    assert writer.handle.state is th.HandleState.REGISTERED
    assert "gave up" in caplog.text
    assert "rollout" in caplog.text


def test_published_tensors_that_were_changed_are_not_kept_as_what_they_were(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    Replica(rollout, "rollout", retain=th.newest(1))
    writer = Replica(trainer, "trainer")
    writer.publish(1)
    server = trainer._driver.node.shards[writer.handle._slot].server
    assert server is not None
    eventually(lambda: server.manifest.complete)
    writer.tensors["layer1"][5] ^= 1
    with pytest.raises(th.RetentionLost):
        writer.handle.unpublish()
    assert writer.handle.state is th.HandleState.PUBLISHED
    eventually(lambda: kept(trainer) == 0)


def test_a_group_keeps_all_of_a_version_or_gives_nothing_up(peer: StartPeer) -> None:
    roomy, tight = peer(name="roomy"), peer(name="tight", offload_limit=MIB)
    Replica(peer(name="rollout"), "rollout", retain=th.newest(1), num_shards=2)
    parts = [
        Replica(member, "trainer", shard=shard, num_shards=2)
        for shard, member in enumerate((roomy, tight))
    ]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda part: part.publish(1), parts))
        ends = [threads.submit(part.handle.unpublish) for part in parts]
        for end in ends:
            with pytest.raises(th.RetentionLost):
                end.result()
    assert kept(roomy) == kept(tight) == 0
    assert {part.handle.state for part in parts} == {th.HandleState.PUBLISHED}


def test_closing_the_last_holder_leaves_a_copy_with_its_peer(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    reader = Replica(rollout, "rollout", retain=th.newest(1))
    writer = Replica(trainer, "trainer")
    writer.publish(1)
    writer.handle.close()
    fill(writer.tensors, 99)
    assert kept(trainer) == 1
    assert reader.replicate().version == 1


def test_memory_comes_back_when_nobody_retains_the_version_any_more(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    reader = Replica(rollout, "rollout", retain=th.newest(1), size=16 * MIB)
    writer = Replica(trainer, "trainer", size=16 * MIB)
    fill(writer.tensors, 0)
    before = _anonymous()
    writer.step(1)
    assert _anonymous() - before > 40 * MIB
    reader.handle.close()
    eventually(lambda: kept(trainer) == 0)
    eventually(lambda: _anonymous() - before < 10 * MIB)


def _anonymous() -> int:
    """This process's anonymous memory that is there, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = [line for line in file if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_a_retracted_version_is_given_out_and_kept_no_more(
    trainer: th.Peer, rollout: th.Peer
) -> None:
    reader = Replica(rollout, "rollout", retain=th.newest(2))
    writer = Replica(trainer, "trainer")
    writer.step(1)
    writer.publish(2)
    reader.handle.retract(2)
    assert reader.replicate("latest").version == 1
    with pytest.raises(th.TensorHubError):
        reader.handle.replicate(2, timeout=1)
    writer.handle.unpublish()
    assert kept(trainer) == 1, "version 1"
    with pytest.raises(th.VersionConflict, match="version 2"):
        writer.handle.publish(2)
    other = Replica(rollout, "other")
    with pytest.raises(th.VersionConflict, match="retracted"):
        other.handle.publish(2)
    writer.publish(3)
    assert reader.replicate("latest").version == 3


def test_a_version_that_never_was_cannot_be_retracted(trainer: th.Peer) -> None:
    handle = trainer.open("m")
    with pytest.raises(th.VersionUnavailable, match="7"):
        handle.retract(7, timeout=10)


# --- processes ---------------------------------------------------------------------------


def test_what_a_killed_process_retained_is_kept_on(
    cluster: str, peer: StartPeer, take: Callable[[int], list[Worker]]
) -> None:
    trainer = peer(name="trainer")
    [retainer] = take(1)
    retainer.do(start, cluster, [trainer.address], name="retainer")
    retainer.do(open_shard, "rollout", retain=th.newest(1))
    retainer.kill()
    eventually(lambda: len(trainer.members()) == 1)
    Replica(trainer, "trainer").step(1)
    assert kept(trainer) == 1
    assert Replica(trainer, "next").replicate().version == 1


def test_what_a_closed_handle_retained_is_freed(
    cluster: str, trainer: th.Peer, take: Callable[[int], list[Worker]]
) -> None:
    [retainer] = take(1)
    retainer.do(start, cluster, [trainer.address], name="retainer")
    retainer.do(open_shard, "rollout", retain=th.newest(1))
    Replica(trainer, "trainer").step(1)
    assert kept(trainer) == 1
    retainer.do(close_handle)
    eventually(lambda: kept(trainer) == 0)


def test_a_copy_can_be_read_by_other_processes_with_every_transport(
    cluster: str, trainer: th.Peer, take: Callable[[int], list[Worker]]
) -> None:
    from steps import replicate

    writer = Replica(trainer, "trainer")
    holder = trainer.open("m", replica="holder", retain=th.newest(1))
    writer.step(1)
    workers = take(2)
    for worker, transport in zip(workers, ("cma", "tcp"), strict=True):
        worker.do(start, cluster, [trainer.address], name=transport, transports=[transport])
        worker.do(open_shard, f"reader-{transport}")
        pull: th.Pull = worker.do(replicate)
        assert {s.transport for s in pull.sources if s.chunks} <= {"cma", "tcp"}
    holder.close()
