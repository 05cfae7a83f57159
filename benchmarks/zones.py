"""Weights for another datacenter: each byte crosses once. The paper's third experiment.

    python benchmarks/zones.py                       8 rollouts; needs root (namespaces)
    python benchmarks/zones.py --rollouts 24 --rounds 1

Topology. A trainer in one zone; the rollouts in another, each on a host of its own, limited to
--inside Mbit/s each way. All that the two zones say to each other goes over one line of --line
Mbit/s each way, the trainer's cable. (A line's delay is not part of it: netem is not in every
kernel.) In every round the trainer has new weights and all rollouts take them at once: with
ours by `replicate`; against it a star, as point-to-point transfers make one: everyone connects
to the trainer with UCX over TCP (UCXX) and receives. The two take turns at being first.

A rollout's stall is how long its call lasts; what is compared is the mean. With ours all have
heard of the new version before (`wait_for`, during which a rollout goes on with what it has).
The ideal of ours is the model once over the line, that of a star once for each rollout. What
crossed is counted at the trainer's cable, headers and the control plane included. Results:
benchmarks/results/zones.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import elastic
import environments
import machine
from figures import Figure, announce, command_line, finish, record, show, skipped
from remote import Remote
from testbed import Testbed, why_not

TARGETS = {24: 19.0}
"""By number of rollouts; a star's ideal is that number, which bounds what can be reached."""
MAX_CROSSED = 1.1
"""Copies of the model over the line, all that surrounds the bytes included."""
AWAY = "away"
SETTLING_SECONDS = 8.0
"""Until the zones know each other."""


class Ours(elastic.Fleet):
    """Rollouts that are there all the time, in a zone of their own."""

    version = 0

    def _process(self, bed: Testbed, index: int, role: str, size: int) -> Remote:
        settings = {
            "size": size,
            "bind": f"{bed[index].address}:0",
            "host": bed[index].namespace,
            "transports": ["tcp"],
            "replica": f"rollout-{index}",
            "zone": AWAY if index else "home",
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
        super().started()
        for index, rollout in enumerate(self.rollouts):
            rollout.start(f"rollout-{index}", [self.about])
        time.sleep(SETTLING_SECONDS)

    def updates(self, moments: list[float]) -> list[float]:
        self.trainer.write()
        self.version += 1
        for rollout in self.rollouts:
            rollout.begin("hear_of", self.version)
        for rollout in self.rollouts:
            rollout.result()
        began = time.monotonic()
        for rollout in self.rollouts:
            rollout.begin("take", self.version)
        found = [rollout.result() for rollout in self.rollouts]
        wanted = self.trainer.fingerprint()
        if any(rollout.fingerprint() != wanted for rollout in self.rollouts):
            raise RuntimeError("the bytes differ")
        return [ended - began for _, ended in found]


def measure(options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    count, size = options.rollouts, options.size
    alone = size * 8 / (options.line * 1e6)
    stalls: dict[str, list[float]] = {"ours": [], "star": []}
    crossed: dict[str, list[float]] = {"ours": [], "star": []}
    with Testbed(hosts=1 + count, mbit=options.inside) as bed:
        bed[0].limit(options.line)
        fleets: dict[str, elastic.Fleet] = {"ours": Ours(bed, size)}
        try:
            try:
                fleets["star"] = elastic.Star(bed, size)
            except environments.Unavailable as reason:
                print(f"no star: {reason}")
            for fleet in fleets.values():
                fleet.started()
            fleets["ours"].updates([0.0] * count)  # warms up
            for number in range(options.rounds):
                for name in sorted(fleets, reverse=bool(number % 2)):
                    before = bed[0].traffic()[0]
                    found = fleets[name].updates([0.0] * count)
                    copies = (bed[0].traffic()[0] - before) / size
                    stalls[name].append(statistics.mean(found))
                    crossed[name].append(copies)
                    told = f"mean {stalls[name][-1]:6.2f} s, slowest {max(found):6.2f} s"
                    print(f"  round {number}, {name:4}: {told}, {copies:.2f} copies", flush=True)
        finally:
            for fleet in fleets.values():
                fleet.end()
    return _figures(count, alone, stalls, crossed), {"stalls": stalls, "crossed": crossed}


def _figures(
    count: int, alone: float, stalls: dict[str, list[float]], crossed: dict[str, list[float]]
) -> list[Figure]:
    ours = statistics.median(stalls["ours"])
    figures = [
        Figure(
            f"{count} rollouts: copies of the model over the line",
            statistics.median(crossed["ours"]),
            "",
            ("<=", MAX_CROSSED),
            detail="ideal 1",
        ),
        Figure(
            f"{count} rollouts: a mean stall, of the line's own time",
            ours / alone,
            "×",
            detail=f"{ours:.2f} s; ideal {alone:.2f} s",
        ),
        Figure(
            f"{count} rollouts: stall less than a perfect star's by",
            statistics.median(count * alone / each for each in stalls["ours"]),
            "×",
            detail=f"ideal {count}",
        ),
    ]
    if stalls["star"]:
        star = statistics.median(stalls["star"])
        target = (">=", TARGETS[count]) if count in TARGETS else None
        ratio = machine.median_ratio(stalls["star"], stalls["ours"])
        what = f"{count} rollouts: stall less than UCX's by"
        figures.append(Figure(what, ratio, "×", target, detail=f"star {star:.2f} s"))
    return figures


def main() -> int:
    options = _options()
    if skipped(why_not(), "not measured"):
        return 0
    topology = (
        f"1 trainer | line of {options.line:g} Mbit/s | {options.rollouts} rollouts, "
        f"{options.inside:g} Mbit/s a host, {options.size >> 20} MiB, {options.rounds} rounds"
    )
    facts = announce(topology)
    figures, samples = measure(options)
    show(figures)
    result = record(
        figures,
        samples,
        command=command_line(),
        topology=topology,
    )
    return finish("zones", facts, {topology: result}, dry=options.dry)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=lambda text: int(text) << 20, default=64 << 20, help="MiB")
    parser.add_argument("--line", type=float, default=100)
    parser.add_argument("--inside", type=float, default=1000)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
