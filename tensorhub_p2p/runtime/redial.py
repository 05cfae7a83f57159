"""Is anybody listening there at all? One TCP connect that only looks at its outcome.

ZeroMQ says that a dial failed, not why, and the difference matters: a refused connect is
evidence that the process is gone, while a timeout or a missing route is none. So after a
connection was lost or a dial failed, one plain socket asks the kernel. It is closed
without a byte sent; a peer on the other side sees a handshake that never came.

Bounded: `MAX_REDIALS` at a time, each for `timeout` seconds; beyond it the outcome is
"not known".
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_p2p.runtime.addresses import Address

MAX_REDIALS = 32
_PENDING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


@dataclass(frozen=True)
class Outcome:
    """`refused`: the machine answered that nobody listens. `error` is empty if somebody does."""

    address: str
    refused: bool
    error: str


class Redialer:
    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._dials: dict[str, tuple[socket.socket, float]] = {}
        self._done: list[Outcome] = []
        self._selector: selectors.BaseSelector | None = None

    def attach(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def dial(self, address: Address, now: float) -> None:
        """Find out about `address`; at most one dial per address at a time."""
        name = str(address)
        if name in self._dials:
            return
        if len(self._dials) >= MAX_REDIALS:
            self._done.append(Outcome(name, False, "too many failed connections at once"))
            return
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            dial = socket.socket(family, socket.SOCK_STREAM)
            dial.setblocking(False)
            self._dials[name] = (dial, now + self._timeout)
            code = dial.connect_ex((address.host, address.port))
        except OSError as error:
            self._end(name, error.errno or errno.EIO)
            return
        if code not in _PENDING:
            self._end(name, code)
        elif self._selector is not None:
            self._selector.register(dial, selectors.EVENT_WRITE)

    def outcomes(self, now: float) -> list[Outcome]:
        """What has been found out since the last call."""
        for name, (dial, deadline) in list(self._dials.items()):
            code = dial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code or _connected(dial):
                self._end(name, code)
            elif now >= deadline:
                self._end(name, errno.ETIMEDOUT)
        done, self._done = self._done, []
        return done

    def next_wakeup(self) -> float | None:
        return min((deadline for _, deadline in self._dials.values()), default=None)

    def close(self) -> None:
        for name in list(self._dials):
            self._end(name, errno.ECANCELED)

    def _end(self, name: str, code: int) -> None:
        dial, _ = self._dials.pop(name, (None, 0.0))
        if dial is not None:
            self._unregister(dial)
            dial.close()
        error = os.strerror(code) if code else ""
        self._done.append(Outcome(name, code == errno.ECONNREFUSED, error))

    def _unregister(self, dial: socket.socket) -> None:
        if self._selector is None:
            return
        registered: Callable[[int], object] = self._selector.get_map().__contains__
        if registered(dial.fileno()):
            self._selector.unregister(dial)


def _connected(dial: socket.socket) -> bool:
    try:
        dial.getpeername()
    except OSError:
        return False
    return True
