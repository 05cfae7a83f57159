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
Then = Callable[[float, Any], Any]
"""`then(now, result)` on the control thread, in the moment when the verb is done: what it returns
or raises is the future's end. It saves a way to the caller's thread and back."""


class Running(NamedTuple):
    """A verb under way: its number, to interrupt it by, and its end."""

    number: VerbId
    future: Future[Any]


class RunningVerbs:
    """Verbs under way. `expect` is called by any thread, all else on the control thread."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._futures: dict[VerbId, Future[Any]] = {}
        self._thens: dict[VerbId, Then] = {}

    def expect(self, then: Then | None = None) -> Running:
        """A new verb. From here on its future has an end, also if the verb never starts."""
        running = Running(next(self._numbers), Future())
        if then is not None:
            self._thens[running.number] = then
        self._futures[running.number] = running.future
        return running

    def begin(self, now: float, timeout: float, start: Start, number: VerbId) -> None:
        """Start the verb; its end will come as `Done` or `Failed` with its number."""
        try:
            start(now, number, now + timeout)
        except BaseException as error:  # noqa: BLE001 - it is raised where the verb was called
            future = self._pop(number)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def forget(self, number: VerbId) -> None:
        """It could not be handed over: whoever expected it knows."""
        self._pop(number)

    def _pop(self, number: VerbId) -> Future[Any] | None:
        self._thens.pop(number, None)
        return self._futures.pop(number, None)

    def end(self, now: float, event: Done | Failed) -> None:
        then = self._thens.get(event.verb)
        future = self._pop(event.verb)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if isinstance(event, Failed):
            future.set_exception(event.error)
            return
        try:
            result = event.result if then is None else then(now, event.result)
        except BaseException as error:  # noqa: BLE001 - it is raised where the verb was called
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """The peer stops: nobody may be left waiting."""
        for number in list(self._futures):
            future = self._pop(number)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(PeerClosed("this peer was closed during the call"))
