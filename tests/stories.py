"""Stories under tests/transcripts: a command, what happens then, the next command.

Rule of this file. It reads a story and has it told again; what a command means is the world's that
plays it. With REWRITE_TRANSCRIPTS=1 in the environment what happens is written down instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REWRITE = bool(os.environ.get("REWRITE_TRANSCRIPTS"))


@dataclass
class Step:
    above: list[str]
    """Comments and empty lines before it."""
    command: str
    expected: str


def parse(text: str) -> tuple[list[Step], list[str]]:
    """The steps of a story, and the lines that come after the last."""
    steps: list[Step] = []
    above: list[str] = []
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        if not line or line.startswith("#"):
            above.append(line)
            continue
        if lines and lines[0] == "----":
            lines.pop(0)
        expected = []
        while lines and lines[0]:
            expected.append(lines.pop(0))
        steps.append(Step(above, line, "\n".join(expected)))
        above = []
    return steps, above


def retell(story: Path, play: Callable[[str], str]) -> None:
    """Play each command, and see that what happens is what the story says."""
    steps, below = parse(story.read_text(encoding="utf-8"))
    assert steps
    told: list[str] = []
    for number, step in enumerate(steps):
        happened = play(step.command)
        if not REWRITE:
            assert happened == step.expected, f"{story.name}, step {number + 1}: {step.command}"
        told += [*step.above, step.command, "----", happened]
    if REWRITE:
        story.write_text("\n".join([*told, *below]) + "\n", encoding="utf-8")
