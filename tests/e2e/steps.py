"""What a worker can be told to do. The bytes of a version are the chaos suite's (content.py).

The tensors are numpy arrays: a worker starts ten times as fast without torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from workers import World

import tensorhub_p2p as th
from chaos import content
from chaos.content import Tensors

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.runtime.pulling import PullRun

MIB = 1 << 20


# --- bytes -------------------------------------------------------------------------------


def blank(count: int = 3, size: int = MIB) -> Tensors:
    """`count` tensors of `size` bytes."""
    return content.blank(count, size)


def fill(tensors: Tensors, version: int) -> Tensors:
    """Give the tensors this version's bytes, in place."""
    content.fill(tensors, 0, version)
    return tensors


def wrong(tensors: Tensors, version: int) -> list[str]:
    """The tensors that have any byte that this version has not."""
    return list(content.wrong(tensors, 0, version))


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
    retain: th.Retain | None = None,
) -> None:
    """Open a shard of model "m" and register blank tensors; `name` for the steps that follow."""
    handle = world.peer.open(
        "m",
        replica=replica,
        shard=shard,
        num_shards=num_shards,
        retain=retain,
        timeout=timeout,
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

    def held(self: PullRun, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
        nonlocal seen
        plain(self, chunk, digest, known_to)
        seen += 1
        if seen == at:
            world.pause("in the middle of the pull")

    PullRun.held = held  # type: ignore[method-assign]
    try:
        return replicate(world, version, timeout, name)
    finally:
        PullRun.held = plain  # type: ignore[method-assign]


def replicate_across(
    world: World, seconds: float, say_at: int = 0, timeout: float = 60.0
) -> th.Pull:
    """Replicate version 1 where each chunk of another zone takes `seconds` longer.

    With `say_at` chunks in place it says "in the middle", and goes on.
    """
    from tensorhub_p2p.runtime.pulling import PullRun
    from tensorhub_p2p.transfer.links import Link

    plain_held, plain_read, seen = PullRun.held, Link._read, 0

    def held(self: PullRun, *chunk: Any) -> None:
        nonlocal seen
        plain_held(self, *chunk)
        seen += 1
        if seen == say_at:
            world.say("in the middle")

    def read(self: Link, *args: Any) -> None:
        if world.peer._driver.locality(self.source.peer) == 3:
            time.sleep(seconds)
        plain_read(self, *args)

    PullRun.held = held  # type: ignore[method-assign]
    Link._read = read  # type: ignore[method-assign]
    try:
        return replicate(world, 1, timeout)
    finally:
        PullRun.held = plain_held  # type: ignore[method-assign]
        Link._read = plain_read  # type: ignore[method-assign]


def replicate_pausing_at_first(
    world: World, version: int | str = "latest", timeout: float = 30.0, name: str = ""
) -> th.Pull:
    """The same, pausing before the first byte, when the old version was given up already."""
    from tensorhub_p2p.runtime.pulling import PullRun

    plain = PullRun.begin

    def begin(self: PullRun, into: Any) -> None:
        plain(self, into)
        world.pause("before the first byte")

    PullRun.begin = begin  # type: ignore[method-assign]
    try:
        return replicate(world, version, timeout, name)
    finally:
        PullRun.begin = plain  # type: ignore[method-assign]


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


def address(world: World) -> str:
    found: str = world.peer.address
    return found


def close_on_sigterm(world: World) -> None:
    th.close_on_sigterm(world.peer)


def wait_for_state(world: World, name: str, while_in: str = "alive") -> str:
    """Wait until the member with this name is no longer alive; returns what it is then."""
    while True:
        (found,) = (m.state for m in world.peer.members(everyone=True) if m.name == name)
        if found != while_in:
            return str(found)
        time.sleep(0.01)


def publish_both(world: World, version: int) -> None:
    """Shards "0" and "1" of a replica in this worker, one thread each."""
    _side_by_side(
        [
            lambda: world.handles["0"].publish(version, timeout=30),
            lambda: world.handles["1"].publish(version, timeout=30),
        ],
        before=[
            lambda: fill(world.tensors["0"], version),
            lambda: fill(world.tensors["1"], version),
        ],
    )


def unpublish_both(world: World) -> None:
    _side_by_side([world.handles["0"].unpublish, world.handles["1"].unpublish])


def _side_by_side(verbs: list[Callable[[], Any]], before: Sequence[Callable[[], Any]] = ()) -> None:
    for prepare in before:
        prepare()
    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(verb) for verb in verbs]:
            done.result()


def publish_for(world: World, seconds: float) -> int:
    """Publish one version after the other; the last one stays. Returns how many."""
    handle, tensors = world.handles[""], world.tensors[""]
    until, version = time.monotonic() + seconds, 0
    while True:
        version += 1
        fill(tensors, version)
        handle.publish(version)
        if time.monotonic() > until:
            return version
        handle.unpublish(timeout=30)


def replicate_until_ended(world: World, seconds: float) -> list[int]:
    """Replicate "latest" all the time; returns the versions, all of whose bytes were right."""
    until, seen = time.monotonic() + seconds, []
    while time.monotonic() < until:
        seen.append(replicate(world).version)
    return seen


def is_gateway(world: World) -> bool:
    """Whether the worker's peer speaks for its zone."""
    driver = world.peer._driver
    return bool(driver.ask(lambda _now: driver.node.zones.is_gateway))
