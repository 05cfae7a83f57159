"""A directory in one place, and a mailbag: for machines that are tested without a cluster.

Nothing happens at once. A write takes effect at some moment between its call and its answer, a
read sees one such moment, a message arrives at some later step or never: the seed decides
which of all that is under way comes next. So a few hundred seeds try a few hundred
interleavings, in milliseconds each.

Only what quorums promise is kept: a read that begins after a write was answered sees it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.owner import Refusal
from tensorhub_p2p.protocol.directory.records import Refused, Registers
from tensorhub_p2p.protocol.directory.registers import Mark, of_mark
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Machine, Send
from tensorhub_p2p.protocol.messages import Key, Register, Value

Admit = Callable[[Key, Cells, Register], "Refusal | None"]


def admit_all(_key: Key, _held: object, _new: Register) -> Refusal | None:
    return None


@dataclass
class Step:
    """Something that will happen."""

    run: Callable[[], None]
    to: PeerId


@dataclass
class Registry:
    seed: int = 0
    loss: float = 0.0
    admit: Admit = admit_all
    tick: float = 0.01
    """Seconds that pass with each step."""
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    held: dict[Key, Cells] = field(default_factory=dict)
    machines: dict[PeerId, list[Machine]] = field(default_factory=dict)
    events: list[tuple[PeerId, Event]] = field(default_factory=list)
    sent: list[tuple[PeerId, Send]] = field(default_factory=list)
    gone: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    """By peer: whom it holds for dead."""
    crashed: set[PeerId] = field(default_factory=set)
    watches: dict[int, tuple[PeerId, Key, Callable[[float], None]]] = field(default_factory=dict)
    requests: int = 0
    cancelled: set[int] = field(default_factory=set)
    looking: dict[int, Callable[[float, Refused | None], None]] = field(default_factory=dict)
    """By write that looks: who is told of its end."""
    seen: dict[int, Registers] = field(default_factory=dict)
    """By write: what stood there right after it."""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"registry/{self.seed}")

    def peer(self, peer: PeerId) -> Records:
        return Records(self, peer)

    def registers(self, key: Key) -> Registers:
        cells = self.held.get(key, Cells())
        return tuple(r for r in cells.values() if r.value is not None)

    def put(self, key: Key, register: Register) -> Refusal | None:
        cells = self.held.setdefault(key, Cells())
        before = cells.get(register.cell)
        if before is not None and register.order <= before.order:
            return None
        refusal = self.admit(key, cells, register)
        if refusal is None:
            cells.merge(self.now, (register,))
            for peer, watched, then in self.watches.values():
                if watched == key:
                    self.later(peer, lambda then=then: then(self.now))  # type: ignore[misc]
        return refusal

    # --- what happens ---

    def later(self, to: PeerId, run: Callable[[], None]) -> None:
        self.steps.append(Step(run, to))

    def settle(self) -> None:
        """Take what the machines have put out."""
        for peer, machines in self.machines.items():
            for machine in machines:
                for item in machine.outbox.drain():
                    if isinstance(item, Send):
                        self._post(peer, item)
                    elif isinstance(item, Event):
                        self.events.append((peer, item))
                        self.on_event(peer, item)

    def _post(self, sender: PeerId, item: Send) -> None:
        self.sent.append((sender, item))
        if self.rng.random() < self.loss:
            return

        def deliver() -> None:
            for machine in self.machines.get(item.to, ()):
                machine.receive(self.now, sender, item.message)

        self.later(item.to, deliver)

    def on_event(self, peer: PeerId, event: Event) -> None:
        """For tests that pass an event of one machine on to another."""

    def step(self) -> None:
        """One thing that is under way happens, or time passes."""
        self.settle()
        self.now += self.tick
        if self.steps:
            step = self.steps.pop(self.rng.randrange(len(self.steps)))
            if step.to not in self.crashed:
                step.run()
        else:
            self.now += 5 * self.tick
        for peer, machines in list(self.machines.items()):
            for machine in machines:
                due = machine.next_wakeup()
                if due is not None and due <= self.now and peer not in self.crashed:
                    machine.tick(self.now)
        self.settle()

    def until(self, holds: Callable[[], bool], limit: int = 5000) -> None:
        for _ in range(limit):
            if holds():
                return
            self.step()
        raise AssertionError("it never came to that")

    def crash(self, peer: PeerId) -> None:
        """Its messages that are under way may still arrive; nothing reaches it any more."""
        self.settle()
        self.crashed.add(peer)
        self.machines.pop(peer, None)

    def declare_dead(self, peer: PeerId, to: list[PeerId] | None = None) -> None:
        for other in to if to is not None else list(self.machines):
            self.gone.setdefault(other, set()).add(peer)
            for machine in self.machines.get(other, ()):
                told: Any = getattr(machine, "peer_gone", None)
                if told is not None:
                    told(self.now, peer)


@dataclass
class Records:
    """The registry and the membership, as one peer uses them."""

    registry: Registry
    me: PeerId
    writing: dict[tuple[Key, str], int] = field(default_factory=dict)
    sequence: int = 0

    def read(
        self,
        now: float,
        key: Key,
        then: Callable[[float, Registers], None],
        enough: Callable[[Registers], bool] | None = None,
        near: str = "",
        *,
        agreed: bool = False,
    ) -> int:
        self.registry.requests += 1
        number = self.registry.requests

        def look() -> None:
            seen = self.registry.registers(key)
            self._answer(number, lambda: then(self.registry.now, seen))

        self.registry.later(self.me, look)
        return number

    def write(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value | None,
        then: Callable[[float, Refused | None], None],
        zone: str = "",
    ) -> int:
        self.sequence += 1
        replaced = self.writing.pop((key, name), None)
        if replaced is not None:
            self.cancel(replaced)
        register = Register(self.me, name, generation, self.sequence, value)
        number = self.writing[(key, name)] = self._put(key, register, then)
        return number

    def write_and_look(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: object,
        then: Callable[[float, Refused | None, Registers | None], None],
        *,
        agreed: bool = False,
    ) -> int:
        """Every other time that can't be had."""
        number = self.write(now, key, name, generation, value, lambda _now, _refused: None)
        looks = number % 2 == 0

        def told(now: float, refused: Refused | None) -> None:
            then(now, refused, self.registry.seen.pop(number) if looks and not refused else None)

        self.registry.looking[number] = told
        return number

    def mark(
        self,
        now: float,
        key: Key,
        value: Mark,
        then: Callable[[float, Refused | None], None],
        zone: str = "",
    ) -> int:
        return self._put(key, of_mark(value), then)

    def forget(self, now: float, key: Key, name: str) -> None:
        """Withdraw it; tests don't wait for a minute."""
        before = self.registry.held.get(key, Cells()).get((self.me, name))
        if before is not None and before.value is not None:
            self.write(now, key, name, before.generation, None, lambda _now, _refused: None)

    def _put(
        self, key: Key, register: Register, then: Callable[[float, Refused | None], None]
    ) -> int:
        self.registry.requests += 1
        number = self.registry.requests

        def put() -> None:
            refusal = self.registry.put(key, register)
            refused = Refused(refusal.reason, refusal.because) if refusal else None
            self.registry.seen[number] = self.registry.registers(key)
            told = self.registry.looking.pop(number, then)
            self._answer(number, lambda: told(self.registry.now, refused))

        self.registry.later(self.me, put)
        return number

    def _answer(self, number: int, answer: Callable[[], None]) -> None:
        def run() -> None:
            if number not in self.registry.cancelled:
                answer()

        self.registry.later(self.me, run)

    def cancel(self, request: int) -> None:
        """The answer is not wanted; a write takes effect all the same."""
        self.registry.cancelled.add(request)

    def watch(
        self, now: float, key: Key, then: Callable[[float], None], *, pins: bool = False
    ) -> int:
        self.registry.requests += 1
        self.registry.watches[self.registry.requests] = (self.me, key, then)
        return self.registry.requests

    def unwatch(self, now: float, watch: int) -> None:
        self.registry.watches.pop(watch, None)

    def known(self, key: Key) -> None:
        """Whoever is told of a change reads."""

    def elsewhere(self, model: str) -> tuple[int, int] | None:
        return None

    # membership

    home = "zone"

    def zone(self, peer: PeerId) -> str:
        return self.home

    def is_gone(self, peer: PeerId, zone: str = "") -> bool:
        return peer in self.registry.gone.get(self.me, ())

    def is_responsive(self, peer: PeerId) -> bool:
        return not self.is_gone(peer)

    def name(self, peer: PeerId) -> str:
        return f"peer {peer}"
