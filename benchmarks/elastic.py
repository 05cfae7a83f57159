"""Rollouts that come and go: how fast a newcomer has the weights. The paper's second one.

    python benchmarks/elastic.py                     about seven minutes; needs root (namespaces)
    python benchmarks/elastic.py --windows 4 --rounds 2

Topology. A trainer and --rollouts pre-emptible rollouts, each on a host of its own, limited to
--mbit each way. In every round the trainer has new weights, the rollouts join at random moments
of a window, take the weights and leave again. The same moments are played for both systems, in
turns: with ours every newcomer joins the cluster, opens, registers and replicates; against it a
star, as point-to-point transfers make one: every newcomer connects to the trainer with UCX over
TCP (UCXX) and receives. A rollout's update lasts from the moment it appears until it has all
bytes. Processes run before and imports are not counted.

A window of 0 is a new version that all want at once. The ideal of an update is what a cable
alone needs; the ideal of a star is what its hub's cable needs, shared evenly among those who are
being served. Results: benchmarks/results/elastic.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

import environments
import machine
from figures import Figure, announce, finish, record, show, skipped
from remote import Remote
from testbed import Testbed, why_not

TARGET = 4.8
BURST_SECONDS = 4.0
"""The window that the target is for: capacity that is given back comes in bursts."""
LEAD_SECONDS = 0.2
"""Until the first may appear, so that all know their moments."""


class Fleet:
    """The processes of one system: the trainer's, and one for each rollout."""

    roles = ("source", "target")
    script = "ours_pulls.py"

    def __init__(self, bed: Testbed, size: int) -> None:
        self._python, self._environment = self.where()
        trainer, rollout = self.roles
        self.trainer = self._process(bed, 0, trainer, size)
        self.rollouts = [self._process(bed, i, rollout, size) for i in range(1, len(bed))]

    def where(self) -> tuple[str, dict[str, str]]:
        """(interpreter, what is added to its environment)"""
        return environments.python_of("ours"), {}

    def _process(self, bed: Testbed, index: int, role: str, size: int) -> Remote:
        settings = {
            "size": size,
            "source": bed[0].address,
            "bind": f"{bed[index].address}:0",
            "transports": ["tcp"],
            "replica": f"rollout-{index}",
        }
        return Remote(
            self._python,
            self.script,
            role,
            settings,
            environment=self._environment,
            start=bed[index].popen,
        )

    def started(self) -> None:
        for process in (self.trainer, *self.rollouts):
            process.started()
        self.about = self.trainer.describe()

    def updates(self, moments: list[float]) -> list[float]:
        """New weights; the rollouts join at these moments from now; the seconds of each."""
        self.trainer.write()
        began = time.monotonic() + LEAD_SECONDS
        self.begin_serving(len(moments))
        for rollout, moment in zip(self.rollouts, moments, strict=True):
            rollout.begin("join_and_take", self.about, began + moment)
        found = [rollout.result() for rollout in self.rollouts]
        self.end_serving()
        wanted = self.trainer.fingerprint()
        if any(rollout.fingerprint() != wanted for rollout in self.rollouts):
            raise RuntimeError("the bytes differ")
        for rollout in self.rollouts:
            rollout.leave()
        return [ended - (began + m) for (_, ended), m in zip(found, moments, strict=True)]

    def begin_serving(self, count: int) -> None:
        """Ours serves by itself."""

    def end_serving(self) -> None:
        """As above."""

    def end(self) -> None:
        for process in (*self.rollouts, self.trainer):
            process.end()


class Star(Fleet):
    """UCX over TCP, everyone from the trainer."""

    roles = ("hub", "spoke")
    script = "ucxx_star.py"

    def where(self) -> tuple[str, dict[str, str]]:
        return environments.python_of("ucxx"), {"UCX_TLS": "tcp"}

    def begin_serving(self, count: int) -> None:
        self.trainer.begin("give_to", count)

    def end_serving(self) -> None:
        self.trainer.result()


