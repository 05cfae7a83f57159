"""What the verbs cost besides bytes, among 16 processes: a version's way to others, tiny pulls.

    python benchmarks/control_plane.py             about two minutes
    python benchmarks/control_plane.py --peers 4 --samples 50

Publisher and pullers are other processes than the one that measures, and all of them share
this machine's cores. Times are on the clock that all processes share. The bare figure, taken
in each round, is a small message over plain TCP from the rollout to another of the processes and
back, the mean of three: what one step of a protocol costs here at least. Results are saved in
benchmarks/results/control_plane.json.
"""

from __future__ import annotations

import argparse
import sys
import time

import machine
from figures import Figure, Rounds, announce, finish, record, rounded, show
from worker import Cluster, Remote

TINY = 1024
"""Bytes of what is replicated."""
BARE = 3
"""Bare round trips in each round of measurements."""
SETTLE = 0.02
"""Seconds until those that wait have asked, so that they are told and don't ask."""


class Samples(Rounds):
    """Milliseconds, by what was measured."""

    def add_seconds(self, name: str, seconds: float) -> None:
        self.add(name, seconds * 1e3)

    def figure(self, what: str, name: str, percentile: int, target: float | None = None) -> Figure:
        values = self.values[name]
        bound = None if target is None else ("<=", target)
        value = machine.percentile(values, percentile)
        return Figure(f"{what}, p{percentile}", value, "ms", bound, detail=f"n = {len(values)}")


def measure(workers: list[Remote], samples: int) -> Samples:
    """A trainer, a rollout that waits and pulls, and the others, who are merely there.

    Trainer and rollout change, so that owners of the records are near and far.
    """
    seen, number = Samples(), len(workers)
    ports = [worker.bare_echo() for worker in workers]
    rounds = max(1, samples // number)
    for turn in range(number):
        trainer, rollout = workers[turn], workers[(turn + 1) % number]
        model = f"tiny-{turn}"
        trainer.open(model, "trainer", 1, TINY)
        rollout.open(model, "rollout", 1, TINY)
        trainer.publish(model, 0)
        rollout.replicate(model)
        others = [ports[(turn + 2 + step) % number] for step in range(number - 2)] or ports
        for version in range(1, rounds + 1):
            _round(seen, trainer, rollout, model, version)
            asked = [others[(version * BARE + step) % len(others)] for step in range(BARE)]
            seen.add_seconds("bare", rollout.bare_round_trip(asked))
    return seen


def _round(seen: Samples, trainer: Remote, rollout: Remote, model: str, version: int) -> None:
    seen.add_seconds("unpublish", trainer.unpublish(model))
    rollout.begin("wait_for", model, version - 1)
    time.sleep(SETTLE)
    began = trainer.publish_at(model, version)
    seen.add_seconds("publish", time.monotonic() - began)
    seen.add_seconds("visible", rollout.result() - began)
    trainer.wait_for_digests(model)
    pull = rollout.replicate(model)
    seen.add_seconds("replicate", pull["seconds"])
    for part in ("waiting", "registering", "moving"):
        seen.add_seconds(part, pull[part])


def figures(seen: Samples) -> list[Figure]:
    bare = machine.percentile(seen.values["bare"], 50)
    trips = {
        name: Figure(
            f"{what}, p50, in bare round trips",
            machine.percentile(seen.values[name], 50) / bare,
            "",
        )
        for name, what in (("visible", "publish() to wait_for()"), ("replicate", "replicate"))
    }
    return [
        seen.figure("a bare round trip to another process", "bare", 50),
        seen.figure("from publish() to wait_for() elsewhere", "visible", 50, 5.0),
        seen.figure("from publish() to wait_for() elsewhere", "visible", 99, 25.0),
        trips["visible"],
        seen.figure("replicate of 1 KiB", "replicate", 50, 10.0),
        seen.figure("replicate of 1 KiB", "replicate", 99),
        trips["replicate"],
        seen.figure("  of it waiting for an answer and a source", "waiting", 50),
        seen.figure("  of it announcing", "registering", 50),
        seen.figure("  of it moving", "moving", 50),
        seen.figure("publish, with the way to the worker", "publish", 50),
        seen.figure("unpublish", "unpublish", 50),
        seen.figure("unpublish", "unpublish", 99),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    options = parser.parse_args()
    facts = announce()
    with Cluster(options.peers) as workers:
        seen = measure(workers, options.samples)
    found = figures(seen)
    print(f"\n{options.peers} processes")
    show(found)
    result = record(found, rounded(seen.values, 3), peers=options.peers)
    return finish("control_plane", facts, {"control_plane": result}, dry=options.dry)


if __name__ == "__main__":
    sys.exit(main())
