"""Calls: whose greeting this peer waits for.

Rules of this file. A table of whom was called, and when; zones.py notes calls and looks answers
up.

Theory of operation. A greeting (`ZoneGreeting`) says what other zones are, so it counts only
from whom this peer called of late: under the address that it repeats, or under its PeerId.

Bounds: the last `MAX_CALLS` calls, each for `ANSWERED_WITHIN`.
"""

from __future__ import annotations

import math

from tensorhub_p2p.protocol.identity import PeerId

MAX_CALLS = 1024
ANSWERED_WITHIN = 10.0
"""Seconds that an answer may take: some round trips of a far network, and a retry."""


class Calls:
    """Those of one peer."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        """By PeerId or address, the longest ago first."""

    def note(self, now: float, whom: PeerId | str) -> None:
        """This peer, or whoever listens at this address, is called."""
        self._at.pop(whom, None)
        self._at[whom] = now
        if len(self._at) > MAX_CALLS:
            del self._at[next(iter(self._at))]

    def await_answer(self, now: float, sender: PeerId, dialled: str) -> bool:
        """Whether this peer, or whoever listens at this address, was called of late."""
        at = max(self._at.get(sender, -math.inf), self._at.get(dialled, -math.inf))
        return now <= at + ANSWERED_WITHIN
