"""How long weights keep GPUs from working: ours beside gloo's broadcast. The paper's first one.

    python benchmarks/stall.py                 about four minutes; needs root (network namespaces)
    python benchmarks/stall.py --rollouts 4 --versions 3

Topology. Every rank that moves bytes has a host of its own, limited to --mbit each way: one
trainer's rank, which has all the weights of its 16, and the rollouts, each a replica of one
shard. Both systems run on the same hosts and take turns, a version each.

What is counted. A broadcast is a call that all make: every rank of the trainer and every
rollout does nothing else until it returns, so the stall is 16 x the trainer's call plus the
rollouts' calls. The 15 trainer ranks that move nothing wait for the one that does; they are
counted and not run. gloo's tensor is cut into pieces that it broadcasts all at once, which
lets its tree overlap them: that was faster than one broadcast of all. With ours the trainer's
ranks wait for `unpublish` before and for `publish` after the optimizer's step, and the rollouts
for their `replicate`. The trainer's next step lasts longer than the rollouts' pulls.

Beside it the ideal: a rollout can't have the weights before its cable has carried them; a
broadcast as fast as that would still hold up everybody for so long.
Results: benchmarks/results/stall.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import environments
import machine
from figures import Figure, announce, finish, record, show, skipped
from remote import Remote
from testbed import Testbed, why_not

TRAINER_RANKS = 16
TARGET = 6.7
TRAINER_TARGET_MS = 10.0
Stall = dict[str, float]
"""Seconds: of one trainer rank, of all rollouts together, of all ranks together, and others."""


class Ranks:
    """The processes of one system: one on every host, the trainer's first. Starts them all."""

    def __init__(
        self,
        bed: Testbed,
        system: str,
        script: str,
        settings: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        self._all: list[Remote] = []
        python = environments.python_of(system)
        for host in bed.hosts:
            own = {
                "rank": host.index,
                "ranks": len(bed),
                "source": bed[0].address,
                "replica": f"rollout-{host.index}",
                "bind": f"{host.address}:0",
                **settings,
            }
            role = "target" if host.index else "source"
            self._all.append(
                Remote(python, script, role, own, environment=environment, start=host.popen)
            )

    def connect(self) -> None:
        """Once all have started."""
        for rank in self._all:
            rank.started()
        self.trainer, *self.rollouts = self._all
        about = self.trainer.describe()
        for rollout in self.rollouts:
            rollout.begin("connect", about)
        self.trainer.accept()
        for rollout in self.rollouts:
            rollout.result()

    def compare(self) -> None:
        """Every rollout must have what the trainer has."""
        wanted = self.trainer.fingerprint()
        if any(rollout.fingerprint() != wanted for rollout in self.rollouts):
            raise RuntimeError("the bytes differ")

    def taken(self) -> list[float]:
        """Every rollout takes the weights, at once; the seconds of each."""
        for rollout in self.rollouts:
            rollout.begin("take")
        return [seconds(rollout.result()) for rollout in self.rollouts]

    def end(self) -> None:
        for rank in self._all:
            rank.end()


def seconds(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def stall(trainer: float, rollouts: list[float]) -> Stall:
    total = TRAINER_RANKS * trainer + sum(rollouts)
    return {"trainer": trainer, "rollouts": sum(rollouts), "total": total, "last": max(rollouts)}


def broadcast(ranks: Ranks) -> Stall:
    ranks.trainer.write()
    ranks.trainer.begin("give")
    rollouts = ranks.taken()
    return stall(seconds(ranks.trainer.result()), rollouts)


def references(ranks: Ranks) -> Stall:
    withdrawn = seconds(ranks.trainer.withdraw())
    ranks.trainer.withdraw_and_write()  # there is nothing left to withdraw
    published = seconds(ranks.trainer.publish())
    found = stall(withdrawn + published, ranks.taken())
    return {**found, "unpublish": withdrawn, "publish": published}


def run(options: argparse.Namespace) -> tuple[list[Figure], dict[str, list[Stall]]]:
    seen: dict[str, list[Stall]] = {"gloo": [], "ours": []}
    size = options.size
    with Testbed(hosts=1 + options.rollouts, mbit=options.mbit) as bed:
        interface = {"GLOO_SOCKET_IFNAME": "eth0"}
        pieces = {"size": size, "pieces": options.pieces}
        gloo = Ranks(bed, "gloo", "gloo_broadcast.py", pieces, interface)
        mine = Ranks(bed, "ours", "ours_pulls.py", {"size": size, "transports": ["tcp"]})
        try:
            gloo.connect()
            mine.connect()
            for version in range(options.versions + 1):
                steps = [("gloo", broadcast, gloo), ("ours", references, mine)]
                for name, step, ranks in steps if version % 2 else reversed(steps):
                    found = step(ranks)
                    if version:  # the first warms up
                        seen[name].append(found)
            for ranks in (gloo, mine):
                ranks.compare()
        finally:
            gloo.end()
            mine.end()
    return figures(options, seen), seen


def figures(options: argparse.Namespace, seen: dict[str, list[Stall]]) -> list[Figure]:
    ideal = options.size * 8 / (options.mbit * 1e6)
    ranks = TRAINER_RANKS + options.rollouts
    gloo, ours = seen["gloo"], seen["ours"]

    def median(found: list[Stall], what: str) -> float:
        return statistics.median(one[what] for one in found)

    ratio = machine.median_ratio([one["total"] for one in gloo], [one["total"] for one in ours])
    perfect = ranks * ideal / median(ours, "total")
    return [
        Figure(
            "total stall a version, less than gloo's by",
            ratio,
            "×",
            (">=", TARGET),
            detail=f"gloo {median(gloo, 'total'):.1f} s, ours {median(ours, 'total'):.1f} s",
        ),
        Figure(
            "stall of a trainer's rank a version, ours",
            1e3 * median(ours, "trainer"),
            "ms",
            ("<=", TRAINER_TARGET_MS),
            detail=f"worst {1e3 * max(one['trainer'] for one in ours):.1f} ms; "
            f"unpublish {1e3 * median(ours, 'unpublish'):.1f}, "
            f"publish {1e3 * median(ours, 'publish'):.1f}; "
            f"gloo {1e3 * median(gloo, 'trainer'):.0f} ms",
        ),
        Figure(
            "the last rollout has it, ours",
            median(ours, "last"),
            "s",
            detail=f"gloo {median(gloo, 'last'):.2f} s, a cable alone {ideal:.2f} s",
        ),
        Figure(
            "total stall, less than a perfect broadcast's by",
            perfect,
            "×",
            detail=f"{ranks} ranks x {ideal:.2f} s; the ideal of ours is "
            f"{options.rollouts} x {ideal:.2f} s",
        ),
    ]


def main() -> int:
    options = _options()
    if skipped(why_not(), "not measured"):
        return 0
    topology = (
        f"{TRAINER_RANKS} trainer ranks and {options.rollouts} rollouts, {options.mbit:g} Mbit/s a "
        f"host each way, {options.size >> 20} MiB, {options.versions} versions"
    )
    facts = announce(topology)
    measured, seen = run(options)
    show(measured)
    result = record(measured, seen, command="stall.py", topology=topology)
    return finish("stall", facts, {"stall": result}, dry=options.dry)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=lambda text: int(text) << 20, default=64 << 20, help="MiB")
    parser.add_argument("--mbit", type=float, default=250)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--pieces", type=int, default=16, help="that gloo broadcasts at once")
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
