"""A worker's side of the pipe to the conductor."""

from __future__ import annotations

import time
from collections import deque
from multiprocessing.connection import Connection
from typing import TypeVar

from tensorhub_p2p.cli.demo.reports import Order, Report

SomeOrder = TypeVar("SomeOrder", bound=Order)


class Radio:
    """Takes reports, gives orders. Orders of one kind come in the order of sending."""

    def __init__(self, connection: Connection, patience: float) -> None:
        self._connection = connection
        self._patience = patience
        self._waiting: deque[Order] = deque()

    def report(self, report: Report) -> None:
        self._connection.send(report)

    def await_order(self, kind: type[SomeOrder], patience: float | None = None) -> SomeOrder:
        """The next order of this kind; TimeoutError when none comes within the patience."""
        patience = self._patience if patience is None else patience
        deadline = time.monotonic() + patience
        while (order := self.next_order(kind, deadline - time.monotonic())) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no {kind.__name__} order within {patience:.0f} s")
        return order

    def next_order(self, kind: type[SomeOrder], wait: float = 0.0) -> SomeOrder | None:
        """The next order of this kind if there is one within `wait` seconds."""
        for order in self._waiting:
            if isinstance(order, kind):
                self._waiting.remove(order)
                return order
        if self._connection.poll(max(0.0, wait)):
            self._waiting.append(self._connection.recv())
            return self.next_order(kind)
        return None
