"""What stands in for threads: generators that wait for things to happen.

Rules of this file. A task is a generator that yields a `Pending` whenever a thread would
block, and is resumed with its value, or its error raised, in the same instant in which that
is settled. Nothing here knows what is waited for, nor the clock.

    def twice(peer):
        first = yield from peer.sleep(1.0)
        ...

A task whose peer crashes is simply never resumed, as a thread of a killed process. An error
that a task lets through ends the simulation: it is a bug of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Steps = Generator["Pending", Any, T]
"""A task, or a part of one (`yield from`), that returns a T."""


class Pending:
    """Something that will be settled once, with a value or an error."""

    __slots__ = ("_then", "error", "settled", "value")

    def __init__(self) -> None:
        self.settled = False
        self.value: Any = None
        self.error: Exception | None = None
        self._then: list[Callable[[], None]] = []

    def settle(self, value: object = None, error: Exception | None = None) -> None:
        """Let those who wait go on. Only the first call counts."""
        if self.settled:
            return
        self.settled, self.value, self.error = True, value, error
        waiting, self._then = self._then, []
        for then in waiting:
            then()

    def then(self, call: Callable[[], None]) -> None:
        """Call it once this is settled: at once if it is."""
        if self.settled:
            call()
        else:
            self._then.append(call)


def start(steps: Steps[T]) -> Pending:
    """Run a task up to its first wait; what is returned is settled with its end."""
    end = Pending()
    _resume(steps, end, None)
    return end


def _resume(steps: Steps[T], end: Pending, waited: Pending | None) -> None:
    """Go on until it waits for something that is not settled yet."""
    while waited is None or waited.settled:
        try:
            if waited is None:
                waited = next(steps)
            elif waited.error is not None:
                waited = steps.throw(waited.error)
            else:
                waited = steps.send(waited.value)
        except StopIteration as stop:
            end.settle(stop.value)
            return
    for_what = waited
    for_what.then(lambda: _resume(steps, end, for_what))
