"""Put the saved figures into docs/performance.md, between its markers.

    python benchmarks/report.py

Nothing in those tables is typed by hand: it is what the last runs of the benchmarks (membership.py,
pull.py and the others) saved. Under a table comes a picture of its figures (figures_plot.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures_plot
import machine

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"


def facts(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case["machine"].items())


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


# --- pulls --------------------------------------------------------------------------------


def row(figure: dict[str, Any]) -> list[str]:
    speeds = ["" if figure[side] is None else f"{figure[side]:.2f}" for side in ("bare", "ours")]
    target = "" if figure["target"] is None else f"{figure['target'][0]} {figure['target'][1]:g}"
    met = "" if figure["target"] is None else ("yes" if figure["met"] else "**no**")
    value = f"{figure['value']:.4g} {figure['unit']}"
    what = figure["what"] + (f" ({figure['detail']})" if figure["detail"] else "")
    return [what, *speeds, value, target, met]


def rates(command: str) -> Callable[[dict[str, Any]], list[str]]:
    """A table for each case of a command that compares rates."""

    def lines(saved: dict[str, Any]) -> list[str]:
        found = []
        for name, case in saved.items():
            columns = ["what", "bare, GB/s", "ours, GB/s", "result", "target", "met"]
            found += [
                f"\n`python benchmarks/{command}.py --only {name}`, {case['rounds']} rounds. "
                f"{facts(case)}.\n",
                *table(columns, [row(figure) for figure in case["figures"]]),
            ]
        return found

    return lines


# --- beside other systems -----------------------------------------------------------------


def single_link(saved: dict[str, Any]) -> list[str]:
    """A table for each place, of all systems that were measured there."""
    lines = []
    for place, first in by_place(saved).items():
        columns = ["what", "theirs, GB/s", "ours, GB/s", "ours faster by", "target", "met"]
        rows, notes = [], []
        for key, case in saved.items():
            if not key.startswith(place):
                continue
            rows += [row(figure) for figure in case["figures"]]
            if "unavailable" in case:
                notes.append(f"{key} was not measured: {case['unavailable']}")
        lines += [
            f"\n**{first['about'].capitalize()}.** `python benchmarks/single_link.py --place "
            f'"{place}"`, {first["size_bytes"] >> 20} MiB, {first["rounds"]} rounds. '
            f"{versions(saved, place)}. {facts(first)}.\n",
            *table(columns, rows),
            "",
            *notes,
        ]
    return lines


def by_place(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Place → one of its cases that was measured."""
    found: dict[str, dict[str, Any]] = {}
    for key, case in saved.items():
        if "unavailable" not in case:
            found.setdefault(key.rpartition(", ")[0], case)
    return found


def versions(saved: dict[str, Any], place: str) -> str:
    told = {case.get("version") for key, case in saved.items() if key.startswith(place)}
    return ", ".join(sorted(version for version in told if version))


def experiment(saved: dict[str, Any]) -> list[str]:
    """A table for each case of one topology."""
    lines = []
    for case in saved.values():
        columns = ["what", "result", "target", "met"]
        lines += [
            f"\n`python benchmarks/{case['command']}`: {case['topology']}. {facts(case)}.\n",
            *table(columns, [plain(figure) for figure in case["figures"]]),
        ]
    return lines


# --- version after version ----------------------------------------------------------------


def many_versions(saved: dict[str, Any]) -> list[str]:
    """What each side held after the warm-up and at the end."""
    rows = []
    for name, case in saved.items():
        for side, after in case["after"].items():
            before = case["before"][side]
            memory = [f"{held['memory'] / 2**20:.0f}" for held in (before, after)]
            counts = [f"{before[k]} → {after[k]}" for k in ("descriptors", "threads", "exports")]
            rows.append([name, side, str(case["versions"]), " → ".join(memory), *counts])
    columns = ["transport", "side", "versions", "memory, MiB", "descriptors", "threads", "exports"]
    case = next(iter(saved.values()))
    return [
        f"\n`python benchmarks/many_versions.py`: of {case['size_bytes'] >> 20} MiB each, after "
        f"{case['warm_up']} versions and at the end. {facts(case)}.\n",
        *table(columns, rows),
    ]


# --- membership, simulated ----------------------------------------------------------------


def verdicts(targets: list[dict[str, Any]]) -> list[str]:
    """How many targets were met, and each that was not."""
    missed = [target for target in targets if not target["met"]]
    lines = [f"Targets met: {len(targets) - len(missed)} of {len(targets)}."]
    for target in missed:
        value = "never" if target["value"] is None else f"{target['value']:.3g}"
        wanted = f"{target['sign']} {target['bound']:g}"
        lines.append(f"- **missed**: {target['what']}: {value}, wanted {wanted}")
    return lines


def simulated(saved: dict[str, Any]) -> list[str]:
    lines = []
    for name, case in saved.items():
        lines += [
            f"\n**{case['about']}** `python benchmarks/membership.py --only {name}`, "
            f"{case['real_seconds']} s, seeds from {case['seed']}. {facts(case)}.\n",
            *table(case["columns"], case["rows"]),
            "",
            *case["notes"],
            *verdicts(case["targets"]),
        ]
    return lines


# --- membership, real processes -----------------------------------------------------------


