"""What a death costs: a source is killed in the middle of pulls over limited cables.

    python benchmarks/failure.py                       all cases, some four minutes
    python benchmarks/failure.py --only spare --rounds 3

Every peer lives on a host of its own (testbed.py), each cable limited both ways. Deaths are
kill -9, and take a peer from the swarm: so each round has a swarm of its own. Three cases:

spare    One puller reads from two that have everything, and one of them is killed when half of
         the bytes are in. Its time against that of an undisturbed pull of the same round, and
         the bytes that it received.
stopped  The same, but it is stopped (SIGSTOP), and goes on when the pull is over.
orphans  The only one that has everything is killed as soon as four pullers hold all chunks
         between them. All four must finish.

Results: benchmarks/results/failure.json.
"""

from __future__ import annotations

import argparse
import functools
import math
import operator
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import machine
from fan_out import Swarm
from figures import MIB, Figure, announce, command_line, finish, parse_size, record, show, skipped
from testbed import why_not
from worker import Remote

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.layout import chunk_bytes_for

SLOWER = 1.1
"""Times the undisturbed pull."""
STALL_OF_A_DEATH, STALL_OF_A_STOP = 0.5, 3.0
"""Seconds beyond the undisturbed pull."""
POLL_SECONDS = 0.02
PATIENCE = 60.0
Round = dict[str, float]


def spare(options: argparse.Namespace) -> Round:
    return _one_of_two(options, Remote.kill)


def stopped(options: argparse.Namespace) -> Round:
    return _one_of_two(options, Remote.stop, Remote.go_on)


