"""What a worker can be told to do, and the bytes that a version consists of.

Every byte of a version is a function of its place and the version, and differs from that
of the versions before and after: a mix of two versions can't go unnoticed.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from workers import World

import tensorhub_p2p as th

if TYPE_CHECKING:
    from tensorhub_p2p.runtime.pulling import PullRun

MIB = 1 << 20
Tensors = dict[str, torch.Tensor]


# --- bytes -------------------------------------------------------------------------------


def blank(count: int = 3, size: int = MIB) -> Tensors:
    """`count` tensors of `size` bytes."""
    return {f"layer{i}": torch.zeros(size, dtype=torch.uint8) for i in range(count)}


def expected(index: int, size: int, version: int) -> torch.Tensor:
    """The bytes of the tensor with this index in this version."""
    return torch.arange(size, dtype=torch.int32).add_(151 * version + 7 * index).to(torch.uint8)


def fill(tensors: Tensors, version: int) -> Tensors:
    """Give the tensors this version's bytes, in place."""
    for index, tensor in enumerate(tensors.values()):
        tensor.copy_(expected(index, tensor.numel(), version))
    return tensors


def wrong(tensors: Tensors, version: int) -> list[str]:
    """The tensors that have any byte that this version has not."""
    return [
        name
        for index, (name, tensor) in enumerate(tensors.items())
        if not torch.equal(tensor, expected(index, tensor.numel(), version))
    ]


# --- steps -------------------------------------------------------------------------------


def start(world: World, cluster: str, seeds: list[str] | None = None, **options: Any) -> str:
    """Start the worker's peer; returns its address."""
    world.peer = th.Peer(cluster=cluster, seeds=seeds, **options)
    address: str = world.peer.address
    return address


def open_shard(
    world: World,
    replica: str,
    *,
    shard: int = 0,
    num_shards: int = 1,
    count: int = 3,
    size: int = MIB,
    timeout: float = 30.0,
    name: str = "",
) -> None:
    """Open a shard of model "m" and register blank tensors; `name` for the steps that follow."""
    handle = world.peer.open(
        "m", replica=replica, shard=shard, num_shards=num_shards, timeout=timeout
    )
    world.handles[name] = handle
    world.tensors[name] = blank(count, size)
    handle.register(world.tensors[name])


def publish(world: World, version: int, name: str = "", **options: Any) -> None:
    fill(world.tensors[name], version)
    world.handles[name].publish(version, **options)


def unpublish(world: World, timeout: float = 30.0, name: str = "") -> float:
    """Returns the seconds it took."""
    started = time.monotonic()
    world.handles[name].unpublish(timeout)
    return time.monotonic() - started


def replicate(
    world: World, version: int | str = "latest", timeout: float = 30.0, name: str = ""
) -> th.Pull:
    """Replicate, and compare every byte."""
    pull: th.Pull = world.handles[name].replicate(version, timeout)
    bad = wrong(world.tensors[name], pull.version)
    assert not bad, f"version {pull.version} arrived with wrong bytes in {bad}"
    return pull


def replicate_pausing(
    world: World, version: int | str = "latest", at: int = 2, timeout: float = 30.0, name: str = ""
) -> th.Pull:
    """The same, pausing when `at` chunks are in place: nothing more is asked for until then."""
    from tensorhub_p2p.runtime.pulling import PullRun

    plain, seen = PullRun.held, 0

    def held(self: PullRun, chunk: int, digest: bytes) -> None:
        nonlocal seen
        plain(self, chunk, digest)
        seen += 1
        if seen == at:
            world.pause("in the middle of the pull")

    PullRun.held = held  # type: ignore[method-assign]
    try:
        return replicate(world, version, timeout, name)
    finally:
        PullRun.held = plain  # type: ignore[method-assign]


def wait_for(world: World, newer_than: int, timeout: float = 30.0, name: str = "") -> int:
    version: int = world.handles[name].wait_for(newer_than, timeout)
    return version


def say_when_in_verb(world: World, name: str = "") -> None:
    """Say "in verb" to the test as soon as the handle is in one."""

    def watch() -> None:
        while world.handles[name]._verb_thread is None:
            time.sleep(0.001)
        world.say("in verb")

    threading.Thread(target=watch, daemon=True).start()


def close_peer(world: World) -> None:
    world.peer.close()


def close_handle(world: World, name: str = "") -> None:
    world.handles.pop(name).close()


def state(world: World, name: str = "") -> th.HandleState:
    found: th.HandleState = world.handles[name].state
    return found


def members(world: World) -> list[str]:
    return sorted(member.name for member in world.peer.members())


def versions(world: World) -> list[th.VersionInfo]:
    found: list[th.VersionInfo] = world.peer.versions("m")
    return found


def faults(world: World) -> list[str]:
    """What went wrong on the control thread: nothing ever should."""
    return [repr(fault) for fault in world.peer._driver.control.faults]
