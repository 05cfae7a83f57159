"""Single simulated runs of membership, for membership.py to spread over processes.

Rules of this file. Each function is one run, or a few in one cluster: it takes plain values
and returns plain values, and its seed decides everything. It knows no targets, and nothing of the
other variants that it is compared with. All times are virtual seconds unless they say "real".
"""

from __future__ import annotations

import random
import resource
import time
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.zones.zones import Zones
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.membership import LAN, MEMBERLIST, WAN, MembershipSim
from tensorhub_p2p.sim.record import Traffic, TrafficMeter

WARM_UP = 5.0
LONGEST_VERDICT = 90.0
"""After the last crash, until it is given up that everyone learns of it."""
STALL_SECONDS = (5.0, 20.0)
AFTERMATH = 25.0
"""After the last of some stalls has ended: verdicts that are still under way fall in it."""


@dataclass(frozen=True)
class Variant:
    """One way to run the same machine."""

    config: SwimConfig
    sockets: bool


VARIANTS = {
    "ours": Variant(SwimConfig(), True),
    "no sockets": Variant(SwimConfig(), False),
    "memberlist": Variant(MEMBERLIST, False),
}


def cluster(variant: str, peers: int, seed: int, loss: float, zones: int = 1) -> MembershipSim:
    """Peers that all know each other, and lose this share of their messages."""
    chosen = VARIANTS[variant]
    return MembershipSim(
        peers,
        zones=zones,
        seed=seed,
        config=chosen.config,
        sockets=chosen.sockets,
        link=Link(LAN.latency, loss),
        between_zones=Link(WAN.latency, loss),
    )


def crashes(
    variant: str, peers: int, seed: int, loss: float, *, host: bool, number: int, apart: float
) -> dict[str, Any]:
    """Some die one after the other; how long until all others know of each."""
    sim = cluster(variant, peers, seed, loss)
    victims = random.Random(f"{seed}/victims").sample(range(peers), number)
    sim.run_for(WARM_UP)
    for place in victims:
        sim.crash(place, host=host)
        sim.run_for(apart)
    sim.network.run_until(
        lambda: all(d.everyone is not None for d in sim.record.detections()),
        LONGEST_VERDICT,
        every=1.0,
    )
    detections = sim.record.detections()
    return {
        "everyone": [d.everyone for d in detections],
        "suspected": [d.first_suspected for d in detections],
        "false deaths": len(sim.record.falsely_declared()),
    }


def stalls(
    variant: str, peers: int, seed: int, loss: float, *, gil: bool, share: float, episodes: int
) -> dict[str, Any]:
    """Some stand still at once for 5 to 20 s, again and again, each time others."""
    sim = cluster(variant, peers, seed, loss)
    rng = random.Random(f"{seed}/stalled")
    at_once = ceil(share * peers)
    victims = rng.sample(range(peers), min(peers, at_once * episodes))
    sim.run_for(WARM_UP)
    for first in range(0, len(victims), at_once):
        for place in victims[first : first + at_once]:
            _stall(sim, place, rng.uniform(*STALL_SECONDS), gil)
        sim.run_for(STALL_SECONDS[1] + AFTERMATH)
    stalled = {sim.peers[place] for place in victims}
    died = set(sim.record.falsely_declared())
    by_stalled = {d.peer for d in sim.record.false_deaths if d.observer in stalled}
    return {
        "stalls": len(victims),
        "stalled died": len(died & stalled),
        "others died": len(died - stalled),
        "declared by stalled": len(by_stalled - stalled),
    }


def _stall(sim: MembershipSim, place: int, seconds: float, gil: bool) -> None:
    peer, network = sim.peers[place], sim.network
    (network.stall if gil else network.pause)(peer)
    network.at(network.now + seconds, lambda: network.resume(peer))


def quiet(variant: str, peers: int, seed: int, loss: float, *, seconds: float) -> dict[str, Any]:
    """Nothing happens but loss; whoever is declared dead is so wrongly."""
    sim = cluster(variant, peers, seed, loss)
    sim.run_for(seconds)
    return {"peer seconds": peers * seconds, "died": len(sim.record.falsely_declared())}


