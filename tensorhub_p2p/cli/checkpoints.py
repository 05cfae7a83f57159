"""Files with weights: safetensors, or what torch.save wrote. Tensors by name, in the file's order.

A torch checkpoint is read with `weights_only`, so a file can't run code. One that wraps
its weights ({"model": {...}, "optimizer": ...}) is unwrapped where that is unambiguous.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("state_dict", "model", "model_state_dict", "module")


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint. Exits with a message when the file is none."""
    if not path.is_file():
        raise typer.BadParameter(f"{path}: no such file")
    if path.suffix == ".safetensors":
        library = _safetensors(path)
        return _read(path, lambda: library.load_file(path))  # type: ignore[no-any-return]
    import torch

    return _unwrapped(
        path, _read(path, lambda: torch.load(path, map_location="cpu", weights_only=True))
    )


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file beside `path`, then move it there: never half a file."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        _safetensors(path).save_file(tensors, partial)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def check_writable(path: Path) -> None:
    """Exits with a message unless `save` can write there: said before anything is moved."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: name the file to write")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{path}: the folder {path.parent} can't be written to")


def _read(path: Path, reader: Callable[[], Any]) -> Any:
    """What the reader makes of the file; a file that is none may make it raise anything."""
    try:
        return reader()
    except Exception as error:
        raise typer.BadParameter(
            f"{path} is no checkpoint that can be read: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """In short: torch's own messages are paragraphs about how to go without `weights_only`."""
    text = str(error)
    foreign = re.search(r"Unsupported (?:global: GLOBAL|class) (\S+)", text)
    if foreign is not None:
        return (
            f"it has a {foreign[1]} in it, and of a torch file only tensors and plain values are "
            "read: save the state_dict() instead"
        )
    if isinstance(error, (OSError, RuntimeError)) or type(error).__module__.startswith("safetens"):
        return re.split(r"\. |\n", text)[0]
    return f"it is not what torch.save writes ({type(error).__name__})"


def _safetensors(path: Path) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise typer.BadParameter(
            f"{path}: files of this kind need the package safetensors: pip install safetensors"
        ) from error
    return safetensors.torch


def _unwrapped(path: Path, content: object) -> dict[str, Tensor]:
    import torch

    if isinstance(content, dict):
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            return {str(name): tensor for name, tensor in content.items()}
        inner = [content[key] for key in WRAPPERS if isinstance(content.get(key), dict)]
        if len(inner) == 1:
            return _unwrapped(path, inner[0])
    raise typer.BadParameter(
        f"{path}: holds no tensors by name, neither at the top nor under {', '.join(WRAPPERS)}"
    )
