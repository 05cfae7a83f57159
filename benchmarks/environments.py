"""An environment for each system that ours is compared with, from the package index.

    python benchmarks/environments.py             make all that are missing; says which work
    python benchmarks/environments.py nixl ray    only these

Rule of this file. What a system needs is pinned in benchmarks/peers/requirements-NAME.txt, and
lands in benchmarks/.venvs/NAME, made on first use and made anew when its requirements change.
A system that can't be had here breaks nothing: `python_of` raises `Unavailable` with the
reason, and a benchmark prints it in the system's place.

Some need libraries of the system too (Debian's names): Mooncake libibverbs1, librdmacm1 and
libnuma1.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".venvs"
REQUIREMENTS = Path(__file__).parent / "peers"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
IMPORTS = {
    "nixl": "nixl_cu12._api",
    "ucxx": "ucxx",
    "mooncake": "mooncake.engine",
    "ray": "ray",
}
"""By system: the module that must import. Those that torch brings along need no environment."""
PIP = ("-m", "pip", "install", "--quiet")
INSTALL_SECONDS = 900
IMPORT_SECONDS = 120


class Unavailable(RuntimeError):
    """The system can't be run here; the message says why."""


def python_of(system: str) -> str:
    """The interpreter that has the system: this one for what torch brings along."""
    if system not in IMPORTS:
        return sys.executable
    where = FOLDER / system
    python = where / "bin" / "python"
    needs = REQUIREMENTS / f"requirements-{system}.txt"
    wanted = hashlib.sha256(needs.read_bytes()).hexdigest()
    ready = where / "ready"
    if not ready.exists() or ready.read_text(encoding="ascii") != wanted:
        print(f"installing {system} into benchmarks/.venvs/{system}")
        venv.create(where, with_pip=True, clear=True)
        _run(
            f"{system} could not be installed",
            [str(python), *PIP, "-c", str(CONSTRAINTS), "-r", str(needs)],
            INSTALL_SECONDS,
        )
        ready.write_text(wanted, encoding="ascii")
    module = IMPORTS[system]
    _run(f"{system} can't be imported", [str(python), "-c", f"import {module}"], IMPORT_SECONDS)
    return str(python)


def _run(trouble: str, command: list[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{trouble}: it took longer than {seconds:g} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(f"{trouble}: {said[-1]}")


def version_of(system: str) -> str:
    """The pinned version, as "nixl-cu12 1.5.1"; torch's for what it brings along."""
    if system not in IMPORTS:
        import torch

        return f"torch {torch.__version__}"
    needs = REQUIREMENTS / f"requirements-{system}.txt"
    return needs.read_text(encoding="ascii").splitlines()[0].replace("==", " ")


def main() -> int:
    missing = False
    for system in sys.argv[1:] or IMPORTS:
        try:
            python_of(system)
            print(f"{system}: {version_of(system)}")
        except Unavailable as error:
            missing = True
            print(f"{system}: {error}")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
