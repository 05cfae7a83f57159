"""How fast a pull is, beside the bare cost of moving the same bytes in the same run.

    python benchmarks/pull.py                      everything, about three minutes
    python benchmarks/pull.py --only cma --size 256M --rounds 5

Every case starts its own worker processes, one peer each. In each round the source writes
new bytes before each measurement, ours and the bare one take turns at being first, and a
ratio is taken; what is reported is the median of the ratios. All memory was touched once
before, on both sides and for both. Results are saved in benchmarks/results/pull.json;
`python benchmarks/report.py` puts them into docs/performance.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import machine
from figures import MIB, Figure, Measured, Rounds, case_options, run_documented
from worker import Cluster, Remote

from tensorhub_p2p.config import Config, MemoryConfig

PUBLISHES = 40
LATENCY_SAMPLES = 200


Case = Callable[[argparse.Namespace], Measured]


# --- one big tensor against the bare figure ----------------------------------------------


class Pair:
    """A source and a target of the same tensors, and bare memory of the same kind in both."""

    def __init__(self, source: Remote, target: Remote, size: int) -> None:
        self.source, self.target, self.size = source, target, size
        self.version = 0
        source.open("flat", "trainer", 1, size)
        target.open("flat", "rollout", 1, size)
        self.bare_at = source.bare_memory(size)
        target.bare_memory(size)

    def republish(self, *, digests_taken: bool) -> None:
        """Publish new bytes under the next version."""
        if self.version:
            self.source.unpublish("flat")
        self.source.write("flat")
        self.version += 1
        self.source.publish("flat", self.version)
        if digests_taken:
            self.source.wait_for_digests("flat")

    def pull(self, *, digests_taken: bool = True) -> dict[str, Any]:
        self.republish(digests_taken=digests_taken)
        return self.checked(self.target.replicate("flat"))

    def first_pull(self) -> Figure:
        """The pull of a fresh process, in which everything is made that a pull needs."""
        self.republish(digests_taken=True)
        extra = self.checked(self.target.replicate_peak("flat"))["extra_bytes"]
        return Figure("peak extra memory of the puller", extra / MIB, "MiB", ("<=", 64.0))

    def checked(self, pull: dict[str, Any]) -> dict[str, Any]:
        if pull["bytes"] != self.size:
            raise RuntimeError(f"{pull['bytes']} of {self.size} bytes were moved")
        return pull

    def compare(self, *models: str) -> None:
        """What was moved must be there: a fast benchmark of nothing is worth nothing."""
        for model in models:
            if self.source.fingerprint(model) != self.target.fingerprint(model):
                raise RuntimeError(f"the bytes of {model} differ")


def against_bare(
    pair: Pair, rounds: int, bare: Callable[[], dict[str, float]], *, fresh: bool
) -> Rounds:
    """`rounds` of ours and bare, taking turns; `fresh`: also the pull right after publish."""
    seen = Rounds()

    def ours() -> None:
        seen.add_pull("pull", pair.pull())

    def right_after() -> None:
        seen.add_pull("fresh", pair.pull(digests_taken=False))

    def plain() -> None:
        pair.source.write("bare")
        result = bare()
        seen.add("bare", result["seconds"])
        seen.add("bare cpu", result["cpu"])

    steps = [plain, ours, right_after] if fresh else [plain, ours]
    for number in range(rounds):
        for step in steps if number % 2 else reversed(steps):
            step()
    pair.compare("flat", "bare")
    return seen


def cma(options: argparse.Namespace) -> Measured:
    """Memory of another process on this machine, as the allocator gave it (small pages)."""
    config = Config(memory=MemoryConfig(huge_pages=False))
    with Cluster(2, config=config, transports=["cma"]) as (source, target):
        pair = Pair(source, target, options.size)
        memory = pair.first_pull()
        seen = against_bare(
            pair, options.rounds, lambda: target.bare_read(*pair.bare_at), fresh=True
        )
    size = pair.size
    return [
        seen.against("bare", "cma, the whole call", "pull", size, (">=", 0.7)),
        seen.against("bare", "cma, while bytes move", "pull moving", size),
        seen.against("bare", "cma, right after publish, the whole call", "fresh", size),
        seen.against("bare", "cma, right after publish, while bytes move", "fresh moving", size),
        memory,
    ], seen


def tcp(options: argparse.Namespace) -> Measured:
    """Loopback, in the clear."""
    with Cluster(2, transports=["tcp"]) as (source, target):
        pair = Pair(source, target, options.size)
        memory = pair.first_pull()
        target.bare_target(source.bare_source())
        seen = against_bare(pair, options.rounds, target.bare_receive, fresh=False)
    return [
        seen.against("bare", "tcp, the whole call", "pull", pair.size, (">=", 0.75)),
        seen.against("bare", "tcp, while bytes move", "pull moving", pair.size),
        memory,
    ], seen


def tls(options: argparse.Namespace) -> Measured:
    """Loopback, in TLS 1.3, beside bare streams in the clear. A quarter of the size."""
    with Cluster(2, transports=["tcp"], secret="a secret for the benchmark") as workers:
        pair = Pair(*workers, options.size // 4)
        memory = pair.first_pull()
        pair.target.bare_target(pair.source.bare_source())
        seen = against_bare(pair, options.rounds, pair.target.bare_receive, fresh=False)
    return [
        seen.against("bare", "tcp with TLS 1.3, the whole call", "pull", pair.size),
        memory,
    ], seen


# --- the control plane -------------------------------------------------------------------


def publish(options: argparse.Namespace) -> Measured:
    """How long `publish` takes, for little and for much, among four peers."""
    seen, sizes = Rounds(), {"8 MiB": 8 * MIB, "1 GiB": options.size}
    with Cluster(4) as workers:
        trainer = workers[0]
        for model, size in sizes.items():
            trainer.open(model, "trainer", 1, size)
        for version in range(PUBLISHES):
            for model in sizes if version % 2 else reversed(sizes):
                seen.add(model, trainer.publish(model, version) * 1e3)
                seen.add(f"{model} unpublish", trainer.unpublish(model) * 1e3)
    return [
        _spread(f"publish of {model}, median", seen.values[model], ("<=", 5.0)) for model in sizes
    ], seen


def latency(options: argparse.Namespace) -> Measured:
    """What a pull costs besides its bytes, and how fast a new version is seen, among four."""
    seen = Rounds()
    with Cluster(4) as workers:
        trainer, rollout = workers[1], workers[2]
        trainer.open("tiny", "trainer", 1, 1024)
        rollout.open("tiny", "rollout", 1, 1024)
        for version in range(LATENCY_SAMPLES):
            if version:
                trainer.unpublish("tiny")
                rollout.begin("wait_for", "tiny", version - 1)
                time.sleep(0.01)  # until it waits
                began = trainer.publish_at("tiny", version)
                seen.add("visible", (rollout.result() - began) * 1e3)
            else:
                trainer.publish("tiny", version)
            trainer.wait_for_digests("tiny")
            seen.add("replicate", rollout.replicate("tiny")["seconds"] * 1e3)
    return [
        _spread("replicate of 1 KiB, median", seen.values["replicate"]),
        _spread("from publish() to wait_for() elsewhere, median", seen.values["visible"]),
    ], seen


def _spread(
    what: str, milliseconds: list[float], target: tuple[str, float] | None = None
) -> Figure:
    tail = machine.percentile(milliseconds, 99)
    median = machine.percentile(milliseconds, 50)
    return Figure(what, median, "ms", target, detail=f"p99 {tail:.2f} ms, n = {len(milliseconds)}")


# --- running -----------------------------------------------------------------------------

CASES: dict[str, Case] = {
    "cma": cma,
    "tcp": tcp,
    "tls": tls,
    "publish": publish,
    "latency": latency,
}


def main() -> int:
    options = case_options(__doc__, CASES, size=1 << 30)
    return run_documented("pull", options, CASES)


if __name__ == "__main__":
    sys.exit(main())
