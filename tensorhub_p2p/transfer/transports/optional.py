"""Libraries that only some machines have: found without being loaded, tried at a safe distance.

Rule of this file. Nothing here loads such a library into this process. A native library
may crash or hang while it is loaded or looks for devices, so it is first used in a process
of its own, with a time limit; what that says is remembered for the life of this one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

DEVICES = "/sys/class/infiniband"
"""Where the kernel lists RDMA devices (InfiniBand, RoCE, EFA)."""

_lock = threading.Lock()
_verdicts: dict[tuple[str, str], str | None] = {}


def rdma_devices() -> list[str]:
    """The names of this machine's RDMA devices."""
    try:
        return sorted(os.listdir(DEVICES))
    except OSError:
        return []


def installed(candidates: Sequence[str]) -> str | None:
    """The first of these top-level modules that is installed, or None. Imports nothing."""
    for name in candidates:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except (ImportError, ValueError):  # a module that replaced itself in sys.modules
            continue
    return None


def try_apart(module: str, code: str, patience: float) -> str | None:
    """Run `code` in a Python of its own; None if it ends well, else why not.

    `patience` in seconds. The first answer for (module, code) is kept.
    """
    with _lock:
        if (module, code) not in _verdicts:
            _verdicts[module, code] = _run(module, code, patience)
        return _verdicts[module, code]


def _run(module: str, code: str, patience: float) -> str | None:
    if not sys.executable:
        return f"{module} can't be tried here: this process doesn't know its Python"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return f"{module} is installed, but did not start within {patience:g} s"
    except OSError as error:
        return f"{module} can't be tried: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines()
    why = said[-1][:200] if said else f"it ended with status {done.returncode}"
    if done.returncode < 0:
        why = f"it crashed with signal {-done.returncode}"
    return f"{module} is installed, but doesn't work here: {why}"
