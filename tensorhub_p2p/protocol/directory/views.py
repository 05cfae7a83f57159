"""What a peer knows of the keys that it watches, without asking again.

Rules of this file. A `Views` keeps registers that others told; it asks nobody, and what it
knows proves nothing: it is as good as a read of some moments ago. Who has to be sure reads.

Theory of operation. A view begins with a read of R owners. From then on owners push what
changes (watchers.py), and the own writes are added once W owners have them. All of it merges by
the maximum of each cell (registers.py), so that order and repetition don't matter. A change that
is told without its registers, or a change of the owners, ends what is known until the next read.
So does no push that got lost: the view's fingerprint goes with each renewal of the watch, and an
owner that holds something else says so.

A read tells nothing of what was withdrawn, and may come from owners that a change has not
reached yet. So what was told since the read before is merged into it once more.

What bounds it: one view for each watched key, of as many registers as a read of it has, and
as were told since.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tensorhub_p2p.protocol.directory.registers import Cell, fingerprint, merge
from tensorhub_p2p.protocol.messages import Key, Register


@dataclass
class View:
    """Of one key."""

    cells: dict[Cell, Register] = field(default_factory=dict)
    told: dict[Cell, Register] = field(default_factory=dict)
    """What was told since the last read."""
    is_known: bool = False


class Views:
    """The views of one peer."""

    def __init__(self) -> None:
        self._views: dict[Key, View] = {}

    def begin(self, key: Key) -> None:
        """The key is watched from now on."""
        self._views.setdefault(key, View())

    def end(self, key: Key) -> None:
        self._views.pop(key, None)

    def read(self, key: Key, registers: Iterable[Register]) -> None:
        """R owners have said what they hold of it."""
        view = self._views.get(key)
        if view is not None:
            view.cells = {register.cell: register for register in registers}
            merge(view.cells, view.told.values())
            view.told = {}
            view.is_known = True

    def tell(self, key: Key, registers: Iterable[Register]) -> None:
        """These have changed."""
        view = self._views.get(key)
        if view is not None:
            merge(view.told, registers)
            merge(view.cells, view.told.values())

    def lose(self, key: Key) -> None:
        """Something changed, and nobody says what."""
        view = self._views.get(key)
        if view is not None:
            view.is_known = False

    def known(self, key: Key) -> tuple[Register, ...] | None:
        """What stands there, as far as is known; None if there was a change since, or no read."""
        view = self._views.get(key)
        if view is None or not view.is_known:
            return None
        return tuple(register for register in view.cells.values() if register.value is not None)

    def seen(self, key: Key) -> int:
        """The fingerprint of what is known; 0 if nothing is."""
        view = self._views.get(key)
        return fingerprint(view.cells.values()) if view is not None and view.is_known else 0
