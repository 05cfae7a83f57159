"""`tensorhub-p2p simulate`: a cluster under faults, on a virtual clock.

What runs is the very code of a real peer (protocol/); network, sockets and time are
simulated. A run is decided by its options and its seed, and repeats exactly.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import inf
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tensorhub_p2p.cli import fault_plan, joining
from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.sim.faults import Partition, Pause, Schedule, Stall
from tensorhub_p2p.sim.link import Link, LogNormal
from tensorhub_p2p.sim.membership import MEMBERLIST, SEEDS, WAN, MembershipSim
from tensorhub_p2p.sim.record import Detection, Traffic, TrafficMeter, percentile

STEP = 0.5
"""Virtual seconds between two looks at the progress."""
PATIENCE = 60.0
"""Virtual seconds after the run for which views may still come to agree."""
LONGEST_LATENCY = 1.0
"""Seconds that no message exceeds, if the latency is given by its median."""
MAX_ZONE = SwimConfig().max_members


class Preset(str, Enum):
    """Whose settings: this library's, or those of memberlist (LAN defaults)."""

    ours = "ours"
    memberlist = "memberlist"


@dataclass(frozen=True)
class Setting:
    """Everything that decides a run."""

    peers: int
    zones: int
    loss: float
    latency: str
    faults: str
    seed: int
    duration: float
    preset: str
    sockets: bool


@dataclass(frozen=True)
class Crashes:
    """How the crashes of one kind were noticed. Seconds until everyone had declared them."""

    count: int
    unnoticed: int
    """Of which somebody didn't know at the end."""
    median: float | None
    p99: float | None
    longest: float | None


@dataclass(frozen=True)
class Outcome:
    """What a run showed."""

    setting: Setting
    trace: str
    """A hash of all that happened: equal for equal runs."""
    process_crashes: Crashes
    host_crashes: Crashes
    gil_stalls: int
    pauses: int
    partitions: int
    false_deaths: dict[str, int]
    """Peers that anybody held for dead though they lived, by what was wrong with them."""
    traffic: Traffic
    views_agree: bool
    agreed_after: float | None
    """Virtual seconds after the end until they did; None if not within `PATIENCE`."""


# -- options --


def _loss(text: str) -> float:
    """A probability, also as a percentage."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise typer.BadParameter(
            f'"{text}": give a probability below 1, as 0.05 or 5%', param_hint="--loss"
        )
    return value


def _latency(text: str) -> LogNormal | tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", text)
    low, high = (float(match[1]), float(match[2] or match[1])) if match else (0.0, 0.0)
    if not 0 < low <= high:
        raise typer.BadParameter(
            f'"{text}": give milliseconds, as 0.2-2 (anything between, equally likely) or 40 '
            f"(the median of what is now and then several times as long)",
            param_hint="--latency",
        )
    if match is not None and match[2] is None:
        return LogNormal(low / 1000, longest=LONGEST_LATENCY)
    return low / 1000, high / 1000


def _schedule(setting: Setting) -> Schedule:
    try:
        plan = fault_plan.parse(setting.faults)
        return fault_plan.draw(
            plan,
            seed=setting.seed,
            peers=setting.peers,
            duration=setting.duration,
            needed=SEEDS * setting.zones,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--faults") from error


# -- a run --


def _config(setting: Setting) -> SwimConfig | None:
    return MEMBERLIST if setting.preset == Preset.memberlist.value else None


def run(setting: Setting, schedule: Schedule, progress: Callable[[float], None]) -> Outcome:
    """Carry it out; `progress` is told the virtual time now and then."""
    sim = MembershipSim(
        setting.peers,
        zones=setting.zones,
        seed=setting.seed,
        config=_config(setting),
        sockets=setting.sockets,
        link=Link(_latency(setting.latency), setting.loss),
        between_zones=Link(WAN.latency, setting.loss),
    )
    schedule.play(sim)
    meter = TrafficMeter(sim.network)
    while (now := sim.network.now) < setting.duration:
        sim.run_for(min(STEP, setting.duration - now))
        progress(sim.network.now)
    return _outcome(sim, setting, schedule, meter.read())


def _outcome(sim: MembershipSim, setting: Setting, schedule: Schedule, traffic: Traffic) -> Outcome:
    detections = sim.record.detections()
    trace = f"{sim.network.trace:08x}"
    false_deaths = dict(sorted(sim.record.false_deaths_by_cause().items()))
    agree = sim.converged()
    agreed = agree or sim.run_until_converged(PATIENCE, every=STEP)
    return Outcome(
        setting,
        trace,
        _crashes([d for d in detections if not d.of_host]),
        _crashes([d for d in detections if d.of_host]),
        sum(isinstance(fault, Stall) for fault in schedule.faults),
        sum(type(fault) is Pause for fault in schedule.faults),
        sum(isinstance(fault, Partition) for fault in schedule.faults),
        false_deaths,
        traffic,
        agree,
        round(sim.network.now - setting.duration, 3) if agreed else None,
    )


def _crashes(detections: Sequence[Detection]) -> Crashes:
    times = [inf if d.everyone is None else d.everyone for d in detections]

    def at(share: float) -> float | None:
        value = percentile(times, share) if times else inf
        return round(value, 3) if value < inf else None

    return Crashes(len(times), times.count(inf), at(0.5), at(0.99), at(1.0))


# -- the command --

simulate = typer.Typer(
    help="Run a cluster under faults, on a virtual clock; a seed repeats a run exactly.",
    no_args_is_help=True,
)


@simulate.command()
def membership(
    peers: Annotated[int, typer.Option(min=2, help="How many, in all zones.")] = 100,
    zones: Annotated[int, typer.Option(min=1, help="Zones among which they are dealt out.")] = 1,
    loss: Annotated[str, typer.Option(help="Share of messages lost, as 0.05 or 5%.")] = "1%",
    latency: Annotated[
        str,
        typer.Option(help="One way, in milliseconds: a range, as 0.2-2, or a median, as 40."),
    ] = "0.2-2",
    faults: Annotated[
        str | None,
        typer.Option(
            show_default=f"{fault_plan.usual(MAX_ZONE)}; fewer in a small cluster",
            help="KIND=COUNT[:SECONDS], separated by commas, or none. Kinds: "
            f"{fault_plan.KINDS}. A count may be a percentage of the peers, seconds a range: "
            "crash=20,host-crash=2,gil=10%,pause=5:3-8. Crashes are for good; with seconds, a "
            "new peer starts there so long after.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Decides everything; drawn if not given.")
    ] = None,
    duration: Annotated[
        float, typer.Option(help="Virtual seconds; nothing new goes wrong in the last third.")
    ] = 60.0,
    preset: Annotated[
        Preset, typer.Option(help="Settings: ours, or memberlist's LAN defaults (no sockets).")
    ] = Preset.ours,
    sockets: Annotated[
        bool, typer.Option(help="Whether the evidence of connections is used.")
    ] = True,
    as_json: joining.AsJson = False,
) -> None:
    """Who is noticed to be dead, how fast, who is wrongly so, and what it costs.

    All peers know each other at the start. Several zones are 80 ms there and back from
    each other. Who sleeps while another one dies learns of it when it wakes, and counts until then
    as one who doesn't know.
    """
    if peers < 2 * zones:
        raise typer.BadParameter(
            f"{peers} peers in {zones} zones: give at least two a zone", param_hint="--peers"
        )
    if peers > MAX_ZONE * zones:
        raise typer.BadParameter(
            f"{peers} peers in {zones} zone(s): a peer remembers {MAX_ZONE} others of its zone; "
            f"give --zones {-(-peers // MAX_ZONE)} or more",
            param_hint="--peers",
        )
    if not 0 < duration < inf:
        raise typer.BadParameter("give more than 0 seconds", param_hint="--duration")
    _latency(latency)
    setting = Setting(
        peers,
        zones,
        _loss(loss),
        latency,
        fault_plan.usual(peers) if faults is None else faults,
        secrets.randbits(31) if seed is None else seed,
        duration,
        preset.value,
        sockets and preset is Preset.ours,
    )
    schedule = _schedule(setting)
    outcome = _with_progress(setting, schedule)
    if as_json:
        print(json.dumps({**asdict(outcome), "schedule": schedule.to_json()}))
    else:
        show(outcome, Console())


def _with_progress(setting: Setting, schedule: Schedule) -> Outcome:
    """The bar is on stderr, and only on a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total:g} virtual s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{setting.peers} peers, seed {setting.seed}", total=setting.duration)
        return run(setting, schedule, lambda now: bar.update(task, completed=now))


