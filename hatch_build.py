"""Builds the package's one C file, when the package is built or installed for development.

Without a C compiler the package is complete, too: the same loops run in Python, slower. That is
said here, and by `tensorhub-p2p doctor`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("tensorhub_p2p/transfer/native_loops.c")
LIBRARY = SOURCE.with_name("libnative_loops.so")
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


class NativeLoops(BuildHookInterface[Any]):
    """Compiles `SOURCE` to a library that knows nothing of Python: one for all its versions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        try:
            compile_library(root / SOURCE, root / LIBRARY)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            self.app.display_warning(f"{SOURCE} was not compiled, Python does it instead: {why}")
            return
        build_data["artifacts"].append(f"/{LIBRARY}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(source: Path, library: Path) -> None:
    """Raises OSError without a compiler, CalledProcessError where it fails; keeps nothing old."""
    library.unlink(missing_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    made = library.with_suffix(f".{os.getpid()}.so")
    try:
        subprocess.run(
            [*compiler, *FLAGS, "-o", str(made), str(source)],
            check=True,
            capture_output=True,
            text=True,
        )
        made.replace(library)  # whoever has the old one open keeps it
    finally:
        made.unlink(missing_ok=True)
