"""A process of a compared system: tensors, and commands that come over stdin as JSON lines.

Rule of this file. It imports torch and the standard library, so that it runs in every
system's environment. `serve(thing)` answers each line `[method, arguments]` on stdin with a
line `{"value": ...}` or `{"error": ...}`, until stdin ends; benchmarks/remote.py is the other
end. What a library prints goes to stderr. Who dies without a word takes its processes along.

A system is a pair of processes, `Source` and `Target`, both with a tensor of the same size:

    about = source.describe()                 what the target needs to reach it
    target.connect(about) | source.accept()   what is made once: connections, registrations
    source.give() | target.take()             one transfer; each returns (began, ended)

Times are those of the monotonic clock, which all processes of a machine share. What has no
part in a transfer returns None: the source of a one-sided read does.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch

Span = tuple[float, float]
PR_SET_PDEATHSIG = 1


class Side:
    """One process of a pair. A system overrides what it needs."""

    def __init__(self, size: int, **settings: Any) -> None:
        torch.set_num_threads(1)  # idle OpenMP threads would spin beside what is measured
        self.settings = settings
        self.tensor = torch.empty(size // 4, dtype=torch.int32).random_()
        """Every page of it is touched."""

    def write(self) -> None:
        """Give every byte range a new content."""
        self.tensor.add_(0x01010101)

    def fingerprint(self) -> str:
        return hashlib.blake2b(self.tensor.numpy(), digest_size=16).hexdigest()

    def describe(self) -> Any:
        return None

    def connect(self, about: Any) -> None:
        return None

    def accept(self) -> None:
        return None

    def settle(self) -> None:
        """Returns once nothing of its preparations goes on in the background."""

    def give(self) -> Span | None:
        return None

    def take(self) -> Span | None:
        return None

    def close(self) -> None:
        return None


class Stopwatch:
    """Takes the span of a `with` block."""

    def __enter__(self) -> Stopwatch:
        self.began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.span: Span = (self.began, time.monotonic())


def serve(sides: dict[str, type[Side]]) -> None:
    """Run the side that the command line names: ROLE and its settings, as JSON."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it may be spinning
    answers = os.dup(1)
    os.dup2(2, 1)
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    try:
        side = sides[role](**settings)
        _answer(answers, value="ready")
    except Exception as error:  # noqa: BLE001  it is raised at the other end of the pipe
        _answer(answers, error=_told(error))
        return
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            _answer(answers, value=getattr(side, command)(*arguments))
        except Exception as error:  # noqa: BLE001  as above
            _answer(answers, error=_told(error))
    side.close()


def _answer(answers: int, **what: Any) -> None:
    line = json.dumps(what).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


def _told(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"
