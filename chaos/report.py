"""What a run amounts to: counts, the longest stalls, and every violation, for a reader and as JSON.

Rules of this file. It counts and shows; what is a violation was judged before. Times are seconds
from the first event of their run, sizes bytes. Everything that can be traced to one run names its
seed, so summaries of several runs combine into one of the same shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chaos import stalls
from chaos.history import Call, History, history
from chaos.journal import AnyEvent
from chaos.stalls import Stall

if TYPE_CHECKING:
    from chaos.checks import Violation

HANG = "no_hang"
"""The check that finds verbs which end too late, or never."""


class FaultKind(msgspec.Struct, kw_only=True):
    """All faults of one kind. `stall` is None if no bystander pulled beside any of them."""

    count: int = 0
    seconds: float = 0.0
    stall: Stall | None = None


class Pulls(msgspec.Struct, kw_only=True):
    """The calls of `replicate`. `failed`: by class of error; `unanswered`: no end is known."""

    succeeded: int = 0
    failed: dict[str, int] = {}
    unanswered: int = 0
    bytes: int = 0
    retried: int = 0
    """Chunks that were asked for again."""


class Use(msgspec.Struct, kw_only=True):
    """Of something that processes use up: the most, and how much more at a life's end.

    `growth` is from the first sample of a life to its last, in the life `grown` for which that is
    most; None if no life was sampled twice.
    """

    most: int = 0
    growth: int | None = None
    grown: str = ""


class Breach(msgspec.Struct, kw_only=True):
    """A violation, with its run."""

    seed: int
    at: float
    guarantee: str
    check: str
    who: str
    what: str


class Summary(msgspec.Struct, kw_only=True):
    """One run, or several; `faults` by kind."""

    seeds: list[int] = []
    seconds: float = 0.0
    faults: dict[str, FaultKind] = {}
    undisturbed: Stall | None = None
    """The longest beside no fault: so much do pulls differ by themselves."""
    pulls: Pulls = msgspec.field(default_factory=Pulls)
    verbs: int = 0
    processes: int = 0
    leaked: list[str] = []
    hangs: int = 0
    rss: Use = msgspec.field(default_factory=Use)
    descriptors: Use = msgspec.field(default_factory=Use)
    violations: list[Breach] = []


# --- one run ---


def summarise(
    events: Sequence[AnyEvent], violations: Sequence[Violation], seed: int, leaked: Sequence[str]
) -> Summary:
    """The run of `seed`, which left these processes behind; `events` in order of time."""
    began = events[0].at if events else 0.0
    told = history(events)
    lives = told.lives.values()
    samples = [(life.who, sample) for life in lives for sample in life.samples]
    longest = stalls.longest(told, began, seed)
    return Summary(
        seeds=[seed],
        seconds=events[-1].at - began if events else 0.0,
        faults=_faults(told, longest),
        undisturbed=longest.get(stalls.UNDISTURBED),
        pulls=_pulls(told.calls),
        verbs=len(told.calls),
        processes=len(lives),
        leaked=list(leaked),
        hangs=sum(violation.check == HANG for violation in violations),
        rss=_use((who, sample.rss) for who, sample in samples),
        descriptors=_use((who, sample.descriptors) for who, sample in samples),
        violations=[_breach(violation, began, seed) for violation in violations],
    )


def _faults(told: History, longest: dict[str, Stall]) -> dict[str, FaultKind]:
    """One that was never ended lasted until the last event."""
    found: dict[str, FaultKind] = {}
    for spell in told.spells:
        kind = found.setdefault(spell.kind, FaultKind(stall=longest.get(spell.kind)))
        kind.count += 1
        kind.seconds += min(spell.end, told.last) - spell.begin.at
    return found


def _pulls(verbs: Iterable[Call]) -> Pulls:
    pulls = [call for call in verbs if call.verb == "replicate"]
    ends = [pull.ended for pull in pulls if pull.ended is not None]
    return Pulls(
        succeeded=sum(not end.error for end in ends),
        failed=dict(Counter(end.error for end in ends if end.error)),
        unanswered=len(pulls) - len(ends),
        bytes=sum(end.bytes for end in ends),
        retried=sum(end.retried for end in ends),
    )


def _breach(violation: Violation, began: float, seed: int) -> Breach:
    return Breach(
        seed=seed,
        at=violation.at - began,
        guarantee=violation.guarantee,
        check=violation.check,
        who=violation.who,
        what=violation.what,
    )


def _use(samples: Iterable[tuple[str, int]]) -> Use:
    by_life: dict[str, list[int]] = {}
    for life, amount in samples:
        by_life.setdefault(life, []).append(amount)
    use = Use(most=max((max(amounts) for amounts in by_life.values()), default=0))
    grown = [(a[-1] - a[0], life) for life, a in by_life.items() if len(a) > 1]
    if grown:
        use.growth, use.grown = max(grown)
    return use


# --- several runs ---


def combine(summaries: Sequence[Summary]) -> Summary:
    """Counts are added, the longest and the most remain."""
    return Summary(
        seeds=[seed for summary in summaries for seed in summary.seeds],
        seconds=sum(summary.seconds for summary in summaries),
        faults=_all_faults([summary.faults for summary in summaries]),
        undisturbed=_longest(summary.undisturbed for summary in summaries),
        pulls=_all_pulls([summary.pulls for summary in summaries]),
        verbs=sum(summary.verbs for summary in summaries),
        processes=sum(summary.processes for summary in summaries),
        leaked=[who for summary in summaries for who in summary.leaked],
        hangs=sum(summary.hangs for summary in summaries),
        rss=_all_use([summary.rss for summary in summaries]),
        descriptors=_all_use([summary.descriptors for summary in summaries]),
        violations=[breach for summary in summaries for breach in summary.violations],
    )


def _all_faults(runs: Sequence[dict[str, FaultKind]]) -> dict[str, FaultKind]:
    found: dict[str, FaultKind] = {}
    for faults in runs:
        for name, one in faults.items():
            total = found.setdefault(name, FaultKind())
            total.count += one.count
            total.seconds += one.seconds
            total.stall = _longest((total.stall, one.stall))
    return found


def _longest(several: Iterable[Stall | None]) -> Stall | None:
    there = [stall for stall in several if stall is not None]
    return max(there, key=lambda stall: stall.seconds, default=None)


def _all_pulls(runs: Sequence[Pulls]) -> Pulls:
    failed: Counter[str] = Counter()
    for pulls in runs:
        failed.update(pulls.failed)
    return Pulls(
        succeeded=sum(pulls.succeeded for pulls in runs),
        failed=dict(failed),
        unanswered=sum(pulls.unanswered for pulls in runs),
        bytes=sum(pulls.bytes for pulls in runs),
        retried=sum(pulls.retried for pulls in runs),
    )


def _all_use(runs: Sequence[Use]) -> Use:
    use = Use(most=max((run.most for run in runs), default=0))
    grown = [(run.growth, run.grown) for run in runs if run.growth is not None]
    if grown:
        use.growth, use.grown = max(grown)
    return use


# --- what is read ---


def show(summary: Summary, console: Console) -> None:
    """Faults, totals, and every violation in full."""
    console.print(_table_of_faults(summary))
    console.print(_table_of_totals(summary))
    for breach in summary.violations:
        place = f"seed {breach.seed}, {breach.at:.3f} s, {breach.who}"
        broken = f"[red]{escape(breach.guarantee)}[/] ({escape(breach.check)})"
        console.print(f"{broken} {escape(place)}: {escape(breach.what)}", highlight=False)
    if not summary.violations:
        console.print("[green]no violation[/]")
    seeds = ", ".join(str(seed) for seed in summary.seeds)
    console.print(f"{'seed' if len(summary.seeds) == 1 else 'seeds'} {seeds}", highlight=False)


def show_in_all(summary: Summary, console: Console) -> None:
    """Several reports were shown: what they come to together."""
    faults = sum(kind.count for kind in summary.faults.values())
    console.print(
        f"[bold]in all[/]: {faults:,} faults, {summary.pulls.succeeded:,} pulls, "
        f"{summary.pulls.bytes / 1e9:,.1f} GB, {summary.processes:,} processes; "
        f"{_bad(len(summary.violations))} violations, {_bad(summary.hangs)} hangs, "
        f"{_bad(len(summary.leaked))} processes leaked",
        highlight=False,
    )


def _table_of_faults(summary: Summary) -> Table:
    table = Table("fault", title=f"{sum(f.count for f in summary.faults.values())} faults")
    for column in ("count", "seconds", "longest stall"):
        table.add_column(column, justify="right")
    table.add_column("of")
    for name, kind in sorted(summary.faults.items()):
        table.add_row(escape(name), str(kind.count), f"{kind.seconds:.1f}", *_shown(kind.stall))
    table.add_row(escape(stalls.UNDISTURBED), "", "", *_shown(summary.undisturbed))
    return table


def _shown(stall: Stall | None) -> tuple[str, str]:
    if stall is None:
        return "–", ""
    return f"{stall.seconds:.2f} s", _whose(stall) if stall.seconds else ""


def _whose(stall: Stall) -> str:
    ended = f", {stall.error}" if stall.error else ""
    return escape(f"{stall.who} at {stall.at:.1f} s{ended} (seed {stall.seed})")


def _table_of_totals(summary: Summary) -> Table:
    pulls = summary.pulls
    table = Table(
        title=f"{summary.seconds:.0f} s in {len(summary.seeds)} run(s)", show_header=False
    )
    for name, value in (
        ("verbs", f"{summary.verbs:,}"),
        ("pulls", f"{pulls.succeeded:,}"),
        ("pulls that failed", _by_error(pulls.failed)),
        ("pulls unanswered", f"{pulls.unanswered:,}"),
        ("bytes moved", f"{pulls.bytes / 1e9:,.3f} GB"),
        ("chunks retried", f"{pulls.retried:,}"),
        ("processes started", f"{summary.processes:,}"),
        ("most memory", _described(summary.rss, 1e6, " MB")),
        ("most descriptors", _described(summary.descriptors, 1, "")),
        ("processes leaked", _bad(len(summary.leaked))),
        ("hangs", _bad(summary.hangs)),
        ("violations", _bad(len(summary.violations))),
    ):
        table.add_row(name, value)
    return table


def _by_error(failed: dict[str, int]) -> str:
    by_count = sorted(failed.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {escape(error)}" for error, count in by_count) or "0"


def _described(use: Use, unit: float, name: str) -> str:
    if use.growth is None:
        return f"{use.most / unit:,.0f}{name}"
    growth = f"{use.growth / unit:+,.0f}{name} in {use.grown}"
    return escape(f"{use.most / unit:,.0f}{name}; most growth {growth}")


def _bad(count: int) -> str:
    return f"[red]{count:,}[/]" if count else "0"


def write_json(summary: Summary, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
