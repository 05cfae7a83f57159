"""Whether registered tensors still are where they were, asked of thousands of them at once.

Rule of this file. It compares with what was found at registration, and says only whether
anything changed; `Found.moved` says it of one.

Why. Each `publish` and `replicate` asks this first. Asked one by one, twenty thousand tensors
take longer than their bytes take to be moved. `map` asks them from C.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from tensorhub_p2p.transfer.registering import Found

_nbytes = attrgetter("nbytes")


class Watch:
    """The tensors of one region, by what is asked of them."""

    def __init__(self, found: list[Found]) -> None:
        self._asked: list[tuple[Callable[[Any], object], list[Any], list[object]]] = []
        """(what is asked, whom, what they said at registration)."""
        self._ask(_nbytes, [(f.tensor, f.spec.num_bytes) for f in found])
        by_call: dict[Callable[[Any], int], list[tuple[Any, object]]] = {}
        for f in found:
            if f.spec.num_bytes:
                by_call.setdefault(f.address_of, []).append((f.tensor, f.address))
        for call, expected in by_call.items():
            self._ask(call, expected)

    def _ask(self, call: Callable[[Any], object], expected: list[tuple[Any, object]]) -> None:
        self._asked.append((call, [t for t, _ in expected], [said for _, said in expected]))

    def unchanged(self) -> bool:
        """Nobody says anything else than at registration."""
        return all(list(map(call, tensors)) == said for call, tensors, said in self._asked)
