"""How many streams a link gets: as many as make it faster, by measurement.

Rule of this file. It counts what landed and says how many streams to have. It opens nothing,
and has no clock.

Theory. A stream may reach the rate of the line, or be held back by its window on a long way,
or by one core on a fast one; nobody can tell beforehand. So a link begins with two streams: one
receives while the other one's bytes are hashed. Its rate is measured over a *period*, then it gets
one more; if that made it faster by `GAIN`, the next one is tried, and if not, it goes back to what
it had and is *settled*. What was found is
kept from pull to pull, short ones add up to periods, and after `again_after` seconds of moving
it is tried anew, as lines change.

Chunks that land first after a change were begun before it: they don't count.
"""

from __future__ import annotations

import threading

LEAST = 2
"""Streams of a link, unless it may have one only."""
GAIN = 1.1
"""How much faster one more stream must make a link to be kept."""


class StreamCount:
    """The streams of the links to one holder. Thread-safe."""

    def __init__(self, most: int, period: float, again_after: float) -> None:
        """`most` streams; `period` and `again_after` in seconds in which something moves."""
        self.count = self._least = min(LEAST, most)
        """How many to have now."""
        self.settled = most == self._least
        self._lock = threading.Lock()
        self._most = most
        self._period = period
        self._again_after = again_after
        self._rate: float | None = None
        """Bytes a second with one stream less, or with those that it settled at."""
        self._landed_at: float | None = None
        self._restart()

    def _restart(self) -> None:
        self._bytes = 0
        self._chunks = 0
        self._seconds = 0.0
        self._to_skip = self.count

    def begin(self) -> None:
        """A pull begins: the time since the last chunk was nobody's."""
        self._landed_at = None

    def landed(self, now: float, num_bytes: int) -> None:
        """A chunk has come, by whichever stream."""
        with self._lock:
            self._count_in(now, num_bytes)

    def _count_in(self, now: float, num_bytes: int) -> None:
        since, self._landed_at = self._landed_at, now
        if since is None:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        self._bytes += num_bytes
        self._chunks += 1
        self._seconds += now - since
        if self.settled:
            if self._seconds >= self._again_after and self._most > self._least:
                self._begin_again()
        elif self._seconds >= self._period and self._chunks >= 2 * self.count:
            self._judge(self._bytes / self._seconds)

    def _judge(self, rate: float) -> None:
        before, self._rate = self._rate, rate
        if before is not None and rate < GAIN * before:
            self.count = max(self._least, self.count - 1)
            self.settled = True
        elif self.count < self._most:
            self.count += 1
        else:
            self.settled = True
        self._restart()

    def _begin_again(self) -> None:
        """Find out anew, from one stream less: fewer may do by now."""
        self.count = max(self._least, self.count - 1)
        self.settled = False
        self._rate = None
        self._restart()
