"""Another process, told what to do in JSON lines over its stdin and stdout.

Rule of this file. It starts a script of benchmarks/peers/ and talks with it as
peers/serving.py answers: `remote.write()` runs the method `write` there and returns what it
returned. `begin` and `result` are the two halves of that, so that two processes can work at
once. How the process is started (here, on a host of a testbed, under another interpreter) is
the caller's choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

PEERS = Path(__file__).parent / "peers"
QUIT_SECONDS = 10.0
PATIENCE = 180.0
"""Seconds for one command; far above what any takes."""

Start = Callable[..., "subprocess.Popen[Any]"]
"""What starts a program: Popen itself, or the `popen` of a testbed's host."""


class RemoteError(RuntimeError):
    """A command failed there, or the process died; the message says what it said last."""


class Remote:
    """A running script: `python SCRIPT ROLE SETTINGS`. Ready when `started` has returned."""

    def __init__(
        self,
        python: str,
        script: str,
        role: str,
        settings: dict[str, Any],
        *,
        environment: dict[str, str] | None = None,
        start: Start = subprocess.Popen,
    ) -> None:
        self.name = f"{Path(script).stem} {role}"
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        self._process = start(
            [python, str(PEERS / script), role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | (environment or {}),
        )

    def started(self) -> Remote:
        self.result()
        return self

    def begin(self, command: str, *arguments: object) -> None:
        """Start a command; `result` waits for it."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps([command, arguments]).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise RemoteError(f"{self.name} died: {self._last_words()}") from None

    def result(self) -> Any:
        assert self._process.stdout is not None
        # One answer at a time: nothing of the next one waits in the buffer.
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise RemoteError(f"{self.name} has not answered for {PATIENCE:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RemoteError(f"{self.name} died: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def __getattr__(self, command: str) -> Callable[..., Any]:
        def run(*arguments: object) -> Any:
            self.begin(command, *arguments)
            return self.result()

        return run

    def stop(self) -> None:
        """Let it do nothing, as SIGSTOP does, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Close its stdin, which ends it, and wait; kill it if it doesn't end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone
            self._process.stdin.close()
        try:
            self._process.wait(QUIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