def shared_hub(moments: list[float], alone: float) -> list[float]:
    """The updates of a perfect star: the hub's cable, shared evenly among those on it."""
    left: dict[int, float] = {}
    done: dict[int, float] = {}
    coming = sorted(range(len(moments)), key=lambda i: moments[i])
    now = 0.0
    while coming or left:
        next_come = moments[coming[0]] if coming else float("inf")
        next_done = now + min(left.values()) * len(left) if left else float("inf")
        until = min(next_come, next_done)
        for index in left:
            left[index] -= (until - now) / len(left)
        now = until
        if next_come <= next_done:
            left[coming.pop(0)] = alone
        for index in [index for index, rest in left.items() if rest <= 1e-9]:
            done[index] = now - moments[index]
            del left[index]
    return [done[index] for index in range(len(moments))]


def window(
    options: argparse.Namespace, length: float, fleets: dict[str, Fleet]
) -> tuple[list[Figure], dict[str, Any]]:
    alone = options.size * 8 / (options.mbit * 1e6)
    means: dict[str, list[float]] = {"ours": [], "star": [], "perfect star": []}
    worst = {"ours": 0.0, "star": 0.0}
    for number in range(options.rounds):
        random_moments = random.Random(f"{options.seed} {length} {number}")
        moments = [random_moments.uniform(0, length) for _ in range(options.rollouts)]
        for name in sorted(fleets, reverse=bool(number % 2)):
            found = fleets[name].updates(moments)
            means[name].append(statistics.mean(found))
            worst[name] = max(worst[name], *found)
        means["perfect star"].append(statistics.mean(shared_hub(moments, alone)))
    median = {name: statistics.median(values) for name, values in means.items()}
    what = f"joining within {length:g} s" if length else "all at once"
    return [
        Figure(
            f"{what}: a mean update, faster than the star's by",
            machine.median_ratio(means["star"], means["ours"]),
            "×",
            (">=", TARGET) if length == BURST_SECONDS else None,
            detail=f"star {median['star']:.2f} s, ours {median['ours']:.2f} s; "
            f"the slowest {worst['star']:.2f} s, {worst['ours']:.2f} s",
        ),
        Figure(
            f"{what}: faster than a perfect star's by",
            machine.median_ratio(means["perfect star"], means["ours"]),
            "×",
            detail=f"perfect star {median['perfect star']:.2f} s, a cable alone {alone:.2f} s",
        ),
    ], {"window": length, "means": means, "worst": worst}


def main() -> int:
    options = _options()
    if skipped(why_not(), "not measured"):
        return 0
    topology = (
        f"1 trainer and {options.rollouts} rollouts, {options.mbit:g} Mbit/s a host each way, "
        f"{options.size >> 20} MiB, {options.rounds} rounds a window"
    )
    facts = announce(topology)
    results: dict[str, Any] = {}
    with Testbed(hosts=1 + options.rollouts, mbit=options.mbit) as bed:
        fleets: dict[str, Fleet] = {"ours": Fleet(bed, options.size)}
        try:
            fleets["star"] = Star(bed, options.size)
            for fleet in fleets.values():
                fleet.started()
            for fleet in fleets.values():
                fleet.updates([0.0] * options.rollouts)  # warms up
            for length in options.windows:
                figures, seen = window(options, length, fleets)
                show(figures)
                about = {"command": f"elastic.py --windows {length:g}", "topology": topology}
                results[f"window of {length:g} s"] = record(figures, seen, **about)
                if not options.dry:  # at once: what follows may be broken off
                    machine.save("elastic", facts, results)
        finally:
            for fleet in fleets.values():
                fleet.end()
    return finish("elastic", facts, results, dry=options.dry)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=lambda text: int(text) << 20, default=64 << 20, help="MiB")
    parser.add_argument("--mbit", type=float, default=250)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument(
        "--windows", type=float, nargs="+", default=[4.0, 0.0, 16.0], help="seconds"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", default="elastic")
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
