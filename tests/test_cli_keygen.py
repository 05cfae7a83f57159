"""`tensorhub-p2p keygen`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from tensorhub_p2p.cli import app

runner = CliRunner()


def test_every_key_is_new_and_has_256_bits() -> None:
    keys = {runner.invoke(app, ["keygen"]).stdout.strip() for _ in range(5)}
    assert len(keys) == 5
    assert all(len(key) >= 43 for key in keys)


def test_the_key_can_be_had_as_json() -> None:
    result = runner.invoke(app, ["keygen", "--json"])
    assert len(json.loads(result.stdout)["secret"]) >= 43
