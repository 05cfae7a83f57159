"""What being read costs a trainer, and that it is read on while its Python stands still.

    python benchmarks/trainer_slowdown.py                    about three minutes, tcp as root
    python benchmarks/trainer_slowdown.py --only cma --rounds 5

A trainer publishes 256 MiB and runs a loop of matrix products on one thread, pinned to one core;
whoever reads it is pinned to another one. In each round it runs undisturbed, is pulled from over
and over by new replicas, and, for `cma`, is read by a bare `process_vm_readv` loop at the rate
that the pulls had. A slow-down is the loop's rate alone over its rate meanwhile; of the rounds
the median counts. `tcp` crosses a link of 1 Gbit/s between two network namespaces.

`gil`: the source holds Python's lock for ten seconds, in one call into C, one second after a pull
of 1 GiB began that lasts about as long; what comes meanwhile, against as many seconds of an
undisturbed pull. `pages`: the loop in the second after 1 GiB was registered. Results are saved in
benchmarks/results/trainer_slowdown.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import machine
import testbed
from figures import (
    Figure,
    Measured,
    Rounds,
    announce,
    case_options,
    finish,
    record,
    rounded,
    show,
    skipped,
)
from worker import Cluster, Remote

SIZE = 256 << 20
LINK_SIZE = 64 << 20
LONG_SIZE = 1 << 30
CHUNK_PAUSE = 0.15
"""Seconds that each chunk of 8 MiB takes longer over `cma`, so that a pull lasts ten seconds."""
SECONDS = 4.0
"""Of one measurement."""
MBIT = 1000
GIL_SECONDS = 10.0
TRAINER_CORE, READER_CORE = 0, 1

Case = Callable[[argparse.Namespace], Measured]


def start(source: Remote, target: Remote, size: int) -> tuple[int, int]:
    """A published model at the trainer; returns where its bare memory is."""
    source.open("flat", "trainer", 1, size)
    where: tuple[int, int] = source.bare_memory(size)
    target.bare_memory(size)
    source.wait_for_huge_pages()
    source.publish("flat", 1)
    source.wait_for_digests("flat")
    source.pin(TRAINER_CORE)
    target.pin_all(READER_CORE)
    return where


def beside(source: Remote, target: Remote, command: str, *arguments: object) -> tuple[float, float]:
    """The loop while the target is at something: (steps a second, bytes a second read)."""
    until = time.monotonic() + SECONDS
    target.begin(command, *arguments, until)
    steps: float = source.compute(until)
    read: int = target.result()
    return steps, read / SECONDS


@contextmanager
def linked() -> Iterator[list[Remote]]:
    """The two on hosts of their own, with a link in between."""
    with testbed.Testbed(hosts=2, mbit=MBIT) as bed:
        each = [
            {"bind": f"{bed[i].address}:0", "insecure": True, "namespace": bed[i].namespace}
            for i in (0, 1)
        ]
        with Cluster(2, each=each, transports=["tcp"]) as workers:
            yield workers


def slowdowns(
    source: Remote, target: Remote, rounds: int, bare_at: tuple[int, int] | None, size: int
) -> Rounds:
    seen = Rounds()
    for _ in range(rounds):
        alone = source.compute(time.monotonic() + SECONDS)
        steps, rate = beside(source, target, "pull_again_and_again", "flat", size)
        seen.add("ours", alone / steps)
        seen.add("rate", rate)
        if bare_at is not None:
            steps, bare_rate = beside(source, target, "bare_read_at", *bare_at, rate)
            seen.add("bare", alone / steps)
            seen.add("bare rate", bare_rate)
    return seen


def cma(options: argparse.Namespace) -> Measured:
    """Read by another process of the machine, as fast as it can."""
    with Cluster(2, transports=["cma"]) as (source, target):
        seen = slowdowns(source, target, options.rounds, start(source, target, SIZE), SIZE)
    ours, bare = (machine.percentile(seen.values[name], 50) for name in ("ours", "bare"))
    told = f"{ours:.3f} against {bare:.3f}, at {_gigabytes(seen, 'rate')} and "
    told += _gigabytes(seen, "bare rate")
    return [
        Figure("slow-down of the trainer, against a bare loop's", ours / bare, "x", ("<=", 1.3)),
        Figure("the time lost, against a bare loop's", (ours - 1) / (bare - 1), "x", detail=told),
    ], seen


def tcp(options: argparse.Namespace) -> Measured:
    """Read over a link of 1 Gbit/s."""
    with linked() as (source, target):
        start(source, target, LINK_SIZE)
        seen = slowdowns(source, target, options.rounds, None, LINK_SIZE)
    slower = machine.percentile(seen.values["ours"], 50)
    told = f"at {_gigabytes(seen, 'rate')}"
    return [Figure("slow-down of the trainer", slower, "x", ("<=", 1.1), detail=told)], seen


def gil(options: argparse.Namespace) -> Measured:
    """Read while its Python holds the GIL."""
    seen, figures = Rounds(), []
    with Cluster(2, transports=["cma"]) as workers:
        workers[1].slow_reads(CHUNK_PAUSE)
        figures.append(held(*workers, "cma", seen))
    if testbed.why_not() is None:
        with linked() as workers:
            figures.append(held(*workers, "tcp", seen))
    return figures, seen


def pages(options: argparse.Namespace) -> Measured:
    """While it gets huge pages behind 1 GiB that was just registered."""
    seen = Rounds()
    for _ in range(max(3, options.rounds // 2)):
        with Cluster(1, transports=["cma"]) as (trainer,):
            trainer.compute(time.monotonic() + 0.5)
            alone = trainer.compute(time.monotonic() + SECONDS / 2)
            trainer.open("flat", "trainer", 1, LONG_SIZE)
            began = time.monotonic()
            steps = trainer.compute(began + SECONDS / 4)
            trainer.wait_for_huge_pages()
            seen.add("slower", alone / steps)
            seen.add("seconds", time.monotonic() - began)
    told = f"which takes {machine.percentile(seen.values['seconds'], 50):.1f} s"
    slower = machine.percentile(seen.values["slower"], 50)
    return [Figure("slow-down of the trainer meanwhile", slower, "x", detail=told)], seen


def held(source: Remote, target: Remote, name: str, seen: Rounds) -> Figure:
    """What a pull gets in the seconds in which the GIL is held, against as many of a free one."""
    start(source, target, LONG_SIZE)
    target.open("flat", "rollout", 1, LONG_SIZE)
    for version, what in enumerate(("free", "held"), 1):
        if version > 1:
            source.unpublish("flat")
            source.publish("flat", version)
            source.wait_for_digests("flat")
        target.begin("replicate_watched", "flat")
        time.sleep(1.0)
        began, ended = source.hold_gil(GIL_SECONDS if what == "held" else 0.0)
        came = target.result()
        ended = min(came[-1][0], began + GIL_SECONDS)
        at = [
            max((num for when, num in came if when <= edge), default=0) for edge in (began, ended)
        ]
        seen.add(f"{name} {what}", (at[1] - at[0]) / (ended - began))
    free, while_held = (seen.values[f"{name} {what}"][0] for what in ("free", "held"))
    return Figure(
        f"{name}: rate while the GIL is held, against free",
        while_held / free,
        "x",
        bare=free / 1e9,
        ours=while_held / 1e9,
        detail=f'for up to {GIL_SECONDS:g} s; "bare" is ours while it is free',
    )


def _gigabytes(seen: Rounds, name: str) -> str:
    return f"{machine.percentile(seen.values[name], 50) / 1e9:.2f} GB/s"


CASES: dict[str, Case] = {"cma": cma, "tcp": tcp, "gil": gil, "pages": pages}


def main() -> int:
    options = case_options(__doc__, CASES, rounds=7)
    facts, results = announce(), {}
    for name in options.only:
        if skipped(testbed.why_not() if name == "tcp" else None, f"\n{name}: skipped"):
            continue
        figures, seen = CASES[name](options)
        print(f"\n{name}: {CASES[name].__doc__}")
        show(figures)
        samples = rounded(seen.values)
        results[name] = record(figures, samples, size_bytes=SIZE, rounds=options.rounds)
    return finish("trainer_slowdown", facts, results, dry=options.dry)


if __name__ == "__main__":
    sys.exit(main())
