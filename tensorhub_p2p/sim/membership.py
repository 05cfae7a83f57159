"""A cluster of membership machines on the simulated network.

Rules of this file. It makes peers, starts them and keeps the list of who lives where; what
they do is recorded by record.py, judged by checks.py. It calls only what a driver may call,
and asks only public questions.

Theory of operation. Peers live on `peers` computers; computer p is in zone p mod `zones`,
and `peers[p]` is who lives, or lived last, there. They start in one of two ways:

    converged   all know all of their zone from the start (`adopt_views`, sharing the views):
                for ten thousand peers. All know all zones' summaries; gateways call each other.
    otherwise   each joins through the first computers of its zone, and of another one

The machine is plain `Swim` if there is one zone, else `Zones`; a caller may bring another.
A cluster is a `Stage` for faults.

`MEMBERLIST` is memberlist's behaviour, as far as our machine can show it: its LAN defaults,
no evidence from sockets, and nothing that memberlist doesn't have (comparing of
fingerprints, own-pause guard, self-doubt, re-dialling).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

from tensorhub_p2p.config import Config, SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Machine
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged, NewerVersion
from tensorhub_p2p.protocol.messages import Status, ZoneSummary
from tensorhub_p2p.protocol.zones.gateways import Candidate, choose
from tensorhub_p2p.protocol.zones.zones import Zones
from tensorhub_p2p.sim.collector import at_rest
from tensorhub_p2p.sim.host import Host
from tensorhub_p2p.sim.link import Link, LogNormal
from tensorhub_p2p.sim.network import SimNetwork
from tensorhub_p2p.sim.record import Record, Spread, Traffic, TrafficMeter
from tensorhub_p2p.sim.sockets import SocketModel

NEVER = 1e9
"""Seconds: so long that it doesn't happen."""

MEMBERLIST = SwimConfig(
    probe_interval=1.0,
    probe_timeout=0.5,
    indirect_probes=3,
    suspicion_multiplier=4.0,
    suspicion_max_multiplier=6.0,
    suspicion_confirmations=2,
    gossip_interval=0.2,
    gossip_nodes=3,
    retransmit_multiplier=4,
    push_pull_interval=30.0,
    max_rumour_bytes=1200,
    gossip_to_dead_for=30.0,
    max_local_health=8,
    mismatch_interval=NEVER,
    pause_after=NEVER,
    doubt_limit=1e-9,
    redial_interval=NEVER,
)
"""memberlist's `DefaultLANConfig`; K = suspicion multiplier - 2. To be run without sockets."""

LAN = Link(latency=(0.0002, 0.002))
WAN = Link(latency=LogNormal(0.04, 0.15, longest=0.5))
"""Between zones: 80 ms there and back."""
SEEDS = 2
"""Computers of each zone through which the others join."""
ZONE_NAMES = "zone-{}"


class Membership(Machine, Protocol):
    """What a machine must offer to be simulated here: `Swim` and `Zones` do."""

    def join(self, now: float, seeds: Sequence[str]) -> None: ...
    def leave(self, now: float) -> None: ...
    def adopt_views(
        self, now: float, views: Sequence[MemberView], summaries: Iterable[ZoneSummary] = ()
    ) -> None: ...
    def members(self) -> tuple[MemberView, ...]: ...
    def responsive(self) -> tuple[PeerId, ...]: ...
    def status(self, peer: PeerId) -> Status | None: ...
    def is_reachable(self, peer: PeerId) -> bool: ...
    def hint(self, now: float, model: str, epoch: int, version: int) -> None: ...


Factory = Callable[[PeerInfo, Config, random.Random], Membership]


def plain_swim(info: PeerInfo, config: Config, rng: random.Random) -> Membership:
    """The membership of a single zone."""
    return Swim(info, config.swim, rng)


def zoned(info: PeerInfo, config: Config, rng: random.Random) -> Membership:
    """The membership of one of several zones."""
    return Zones(info, config, rng)


