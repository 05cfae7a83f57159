"""Reads the journals of a run, and says what was broken: `python -m chaos.judge DIRECTORY`.

In a process of its own, which knows nothing but these files. Exit codes: 0 nothing was broken, 1
something was; 2 no run has left its journals there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from chaos import journal
from chaos.checks import violations
from chaos.history import history


def main(arguments: list[str]) -> int:
    directory = Path(*arguments[:1])
    if not arguments or not (directory / f"{journal.RUNNER}.jsonl").is_file():
        where = "python -m chaos.judge chaos-runs/DATE-NAME/seed-N, or .../run of a named one"
        print(f"no journals of a run in {directory}: {where}", file=sys.stderr)
        return 2
    found = violations(history(journal.read(directory)))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
