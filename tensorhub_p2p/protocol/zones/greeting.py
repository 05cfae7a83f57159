"""What a peer answers to callers from other zones: where their zone is, and where this one.

Rules of this file. It remembers who called and drafts the answer; zones.py sends it, and the
caller decides what to make of it.

Theory of operation. A newcomer whose seed is of another zone is sent to its own zone by what
that zone said of itself. A zone that is just starting has said nothing yet; so who called
from there before is named instead, in a summary with the counter 0, which nobody wrote, and
which is never spread. Of all the peers of a zone that start at once through one seed only the
first then takes itself for the zone's first, and all others join through those before them.

Bounds: `CALLERS` callers each of `CALLING_ZONES` zones, the last ones, for `REMEMBERED`
seconds, and only until their zone's first summary is known; who tells more than
`MAX_CALLER_BYTES` of itself is not remembered. At most two summaries an answer.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tensorhub_p2p.protocol.identity import PeerInfo
from tensorhub_p2p.protocol.messages import ZoneGreeting, ZoneSummary

CALLERS = 4
CALLING_ZONES = 64
REMEMBERED = 30.0
"""Seconds for which somebody who called may be the way into its zone."""
MAX_CALLER_BYTES = 4096
HEARSAY = 0
"""The counter of a summary that tells who called, and was not written by its zone."""


def is_alone(greeting: ZoneGreeting) -> bool:
    """Whether who greets knows nobody else of its own zone, as far as its answer shows.

    Whoever has met its zone has heard from it of all others.
    """
    me = greeting.info
    own = (summary for summary in greeting.summaries if summary.zone == me.zone)
    return not any(named.peer_id != me.peer_id for summary in own for named in summary.gateways)


class _Call(NamedTuple):
    at: float
    caller: PeerInfo


class Greeter:
    """The answers of one peer."""

    def __init__(self, zone: str) -> None:
        self._zone = zone
        self._calls: dict[str, list[_Call]] = {}
        """By zone, the one that called last at the end; in each, the same."""

    def answer(
        self, now: float, caller: PeerInfo, known: tuple[ZoneSummary, ...]
    ) -> tuple[ZoneSummary, ...]:
        """What to tell a peer of another zone; it is remembered. `known` are all summaries."""
        zones = (self._zone, caller.zone)
        answer = tuple(summary for summary in known if summary.zone in zones)
        earlier = self._note(now, caller)
        if any(summary.zone == caller.zone for summary in answer):
            self._calls.pop(caller.zone, None)
        elif earlier:
            answer = (*answer, ZoneSummary(caller.zone, HEARSAY, earlier))
        return answer

    def _note(self, now: float, caller: PeerInfo) -> tuple[PeerInfo, ...]:
        """Who else called from there of late."""
        if len(msgspec.msgpack.encode(caller)) > MAX_CALLER_BYTES:
            return ()
        calls = self._calls.pop(caller.zone, [])
        calls = [c for c in calls if now - c.at < REMEMBERED and c.caller != caller]
        earlier = tuple(call.caller for call in calls)
        calls.append(_Call(now, caller))
        self._calls[caller.zone] = calls[-CALLERS:]
        if len(self._calls) > CALLING_ZONES:
            del self._calls[next(iter(self._calls))]
        return earlier
