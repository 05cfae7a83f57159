"""From a verb of the control thread to a future in the caller's thread.

Rules of this file. Numbers and futures only: every verb that is started ends exactly one
future, with its result or its typed error, or with PeerClosed when the peer stops first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from tensorhub_p2p.errors import PeerClosed
from tensorhub_p2p.protocol.verbs import Done, Failed, VerbId

Start = Callable[[float, VerbId, float], None]
"""`start(now, number, deadline)` on the control thread."""


class RunningVerbs:
    """Verbs under way; `begin` and the ends run on the control thread."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._futures: dict[VerbId, Future[Any]] = {}

    def begin(self, now: float, timeout: float, start: Start, future: Future[Any]) -> None:
        """Start the verb; its end will come as `Done` or `Failed` with its number."""
        number = next(self._numbers)
        self._futures[number] = future
        try:
            start(now, number, now + timeout)
        except BaseException as error:  # noqa: BLE001 - it is raised where the verb was called
            self._futures.pop(number, None)
            future.set_exception(error)

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
        for future in self._futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(PeerClosed("this peer was closed during the call"))
        self._futures.clear()
