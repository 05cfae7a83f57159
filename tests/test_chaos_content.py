"""The bytes of a version: nothing that is mixed up can look right."""

from __future__ import annotations

import pytest

from chaos import content

SIZE = 70_000


@pytest.mark.parametrize(
    ("shard", "index", "version"),
    [(0, 0, 8), (0, 0, 6), (0, 0, 7 + 256), (0, 1, 7), (1, 0, 7)],
    ids=["the next version", "the one before", "256 later", "the next tensor", "another shard"],
)
def test_every_byte_differs_from_that_of(shard: int, index: int, version: int) -> None:
    this, other = content.expected(0, 0, SIZE, 7), content.expected(shard, index, SIZE, version)
    assert (this != other).all()


def test_neighbours_in_memory_differ_and_so_do_neighbouring_pages() -> None:
    found = content.expected(0, 0, SIZE, 7)
    assert (found[1:] != found[:-1]).mean() > 0.9
    assert (found[4096:] != found[:-4096]).mean() > 0.9


def test_one_wrong_byte_is_found_and_its_tensor_named() -> None:
    tensors = content.blank(3, SIZE)
    content.fill(tensors, 0, 7)
    assert content.wrong(tensors, 0, 7) == ()
    tensors["layer1"][SIZE - 1] ^= 1
    assert content.wrong(tensors, 0, 7) == ("layer1",)
