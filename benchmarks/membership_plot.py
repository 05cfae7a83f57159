"""Draws what membership.py saved: detection times and bytes per peer against cluster size.

    python benchmarks/membership_plot.py

Rule of this file. It measures nothing; every point is in benchmarks/results/membership.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import machine

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "membership.png"

LINES = {
    "ours, process": ("tab:blue", "ours, the process died"),
    "ours, host": ("tab:green", "ours, the host died"),
    "no sockets": ("tab:orange", "ours without sockets"),
    "memberlist": ("tab:red", "memberlist's defaults"),
}


def draw(saved: dict[str, Any], out: Path) -> None:
    """Both panels, as PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _draw_detection(left, saved["detection"]["data"])
    _draw_traffic(right, saved["traffic"]["data"])
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _draw_detection(axes: Any, data: dict[str, Any]) -> None:
    curves: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in LINES}
    for key, case in data.items():
        peers, crashed = key.split("/")
        curves[f"ours, {crashed}"][int(peers)] = case["ours"]
        if crashed == "host":
            for other in ("no sockets", "memberlist"):
                curves[other][int(peers)] = case[other]
    for name, points in curves.items():
        colour, label = LINES[name]
        sizes = sorted(points)
        medians, tails = zip(*(points[size] for size in sizes), strict=True)
        axes.plot(sizes, medians, "o-", color=colour, label=label)
        axes.plot(sizes, tails, "o:", color=colour, markersize=3)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="peers",
        ylabel="seconds",
        title="Until everyone has declared a death, 5 % loss\nline: median, dots: 99th percentile",
    )
    _finish(axes)


def _draw_traffic(axes: Any, data: dict[str, Any]) -> None:
    for rate, style in (("0.0", "o-"), ("0.01", "o:")):
        for name in ("ours", "memberlist"):
            points = {}
            for key, case in data.items():
                peers, zones, loss, _ = key.split("/")
                if zones == "1" and loss == rate and case["memberlist"] is not None:
                    points[int(peers)] = case[name]["all"]["mean_bytes"]
            sizes = sorted(points)
            colour = "tab:blue" if name == "ours" else "tab:red"
            label = f"{'ours' if name == 'ours' else LINES[name][1]}, {float(rate):.0%} loss"
            axes.plot(sizes, [points[size] for size in sizes], style, color=colour, label=label)
        for key, case in data.items():
            peers, zones, loss, _ = key.split("/")
            if zones != "1" and loss == rate:
                label = f"ours, {zones} zones, {float(rate):.0%} loss"
                mean = case["ours"]["all"]["mean_bytes"]
                marker = "D" if rate == "0.0" else "s"
                axes.plot([int(peers)], [mean], marker, color="tab:green", label=label)
    axes.set(
        xscale="log",
        xlabel="peers",
        ylabel="bytes a second",
        title="What a peer sends while nothing happens",
        ylim=(0, None),
    )
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    saved = json.loads((machine.RESULTS / "membership.json").read_text(encoding="utf-8"))
    if {"detection", "traffic"} <= set(saved["results"]):
        draw(saved["results"], PICTURE)
        print(f"drawn: {PICTURE}")
    else:
        print("nothing drawn: that needs detection and traffic, both measured once")


if __name__ == "__main__":
    main()
