"""A few zones on one simulated network: near inside a zone, far and lossy between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from tensorhub_p2p.config import Config
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.members import GONE
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged
from tensorhub_p2p.protocol.messages import ZoneSummary
from tensorhub_p2p.protocol.zones.zones import Zones
from tensorhub_p2p.sim import weather
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.network import SimNetwork

FAR = Link(latency=(0.06, 0.15), loss=0.01)
"""Between two zones."""
TOGETHER = 90
"""Seconds within which those who lost each other, by whatever, are surely together again."""


class ZonesCluster:
    """Peers named zone-number, each at its own address, and what each has noticed."""

    def __init__(self, seed: int = 0, *, sockets: bool = True) -> None:
        self.seed = seed
        self.network = SimNetwork(seed, on_event=self._note, sockets=sockets)
        self.network.link_table.between_zones = FAR
        self.machines: dict[PeerId, Zones] = {}
        self.events: list[tuple[float, PeerId, Event]] = []
        self._started = 0

    def _note(self, peer: PeerId, event: Event) -> None:
        self.events.append((self.network.now, peer, event))

    # -- the cast --

    def start(
        self,
        zone: str,
        *,
        seeds: Sequence[str] = ("east-0:1",),
        address: str = "",
        config: Config | None = None,
    ) -> PeerId:
        number = sum(1 for machine in self.machines.values() if machine.zone == zone)
        number += sum(1 for p in self.gone if p.startswith(f"{zone}-"))
        peer = PeerId(f"{zone}-{number}")
        addresses = (address or f"{peer}:1",)
        info = PeerInfo(peer, peer, zone, addresses)
        rng = random.Random(f"{self.seed}/{peer}")
        self.machines[peer] = machine = Zones(info, config or Config(), rng)
        machine.join(self.network.now, seeds)
        self.network.add(peer, addresses, machine, zone)
        return peer

    def start_zones(self, **sizes: int) -> None:
        """Start so many peers a zone, and run until all have settled.

        All join through the first peer of the first zone.
        """
        first = f"{next(iter(sizes))}-0:1"
        for zone, size in sizes.items():
            for _ in range(size):
                self.start(zone, seeds=(first,))
        self.network.run_for(20)
        assert self.until(self.is_whole), self.describe()

    @property
    def gone(self) -> list[PeerId]:
        return [host.peer_id for host in self.network.hosts() if host.is_gone]

    def crash(self, *peers: PeerId) -> None:
        for peer in peers:
            self.network.crash(peer)
            del self.machines[peer]

    def cut_off(self, *zones: str) -> None:
        """Nothing gets into these zones, or out of them."""
        inside = weather.zones(zones)
        self.network.partition(inside, weather.all_but(inside))

    def until(self, holds: Callable[[], bool], limit: float = TOGETHER) -> bool:
        return self.network.run_until(holds, limit, every=0.25)

    # -- what is so --

    @property
    def zones(self) -> list[str]:
        return sorted({machine.zone for machine in self.machines.values()})

    def of(self, zone: str) -> list[PeerId]:
        return [peer for peer, machine in self.machines.items() if machine.zone == zone]

    def gateways(self, zone: str) -> set[PeerId]:
        """Who is in the pool of gateways."""
        return {peer for peer in self.of(zone) if self.machines[peer].is_gateway}

    def knows(self, peer: PeerId) -> dict[str, ZoneSummary]:
        return {summary.zone: summary for summary in self.machines[peer].zones()}

    def homes_agree(self) -> bool:
        """Everyone has exactly the running peers of its zone for members."""
        running = {zone: tuple(sorted(self.of(zone))) for zone in self.zones}
        return all(m.responsive() == running[m.zone] for m in self.machines.values())

    def summaries_agree(self) -> bool:
        """Everyone knows every zone, by a summary whose gateways are the zone's."""
        for machine in self.machines.values():
            known = {summary.zone: summary for summary in machine.zones()}
            if set(known) != set(self.zones):
                return False
            for zone, summary in known.items():
                first = [gateway.peer_id for gateway in summary.gateways[:2]]
                if set(first) != self.gateways(zone):
                    return False
        return True

    def gateways_agree(self) -> bool:
        """Two gateways a zone (one, if that is all), who all know each other."""
        everyone = {peer for zone in self.zones for peer in self.gateways(zone)}
        counts = all(len(self.gateways(z)) == min(2, len(self.of(z))) for z in self.zones)
        return counts and all(self.wide(peer) == everyone for peer in everyone)

    def wide(self, peer: PeerId) -> set[PeerId]:
        """Whom a gateway holds for reachable in the pool of gateways, itself included."""
        pool = self.machines[peer].wide
        assert pool is not None
        return {peer, *(view.peer_id for view in pool.members() if view.is_reachable)}

    def is_whole(self) -> bool:
        return self.homes_agree() and self.gateways_agree() and self.summaries_agree()

    def deaths(self, since: float = 0.0) -> set[PeerId]:
        """Whom anybody of its zone held for dead or left."""
        return {
            event.member.peer_id
            for at, _, event in self.events
            if at >= since and isinstance(event, MemberChanged) and event.member.status in GONE
        }

    def describe(self) -> str:
        lines = [f"at {self.network.now:.1f} s"]
        for peer, machine in self.machines.items():
            wide = sorted(self.wide(peer)) if machine.is_gateway else None
            known = {s.zone: (s.counter, [g.peer_id for g in s.gateways]) for s in machine.zones()}
            lines.append(f"{peer}: home {machine.responsive()} wide {wide} knows {known}")
        return "\n".join(lines)


def addresses(peers: Iterable[PeerId]) -> tuple[str, ...]:
    return tuple(f"{peer}:1" for peer in peers)
