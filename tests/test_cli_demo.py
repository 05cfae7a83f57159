"""The demo as a whole: nine processes, a kill in the middle of a pull, and a newcomer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from tensorhub_p2p.cli import main; main()"]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_the_quick_demo_survives_its_accident_with_every_byte_right() -> None:
    result = subprocess.run(
        [*COMMAND, "demo", "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["ok"]
    assert summary["digests"]["wrong"] == 0
    assert summary["processes"]["rollout-2#1"]["state"] == "killed"
    assert summary["processes"]["rollout-2#1'"]["pulls"] > 0
