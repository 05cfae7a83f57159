"""benchmarks/membership.py, tiny: every section runs, is saved, drawn and put into the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULES = ("machine", "membership", "membership_plot", "membership_runs", "report")
pytestmark = pytest.mark.timeout(180)

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The scripts, imported as they import each other, with results in a folder of their own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    scripts = SimpleNamespace(**{name: __import__(name) for name in MODULES})
    monkeypatch.setattr(scripts.machine, "RESULTS", tmp_path)
    monkeypatch.setattr(scripts.machine, "facts", lambda: {"cpu": "none in particular"})
    monkeypatch.setattr(scripts.membership_plot, "PICTURE", tmp_path / "membership.png")
    yield scripts
    for name in MODULES:
        del sys.modules[name]


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["membership.py", "--quick", "--jobs", "0", *arguments])
    bench.membership.main()


def test_all_sections_are_measured_saved_drawn_and_reported(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(bench, monkeypatch)
    saved = json.loads((tmp_path / "membership.json").read_text())["results"]
    assert list(saved) == list(bench.membership.SECTIONS)
    said = capsys.readouterr().out
    for section in saved.values():
        assert section["rows"]
        assert all(len(row) == len(section["columns"]) for row in section["rows"])
        assert section["targets"]
        for target in section["targets"]:
            assert target["what"] in said
    assert (tmp_path / "membership.png").read_bytes().startswith(PNG)

    page = "".join(f"<!-- {m} -->\nold\n<!-- end of {m} -->\n" for m in bench.report.PLACES)
    written = bench.report.filled(page)
    assert "| peers | crash of |" in written
    assert "seeds from 1" in written
    others = len(bench.report.PLACES) - 1
    assert written.count("old\n") == others, "what was not measured stays as it is"


def test_a_seed_gives_the_same_figures_again(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = []
    for _ in range(2):
        run(bench, monkeypatch, "--only", "detection")
        saved = json.loads((tmp_path / "membership.json").read_text())
        rows.append(saved["results"]["detection"]["rows"])
    assert rows[0] == rows[1]


def test_who_never_learns_of_a_death_counts_as_infinitely_late(bench: Any) -> None:
    median, tail = bench.membership.spread([1.0] * 98 + [None, None])
    assert median == 1.0
    assert bench.membership.seconds(tail) == "never"
    assert bench.membership.finite({"p99": tail}) == {"p99": None}


def test_a_missed_target_is_named_in_the_report(bench: Any) -> None:
    target = bench.membership.Target("100 peers: deaths", 3, "<=", 0)
    assert not target.met
    assert "MISSED" in str(target)
    (count, missed) = bench.report.verdicts([{**vars(target), "met": target.met}])
    assert count == "Targets met: 0 of 1."
    assert "100 peers: deaths: 3, wanted <= 0" in missed
