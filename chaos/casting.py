"""Who plays in a run: trainers, rollouts, keepers and elastic ones, on which hosts and in which
zones. Everything follows from the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.arena import Role

SEEDS = 3
"""Workers at fixed addresses, through which all others join; of different roles."""
PER_HOST = 2
SIZES = ((4, 64 << 10), (40, 64 << 10), (4, 1 << 20), (2, 4 << 20))
"""Tensors of a shard, and bytes of each."""
SOON = 3.0
"""Seconds of silence after which a slot can be taken over, where that is tried."""


@dataclass(frozen=True)
class Shape:
    """How a run is cut. Sizes in bytes; the last three as in the workers' settings."""

    workers: int = 20
    shards: int = 1
    zones: int = 1
    mbit: float = 250.0
    tensors: int = 4
    size: int = 1 << 20
    period: float = 2.0
    step: float = 0.2
    unresponsive: float = 60.0

    @staticmethod
    def drawn(seed: int, workers: int) -> Shape:
        rng = random.Random(f"shape/{seed}")
        tensors, size = rng.choice(SIZES)
        return Shape(
            workers=workers,
            shards=rng.choice((1, 1, 2)),
            zones=rng.choice((1, 1, 2)),
            mbit=rng.choice((100.0, 250.0, 1000.0)),
            tensors=tensors,
            size=size,
            period=rng.choice((2.0, 3.0, 4.0)),
            unresponsive=rng.choice((60.0, SOON, SOON)),
        )

    @property
    def hosts(self) -> int:
        return (self.workers + PER_HOST - 1) // PER_HOST


def cast(shape: Shape) -> list[Role]:
    """Two trainers side by side, a keeper, elastic ones (of one shard), and rollouts."""
    replicas = [("trainer", "trainer-0"), ("trainer", "trainer-1"), ("keeper", "keeper-0")]
    if shape.shards == 1:
        replicas += [("elastic", "elastic-0"), ("elastic", "elastic-1")]
    rollouts = shape.workers // shape.shards - len(replicas)
    replicas += [("rollout", f"rollout-{number}") for number in range(rollouts)]
    found: list[Role] = []
    for role, replica in replicas:
        found.extend(_shards(shape, role, replica, len(found)))
    return found


def _shards(shape: Shape, role: str, replica: str, index: int) -> list[Role]:
    """The workers of one replica: each on the next host, all in one zone."""
    hosts = shape.hosts
    first = index % hosts
    zone = "ab"[first * shape.zones // hosts]
    alone = shape.shards == 1
    return [
        Role(
            name=replica if alone else f"{replica}-{shard}",
            role=role,
            replica="" if role == "elastic" else replica,
            shard=shard,
            num_shards=shape.shards,
            zone=zone,
            host=(first + shard) % hosts,
            seed=_is_seed(replica, shard),
            newest=5 if role == "keeper" else 0,
            spot=role == "elastic",
            pulls=8 if role == "elastic" else 0,
        )
        for shard in range(shape.shards)
    ]


def _is_seed(replica: str, shard: int) -> bool:
    return shard == 0 and replica in {"trainer-0", "rollout-0", "rollout-1"}
