"""What a figure needs to mean anything: the machine, medians of ratios, a file of results.

Rule of this file. It knows nothing of the library. What it writes down identifies a kind of
machine, never one machine: no host name, no user, no path.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def facts() -> dict[str, Any]:
    """The machine and the versions that a figure depends on."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory_bytes() / 2**30),
        "kernel": platform.release(),
        "transparent_huge_pages": _selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _selected(path: str) -> str:
    """The chosen word of a "one [two] three" setting."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def median_ratio(ours: Sequence[float], bare: Sequence[float]) -> float:
    """The median over the rounds of ours / bare, each pair taken in the same round.

    A ratio within a round cancels what slows both down; the median drops the rounds in which
    something hit only one.
    """
    return statistics.median(a / b for a, b in zip(ours, bare, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(percent / 100 * (len(ranked) - 1)))]


def save(name: str, machine: dict[str, Any], results: dict[str, Any]) -> Path:
    """Merge these results into results/NAME.json; those that were not measured now stay."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text())["results"] if path.exists() else {}
    for result in results.values():
        result["machine"] = machine
    path.write_text(json.dumps({"results": kept | results}, indent=2) + "\n")
    return path
