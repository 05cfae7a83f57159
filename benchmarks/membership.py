"""Membership in the simulator: how fast, how wrong, how dear; beside memberlist's defaults.

    python benchmarks/membership.py                          everything
    python benchmarks/membership.py --only detection stalls  some of it
    python benchmarks/membership.py --quick --dry            a minute, to see that it runs

What runs is the very code of a real peer; sockets, network and clock are simulated, and a seed
repeats a run exactly, whatever machine it is on. Compared are, with the same seeds:

    ours         the defaults, with the evidence of sockets
    no sockets   the same without it
    memberlist   the same machine with memberlist's LAN defaults, without sockets, and without
                 whatever memberlist doesn't have

Results are saved in benchmarks/results/membership.json, pictures in docs/images/;
`python benchmarks/report.py` puts both into docs/performance.md.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import machine
import membership_plot
import membership_runs as runs

LOSS = 0.05
NEVER = math.inf


@dataclass(frozen=True)
class Target:
    """What one figure should be."""

    what: str
    value: float
    sign: str
    bound: float

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.sign == ">=" else self.value <= self.bound

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"  {self.what}: {self.value:.3g}, wanted {self.sign} {self.bound:g}: {verdict}"


def finite(value: Any) -> Any:
    """The same as JSON knows it: "never" is null."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Section:
    """One table, what it should show, and the figures for its picture."""

    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self, seconds: float) -> dict[str, Any]:
        return {
            "columns": list(self.columns),
            "rows": self.rows,
            "targets": [
                {**vars(target), "value": finite(target.value), "met": target.met}
                for target in self.targets
            ],
            "notes": self.notes,
            "real_seconds": round(seconds),
            "data": finite(self.data),
        }

    def __str__(self) -> str:
        table = [list(self.columns), *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in table]
        return "\n".join(line.rstrip() for line in (*lines, *self.notes, *map(str, self.targets)))


@dataclass(frozen=True)
class Job:
    """One call of a function of membership_runs.py."""

    key: tuple[Any, ...]
    run: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def carry_out(job: Job) -> dict[str, Any]:
    return job.run(*job.arguments, **job.options)


