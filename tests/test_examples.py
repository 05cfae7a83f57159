"""What the documents show is run as it is pasted, and what they name exists.

The commands of the README run in a shell. Only the address is another one: a free port of this
machine stands for the port that the README has, and loopback for the other machine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tensorhub_p2p as th
from tensorhub_p2p.options import PeerOptions

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATIENCE = 90.0
"""Seconds for anything to happen on a busy machine."""

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def section(title: str, text: str = README) -> str:
    """The text below a heading, up to the next heading."""
    _, _, after = text.partition(f"# {title}\n")
    assert after, f"there is no section {title!r}"
    return re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def commands(text: str) -> list[str]:
    lines = (line for block in blocks(text, "console") for line in block.splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


class Terminal:
    """A command that runs as it would in a terminal, with this Python's commands on the path."""

    def __init__(self, command: str, **variables: str) -> None:
        self.command = command
        self.lines: list[str] = []
        self._news = threading.Condition()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        plain = {k: v for k, v in os.environ.items() if not k.startswith("THUB_")}
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            cwd=ROOT,
            env={**plain, "PATH": path, "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.lines.append("<end>")
            self._news.notify_all()

    def wait_for(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """The first `times` lines that match, as soon as there are so many."""
        deadline = time.monotonic() + PATIENCE
        with self._news:
            while True:
                found = [m for line in self.lines if (m := re.search(pattern, line))]
                if len(found) >= times:
                    return found[:times]
                left = deadline - time.monotonic()
                if left <= 0 or "<end>" in self.lines:
                    shown = "\n".join(self.lines)
                    pytest.fail(f"{self.command}: not {times} times {pattern!r} in:\n{shown}")
                self._news.wait(left)

    def ends_well(self) -> None:
        self.wait_for("^<end>$")
        assert self.process.wait(PATIENCE) == 0, "\n".join(self.lines)

    def interrupt(self) -> None:
        """Ctrl-C; it has to end by it."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(PATIENCE)


@contextmanager
def terminals(*started: Terminal) -> Iterator[None]:
    try:
        yield
    finally:
        for terminal in started:
            if terminal.process.poll() is None:
                terminal.process.kill()
                terminal.process.wait(PATIENCE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def at_port(command: str, port: int) -> str:
    """The same command at another port, and with this machine as the other one."""
    if "trainer.py" in command and "--bind" not in command:
        command += " --bind 127.0.0.1:7946"
    return command.replace(":7946", f":{port}").replace("10.0.0.1", "127.0.0.1")


# --- what runs ---------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(2 * PATIENCE)
def test_the_first_example_runs_as_pasted(tmp_path: Path) -> None:
    script = tmp_path / "pasted.py"
    script.write_text(blocks(section("Quickstart"), "python")[0], encoding="utf-8")
    pasted = Terminal(f"python {script}")
    with terminals(pasted):
        pasted.ends_well()
        assert "version 1 of 'policy'" in pasted.lines[0]


@pytest.mark.processes
@pytest.mark.timeout(3 * PATIENCE)
@pytest.mark.parametrize("title", ["Two terminals", "Two machines"])
def test_trainer_and_rollout_run_as_pasted_and_agree_on_every_version(title: str) -> None:
    variables = {"THUB_SECRET": th.keygen()} if title == "Two machines" else {}
    port = free_port()
    pasted = [at_port(c, port) for c in commands(section(title)) if c.startswith("python ")]
    trainer, rollout = (Terminal(command, **variables) for command in pasted)
    with terminals(trainer, rollout):
        pulled = rollout.wait_for(r"^pulled version (\d+), loss ([\d.]+)$", times=3)
        published = trainer.wait_for(r"^published version (\d+), loss ([\d.]+)$", times=3)
        while published[-1][1] != pulled[-1][1]:
            published = trainer.wait_for(published[0].re.pattern, times=len(published) + 1)
        trainer.interrupt()
        rollout.interrupt()
    losses = {match[1]: float(match[2]) for match in published}
    for match in pulled:
        assert float(match[2]) == pytest.approx(losses[match[1]], abs=2e-6)
    assert len(set(losses.values())) == len(losses), "the trainer learns nothing"


@pytest.mark.processes
@pytest.mark.timeout(2 * PATIENCE)
def test_the_prefetching_example_copies_what_came_ahead() -> None:
    example = Terminal("python examples/prefetching.py")
    with terminals(example):
        example.wait_for("version 3: 33554432 bytes were here, 0 came")
        example.ends_well()


@pytest.mark.processes
@pytest.mark.timeout(2 * PATIENCE)
def test_the_torchrun_example_runs_as_pasted() -> None:
    (command,) = commands(section("Under torchrun"))
    job = Terminal(command.replace("torchrun", f"torchrun --master-port {free_port()}", 1))
    with terminals(job):
        job.ends_well()
        job.wait_for("trainer and rollout hold the same bytes")
        job.wait_for("rank 2 has version 5")
        job.wait_for("rank 3 has version 5")


def test_a_key_is_made_as_pasted() -> None:
    command = commands(section("Two machines"))[0]
    keygen = Terminal(command)
    with terminals(keygen):
        keygen.ends_well()
        assert len(keygen.lines[0]) >= 40


def test_every_command_of_the_readme_is_run_by_a_test_or_by_make() -> None:
    here = [
        *commands(section("Two terminals")),
        *commands(section("Two machines")),
        *commands(section("Under torchrun")),
    ]
    elsewhere = [*commands(section("Install")), *commands(section("See it work"))]
    assert set(commands(README)) == {*here, *elsewhere}
    assert elsewhere == [
        "python3 -m venv .venv",
        "source .venv/bin/activate",
        "pip install .",
        "make demo",
    ]


# --- what is written ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two_peers", "trainer", "rollout"])
def test_what_the_readme_shows_is_the_file(name: str) -> None:
    assert (ROOT / f"examples/{name}.py").read_text(encoding="utf-8") in blocks(README, "python")


def anchors(document: Path) -> set[str]:
    """What can be linked to: headings in lower case, with dashes for spaces."""
    headings = HEADING.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path) if path else document
        assert linked.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(linked), f"{document.name}: {target}"


@pytest.mark.parametrize("name", ["guarantees.md", "threat-model.md"])
def test_tests_that_a_document_names_exist(name: str) -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_guide_names_every_error_state_and_variable() -> None:
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    public = (getattr(th, name) for name in th.__all__)
    errors = [t for t in public if isinstance(t, type) and issubclass(t, th.TensorHubError)]
    names = [error.__name__ for error in errors]
    names += [state.name for state in th.HandleState]
    names += [f"THUB_{field.upper()}" for field in PeerOptions.__dataclass_fields__]
    assert [name for name in names if f"`{name}`" not in guide and f"th.{name}" not in guide] == []


def test_settings_that_the_guide_names_exist() -> None:
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+Config)\.(\w+)`", guide)
    assert named
    for config, field in named:
        assert field in getattr(th, config).__dataclass_fields__, f"{config}.{field}"