class MembershipSim:
    """Many peers, one clock. Times are virtual seconds, starting at 0."""

    def __init__(
        self,
        peers: int,
        *,
        zones: int = 1,
        seed: int = 0,
        config: Config | SwimConfig | None = None,
        sockets: SocketModel | bool = True,
        link: Link = LAN,
        between_zones: Link = WAN,
        converged: bool = True,
        machine: Factory | None = None,
    ) -> None:
        self.seed = seed
        self.config = Config(swim=config) if isinstance(config, SwimConfig) else config or Config()
        self.network = SimNetwork(seed, link=link, on_event=self._on_event, sockets=sockets)
        self.network.link_table.between_zones = between_zones
        self.record = Record(self.network, self._knows)
        self.network.on_change = self.record.on_change
        self.listeners: list[Callable[[PeerId, Event], None]] = []
        """Called with each event of each peer, besides the record."""
        self.peers: list[PeerId] = []
        self.zones = tuple(ZONE_NAMES.format(number) for number in range(zones))
        self.infos: dict[PeerId, PeerInfo] = {}
        """Of everyone there ever was."""
        self._make = machine or (plain_swim if zones == 1 else zoned)
        self._rng = random.Random(f"{seed}/peers")
        self._started = 0
        infos = [self._new_info(place) for place in range(peers)]
        self.peers = [info.peer_id for info in infos]
        if converged:
            with at_rest(peers):
                self._start_converged(infos)
        else:
            for place, info in enumerate(infos):
                self.network.at(0.01 * place, self._starter(place, info))

    # -- the cast --

    def machine(self, peer: PeerId) -> Membership:
        """The machine of a peer, also of one that is gone."""
        return cast(Membership, self.network.host(peer).machine)

    def zone(self, peer: PeerId) -> str:
        return self.infos[peer].zone

    def running(self, zone: str | None = None) -> list[PeerId]:
        """Who runs, in this zone or in all."""
        peers = self.network.running()
        return [peer for peer in peers if zone is None or self.infos[peer].zone == zone]

    def _new_info(self, place: int) -> PeerInfo:
        peer = PeerId(f"{self._rng.getrandbits(64):016x}")
        zone = self.zones[place % len(self.zones)]
        info = PeerInfo(peer, f"peer-{place}", zone, (f"host-{place}:7946",))
        self.infos[peer] = info
        return info

    def _new_machine(self, info: PeerInfo) -> Membership:
        self._started += 1
        return self._make(info, self.config, random.Random(f"{self.seed}/{self._started}"))

    def _start_converged(self, infos: Sequence[PeerInfo]) -> None:
        views = {
            zone: [MemberView(i, 0, Status.ALIVE, 0.0) for i in infos if i.zone == zone]
            for zone in self.zones
        }
        summaries = [self._summary(zone, views[zone]) for zone in self.zones]
        for info in infos:
            machine = self._new_machine(info)
            if len(self.zones) > 1:
                machine.adopt_views(0.0, views[info.zone], summaries)
            else:
                machine.adopt_views(0.0, views[info.zone])
            self.network.add(info.peer_id, info.addresses, machine, info.zone)

    def _summary(self, zone: str, views: Sequence[MemberView]) -> ZoneSummary:
        """What a zone of these members says of itself: gateways call each other by it."""
        line = [Candidate(view.peer_id, -math.inf) for view in views]
        named = choose(zone, line, 0.0, self.config.zones.named)
        return ZoneSummary(zone, 1, tuple(self.infos[peer] for peer in named), len(views))

    def _starter(self, place: int, info: PeerInfo) -> Callable[[], None]:
        def start() -> None:
            machine = self._new_machine(info)
            machine.join(self.network.now, self._seeds_for(place))
            self.network.add(info.peer_id, info.addresses, machine, info.zone)

        return start

    def _seeds_for(self, place: int) -> list[str]:
        """The first computers of the own zone, and one of the first zone."""
        zones = len(self.zones)
        own = [p for p in range(len(self.peers)) if p % zones == place % zones][:SEEDS]
        return [f"host-{p}:7946" for p in dict.fromkeys((*own, 0))]

    def restart_anew(self, place: int) -> None:
        """A new peer starts where the last one is gone, and joins through the same seeds."""
        info = self._new_info(place)

        def follow(_: Host) -> tuple[PeerId, Membership]:
            machine = self._new_machine(info)
            machine.join(self.network.now, self._seeds_for(place))
            return info.peer_id, machine

        before, self.peers[place] = self.peers[place], info.peer_id
        self.network.restart_anew(before, follow)

    def crash(self, place: int, *, host: bool = False) -> PeerId:
        """The peer at this place is gone; returns who it was."""
        peer = self.peers[place]
        self.network.crash(peer, host=host)
        return peer

    def leave(self, place: int, *, linger: float = 0.5) -> PeerId:
        """The peer at this place says goodbye, and its process ends `linger` seconds later."""
        peer = self.peers[place]
        self.machine(peer).leave(self.network.now)
        self.network.settle(peer)
        self.network.at(self.network.now + linger, lambda: self.network.crash(peer))
        return peer

    # -- the clock --

    def run_for(self, seconds: float) -> None:
        self.network.run_for(seconds)

    def converged(self) -> bool:
        """Whether all that run hold exactly those of their zone that run for members, alive."""
        expected = {zone: tuple(sorted(self.running(zone))) for zone in self.zones}
        return all(
            (machine := self.machine(peer)).responsive() == expected[self.infos[peer].zone]
            and sum(view.is_reachable for view in machine.members())
            == len(expected[self.infos[peer].zone])
            for peer in self.network.running()
        )

    def run_until_converged(self, limit: float, *, every: float = 0.5) -> bool:
        return self.network.run_until(self.converged, limit, every=every)

    # -- measures --

    def traffic(self, seconds: float, peers: Iterable[PeerId] | None = None) -> Traffic:
        """Run for so long, and tell what each of those that run then sent."""
        meter = TrafficMeter(self.network)
        self.run_for(seconds)
        return meter.read(peers)

    def spread_hint(self, place: int, *, limit: float = 30.0, version: int = 1) -> Spread:
        """One peer tells of a new version; run until all of its zone that run heard of it."""
        peer = self.peers[place]
        spread = self.record.follow(self._others(peer), lambda e: isinstance(e, NewerVersion))
        self.machine(peer).hint(self.network.now, "rumour", 0, version)
        self.network.settle(peer)
        return self._run_spread(spread, limit)

    def spread_goodbye(self, place: int, *, limit: float = 30.0) -> Spread:
        """One peer leaves; run until all of its zone that run heard of it."""
        peer = self.peers[place]

        def is_it(event: Event) -> bool:
            if not isinstance(event, MemberChanged) or event.member.peer_id != peer:
                return False
            return event.member.status is Status.LEFT

        spread = self.record.follow(self._others(peer), is_it)
        self.leave(place)
        return self._run_spread(spread, limit)

    def _run_spread(self, spread: Spread, limit: float) -> Spread:
        self.network.run_until(lambda: spread.complete, limit, every=0.05)
        self.record.unfollow(spread)
        return spread

    def _others(self, peer: PeerId) -> list[PeerId]:
        return [p for p in self.running(self.infos[peer].zone) if p != peer]

    # -- listening --

    def _knows(self, host: Host, peer: PeerId) -> bool:
        return self.machine(host.peer_id).is_reachable(peer)

    def _on_event(self, peer: PeerId, event: Event) -> None:
        self.record.on_event(peer, event)
        for listener in self.listeners:
            listener(peer, event)
