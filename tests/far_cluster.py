"""Nodes in several zones: a `Cluster` whose peers are near inside a zone and far between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster import Cluster, Running

from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.messages import Key, Message, ZoneSummary
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.sim import weather
from tensorhub_p2p.sim.network import Link

FAR = Link((0.08, 0.08))
"""80 ms each way."""
NEWS = 5.0
"""Seconds within which another zone surely knows of a version that is whole."""


@dataclass
class FarCluster(Cluster):
    sizes: dict[str, int] = field(default_factory=dict)
    """How many peers each zone has, at first."""
    far: Link = FAR

    def __post_init__(self) -> None:
        self.where: list[str] = []
        """The zone of each peer, by number."""
        super().__post_init__()
        self.net.link_table.between_zones = self.far
        for zone, size in self.sizes.items():
            for _ in range(size):
                self.start_in(zone)
        self.net.run_for(20)
        self.until(self.is_whole)

    def start_in(self, zone: str) -> int:
        """A new peer of this zone; it joins through one that runs there, and the first of all."""
        index = len(self.nodes)
        running = [i for i in range(index) if i not in self.down]
        seeds = [*self.of(zone)[-1:], *running[:1]]
        me = PeerId(f"{index:016x}")
        info = PeerInfo(me, f"p{index}", zone, (f"h{index}:1",))
        rng = random.Random(f"{self.seed}/{index}")
        node = Node(info, self.config, rng, offload_limit=self.offload_limit)
        self.nodes.append(node)
        self.where.append(zone)
        self.net.add(me, info.addresses, node, zone)
        addresses = [self.nodes[i].info.addresses[0] for i in seeds]
        node.join(self.now, addresses or list(info.addresses))
        self.net.settle(me)
        return index

    # --- who is where ---

    def of(self, zone: str) -> list[int]:
        """Its peers that run."""
        return [i for i, z in enumerate(self.where) if z == zone and i not in self.down]

    def id(self, peer: int) -> PeerId:
        return self.nodes[peer].info.peer_id

    def gateways(self, zone: str) -> list[int]:
        return [i for i in self.of(zone) if self.nodes[i].zones.is_gateway]

    def plain(self, zone: str) -> list[int]:
        """Its peers that are no gateways."""
        return [i for i in self.of(zone) if not self.nodes[i].zones.is_gateway]

    def summary(self, peer: int, zone: str) -> ZoneSummary | None:
        known = self.nodes[peer].zones.zones()
        return next((summary for summary in known if summary.zone == zone), None)

    def is_whole(self) -> bool:
        """Everyone knows its zone's members, and every zone by its present gateways."""
        for peer in (i for zone in set(self.where) for i in self.of(zone)):
            if len(self.nodes[peer].directory.members) != len(self.of(self.where[peer])):
                return False
            for zone in set(self.where):
                known = self.summary(peer, zone)
                named = {g.peer_id for g in known.gateways[:2]} if known is not None else set()
                if named != {self.id(i) for i in self.gateways(zone)}:
                    return False
        return True

    def cut(self, one: str, other: str) -> None:
        self.net.partition(weather.zones([one]), weather.zones([other]))

    def knows_of(self, peer: int, zone: str, version: int) -> bool:
        """Whether that zone's summary, as this peer has it, names the version."""
        known = self.summary(peer, zone)
        return known is not None and any(hint.version == version for hint in known.newest)

    def until_known(self, peer: int, zone: str, version: int) -> None:
        self.until(lambda: self.knows_of(peer, zone, version), 30)

    # --- what happens ---

    def list_versions(self, peer: int, model: str, timeout: float = 10.0) -> int:
        """Begin to ask which versions exist."""
        number = len(self.verbs) + 1
        deadline = self.now + timeout
        self.verbs[number] = Running(number, peer, "versions", None, self.now, deadline)
        self.nodes[peer].versions(self.now, number, deadline, model)
        self.net.settle(self.id(peer))
        return number

    def took(self, number: int) -> float:
        """Seconds that a verb took; it succeeded."""
        (running,) = self.ends(number)
        assert running.error is None, running.error
        return lasted(running)

    def held(self, zone: str, key: Key) -> Registers:
        """What the owners of the key in this zone hold, withdrawn registers left out."""
        asker = self.nodes[next(i for i in self.of(zone) if i not in self.excused)]
        found: list[Registers] = []
        asker.records.read(self.now, key, lambda _now, registers: found.append(registers))
        self.net.settle(asker.info.peer_id)
        self.until(lambda: bool(found))
        return found[0]

    def tell(self, peer: int, sender: PeerId, message: Message) -> None:
        """Hand the peer a message as if `sender` had sent it."""
        self.nodes[peer].receive(self.now, sender, message)
        self.net.settle(self.id(peer))

    def eventually(self, holds: Callable[[], bool], limit: float = 30.0) -> None:
        self.until(holds, limit)


def lasted(running: Running) -> float:
    assert running.ended is not None
    return running.ended - running.began