class Bench:
    """Spreads jobs over processes; results come by key, those of one key together."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick: bool = options.quick
        self._sizes: list[int] = options.peers or []
        self.seed: int = options.seed
        self._workers: int = options.jobs

    def plan(self, usual: dict[int, Any], quick: dict[int, Any]) -> dict[int, Any]:
        """What to run, by number of peers."""
        chosen = quick if self.quick else usual
        return {n: p for n, p in chosen.items() if not self._sizes or n in self._sizes}

    def seeds(self, number: int) -> range:
        return range(self.seed, self.seed + number)

    def run(self, jobs: Iterable[Job], workers: int = 64) -> dict[tuple[Any, ...], list[Any]]:
        """A process a job, so that what one leaves behind costs no other anything."""
        queue = list(jobs)
        results: dict[tuple[Any, ...], list[Any]] = {}
        for number, result in enumerate(self._carry_out(queue, min(self._workers, workers))):
            results.setdefault(queue[number].key, []).append(result)
            if sys.stderr.isatty():
                end = "\n" if number + 1 == len(queue) else ""
                print(f"\r  {number + 1} of {len(queue)} runs", end=end, file=sys.stderr)
        return results

    def _carry_out(self, queue: list[Job], workers: int) -> Iterator[dict[str, Any]]:
        if not workers:
            yield from map(carry_out, queue)
            return
        spawning = multiprocessing.get_context("spawn")
        with spawning.Pool(workers, maxtasksperchild=1) as pool:
            yield from pool.imap(carry_out, queue)


def largest_first(plan: dict[int, Any]) -> list[tuple[int, Any]]:
    """So that no long run begins when all others are done."""
    return sorted(plan.items(), reverse=True)


def seconds(value: float) -> str:
    return f"{value:.2f}" if value < NEVER else "never"


def spread(values: Iterable[float | None]) -> tuple[float, float]:
    """Median and p99; who never came to know counts as infinitely late."""
    known = [NEVER if value is None else value for value in values]
    return machine.percentile(known, 50), machine.percentile(known, 99)


# --- how fast -----------------------------------------------------------------------------

CRASHES = {32: (20, 5, 10.0), 100: (10, 10, 5.0), 316: (2, 20, 5.0), 1000: (1, 40, 3.0)}
"""By peers: runs, crashes in each, and seconds between them."""
QUICK_CRASHES = {10: (2, 2, 5.0), 20: (1, 2, 5.0)}


def detection(bench: Bench) -> Section:
    """Until everyone has declared a death: the process died, or its whole host."""
    plan = bench.plan(CRASHES, QUICK_CRASHES)
    cases = [("ours", False), ("ours", True), ("no sockets", True), ("memberlist", True)]
    found = bench.run(
        Job(
            (peers, variant, host),
            runs.crashes,
            (variant, peers, seed, LOSS),
            {"host": host, "number": number, "apart": apart},
        )
        for peers, (count, number, apart) in largest_first(plan)
        for variant, host in cases
        for seed in bench.seeds(count)
    )
    section = Section(
        ["peers", "crash of", "ours", "no sockets", "memberlist", "ratio of medians", "of p99"]
    )
    for peers, (count, number, _) in plan.items():
        at = {
            case: spread(t for run in found[(peers, *case)] for t in run["everyone"])
            for case in cases
        }
        for host in (False, True):
            ours, bare, other = at["ours", host], at["no sockets", True], at["memberlist", True]
            ratios = [theirs / mine for theirs, mine in zip(other, ours, strict=True)]
            section.rows.append(
                [
                    str(peers),
                    "the host" if host else "the process",
                    *(f"{seconds(m)} / {seconds(p)} s" for m, p in (ours, bare, other)),
                    *(f"{ratio:.1f}" for ratio in ratios),
                ]
            )
            wanted = 1.0 if host else 5.0
            for which, ratio in zip(("median", "p99"), ratios, strict=True):
                what = f"{peers} peers, crash of the {'host' if host else 'process'}, {which}"
                section.targets.append(Target(f"{what}, memberlist / ours", ratio, ">=", wanted))
            section.data[f"{peers}/{'host' if host else 'process'}"] = {
                "ours": ours,
                "no sockets": bare,
                "memberlist": other,
                "crashes": count * number,
            }
    section.notes.append(
        "Median / p99 over "
        + ", ".join(f"{c * n} crashes in {c} runs at {p} peers" for p, (c, n, _) in plan.items())
        + ". Without sockets both kinds of crash are the same silence, so they are run once."
    )
    wrong = {
        v: sum(r["false deaths"] for (_, w, _), rs in found.items() if w == v for r in rs)
        for v in runs.VARIANTS
    }
    section.notes.append(
        "Wrongly declared dead meanwhile: " + ", ".join(f"{v} {n}" for v, n in wrong.items()) + "."
    )
    return section


# --- how wrong ----------------------------------------------------------------------------

STALLS = {32: (6, 3), 100: (3, 3), 1000: (1, 1)}
"""By peers: runs, and episodes in each."""
QUICK_STALLS = {10: (1, 1)}


def stalls(bench: Bench) -> Section:
    """Members stand still for 5 to 20 s, and nobody is to die of it."""
    plan = bench.plan(STALLS, QUICK_STALLS)
    cases = [("ours", True), ("ours", False), ("no sockets", False), ("memberlist", False)]
    shares = (0.01, 0.1)
    found = bench.run(
        Job(
            (peers, share, variant, gil),
            runs.stalls,
            (variant, peers, seed, LOSS),
            {"gil": gil, "share": share, "episodes": episodes},
        )
        for peers, (count, episodes) in largest_first(plan)
        for share in shares
        for variant, gil in cases
        for seed in bench.seeds(count)
    )

    def total(key: tuple[Any, ...], what: str) -> int:
        return sum(run[what] for run in found[key])

    section = Section(
        ["peers", "stalled at once", "stall of", "stalls", "ours", "no sockets", "memberlist"]
    )
    for peers in plan:
        for share in shares:
            other, bare = (peers, share, "memberlist", False), (peers, share, "no sockets", False)
            for gil in (True, False):
                ours = (peers, share, "ours", gil)
                dead = {
                    key: total(key, "stalled died") + total(key, "others died")
                    for key in (ours, bare, other)
                }
                what = f"{peers} peers, {share:.0%} {'hold the GIL' if gil else 'are paused'}"
                section.rows.append(
                    [
                        str(peers),
                        f"{share:.0%}",
                        "the GIL" if gil else "the process",
                        str(total(ours, "stalls")),
                        *(
                            f"{dead[key]} ({total(key, 'others died')} others)"
                            for key in (ours, bare, other)
                        ),
                    ]
                )
                bound = 0 if gil else dead[other]
                section.targets.append(Target(f"{what}: deaths", dead[ours], "<=", bound))
    section.notes.append(
        'Members wrongly declared dead by anybody; "others" did not stall. Without sockets a held '
        "GIL and a pause are the same silence, so they are run once. "
        + ", ".join(f"{c} runs of {e} episodes at {p} peers" for p, (c, e) in plan.items())
        + "."
    )
    return section


QUIET = {32: (2, 600.0), 100: (2, 200.0), 1000: (1, 30.0)}
"""By peers: runs, and seconds of each."""
QUICK_QUIET = {10: (1, 20.0)}


def loss(bench: Bench) -> Section:
    """Nothing happens but loss; whoever is declared dead is so wrongly."""
    plan = bench.plan(QUIET, QUICK_QUIET)
    rates = (0.05, 0.2)
    found = bench.run(
        Job((peers, rate, v), runs.quiet, (v, peers, seed, rate), {"seconds": duration})
        for peers, (count, duration) in largest_first(plan)
        for rate in rates
        for v in runs.VARIANTS
        for seed in bench.seeds(count)
    )
    section = Section(["peers", "loss", "observed", *runs.VARIANTS])
    for peers, (count, duration) in plan.items():
        for rate in rates:
            died = {v: sum(r["died"] for r in found[peers, rate, v]) for v in runs.VARIANTS}
            observed = f"{count * duration * peers / 3600:.1f} peer hours"
            section.rows.append([str(peers), f"{rate:.0%}", observed, *map(str, died.values())])
            what = f"{peers} peers, {rate:.0%} loss: deaths"
            section.targets.append(Target(what, died["ours"], "<=", died["memberlist"]))
    section.notes.append("Members wrongly declared dead by anybody.")
    return section


# --- how dear -----------------------------------------------------------------------------

TRAFFIC = {32: (60.0, 60.0), 100: (120.0, 60.0), 316: (180.0, 60.0), 1000: (280.0, 60.0)}
"""By peers: seconds until views are compared at their usual pace, and those measured."""
QUICK_TRAFFIC = {10: (5.0, 10.0), 20: (5.0, 10.0)}
ZONES, ZONE_SIZE = 10, 1000
SHORT = (20.0, 20.0)
"""The same, for comparing one zone with ten."""


def _traffic_of(ours: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
    """The figures of one row: all peers, gateways apart, and memberlist's where it was run."""
    gateways = ours["gateways"]
    return [
        f"{ours['all']['mean_bytes']:.0f} B/s",
        f"{ours['others']['max_bytes']:.0f} B/s",
        f"{gateways['mean_bytes']:.0f}, {gateways['max_bytes']:.0f} B/s" if gateways else "",
        f"{ours['all']['mean_messages']:.2f} /s",
        f"{other['all']['mean_bytes']:.0f} B/s" if other else "",
    ]


