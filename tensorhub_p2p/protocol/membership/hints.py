"""Version hints: the newest (epoch, version) of each model, spread to every member.

Rules of this file. A hint is only a hint: it says that asking the directory is worth
while, never what may be used. It has its own queue and byte budget, so that a storm of
membership rumours doesn't hold it up.

Theory of operation. Of each model the highest (revision, epoch, version) is kept: merging is a
maximum, so order and repeats of what arrives don't matter. Versions only rise while the model
lives. But one may be named that isn't there any more, or never was: of an earlier run of the
same name, or by mistake; and all real ones would be lower. Owners admit no publication below
one that exists, so who published is right: if a higher version than its own stood here for
`STANDS` seconds, it takes the next revision, which beats any version in this zone.

Only who publishes does so. Who just brought a copy may well have brought an old one; so in a zone
that only reads the model, the wrong version stands. That costs a question: whoever looks for the
latest in another zone asks that one too, and finds that it isn't there (speakers.py).

Revisions go round, as counters of summaries do: after `MAX_REVISION` comes 0, and of two the one
that is ahead by less than half the way is the higher. So whatever revision a hint bears there is a
next one, and an absurd one freezes nothing. As there, revisions further apart have no order.

Bounds: `max_hinted_models` models; hints of further ones, and revisions beyond `MAX_REVISION`,
are dropped.
"""

from __future__ import annotations

import mmh3

from tensorhub_p2p.protocol.membership.dissemination import Dissemination
from tensorhub_p2p.protocol.messages import VersionHint

STANDS = 60.0
"""Seconds; longer than a publisher may take to see that others published a higher version."""
MAX_REVISION = (1 << 32) - 1
REVISIONS = MAX_REVISION + 1


class Hints:
    """The newest version known of each model, and what is still being spread of it."""

    def __init__(self, limit: int) -> None:
        self.fingerprint = 0
        """Of all that is known, 63 bits; 0 if that is nothing."""
        self._limit = limit
        self._newest: dict[str, VersionHint] = {}
        self._since: dict[str, float] = {}
        """By model, when what is known came."""
        self._queue: Dissemination[str, VersionHint] = Dissemination()

    def __bool__(self) -> bool:
        """Whether anything waits to be spread."""
        return len(self._queue) > 0

    def note(self, now: float, hint: VersionHint) -> bool:
        """Merge a hint; if it is news, spread it and say True."""
        known = self._newest.get(hint.model)
        if known is None and len(self._newest) >= self._limit:
            return False
        if hint.revision > MAX_REVISION:
            return False
        if known is not None and not _supersedes(hint, known):
            return False
        for each in (known, hint):
            if each is not None:
                self.fingerprint ^= _fingerprint(each)
        self._newest.pop(hint.model, None)
        self._newest[hint.model] = hint
        self._since[hint.model] = now
        self._queue.put(hint.model, hint)
        return True

    def found(self, now: float, model: str, epoch: int, version: int, *, published: bool) -> None:
        """This peer has this version whole; `published` if it is its own publication."""
        known = self._newest.get(model)
        revision = known.revision if known is not None else 0
        lower = known is not None and (epoch, version) < (known.epoch, known.version)
        if published and lower and now - self._since[model] >= STANDS:
            revision = (revision + 1) % REVISIONS
        self.note(now, VersionHint(model, epoch, version, revision))

    def newest(self) -> tuple[VersionHint, ...]:
        """One hint a model, the most recent news first."""
        return tuple(reversed(self._newest.values()))

    def take(self, budget: int, limit: int) -> tuple[VersionHint, ...]:
        """Hints for one message of `budget` bytes, each sent `limit` times in all."""
        return self._queue.take(budget, limit)


def _supersedes(new: VersionHint, known: VersionHint) -> bool:
    if new.revision != known.revision:
        return (new.revision - known.revision) % REVISIONS < REVISIONS // 2
    return (new.epoch, new.version) > (known.epoch, known.version)


def _fingerprint(hint: VersionHint) -> int:
    order = (hint.revision, hint.epoch, hint.version)
    return mmh3.hash64(f"{hint.model}/{order}", signed=False)[0] >> 1
