"""Reading and writing files with weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from tensorhub_p2p.cli import checkpoints

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor([1], dtype=torch.bfloat16)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_what_was_saved_is_loaded_again(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "x.safetensors", TENSORS)
    assert same(checkpoints.load(tmp_path / "x.safetensors"), TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "x.safetensors", TENSORS)
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError):
        checkpoints.save(tmp_path / "x.safetensors", {"a": shared, "b": shared})
    assert same(checkpoints.load(tmp_path / "x.safetensors"), TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"model": t, "step": 3}])
def test_a_torch_checkpoint_is_unwrapped(tmp_path: Path, wrap: object) -> None:
    assert callable(wrap)
    torch.save(wrap(TENSORS), tmp_path / "x.pt")
    assert same(checkpoints.load(tmp_path / "x.pt"), TENSORS)


@pytest.mark.parametrize("content", [{}, {"step": 3}, [1], {"model": {"step": 3}}])
def test_a_file_without_tensors_is_refused_by_name(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(typer.BadParameter, match=r"x\.pt"):
        checkpoints.load(tmp_path / "x.pt")


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="no such file"):
        checkpoints.load(tmp_path / "nothing.safetensors")