def traffic(bench: Bench) -> Section:
    """What a peer sends when nothing happens: against the cluster's size, and with zones."""
    plan = bench.plan(TRAFFIC, QUICK_TRAFFIC)
    zones, size, short = (2, 5, (5.0, 10.0)) if bench.quick else (ZONES, ZONE_SIZE, SHORT)
    rates = (0.0, 0.01)

    def job(v: str, peers: int, zones: int, rate: float, times: tuple[float, float]) -> Job:
        options = {"zones": zones, "warm_up": times[0], "seconds": times[1]}
        key = (v, peers, zones, rate, times)
        return Job(key, runs.traffic, (v, peers, bench.seed, rate), options)

    variants = ("ours", "memberlist")
    large = [job("ours", size * zones, zones, rate, short) for rate in rates]
    found = bench.run(
        [
            *large,
            *(job("ours", size, 1, rate, short) for rate in rates),
            *(
                job(v, peers, 1, rate, times)
                for peers, times in largest_first(plan)
                for v in variants
                for rate in rates
            ),
        ]
    )
    section = Section(
        ["peers", "zones", "loss", "mean", "the most", "of gateways", "messages", "memberlist"]
    )

    def measured(v: str, peers: int, zones: int, rate: float, times: tuple[float, float]) -> Any:
        return found[v, peers, zones, rate, times][0]

    def row(peers: int, zones: int, rate: float, times: tuple[float, float]) -> float:
        ours = measured("ours", peers, zones, rate, times)
        (other,) = found.get(("memberlist", peers, zones, rate, times), [None])
        section.rows.append([str(peers), str(zones), f"{rate:.0%}", *_traffic_of(ours, other)])
        what = f"{peers}/{zones}/{rate}/{times[0]:g}"
        section.data[what] = {"ours": ours, "memberlist": other}
        return float(ours["all"]["mean_bytes"])

    means = {(p, rate): row(p, 1, rate, plan[p]) for rate in rates for p in plan}
    few, many = (100, 1000) if {100, 1000} <= set(plan) else (min(plan), max(plan))
    for rate in rates:
        growth = means[many, rate] / means[few, rate]
        what = f"{many} peers / {few} peers, {rate:.0%} loss, mean bytes"
        section.targets.append(Target(what, growth, "<=", 1.2))
    for rate in rates:
        one, ten = row(size, 1, rate, short), row(size * zones, zones, rate, short)
        what = f"{zones} zones of {size} / one of them, {rate:.0%} loss, mean bytes"
        section.targets.append(Target(what, ten / one, "<=", 1.1))
    section.notes.append(
        "Bytes of encoded messages that a peer sends; of gateways: mean and the most. One zone "
        f"against {zones} is measured after {short[0]:g} s, before views are first compared on "
        "both sides alike."
    )
    return section


