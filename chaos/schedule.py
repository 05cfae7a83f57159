"""What is done when: a list of faults and times that follows from a seed.

Whom a fault strikes is chosen when it comes, by what everybody is at that moment; so two runs of
one seed try the same, and do not go the same: processes are not repeatable.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.faults import FAULTS


@dataclass(frozen=True)
class Planned:
    """A fault of this kind, so many seconds after the beginning."""

    at: float
    kind: str


def draw(
    seed: int, seconds: float, pause: float, kinds: Sequence[str], first: Sequence[str] = ()
) -> list[Planned]:
    """Faults at random pauses of `pause` seconds in the mean; `first` are tried before others."""
    rng = random.Random(f"schedule/{seed}")
    weights = [FAULTS[kind].weight for kind in kinds]
    wanted = list(first)
    rng.shuffle(wanted)
    planned, at = [], rng.uniform(0.0, pause)
    while at < seconds:
        kind = wanted.pop() if wanted else rng.choices(list(kinds), weights)[0]
        planned.append(Planned(at, kind))
        at += rng.uniform(0.3, 1.7) * pause
    return planned
