"""Local health: how far this peer trusts its own clockwork (Lifeguard §3.1, "LHA Probe").

Rule of this file. It counts; what is stretched by it is for probing.py.

Theory of operation. A peer that is slow itself (starved, swapping, its network choking)
finds everybody else silent. So it keeps a score, from 0 (healthy) upwards:

    a probe was answered                              -1
    a probe failed, and relays sent no Nack in time   +1 for each of them
    a probe failed, and nobody was there to be asked  +1
    this peer had to refute that it is silent         +1

and takes `1 + score` times its usual interval and timeout for the next probe. A relay
that reports the target's silence (Nack) is no sign of ill health: the target is silent to
others as well.

Bounds: the score stays below `max_local_health`.
"""

from __future__ import annotations


class LocalHealth:
    """The score of one peer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.score = 0

    @property
    def stretch(self) -> int:
        """What to multiply timeouts and intervals with."""
        return 1 + self.score

    def note(self, change: int) -> None:
        """Better (negative) or worse."""
        self.score = min(max(0, self.score + change), self._limit - 1)
