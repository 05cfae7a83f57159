"""The little language of `--faults`: what goes wrong, how often, and for how long.

Rules of this file. It turns a text into a schedule of sim/faults.py, and a text that makes no
sense into a `ValueError` that says what to write instead. It plays nothing.

    plan   = "none" | item *("," item)
    item   = kind "=" count [":" seconds]
    count  = a number, or a percentage of the peers: "5", "10%"
    seconds = "8", or a range from which each is drawn: "5-20"

    crash       the process dies; with seconds, a new peer starts there so long after
    host-crash  the same of its whole computer, which from then on says nothing
    gil         its Python is held up (5-20 s), its sockets go on answering
    pause       it is stopped (5-20 s), and nothing in it answers
    partition   a random half of the peers can't reach the other one (30 s)

Theory of operation. Everything is drawn from the seed. Faults begin after `WARM_UP` seconds
and what ends, ends in the first two thirds of the run: the last third is calm, so that it can be
seen what comes of them. Nobody suffers two faults, besides partitions. The first `needed`
places, through which newcomers join, crash only for good, and only if nobody else is
to join.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from tensorhub_p2p.sim.faults import Crash, Fault, Partition, Pause, Schedule, Stall

WARM_UP = 5.0
"""Seconds before the first fault."""
CALM_SHARE = 1 / 3
"""Of the run, at its end, in which all that ends is over."""
DEFAULT_SECONDS: dict[str, tuple[float, float]] = {
    "crash": (inf, inf),
    "host-crash": (inf, inf),
    "gil": (5.0, 20.0),
    "pause": (5.0, 20.0),
    "partition": (30.0, 30.0),
}
KINDS = ", ".join(DEFAULT_SECONDS)
USUAL_CRASHES = 5
"""Of processes, and of computers, in a run for which nothing else is said."""
_NUMBER = r"\d+(?:\.\d+)?"
_ITEM = re.compile(
    rf"(?P<kind>[a-z-]+)=(?P<count>{_NUMBER})(?P<percent>%?)"
    rf"(?::(?P<low>{_NUMBER})(?:-(?P<high>{_NUMBER}))?)?"
)


@dataclass(frozen=True)
class Item:
    """So many faults of one kind, each of which lasts between `low` and `high` seconds."""

    kind: str
    count: float
    is_share: bool
    """`count` is a percentage of the peers."""
    low: float
    high: float

    @property
    def restarts(self) -> bool:
        """Whether newcomers join because of it."""
        return self.kind.endswith("crash") and self.low < inf

    def number(self, peers: int) -> int:
        """How many there are among so many peers."""
        return ceil(peers * self.count / 100) if self.is_share else int(self.count)


def usual(peers: int) -> str:
    """The plan of a run for which nothing else is said: most of so many peers are left."""
    crashes = min(USUAL_CRASHES, peers // 4)
    return f"crash={crashes},host-crash={crashes}" if crashes else "none"


def parse(text: str) -> tuple[Item, ...]:
    """Read a plan; raises ValueError."""
    if text.strip() in ("", "none"):
        return ()
    return tuple(_parse_item(item.strip()) for item in text.split(","))


def _parse_item(text: str) -> Item:
    match = _ITEM.fullmatch(text)
    if match is None:
        raise ValueError(
            f'"{text}" is no fault: write KIND=COUNT or KIND=COUNT:SECONDS, as in '
            f'"crash=20,gil=10%,pause=5:8", or "none"'
        )
    kind, count, is_share = match["kind"], float(match["count"]), bool(match["percent"])
    if kind not in DEFAULT_SECONDS:
        raise ValueError(f'"{kind}" is no kind of fault: write one of {KINDS}')
    if not is_share and count != int(count):
        raise ValueError(f'"{text}": give a whole number of faults, or a percentage of the peers')
    if kind == "partition" and is_share:
        raise ValueError(f'"{text}": give a number of partitions; each cuts the peers in halves')
    low, high = DEFAULT_SECONDS[kind]
    if match["low"] is not None:
        low = float(match["low"])
        high = low if match["high"] is None else float(match["high"])
    if not 0 < low <= high:
        raise ValueError(f'"{text}": seconds must be above 0, and a range rise')
    return Item(kind, count, is_share, low, high)


@dataclass
class _Drawing:
    """One schedule being drawn."""

    rng: random.Random
    peers: int
    begins: float
    ends: float

    def __post_init__(self) -> None:
        self._victims = list(range(self.peers))
        self.rng.shuffle(self._victims)

    def spare(self, needed: int) -> None:
        """Nothing happens to the first so many places."""
        self._victims = [place for place in self._victims if place >= needed]

    def faults(self, item: Item) -> Iterator[Fault]:
        for _ in range(item.number(self.peers)):
            lasts = round(self.rng.uniform(item.low, item.high), 2) if item.low < inf else inf
            latest = self.ends - (lasts if lasts < inf else 0.0)
            at = round(self.rng.uniform(self.begins, latest), 2)
            yield self._fault(item.kind, at, lasts)

    def _fault(self, kind: str, at: float, lasts: float) -> Fault:
        if kind == "partition":
            half = self.rng.sample(range(self.peers), self.peers // 2)
            return Partition(at, lasts, tuple(sorted(half)))
        place = self._victims.pop()
        if kind in ("gil", "pause"):
            return (Stall if kind == "gil" else Pause)(at, lasts, place)
        return Crash(at, lasts, place, host=kind == "host-crash")


def draw(
    plan: Sequence[Item], *, seed: int, peers: int, duration: float, needed: int = 0
) -> Schedule:
    """The faults of a run of `duration` seconds; ValueError if the plan doesn't fit into it."""
    begins, ends = WARM_UP, duration * (1 - CALM_SHARE)
    for item in plan:
        longest = item.high if item.high < inf else 0.0
        if item.number(peers) and begins + longest > ends:
            minimum = ceil((begins + longest) / (1 - CALM_SHARE))
            raise ValueError(
                f'"{item.kind}" does not fit: faults begin after {WARM_UP:g} s and are over after '
                f"two thirds of the run; give --duration {minimum} or more"
                + (f", or {item.kind}=COUNT:SECONDS with fewer" if longest else "")
            )
    drawing = _Drawing(random.Random(f"{seed}/plan"), peers, begins, ends)
    if any(item.restarts for item in plan):
        drawing.spare(needed)
    victims = sum(item.number(peers) for item in plan if item.kind != "partition")
    if victims and victims >= peers - (needed if any(item.restarts for item in plan) else 0):
        raise ValueError(
            f"{victims} victims among {peers} peers are too many: somebody must be left to "
            f"notice; give more --peers or fewer faults"
        )
    faults = [fault for item in plan for fault in drawing.faults(item)]
    return Schedule(tuple(sorted(faults, key=lambda fault: fault.at)))
