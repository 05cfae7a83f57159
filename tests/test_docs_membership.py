"""docs/membership.md has every parameter of membership, with the value that it has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tensorhub_p2p.config import WIDE_AREA, SwimConfig, WireConfig, ZonesConfig

PAGE = Path(__file__).parent.parent / "docs" / "membership.md"
ROW = re.compile(r"^\| `(\w+)` \|(.*)$", re.MULTILINE)


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table under a heading: the cells after the field's name."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n### {heading}")[2]
    section = section.partition("\n### ")[0].partition("\n## ")[0]
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in ROW.findall(section)}


@pytest.mark.parametrize(
    ("heading", "config"), [("SwimConfig", SwimConfig()), ("ZonesConfig", ZonesConfig())]
)
def test_every_field_is_there_with_its_default(heading: str, config: object) -> None:
    rows = table(heading)
    defaults = {f.name: f"{getattr(config, f.name):g}" for f in fields(config)}  # type: ignore[arg-type]
    assert {name: f"{float(cells[0]):g}" for name, cells in rows.items()} == defaults


def test_what_differs_among_gateways_is_there() -> None:
    near = SwimConfig()
    differing = {
        f.name: getattr(WIDE_AREA, f.name)
        for f in fields(near)
        if getattr(WIDE_AREA, f.name) != getattr(near, f.name)
    }
    told = {name: float(cells[1]) for name, cells in table("SwimConfig").items() if cells[1]}
    assert told == differing


def test_what_is_told_of_watches_is_so() -> None:
    rows = table("WireConfig")
    assert {"watch_interval", "watch_timeout"} <= set(rows)
    assert {name: float(cells[0]) for name, cells in rows.items()} == {
        name: getattr(WireConfig(), name) for name in rows
    }
