"""Zone summaries: what each zone tells all others about itself, and the newest known of it.

Rules of this file. It stores summaries and says which wins; who writes one, and when, is
zones.py's. A summary is news of its own kind: it has its own queue and byte budget, so that
a storm of membership rumours or version hints doesn't hold it up, nor the other way round.

Theory of operation. Of each zone the summary with the highest counter is kept and spread.
Counters go round: after `MAX_COUNTER` comes 1, and of two the one that is ahead by less than half
the way is the higher. So whatever counter a summary has, its zone can write the next one, and
an absurd one freezes nothing.
Two peers of a zone may write one under the same counter, while neither has heard of the
other: of those the one with the greater bytes wins, everywhere alike. Among summaries whose
counters are within half the way of each other, as all are that a zone writes in a lifetime,
merging is a maximum: order and repeats of what arrives don't matter. Counters further apart, which
only forgers write, have no order: three of them may beat each other in turn, and go round among
the peers for ever, as who knows the cluster's secret is trusted. The fingerprint of what is known
is the XOR of one hash per summary: it tells two peers whether they know the same.

A summary of a zone with no members is its *obituary*: nothing was heard of it for long
(fading.py). It counts one further than the last summary, and is news like any other; so everyone
takes the zone for gone alike, newcomers too. A zone that lives has counted further on, or does so
when it hears of its obituary.

Bounds: `max_zones` zones; a new one takes the place of one that is gone, and is dropped if there is
none. `MAX_GATEWAYS` and `MAX_MODELS` entries and `MAX_SUMMARY_BYTES` bytes in a summary. A summary
that is too large, or that names gateways of another zone, is dropped. What is dropped is counted.
"""

from __future__ import annotations

from collections import Counter

import mmh3
import msgspec

from tensorhub_p2p.protocol.membership.dissemination import Dissemination
from tensorhub_p2p.protocol.messages import ZoneSummary

MAX_GATEWAYS = 8
"""Gateways named in one summary; a zone has two, and some more while one replaces another."""
MAX_MODELS = 64
"""Models named in one summary: those with the most recent news."""
MAX_SUMMARY_BYTES = 32 << 10
"""Encoded bytes of one summary; that much is reached by very long model names only."""
MAX_COUNTER = 1 << 53
"""The highest; no honest zone writes half as often. 0 is nobody's (greeting.py)."""


class Summaries:
    """The newest summary of each zone, and what is still being spread of them."""

    def __init__(self, limit: int, dropped: Counter[str]) -> None:
        self._dropped = dropped
        """Summaries that were not stored, by reason; old ones are no reason."""
        self.fingerprint = 0
        """Of all that is known, 63 bits; 0 if that is nothing."""
        self._limit = limit
        self._newest: dict[str, ZoneSummary] = {}
        self._queue: Dissemination[str, ZoneSummary] = Dissemination()

    def __bool__(self) -> bool:
        """Whether anything waits to be spread."""
        return len(self._queue) > 0

    def note(self, summary: ZoneSummary) -> bool:
        """Merge a summary; if it is news, spread it and say True."""
        known = self._newest.get(summary.zone)
        if known is not None and not _supersedes(summary, known):
            return False
        if not is_sound(summary):
            self._dropped["malformed summary"] += 1
            return False
        if known is None and not self._make_room(summary):
            self._dropped["summary of a zone beyond max_zones"] += 1
            return False
        for each in (known, summary):
            if each is not None:
                self.fingerprint ^= _fingerprint(each)
        self._newest[summary.zone] = summary
        self._queue.put(summary.zone, summary)
        return True

    def _make_room(self, newcomer: ZoneSummary) -> bool:
        """For a zone that is there, one that is gone is given up."""
        if len(self._newest) < self._limit:
            return True
        gone = next((s for s in self._newest.values() if is_obituary(s)), None)
        if gone is None or is_obituary(newcomer):
            return False
        del self._newest[gone.zone]
        self._queue.drop(gone.zone)
        self.fingerprint ^= _fingerprint(gone)
        return True

    def adopt(self, summary: ZoneSummary) -> None:
        """Know this since long: there is nothing to be spread."""
        if self.note(summary):
            self._queue.drop(summary.zone)

    def of(self, zone: str) -> ZoneSummary | None:
        """The newest known of this zone."""
        return self._newest.get(zone)

    def newest(self) -> tuple[ZoneSummary, ...]:
        """One summary a zone."""
        return tuple(self._newest.values())

    def take(self, budget: int, limit: int) -> tuple[ZoneSummary, ...]:
        """Summaries for one message of `budget` bytes, each sent `limit` times in all."""
        return self._queue.take(budget, limit)


def _fingerprint(summary: ZoneSummary) -> int:
    return mmh3.hash64(msgspec.msgpack.encode(summary), signed=False)[0] >> 1


def next_counter(known: int) -> int:
    """The counter of the summary that supersedes one with this counter."""
    return known % MAX_COUNTER + 1


def _supersedes(new: ZoneSummary, known: ZoneSummary) -> bool:
    if new.counter != known.counter:
        return (new.counter - known.counter) % MAX_COUNTER < MAX_COUNTER // 2
    return new != known and msgspec.msgpack.encode(new) > msgspec.msgpack.encode(known)


def obituary(last: ZoneSummary) -> ZoneSummary:
    """What is said of a zone that says nothing any more; it still names whom to call."""
    return ZoneSummary(last.zone, next_counter(last.counter), last.gateways, members=0)


def is_obituary(summary: ZoneSummary) -> bool:
    """Whether it says that the zone is gone. A zone's own summary counts its writer at least."""
    return summary.members == 0


def names_few(summary: ZoneSummary) -> bool:
    """Whether it names no more gateways than a summary may."""
    return len(summary.gateways) <= MAX_GATEWAYS


def is_sound(summary: ZoneSummary) -> bool:
    """Whether a summary is small enough, and about one zone, so that others take it."""
    return (
        0 < summary.counter <= MAX_COUNTER
        and names_few(summary)
        and len(summary.newest) <= MAX_MODELS
        and all(gateway.zone == summary.zone for gateway in summary.gateways)
        and len(msgspec.msgpack.encode(summary)) <= MAX_SUMMARY_BYTES
    )
