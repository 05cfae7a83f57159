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


@pytest.mark.parametrize("name", ["x.pt", "x.md", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"hello,\nthis is a text\n", b"# A heading\n"])
def test_a_file_that_is_no_checkpoint_is_refused_with_a_short_reason(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(typer.BadParameter, match=r"no checkpoint that can be read: .") as caught:
        checkpoints.load(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 150


def test_a_pickled_module_is_refused_by_its_class_and_with_what_to_save(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(typer.BadParameter, match=r"torch\.nn\.[a-z.]*Linear.*state_dict\(\)"):
        checkpoints.load(tmp_path / "x.pt")


def test_half_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "x.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:300])
    with pytest.raises(typer.BadParameter, match=r"half\.pt is no checkpoint that can be read"):
        checkpoints.load(tmp_path / "half.pt")


def test_a_place_that_cannot_be_written_to_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints.check_writable(tmp_path / "x.safetensors")
    with pytest.raises(typer.BadParameter, match="is a folder"):
        checkpoints.check_writable(tmp_path)
    with pytest.raises(typer.BadParameter, match=r"there is no folder .*/nodir"):
        checkpoints.check_writable(tmp_path / "nodir" / "x.safetensors")
