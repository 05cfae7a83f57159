"""Same-host pulls beside bare `process_vm_readv`, with huge pages and without.

    python benchmarks/same_host.py                     both kinds of memory, about three minutes
    python benchmarks/same_host.py --only huge --size 256M --rounds 5

A source and three pullers, a process each: one that reads with one thread, two that read with
two. In each round the source writes new bytes before each measurement; ours and the bare ones
take turns at being first, and ratios are taken within the round. Bare memory is of the same
kind as the registered: as the allocator gives it (small pages), or collapsed into huge ones.
What is reported is the median of the ratios; results are saved in
benchmarks/results/same_host.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import machine
from figures import Figure, Measured, Rounds, case_options, run_cases
from worker import Cluster, Remote

from tensorhub_p2p.config import Config, MemoryConfig, PullConfig
from tensorhub_p2p.transfer import native_loops

KINDS = {"huge": "huge pages", "small": "small pages"}


class Bench:
    """The processes, their memory, and what is measured in a round."""

    def __init__(self, workers: list[Remote], size: int, huge: bool) -> None:
        self.source, self.one, self.two, self.third = workers
        self.pullers = [self.one, self.two, self.third]
        self.size, self.version = size, 0
        self.seen = Rounds()
        for worker, replica in zip(workers, ("trainer", "one", "two", "third"), strict=True):
            worker.open("flat", replica, 1, size)
            at = worker.bare_memory(size)
            if huge:
                worker.bare_huge_pages()
                worker.wait_for_huge_pages()
            if worker is self.source:
                self.bare_at = at

    def measures(self) -> dict[str, Callable[[], float]]:
        """By name: what returns seconds."""
        return {
            "bare 1": lambda: self.two.bare_read(*self.bare_at)["seconds"],
            "bare 2": lambda: self.two.bare_read(*self.bare_at, 2)["seconds"],
            "bare 1, hashed": lambda: self.two.bare_read(*self.bare_at, 1, True)["seconds"],
            "bare 2, hashed": lambda: self.two.bare_read(*self.bare_at, 2, True)["seconds"],
            "bare both": lambda: self._both("bare_read", *self.bare_at),
            **self._loops(),
            "one thread": lambda: self._pulled(self.one.replicate("flat")),
            "two threads": lambda: self._pulled(self.two.replicate("flat")),
            "both": lambda: self._both("replicate", "flat"),
        }

    def _loops(self) -> dict[str, Callable[[], float]]:
        if native_loops.why_not:
            return {}
        return {
            "bare 1, our loop": lambda: self.two.loop_read(*self.bare_at)["seconds"],
            "bare 2, our loop": lambda: self.two.loop_read(*self.bare_at, 2)["seconds"],
        }

    def _both(self, command: str, *arguments: object) -> float:
        """Two pullers at once; the seconds of the slower one."""
        for worker in (self.two, self.third):
            worker.begin(command, *arguments)
        results = [worker.result() for worker in (self.two, self.third)]
        return max(result["seconds"] for result in results)

    def _pulled(self, pull: dict[str, Any]) -> float:
        if pull["bytes"] != self.size:
            raise RuntimeError(f"{pull['bytes']} of {self.size} bytes were moved")
        seconds: float = pull["seconds"]
        return seconds

    def round(self, number: int, warm_up: bool = False) -> None:
        measures = self.measures()
        for name in measures if number % 2 else reversed(measures):
            if name.startswith("bare"):
                self.source.write("bare")
            else:
                self._publish()
            seconds = measures[name]()
            if not warm_up:
                self.seen.add(name, seconds)

    def _publish(self) -> None:
        if self.version:
            self.source.unpublish("flat")
        self.source.write("flat")
        self.version += 1
        self.source.publish("flat", self.version)
        self.source.wait_for_digests("flat")

    def check(self) -> None:
        """What was moved must be there: a fast benchmark of nothing is worth nothing."""
        for puller in self.pullers:
            puller.replicate("flat")
            if puller.fingerprint("flat") != self.source.fingerprint("flat"):
                raise RuntimeError("the bytes differ")

    def figure(
        self, what: str, name: str, bare: str, target: tuple[str, float], copies: int = 1
    ) -> Figure:
        return self.seen.against(bare, what, name, copies * self.size, target)


def measure(kind: str, options: argparse.Namespace) -> Measured:
    huge = kind == "huge"
    memory = MemoryConfig(huge_pages=huge, huge_page_load=0.9)
    configs = [Config(memory=memory, pull=PullConfig(reader_threads=n)) for n in (2, 1, 2, 2)]
    with Cluster(4, each=[{"config": c} for c in configs], transports=["cma"]) as workers:
        bench = Bench(workers, options.size, huge)
        bench.round(0, warm_up=True)
        for number in range(options.rounds):
            bench.round(number)
        bench.check()
    figures = [
        bench.figure("one reader thread, against one bare", "one thread", "bare 1", (">=", 0.8)),
        bench.figure("two reader threads, against one bare", "two threads", "bare 1", (">=", 1.2)),
        bench.figure("two pullers at once, against two bare", "both", "bare both", (">=", 0.75), 2),
        Figure(
            "two bare threads, against one",
            machine.median_ratio(bench.seen.values["bare 1"], bench.seen.values["bare 2"]),
            "of bare",
        ),
        *(
            Figure(
                f"{what}, against one bare",
                machine.median_ratio(bench.seen.values["bare 1"], bench.seen.values[name]),
                "of bare",
            )
            for what, name in (
                ("a bare thread that takes digests", "bare 1, hashed"),
                ("two bare threads that take digests", "bare 2, hashed"),
                ("our native loop alone, one thread", "bare 1, our loop"),
                ("our native loop alone, two threads", "bare 2, our loop"),
            )
            if name in bench.seen.values
        ),
    ]
    return figures, bench.seen


def main() -> int:
    options = case_options(__doc__, KINDS, size=1 << 30)
    return run_cases(
        "same_host",
        options,
        lambda kind: measure(kind, options),
        lambda kind: f"{KINDS[kind]}, {options.rounds} rounds",
        lambda _: options.size,
    )


if __name__ == "__main__":
    sys.exit(main())
