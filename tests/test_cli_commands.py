"""The commands that join a cluster, as a person would run them: as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub_p2p.cli import checkpoints
from tensorhub_p2p.transfer import native_loops

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

COMMAND = [sys.executable, "-c", "from tensorhub_p2p.cli import main; main()"]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("THUB_")},
    "THUB_CLUSTER": f"test-cli-{os.getpid()}",
    "THUB_SECRET": "a secret for the tests of the command line only",
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**ENVIRONMENT, "COLUMNS": "400", **environment},  # so that no message is wrapped
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def serving(file: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """`serve --json` of a file, ended by SIGTERM; gives what it printed."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(file), "--model", "m", "--json", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    tensors = {"w": torch.randn(300, 70), "b": torch.randn(7).to(torch.bfloat16)}
    checkpoints.save(path / "served.safetensors", tensors)
    checkpoints.save(
        path / "like.safetensors", {k: torch.zeros_like(t) for k, t in tensors.items()}
    )
    return path


def test_a_served_file_is_listed_and_pulled_byte_for_byte(folder: Path) -> None:
    with serving(folder / "served.safetensors", "--version", "5") as facts:
        seed = ["--seed", facts["address"]]
        members = run("members", "--json", *seed)
        assert [m["peer_id"] for m in json.loads(members.stdout)] == [facts["peer_id"]]

        versions = json.loads(run("versions", "m", "--json", *seed).stdout)
        assert [(v["version"], v["whole"]) for v in versions] == [(5, True)]

        out, like = folder / "out.safetensors", folder / "like.safetensors"
        pulled = run("pull", "m", str(out), "--like", str(like), "--json", *seed)
        assert pulled.returncode == 0, pulled.stderr
        assert json.loads(pulled.stdout)["version"] == 5

    expected = checkpoints.load(folder / "served.safetensors")
    got = checkpoints.load(folder / "out.safetensors")
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_file_with_other_tensors_is_refused_and_nothing_is_written(folder: Path) -> None:
    other = folder / "other.safetensors"
    checkpoints.save(other, {"w": torch.zeros(300, 71), "b": torch.zeros(7)})
    with serving(folder / "served.safetensors") as facts:
        out = folder / "never.safetensors"
        pulled = run("pull", "m", str(out), "--like", str(other), "--seed", facts["address"])
    assert pulled.returncode == 1
    assert "LayoutMismatch" in pulled.stderr
    assert "300" in pulled.stderr
    assert not out.exists()


def test_a_wrong_secret_is_said_in_one_line(folder: Path) -> None:
    with serving(folder / "served.safetensors") as facts:
        asked = run("members", "--seed", facts["address"], THUB_SECRET="another one, long enough")
    assert asked.returncode == 1
    assert asked.stderr.startswith("tensorhub-p2p: AuthenticationError: ")


def test_without_a_seed_there_is_nothing_to_ask() -> None:
    asked = run("members")
    assert asked.returncode == 1
    assert "--seed" in asked.stderr


UNREACHABLE = ("--seed", "127.0.0.1:1")
"""Who comes to join through it is too late: its mistake should have been found before."""


def test_a_version_that_is_none_is_a_usage_error_before_it_joins(folder: Path) -> None:
    like, out = folder / "like.safetensors", folder / "out.safetensors"
    pulled = run("pull", "m", str(out), "--like", str(like), "--version", "abc", *UNREACHABLE)
    assert pulled.returncode == 2
    assert "'abc' is no version" in pulled.stderr
    assert "Traceback" not in pulled.stderr


def test_a_folder_that_is_not_there_is_a_usage_error_before_it_joins(folder: Path) -> None:
    like, out = folder / "like.safetensors", folder / "nodir" / "out.safetensors"
    pulled = run("pull", "m", str(out), "--like", str(like), *UNREACHABLE)
    assert pulled.returncode == 2
    assert "there is no folder" in pulled.stderr
    assert "Traceback" not in pulled.stderr


def test_a_file_that_is_no_checkpoint_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    served = run("serve", str(tmp_path / "notes.txt"), "--model", "m")
    assert served.returncode == 2
    assert "is no checkpoint" in served.stderr
    assert "Traceback" not in served.stderr


def test_the_doctor_pulls_over_every_transport() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    works = {t["transport"]: t["works"] for t in report["transports"]}
    assert works["tcp"] is True
    assert set(works) == {"cma", "nixl", "ucx", "tcp"}
    assert report["machine"]["native_loops"] == (native_loops.why_not or "built")
    assert any("C compiler" in line for line in report["advice"]) == bool(native_loops.why_not)
