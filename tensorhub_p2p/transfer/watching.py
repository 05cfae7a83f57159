"""Whether registered tensors still are where they were, asked of thousands of them at once.

Rule of this file. It compares with what was found at registration, and says only whether
anything changed; `Found.moved` says it of one.

Why. Each `publish` and `replicate` asks this first, and twenty thousand tensors are megabytes
of objects that left the processor's cache long ago: looking them up takes longer than their
bytes take to be moved, unless it is done in the order in which they were made, and once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorhub_p2p.transfer.registering import Found


class Watch:
    """The tensors of one region, by what tells their address."""

    def __init__(self, found: list[Found]) -> None:
        self._by_call: dict[
            tuple[Callable[[Any], int], Callable[[Any], int], Callable[[Any], object]],
            list[tuple[Any, int, int, object]],
        ] = {}
        """(tensor, its address, its size, its form), as they were, by what tells them."""
        for f in sorted(found, key=lambda f: id(f.tensor)):  # neighbours in memory, mostly
            known = (f.tensor, f.footprint.address, f.size, f.form)
            calls = (f.address_of, f.size_of, f.form_of)
            self._by_call.setdefault(calls, []).append(known)

    def unchanged(self) -> bool:
        """Nobody says anything else than at registration."""
        for (address_of, size_of, form_of), known in self._by_call.items():
            for tensor, address, size, form in known:
                if size_of(tensor) != size or form_of(tensor) != form:
                    return False
                if size and address_of(tensor) != address:
                    return False
        return True