def processes(saved: dict[str, Any]) -> list[str]:
    case = saved["membership_processes"]
    rows = []
    for key, what in (("kill", "kill -9, dead to all"), ("stop", "SIGSTOP, silent to all")):
        found = case[key]
        times = [
            f"{found['median_all'][side]:.2f} / {found['worst_all'][side]:.2f} s"
            for side in ("ours", "kinship")
        ]
        rows.append([what, str(found["rounds"]), *times, f"{found['times_faster']:.1f} ×"])
    pauses = case["pauses"]
    longest = max(pause["seconds"] for pause in pauses["ours"])
    deaths = [str(sum(p["deaths"] for p in pauses[side])) for side in ("ours", "kinship")]
    count = str(len(pauses["ours"]))
    rows.append([f"verdicts of death by pauses of up to {longest:g} s", count, *deaths, ""])
    stalls = case["stalls"]
    for key, what in (
        ("declared_dead_by", "verdicts of death on who held Python's lock for 10 s"),
        ("declares_dead", "verdicts of death by those, when they woke"),
    ):
        rows.append([what, str(len(stalls)), str(sum(stall[key] for stall in stalls)), "", ""])
    return [
        f"\n**Real processes: {case['peers']} peers of ours beside {case['peers']} of "
        f"{case['against']}, in one run.** `python benchmarks/membership_processes.py`. "
        f"{facts(case)}.\n",
        *table(["what", "trials", "ours", "kinship", "faster"], rows),
        "",
        "Times are the median / the worst of the trials; faster is the median of the ratios.",
    ]


# --- references ---------------------------------------------------------------------------


def control_plane(saved: dict[str, Any]) -> list[str]:
    case = saved["control_plane"]
    return [
        f"\n`python benchmarks/control_plane.py`, {case['peers']} processes. {facts(case)}.\n",
        *table(["what", "result", "target", "met"], [plain(f) for f in case["figures"]]),
    ]


def plain(figure: dict[str, Any]) -> list[str]:
    """A row without rates."""
    what, _bare, _ours, *rest = row(figure)
    return [what.strip(), *rest]


def pace(saved: dict[str, Any]) -> list[str]:
    case = saved["pace"]
    rows = [plain(figure)[:2] for figure in case["figures"]]
    return [
        f"\n`python benchmarks/pace.py`: a version each {case['step']:g} s, pulls of about "
        f"{case['pull']:g} s. {facts(case)}.\n",
        *table(["what", "result"], rows),
    ]


def storm(saved: dict[str, Any]) -> list[str]:
    case = saved["publish_storm"]
    columns = {
        "messages_a_publish": "messages a publish",
        "mean": "received by a peer, mean",
        "busiest": "by the busiest",
        "busiest_in_means": "in means",
        "buckets": "buckets",
        "least_seen_whole": "replicas seen whole by every reader",
        "met": "at most 5 means, and all seen",
    }
    return [
        f"\n`python benchmarks/publish_storm.py`, simulated: {case['replicas']} replicas of "
        f"{case['shards']} shards on {case['peers']} peers, within one second, "
        f"{case['real_seconds']} s of real time. {facts(case)}.\n",
        *table(list(columns.values()), [[shown(case[key]) for key in columns]]),
    ]


def shown(value: Any) -> str:
    return str(value) if not isinstance(value, bool) else ("yes" if value else "**no**")


# --- the page -----------------------------------------------------------------------------

PLACES: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "same host": ("same_host", rates("same_host")),
    "small tensors": ("small_tensors", rates("small_tensors")),
    "trainer": ("trainer_slowdown", rates("trainer_slowdown")),
    "versions": ("many_versions", many_versions),
    "figures": ("pull", rates("pull")),
    "membership": ("membership", simulated),
    "membership of processes": ("membership_processes", processes),
    "control plane": ("control_plane", control_plane),
    "pace": ("pace", pace),
    "storm": ("publish_storm", storm),
    "single link": ("single_link", single_link),
    "tcp link": ("tcp_link", rates("tcp_link")),
    "transports": ("transports", experiment),
    "fan out": ("fan_out", experiment),
    "deaths": ("failure", experiment),
    "zones": ("zones", experiment),
    "stall": ("stall", experiment),
    "elastic": ("elastic", experiment),
}
"""By marker in the page: the file of results, and what makes a text of it."""
PICTURED = set(PLACES) - {"membership", "membership of processes", "single link", "storm"}
"""Places that get a picture of their figures; others have one of their own, or no targets."""


def filled(page: str) -> str:
    """The page with all that was ever measured; a place without results stays as it is."""
    for marker, (name, text) in PLACES.items():
        path = machine.RESULTS / f"{name}.json"
        if not path.exists():
            continue
        saved = json.loads(path.read_text(encoding="utf-8"))["results"]
        lines = "\n".join(text(saved)).strip("\n")
        picture = figures_plot.draw(name) if marker in PICTURED else None
        if picture is not None:
            lines += f"\n\n![{name}: figures beside their targets](images/{picture.name})"
        before, opening, rest = page.partition(f"<!-- {marker} -->\n")
        _, closing, after = rest.partition(f"<!-- end of {marker} -->")
        if not opening or not closing:
            raise RuntimeError(f"{PAGE.name} has no place for {marker}")
        page = f"{before}{opening}\n{lines}\n\n{closing}{after}"
    return page


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} has the figures that were saved last")


if __name__ == "__main__":
    main()
