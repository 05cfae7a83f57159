"""Writing the own zone's summary: what it says, and when it is time for a new one.

Rules of this file. It drafts and times; summaries.py says which summary wins, and zones.py
spreads it. It is asked at the zone's first gateway only.

Theory of operation. A summary is written when it would say something else than the newest
one known, at most each `summary_interval`, with a counter one above that one's. The number of
members counts as something else only when it has changed by more than a tenth, so that
comings and goings in one zone cost the others nothing. Besides, it is renewed `RENEWALS` times
in the time after which others take a silent zone for gone (fading.py).

When views differ, two peers may hold themselves for the first gateway (the home pool is
partitioned, say, and the far network isn't). So that they don't outbid each other as
fast as they can, the word of another writer that still lives stands for `takeover_seconds`.

Of a gateway it says only who it is and where it can be called, since every peer of every zone
passes it on a dozen times.

Bounds: as many models, gateways and bytes as summaries.py lets pass; the models with the
oldest news are left out first. That a summary is full tells readers that there may be more
(speakers.py). What is retained is left out last of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from tensorhub_p2p.config import ZonesConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.summaries import MAX_MODELS, is_sound, next_counter
from tensorhub_p2p.protocol.messages import RetainSummary, VersionHint, ZoneSummary

RENEWALS = 8


class Author:
    """Writes for one zone, on behalf of this peer; others forget it `fades_after` its last word."""

    def __init__(
        self,
        me: PeerInfo,
        config: ZonesConfig,
        fades_after: float,
        is_alive: Callable[[PeerId], bool],
    ) -> None:
        self._me = me
        self._config = config
        self._is_alive = is_alive
        self._next = -math.inf
        self._heard_at = -math.inf
        self._renew_every = fades_after / RENEWALS
        self._renewed: float | None = None

    def heard(self, now: float) -> None:
        """Another's summary of the own zone is news."""
        self._heard_at = self._renewed = now

    def write(
        self,
        now: float,
        known: ZoneSummary | None,
        gateways: tuple[PeerInfo, ...],
        members: int,
        newest: tuple[VersionHint, ...],
        retains: tuple[RetainSummary, ...] = (),
    ) -> ZoneSummary | None:
        """A new summary, if there is something new to say and it is time; None if not.

        `newest` has the most recent news first. `retains` is what the zone's handles want kept.
        """
        if now < self._next or (known is not None and self._stands(now, known)):
            return None
        if known is not None and abs(members - known.members) * 10 <= known.members:
            members = known.members
        counter = next_counter(known.counter) if known is not None else 1
        contacts = tuple(PeerInfo(g.peer_id, g.name, g.zone, g.addresses) for g in gateways)
        newest = newest[:MAX_MODELS]
        draft = ZoneSummary(self._me.zone, counter, contacts, members, newest, retains)
        new = _shortened(draft)
        if self._renewed is None:
            self._renewed = now
        due = now >= self._renewed + self._renew_every
        if new is None or (_says_the_same(new, known) and not due):
            return None
        self._renewed = now
        self._next = now + self._config.summary_interval
        return new

    def _stands(self, now: float, known: ZoneSummary) -> bool:
        writer = known.gateways[0].peer_id if known.gateways else self._me.peer_id
        if writer == self._me.peer_id or not self._is_alive(writer):
            return False
        return now < self._heard_at + self._config.takeover_seconds


def _says_the_same(new: ZoneSummary, known: ZoneSummary | None) -> bool:
    return known is not None and msgspec.structs.replace(known, counter=new.counter) == new


def _shortened(summary: ZoneSummary) -> ZoneSummary | None:
    """As much of it as others would take; None if that is nothing."""
    while not is_sound(summary):
        if summary.newest:
            fewer = summary.newest[: len(summary.newest) // 2]
            summary = msgspec.structs.replace(summary, newest=fewer)
        elif summary.retains:
            less = summary.retains[: len(summary.retains) // 2]
            summary = msgspec.structs.replace(summary, retains=less)
        else:
            return None
    return summary
