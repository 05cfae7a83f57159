"""Faults as values: what goes wrong, for whom, when and for how long.

Rules of this file. A fault is a plain value: it can be printed, kept in a file and played
again. Peers are named by their place on the stage (0, 1, ...), which outlives the PeerIds
of the processes that follow each other on one computer. Nothing here looks at a machine.

Theory of operation. A `Fault` begins at `at` and ends `lasts` seconds later (infinity: not
by itself). A `Schedule` plays its faults on a `Stage`. Where two faults meet on one computer
the one that came first has it: what befalls a computer that is gone or asleep has no
effect, nor has its end.

    Crash            the process dies (its kernel refuses dials), or with `host` its computer;
                     it ends with a restart, with or without memory of the past
    Pause, Stall     SIGSTOP; Python's lock held
    Slow             each message and each tick costs `cost` seconds
    Partition        some can't reach the others, or are not reached by them
    Clog             the same, but what is sent arrives in the end
    Burst            messages between some and all others get lost, doubled or late

`generate` draws a schedule from a seed. All of it ends before the schedule does, except for
crashes that last, which `MAX_LOST` bounds: a cluster that lost most of its members at once
can prove nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any, ClassVar, Protocol

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.sim.host import Host, State
from tensorhub_p2p.sim.network import SimNetwork
from tensorhub_p2p.sim.weather import Effect, all_but, on_computers

MAX_LOST = 0.3
"""Share of the peers that `generate` crashes for good."""


class Stage(Protocol):
    """Where faults are played."""

    @property
    def network(self) -> SimNetwork: ...

    @property
    def peers(self) -> Sequence[PeerId]:
        """Who lives, or lived last, at each place."""

    def restart_anew(self, place: int) -> None:
        """A new peer starts at a place whose last one is gone, and joins."""


End = Callable[[], None]


def _no_end() -> None:
    """A fault that had no effect needs no end."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. Times are virtual seconds from the schedule's start."""

    kinds: ClassVar[dict[str, type[Fault]]] = {}

    at: float
    lasts: float

    def __init_subclass__(cls) -> None:
        Fault.kinds[cls.__name__] = cls

    def begin(self, stage: Stage) -> End:
        """Let it happen; returns what ends it."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """A JSON object. Infinity is null."""
        values = {k: None if v == inf else v for k, v in asdict(self).items()}
        return {"kind": type(self).__name__, **values}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Fault:
        """The reverse; ValueError if it isn't one."""
        kind = Fault.kinds.get(values.get("kind", ""))
        if kind is None:
            raise ValueError(f"unknown kind of fault: {values}")
        given = {f.name: values[f.name] for f in fields(kind) if f.name in values}
        for name, value in given.items():
            if isinstance(value, list):
                given[name] = tuple(value)
            elif value is None:
                given[name] = inf
        return kind(**given)


@dataclass(frozen=True)
class Crash(Fault):
    """Gone without a word; restarted at the end, if there is one."""

    place: int
    host: bool = False
    memory: bool = False
    """It comes back as itself, with all it knew."""

    def begin(self, stage: Stage) -> End:
        host = _running(stage, self.place)
        if host is None:
            return _no_end
        stage.network.crash(host.peer_id, host=self.host)

        def restart() -> None:
            if stage.peers[self.place] != host.peer_id or not host.is_gone:
                return
            if self.memory:
                stage.network.restart(host.peer_id)
            else:
                stage.restart_anew(self.place)

        return restart


@dataclass(frozen=True)
class Pause(Fault):
    """The process is stopped."""

    place: int
    state: ClassVar[State] = State.PAUSED

    def begin(self, stage: Stage) -> End:
        host = _running(stage, self.place)
        if host is None:
            return _no_end
        if self.state is State.PAUSED:
            stage.network.pause(host.peer_id)
        else:
            stage.network.stall(host.peer_id)

        def resume() -> None:
            if host.state is self.state:
                stage.network.resume(host.peer_id)

        return resume


@dataclass(frozen=True)
class Stall(Pause):
    """Its Python stands still, its sockets don't."""

    state: ClassVar[State] = State.STALLED


@dataclass(frozen=True)
class Slow(Fault):
    """Each message and each tick takes it `cost` seconds."""

    place: int
    cost: float

    def begin(self, stage: Stage) -> End:
        host = _running(stage, self.place)
        if host is None:
            return _no_end
        stage.network.slow(host.peer_id, self.cost)
        return lambda: stage.network.slow(host.peer_id, 0.0)


@dataclass(frozen=True)
class Partition(Fault):
    """Nothing gets from these places to all others; nor back, unless it is `one_way`."""

    places: tuple[int, ...]
    one_way: bool = False
    outwards: bool = True
    """If `one_way`: whether it is they who aren't heard, or who hear nothing."""
    effect: ClassVar[Effect] = Effect(blocks=True)

    def begin(self, stage: Stage) -> End:
        some = on_computers(_addresses(stage, self.places))
        one, other = (some, all_but(some)) if self.outwards else (all_but(some), some)
        rule = stage.network.disturb(one, other, self.effect, one_way=self.one_way)
        return lambda: stage.network.lift(rule)


@dataclass(frozen=True)
class Clog(Partition):
    """The same, but what is sent is held, and arrives at the end."""

    effect: ClassVar[Effect] = Effect(holds=True)


@dataclass(frozen=True)
class Burst(Fault):
    """Messages between these places and all others get lost, doubled and late."""

    places: tuple[int, ...]
    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0

    def begin(self, stage: Stage) -> End:
        some = on_computers(_addresses(stage, self.places))
        effect = Effect(loss=self.loss, duplicate=self.duplicate, delay=self.delay)
        rule = stage.network.disturb(some, all_but(some), effect)
        return lambda: stage.network.lift(rule)


