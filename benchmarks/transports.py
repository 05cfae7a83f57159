"""All transports on one machine, and bare NIXL and UCXX beside ours that are built on them.

    make transports                               an environment that has both libraries
    .venv-transports/bin/python benchmarks/transports.py                  in about four minutes
    .venv-transports/bin/python benchmarks/transports.py --size 256M --rounds 3

A GiB of torch memory from a process into another's tensor. Every transport has a pair of
processes, and so has each library by itself; all are started once and warm. In each round every
source writes new bytes, then all move them, in an order that changes; what is reported are
medians of the ratios of a round. Bare NIXL polls in threads of its own, so its processes are
stopped (SIGSTOP) while others move bytes.

Ours is the whole `replicate()`, with each chunk's digest compared. Bare NIXL is one READ of the
whole, with its progress threads, as its examples do it; bare UCXX one message.
Results are saved in benchmarks/results/transports.json. What doesn't work here says why.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from typing import Any

import machine
from figures import Figure, announce, case_options, command_line, finish, record, rounded, show
from single_link import Pair, System, ours

from tensorhub_p2p.cli.doctor import trouble
from tensorhub_p2p.config import TRANSPORTS

WARM_UPS = 2
BARE = {
    "bare nixl": System("nixl", "nixl_reads.py", "bare NIXL"),
    "bare ucx": System("ucxx", "ucxx_messages.py", "bare UCXX"),
}
NEEDS = {"bare nixl": "nixl", "bare ucx": "ucx"}
COMPARED = {
    ("nixl", "bare nixl"): (">=", 0.8),
    ("ucx", "bare ucx"): (">=", 0.8),
    ("cma", "bare nixl"): None,
    ("cma", "nixl"): None,
    ("tcp", "ucx"): None,
}


def pairs(size: int) -> dict[str, tuple[System, dict[str, Any]]]:
    """What can be run here, by name."""
    found: dict[str, tuple[System, dict[str, Any]]] = {}
    troubles = {name: trouble(name) for name in TRANSPORTS}
    for name, why_not in troubles.items():
        if why_not is None:
            found[name] = (ours(name), {"size": size, "bind": "127.0.0.1:0"})
        else:
            print(f"{name}: {why_not}")
    for name, system in BARE.items():
        if troubles[NEEDS[name]] is None:
            found[name] = (system, {"size": size})
    return found


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each, round by round."""
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        started: dict[str, Pair] = {}
        for name, (system, settings) in pairs(options.size).items():
            if name not in options.only:
                continue
            starts = (subprocess.Popen, subprocess.Popen)
            pair = Pair(sys.executable, system, (settings, settings), starts)
            started[name] = stack.enter_context(pair)
        pollers = [pair for name, pair in started.items() if name.startswith("bare nixl")]
        names = list(started)
        for number in range(-WARM_UPS, options.rounds):
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                with contextlib.ExitStack() as quiet:
                    for pair in pollers:
                        if pair is not started[name]:
                            quiet.enter_context(pair.stopped())
                    took = started[name].transfer()
                if number >= 0:
                    seconds.setdefault(name, []).append(took)
        for pair in started.values():
            pair.compare()
    return seconds


def figures(seconds: dict[str, list[float]], size: int) -> list[Figure]:
    found = [
        Figure(name, size / machine.percentile(took, 50) / 1e9, "GB/s")
        for name, took in seconds.items()
    ]
    for (mine, other), target in COMPARED.items():
        if mine in seconds and other in seconds:
            ratio = machine.median_ratio(seconds[other], seconds[mine])
            found.append(Figure(f"{mine} against {other}", ratio, "x", target))
    return found


def main() -> int:
    options = case_options(__doc__, [*TRANSPORTS, *BARE], size=1 << 30)
    facts = announce()
    seconds = measure(options)
    found = figures(seconds, options.size)
    print(f"\n{options.size >> 20} MiB, {options.rounds} rounds")
    show(found)
    what = f"{options.size >> 20} MiB over {', '.join(options.only)}"
    topology = f"two processes on one host, {options.size >> 20} MiB, {options.rounds} rounds"
    case = record(found, rounded(seconds), command=command_line(), topology=topology)
    return finish("transports", facts, {what: case}, dry=options.dry)


if __name__ == "__main__":
    sys.exit(main())
