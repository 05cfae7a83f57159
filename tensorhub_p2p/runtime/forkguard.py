"""A peer belongs to the process that made it; a forked child only ever gets an error.

A fork copies the peer's objects but none of its threads, and shares its sockets with the
parent. The child must neither talk on them nor tear them down. So every guarded object
remembers its process, checks it before it takes any lock (a lock that the parent's
thread held at the fork stays locked in the child for ever), and after a fork the child
keeps what it inherited alive, untouched, so that no destructor ever runs on it.
"""

from __future__ import annotations

import os
import weakref

from tensorhub_p2p.errors import PeerClosed

_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()
_inherited: list[object] = []
"""What a forked child got from its parent: kept, so that it is never destroyed here."""


class ForkGuard:
    """Remembers which process made it; `keep` is what a child must never destroy."""

    def __init__(self, what: str, keep: tuple[object, ...] = ()) -> None:
        self.what = what
        self._pid = os.getpid()
        self._keep = keep
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


def _after_fork_in_child() -> None:
    _inherited.extend(guard._keep for guard in list(_guards))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
