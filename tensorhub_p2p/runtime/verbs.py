"""From a verb of the control thread to a future in the caller's thread.

Rules of this file. Numbers and futures only: every verb that is started ends exactly one
future, with its result or its typed error, or with PeerClosed when the peer stops first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple

from tensorhub_p2p.errors import PeerClosed
from tensorhub_p2p.protocol.shards.verbs import Done, Failed, VerbId

Start = Callable[[float, VerbId, float], None]
"""`start(now, number, deadline)` on the control thread."""


class Running(NamedTuple):
    """A verb under way: its number, to interrupt it by, and its end."""

    number: VerbId
    future: Future[Any]


class RunningVerbs:
    """Verbs under way. `expect` is called by any thread, all else on the control thread."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._futures: dict[VerbId, Future[Any]] = {}

    def expect(self) -> Running:
        """A new verb. From here on its future has an end, also if the verb never starts."""
        running = Running(next(self._numbers), Future())
        self._futures[running.number] = running.future
        return running

    def begin(self, now: float, timeout: float, start: Start, number: VerbId) -> None:
        """Start the verb; its end will come as `Done` or `Failed` with its number."""
        try:
            start(now, number, now + timeout)
        except BaseException as error:  # noqa: BLE001 - it is raised where the verb was called
            future = self._futures.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def forget(self, number: VerbId) -> None:
        """It could not be handed over: whoever expected it knows."""
        self._futures.pop(number, None)

    def end(self, event: Done | Failed) -> None:
        future = self._futures.pop(event.verb, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(event, Done):
            future.set_result(event.result)
        else:
            future.set_exception(event.error)

    def close(self) -> None:
        """The peer stops: nobody may be left waiting."""
        for number in list(self._futures):
            future = self._futures.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(PeerClosed("this peer was closed during the call"))
