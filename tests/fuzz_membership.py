"""Fuzzes membership: what a live cluster says, mangled, is said to it as well.

    python tests/fuzz_membership.py --seconds 60 --seed 1 [--machine swim|zones]

Some peers talk on a virtual network; every message is bytes. Copies of those are cut, flipped,
spliced, relabelled, restructured, forged under other senders, and delivered by the thousand.
Meanwhile no machine may raise, believe its own death, go back on a rank, want to be called
in the past, say what can't be sent, or grow (what it refers to is weighed). When the mangling
ends, everybody must hold everybody for alive again.

The seed decides everything: a failure names the one to run again.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from tensorhub_p2p.config import Config, SwimConfig, ZonesConfig
from tensorhub_p2p.protocol.envelope import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Envelope,
    Undecodable,
    encode,
    open_envelope,
    pack,
    unpack,
)
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.membership.members import Rank
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Message, Status
from tensorhub_p2p.protocol.zones.zones import Zones

PEERS = 5
MANGLED_SECONDS = 30.0
"""Virtual; then it is quiet."""
QUIET_SECONDS = 240.0
MANGLED_PER_SECOND = 40
LATENCY = 0.005
MAX_TICKS = 3
"""What one part of a machine decides may be due in another at once, but there is an end."""
MAX_WEIGHT = 5_000
"""Entries of all tables of one machine, with the small bounds below."""

SMALL = SwimConfig(
    max_members=40,
    max_zones=20,
    max_hinted_models=20,
    max_relayed_probes=20,
    forget_dead_after=60.0,
    redial_interval=2.0,
    push_pull_interval=5.0,
    unresponsive_limit=20.0,
)
KINDS = (
    "Ping",
    "PingRequest",
    "Ack",
    "Nack",
    "Gossip",
    "ViewDigest",
    "PushPull",
    "PushPullReply",
    "WideArea",
    "ZoneGreeting",
    "DirectoryWritten",
    "NoSuchKind",
)
NUMBERS = (0, 1, 2, 3, 4, 5, 63, 64, 65, 1000, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -1)
STRINGS = ("", "here", "there", "x", "host-0:1", "nowhere:1", "é\u2028", "y" * 300)


def weight(machine: object) -> int:
    """Entries of all tables that it refers to, and theirs; long names count by their length."""
    seen: set[int] = set()

    def walk(thing: object) -> Iterator[int]:
        if isinstance(thing, (str, bytes)):
            yield len(thing) // 100
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type)):
            return
        seen.add(id(thing))
        if isinstance(thing, (list, tuple, set, frozenset, dict)):
            yield len(thing)
            for each in thing:
                yield from walk(each)
            if isinstance(thing, dict):
                for each in thing.values():
                    yield from walk(each)
        elif type(thing).__module__.startswith("tensorhub_p2p"):
            yield from walk(getattr(thing, "__dict__", {}))
            for name in getattr(type(thing), "__slots__", ()):
                yield from walk(getattr(thing, name, None))

    return sum(walk(machine))


@dataclass(frozen=True)
class Letter:
    """What travels, as the wire has it."""

    sender: PeerId
    to: PeerId
    kind: str
    body: bytes


# -- mangling --


class Mangler:
    """Makes bad letters out of good ones."""

    def __init__(self, rng: random.Random, peers: list[PeerId]) -> None:
        self._rng = rng
        self._peers = peers
        self._good: deque[Letter] = deque(maxlen=300)

    def overhear(self, letter: Letter) -> None:
        self._good.append(letter)

    def mangle(self) -> Letter | None:
        """One letter, to one of the peers; None while nothing was overheard."""
        if not self._good:
            return None
        rng = self._rng
        letter = rng.choice(self._good)
        body, kind, sender = letter.body, letter.kind, letter.sender
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            body = rng.choice(
                (self._flip, self._cut, self._splice, self._restructure, self._rename)
            )(body)
        if rng.random() < 0.1:
            kind = rng.choice(KINDS)
        if rng.random() < 0.3:
            stranger = PeerId(f"stranger-{rng.randrange(1000)}")
            sender = rng.choice((*self._peers, stranger, NOBODY))
        return Letter(sender, rng.choice(self._peers), kind, body)

    def _flip(self, body: bytes) -> bytes:
        mangled = bytearray(body)
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            if mangled:
                mangled[self._rng.randrange(len(mangled))] ^= 1 << self._rng.randrange(8)
        return bytes(mangled)

    def _cut(self, body: bytes) -> bytes:
        start, end = sorted(self._rng.randrange(len(body) + 1) for _ in range(2))
        return self._rng.choice((body[:start], body[start:], body[:start] + body[end:]))

    def _splice(self, body: bytes) -> bytes:
        other = self._rng.choice(self._good).body
        at, start = self._rng.randrange(len(body) + 1), self._rng.randrange(len(other) + 1)
        end = start + self._rng.randrange(100)
        return body[:at] + other[start:end] + body[at + self._rng.choice((0, end - start)) :]

    def _restructure(self, body: bytes) -> bytes:
        """Bytes that are well-formed, but say something else."""
        try:
            tree = msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body
        return msgspec.msgpack.encode(self._change(tree))

    def _rename(self, body: bytes) -> bytes:
        """The same of somebody else, who may not exist."""
        old = self._rng.choice(self._peers).encode()
        new = self._rng.choice((*self._peers, f"ghost{self._rng.randrange(1000)}")).encode()
        if len(old) == len(new):
            return body.replace(old, new)
        try:
            tree = msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body
        return msgspec.msgpack.encode(self._renamed(tree, old.decode(), new.decode()))

    def _renamed(self, tree: Any, old: str, new: str) -> Any:
        if isinstance(tree, list):
            return [self._renamed(each, old, new) for each in tree]
        return new if tree == old else tree

    def _change(self, tree: Any) -> Any:
        rng = self._rng
        if isinstance(tree, list) and tree and rng.random() < 0.85:
            changed = list(tree)
            match rng.randrange(8):
                case 0:
                    del changed[rng.randrange(len(changed))]
                case 1:
                    changed.append(rng.choice(changed))
                case 2:
                    changed = changed * rng.choice((2, 10)) if len(changed) < 100 else changed
                case _:
                    place = rng.randrange(len(changed))
                    changed[place] = self._change(changed[place])
            return changed
        if isinstance(tree, bytes):
            return rng.choice((self._flip, self._cut, self._restructure))(tree)
        if isinstance(tree, bool):
            return not tree
        if isinstance(tree, int):
            return rng.choice((*NUMBERS, max(0, tree - 1), min(tree + 1, 2**64 - 1)))
        if isinstance(tree, str):
            return rng.choice((*STRINGS, *self._peers, f"stranger-{rng.randrange(1000)}"))
        return rng.choice((None, 0, "", [], *self._peers))


# -- the cluster --


@dataclass
class Seen:
    """What one machine was last seen to hold, of itself and of others."""

    ranks: dict[PeerId, Rank] = field(default_factory=dict)
    deliveries: int = 0


class World:
    """Machines that talk, and somebody who mangles what they say."""

    def __init__(self, seed: int, machine: str) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.machines: dict[PeerId, Swim | Zones] = {}
        self.by_address: dict[str, PeerId] = {}
        self.seen: dict[PeerId, Seen] = {}
        self.counts: Counter[str] = Counter()
        self._flying: list[tuple[float, int, bytes]] = []
        self._order = count()
        for number in range(PEERS):
            self._start(number, machine)
        self.mangler = Mangler(self.rng, list(self.machines))
        for peer, each in self.machines.items():
            each.join(self.now, ["host-0:1"])
            self._collect(peer)

    def _start(self, number: int, machine: str) -> None:
        peer, address = PeerId(f"peer-{number}"), f"host-{number}:1"
        zone = "there" if machine == "zones" and number >= PEERS - 2 else "here"
        info = PeerInfo(peer, f"name-{number}", zone, (address,))
        rng = random.Random(self.rng.getrandbits(64))
        if machine == "zones":
            config = Config(swim=SMALL, wan=SMALL, zones=ZonesConfig(alone_after=1.0))
            self.machines[peer] = Zones(info, config, rng)
        else:
            self.machines[peer] = Swim(info, SMALL, rng)
        self.by_address[address] = peer
        self.seen[peer] = Seen()

    def run(self, seconds: float, mangled_per_second: float) -> None:
        end = self.now + seconds
        next_mangled = self.now if mangled_per_second else end + 1
        while True:
            wakeups = [(m.next_wakeup(), peer) for peer, m in self.machines.items()]
            due = min((w for w, _ in wakeups if w is not None), default=end)
            letter_at = self._flying[0][0] if self._flying else end
            self.now = max(self.now, min(due, letter_at, next_mangled))
            if self.now >= end:
                return
            if next_mangled <= self.now:
                self._say_something_bad()
                next_mangled = self.now + self.rng.expovariate(mangled_per_second)
            while self._flying and self._flying[0][0] <= self.now:
                self._deliver(heapq.heappop(self._flying)[2])
            for wakeup, peer in wakeups:
                if wakeup is not None and wakeup <= self.now:
                    self._tick(peer)

    def _tick(self, peer: PeerId) -> None:
        machine = self.machines[peer]
        for _ in range(MAX_TICKS):
            machine.tick(self.now)
            self._collect(peer)
            again = machine.next_wakeup()
            if again is None or again > self.now:
                return
        raise AssertionError(f"{peer} spins")

    def _say_something_bad(self) -> None:
        if self.rng.random() < 0.05:
            peer, other = (self.rng.choice(list(self.machines)) for _ in range(2))
            self.machines[peer].evidence(self.now, other, self.rng.choice(list(Evidence)))
            self._collect(peer)
            return
        letter = self.mangler.mangle()
        if letter is not None:
            self.counts["mangled"] += 1
            self._send(letter)

    def _send(self, letter: Letter) -> None:
        body = msgspec.Raw(letter.body)
        to_wire = Envelope(WIRE_VERSION, "", "", letter.sender, "", letter.to, letter.kind, body)
        data = encode(to_wire)
        delay = LATENCY * self.rng.uniform(0.5, 1.5)
        heapq.heappush(self._flying, (self.now + delay, next(self._order), data))

    def _deliver(self, data: bytes) -> None:
        try:
            envelope = open_envelope(data)
            message = unpack(envelope)
        except Undecodable:
            self.counts["undecodable"] += 1
            return
        peer = envelope.to
        self.machines[peer].receive(self.now, envelope.sender, message)
        self.counts["delivered"] += 1
        self._collect(peer)
        self._check(peer)

    def _collect(self, peer: PeerId) -> None:
        for item in self.machines[peer].outbox.drain():
            if isinstance(item, Event):
                continue
            kind, body = pack(item.message)
            assert len(bytes(body)) < MAX_MESSAGE_BYTES // 8, f"{peer} says too much at once"
            self._check_message(item.message)
            to = item.to if isinstance(item, Send) else self.by_address.get(item.address, NOBODY)
            if to in self.machines:
                letter = Letter(peer, to, kind, bytes(body))
                self.mangler.overhear(letter)
                self._send(letter)

    def _check_message(self, message: Message) -> None:
        """What is said can be understood."""
        kind, body = pack(message)
        envelope = Envelope(WIRE_VERSION, "", "", NOBODY, "", NOBODY, kind, body)
        assert unpack(envelope) == message

    def _check(self, peer: PeerId) -> None:
        machine, seen = self.machines[peer], self.seen[peer]
        own, *others = machine.members()
        assert own.status is Status.ALIVE
        assert len(others) <= SMALL.max_members
        ranks = {view.peer_id: view.rank for view in (own, *others)}
        for other, rank in ranks.items():
            assert rank >= seen.ranks.get(other, rank), f"{peer} goes back on {other}"
        seen.ranks = ranks
        seen.deliveries += 1
        if seen.deliveries % 100 == 0:
            weighed = weight(machine)
            self.counts["heaviest"] = max(self.counts["heaviest"], weighed)
            assert weighed < MAX_WEIGHT, f"{peer} grows: {weighed}"

    def unsettled(self) -> list[str]:
        """Who isn't held for alive by whom of its zone, or is without being there.

        A peer of another zone stays if it was forged an introduction: it answers all probes.
        """
        found = []
        for peer, machine in self.machines.items():
            zone = machine.me.zone
            elsewhere = {p for p, m in self.machines.items() if m.me.zone != zone}
            expected = self.machines.keys() - elsewhere
            held = {v.peer_id for v in machine.members() if v.is_reachable} - elsewhere
            if set(machine.responsive()) - elsewhere != expected or held != expected:
                views = (f"{v.peer_id} {v.status.name} {v.incarnation}" for v in machine.members())
                found.append(f"{peer} holds {', '.join(views)}")
        return found


class Broken(AssertionError):
    """Names what to run again."""


def fuzz(seed: int, machine: str, mangled_seconds: float = MANGLED_SECONDS) -> Counter[str]:
    """One episode; what was counted. Raises on whatever must not be."""
    world = World(seed, machine)
    try:
        world.run(10.0, 0)
        assert not world.unsettled(), world.unsettled()
        world.run(mangled_seconds, MANGLED_PER_SECOND)
        assert world.counts["delivered"] > 100
        deadline = world.now + QUIET_SECONDS
        while world.unsettled() and world.now < deadline:
            world.run(5.0, 0)
        assert not world.unsettled(), "\n".join(world.unsettled())
    except Exception as error:
        raise Broken(f"--machine {machine} --seed {seed}, at {world.now:.3f} s: {error}") from error
    world.counts["longest recovery"] = round(world.now - 10.0 - mangled_seconds)
    return world.counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long, in real time")
    parser.add_argument("--seed", type=int, default=1, help="of the first episode")
    parser.add_argument("--machine", choices=("swim", "zones"), action="append")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    total: Counter[str] = Counter()
    for seed in count(options.seed):
        for machine in options.machine or ("swim", "zones"):
            counts = fuzz(seed, machine)
            most = {key: max(total[key], counts[key]) for key in ("heaviest", "longest recovery")}
            total.update(counts)
            total.update(episodes=1)
            total.update({key: value - total[key] for key, value in most.items()})
        if time.monotonic() >= end:
            break
    print(", ".join(f"{key}: {value}" for key, value in sorted(total.items())))


if __name__ == "__main__":
    main()
