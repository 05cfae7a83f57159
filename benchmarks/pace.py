"""A trainer that publishes faster than rollouts can pull: does either of them starve?

    python benchmarks/pace.py                      a minute: steps of 0.5 s, pulls of 2 s
    python benchmarks/pace.py --seconds 20 --step 0.25

The trainer publishes, lets others read for a step, unpublishes and writes new weights. The
rollouts replicate "latest" all the time, with reads slowed down so that each pull takes its
time. Printed is how both got on, and how far behind the newest version each pull was when
it ended. Results are saved in benchmarks/results/pace.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import machine
from figures import MIB, Figure, announce, save, show
from worker import Cluster, Remote

from tensorhub_p2p.protocol.layout import chunk_bytes_for

SHARD_BYTES = 8 * MIB
CHUNKS = -(-SHARD_BYTES // chunk_bytes_for(SHARD_BYTES))
READERS = 2
"""Reader threads of one pull (PullConfig.reader_threads)."""


def run(workers: list[Remote], options: argparse.Namespace) -> dict[str, Any]:
    trainer, *rollouts = workers
    trainer.open("policy", "trainer", 1, SHARD_BYTES)
    for number, rollout in enumerate(rollouts):
        rollout.open("policy", f"rollout-{number}", 1, SHARD_BYTES)
        rollout.slow_reads(options.pull * READERS / CHUNKS)
    until = time.monotonic() + options.seconds
    trainer.begin("train", "policy", until, options.step)
    for rollout in rollouts:
        rollout.begin("follow", "policy", until)
    return {"trainer": trainer.result(), "rollouts": [rollout.result() for rollout in rollouts]}


def figures(seen: dict[str, Any], options: argparse.Namespace) -> list[Figure]:
    trainer = seen["trainer"]
    published: list[tuple[int, float]] = trainer["published"]
    unpublishes = [seconds * 1e3 for seconds in trainer["unpublishes"]]
    lags, pulls = [], [pull for rollout in seen["rollouts"] for pull in rollout["pulls"]]
    for pull in pulls:
        newest = max((v for v, at in published if at <= pull["ended"]), default=0)
        lags.append(newest - pull["version"])
    number = len(seen["rollouts"])
    errors = sum(len(rollout["errors"]) for rollout in seen["rollouts"])
    return [
        Figure("versions published", len(published), "", detail=f"{options.seconds:g} s"),
        Figure("pulls by a rollout", len(pulls) / number, "", detail=f"{number} rollouts"),
        Figure(
            "seconds of a pull, p50", machine.percentile([p["seconds"] for p in pulls], 50), "s"
        ),
        Figure("versions behind at its end, mean", sum(lags) / max(1, len(lags)), ""),
        Figure("versions behind at its end, most", max(lags, default=0), ""),
        Figure("unpublish, p50", machine.percentile(unpublishes, 50), "ms"),
        Figure("unpublish, p99", machine.percentile(unpublishes, 99), "ms"),
        Figure("offloads made by the trainer's peer", trainer["offloads"], ""),
        Figure("calls that failed", errors, ""),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step", type=float, default=0.5, help="seconds between versions")
    parser.add_argument("--pull", type=float, default=2.0, help="seconds of a pull")
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    options = parser.parse_args()
    facts = announce()
    with Cluster(1 + options.rollouts) as workers:
        seen = run(workers, options)
    found = figures(seen, options)
    print()
    show(found)
    for rollout in seen["rollouts"]:
        for error in rollout["errors"][:5]:
            print("   ", error)
    if not options.dry:
        case = {**vars(options), "figures": [vars(figure) for figure in found]}
        save("pace", facts, {"pace": case})
    return 0


if __name__ == "__main__":
    sys.exit(main())