def scale(bench: Bench) -> Section:
    """Ten thousand peers in ten zones, 1 % loss, twenty crashes: what simulating them costs."""
    peers, zones, duration = (40, 2, 20.0) if bench.quick else (10_000, 10, 60.0)
    options = {"zones": zones, "seconds": duration}
    ((run,),) = bench.run(
        [Job((), runs.scale, (peers, bench.seed, 0.01), options)], workers=1
    ).values()
    section = Section(["what", "figure"])
    crashes = [*run["process"], *run["host"]]
    known = sum(t is not None for t in crashes)
    for what, figure in (
        ("peers, zones, virtual seconds", f"{peers}, {zones}, {duration:g}"),
        ("real time on one core", f"{run['real seconds']:.0f} s"),
        ("CPU time", f"{run['cpu seconds']:.0f} s"),
        ("of it starting all peers", f"{run['real seconds of starting']:.0f} s"),
        ("peak memory", f"{run['peak GiB']:.1f} GiB"),
        ("messages", f"{run['messages'] / 1e6:.1f} million"),
        ("crashes that all of the zone know", f"{known} of {len(crashes)}"),
        (
            "crash of a process, median / p99",
            "{} / {} s".format(*map(seconds, spread(run["process"]))),
        ),
        ("crash of a host, median / p99", "{} / {} s".format(*map(seconds, spread(run["host"])))),
        ("wrongly declared dead", str(run["false deaths"])),
    ):
        section.rows.append([what, figure])
    section.targets += [
        Target("real seconds", run["real seconds"], "<=", 240.0),
        Target("crashes that all know", known, ">=", len(crashes)),
    ]
    section.data = run
    return section


