"""Draws what the benchmarks saved beside what was wanted; report.py has it done.

Rule of this file. It measures nothing: every bar is a figure in benchmarks/results/NAME.json that
has a target. A bar says how much of its target a figure reached (for one that should be small:
the target through the figure), so that all of them fit one axis and 1 is met.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import machine

IMAGES = Path(__file__).parent.parent / "docs" / "images"
MOST = 2.5
"""Where bars are cut off; their text says what they are."""


def reached(figure: dict[str, Any]) -> float:
    """The figure in units of its target: 1 and above is met."""
    sign, bound = figure["target"]
    value: float = figure["value"]
    if sign == ">=":
        return value / bound if bound else MOST
    return bound / value if value > 0 else MOST


def with_targets(results: Path) -> list[dict[str, Any]]:
    """The figures of all saved cases that should reach something, in their order."""
    if not results.exists():
        return []
    saved = json.loads(results.read_text(encoding="utf-8"))["results"]
    return [f for case in saved.values() for f in case.get("figures", ()) if f["target"]]


def draw(name: str) -> Path | None:
    """The picture of this benchmark; None if nothing is saved that has a target."""
    figures = with_targets(machine.RESULTS / f"{name}.json")
    if not figures:
        return None
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    picture, axes = plt.subplots(figsize=(9, 1.0 + 0.36 * len(figures)), layout="constrained")
    bars = [min(reached(figure), MOST) for figure in figures]
    places = range(len(figures))
    colours = ["tab:blue" if figure["met"] else "tab:orange" for figure in figures]
    axes.barh(places, bars, color=colours)
    axes.set_yticks(places, [figure["what"].strip() for figure in figures], fontsize=8)
    for place, figure in enumerate(figures):
        axes.text(0.02, place, _told(figure), va="center", fontsize=8)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlim=(0, max(1.2, *bars) * 1.02), xlabel="of its target (line: met)", title=name)
    out = IMAGES / f"{name}.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(out, dpi=110, metadata={"Software": None})
    plt.close(picture)
    return out


def _told(figure: dict[str, Any]) -> str:
    sign, bound = figure["target"]
    return f"{figure['value']:.3g} {figure['unit']} (wanted {sign} {bound:g})"
