"""N peers with all their protocols in the simulator, and verbs on them.

A verb is started by its name and gets a number; `wait` runs the clock until it has ended.
Whatever a test does, `Cluster` notes each verb's end, and asserts that no verb ends twice or
later than its deadline and a small grace (G8).

It does for the nodes what a driver does: takes the digests of what is published, makes copies in
host memory (`copies`), which takes `copy_seconds`, and frees them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tensorhub_p2p.config import Config, SwimConfig
from tensorhub_p2p.errors import TensorHubError
from tensorhub_p2p.protocol.identity import Group, PeerId, PeerInfo, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import Question, Retain
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.protocol.pulls.serving import DigestsWanted, ShardServer
from tensorhub_p2p.protocol.shards.shard import ShardNode
from tensorhub_p2p.protocol.shards.verbs import (
    AdoptWanted,
    Answer,
    Done,
    Failed,
    KeepFreed,
    OffloadWanted,
)
from tensorhub_p2p.sim.network import Link, SimNetwork

LAYOUT = Layout([TensorSpec("w", "float32", (1024,), 4096)])
LATEST = Question("replicate", "latest")
TRAINER = Group("policy", "trainer")
ROLLOUT = Group("policy", "rollout")
GRACE = 0.1
"""Seconds that a verb may end after its deadline."""
QUICK = SwimConfig(
    probe_interval=0.3,
    probe_timeout=0.12,
    suspicion_multiplier=3,
    suspicion_max_multiplier=3,
    gossip_interval=0.1,
)
"""Deaths are noticed within a few seconds."""


def version(number: int) -> Question:
    return Question("replicate", str(number))


@dataclass
class Running:
    """One verb: who runs it, what it is, and how it ended."""

    number: int
    peer: int
    name: str
    slot: Slot | None
    began: float
    deadline: float
    ended: float | None = None
    end: Done | Failed | None = None

    @property
    def result(self) -> Any:
        """What it returned; raises what it raised."""
        assert self.end is not None, f"{self} is still under way"
        if isinstance(self.end, Failed):
            raise self.end.error
        return self.end.result

    @property
    def error(self) -> TensorHubError | None:
        assert self.end is not None, f"{self} is still under way"
        return self.end.error if isinstance(self.end, Failed) else None


@dataclass
class Cluster:
    seed: int = 0
    peers: int = 0
    loss: float = 0.0
    latency: tuple[float, float] = (0.0002, 0.002)
    config: Config = field(default_factory=lambda: Config(swim=QUICK))
    offload_limit: int = 0
    """Of each peer that is started from now on, in bytes; each shard takes 4096."""
    copy_seconds: float = 0.05

    def __post_init__(self) -> None:
        link = Link(self.latency, 0.0)
        self.net = SimNetwork(self.seed, link=link, on_event=self._on_event)
        self.nodes: list[Node] = []
        self.verbs: dict[int, Running] = {}
        self.events: list[tuple[float, int, Event]] = []
        self.on_end: dict[int, Callable[[Running], None]] = {}
        self.excused: set[int] = set()
        """Peers that were crashed or paused: their verbs' ends are not judged."""
        self.down: set[int] = set()
        self.copies: dict[tuple[int, Slot], Publication] = {}
        """By peer and keep: what lies in host memory."""
        self.spoilt: set[Publication] = set()
        """Publications whose tensors were written to: copies of them have other digests."""
        self.deviant: set[str] = set()
        """Replicas that publish bytes of their own; all others have the same of a version."""
        for _ in range(self.peers):
            self.start(meet=False)
        self.until(self._all_met)
        self.net.default_link = Link(self.latency, self.loss)

    def _all_met(self) -> bool:
        up = [n for i, n in enumerate(self.nodes) if i not in self.down]
        return all(len(node.directory.members) == len(up) for node in up)

    @property
    def now(self) -> float:
        return self.net.now

    # --- the cast ---

    def start(self, meet: bool = True) -> int:
        """A new peer, which joins through two that run; `meet` waits until all know it."""
        index = len(self.nodes)
        me = PeerId(f"{index:016x}")
        info = PeerInfo(me, f"p{index}", "zone", (f"h{index}:1",))
        rng = random.Random(f"{self.seed}/{index}")
        node = Node(info, self.config, rng, offload_limit=self.offload_limit)
        seeds = [n.info.addresses[0] for i, n in enumerate(self.nodes) if i not in self.down]
        self.nodes.append(node)
        self.net.add(me, info.addresses, node)
        node.join(self.now, seeds[:2] or list(info.addresses))
        self.net.settle(me)
        if meet:
            self.until(self._all_met)
        return index

    def crash(self, peer: int) -> None:
        self.excused.add(peer)
        self.down.add(peer)
        self.net.crash(self.nodes[peer].info.peer_id)

    def pause(self, peer: int) -> None:
        self.excused.add(peer)
        self.net.pause(self.nodes[peer].info.peer_id)

    def resume(self, peer: int) -> None:
        self.net.resume(self.nodes[peer].info.peer_id)

    def shard(self, peer: int, slot: Slot) -> ShardNode:
        return self.nodes[peer].shards[slot]

    def until(self, holds: Callable[[], bool], limit: float = 60.0) -> None:
        assert self.net.run_until(holds, limit), "it never came to that"

    def until_dead(self, peer: int, limit: float = 60.0) -> None:
        """Run until all others that run hold the peer for dead."""
        me = self.nodes[peer].info.peer_id
        others = [n for i, n in enumerate(self.nodes) if i not in self.down | {peer}]
        self.until(lambda: all(n.liveness.is_gone(me) for n in others), limit)

    # --- verbs ---

    def verb(self, peer: int, name: str, slot: Slot, *args: object, timeout: float = 10.0) -> int:
        """Start a verb of the node; returns its number."""
        number = len(self.verbs) + 1
        deadline = self.now + timeout
        self.verbs[number] = Running(number, peer, name, slot, self.now, deadline)
        node = self.nodes[peer]
        getattr(node, name)(self.now, number, deadline, slot, *args)
        self.net.settle(node.info.peer_id)
        return number

    def open(
        self,
        peer: int,
        slot: Slot,
        num_shards: int = 2,
        timeout: float = 10.0,
        spot: bool = False,
        retain: Retain | None = None,
    ) -> int:
        return self.verb(peer, "open", slot, num_shards, spot, retain, timeout=timeout)

    def publish(
        self, peer: int, slot: Slot, number: int, rewind: bool = False, timeout: float = 10.0
    ) -> int:
        return self.verb(peer, "publish", slot, number, rewind, LAYOUT, (), timeout=timeout)

    def unpublish(self, peer: int, slot: Slot, timeout: float = 10.0, force: bool = False) -> int:
        return self.verb(peer, "unpublish", slot, force, timeout=timeout)

    def ask(self, peer: int, slot: Slot, question: Question = LATEST, timeout: float = 10.0) -> int:
        return self.verb(peer, "ask", slot, question, timeout=timeout)

    def hold(
        self, peer: int, slot: Slot, answer: Answer, complete: bool = True, timeout: float = 10.0
    ) -> int:
        return self.verb(peer, "hold", slot, answer, LAYOUT, (), complete, timeout=timeout)

    def close(self, peer: int, slot: Slot, timeout: float = 10.0) -> int:
        return self.verb(peer, "close", slot, timeout=timeout)

    def retract(self, peer: int, version: int, timeout: float = 10.0) -> int:
        number = len(self.verbs) + 1
        deadline = self.now + timeout
        self.verbs[number] = Running(number, peer, "retract", None, self.now, deadline)
        node = self.nodes[peer]
        node.retract(self.now, number, deadline, "policy", version)
        self.net.settle(node.info.peer_id)
        return number

    def versions(self, peer: int, timeout: float = 10.0) -> int:
        number = len(self.verbs) + 1
        deadline = self.now + timeout
        self.verbs[number] = Running(number, peer, "versions", None, self.now, deadline)
        node = self.nodes[peer]
        node.versions(self.now, number, deadline, "policy")
        self.net.settle(node.info.peer_id)
        return number

    def leave_well(self, peer: int, timeout: float = 10.0) -> int:
        """It hands on what it keeps; its handles are closed by the caller, afterwards."""
        number = len(self.verbs) + 1
        deadline = self.now + timeout
        self.verbs[number] = Running(number, peer, "leave_well", None, self.now, deadline)
        node = self.nodes[peer]
        node.leave_well(self.now, number, deadline)
        self.net.settle(node.info.peer_id)
        return number

    def finish(self, peer: int, slot: Slot, answer: Answer) -> TensorHubError | None:
        node = self.nodes[peer]
        error = node.finish(self.now, slot, answer.call)
        self.net.settle(node.info.peer_id)
        return error

    def give_up(self, peer: int, slot: Slot, answer: Answer, reason: str = "no chunk") -> None:
        node = self.nodes[peer]
        node.give_up(self.now, slot, answer.call, reason)
        self.net.settle(node.info.peer_id)

    def wait(self, *numbers: int) -> list[Any]:
        """Run until they have ended, and return what they returned. Raises what one raised."""
        return [running.result for running in self.ends(*numbers)]

    def ends(self, *numbers: int) -> list[Running]:
        """Run until they have ended; whether they succeeded is for the caller to see."""
        verbs = [self.verbs[number] for number in numbers]
        latest = max((verb.deadline for verb in verbs), default=self.now)
        limit = latest - self.now + self.grace("unpublish")
        self.net.run_until(lambda: all(v.end is not None for v in verbs), max(0.0, limit))
        for verb in verbs:
            assert verb.end is not None, f"it hangs: {verb}"
        return verbs

    def errors(self, *numbers: int) -> list[TensorHubError | None]:
        return [running.error for running in self.ends(*numbers)]

    # --- whole groups ---

    def form(self, group: Group, peers: list[int], **options: Any) -> list[Slot]:
        """Open all shards of a replica, one on each of these peers."""
        slots = [Slot(group, shard) for shard in range(len(peers))]
        pairs = zip(peers, slots, strict=True)
        self.wait(*(self.open(p, s, len(peers), **options) for p, s in pairs))
        return slots

    def publish_all(self, group: Group, peers: list[int], number: int, **options: Any) -> list[Any]:
        return self.wait(
            *(self.publish(p, Slot(group, s), number, **options) for s, p in enumerate(peers))
        )

    def ask_all(
        self, group: Group, peers: list[int], question: Question = LATEST, timeout: float = 10.0
    ) -> list[Any]:
        return self.wait(
            *(self.ask(p, Slot(group, s), question, timeout) for s, p in enumerate(peers))
        )

    def replicate_all(self, group: Group, peers: list[int], question: Question = LATEST) -> Answer:
        """A successful call of a whole group; asserts that all got the same."""
        answers = self.ask_all(group, peers, question)
        assert len(set(answers)) == 1, answers
        self.wait(*(self.hold(p, Slot(group, s), answers[s]) for s, p in enumerate(peers)))
        for shard, peer in enumerate(peers):
            assert self.finish(peer, Slot(group, shard), answers[shard]) is None
        answer: Answer = answers[0]
        return answer

    # --- what is asserted in every test ---

    @staticmethod
    def grace(name: str) -> float:
        """An unpublish past the point of no return gives its readers one lease more."""
        return GRACE + (Config().pull.lease_seconds if name == "unpublish" else 0.0)

    def check_ends(self) -> None:
        """Every verb whose time is over has ended (G8)."""
        for verb in self.verbs.values():
            if verb.peer not in self.excused and verb.end is None:
                assert self.now <= verb.deadline + self.grace(verb.name), f"it hangs: {verb}"

    # --- what a driver does ---

    def _drive(self, peer: int, event: Event) -> None:
        if isinstance(event, (OffloadWanted, AdoptWanted)):
            self._later(peer, lambda: self._copy(peer, event.keep, event.publication))
        elif isinstance(event, KeepFreed):
            self._later(peer, lambda: self._free(peer, event.keep))
        elif isinstance(event, DigestsWanted):
            self._later(peer, lambda: self.digest(peer, event.slot))

    def _later(self, peer: int, then: Callable[[], None]) -> None:
        def act() -> None:
            if peer not in self.down:
                then()
                self.net.settle(self.nodes[peer].info.peer_id)

        self.net.at(self.now + self.copy_seconds, act)

    def _copy(self, peer: int, keep: Slot, publication: Publication) -> None:
        node = self.nodes[peer]
        source = next(iter(self._servers(publication, keep.shard)), None)
        if source is None:
            node.offload_failed(self.now, keep, "nobody has it")
            return
        digests = tuple(source.manifest[chunk] for chunk in range(source.layout.num_chunks))
        if publication in self.spoilt:
            digests = tuple(bytes(16) for _ in digests)
        self.copies[(peer, keep)] = publication
        node.offloaded(self.now, keep, source.layout, (), digests)

    def _servers(self, publication: Publication, shard: int) -> Iterator[ShardServer]:
        """Whole ones, of all peers that run."""
        for index, node in enumerate(self.nodes):
            if index not in self.down:
                parts = [part.server for part in node.shards.values()]
                for server in [*parts, *(keep.server for keep in node.keeps)]:
                    if server is None or not server.manifest.complete:
                        continue
                    if (server.publication, server.slot.shard) == (publication, shard):
                        yield server

    def _free(self, peer: int, keep: Slot) -> None:
        self.copies.pop((peer, keep), None)
        self.nodes[peer].freed(self.now, keep)

    def digest(self, peer: int, slot: Slot) -> None:
        """Take the digests of what is published there."""
        part = self.nodes[peer].shards.get(slot)
        server = part.server if part is not None else None
        if server is None:
            return
        publication, chunks = server.publication, range(server.layout.num_chunks)
        digests = [(c, self.digest_of(publication, slot.shard, c)) for c in chunks]
        self.nodes[peer].digested(self.now, slot, publication, digests)

    def digest_of(self, publication: Publication, shard: int, chunk: int) -> bytes:
        """What this chunk of the published tensors has."""
        whose = publication.replica if publication.replica in self.deviant else "everybody"
        what = f"{publication.order}/{whose}/{shard}/{chunk}"
        return hashlib.md5(what.encode()).digest()

    def _on_event(self, peer_id: PeerId, event: Event) -> None:
        peer = int(peer_id, 16)
        self.events.append((self.now, peer, event))
        self._drive(peer, event)
        if not isinstance(event, (Done, Failed)):
            return
        verb = self.verbs[event.verb]
        assert verb.end is None, f"{verb} ended again: {event}"
        assert verb.peer == peer
        if peer not in self.excused:
            assert self.now <= verb.deadline + self.grace(verb.name), f"{verb} ended too late"
        verb.ended, verb.end = self.now, event
        if verb.name == "publish" and verb.slot is not None and isinstance(event, Done):
            slot = verb.slot
            self._later(peer, lambda: self.digest(peer, slot))
        then = self.on_end.pop(event.verb, None)
        if then is not None:
            then(verb)
