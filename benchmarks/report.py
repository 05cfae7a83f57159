"""Put the saved figures into docs/performance.md, between its markers.

    python benchmarks/report.py

Nothing in that table is typed by hand: it is what the last run of pull.py saved.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "pull.json"
PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def row(figure: dict[str, Any]) -> str:
    rates = ["" if figure[side] is None else f"{figure[side]:.2f}" for side in ("bare", "ours")]
    target = "" if figure["target"] is None else f"{figure['target'][0]} {figure['target'][1]:g}"
    met = "" if figure["target"] is None else ("yes" if figure["met"] else "**no**")
    value = f"{figure['value']:.3g} {figure['unit']}"
    what = figure["what"] + (f" ({figure['detail']})" if figure["detail"] else "")
    return f"| {what} | {rates[0]} | {rates[1]} | {value} | {target} | {met} |"


def tables(saved: dict[str, Any]) -> str:
    lines = []
    for name, case in saved["results"].items():
        facts = ", ".join(f"{key} {value}" for key, value in case["machine"].items())
        lines += [
            f"\n`python benchmarks/pull.py --only {name}`, {case['rounds']} rounds. {facts}.\n",
            "| what | bare, GB/s | ours, GB/s | result | target | met |",
            "|---|---|---|---|---|---|",
            *(row(figure) for figure in case["figures"]),
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


def main() -> None:
    saved = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    written = TABLE.sub(lambda match: match[1] + "\n" + tables(saved) + "\n" + match[2], page)
    PAGE.write_text(written, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} has the figures of {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
