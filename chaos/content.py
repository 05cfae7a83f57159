"""The bytes of a version: each is a function of its place and the version.

Neighbours in the order of versions, and neighbours in memory, differ; so do the shards. A mix of
two versions, a chunk in another's place, or one shard's bytes in another can't go unnoticed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy

Tensors = dict[str, "numpy.ndarray[Any, Any]"]


def blank(count: int, size: int) -> Tensors:
    """`count` tensors of `size` bytes."""
    return {f"layer{index}": numpy.zeros(size, dtype=numpy.uint8) for index in range(count)}


def expected(shard: int, index: int, size: int, version: int) -> numpy.ndarray[Any, Any]:
    """The bytes of tensor `index` of this shard."""
    shift = 151 * version + 97 * (version >> 8) + 7 * index + 59 * shard
    found: numpy.ndarray[Any, Any] = _places(size) + numpy.uint8(shift % 256)
    return found


@lru_cache(4)
def _places(size: int) -> numpy.ndarray[Any, Any]:
    places = numpy.arange(size, dtype=numpy.uint32)
    return (places ^ places >> 8 ^ places >> 16).astype(numpy.uint8)


def fill(tensors: Tensors, shard: int, version: int) -> None:
    """Give them this version's bytes, in place."""
    for index, tensor in enumerate(tensors.values()):
        tensor[:] = expected(shard, index, tensor.size, version)


def wrong(tensors: Tensors, shard: int, version: int) -> tuple[str, ...]:
    """The tensors that have any byte that this version has not."""
    return tuple(
        name
        for index, (name, tensor) in enumerate(tensors.items())
        if not numpy.array_equal(tensor, expected(shard, index, tensor.size, version))
    )
