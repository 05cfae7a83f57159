"""Is anybody there, and does it run? One TCP connect that only looks at what comes back.

Rules of this file. It dials numeric addresses and tells what it saw; what that means for a
peer is for others to decide. Nothing is sent, and every dial is closed when it has its
answer: the other side sees a handshake that never came.

Theory. Two who need no Python answer a dial: the kernel, and ZeroMQ's I/O thread, which
accepts and greets at once with the ten bytes that open every ZMTP connection, whatever the
security. Measured (ZeroMQ 4.3.5, Linux 6): a process that runs greets within a millisecond,
also while it holds Python's lock; one that is stopped is accepted by its kernel, and does
not greet; after kill -9 the dial is refused, also when it was stopped before. So

    REFUSED       the machine answers that nobody listens there
    UNREACHABLE   nothing answered in time, or there is no way to it
    ACCEPTED      connected, but nobody greets within the time for that
    GREETED       connected and greeted
    STRANGER      connected, and then hung up on or greeted in another protocol

What the dials themselves show counts before the clock: after a pause of the own process all
that has arrived is read first, and the time for a greeting starts when the connection is seen.

Bounded: `limit` dials at a time, each for its `connect` and `greeting` seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from tensorhub_p2p.runtime.addresses import Address

_Key = TypeVar("_Key", bound=Hashable)

_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
_GREETING = b"\xff"
"""How ZMTP 2 and later begin."""


class Seen(Enum):
    REFUSED = auto()
    UNREACHABLE = auto()
    ACCEPTED = auto()
    GREETED = auto()
    STRANGER = auto()


@dataclass(frozen=True)
class Sight(Generic[_Key]):
    """What one look showed; `error` says why nothing could be reached."""

    key: _Key
    seen: Seen
    error: str = ""


@dataclass
class _Dial:
    socket: socket.socket
    deadline: float
    """Of the connect, then of the greeting."""
    greeting: float
    connected: bool = False


class Looker(Generic[_Key]):
    """Looks under way, each under a key of its owner's choosing. Used on one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dials: dict[_Key, _Dial] = {}
        self._done: list[Sight[_Key]] = []
        self._selector: selectors.BaseSelector | None = None

    def __contains__(self, key: _Key) -> bool:
        return key in self._dials

    def attach(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` wake its owner when a look has come to something."""
        self._selector = selector

    def look(
        self, key: _Key, address: Address, now: float, connect: float, greeting: float
    ) -> bool:
        """Begin; False if there are too many already. One look a key at a time.

        Takes `connect` seconds at most to connect and, unless `greeting` is 0, as many more
        to be greeted.
        """
        if key in self._dials:
            return True
        if len(self._dials) >= self._limit:
            return False
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            dial = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor left, or no such family here
            self._done.append(Sight(key, Seen.UNREACHABLE, str(error)))
            return True
        dial.setblocking(False)
        self._dials[key] = _Dial(dial, now + connect, greeting)
        try:
            code = dial.connect_ex((address.host, address.port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in _UNDER_WAY:
            self._fail(key, code)
        else:
            self._register(dial, selectors.EVENT_WRITE)
        return True

    def cancel(self, key: _Key) -> None:
        """Nobody asks any more."""
        dial = self._dials.pop(key, None)
        if dial is not None:
            self._close(dial)
        self._done = [sight for sight in self._done if sight.key != key]

    def sights(self, now: float) -> list[Sight[_Key]]:
        """What has been seen since the last call."""
        for key, dial in list(self._dials.items()):
            self._advance(key, dial, now)
        done, self._done = self._done, []
        return done

    def next_wakeup(self) -> float | None:
        if self._done:
            return float("-inf")
        return min((dial.deadline for dial in self._dials.values()), default=None)

    def close(self) -> None:
        for key in list(self._dials):
            self.cancel(key)

    def _advance(self, key: _Key, dial: _Dial, now: float) -> None:
        if not dial.connected:
            code = dial.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._fail(key, code)
            elif _is_connected(dial.socket):
                self._await_greeting(key, dial, now)
            elif now >= dial.deadline:
                self._fail(key, errno.ETIMEDOUT)
        if dial.connected and key in self._dials:
            self._read(key, dial, now)

    def _await_greeting(self, key: _Key, dial: _Dial, now: float) -> None:
        dial.connected = True
        if not dial.greeting:
            self._end(key, Seen.ACCEPTED)
            return
        dial.deadline = now + dial.greeting
        self._unregister(dial.socket)
        self._register(dial.socket, selectors.EVENT_READ)

    def _read(self, key: _Key, dial: _Dial, now: float) -> None:
        try:
            begin = dial.socket.recv(len(_GREETING))
        except BlockingIOError:
            if now >= dial.deadline:
                self._end(key, Seen.ACCEPTED)
        except OSError as error:
            self._end(key, Seen.STRANGER, str(error))
        else:
            self._end(key, Seen.GREETED if begin == _GREETING else Seen.STRANGER)

    def _fail(self, key: _Key, code: int) -> None:
        seen = Seen.REFUSED if code == errno.ECONNREFUSED else Seen.UNREACHABLE
        self._end(key, seen, os.strerror(code))

    def _end(self, key: _Key, seen: Seen, error: str = "") -> None:
        self._close(self._dials.pop(key))
        self._done.append(Sight(key, seen, error))

    def _close(self, dial: _Dial) -> None:
        self._unregister(dial.socket)
        dial.socket.close()

    def _register(self, dial: socket.socket, events: int) -> None:
        if self._selector is not None:
            self._selector.register(dial, events)

    def _unregister(self, dial: socket.socket) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError):  # it failed before it was registered
                self._selector.unregister(dial)


def _is_connected(dial: socket.socket) -> bool:
    try:
        dial.getpeername()
    except OSError:
        return False
    return True
