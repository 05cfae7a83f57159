"""Whether registered tensors still are where they were, asked of thousands of them at once.

Rule of this file. It compares with what was found at registration, and says only whether
anything changed; `Found.moved` says it of one.

Why. Each `publish` and `replicate` asks this first, and twenty thousand tensors are megabytes
of objects that left the processor's cache long ago: looking them up takes longer than their
bytes take to be moved, unless it is done in the order in which they were made, with no Python
between two of them. So each question is put to a few hundred at a time, which are in the cache
when the next question is put to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tensorhub_p2p.transfer.registering import Found

BATCH = 256
"""Tensors that are asked one question until they are asked the next one."""

Questions = tuple[Callable[[Any], object], ...]


class _Batch(NamedTuple):
    """Tensors, what is asked of each of them, and what they answered at registration."""

    tensors: list[Any]
    questions: Questions
    answers: tuple[list[object], ...]


class Watch:
    """The tensors of one region, by what tells their address."""

    def __init__(self, found: list[Found]) -> None:
        alike: dict[Questions, list[Found]] = {}
        for f in sorted(found, key=lambda f: id(f.tensor)):  # neighbours in memory, mostly
            alike.setdefault(_questions(f), []).append(f)
        self._batches = [
            _batch(questions, members[first : first + BATCH])
            for questions, members in alike.items()
            for first in range(0, len(members), BATCH)
        ]

    def unchanged(self) -> bool:
        """Nobody says anything else than at registration."""
        return all(
            list(map(ask, tensors)) == known
            for tensors, questions, answers in self._batches
            for ask, known in zip(questions, answers, strict=True)
        )


def _questions(f: Found) -> Questions:
    """The address first: what it looks up has the other answers, too. Empty ones have none."""
    return (f.address_of, f.size_of, f.form_of) if f.size else (f.size_of, f.form_of)


def _batch(questions: Questions, members: list[Found]) -> _Batch:
    known: tuple[list[object], ...] = ([f.size for f in members], [f.form for f in members])
    if len(questions) > len(known):
        known = ([f.footprint.address for f in members], *known)
    return _Batch([f.tensor for f in members], questions, known)
