"""What a worker can be told to do about membership; light, without arrays."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from workers import World

import tensorhub_p2p as th
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged


def join(world: World, cluster: str, seeds: list[str], **options: Any) -> tuple[str, str]:
    """Start the worker's peer; returns its id and address."""
    world.peer = th.Peer(cluster=cluster, seeds=seeds, transports=["tcp"], **options)
    deaths = world.tensors["deaths"] = {}
    control = world.peer._driver.control
    pass_on = control._on_event

    def on_event(event: object) -> None:
        if isinstance(event, MemberChanged) and event.member.status.name == "DEAD":
            deaths[event.member.peer_id] = time.monotonic()
        pass_on(event)

    control._on_event = on_event
    return world.peer.peer_id, world.peer.address


def states(world: World) -> dict[str, str]:
    """Of everybody known, by id."""
    return {m.peer_id: m.state for m in world.peer.members(everyone=True)}


def deaths(world: World) -> set[str]:
    """All that were ever held for dead here."""
    return set(world.tensors["deaths"])


def hold_the_lock(world: World, seconds: float) -> None:
    """Keep Python's lock without using it: a PyDLL's functions don't give it back."""
    world.say("holding")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def look(world: World, peer: PeerId) -> None:
    driver = world.peer._driver
    driver.ask(lambda now: driver.links.look(peer))


def counters(world: World) -> dict[str, int]:
    return dict(world.peer._driver.links.counters)


def faults(world: World) -> list[str]:
    return [repr(fault) for fault in world.peer._driver.control.faults]


def fork_a_child(world: World, seconds: float) -> int:
    """A child that inherits all descriptors and sleeps, as a forked data loader's worker."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os._exit(0)
    return child


def close(world: World) -> None:
    world.peer.close()
