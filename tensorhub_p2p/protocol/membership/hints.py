"""Version hints: the newest (epoch, version) of each model, spread to every member.

Rules of this file. A hint is only a hint: it says that asking the directory is worth
while, never what may be used. It has its own queue and byte budget, so that a storm of
membership rumours doesn't hold it up. Merging is a maximum, so order and repeats of what
arrives don't matter.

Bounds: `max_hinted_models` models; hints of further ones are dropped.
"""

from __future__ import annotations

import mmh3

from tensorhub_p2p.protocol.membership.dissemination import Dissemination
from tensorhub_p2p.protocol.messages import VersionHint


class Hints:
    """The newest version known of each model, and what is still being spread of it."""

    def __init__(self, limit: int) -> None:
        self.fingerprint = 0
        """Of all that is known, 63 bits; 0 if that is nothing."""
        self._limit = limit
        self._newest: dict[str, VersionHint] = {}
        self._queue: Dissemination[str, VersionHint] = Dissemination()

    def __bool__(self) -> bool:
        """Whether anything waits to be spread."""
        return len(self._queue) > 0

    def note(self, hint: VersionHint) -> bool:
        """Merge a hint; if it is news, spread it and say True."""
        known = self._newest.get(hint.model)
        if known is None and len(self._newest) >= self._limit:
            return False
        if known is not None and (hint.epoch, hint.version) <= (known.epoch, known.version):
            return False
        for each in (known, hint):
            if each is not None:
                self.fingerprint ^= _fingerprint(each)
        self._newest.pop(hint.model, None)
        self._newest[hint.model] = hint
        self._queue.put(hint.model, hint)
        return True

    def newest(self) -> tuple[VersionHint, ...]:
        """One hint a model, the most recent news first."""
        return tuple(reversed(self._newest.values()))

    def take(self, budget: int, limit: int) -> tuple[VersionHint, ...]:
        """Hints for one message of `budget` bytes, each sent `limit` times in all."""
        return self._queue.take(budget, limit)


def _fingerprint(hint: VersionHint) -> int:
    return mmh3.hash64(f"{hint.model}/{hint.epoch}/{hint.version}", signed=False)[0] >> 1
