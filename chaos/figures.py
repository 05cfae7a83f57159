"""What a whole run came to, as docs/chaos.md tells it: nothing there is typed by hand.

Rules of this file. It turns saved summaries into text between the page's markers; it plays and
judges nothing.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import msgspec

from chaos.report import Summary
from chaos.stalls import UNDISTURBED, Stall

PAGE = Path(__file__).resolve().parent.parent / "docs" / "chaos.md"
OPENING, CLOSING = "<!-- figures -->\n", "<!-- end of figures -->"
FILE = "whole.json"
ALONE = "each-kind"
"""The named run that has one fault at a time."""
TARGETS = {"sources-die": ("kill a source", 0.5), "sources-stop": ("stop a source", 3.0)}
"""Named run -> its fault, and how long that may hold up a bystander, in seconds."""


class Whole(msgspec.Struct, kw_only=True):
    """`make chaos`: the runs by seeds together, and the named ones."""

    rounds: Summary
    named: dict[str, Summary]
    total: Summary
    date: str
    machine: str


def whole(rounds: Summary, named: dict[str, Summary], total: Summary) -> Whole:
    machine = f"{len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"
    date = time.strftime("%Y-%m-%d")
    return Whole(rounds=rounds, named=named, total=total, date=date, machine=machine)


def save(saved: Whole, directory: Path) -> None:
    (directory / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1))


def read(directory: Path) -> Whole:
    """Raises FileNotFoundError where `make chaos` left nothing."""
    if not (directory / FILE).is_file():
        raise FileNotFoundError(f"no {FILE} in {directory}: `make chaos` names its directory last")
    return msgspec.json.decode((directory / FILE).read_bytes(), type=Whole)


def fill(saved: Whole, page: Path = PAGE) -> None:
    """Put it between the page's markers."""
    before, opening, rest = page.read_text(encoding="utf-8").partition(OPENING)
    _, closing, after = rest.partition(CLOSING)
    if not opening or not closing:
        raise ValueError(f"{page.name} has no place for figures")
    page.write_text(f"{before}{opening}\n{text(saved)}\n{closing}{after}", encoding="utf-8")


def text(saved: Whole) -> str:
    total, pulls = saved.total, saved.total.pulls
    faults = sum(kind.count for kind in total.faults.values())
    return "\n".join(
        [
            f'`make chaos ARGS="--seed {saved.rounds.seeds[0]}"`, {saved.date}, {saved.machine}: '
            f"{faults:,} faults, {pulls.succeeded:,} pulls, {pulls.bytes / 1e9:.1f} GB, "
            f"{total.processes:,} processes; {len(total.violations)} violations, {total.hangs} "
            f"hangs, {len(total.leaked)} processes left behind.",
            "",
            *_targets(saved),
            "",
            *_kinds(saved),
            "",
        ]
    )


def _targets(saved: Whole) -> list[str]:
    lines = [
        "| named run | faults | longest stall, s | wanted | beside no fault, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, (kind, wanted) in TARGETS.items():
        summary = saved.named[name]
        fault = summary.faults[kind]
        cells = (name, fault.count, _seconds(fault.stall), wanted, _seconds(summary.undisturbed))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _kinds(saved: Whole) -> list[str]:
    alone, rounds = saved.named[ALONE], saved.rounds
    lines = [
        "| fault | longest stall alone, s | among others, s | faults | seconds of them |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in sorted(alone.faults.keys() | rounds.faults.keys()):
        one, many = alone.faults.get(kind), rounds.faults.get(kind)
        cells = (
            kind,
            _seconds(one.stall if one else None),
            _seconds(many.stall if many else None),
            many.count if many else 0,
            f"{many.seconds:.0f}" if many else "0",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    beside_none = (UNDISTURBED, _seconds(alone.undisturbed), _seconds(rounds.undisturbed), "", "")
    lines.append("| " + " | ".join(beside_none) + " |")
    return lines


def _seconds(stall: Stall | None) -> str:
    return "–" if stall is None else f"{stall.seconds:.2f}"
