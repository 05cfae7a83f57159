"""A pull that fails says why, leaves the handle torn, and takes nobody else down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy
import pytest
from steps import MIB, blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.runtime.pulling import PullRun

StartPeer = Callable[..., th.Peer]
IMPATIENT = th.Config(pull=th.PullConfig(unavailable_after=1.0))


InTheMiddle = Callable[[Callable[[PullRun], None]], None]


@pytest.fixture
def middle(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[InTheMiddle]:
    """Has a function run once in the middle of the next pull, on the pull's thread."""
    plain = PullRun.held
    once: list[Callable[[PullRun], None]] = []

    def held(self: PullRun, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
        plain(self, chunk, digest, known_to)
        if once:
            once.pop()(self)

    monkeypatch.setattr(PullRun, "held", held)
    yield once.append
    assert not once, "there was no pull"


def pair(peer: StartPeer, **options: object) -> tuple[th.ShardHandle, th.ShardHandle]:
    """A trainer that published version 1, and a rollout; 96 chunks."""
    options = {"config": IMPATIENT, **options}
    trainer = peer(**options).open("m", replica="trainer")
    rollout = peer(**options).open("m", replica="rollout")
    trainer.register(fill(blank(3, 8 * MIB), 1))
    rollout.register(blank(3, 8 * MIB))
    trainer.publish(1)
    return trainer, rollout


def tensors(handle: th.ShardHandle) -> dict[str, numpy.ndarray]:
    assert handle._tenure.region is not None
    return {found.spec.name: found.tensor for found in handle._tenure.region._found}


def test_the_deadline_of_a_pull_is_a_timeout_that_says_how_far_it_came(
    peer: StartPeer, middle: InTheMiddle
) -> None:
    trainer, rollout = pair(peer)

    def until_the_deadline(pull: PullRun) -> None:
        while time.monotonic() < pull._deadline:
            time.sleep(0.01)

    middle(until_the_deadline)
    with pytest.raises(th.Timeout, match=r"of 96 chunks.*m/trainer#0"):
        rollout.replicate(1, timeout=0.5)
    assert rollout.state is th.HandleState.TORN
    assert rollout.version is None
    assert rollout.replicate(1, timeout=20).version == 1
    assert not wrong(tensors(rollout), 1)
    trainer.unpublish(timeout=10)


def test_a_pull_without_time_for_more_than_the_old_version_says_whom_that_waited_for(
    peer: StartPeer, middle: InTheMiddle
) -> None:
    trainer, first = pair(peer, offload_limit=0)
    second = peer(config=IMPATIENT, offload_limit=0).open("m", replica="second")
    second.register(blank(3, 8 * MIB))
    first.replicate(1, timeout=20)
    trainer.unpublish(timeout=10)
    trainer.publish(2)

    def have_it_given_up(_pull: PullRun) -> None:
        with pytest.raises(th.Timeout, match=r"before \(version 1 .* is being pulled by m/second"):
            first.replicate(2, timeout=1.0)

    middle(have_it_given_up)
    with pytest.raises(th.VersionUnavailable):
        second.replicate(1, timeout=20)
    assert first.state is th.HandleState.REGISTERED
    assert first.replicate(2, timeout=20).version == 2


def test_attempts_that_never_come_further_give_the_version_up(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trainer, rollout = pair(peer)
    plain = PullRun.held

    def one_chunk(self: PullRun, *chunk: Any) -> None:
        plain(self, *chunk)
        while time.monotonic() < self._deadline:
            time.sleep(0.01)

    monkeypatch.setattr(PullRun, "held", one_chunk)
    calls = set()
    for _ in range(30):
        with pytest.raises(th.Timeout, match="of 96 chunks"):
            rollout.replicate(1, timeout=0.4)
        failed = rollout._attempts.failed
        assert failed is not None
        calls.add(failed.call)
        if len(calls) > 1:
            return  # the first call is over, and what it pinned is free to go
    pytest.fail("the same call is asked for ever")


def test_tensors_changed_while_published_are_an_integrity_error_that_names_one(
    peer: StartPeer,
) -> None:
    trainer, rollout = pair(peer)
    server = trainer._driver.node.shards[trainer._slot].server
    assert server is not None
    while not server.manifest.complete:
        time.sleep(0.001)
    tensors(trainer)["layer1"][12345] += 1
    with pytest.raises(th.IntegrityError, match=r"'layer1'.*m/trainer#0.*before unpublish"):
        rollout.replicate(1, timeout=20)
    assert rollout.state is th.HandleState.TORN
    trainer.unpublish(timeout=10)
    fill(tensors(trainer), 2)
    trainer.publish(2)
    assert rollout.replicate("latest", timeout=20).version == 2
    assert not wrong(tensors(rollout), 2)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_source_that_closes_in_the_middle_leaves_a_copy_to_go_on_from(
    peer: StartPeer, middle: InTheMiddle, transport: str
) -> None:
    trainer, rollout = pair(peer, transports=[transport])
    weights = tensors(trainer)

    def close(_pull: PullRun) -> None:
        trainer.close()
        fill(weights, 9)

    middle(close)
    assert rollout.replicate(1, timeout=20).version == 1
    assert not wrong(tensors(rollout), 1)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_source_that_closes_with_no_room_for_a_copy_goes_in_time_and_the_pull_says_so(
    peer: StartPeer,
    middle: InTheMiddle,
    transport: str,
) -> None:
    # Asked far ahead, a source that closes would have the time to give all of it.
    config = th.Config(pull=replace(IMPATIENT.pull, run_ahead=1e-3))
    trainer, rollout = pair(peer, transports=[transport], offload_limit=0, config=config)
    took = []

    def close(_pull: PullRun) -> None:
        started = time.monotonic()
        with suppress(th.RetentionLost):
            trainer.close(timeout=3)
        took.append(time.monotonic() - started)

    middle(close)
    with pytest.raises(th.VersionUnavailable, match=r"version 1 by trainer"):
        rollout.replicate(1, timeout=20)
    assert took[0] < 3 + 5
    assert rollout.state is th.HandleState.TORN


def test_a_source_that_unpublishes_waits_until_the_puller_has_it_all(
    peer: StartPeer, middle: InTheMiddle
) -> None:
    """Its group had decided for the version, and nobody else has it."""
    trainer, rollout = pair(peer, transports=["tcp"])
    unpublished: list[bool] = []

    def unpublish() -> None:
        trainer.unpublish(timeout=20)
        fill(tensors(trainer), 2)
        unpublished.append(rollout.state is th.HandleState.PUBLISHED)

    thread = threading.Thread(target=unpublish)
    middle(lambda _pull: thread.start())
    rollout.replicate(1, timeout=20)
    assert not wrong(tensors(rollout), 1)
    thread.join(20)
    assert unpublished, "it never returned"


def test_a_torn_handle_may_publish_and_be_registered_anew(
    peer: StartPeer, middle: InTheMiddle
) -> None:
    trainer, rollout = pair(peer)

    def fail(_pull: PullRun) -> None:
        raise ZeroDivisionError

    middle(fail)
    with pytest.raises(ZeroDivisionError):
        rollout.replicate(1, timeout=20)
    assert rollout.state is th.HandleState.TORN
    fill(tensors(rollout), 5)
    rollout.publish(5)
    assert trainer.replicate("latest", timeout=20).version == 5
    assert not wrong(tensors(trainer), 5)
    rollout.unpublish()
    rollout.unregister()
    rollout.register(blank(3, 8 * MIB))
    assert rollout.replicate("latest", timeout=20).version == 5


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[th.ShardHandle], None]]:
    """Has the announcement of what the handle's next pull brought time out."""
    with monkeypatch.context() as patch:

        def once(handle: th.ShardHandle) -> None:
            node = handle._driver.node
            plain, left = node.hold, [True]

            def hold(now: float, number: int, deadline: float, *args: object) -> None:
                if args[-1] and left:
                    left.clear()
                    plain(now, number, deadline, *args)  # type: ignore[arg-type]
                    node.interrupt(now, handle._slot, number)
                else:
                    plain(now, number, deadline, *args)  # type: ignore[arg-type]

            patch.setattr(node, "hold", hold)

        yield once


def test_what_came_but_could_not_be_announced_is_not_fetched_again(
    peer: StartPeer, untold: Callable[[th.ShardHandle], None]
) -> None:
    trainer, rollout = pair(peer)
    untold(rollout)
    with pytest.raises(th.Timeout):
        rollout.replicate(timeout=10)
    assert rollout.state is th.HandleState.TORN
    pull = rollout.replicate(timeout=10)
    assert pull.up_to_date
    assert (rollout.state, rollout.version) == (th.HandleState.PUBLISHED, 1)
    assert not wrong(tensors(rollout), 1)
    trainer.unpublish()
    third = peer().open("m", replica="third")
    third.register(blank(3, 8 * MIB))
    third.replicate(timeout=10)
    assert not wrong(tensors(third), 1)


def test_what_came_is_fetched_again_if_somebody_wrote_into_it_since(
    peer: StartPeer, untold: Callable[[th.ShardHandle], None]
) -> None:
    _, rollout = pair(peer)
    untold(rollout)
    with pytest.raises(th.Timeout):
        rollout.replicate(timeout=10)
    tensors(rollout)["layer1"][7] ^= 1
    pull = rollout.replicate(timeout=10)
    assert not pull.up_to_date
    assert not wrong(tensors(rollout), 1)
