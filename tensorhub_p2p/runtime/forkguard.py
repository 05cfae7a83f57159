"""A peer belongs to the process that made it; a forked child only ever gets an error.

A fork copies the peer's objects but none of its threads, and shares its sockets with the
parent. The child must neither talk on them nor tear them down. So every guarded object
remembers its process, checks it before it takes any lock (a lock that the parent's
thread held at the fork stays locked in the child for ever), and after a fork the child
keeps what it inherited alive, untouched, so that no destructor ever runs on it.

One thing the child does do: it closes its copies of what listens, and of what others
connected to. Else the kernel would keep them open when the parent is killed, and the peer
would look alive, if deaf, for as long as its child (a data loader's worker) lives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable

from tensorhub_p2p.errors import PeerClosed

_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
_inherited: list[object] = []
"""What a forked child got from its parent: kept, so that it is never destroyed here."""


class ForkGuard:
    """Remembers which process made it; `keep` is what a child must never destroy.

    `disown` is called in a forked child, on the one thread that it has.
    """

    def __init__(
        self,
        what: str,
        keep: tuple[object, ...] = (),
        disown: Callable[[], None] | None = None,
    ) -> None:
        self.what = what
        self._pid = os.getpid()
        self._keep = keep
        self._disown = disown
        _guards.add(self)

    @property
    def foreign(self) -> bool:
        """True in a process forked from the one that made this."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises PeerClosed in a forked child."""
        if self.foreign:
            raise PeerClosed(
                f"{self.what} belongs to process {self._pid}, and this is its forked child "
                f"{os.getpid()}: start a new Peer here, or start workers with "
                "multiprocessing's 'spawn' method"
            )


def close_port(port: int) -> None:
    """Close this process's descriptors of all TCP sockets whose own port this is."""
    with contextlib.suppress(OSError):  # no such directory: nothing can be found out
        for name in os.listdir("/proc/self/fd"):
            if _is_at(int(name), port):
                os.close(int(name))


def _is_at(descriptor: int, port: int) -> bool:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return False  # no socket
    try:
        tcp = found.family in (socket.AF_INET, socket.AF_INET6)
        return tcp and found.type == socket.SOCK_STREAM and found.getsockname()[1] == port
    except OSError:
        return False
    finally:
        found.detach()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        _inherited.append(guard._keep)
        if guard._disown is not None:
            guard._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
