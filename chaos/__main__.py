"""`python -m chaos`: the suite's commands. docs/chaos.md says what they are for."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from benchmarks.testbed import why_not as no_bed
from chaos import casting, figures, journal, report, schedule
from chaos.faults import FAULTS, possible
from chaos.run import Plan, Run, carry_out
from chaos.scenarios import MEASURED, SCENARIOS, Scenario, alone
from chaos.timeline import write_timeline

SMOKE_ROUNDS, SMOKE_SECONDS, SMOKE_WORKERS = 2, 36.0, 12
FULL_ROUNDS, FULL_SECONDS, FULL_WORKERS = 7, 64.0, 20
SOAK_SECONDS = 600.0
CALM_SECONDS = 16.0
PAUSE_SECONDS = 1.6
"""Between two faults, in the mean."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(soft_wrap=True)
Seed = Annotated[int, typer.Option(help="Repeats a run; drawn and printed if none is given.")]
Strikes = Annotated[int, typer.Option("--seed", help="By which it is drawn whom faults strike.")]
Out = Annotated[Path, typer.Option(help="Where journals and reports go.")]
Plain = Annotated[bool, typer.Option(help="Loopback only, as without root.")]
OUT = Path("chaos-runs")
NONE = typer.Argument("")


@app.command()
def smoke(seed: Seed = 0, out: Out = OUT, plain: Plain = False) -> None:
    """Two short runs of a dozen workers: under three minutes."""
    seeds = _seeds(seed, SMOKE_ROUNDS)
    _end(_rounds("smoke", seeds, SMOKE_SECONDS, SMOKE_WORKERS, out, plain=plain))


@app.command()
def full(seed: Seed = 0, out: Out = OUT, plain: Plain = False) -> None:
    """Seven runs of twenty workers, over 300 faults, and three named ones: under twenty minutes."""
    seeds = _seeds(seed, FULL_ROUNDS)
    rounds = _rounds("full", seeds, FULL_SECONDS, FULL_WORKERS, out, plain=plain)
    named = {name: _play_named(name, out, plain=plain) for name in MEASURED}
    total = report.combine([rounds, *named.values()])
    report.show_in_all(total, console)
    directory = _directory(out, "whole")
    figures.save(figures.whole(rounds, named, total), directory)
    console.print(f"for the page's figures: {directory}")
    _end(total)


@app.command("figures")
def fill_page(directory: Path) -> None:
    """Put what `full` left in this directory into docs/chaos.md."""
    try:
        saved = figures.read(directory)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    figures.fill(saved)


@app.command()
def soak(hours: float, seed: Seed = 0, out: Out = OUT, plain: Plain = False) -> None:
    """Runs of ten minutes, for so many hours."""
    seeds = _until(seed, hours)
    _end(_rounds("soak", seeds, SOAK_SECONDS, FULL_WORKERS, out, plain=plain))


@app.command()
def scenario(name: str = NONE, seed: Strikes = 1, out: Out = OUT, plain: Plain = False) -> None:
    """One named run; without a name that exists: their list."""
    if name not in SCENARIOS:
        _refuse(name, {known: one.about for known, one in SCENARIOS.items()})
    summary = _play_named(name, out, plain=plain, seed=seed)
    if SCENARIOS[name].finds:
        _end_with_bugs([] if _found(name, summary) else [name])
    else:
        _end(summary)


@app.command("fault")
def one_fault(
    kind: str = NONE, count: int = 4, seed: Strikes = 1, out: Out = OUT, plain: Plain = False
) -> None:
    """One kind of fault, so often, with nothing else going on; without one that exists: a list."""
    if kind not in FAULTS:
        _refuse(kind, dict.fromkeys(FAULTS, ""))
    name = re.sub(r"\W+", "-", kind).strip("-")
    directory = _directory(out, name)
    _end(_play_scenario(name, alone(kind, count), directory, plain=plain, seed=seed))


@app.command()
def bugs(out: Out = OUT, plain: Plain = False) -> None:
    """Plant each deliberate bug, and see that its check finds it."""
    names = [name for name, one in SCENARIOS.items() if one.bug]
    played = {name: _play_named(name, out, plain=plain) for name in names}
    _end_with_bugs([name for name, summary in played.items() if not _found(name, summary)])


def _refuse(name: str, known: dict[str, str]) -> NoReturn:
    """None is called so: tell which there are, and end."""
    if name:
        print(f"there is no {name!r}; there are:", file=sys.stderr)
    for each, about in known.items():
        console.print(f"{each:18} {about}".rstrip(), highlight=False)
    raise typer.Exit(2)


def _end(summary: report.Summary) -> None:
    if summary.violations or summary.leaked:
        raise typer.Exit(1)


