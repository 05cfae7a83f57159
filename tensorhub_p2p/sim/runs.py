"""What all runs drawn from seeds have in common: checks that look on, failures, shrinking.

Rules of this file. It knows that a run has a setting and a schedule of faults, and a
simulation that checks look at; which simulation, and which phases a run has, is decided by
its subclass (seeds.py for membership, cluster/seeds.py for whole clusters).

Theory of operation. `carry_out` goes through the phases. Whatever a check finds, and any
error that a machine raises, ends it as a `CheckFailed`, whose text is all that is needed to
see it again. `shrink` leaves out every fault without which the same check still fails.
`to_json` is the same as a file, which outlives changes of how seeds are drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.sim.checks import Check, Violation
from tensorhub_p2p.sim.faults import Schedule
from tensorhub_p2p.sim.membership import MembershipSim

LOOKS_EVERY = 1.0
"""Seconds between two looks of the checks at all peers."""


class CheckFailed(AssertionError):
    """A check failed. The text is all that is needed to see it again."""

    def __init__(self, run: SeededRun, check: str, at: float, reason: str) -> None:
        self.run, self.check, self.at, self.reason = run, check, at, reason
        super().__init__(
            f"seed {run.setting.seed}: {check} failed at {at:.3f} s: {reason}\n"
            f"{run.setting}\n{run.schedule}"
        )


@dataclass
class SeededRun(ABC):
    """One run, to be carried out once. Subclasses make `sim` and `watching`."""

    setting: Any
    """Everything about it but its faults: a flat dataclass with a `seed`."""
    schedule: Schedule

    @property
    @abstractmethod
    def stage(self) -> MembershipSim:
        """The simulation."""

    @property
    @abstractmethod
    def watching(self) -> Sequence[Check]:
        """The checks that look on."""

    @abstractmethod
    def phases(self) -> None:
        """Let it all happen."""

    def carry_out(self) -> None:
        """Raises CheckFailed, also for an error of a machine."""
        self.stage.listeners.append(self._on_event)
        try:
            self.phases()
        except CheckFailed:
            raise
        except Exception as error:
            name, now = type(error).__name__, self.stage.network.now
            raise CheckFailed(self, name, now, str(error)) from error

    # -- parts of phases --

    def calm(self) -> None:
        """All faults that don't last for good are over."""
        network = self.stage.network
        network.heal()
        for host in network.hosts():
            if host.is_asleep:
                network.resume(host.peer_id)
            if host.cost:
                network.slow(host.peer_id, 0.0)

    def pass_time(self, seconds: float) -> None:
        end = self.stage.network.now + seconds
        while self.stage.network.now < end:
            self.stage.run_for(min(LOOKS_EVERY, end - self.stage.network.now))
            self.each(lambda check: check.look())

    def each(self, ask: Callable[[Check], None]) -> None:
        """Ask every check."""
        for check in self.watching:
            self.judge(check, ask)

    def judge(self, check: Check, ask: Callable[[Any], None]) -> None:
        """Ask one; what it finds is told as its failure."""
        try:
            ask(check)
        except Violation as violation:
            now, name = self.stage.network.now, type(check).__name__
            raise CheckFailed(self, name, now, str(violation)) from violation

    def _on_event(self, peer: PeerId, event: Event) -> None:
        self.each(lambda check: check.on_event(peer, event))

    def to_json(self, why: str = "") -> dict[str, Any]:
        """A regression file: this setting, these faults, and what they once showed."""
        return {"why": why, "setting": asdict(self.setting), "faults": self.schedule.to_json()}


def setting_from_json(kind: type[Any], values: dict[str, Any]) -> Any:
    """A setting of this kind, as `to_json` wrote it."""
    known = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**known)


def shrink(failure: CheckFailed) -> CheckFailed:
    """Leave out every fault without which the same check still fails."""
    index = 0
    while index < len(failure.run.schedule.faults):
        fewer = failure.run.schedule.without(index)
        try:
            replace(failure.run, schedule=fewer).carry_out()
        except CheckFailed as smaller:
            if smaller.check == failure.check:
                failure = smaller
                continue
        index += 1
    return failure


def command(
    run_seed: Callable[[int], object],
    program: str,
    description: str | None,
    arguments: Sequence[str] | None,
) -> int:
    """Many seeds, one text for each failure, and files to play them again."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
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
                _keep(options.failures, seed, small)
    print(f"{options.seeds} seeds from {options.first}: {failed} failed")
    sys.stdout.flush()
    return 1 if failed else 0


def _keep(directory: Path, seed: int, failure: CheckFailed) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = failure.run.to_json(f"{failure.check}: {failure.reason}")
    (directory / f"seed-{seed}.json").write_text(json.dumps(values, indent=1) + "\n")