def _running(stage: Stage, place: int) -> Host | None:
    host = stage.network.host(stage.peers[place])
    return host if host.state is State.RUNNING else None


def _addresses(stage: Stage, places: Iterable[int]) -> list[str]:
    return [a for place in places for a in stage.network.host(stage.peers[place]).addresses]


# -- schedules --


@dataclass(frozen=True)
class Schedule:
    """What goes wrong in one run, in the order of time."""

    faults: tuple[Fault, ...] = ()

    @property
    def ends(self) -> float:
        """When the last fault that ends does."""
        return max((f.at + f.lasts for f in self.faults if f.lasts < inf), default=0.0)

    def play(self, stage: Stage) -> None:
        """Let it all happen from now on, as the clock runs."""
        start = stage.network.now
        for fault in self.faults:
            stage.network.at(start + fault.at, _player(stage, fault))

    def without(self, index: int) -> Schedule:
        """The same, less one fault: for finding out which ones matter."""
        return Schedule(self.faults[:index] + self.faults[index + 1 :])

    def to_json(self) -> list[dict[str, Any]]:
        return [fault.to_dict() for fault in self.faults]

    @staticmethod
    def from_json(faults: Iterable[dict[str, Any]]) -> Schedule:
        """The reverse; ValueError if it isn't one."""
        return Schedule(tuple(Fault.from_dict(fault) for fault in faults))

    def __str__(self) -> str:
        return "\n".join(json.dumps(fault) for fault in self.to_json()) or "no faults"


def _player(stage: Stage, fault: Fault) -> Callable[[], None]:
    def play() -> None:
        end = fault.begin(stage)
        if fault.lasts < inf:
            stage.network.at(stage.network.now + fault.lasts, end)

    return play


@dataclass
class Generator:
    """Draws faults. Times are rounded, so that a printed schedule is the schedule."""

    rng: random.Random
    peers: int
    duration: float
    zones: int = 1
    needed: int = 0
    """The first so many places, whose peers always come back: newcomers join through them."""
    lost: set[int] = field(default_factory=set)
    """Places whose peer is crashed for good."""

    def draw(self, kind: type[Fault]) -> Fault:
        """One fault of this kind."""
        lasts = self._lasts()
        at = round(self.rng.uniform(0, self.duration - lasts), 2)
        if kind is Crash:
            return self._crash(at, lasts)
        if kind in (Pause, Stall):
            return kind(at, lasts, place=self._place())
        if kind is Slow:
            return Slow(at, lasts, self._place(), round(10 ** self.rng.uniform(-3, -0.5), 4))
        if kind is Burst:
            return self._burst(at, lasts)
        sides = {"one_way": self.rng.random() < 0.4, "outwards": self.rng.random() < 0.5}
        return kind(at, lasts, places=self._places(), **sides)  # type: ignore[call-arg]

    def _crash(self, at: float, lasts: float) -> Crash:
        place, for_good = self._place(), self.rng.random() < 0.4
        host, memory = self.rng.random() < 0.5, self.rng.random() < 0.3
        too_many = len(self.lost | {place}) > MAX_LOST * self.peers
        if not for_good or too_many or place < self.needed:
            return Crash(at, lasts, place, host, memory)
        self.lost.add(place)
        return Crash(at, inf, place, host)

    def _burst(self, at: float, lasts: float) -> Burst:
        return Burst(
            at,
            lasts,
            self._places(),
            loss=round(self.rng.choice((0.0, self.rng.uniform(0.1, 0.9))), 2),
            duplicate=round(self.rng.choice((0.0, self.rng.uniform(0.1, 1.0))), 2),
            delay=round(self.rng.choice((0.0, self.rng.uniform(0.01, 2.0))), 2),
        )

    def _lasts(self) -> float:
        """Short ones are as likely as long ones."""
        longest = max(0.2, self.duration * 0.7)
        lasts: float = 0.1 * (longest / 0.1) ** self.rng.random()
        return round(min(longest, lasts), 2)

    def _place(self) -> int:
        return self.rng.randrange(self.peers)

    def _places(self) -> tuple[int, ...]:
        """One, a few, half of them, or all of one zone."""
        size = self.rng.choice((1, 1, 2, self.peers // 2, 0))
        if size == 0 and self.zones > 1:
            zone = self.rng.randrange(self.zones)
            return tuple(p for p in range(self.peers) if p % self.zones == zone)
        return tuple(sorted(self.rng.sample(range(self.peers), max(1, size))))


KINDS: tuple[type[Fault], ...] = (Crash, Crash, Pause, Stall, Slow, Partition, Clog, Burst)


def generate(
    seed: int,
    peers: int,
    duration: float,
    intensity: float = 1.0,
    *,
    zones: int = 1,
    needed: int = 0,
    kinds: Sequence[type[Fault]] = KINDS,
) -> Schedule:
    """A schedule for so many peers and seconds.

    `intensity` is the mean number of faults in ten seconds. Peers of several zones are
    dealt out in turn: place p is in zone p mod `zones`. The first `needed` places may crash,
    but not for good.
    """
    rng = random.Random(f"{seed}/faults")
    generator = Generator(rng, peers, duration, zones, needed)
    mean = intensity * duration / 10
    number = max(1, round(rng.uniform(0.5, 1.5) * mean))
    drawn = [generator.draw(rng.choice(kinds)) for _ in range(number)]
    return Schedule(tuple(sorted(drawn, key=lambda fault: fault.at)))
