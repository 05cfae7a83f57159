"""Runs of a membership under faults, each decided by one seed, and the command for many.

Rules of this file. It decides what a run is, drives it and says what failed; what must
hold is checks.py's, what goes wrong faults.py's.

Theory of operation. A seed draws a `Setting`: how many peers, zones, what network, how they
start; and from it a schedule of faults. Then

    safety     for `duration` seconds the faults happen; all checks look on
    liveness   faults stop: partitions heal, sleepers wake. Within `CONVERGES_WITHIN` seconds
               all views must agree with what is, and for `STAYS` seconds more stay so

A failure is a `CheckFailed` (runs.py); as a file it is kept in tests/regressions.

    python -m tensorhub_p2p.sim.seeds --seeds 1000 [--first 0] [--failures DIR]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorhub_p2p.config import Config
from tensorhub_p2p.sim.checks import EVERY_RUN, Check, SparesStalled
from tensorhub_p2p.sim.faults import KINDS, Fault, Schedule, Stall, generate
from tensorhub_p2p.sim.link import Link, LogNormal
from tensorhub_p2p.sim.membership import SEEDS, Factory, MembershipSim
from tensorhub_p2p.sim.runs import (
    LOOKS_EVERY,
    CheckFailed,
    SeededRun,
    command,
    setting_from_json,
    shrink,
)

__all__ = ["CheckFailed", "Run", "Setting", "main", "run_seed", "shrink"]

CONVERGES_WITHIN = 45.0
"""Seconds of calm after which all views agree: verdicts, re-dials, refutations included."""
STAYS = 5.0
"""Seconds for which they then must go on agreeing."""
SETTLES = 10.0
"""Seconds before the faults in which those that join find each other."""


@dataclass(frozen=True)
class Setting:
    """Everything about a run but its faults."""

    seed: int
    peers: int
    zones: int = 1
    duration: float = 40.0
    """Seconds for which faults happen."""
    intensity: float = 1.0
    """Mean number of faults in ten seconds."""
    latency: tuple[float, float] = (0.0002, 0.002)
    spread: float = 0.0
    """If it is not 0, latencies are log-normal, with the mean of `latency` as median."""
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 1.0
    converged: bool = True
    sockets: bool = True
    only_stalls: bool = False

    @staticmethod
    def drawn(seed: int) -> Setting:
        """The setting of this seed."""
        rng = random.Random(f"{seed}/setting")
        zones = rng.choice((1, 1, 1, 2, 3))
        only_stalls = rng.random() < 0.1
        return Setting(
            seed,
            peers=rng.randint(3, 16 if zones == 1 else 10) * zones,
            zones=zones,
            duration=rng.choice((10.0, 20.0, 40.0, 80.0)),
            intensity=rng.choice((0.5, 1.0, 2.0, 4.0, 8.0)),
            latency=rng.choice(((0.0002, 0.002), (0.001, 0.02), (0.02, 0.1))),
            spread=rng.choice((0.0, 0.0, 0.5)),
            loss=rng.choice((0.0, 0.0, 0.01, 0.05, 0.1)),
            duplicate=rng.choice((0.0, 0.0, 0.05)),
            reorder=rng.choice((1.0, 1.0, 0.1)),
            converged=rng.random() < 0.5,
            sockets=only_stalls or rng.random() < 0.75,
            only_stalls=only_stalls,
        )

    @property
    def link(self) -> Link:
        low, high = self.latency
        latency = LogNormal((low + high) / 2, self.spread, 1.0) if self.spread else self.latency
        return Link(latency, self.loss, self.duplicate, self.reorder)

    def faults(self) -> Schedule:
        """The schedule that belongs to the seed."""
        kinds: tuple[type[Fault], ...] = (Stall,) if self.only_stalls else KINDS
        return generate(
            self.seed,
            self.peers,
            self.duration,
            self.intensity,
            zones=self.zones,
            needed=SEEDS * self.zones,
            kinds=kinds,
        )


@dataclass
class Run(SeededRun):
    """One run of a membership, to be carried out once."""

    setting: Setting
    machine: Factory | None = None
    config: Config | None = None
    checks: Sequence[Callable[[MembershipSim], Check]] = EVERY_RUN
    sim: MembershipSim = field(init=False)

    def __post_init__(self) -> None:
        setting = self.setting
        self.sim = MembershipSim(
            setting.peers,
            zones=setting.zones,
            seed=setting.seed,
            config=self.config,
            sockets=setting.sockets,
            link=setting.link,
            converged=setting.converged,
            machine=self.machine,
        )
        wanted = (*self.checks, SparesStalled) if setting.only_stalls else self.checks
        self._checks = [check(self.sim) for check in wanted]

    @property
    def stage(self) -> MembershipSim:
        return self.sim

    @property
    def watching(self) -> Sequence[Check]:
        return self._checks

    def phases(self) -> None:
        """Safety, then liveness."""
        if not self.setting.converged:
            self.pass_time(SETTLES)
        self.schedule.play(self.sim)
        self.pass_time(max(self.setting.duration, self.schedule.ends))
        self.calm()
        self.sim.run_until_converged(CONVERGES_WITHIN, every=LOOKS_EVERY)
        self.each(lambda check: check.conclude())
        self.pass_time(STAYS)
        self.each(lambda check: check.conclude())

    @staticmethod
    def from_json(values: dict[str, Any], machine: Factory | None = None) -> Run:
        setting = setting_from_json(Setting, values["setting"])
        return Run(setting, Schedule.from_json(values["faults"]), machine)


def run_seed(
    seed: int,
    *,
    machine: Factory | None = None,
    config: Config | None = None,
    checks: Sequence[Callable[[MembershipSim], Check]] = EVERY_RUN,
) -> MembershipSim:
    """Carry out the run of this seed; raises CheckFailed."""
    setting = Setting.drawn(seed)
    run = Run(setting, setting.faults(), machine, config, checks)
    run.carry_out()
    return run.sim


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: many seeds, one text for each failure, and files to play them again."""
    return command(run_seed, "tensorhub_p2p.sim.seeds", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
