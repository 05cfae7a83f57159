"""Sources that lie, and memory that is taken away: an error or right bytes, and no crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from steps import MIB, Tensors, blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p.transfer.links import Link

StartPeer = Callable[..., th.Peer]
IMPATIENT = th.Config(pull=th.PullConfig(unavailable_after=1.0))


def rollout(peer: StartPeer, replica: str, transport: str) -> tuple[th.ShardHandle, Tensors]:
    handle = peer(config=IMPATIENT, transports=[transport]).open("m", replica=replica)
    tensors = blank(3, 2 * MIB)
    handle.register(tensors)
    return handle, tensors


def lie(tensors: Tensors) -> None:
    """Flip a bit in every chunk that is served."""
    for tensor in tensors.values():
        numpy.bitwise_xor(tensor, 4, out=tensor)


def wait_for_digests(handle: th.ShardHandle) -> None:
    server = handle._driver.node.shards[handle._slot].server
    assert server is not None
    while not server.manifest.complete:
        time.sleep(0.001)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_lying_source_is_shunned_and_alone_it_is_an_integrity_error(
    peer: StartPeer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, weights = rollout(peer, "trainer", transport)
    liar, its = rollout(peer, "liar", transport)
    puller, copy = rollout(peer, "puller", transport)
    fill(weights, 1)
    trainer.publish(1)
    liar.replicate(1, timeout=20)
    lie(its)
    caught = threading.Event()
    plain = Link._read

    def read(self: Link, *order: Any) -> None:
        """The honest source is read once the liar was."""
        if self.source.slot == trainer._slot:
            assert caught.wait(20), "nobody reads from the liar"
        plain(self, *order)
        if self.source.slot == liar._slot:
            caught.set()

    monkeypatch.setattr(Link, "_read", read)
    pull = puller.replicate(1, timeout=20)
    assert not wrong(copy, 1)
    gave = {source.slot: (source.chunks, source.state) for source in pull.sources}
    assert gave == {"m/trainer#0": (24, "serving"), "m/liar#0": (0, "sent wrong bytes")}
    assert pull.retried >= 2

    trainer.unpublish()
    puller.close()
    last, copy = rollout(peer, "last", transport)
    with pytest.raises(th.IntegrityError, match=r"'layer\d'.*never matched.*from m/liar#0"):
        last.replicate(1, timeout=20)
    assert last.state is th.HandleState.TORN
    fill(weights, 2)
    trainer.publish(2)
    assert last.replicate("latest", timeout=20).version == 2
    assert not wrong(copy, 2)


def owner_and_puller(
    peer: StartPeer, transport: str
) -> tuple[th.ShardHandle, th.ShardHandle, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Registered at both: a tensor that stays, and one that its owner is going to free."""
    weights = {"stays": torch.ones(MIB), "freed": torch.ones(48 * MIB, dtype=torch.uint8)}
    copy = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    owner = peer(config=IMPATIENT, transports=[transport]).open("m", replica="owner")
    puller = peer(config=IMPATIENT, transports=[transport]).open("m", replica="puller")
    owner.register(weights)
    puller.register(copy)
    return owner, puller, weights, copy


def free(weights: dict[str, torch.Tensor]) -> None:
    """As a framework does that shards weights again after each use of the whole."""
    weights["freed"].untyped_storage().resize_(0)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_memory_that_its_owner_freed_while_published_ends_no_process(
    peer: StartPeer, transport: str
) -> None:
    owner, puller, weights, copy = owner_and_puller(peer, transport)
    owner.publish(1)
    wait_for_digests(owner)
    free(weights)
    with pytest.raises((th.IntegrityError, th.VersionUnavailable, th.TransferError)):
        puller.replicate(1, timeout=20)
    owner.unpublish(force=True)  # a copy for the pull, which may come back, can't be made
    with pytest.raises(th.StateError, match=r"'freed' was resized.*register\(\) again"):
        owner.publish(2)
    owner.unregister()
    weights["freed"] = torch.full_like(copy["freed"], 5)
    owner.register(weights)
    owner.publish(2)
    assert puller.replicate("latest", timeout=20).version == 2
    assert all(torch.equal(copy[name], weights[name]) for name in weights)


def test_digests_of_memory_that_was_freed_are_not_taken_and_its_owner_lives(
    peer: StartPeer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, puller, weights, _ = owner_and_puller(peer, "tcp")
    digests = owner._driver.digests
    start = digests.start

    def free_first(*what: Any) -> None:
        free(weights)
        start(*what)

    monkeypatch.setattr(digests, "start", free_first)
    owner.publish(1)
    with pytest.raises(th.Timeout, match="m/owner#0"):
        puller.replicate(1, timeout=0.5)
    assert "tensor 'freed' was resized" in caplog.text
    owner.unpublish(force=True)


def test_a_resized_or_replaced_tensor_is_named_by_whoever_would_read_or_write_it(
    peer: StartPeer,
) -> None:
    trainer, puller = peer().open("m"), peer().open("m")
    weights, copy = torch.ones(1000), torch.nn.Parameter(torch.zeros(1000))
    trainer.register({"w": weights})
    puller.register({"w": copy})
    trainer.publish(1)
    copy.data = torch.zeros(1000)
    with pytest.raises(th.StateError, match=r"'w'.*other memory"):
        puller.replicate(1, timeout=10)
    assert puller.state is th.HandleState.REGISTERED
    puller.unregister()
    puller.register({"w": copy})
    assert puller.replicate(1, timeout=10).version == 1
    trainer.unpublish()
    weights.resize_(4000)
    with pytest.raises(th.StateError, match=r"'w' was resized"):
        trainer.publish(2)
