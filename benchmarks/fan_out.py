"""How flat a swarm is: one source, n pullers that start together, every host's cable limited.

    python benchmarks/fan_out.py                       n = 1, 8 and 16, some five minutes
    python benchmarks/fan_out.py --pullers 1 4 --rounds 3 --size 64M

Every peer lives on a host of its own (testbed.py: a network namespace, its cable limited each
way), so all bytes cross cables; the limit is low enough that not the machine's own cores are
what limits. T(n) is the time from the moment at which all pullers are told to pull until the
last of them has all of it, verified. In a round each n is measured once, in an order that
changes from round to round, and T(n)/T(1) is taken; reported are medians. A star would give n.

Bytes received by a puller are what its cable brought in, with headers of all floors and the control
plane. Results: benchmarks/results/fan_out.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import machine
from figures import MIB, Figure, announce, command_line, finish, parse_size, record, show, skipped
from testbed import Testbed, why_not
from worker import Remote

TARGETS = {8: 1.15, 16: 1.22}
MAX_RECEIVED = 1.02


class Swarm:
    """A source and pullers, each on a host of its own."""

    def __init__(self, pullers: int, mbit: float, size: int) -> None:
        self.size = size
        self.bed = Testbed(hosts=pullers + 1, mbit=mbit)
        self.workers: list[Remote] = []
        self.version = 0
        try:
            seeds: list[str] = []
            for index, host in enumerate(self.bed.hosts):
                options = {"bind": f"{host.address}:0", "host": host.namespace, "insecure": True}
                options["namespace"] = host.namespace
                self.workers.append(Remote(f"worker-{index}", seeds, options))
                seeds = seeds or [self.workers[0].address()]
            for worker in self.workers:
                while worker.members() < len(self.workers):
                    time.sleep(0.02)
            self._each("open", lambda i: ("flat", f"replica-{i}", 1, size))
        except BaseException:
            self.close()
            raise

    @property
    def source(self) -> Remote:
        return self.workers[0]

    def _each(self, command: str, arguments: Any) -> list[Any]:
        for index, worker in enumerate(self.workers):
            worker.begin(command, *arguments(index))
        return [worker.result() for worker in self.workers]

    def publish(self) -> None:
        """New bytes under the next version, digests taken."""
        if self.version:
            self.source.unpublish("flat")
        self.source.write("flat")
        self.version += 1
        self.source.publish("flat", self.version)
        self.source.wait_for_digests("flat")

    def pull(self, pullers: int) -> dict[str, Any]:
        """Have the first so many pull at once; seconds and bytes."""
        self.publish()
        chosen = range(1, pullers + 1)
        before = [self.bed[i].traffic() for i in range(len(self.bed))]
        began = time.perf_counter()
        for i in chosen:
            self.workers[i].begin("replicate", "flat", self.version)
        pulls = [self.workers[i].result() for i in chosen]
        seconds = time.perf_counter() - began
        after = [self.bed[i].traffic() for i in range(len(self.bed))]
        return {
            "seconds": seconds,
            "each": [pull["seconds"] for pull in pulls],
            "received": max(pull["bytes"] for pull in pulls) / self.size,
            "wire": max(after[i][1] - before[i][1] for i in chosen) / self.size,
            "source_sent": (after[0][0] - before[0][0]) / self.size,
            "cpu": sum(pull["cpu"] for pull in pulls),
            "retried": sum(pull["retried"] for pull in pulls),
        }

    def compare(self, pullers: int) -> None:
        """RuntimeError unless all of them have what the source published."""
        right = self.source.fingerprint("flat")
        for worker in self.workers[1 : pullers + 1]:
            if worker.fingerprint("flat") != right:
                raise RuntimeError(f"{worker.name} has other bytes than the source")

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.bed.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> int:
    options = _options()
    if skipped(why_not()):
        return 0
    size, counts = options.size, sorted({1, *options.pullers})
    topology = (
        f"1 source and up to {max(counts)} pullers, {options.mbit:g} Mbit/s a host each way, "
        f"{size / MIB:g} MiB"
    )
    facts = announce(f"{topology}, {options.rounds} rounds")
    rounds: dict[int, list[dict[str, Any]]] = {n: [] for n in counts}
    with Swarm(max(counts), options.mbit, size) as swarm:
        swarm.pull(1)
        for number in range(options.rounds):
            order = counts[number % len(counts) :] + counts[: number % len(counts)]
            for n in order:
                seen = swarm.pull(n)
                rounds[n].append(seen)
                told = f"{seen['seconds']:6.2f} s, first {min(seen['each']):.2f} s"
                print(f"  round {number}, n = {n:3}: {told}  {_told(seen)}", flush=True)
                swarm.compare(n)
    figures = [figure for n in counts for figure in _figures(n, rounds, size, options.mbit)]
    show(figures)
    case = record(figures, rounds, command=command_line(), topology=topology)
    return finish("fan_out", facts, {topology: case}, dry=options.dry)


def _told(seen: dict[str, Any]) -> str:
    return (
        f"source sent {seen['source_sent']:.3f}, received {seen['received']:.3f}, on the wire "
        f"{seen['wire']:.3f} x the model; {seen['cpu']:.1f} s of CPU"
    )


def _figures(
    n: int, rounds: dict[int, list[dict[str, Any]]], size: int, mbit: float
) -> list[Figure]:
    seconds = [seen["seconds"] for seen in rounds[n]]
    if n == 1:
        ideal = size * 8 / mbit / 1e6
        return [Figure("T(1)", statistics.median(seconds), "s", detail=f"cable: {ideal:.2f} s")]
    ratio = machine.median_ratio(seconds, [seen["seconds"] for seen in rounds[1]])
    target = ("<=", TARGETS[n]) if n in TARGETS else None
    received = statistics.median(seen["wire"] for seen in rounds[n])
    sent = statistics.median(seen["source_sent"] for seen in rounds[n])
    busy = statistics.median(seen["cpu"] / seen["seconds"] for seen in rounds[n])
    told = f"the source sent {sent:.2f} x the model; pullers kept {busy:.1f} cores busy"
    return [
        Figure(f"T({n}) / T(1); a star: {n}", ratio, "", target, detail=told),
        Figure(
            f"bytes that the cable of a puller of {n} brought in, the most",
            *(received, "x the model", ("<=", MAX_RECEIVED)),
            detail="with headers, news and what came twice",
        ),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pullers", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=parse_size, default=128 * MIB, help="bytes, or 64M")
    parser.add_argument("--mbit", type=float, default=250.0)
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
