"""1,000 replicas publish in the same second: who carries how much, and when all of it is visible.

    python benchmarks/publish_storm.py [--replicas 1000] [--shards 8] [--peers 1000] [--seed 1]

In the simulator. Every peer is its directory, its handles' references and nothing else: all know
the same members, none dies, and membership's own messages, which load all alike, are left out
(with them the busiest peer would be nearer to the mean). The shards of a replica are on
different peers.

First version 1 is published at a slow pace, in which the keys grow their buckets (buckets.py), and
given up again. Then all publish version 2, at random moments of one second. Counted is what each
peer receives from the first publish until two seconds later, its own part of a request left
out. Afterwards some peers read the model's key: what they see is what is visible then. Results are
saved in benchmarks/results/publish_storm.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import machine
from figures import save

from tensorhub_p2p.config import DirectoryConfig, GroupConfig
from tensorhub_p2p.protocol.directory.admission import admit
from tensorhub_p2p.protocol.directory.directory import Directory
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.directory.records import Registers, holders_key, versions_key
from tensorhub_p2p.protocol.groups.selection import holdings
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import Message, Phase
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held
from tensorhub_p2p.protocol.shards.publishing import Announced, References
from tensorhub_p2p.sim.network import Link, SimNetwork

MODEL = "policy"
KEY = versions_key(MODEL)
GENERATION = Generation(1, 1)
LATENCY = (0.0001, 0.0005)
"""One way, in seconds, inside a datacenter."""
SETTLE = 5.0
WINDOW = 2.0
READERS = 100
BUSIEST = 5.0
"""What the busiest peer may receive, in means."""


class Everybody:
    """Membership: nobody has died, and all are here."""

    home = "here"

    def zone(self, _peer: PeerId) -> str:
        return self.home

    def is_gone(self, _peer: PeerId, _zone: str = "") -> bool:
        return False

    def is_responsive(self, _peer: PeerId) -> bool:
        return True

    def name(self, peer: PeerId) -> str:
        return f"peer {peer}"


class Publisher:
    """One peer: a directory, and the references of some handles."""

    def __init__(self, me: PeerId, seed: int, config: DirectoryConfig) -> None:
        self.me = me
        self.outbox = Outbox()
        self.directory = Directory(me, config, random.Random(f"{seed}/{me}"), admit)
        self.records = PendingRecords(self.directory, config.max_buckets)
        self.references: list[References] = []
        self.announced = 0
        self._custody = Custody(me, self.records, Everybody())  # type: ignore[arg-type]

    def open(self, slot: Slot) -> References:
        references = References(slot, GroupConfig(), self._custody)
        references.generation = GENERATION
        self.references.append(references)
        return references

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self.directory.receive(now, sender, message)
        self._settle(now)

    def tick(self, now: float) -> None:
        self.directory.tick(now)
        for references in self.references:
            references.tick(now)
        self._settle(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            self.directory.next_wakeup(), *(each.next_wakeup() for each in self.references)
        )

    def settle(self, now: float) -> None:
        """Something was asked of it from outside."""
        self._settle(now)

    def _settle(self, now: float) -> None:
        while items := self.directory.outbox.drain():
            for item in items:
                if not self.records.take(now, item):
                    self.outbox.items.append(item)
        for references in self.references:
            for event in references.outbox.drain():
                self.announced += isinstance(event, Announced)


class Storm:
    """The peers, and what they do."""

    def __init__(self, replicas: int, shards: int, peers: int, seed: int) -> None:
        self.shards = shards
        self.rng = random.Random(f"storm/{seed}")
        config = DirectoryConfig()
        self.net = SimNetwork(seed, link=Link(LATENCY, 0.0))
        ids = [PeerId(f"{number:016x}") for number in range(peers)]
        self.peers = [Publisher(me, seed, config) for me in ids]
        for peer in self.peers:
            peer.directory.members_changed(0.0, ids)
            peer.directory.outbox.drain()
            self.net.add(peer.me, [f"{peer.me}:1"], peer)
        self.handles: list[tuple[Publisher, References]] = []
        for replica in range(replicas):
            for shard in range(shards):
                peer = self.peers[(replica + shard * (peers // shards)) % peers]
                slot = Slot(Group(MODEL, f"trainer-{replica}"), shard)
                self.handles.append((peer, peer.open(slot)))

    def publish(self, version: int, seconds: float) -> None:
        """Every handle, at some moment of these seconds."""
        for peer, references in self.handles:
            self._at(seconds, peer, lambda now, r=references: self._publish(now, r, version))

    def give_up(self, seconds: float) -> None:
        for peer, references in self.handles:
            self._at(seconds, peer, lambda now, r=references: r.drop(now))

    def _at(self, seconds: float, peer: Publisher, then: Any) -> None:
        def act() -> None:
            then(self.net.now)
            peer.settle(self.net.now)
            self.net.settle(peer.me)

        self.net.at(self.net.now + self.rng.random() * seconds, act)

    def _publish(self, now: float, references: References, version: int) -> None:
        replica = references.slot.group.replica
        what = Publication(0, version, replica, GENERATION)
        references.publish(now, Held(what, self.shards, 1 << 30, Phase.READY, False))

    def received(self) -> dict[str, int]:
        return {host.peer_id: host.received for host in self.net.hosts()}

    def buckets(self) -> dict[str, int]:
        keys = {"versions": KEY, "holders 0": holders_key(MODEL, 0)}
        return {
            name: max(peer.records.buckets(key) for peer in self.peers)
            for name, key in keys.items()
        }

    def see(self, version: int) -> list[int]:
        """How many replicas are whole in this version, as each of some readers sees it."""
        seen: list[int] = []

        def then(_now: float, registers: Registers) -> None:
            found = holdings(registers, lambda _peer: False)
            whole = [p for p, h in found.items() if h.whole and h.covered]
            seen.append(sum(p.version == version for p in whole))

        readers = self.rng.sample(self.peers, min(READERS, len(self.peers)))
        for peer in readers:
            peer.records.read(self.net.now, KEY, then)
            peer.settle(self.net.now)
            self.net.settle(peer.me)
            self.net.run_for(0.02)
        self.net.run_for(1.0)
        return seen


def run(replicas: int, shards: int, peers: int, seed: int, slow: float) -> dict[str, Any]:
    began = time.monotonic()
    storm = Storm(replicas, shards, peers, seed)
    storm.publish(1, slow)
    storm.net.run_for(slow + SETTLE)
    storm.give_up(1.0)
    storm.net.run_for(1.0 + SETTLE)
    buckets = storm.buckets()
    before, announced = storm.received(), sum(peer.announced for peer in storm.peers)
    storm.publish(2, 1.0)
    storm.net.run_for(WINDOW)
    counts = [count - before[peer] for peer, count in storm.received().items()]
    announced = sum(peer.announced for peer in storm.peers) - announced
    seen = storm.see(2)
    mean = sum(counts) / len(counts)
    carried = [
        sum(
            len(held.cells)
            for key, held in peer.directory._owner._held.items()
            if key.kind == "versions"
        )
        for peer in storm.peers
    ]
    return {
        "replicas": replicas,
        "shards": shards,
        "peers": peers,
        "seed": seed,
        "buckets": buckets,
        "announced": announced,
        "messages_a_publish": round(sum(counts) / (replicas * shards), 1),
        "mean": round(mean, 1),
        "busiest": max(counts),
        "busiest_in_means": round(max(counts) / mean, 2),
        "most_registers_at_one_owner": max(carried),
        "readers": len(seen),
        "least_seen_whole": min(seen, default=0),
        "met": max(counts) <= BUSIEST * mean and min(seen, default=0) == replicas,
        "real_seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slow", type=float, default=60.0, help="seconds for version 1")
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    args = parser.parse_args()
    facts = machine.facts()
    result = run(args.replicas, args.shards, args.peers, args.seed, args.slow)
    for name, value in result.items():
        print(f"{name:>30}  {value}")
    if not args.dry:
        save("publish_storm", facts, {"publish_storm": result})


if __name__ == "__main__":
    main()
