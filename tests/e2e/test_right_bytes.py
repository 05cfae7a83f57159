"""What `replicate` brought is what was published, byte for byte, over every way there is."""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy
import pytest
import steps
import torch
from steps import blank, fill, wrong
from workers import Worker

import tensorhub_p2p as th

StartPeer = Callable[..., th.Peer]
Take = Callable[[int], list[Worker]]
SECRET = "a secret that is long enough"
WAYS = {
    "cma": {"transports": ["cma"]},
    "tcp": {"transports": ["tcp"]},
    "cma with a secret": {"transports": ["cma"], "secret": SECRET},
    "tcp with TLS": {"transports": ["tcp"], "secret": SECRET},
}


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def zoo(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind: sizes, dtypes, permutations, ties, empties, and many small ones."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    tied = noise(100, 33)
    found = {
        "embedding": tied,
        "head": tied,
        "big": noise(1500, 1000),
        "bf16": noise(333, 7).bfloat16(),
        "half": noise(129).half(),
        "double": noise(17).double(),
        "bool": noise(1001) > 0,
        "int8": (noise(99) * 50).to(torch.int8),
        "int64": (noise(5) * 1e9).long(),
        "complex": torch.complex(noise(11), noise(11)),
        "scalar": noise(1)[0].clone(),
        "empty": torch.empty(0),
        "also empty": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "transposed": noise(40, 60).t(),
        "channels last": noise(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        "view": noise(64)[8:24],
    }
    found.update({f"small.{i}": noise(i % 7 + 1) for i in range(2000)})
    return found


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    different = [name for name in theirs if not torch.equal(mine[name], theirs[name])]
    assert not different


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_tensor_arrives_whatever_the_order_of_registration(
    peer: StartPeer, way: str
) -> None:
    theirs, mine = zoo(1), zoo(2)
    trainer, rollout = peer(**WAYS[way]).open("m"), peer(**WAYS[way]).open("m")
    trainer.register(theirs)
    rollout.register(dict(reversed(mine.items())))
    trainer.publish(1)
    pull = rollout.replicate(1, timeout=30)
    assert_equal(mine, theirs)
    assert pull.bytes == sum(t.nbytes for name, t in theirs.items() if name != "head"), (
        "tied weights move once, everything else once"
    )
    assert [source.transport for source in pull.sources] == [way.split()[0]]
    assert pull.retried == 0


@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_everything_works_over_ipv6(peer: StartPeer, secret: str | None) -> None:
    options = {"bind": "[::1]:0", "transports": ["tcp"], "secret": secret}
    first, second = peer(**options), peer(**options)
    assert first.address.startswith("[::1]:")
    trainer, rollout, copy = first.open("m"), second.open("m"), blank()
    trainer.register(fill(blank(), 1))
    rollout.register(copy)
    trainer.publish(1)
    rollout.replicate(timeout=20)
    assert not wrong(copy, 1)


class Model(torch.nn.Module):
    """Tied weights, a buffer, one that is not saved, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.nothing = torch.nn.Parameter(torch.empty(0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


def test_a_module_computes_the_same_afterwards(peer: StartPeer) -> None:
    theirs, mine = Model(), Model()
    tokens = torch.arange(50)
    theirs(tokens)  # moves the buffers of the batch norm
    trainer, rollout = peer().open("m"), peer().open("m")
    trainer.register(theirs)
    rollout.register(mine)
    trainer.publish(1)
    rollout.replicate(timeout=20)
    assert torch.equal(mine.eval()(tokens), theirs.eval()(tokens))
    assert mine.head.weight is mine.embedding.weight


def test_numpy_arrays_and_a_shard_without_any_bytes_are_fine(peer: StartPeer) -> None:
    first, second = peer(), peer()
    for name, theirs, mine in (
        ("arrays", {"w": numpy.arange(99.0)}, {"w": numpy.zeros(99)}),
        ("nothing", {"w": numpy.zeros((0, 4))}, {"w": numpy.zeros((0, 4))}),
    ):
        trainer, rollout = first.open(name), second.open(name)
        trainer.register(theirs)
        rollout.register(mine)
        trainer.publish(1)
        pull = rollout.replicate(1, timeout=20)
        assert pull.version == 1
        assert all((mine[key] == theirs[key]).all() for key in theirs)
        trainer.unpublish()
        third, copy = first.open(name), {key: value.copy() for key, value in mine.items()}
        third.register(copy)
        assert third.replicate(1, timeout=20).version == 1


def test_two_handles_of_one_peer_replicate_from_each_other(peer: StartPeer) -> None:
    for transport in ("cma", "tcp"):
        alone = peer(transports=[transport], seeds=None, cluster=f"alone-{transport}")
        trainer, rollout, copy = alone.open("m"), alone.open("m"), blank()
        trainer.register(fill(blank(), 1))
        rollout.register(copy)
        trainer.publish(1)
        rollout.replicate(timeout=20)
        assert not wrong(copy, 1)


# --- selectors ---------------------------------------------------------------------------


def test_latest_and_the_ones_before_are_what_they_say(peer: StartPeer) -> None:
    first = peer()
    for version in (3, 5, 9):
        keeper = first.open("m")
        keeper.register(fill(blank(), version))
        keeper.publish(version)
    rollout, copy = peer().open("m"), blank()
    rollout.register(copy)
    for wanted, version in (
        ("latest-2", 3),
        ("latest-1", 5),
        (5, 5),
        ("latest", 9),
        ("latest-0", 9),
        ("3", 3),
    ):
        assert rollout.replicate(wanted, timeout=20).version == version
        assert rollout.version == version
        assert not wrong(copy, version)
    assert [found.version for found in first.versions("m")] == [9, 5, 3]
    assert all(found.whole for found in first.versions("m"))


def test_what_is_held_already_is_up_to_date_and_moves_nothing(peer: StartPeer) -> None:
    trainer, rollout = peer().open("m"), peer().open("m")
    trainer.register(fill(blank(), 1))
    rollout.register(blank())
    trainer.publish(1)
    assert trainer.replicate("latest", timeout=10).up_to_date
    first = rollout.replicate("latest", timeout=10)
    assert (first.up_to_date, first.bytes) == (False, 3 << 20)
    for wanted in ("latest", 1):
        again = rollout.replicate(wanted, timeout=10)
        assert (again.up_to_date, again.bytes, again.sources) == (True, 0, ())


def test_waiting_for_a_version_ends_when_it_can_be_replicated(peer: StartPeer) -> None:
    trainer, rollout = peer().open("m"), peer().open("m")
    trainer.register(fill(blank(), 4))
    waiting = rollout.wait_for_async(-1, timeout=20)
    trainer.publish(4)
    assert waiting.result(20) == 4
    assert rollout.wait_for(3, timeout=10) == 4
    waiting = rollout.wait_for_async(4, timeout=20)
    trainer.unpublish()
    trainer.publish(6)
    assert waiting.result(20) == 6


def test_a_published_handle_moves_on_to_the_next_version_and_serves_it(peer: StartPeer) -> None:
    trainer, weights = peer().open("m"), blank()
    trainer.register(weights)
    rollout, copy = peer().open("m"), blank()
    rollout.register(copy)
    for version in range(1, 6):
        fill(weights, version)
        trainer.publish(version)
        rollout.replicate("latest", timeout=20)
        assert not wrong(copy, version)
        trainer.unpublish()
    third, other = peer().open("m"), blank()
    third.register(other)
    assert third.replicate("latest", timeout=20).version == 5
    assert not wrong(other, 5)


# --- shards ------------------------------------------------------------------------------


def test_two_shards_in_one_process_form_a_group(peer: StartPeer) -> None:
    first, second = peer(), peer()
    trainer = [first.open("m", replica="t", shard=i, num_shards=2) for i in range(2)]
    rollout = [second.open("m", replica="r", shard=i, num_shards=2) for i in range(2)]
    weights, copies = [blank(), blank(2)], [blank(), blank(2)]
    for i in range(2):
        trainer[i].register(fill(weights[i], 10 + i))
        rollout[i].register(copies[i])
    waiting = [handle.replicate_async("latest", timeout=20) for handle in rollout]
    trainer[0].publish_async(1).result(20)
    assert not any(wait.done() for wait in waiting), "version 1 is not whole yet"
    trainer[1].publish(1)
    assert [wait.result(20).version for wait in waiting] == [1, 1]
    assert not any(wrong(copies[i], 10 + i) for i in range(2))


@pytest.mark.processes
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_rollouts_of_two_shards_and_three_replicas_in_six_processes(
    peer: StartPeer, take: Take, secret: str | None, cluster: str
) -> None:
    """The trainer's two shards are here, in two peers; each rollout shard has a process."""
    trainers, weights = [], []
    for shard in range(2):
        member = peer(secret=secret, name=f"trainer-{shard}")
        trainers.append(member.open("m", replica="trainer", shard=shard, num_shards=2))
        weights.append(blank())
        trainers[-1].register(weights[-1])
    rollouts = take(6)
    seeds = [handle._driver.info.addresses[0] for handle in trainers]
    for number, rollout in enumerate(rollouts):
        rollout.begin(steps.start, cluster, seeds, secret=secret, name=f"rollout-{number}")
    for rollout in rollouts:
        rollout.finish()
    for number, rollout in enumerate(rollouts):
        rollout.begin(steps.open_shard, f"rollout-{number // 2}", shard=number % 2, num_shards=2)
    for rollout in rollouts:
        rollout.finish()
    for version in range(1, 4):
        for rollout in rollouts:
            rollout.begin(steps.replicate, version)
        for tensors in weights:
            fill(tensors, version)
        for wait in [trainer.publish_async(version, timeout=20) for trainer in trainers]:
            wait.result(30)
        pulls = [rollout.finish() for rollout in rollouts]
        assert [pull.version for pull in pulls] == [version] * 6
        for wait in [trainer.unpublish_async(20) for trainer in trainers]:
            wait.result(30)
    for rollout in rollouts:
        assert not rollout.do(steps.faults)


@pytest.mark.parametrize("size", [0, 1, 1000], ids="{} bytes".format)
def test_a_shard_of_one_chunk_or_none_is_served_on_by_who_replicated_it(
    peer: StartPeer, size: int
) -> None:
    handles = [peer().open("m", replica=name) for name in ("trainer", "second", "third")]
    tensors = [blank(1, size) for _ in handles]
    for handle, mine in zip(handles, tensors, strict=True):
        handle.register(mine)
    trainer, second, third = handles
    fill(tensors[0], 1)
    trainer.publish(1)
    second.replicate(timeout=20)
    trainer.unpublish()
    fill(tensors[0], 9)
    pull = third.replicate(timeout=20)
    assert not wrong(tensors[2], 1)
    assert [s.peer_id for s in pull.sources if s.chunks] == [second._driver.peer_id][: bool(size)]
