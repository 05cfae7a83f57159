"""Draws what single_link.py saved: GB/s of every system, with the spread over the rounds.

    python benchmarks/single_link_plot.py

Rule of this file. It measures nothing; every bar is in benchmarks/results/single_link.json.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import machine

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "single_link.png"
PLACES = ("one host", "two hosts")


def rates(case: dict[str, Any]) -> dict[str, list[float]]:
    """System → GB/s, round by round; ours, too."""
    size = case["size_bytes"]
    found: dict[str, list[float]] = {}
    for what, samples in case["samples"].items():
        for kind, name in (("ours", "ours"), ("other", what)):
            found.setdefault(name, []).extend(size / seconds / 1e9 for seconds in samples[kind])
    return found


def bars(saved: dict[str, Any], place: str) -> dict[str, list[float]]:
    """Of all cases of a place, fastest first."""
    found: dict[str, list[float]] = {}
    for key, case in saved.items():
        if key.startswith(place) and "samples" in case:
            for name, values in rates(case).items():
                found.setdefault(name, []).extend(values)
    return dict(sorted(found.items(), key=lambda pair: -statistics.median(pair[1])))


def draw(results: Path, out: Path = PICTURE) -> None:
    """A panel for each place, as PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    saved = json.loads(results.read_text(encoding="utf-8"))["results"]
    found = {place: bars(saved, place) for place in PLACES}
    found = {place: values for place, values in found.items() if values}
    heights = [len(values) for values in found.values()]
    figure, panels = plt.subplots(
        *(len(found), 1),
        figsize=(8.5, 1.2 * len(found) + 0.42 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, (place, values) in zip(panels[:, 0], found.items(), strict=True):
        _panel(axes, place, values)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _panel(axes: Any, place: str, values: dict[str, list[float]]) -> None:
    names = list(values)
    medians = [statistics.median(values[name]) for name in names]
    low = [median - min(values[name]) for median, name in zip(medians, names, strict=True)]
    high = [max(values[name]) - median for median, name in zip(medians, names, strict=True)]
    colours = ["tab:blue" if name == "ours" else "tab:gray" for name in names]
    axes.barh(names, medians, color=colours, xerr=[low, high], error_kw={"capsize": 3})
    axes.invert_yaxis()
    axes.set(
        xlabel="GB/s (bar: median of the rounds, line: least and most)",
        title={"one host": "Two processes of one host", "two hosts": "Two hosts, TCP"}[place],
        xlim=(0, None),
    )
    axes.grid(True, axis="x", alpha=0.3)


if __name__ == "__main__":
    draw(machine.RESULTS / "single_link.json")
    print(f"drawn: docs/images/{PICTURE.name}")