# -- what a person reads --


def show(outcome: Outcome, console: Console) -> None:
    """One table."""
    setting = outcome.setting
    table = Table(
        title=f"{setting.peers} peers in {setting.zones} zone(s), {setting.duration:g} virtual s, "
        f"{setting.loss:.3g} of messages lost, {setting.preset}"
        + ("" if setting.sockets else " without sockets"),
        show_header=False,
    )
    for name, crashes in (
        ("crashes of a process", outcome.process_crashes),
        ("crashes of a host", outcome.host_crashes),
    ):
        table.add_row(name, _described(crashes))
    table.add_row("stalls of the GIL", str(outcome.gil_stalls))
    table.add_row("pauses", str(outcome.pauses))
    if outcome.partitions:
        table.add_row("partitions", str(outcome.partitions))
    causes = ", ".join(f"{count} ({cause})" for cause, count in outcome.false_deaths.items())
    table.add_row("wrongly declared dead", causes or "nobody")
    traffic = outcome.traffic
    table.add_row(
        "each peer sends",
        f"{traffic.mean_bytes:.0f} B/s, at most {traffic.max_bytes:.0f}; "
        f"{traffic.mean_messages:.1f} messages/s, at most {traffic.max_messages:.1f}",
    )
    table.add_row("all views agree", _agreement(outcome))
    console.print(table)
    console.print(f"seed {setting.seed}, trace {outcome.trace}", highlight=False)


def _described(crashes: Crashes) -> str:
    if not crashes.count:
        return "0"
    if crashes.median is None:
        return f"{crashes.count}; not noticed by everyone: {crashes.unnoticed}"
    tail = f", p99 {crashes.p99:.2f} s" if crashes.p99 is not None else ""
    missing = f"; not noticed by everyone: {crashes.unnoticed}" if crashes.unnoticed else ""
    return f"{crashes.count}; everyone knew after {crashes.median:.2f} s (median){tail}{missing}"


def _agreement(outcome: Outcome) -> str:
    if outcome.views_agree:
        return "yes"
    if outcome.agreed_after is None:
        return f"[red]no[/], nor {PATIENCE:g} s later"
    return f"{outcome.agreed_after:g} s after the end"
