"""What goes wrong only where there are jobs: the cast changes, and news come late.

Rules of this file. Faults as values, as in sim/faults.py, which has those of computers and
networks; these are of those who start and end processes.

    Grow       one more process joins, for good
    Leave      a process closes its handles and leaves; at the end a new one starts there
    Replace    the job controller takes a process for lost that isn't: two do its job
    Late       what one process tells another comes late, and comes twice
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import cast

from tensorhub_p2p.sim.cluster.stage import ClusterSim
from tensorhub_p2p.sim.faults import (
    Burst,
    Clog,
    Crash,
    End,
    Fault,
    Generator,
    Partition,
    Pause,
    Schedule,
    Slow,
    Stage,
    Stall,
)
from tensorhub_p2p.sim.link import Link


@dataclass(frozen=True)
class Grow(Fault):
    """One more process."""

    def begin(self, stage: Stage) -> End:
        _cluster(stage).grow()
        return lambda: None


@dataclass(frozen=True)
class Leave(Fault):
    """The process at this place leaves as one should; the next one starts at the end."""

    place: int

    def begin(self, stage: Stage) -> End:
        cluster, peer = _cluster(stage), stage.peers[self.place]
        cluster.leave_well(self.place)

        def restart() -> None:
            """As soon as it is gone."""
            if stage.peers[self.place] != peer:
                return
            if stage.network.host(peer).is_gone:
                cluster.restart_anew(self.place)
            else:
                stage.network.at(stage.network.now + 0.5, restart)

        return restart


@dataclass(frozen=True)
class Replace(Fault):
    """The jobs of this place are given to others as well."""

    place: int

    def begin(self, stage: Stage) -> End:
        _cluster(stage).replace(self.place)
        return lambda: None


@dataclass(frozen=True)
class Late(Fault):
    """What the process at this place sends to one other takes up to `delay` seconds, out of order,
    and half of it arrives twice."""

    place: int
    to: int
    delay: float

    def begin(self, stage: Stage) -> End:
        links, pair = stage.network.links, (stage.peers[self.place], stage.peers[self.to])
        links[pair] = Link((0.0005, self.delay), duplicate=0.5)

        def end() -> None:
            links.pop(pair, None)

        return end


ANY_WEATHER: tuple[type[Fault], ...] = (Crash, Crash, Pause, Stall, Slow, Burst, Late)
CUTS: tuple[type[Fault], ...] = (Partition, Partition, Clog)
CAST: tuple[type[Fault], ...] = (Grow, Leave, Replace)
COMING_AND_GOING: tuple[type[Fault], ...] = (Grow, Grow, Leave, Crash)


def _cluster(stage: Stage) -> ClusterSim:
    return cast(ClusterSim, stage)


def generate(
    seed: int,
    peers: int,
    duration: float,
    intensity: float,
    *,
    zones: int,
    needed: int,
    kinds: Sequence[type[Fault]],
    spared: int = 0,
) -> Schedule:
    """A schedule of faults of these kinds, as sim/faults.py draws it, with those of the cast.

    Nothing befalls the first `spared` places.
    """
    rng = random.Random(f"{seed}/faults")
    generator = Generator(rng, peers, duration, zones, needed)
    number = max(1, round(rng.uniform(0.5, 1.5) * intensity * duration / 10))
    drawn = [_draw(generator, rng.choice(kinds)) for _ in range(number)]
    drawn = [_spare(fault, spared, peers) for fault in drawn]
    return Schedule(tuple(sorted(drawn, key=lambda fault: fault.at)))


def _spare(fault: Fault, spared: int, peers: int) -> Fault:
    """The same, of somebody else if it is of a place that is spared."""
    if isinstance(fault, (Crash, Leave)) and fault.place < spared:
        return replace(fault, place=spared + fault.place % (peers - spared))
    return fault


def _draw(generator: Generator, kind: type[Fault]) -> Fault:
    if kind not in (*CAST, Late):
        return generator.draw(kind)
    rng, duration = generator.rng, generator.duration
    at, place = round(rng.uniform(0, duration * 0.8), 2), rng.randrange(generator.peers)
    if kind is Late:
        to = (place + rng.randrange(1, generator.peers)) % generator.peers
        return Late(at, round(duration - at, 2), place, to, round(rng.uniform(0.05, 1.0), 2))
    if kind is Leave:
        return Leave(at, round(rng.uniform(1.0, 4.0), 2), place)
    return Grow(at, inf) if kind is Grow else Replace(at, inf, place)
