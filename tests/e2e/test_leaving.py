"""A peer that leaves hands over what others retain; what nobody can take is said to be lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from steps import (
    MIB,
    blank,
    close_on_sigterm,
    close_peer,
    fill,
    open_shard,
    publish,
    replicate,
    start,
    unpublish,
    wrong,
)
from workers import Worker

import tensorhub_p2p as th
from tensorhub_p2p.protocol.groups.slots import SlotClaimer

StartPeer = Callable[..., th.Peer]
TakeWorkers = Callable[[int], list[Worker]]
PATIENCE = 20.0


def handle_of(peer: th.Peer, replica: str, **options: object) -> th.ShardHandle:
    handle = peer.open("m", replica=replica, **options)  # type: ignore[arg-type]
    handle.register(blank())
    return handle


def replicated(handle: th.ShardHandle, version: int | str = "latest") -> int:
    """Replicate, and compare every byte; returns the version."""
    pull = handle.replicate(version, timeout=PATIENCE)
    assert handle._tenure.region is not None
    tensors = {found.spec.name: found.tensor for found in handle._tenure.region._found}
    assert not wrong(tensors, pull.version)
    return pull.version


def kept(peer: th.Peer) -> int:
    return len(peer._driver.offloads._kept)


def test_the_last_holder_hands_its_version_to_a_peer_that_stays(peer: StartPeer) -> None:
    stays, goes = peer(name="stays"), peer(name="goes")
    reader = handle_of(stays, "rollout", retain=th.newest(1))
    writer = goes.open("m", replica="trainer")
    tensors = fill(blank(), 1)
    writer.register(tensors)
    writer.publish(1)
    goes.close()
    fill(tensors, 99)
    assert kept(stays) == 1
    assert replicated(reader) == 1


def test_what_a_leaving_peer_kept_for_others_is_handed_on_too(peer: StartPeer) -> None:
    stays, goes = peer(name="stays"), peer(name="goes")
    reader = handle_of(stays, "rollout", retain=th.newest(2))
    writer = goes.open("m", replica="trainer")
    tensors = blank()
    writer.register(tensors)
    for version in (1, 2):
        fill(tensors, version)
        writer.publish(version)
        writer.unpublish()
    assert kept(goes) == 2
    goes.close()
    assert kept(stays) == 2
    assert replicated(reader, 1) == 1
    assert replicated(reader, 2) == 2


def test_all_shards_of_a_peer_are_handed_over_side_by_side(peer: StartPeer) -> None:
    stays, goes = peer(name="stays"), peer(name="goes")
    readers = [
        handle_of(stays, "rollout", shard=shard, num_shards=3, retain=th.newest(1))
        for shard in range(3)
    ]
    writers = [goes.open("m", replica="trainer", shard=s, num_shards=3) for s in range(3)]
    for writer in writers:
        writer.register(fill(blank(), 1))
    for done in [writer.publish_async(1) for writer in writers]:
        done.result(PATIENCE)
    goes.close()
    assert kept(stays) == 3
    for pull in [reader.replicate_async(1, timeout=PATIENCE) for reader in readers]:
        assert pull.result(PATIENCE).version == 1


def test_what_nobody_can_take_is_lost_and_said_once_everything_is_closed(
    peer: StartPeer,
) -> None:
    stays, goes = peer(name="stays", offload_limit=0), peer(name="goes")
    handle_of(stays, "rollout", retain=th.newest(1))
    writer = goes.open("m", replica="trainer")
    writer.register(fill(blank(), 1))
    writer.publish(1)
    with pytest.raises(th.RetentionLost, match=r"rollout|stays"):
        goes.close(timeout=5)
    assert writer.state is th.HandleState.CLOSED
    with pytest.raises(th.PeerClosed):
        goes.members()
    assert [m.state for m in stays.members(everyone=True) if m.name == "goes"] == ["left"]


def test_the_error_of_a_block_is_not_hidden_by_what_its_end_lost(
    peer: StartPeer, caplog: pytest.LogCaptureFixture
) -> None:
    stays = peer(name="stays", offload_limit=0)
    handle_of(stays, "rollout", retain=th.newest(1))
    goes = peer(name="goes")
    goes_close = goes.close
    goes.close = lambda timeout=5.0: goes_close(timeout)  # type: ignore[method-assign]

    def body() -> None:
        with goes:
            writer = goes.open("m", replica="trainer")
            writer.register(fill(blank(), 1))
            writer.publish(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert "trainer" in caplog.text


def test_a_peer_on_which_nothing_depends_leaves_at_once(peer: StartPeer) -> None:
    peer(name="stays")
    goes = peer(name="goes")
    handle_of(goes, "rollout", retain=th.newest(2)).publish(1)
    started = time.monotonic()
    goes.close(timeout=60)
    assert time.monotonic() - started < PATIENCE


def test_the_last_peer_of_all_does_not_wait_for_somebody_to_take_over(peer: StartPeer) -> None:
    alone = peer(name="alone")
    handle_of(alone, "rollout", retain=th.newest(2))
    handle_of(alone, "trainer").publish(1)
    started = time.monotonic()
    alone.close(timeout=60)
    assert time.monotonic() - started < PATIENCE


# --- processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["it waits for its slot", "it has just got it"])
def test_a_peer_that_closes_opens_nothing_any_more(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    stays, goes = peer(name="stays"), peer(name="goes")
    begun, closed = threading.Event(), threading.Event()
    claim = th.ShardHandle._claim
    if when == "it waits for its slot":  # its predecessor is silent
        monkeypatch.setattr(SlotClaimer, "start", lambda _claimer, _now: begun.set())

    def claimed(handle: th.ShardHandle, timeout: float, *, elastic: bool) -> None:
        claim(handle, timeout, elastic=elastic)
        begun.set()
        assert closed.wait(PATIENCE)

    with monkeypatch.context() as patch:
        patch.setattr(th.ShardHandle, "_claim", claimed)
        with ThreadPoolExecutor(1) as threads:
            opened = threads.submit(goes.open, "m", replica="r", timeout=600.0)
            assert begun.wait(PATIENCE)
            closing = threads_close(goes)
            while not goes._driver.closing:
                time.sleep(0.01)
            closed.set()
            with pytest.raises(th.PeerClosed, match="closed"):
                opened.result(PATIENCE)
            closing.join(PATIENCE)  # of the ten minutes that it has
            assert not closing.is_alive()
    with pytest.raises(th.PeerClosed):
        goes.open("m", replica="other")
    monkeypatch.undo()
    assert handle_of(stays, "r", timeout=PATIENCE).state is th.HandleState.REGISTERED


def threads_close(leaver: th.Peer) -> threading.Thread:
    thread = threading.Thread(target=leaver.close, args=(600.0,), daemon=True)
    thread.start()
    return thread


def test_sigterm_hands_over_what_only_that_process_held(
    cluster: str, peer: StartPeer, take: TakeWorkers
) -> None:
    stays = peer(name="stays")
    reader = handle_of(stays, "rollout", retain=th.newest(1))
    [goes] = take(1)
    goes.do(start, cluster, [stays.address], name="goes")
    goes.do(open_shard, "trainer", size=MIB)
    goes.do(close_on_sigterm)
    goes.do(publish, 1)
    os.kill(goes.pid, signal.SIGTERM)
    assert goes.wait_ended() == -signal.SIGTERM
    assert replicated(reader) == 1


def test_a_process_that_copied_before_it_left_hands_the_copy_to_one_of_the_others(
    cluster: str, peer: StartPeer, take: TakeWorkers
) -> None:
    stays = peer(name="stays")
    holder = stays.open("m", replica="holder", retain=th.newest(1))
    goes, reads = take(2)
    for worker, name in ((goes, "goes"), (reads, "reads")):
        worker.do(start, cluster, [stays.address], name=name)
    goes.do(open_shard, "trainer")
    reads.do(open_shard, "reader")
    goes.do(publish, 1)
    goes.do(unpublish)
    goes.do(close_peer)
    assert reads.do(replicate).version == 1
    holder.close()
