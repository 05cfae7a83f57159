"""Which peers of other zones are gone: asked where it matters.

Rules of this file. It collects whom somebody wonders about and asks their zones; what that
means is for whoever wonders. (A withdrawal waits for whoever pinned the version; if that is a
peer of another zone that died, only its own zone knows.)

Theory of operation. `wonder` puts a peer on its zone's list. Each `revisit_interval` a zone
with a list is asked about it (`ZoneCheck`), one of its gateways after the other, and the list
begins anew: who still wonders says so again. The answer is noted in the table of foreigners,
where the next one who asks about the peer finds it. Of a zone that answers none of this for
`forsaken_after` all who are on its list count as gone: it may have died as a whole, and if it
is only cut off, its peers reach this one no better than this one reaches them. So do those of
whom it says for as long that it has never heard: its gateways may be younger than the death.
Whoever it then knows of again isn't gone.

Bounds: `MAX_PEERS` a list, `MAX_LISTS` lists; who finds no place in one isn't asked about. Of
each zone one question whose answer is wanted; other answers are counted in `dropped`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.foreigners import Foreigners
from tensorhub_p2p.protocol.abroad.speakers import Speakers
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import ZoneCheck, ZoneChecked

MAX_PEERS = 64
MAX_LISTS = 256


@dataclass
class List:
    """One zone's."""

    peers: dict[PeerId, None] = field(default_factory=dict)
    """Whom somebody wonders about."""
    due: float = -math.inf
    number: int = 0
    asked: PeerId | None = None
    about: frozenset[PeerId] = frozenset()
    attempts: int = 0
    silent_since: float | None = None
    """When it was first asked, and hasn't answered since."""
    unknown_since: dict[PeerId, float] = field(default_factory=dict)
    """Of whom it has never heard: newcomers, or who died before its present gateways came."""


class RollCall:
    """The questions of one peer."""

    def __init__(
        self, speakers: Speakers, foreigners: Foreigners, config: AbroadConfig, outbox: Outbox
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._speakers = speakers
        self._foreigners = foreigners
        self._config = config
        self._outbox = outbox
        self._lists: dict[str, List] = {}
        self._numbers = count(1)

    def wonder(self, zone: str, peer: PeerId) -> None:
        """Find out soon whether this peer of that zone is gone."""
        if zone not in self._lists and len(self._lists) >= MAX_LISTS:
            return
        peers = self._lists.setdefault(zone, List()).peers
        if len(peers) < MAX_PEERS:
            peers[peer] = None

    def tick(self, now: float) -> None:
        for zone, each in list(self._lists.items()):
            if now < each.due:
                continue
            if not each.peers:
                del self._lists[zone]
                continue
            self._ask(now, zone, each)

    def _ask(self, now: float, zone: str, each: List) -> None:
        each.due = now + self._config.revisit_interval
        if each.silent_since is None:
            each.silent_since = now
        elif now >= each.silent_since + self._config.forsaken_after:
            for peer in each.peers:
                self._foreigners.is_said_gone(zone, peer)
        each.asked = self._speakers.speaker(zone, each.attempts)
        each.attempts += 1
        if each.asked is not None:
            each.number = next(self._numbers)
            each.about = frozenset(each.peers)
            self._outbox.send(each.asked, ZoneCheck(each.number, tuple(each.peers)))
        each.peers = {}

    def receive(self, now: float, sender: PeerId, answer: ZoneChecked) -> None:
        asked = next((z for z, a in self._lists.items() if a.number == answer.request), None)
        if asked is None or self._lists[asked].asked != sender:
            self.dropped["check that was not asked for"] += 1
            return
        each = self._lists[asked]
        each.number = each.attempts = 0
        each.silent_since = None
        self._speakers.answered(asked, sender)
        since = each.unknown_since
        each.unknown_since = {p: since.get(p, now) for p in answer.unknown if p in each.about}
        for peer in each.about:
            unknown = now - each.unknown_since.get(peer, now)
            if peer in answer.gone or unknown >= self._config.forsaken_after:
                self._foreigners.is_said_gone(asked, peer)
            else:
                self._foreigners.meet(asked, peer)

    def awaits(self, peer: PeerId) -> bool:
        """Whether an answer of this peer would count."""
        return any(each.number and each.asked == peer for each in self._lists.values())

    def next_wakeup(self) -> float | None:
        return earliest(*(each.due for each in self._lists.values()))