# --- how far ------------------------------------------------------------------------------


def rumour(bench: Bench) -> Section:
    """A version hint in one zone: until half, 99 % and all of it have heard."""
    peers, number, count = (20, 2, 1) if bench.quick else (1000, 10, 3)
    cases = {
        "calm, no loss": (0.0, 0),
        "calm, 5 % loss": (LOSS, 0),
        f"{peers // 10} hosts just died, 5 % loss": (LOSS, peers // 10),
    }
    found = bench.run(
        Job((name,), runs.rumours, (peers, seed, rate), {"number": number, "dying": dying})
        for name, (rate, dying) in cases.items()
        for seed in bench.seeds(count)
    )
    section = Section(["peers", "when", "half", "99 %", "all", "a peer sends meanwhile"])
    for name in cases:
        times = [run["times"] for run in found[name,]]
        by_share = list(zip(*(t for each in times for t in each), strict=True))
        spreads = [spread(values) for values in by_share]
        sent = sum(run["bytes"] for run in found[name,]) / count
        section.rows.append(
            [
                str(peers),
                name,
                *(f"{seconds(m)} / {seconds(p)} s" for m, p in spreads),
                f"{sent:.0f} B/s",
            ]
        )
        section.targets.append(Target(f"{name}: 99 %, p99 of all hints", spreads[1][1], "<=", 1.5))
    section.notes.append(f"Median / p99 over {number * count} hints in {count} runs each.")
    return section


PARTITIONS = {32: 10, 100: 5, 316: 1}


def partition(bench: Bench) -> Section:
    """Two halves, apart for five minutes, then joined: until there is one view again."""
    plan = bench.plan(PARTITIONS, {10: 1})
    cut = 60.0 if bench.quick else 300.0
    found = bench.run(
        Job((peers,), runs.partition, (peers, seed, 0.01), {"cut": cut, "limit": 120.0})
        for peers, count in largest_first(plan)
        for seed in bench.seeds(count)
    )
    section = Section(["peers", "runs", "apart before", "one view after, median", "at most"])
    for peers, count in plan.items():
        times = [NEVER if r["one view"] is None else r["one view"] for r in found[peers,]]
        apart = all(r["apart"] for r in found[peers,])
        section.rows.append(
            [
                str(peers),
                str(count),
                "yes" if apart else "no",
                f"{seconds(machine.percentile(times, 50))} s",
                f"{seconds(max(times))} s",
            ]
        )
        section.targets.append(Target(f"{peers} peers, at most", max(times), "<=", 30.0))
    section.notes.append(f"Apart for {cut:g} s, 1 % loss, nobody restarted.")
    return section


# --- running ------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "detection": detection,
    "stalls": stalls,
    "loss": loss,
    "traffic": traffic,
    "scale": scale,
    "rumour": rumour,
    "partition": partition,
}


def main() -> int:
    options = _options()
    facts = {} if options.dry else machine.facts()
    bench = Bench(options)
    missed = False
    for name in options.only:
        print(f"\n{name}: {SECTIONS[name].__doc__}")
        began = time.monotonic()
        section = SECTIONS[name](bench)
        missed |= not all(target.met for target in section.targets)
        print(section)
        if not options.dry:
            result = {"about": SECTIONS[name].__doc__, "seed": options.seed}
            result |= section.to_json(time.monotonic() - began)
            machine.save("membership", facts, {name: result})
    if not options.dry:
        membership_plot.main()
    return int(missed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument(
        "--peers", type=int, nargs="*", help="only clusters of these sizes; not saved"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="runs at a time, each a process; 0: this one"
    )
    parser.add_argument("--seed", type=int, default=1, help="the first of those used")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    options = parser.parse_args()
    options.dry = options.dry or options.peers is not None
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worker is left behind
    sys.exit(main())