def traffic(
    variant: str,
    peers: int,
    seed: int,
    loss: float,
    *,
    zones: int,
    warm_up: float,
    seconds: float,
) -> dict[str, Any]:
    """What peers send when nothing happens."""
    sim = cluster(variant, peers, seed, loss, zones)
    sim.run_for(warm_up)
    meter = TrafficMeter(sim.network)
    sim.run_for(seconds)
    gateways = [p for p in sim.peers if isinstance(m := sim.machine(p), Zones) and m.is_gateway]
    rest = set(sim.peers).difference(gateways)
    return {
        "all": _plain(meter.read()),
        "others": _plain(meter.read(sorted(rest))),
        "gateways": _plain(meter.read(gateways)) if gateways else None,
        "false deaths": len(sim.record.falsely_declared()),
    }


def _plain(traffic: Traffic) -> dict[str, Any]:
    return {key: value for key, value in vars(traffic).items() if key != "seconds"}


def rumours(peers: int, seed: int, loss: float, *, number: int, dying: int) -> dict[str, Any]:
    """Hints of new versions, one after the other; `dying` hosts vanish at once before the first."""
    sim = cluster("ours", peers, seed, loss)
    rng = random.Random(f"{seed}/authors")
    sim.run_for(WARM_UP)
    victims = set(rng.sample(range(peers), dying))
    for place in victims:
        sim.crash(place, host=True)
    authors = [place for place in range(peers) if place not in victims]
    meter = TrafficMeter(sim.network)
    spreads = [
        sim.spread_hint(rng.choice(authors), version=version, limit=10.0)
        for version in range(1, number + 1)
    ]
    return {
        "times": [[s.time_until(share) for share in (0.5, 0.99, 1.0)] for s in spreads],
        "bytes": meter.read().mean_bytes,
    }


def partition(peers: int, seed: int, loss: float, *, cut: float, limit: float) -> dict[str, Any]:
    """Two halves that can't reach each other for so long; how long until one view again."""
    sim = cluster("ours", peers, seed, loss)
    sim.run_for(WARM_UP)
    half = random.Random(f"{seed}/half").sample(sim.peers, peers // 2)
    rule = sim.network.partition(half, [peer for peer in sim.peers if peer not in set(half)])
    sim.run_for(cut)
    apart = sum(len(sim.machine(peer).responsive()) for peer in sim.peers)
    sim.network.lift(rule)
    healed = sim.network.now
    is_one = sim.run_until_converged(limit, every=0.25 if peers < 500 else 1.0)
    return {
        "apart": apart == (peers // 2) ** 2 + (peers - peers // 2) ** 2,
        "one view": sim.network.now - healed if is_one else None,
    }


def scale(peers: int, seed: int, loss: float, *, zones: int, seconds: float) -> dict[str, Any]:
    """Twenty crashes, half of them of hosts, in a cluster of many; what it costs to simulate."""
    began, cpu = time.perf_counter(), time.process_time()
    sim = cluster("ours", peers, seed, loss, zones)
    started = time.perf_counter() - began
    victims = random.Random(f"{seed}/victims").sample(range(peers), 20)
    for number, place in enumerate(victims):
        at = WARM_UP + number * (seconds / 2 - WARM_UP) / len(victims)
        sim.network.at(at, partial(sim.network.crash, sim.peers[place], host=number % 2 == 1))
    sim.run_for(seconds)
    detections = sim.record.detections()
    return {
        "real seconds": time.perf_counter() - began,
        "real seconds of starting": started,
        "cpu seconds": time.process_time() - cpu,
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "messages": sim.network.counters["sent"],
        "process": [d.everyone for d in detections if not d.of_host],
        "host": [d.everyone for d in detections if d.of_host],
        "false deaths": len(sim.record.falsely_declared()),
    }
