"""What a reader borrows from its transport for itself alone: an agent, or a worker, of a library.

Rule of this file. It knows whose turn it is and whether the lent thing may be used again, and
nothing of what is done with it.

Theory. A library may still move bytes of a read that was given up; only the end of the thing
that reads is a fence. So a use that failed ends it, before the failure is told, and nobody
uses it again. Only SourceWithdrew spares it, where nothing is under way any more. What is
sound goes back to the transport when the reader is closed: at once, or, where another thread
closes it in the middle of a use, by the one who uses it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from tensorhub_p2p.transfer.transports.base import SourceGone, SourceWithdrew


class Lent(Protocol):
    """What can be borrowed. Used by one thread at a time."""

    @property
    def quiet(self) -> bool:
        """Nothing that was begun may still land."""

    def close(self) -> None:
        """The end of it: nothing lands any more."""


L = TypeVar("L", bound=Lent)


class Borrowed(Generic[L]):
    """One thing that is lent. Used by one thread at a time, but for `close`."""

    def __init__(self, lent: L, name: str, give_back: Callable[[L], None]) -> None:
        """`name` is what errors begin with; `give_back` takes back what is quiet."""
        self._lent: L | None = lent
        self.name = name
        self._give_back = give_back
        self._lock = threading.Lock()
        self._busy = False
        self._closed = False

    def check(self) -> None:
        """Raise SourceGone if it was closed; for those who wait."""
        if self._closed:
            raise SourceGone(f"{self.name}: the reader was closed")

    @contextlib.contextmanager
    def using(self) -> Iterator[L]:
        """Own it. SourceGone if it was closed, or ended."""
        with self._lock:
            if self._closed or self._lent is None:
                raise SourceGone(f"{self.name}: the reader was closed")
            self._busy = True
            lent = self._lent
        sound = False
        try:
            yield lent
            sound = True
        except SourceWithdrew:
            sound = lent.quiet
            raise
        finally:
            self._done(lent, sound)

    def _done(self, lent: L, sound: bool) -> None:
        """What isn't sound ends here: nothing lands any more."""
        with self._lock:
            self._busy = False
            if not sound:
                self._lent = None
            elif self._closed:
                self._part()
        if not sound:
            lent.close()

    def close(self) -> None:
        """Give it back. From another thread: once the use that is under way has ended."""
        with self._lock:
            self._closed = True
            if not self._busy:
                self._part()

    def _part(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            self._give_back(lent)