def _found(name: str, summary: report.Summary) -> bool:
    """Whether the check that must find the planted bug did."""
    wanted = SCENARIOS[name].finds
    found = any(breach.check == wanted for breach in summary.violations)
    console.print(f"{name}: {wanted} {'found it' if found else 'found NOTHING'}")
    return found


def _end_with_bugs(missed: list[str]) -> None:
    console.print(f"not found: {', '.join(missed)}" if missed else "each bug was found")
    if missed:
        raise typer.Exit(1)


# --- runs ---


def _seeds(seed: int, count: int) -> list[int]:
    first = seed or secrets.randbelow(1_000_000) + 1
    return list(range(first, first + count))


def _until(seed: int, hours: float) -> Iterator[int]:
    end, number = time.monotonic() + hours * 3600, _seeds(seed, 1)[0]
    while time.monotonic() < end:
        yield number
        number += 1


def _directory(out: Path, name: str) -> Path:
    directory = out / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    directory.mkdir(parents=True)
    return directory


def _rounds(
    name: str,
    seeds: list[int] | Iterator[int],
    seconds: float,
    workers: int,
    out: Path,
    *,
    plain: bool,
) -> report.Summary:
    """All of them, each with its report; what they come to together."""
    bed, kinds = _means(plain=plain)
    directory, done = _directory(out, name), []
    wanted = list(kinds)
    for seed in seeds:
        shape = casting.Shape.drawn(seed, workers)
        first, wanted = _share(wanted, seconds)
        plan = Plan(
            seed=seed,
            cast=casting.cast(shape),
            shape=shape,
            faults=schedule.draw(seed, seconds, PAUSE_SECONDS, kinds, first),
            seconds=seconds,
            calm=CALM_SECONDS,
        )
        console.print(f"\n[bold]seed {seed}[/]: {shape}")
        run = _play(plan, directory / f"seed-{seed}", bed=bed)
        done.append(run.summary)
        wanted += list(run.left_out)
        report.write_json(report.combine(done), directory / "report.json")
    total = report.combine(done)
    report.show(total, console)
    console.print(f"reports: {directory}")
    return total


def _share(wanted: list[str], seconds: float) -> tuple[list[str], list[str]]:
    """The kinds that this run begins with, so that each has its turn; and those for later."""
    count = int(seconds / PAUSE_SECONDS / 2)
    return wanted[:count], wanted[count:]


def _means(*, plain: bool) -> tuple[bool, list[str]]:
    """Whether there is a testbed, and the kinds of faults that can be had; tells what can't."""
    why = "it was not wanted" if plain else no_bed()
    if why is not None:
        console.print(f"no testbed, all on loopback: {why}")
    reasons = possible(bed=why is None)
    for kind, reason in reasons.items():
        if reason is not None and not (why is not None and FAULTS[kind].needs == "bed"):
            console.print(f"left out: {kind}: {reason}")
    return why is None, [kind for kind, reason in reasons.items() if reason is None]


def _play(plan: Plan, directory: Path, *, bed: bool) -> Run:
    began = journal.now()

    def say(what: str) -> None:
        console.print(f"  {journal.now() - began:6.1f}  {what}", highlight=False, markup=False)

    run = carry_out(plan, directory, bed=bed, say=say)
    report.write_json(run.summary, directory / "report.json")
    write_timeline(journal.read(directory), run.violations, directory / "timeline.html")
    for violation in run.violations:
        console.print(
            f"  {violation.guarantee} {violation.check} {violation.who}: {violation.what}",
            style="red",
            highlight=False,
            markup=False,
        )
    return run


def _play_named(name: str, out: Path, *, plain: bool, seed: int = 1) -> report.Summary:
    return _play_scenario(name, SCENARIOS[name], _directory(out, name), plain=plain, seed=seed)


def _play_scenario(
    name: str, one: Scenario, directory: Path, *, plain: bool, seed: int
) -> report.Summary:
    bed, kinds = _means(plain=plain)
    missing = {planned.kind for planned in one.faults} - set(kinds)
    if missing and not one.apart:
        console.print(f"{name} can't be played here: {', '.join(sorted(missing))}")
        raise typer.Exit(1)
    console.print(f"\n[bold]{name}[/]: {one.about}")
    plan = Plan(
        seed=seed,
        cast=one.cast,
        shape=one.shape,
        faults=[planned for planned in one.faults if planned.kind in kinds],
        seconds=one.seconds,
        calm=one.calm,
        bug=one.bug,
        apart=one.apart,
    )
    run = _play(plan, directory / "run", bed=bed)
    if not one.bug:
        report.show(run.summary, console)
    console.print(f"report: {directory / 'run'}")
    return run.summary


if __name__ == "__main__":
    app()
