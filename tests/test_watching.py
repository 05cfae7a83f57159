"""Of thousands of tensors, each one that is not where or what it was is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tensorhub_p2p.transfer.registering import find_all
from tensorhub_p2p.transfer.watching import BATCH, Watch

COUNT = 2 * BATCH + 1


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(2, 3) for _ in range(COUNT)]


def watch(*values: object) -> Watch:
    return Watch(find_all([(f"t{i}", value) for i, value in enumerate(values)]))


def point_elsewhere(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(2, 3)


@pytest.mark.parametrize("which", [0, BATCH - 1, BATCH, COUNT - 1])
@pytest.mark.parametrize(
    "change",
    [
        point_elsewhere,
        lambda t: t.t_(),
        lambda t: t.resize_(2, 2),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: t.as_strided_((2, 3), (0, 1)),
    ],
)
def test_one_of_many_that_changed_is_noticed(
    which: int, change: Callable[[torch.Tensor], object]
) -> None:
    many = sorted(tensors(), key=id)
    watched = watch(*many)
    assert watched.unchanged()
    many[which].fill_(1)
    assert watched.unchanged(), "new content is no change"
    change(many[which])
    assert not watched.unchanged()


def test_each_kind_is_asked_what_tells_it() -> None:
    columns, empty = torch.zeros(4, 6)[:, :2], torch.zeros(0, 3)
    kinds: list[Any] = [columns, empty, numpy.zeros((4, 6))[:, :3], torch.zeros(5), numpy.zeros(5)]
    watched = watch(*kinds)
    assert watched.unchanged()
    columns.as_strided_((4, 2), (5, 1))
    assert not watched.unchanged()
    columns.as_strided_((4, 2), (6, 1))
    assert watched.unchanged()
    empty.resize_(1, 3)
    assert not watched.unchanged()
    empty.resize_(0, 3)
    assert watched.unchanged()
    kinds[-1].resize(7, refcheck=False)
    assert not watched.unchanged()


def test_an_empty_tensor_has_no_byte_that_could_be_elsewhere() -> None:
    [found] = find_all({"empty": torch.zeros(0, 3)})
    found.address_of = lambda _: 1
    assert Watch([found]).unchanged()


def test_nothing_is_where_it_was() -> None:
    assert watch().unchanged()
