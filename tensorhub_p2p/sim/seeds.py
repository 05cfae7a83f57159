"""Runs of a membership under faults, each decided by one seed, and the command for many.

Rules of this file. It decides what a run is, drives it and says what failed; what must
hold is checks.py's, what goes wrong faults.py's.

Theory of operation. A seed draws a `Setting`: how many peers, zones, what network, how they
start; and from it a schedule of faults. Then

    safety     for `duration` seconds the faults happen; all checks look on
    liveness   faults stop: partitions heal, sleepers wake. Within `CONVERGES_WITHIN` seconds
               all views must agree with what is, and for `STAYS` seconds more stay so

A failure is a `CheckFailed`, whose text is all that is needed to see it again. `Run.to_json`
is the same as a file (tests/regressions), which outlives changes of how seeds are drawn.

    python -m tensorhub_p2p.sim.seeds --seeds 1000 [--first 0] [--failures DIR]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorhub_p2p.config import Config
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.sim.checks import EVERY_RUN, Check, SparesStalled, Violation
from tensorhub_p2p.sim.faults import KINDS, Fault, Schedule, Stall, generate
from tensorhub_p2p.sim.link import Link, LogNormal
from tensorhub_p2p.sim.membership import SEEDS, Factory, MembershipSim

CONVERGES_WITHIN = 45.0
"""Seconds of calm after which all views agree: verdicts, re-dials, refutations included."""
STAYS = 5.0
"""Seconds for which they then must go on agreeing."""
LOOKS_EVERY = 1.0
"""Seconds between two looks at all peers."""
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


class CheckFailed(AssertionError):
    """A check failed. The text is all that is needed to see it again."""

    def __init__(self, run: Run, check: str, at: float, reason: str) -> None:
        self.run, self.check, self.at, self.reason = run, check, at, reason
        super().__init__(
            f"seed {run.setting.seed}: {check} failed at {at:.3f} s: {reason}\n"
            f"{run.setting}\n{run.schedule}"
        )


@dataclass
class Run:
    """One run, to be carried out once."""

    setting: Setting
    schedule: Schedule
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
        self.sim.listeners.append(self._on_event)

    def carry_out(self) -> MembershipSim:
        """Safety, then liveness; raises CheckFailed, also for an error of a machine."""
        try:
            self._carry_out()
        except CheckFailed:
            raise
        except Exception as error:
            name, now = type(error).__name__, self.sim.network.now
            raise CheckFailed(self, name, now, str(error)) from error
        return self.sim

    def _carry_out(self) -> None:
        if not self.setting.converged:
            self._pass(SETTLES)
        self.schedule.play(self.sim)
        self._pass(max(self.setting.duration, self.schedule.ends))
        self._calm()
        self.sim.run_until_converged(CONVERGES_WITHIN, every=LOOKS_EVERY)
        self._each(lambda check: check.conclude())
        self._pass(STAYS)
        self._each(lambda check: check.conclude())

    def _calm(self) -> None:
        """All faults that don't last for good are over."""
        network = self.sim.network
        network.heal()
        for host in network.hosts():
            if host.is_asleep:
                network.resume(host.peer_id)
            if host.cost:
                network.slow(host.peer_id, 0.0)

    def _pass(self, seconds: float) -> None:
        end = self.sim.network.now + seconds
        while self.sim.network.now < end:
            self.sim.run_for(min(LOOKS_EVERY, end - self.sim.network.now))
            self._each(lambda check: check.look())

    def _on_event(self, peer: PeerId, event: Event) -> None:
        self._each(lambda check: check.on_event(peer, event))

    def _each(self, ask: Callable[[Check], None]) -> None:
        for check in self._checks:
            try:
                ask(check)
            except Violation as violation:
                now, name = self.sim.network.now, type(check).__name__
                raise CheckFailed(self, name, now, str(violation)) from violation

    def to_json(self, why: str = "") -> dict[str, Any]:
        """A regression file: this setting, these faults, and what they once showed."""
        return {"why": why, "setting": asdict(self.setting), "faults": self.schedule.to_json()}

    @staticmethod
    def from_json(values: dict[str, Any], machine: Factory | None = None) -> Run:
        setting = dict(values["setting"])
        setting["latency"] = tuple(setting["latency"])
        return Run(Setting(**setting), Schedule.from_json(values["faults"]), machine)


def run_seed(
    seed: int,
    *,
    machine: Factory | None = None,
    config: Config | None = None,
    checks: Sequence[Callable[[MembershipSim], Check]] = EVERY_RUN,
) -> MembershipSim:
    """Carry out the run of this seed; raises CheckFailed."""
    setting = Setting.drawn(seed)
    return Run(setting, setting.faults(), machine, config, checks).carry_out()


def shrink(failure: CheckFailed) -> CheckFailed:
    """Leave out every fault without which the same check still fails."""
    index = 0
    while index < len(failure.run.schedule.faults):
        old = failure.run
        fewer = old.schedule.without(index)
        try:
            Run(old.setting, fewer, old.machine, old.config, old.checks).carry_out()
        except CheckFailed as smaller:
            if smaller.check == failure.check:
                failure = smaller
                continue
        index += 1
    return failure


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: many seeds, one line for each failure, and files to play them again."""
    parser = argparse.ArgumentParser(prog="python -m tensorhub_p2p.sim.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--failures", type=Path, help="where to write regression files")
    options = parser.parse_args(arguments)
    failed = 0
    for seed in range(options.first, options.first + options.seeds):
        try:
            run_seed(seed)
        except CheckFailed as failure:
            failed += 1
            small = shrink(failure)
            print(small, flush=True)
            if options.failures is not None:
                options.failures.mkdir(parents=True, exist_ok=True)
                why = f"{small.check}: {small.reason}"
                path = options.failures / f"seed-{seed}.json"
                path.write_text(json.dumps(small.run.to_json(why), indent=1) + "\n")
    print(f"{options.seeds} seeds from {options.first}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
