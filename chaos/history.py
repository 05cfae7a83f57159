"""What the journals of a run say, sorted by who did it: the judge's only knowledge.

Rules of this file. It pairs what belongs together (a verb's beginning and end, a fault's) and
answers questions about time; what must hold is said in checks/
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from chaos.journal import (
    AnyEvent,
    Called,
    Compared,
    Ended,
    Exited,
    Fault,
    Listed,
    Met,
    Phase,
    Sampled,
    Spoilt,
    Started,
    Trouble,
)

SILENCES = frozenset({"stop", "stop a source", "hold the GIL", "memory pressure", "usurp a slot"})
"""Faults in which a process does nothing, and can't be blamed for that."""
STARVED = frozenset({"memory pressure"})
"""Faults in which a process gets no memory: it may die of that."""
CUTS = frozenset({"partition", "one-way partition", "cut a cable", "loss", "slow link"})
"""Faults that are done to links."""
PARTED = CUTS - {"slow link"}
"""Those by which some can't hear others."""

DEADLY = frozenset(
    {
        "kill a source",
        "kill a puller",
        "kill a leader",
        "kill a ring owner",
        "kill a gateway",
        "kill a seed",
        "kill a whole group",
        "kill all gateways",
        "a stranger on a seed's port",
        "/dev/shm is full",
        "memory pressure",
    }
)
"""Faults that begin, or end, with kill -9."""
USURPED = frozenset({"usurp a slot"})
"""Its former process is killed some time after the fault."""
STRANGERS = frozenset({"a stranger on a seed's port"})
"""Faults in which who joins may meet somebody else."""
TERMINATED, INTERRUPTED = "SIGTERM in a verb", "Ctrl-C in a verb"


@dataclass
class Call:
    """One verb of one process."""

    who: str
    called: Called
    ended: Ended | None = None
    compared: Compared | None = None

    @property
    def began(self) -> float:
        return self.called.at

    @property
    def over(self) -> float:
        """When it ended; infinite if it never did."""
        return self.ended.at if self.ended is not None else inf

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and not self.ended.error

    @property
    def verb(self) -> str:
        return self.called.verb


@dataclass
class Life:
    """One process."""

    started: Started
    calls: list[Call] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)
    spoilt: list[Spoilt] = field(default_factory=list)
    looks: list[Listed] = field(default_factory=list)
    met: Met | None = None
    """Whom it knew when it was told to end."""
    troubles: list[Trouble] = field(default_factory=list)
    exited: Exited | None = None

    @property
    def who(self) -> str:
        return self.started.who

    @property
    def slot(self) -> tuple[str, int]:
        return (self.started.replica, self.started.shard)

    @property
    def end(self) -> float:
        return self.exited.at if self.exited is not None else inf

    def of(self, *verbs: str) -> list[Call]:
        return [call for call in self.calls if call.verb in verbs]


@dataclass
class Spell:
    """A fault, from its beginning to its end."""

    begin: Fault
    end: float = inf

    @property
    def kind(self) -> str:
        return self.begin.kind

    def overlaps(self, since: float, until: float, after: float = 0.0) -> bool:
        """Whether it, or the `after` seconds that follow, touch that time."""
        return self.begin.at <= until and since <= self.end + after


@dataclass
class History:
    lives: dict[str, Life] = field(default_factory=dict)
    spells: list[Spell] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    runner_troubles: list[Trouble] = field(default_factory=list)
    leaked: tuple[str, ...] = ()
    last: float = 0.0

    @property
    def calls(self) -> list[Call]:
        return [call for life in self.lives.values() for call in life.calls]

    def by_replica(self) -> dict[str, list[Life]]:
        found: dict[str, list[Life]] = defaultdict(list)
        for life in self.lives.values():
            found[life.started.replica].append(life)
        return found

    def done_to(self, whos: Iterable[str], kinds: frozenset[str] | None = None) -> list[Spell]:
        """Faults that struck any of them."""
        wanted = set(whos)
        return [
            spell
            for spell in self.spells
            if wanted & set(spell.begin.targets) and (kinds is None or spell.kind in kinds)
        ]

    def was_replaced(self, life: Life) -> bool:
        """Another process was started for its slot later."""
        return self.replaced_at(life) < inf

    def replaced_at(self, life: Life) -> float:
        """When the next process was started for its slot, whether or not this one had ended."""
        starts = (o.started.at for o in self.lives.values() if o.slot == life.slot)
        return min((at for at in starts if at > life.started.at), default=inf)

    def group_of(self, who: str) -> list[str]:
        """All processes of its replica, in all their lives."""
        replica = self.lives[who].started.replica
        return [life.who for life in self.lives.values() if life.started.replica == replica]


def history(events: Sequence[AnyEvent]) -> History:
    found = History()
    calls: dict[tuple[str, int], Call] = {}
    spells: dict[int, Spell] = {}
    for event in events:
        found.last = max(found.last, event.at)
        if isinstance(event, Started):
            found.lives[event.who] = Life(event)
        elif isinstance(event, Called):
            call = calls[event.who, event.call] = Call(event.who, event)
            found.lives[event.who].calls.append(call)
        elif isinstance(event, Ended):
            calls[event.who, event.call].ended = event
        elif isinstance(event, Compared):
            calls[event.who, event.call].compared = event
        elif isinstance(event, Fault):
            _take_fault(found, spells, event)
        else:
            _take_other(found, event)
    return found


def _take_fault(found: History, spells: dict[int, Spell], event: Fault) -> None:
    if event.ends:
        spells[event.number].end = event.at
    else:
        spells[event.number] = Spell(event)
        found.spells.append(spells[event.number])


def _take_other(found: History, event: AnyEvent) -> None:
    if isinstance(event, Phase):
        found.phases[event.phase] = event.at
        if event.phase == "over":
            found.leaked = tuple(event.detail.split(", ")) if event.detail else ()
    elif isinstance(event, Exited) and event.name in found.lives:
        found.lives[event.name].exited = event
    elif isinstance(event, Sampled) and event.name in found.lives:
        found.lives[event.name].samples.append(event)
    elif isinstance(event, Listed):
        found.lives[event.who].looks.append(event)
    elif isinstance(event, Met):
        found.lives[event.who].met = event
    elif isinstance(event, Spoilt):
        found.lives[event.who].spoilt.append(event)
    elif isinstance(event, Trouble):
        life = found.lives.get(event.who)
        (life.troubles if life is not None else found.runner_troubles).append(event)
