"""Version after version through each transport: does anything grow?

    python benchmarks/many_versions.py                              all that work here
    python benchmarks/many_versions.py --transport cma --versions 50

A publisher and a puller, a process each, go through 200 versions of 256 MiB. After a warm-up of 20
versions and at the end, what each process holds is counted: resident memory (after the
garbage collector ran), file descriptors, threads, and exports (memory that transports have
registered for others). Results are saved in benchmarks/results/many_versions.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from figures import announce, parse_size, save
from worker import Cluster, Remote

from tensorhub_p2p.cli.doctor import trouble
from tensorhub_p2p.config import TRANSPORTS

COUNTS = ("descriptors", "threads", "exports")
MEMORY_SLACK = 8 << 20
"""Bytes by which resident memory may differ: allocators keep some, more or less."""
SETTLE_SECONDS = 2.0
"""Until readers that ended are gone."""


def run(transport: str, options: argparse.Namespace) -> dict[str, Any]:
    """Go through the versions; what each side held after the warm-up, and what at the end."""
    with Cluster(2, transports=[transport]) as workers:
        source, target = workers
        for worker, replica in ((source, "trainer"), (target, "rollout")):
            worker.open("flat", replica, 1, options.size)
            worker.wait_for_huge_pages()
        began, seconds = time.monotonic(), 0.0
        before: list[dict[str, int]] = []
        for version in range(1, options.versions + 1):
            if version > 1:
                source.unpublish("flat")
            source.write("flat")
            source.publish("flat", version)
            pull = target.replicate("flat")
            if pull["bytes"] != options.size or pull["transports"] != [transport]:
                raise RuntimeError(f"version {version}: {pull}")
            seconds += pull["seconds"]
            if version == options.warm_up:
                before = _held(workers)
        after = _held(workers)
        if source.fingerprint("flat") != target.fingerprint("flat"):
            raise RuntimeError("the bytes differ")
    return {
        "transport": transport,
        "versions": options.versions,
        "warm_up": options.warm_up,
        "size_bytes": options.size,
        "real_seconds": round(time.monotonic() - began, 1),
        "mean_pull_seconds": round(seconds / options.versions, 4),
        "before": dict(zip(("source", "puller"), before, strict=True)),
        "after": dict(zip(("source", "puller"), after, strict=True)),
    }


def _held(workers: list[Remote]) -> list[dict[str, int]]:
    time.sleep(SETTLE_SECONDS)
    return [worker.held() for worker in workers]


def grew(result: dict[str, Any]) -> list[str]:
    """What there is more of at the end, beyond the slack."""
    found = []
    for side, after in result["after"].items():
        before = result["before"][side]
        found += [f"{side}: {what}" for what in COUNTS if after[what] > before[what]]
        if after["memory"] > before["memory"] + MEMORY_SLACK:
            found.append(f"{side}: memory")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--size", type=parse_size, default=256 << 20, help="bytes, as 256M")
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    options = parser.parse_args()
    if not 0 < options.warm_up < options.versions:
        parser.error("the warm-up must be shorter than the run")
    facts = announce()
    results: dict[str, dict[str, Any]] = {}
    for transport in options.transport:
        why_not = trouble(transport)
        if why_not is not None:
            print(f"\n{transport}: {why_not}")
            continue
        result = results[transport] = run(transport, options)
        result["grew"] = grew(result)
        print(
            f"\n{transport}: {options.versions} versions of {options.size >> 20} MiB in "
            f"{result['real_seconds']} s, {result['mean_pull_seconds']} s a pull"
        )
        for side, after in result["after"].items():
            before = result["before"][side]
            told = [f"{what} {before[what]} -> {after[what]}" for what in COUNTS]
            memory = f"memory {before['memory'] / 2**20:.1f} -> {after['memory'] / 2**20:.1f} MiB"
            print(f"  {side:<7} {memory}, {', '.join(told)}")
        print(f"  grew: {', '.join(result['grew']) or 'nothing'}", flush=True)
    if not options.dry:
        save("many_versions", facts, results)
    return int(any(result["grew"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
