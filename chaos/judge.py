"""Reads the journals of a run, and says what was broken: `python -m chaos.judge DIRECTORY`.

In a process of its own, which knows nothing but these files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from chaos import journal
from chaos.checks import violations
from chaos.history import history


def main() -> None:
    found = violations(history(journal.read(Path(sys.argv[1]))))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
