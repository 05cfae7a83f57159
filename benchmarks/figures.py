"""What a benchmark tells and saves: figures with their targets, rounds, and the lines about both.

Rule of this file. It measures nothing and knows nothing of the library: what was measured
comes in as numbers. How a figure is printed, what a saved case consists of (report.py reads
it) and when a run counts as missed is said here and nowhere else.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import machine

MIB = 1 << 20


@dataclass
class Figure:
    """One line of the result. `target` is (">=" or "<=", value), for the value given."""

    what: str
    value: float
    unit: str
    target: tuple[str, float] | None = None
    bare: float | None = None
    """The bare figure in GB/s, and ours beside it."""
    ours: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        sign, bound = self.target
        return self.value >= bound if sign == ">=" else self.value <= bound

    def __str__(self) -> str:
        rates = ""
        if self.bare is not None and self.ours is not None:
            rates = f"bare {self.bare:6.2f} GB/s  ours {self.ours:6.2f} GB/s"
        target = "" if self.target is None else f"target {self.target[0]} {self.target[1]:g}"
        verdict = "" if self.target is None else ("  met" if self.met else "  MISSED")
        value = f"{self.value:8.3f} {self.unit}"
        return (
            f"  {self.what:<46} {rates:<40} {value:<16} {target}{verdict}  {self.detail}".rstrip()
        )


class Rounds:
    """What was measured round by round: name → seconds (or another figure)."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def add_pull(self, name: str, pull: dict[str, Any]) -> None:
        for key in ("seconds", "moving", "waiting", "registering", "cpu"):
            self.add(f"{name} {key}" if key != "seconds" else name, pull[key])

    def against(
        self,
        other: str,
        what: str,
        name: str,
        size: int,
        target: tuple[str, float] | None = None,
        *,
        unit: str = "of bare",
        detail: str = "",
    ) -> Figure:
        """The other's seconds / those of `name`, for `size` bytes: the share of its speed."""
        theirs, ours = self.values[other], self.values[name]
        return Figure(
            what,
            machine.median_ratio(theirs, ours),
            unit,
            target,
            bare=size / machine.percentile(theirs, 50) / 1e9,
            ours=size / machine.percentile(ours, 50) / 1e9,
            detail=detail,
        )


Measured = tuple[list[Figure], Rounds]


# --- what is told ------------------------------------------------------------------------


def skipped(reason: str | None, word: str = "skipped") -> bool:
    """Whether there is a reason not to measure, which is told."""
    if reason is not None:
        print(f"{word}: {reason}")
    return reason is not None


def announce(about: str = "") -> dict[str, Any]:
    """Say what the machine is and, below it, what is going to be measured; the machine's facts."""
    facts = machine.facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if about:
        print(f"\n{about}")
    return facts


def show(figures: Iterable[Figure]) -> None:
    for figure in figures:
        print(figure, flush=True)


def command_line() -> str:
    """What was run, as a user types it behind `python benchmarks/`."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


# --- what is saved -----------------------------------------------------------------------


def record(figures: Iterable[Figure], samples: Any, **about: Any) -> dict[str, Any]:
    """A case as it is saved: `about` it, the figures, and what they were made of."""
    lines = [{**vars(figure), "met": figure.met} for figure in figures]
    return {**about, "figures": lines, "samples": samples}


def rounded(values: Mapping[str, Sequence[float]], digits: int = 6) -> dict[str, list[float]]:
    return {name: [round(value, digits) for value in each] for name, each in values.items()}


def save(benchmark: str, facts: dict[str, Any], results: dict[str, Any]) -> None:
    path = machine.save(benchmark, facts, results)
    print(f"\nsaved as benchmarks/results/{path.name}")


def status(results: dict[str, Any]) -> int:
    """The exit status: 1 if any figure of these recorded cases misses its target."""
    return int(not all(line["met"] for case in results.values() for line in case["figures"]))


def finish(benchmark: str, facts: dict[str, Any], results: dict[str, Any], *, dry: bool) -> int:
    """Save the recorded cases, unless the run was `dry`; the exit status."""
    if not dry:
        save(benchmark, facts, results)
    return status(results)


# --- a benchmark of several cases --------------------------------------------------------


def parse_size(text: str) -> int:
    """Bytes, from a text as 256M."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 0)
    return int(text[:-1]) * unit if unit else int(text)


def case_options(
    about: str, cases: Iterable[str], rounds: int = 9, size: int | None = None
) -> argparse.Namespace:
    """What the command line says: rounds, which cases, dry; and a size where there is one."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    if size is not None:
        parser.add_argument("--size", type=parse_size, default=size, help="bytes, as 1G or 256M")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    return parser.parse_args()


def run_cases(
    benchmark: str,
    options: argparse.Namespace,
    measure: Callable[[str], Measured],
    title: Callable[[str], str],
    size: Callable[[str], int],
) -> int:
    """Measure the cases asked for, tell and save them; the exit status. All by a case's name."""
    facts, results = announce(), {}
    for name in options.only:
        began = monotonic()
        figures, seen = measure(name)
        print(f"\n{title(name)}  ({monotonic() - began:.0f} s)")
        show(figures)
        about = {"size_bytes": size(name), "rounds": options.rounds}
        results[name] = record(figures, rounded(seen.values), **about)
    return finish(benchmark, facts, results, dry=options.dry)


def run_documented(
    benchmark: str, options: argparse.Namespace, cases: Mapping[str, Callable[..., Measured]]
) -> int:
    """The same for functions that take the options, with their docstrings for titles."""
    return run_cases(
        benchmark,
        options,
        lambda name: cases[name](options),
        lambda name: f"{name}: {cases[name].__doc__}",
        lambda _: options.size,
    )