def _one_of_two(
    options: argparse.Namespace,
    strike: Callable[[Remote], None],
    mend: Callable[[Remote], None] = lambda _source: None,
) -> Round:
    with Swarm(2, options.mbit, options.size) as swarm:
        source, second, puller = swarm.workers
        swarm.publish()
        second.replicate("flat", swarm.version)
        calm = puller.replicate("flat", swarm.version)
        swarm.publish()
        second.replicate("flat", swarm.version)
        before = swarm.bed[2].traffic()[1]
        puller.begin_replicate("flat", swarm.version)
        chunks = source.have("flat", swarm.version).bit_count()
        _wait(lambda: puller.have("flat", swarm.version).bit_count() >= chunks // 2)
        strike(source)
        seconds = _ended(puller)
        mend(source)
        right = second.fingerprint("flat") == puller.fingerprint("flat")
        came = swarm.bed[2].traffic()[1] - before
    return {
        "calm": calm["seconds"],
        "seconds": seconds,
        "received": came / options.size,
        "finished": float(right),
    }


def _wait(until: Callable[[], bool]) -> None:
    """RuntimeError if it takes too long."""
    give_up = time.monotonic() + PATIENCE
    while not until():
        if time.monotonic() > give_up:
            raise RuntimeError("the pull gets no further")
        time.sleep(POLL_SECONDS)


def _ended(worker: Remote) -> float:
    """Seconds of the pull that it began; infinite if it failed, which is told."""
    try:
        pull: dict[str, Any] = worker.end_replicate()
    except Exception as error:  # noqa: BLE001  it counts as a pull that did not end right
        print(f"  {worker.name}: {type(error).__name__}: {error}")
        return math.inf
    seconds: float = pull["seconds"]
    return seconds


def orphans(options: argparse.Namespace) -> Round:
    with Swarm(4, options.mbit, options.size) as swarm:
        calm = swarm.pull(4)["seconds"]
        swarm.publish()
        right = swarm.source.fingerprint("flat")
        pullers = swarm.workers[1:]
        began = time.perf_counter()
        for worker in pullers:
            worker.begin_replicate("flat", swarm.version)
        everything = swarm.source.have("flat", swarm.version)
        held: list[int] = []

        def hold_everything() -> bool:
            held[:] = [worker.have("flat", swarm.version) for worker in pullers]
            return functools.reduce(operator.or_, held) == everything

        _wait(hold_everything)
        swarm.source.kill()
        for worker in pullers:
            _ended(worker)
        seconds = time.perf_counter() - began
        finished = sum(worker.fingerprint("flat") == right for worker in pullers)
    return {
        "calm": calm,
        "seconds": seconds,
        "finished": float(finished),
        "most_held_by_one": max(map(int.bit_count, held)) / everything.bit_count(),
    }


def of_stopped(rounds: list[Round], _options: argparse.Namespace) -> list[Figure]:
    return [
        _longer("one of two sources stopped at half", rounds, STALL_OF_A_STOP),
        Figure("  pulls that ended right", min(r["finished"] for r in rounds), "of 1", (">=", 1)),
    ]


def _longer(what: str, rounds: list[Round], at_most: float) -> Figure:
    """The worst of all rounds."""
    seconds = max(r["seconds"] - r["calm"] for r in rounds)
    return Figure(f"{what}: beyond the undisturbed pull", seconds, "s", ("<=", at_most))


def of_spare(rounds: list[Round], options: argparse.Namespace) -> list[Figure]:
    ratio = machine.median_ratio([r["seconds"] for r in rounds], [r["calm"] for r in rounds])
    chunks = PullConfig().chunks_in_flight * chunk_bytes_for(options.size) / options.size
    received = statistics.median(r["received"] for r in rounds)
    in_flight = PullConfig().chunks_in_flight
    detail = f"the model, {in_flight} chunks in flight; with headers and news"
    return [
        Figure("one of two sources killed at half: time", ratio, "x undisturbed", ("<=", SLOWER)),
        _longer("  the same", rounds, STALL_OF_A_DEATH),
        Figure(
            "  bytes its cable brought in",
            received,
            "x the model",
            ("<=", 1 + chunks),
            detail=detail,
        ),
        Figure("  pulls that ended right", min(r["finished"] for r in rounds), "of 1", (">=", 1)),
    ]


def of_orphans(rounds: list[Round], _options: argparse.Namespace) -> list[Figure]:
    ratio = machine.median_ratio([r["seconds"] for r in rounds], [r["calm"] for r in rounds])
    most = max(r["most_held_by_one"] for r in rounds)
    detail = f"none had more than {most:.0%} when the source died"
    finished = min(r["finished"] for r in rounds)
    return [
        Figure("the only whole source killed: pullers done", finished, "of 4", (">=", 4)),
        Figure("  time", ratio, "x undisturbed", detail=detail),
    ]


CASES: dict[
    str,
    tuple[
        Callable[[argparse.Namespace], Round],
        Callable[[list[Round], argparse.Namespace], list[Figure]],
    ],
] = {
    "spare": (spare, of_spare),
    "stopped": (stopped, of_stopped),
    "orphans": (orphans, of_orphans),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(CASES), nargs="+", default=sorted(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=parse_size, default=128 * MIB, help="bytes, or 64M")
    parser.add_argument("--mbit", type=float, default=250.0)
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    options = parser.parse_args()
    if skipped(why_not()):
        return 0
    topology = (
        f"{options.mbit:g} Mbit/s a host each way, {options.size / MIB:g} MiB, "
        f"{options.rounds} rounds"
    )
    facts, results = announce(topology), {}
    for name in options.only:
        play, judge = CASES[name]
        rounds = []
        for number in range(options.rounds):
            rounds.append(play(options))
            told = ", ".join(f"{what} {value:.3f}" for what, value in rounds[-1].items())
            print(f"  {name} {number}: {told}", flush=True)
        found = judge(rounds, options)
        show(found)
        results[f"{name}, {topology}"] = record(
            found, rounds, command=command_line(), topology=topology
        )
    return finish("failure", facts, results, dry=options.dry)


if __name__ == "__main__":
    sys.exit(main())
