"""Whom a gateway calls, so that no zone stays out of the pool that the gateways form.

Rules of this file. It picks addresses and times; zones.py sends what is sent there. What it
is told, it doesn't judge.

Theory of operation. The pool finds its members back by itself while it remembers them
(seeds.py). But a zone may have exchanged all its gateways while it was cut off, or the pool
itself may have fallen apart. So about every `redial_interval` a gateway calls

    a fellow gateway of its zone that isn't in the pool
    whoever is named in the summary of a zone from which nobody is in the pool; of those that
    are taken for gone (fading.py), one zone a `push_pull_interval`, in turn
    one of its seeds: each time while such a zone exists or nobody else is in the pool, else
    once a `push_pull_interval`, to find those of whom nobody here has ever heard

Whoever is called and is no gateway (any more) answers who is (zones.py). As each zone's
gateways call theirs, the pool is connected as soon as one call between any two parts of it
gets through. While nobody of another zone is in the pool the rounds start faster, at
`join_retry`, and slow down by half each.

Bounds: `MAX_CALLS` addresses a round, drawn at random, a seed, and those named by one zone that is
taken for gone; no address twice within half a `redial_interval`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerInfo
from tensorhub_p2p.protocol.membership.summaries import is_obituary
from tensorhub_p2p.protocol.messages import ZoneSummary

MAX_CALLS = 8
MAX_REMEMBERED = 256
"""Addresses of which it is remembered when they were called."""


class Pacing:
    """Keeps an address from being called too often, whatever the reason."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._called: dict[str, float] = {}
        """The longest ago first."""

    def allows(self, now: float, address: str) -> bool:
        """Whether this address may be called now; if so, it is taken for called."""
        if now - self._called.get(address, -math.inf) < self._pause:
            return False
        self._called.pop(address, None)
        self._called[address] = now
        if len(self._called) > MAX_REMEMBERED:
            del self._called[next(iter(self._called))]
        return True


class Rounds:
    """The calls of one gateway to those that are missing in the pool."""

    def __init__(self, config: SwimConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._seed_due = -math.inf
        self._gone_due = -math.inf
        self._turn = 0
        self._pause = config.join_retry
        self.next: float = -math.inf
        """When the next round is due."""

    def due(
        self,
        now: float,
        missing_fellows: Sequence[PeerInfo],
        foreign: Sequence[ZoneSummary],
        zones_reached: Collection[str],
        seeds: Sequence[str],
    ) -> list[str]:
        """Addresses to call now. `zones_reached` are the other zones that are in the pool."""
        if now < self.next:
            return []
        self.next = now + self._pause * self._rng.uniform(0.5, 1.5)
        self._pause = min(self._config.redial_interval, 1.5 * self._pause)
        unreached = [summary for summary in foreign if summary.zone not in zones_reached]
        there = [summary for summary in unreached if not is_obituary(summary)]
        missing = [*missing_fellows, *(gateway for s in there for gateway in s.gateways)]
        addresses = [info.addresses[0] for info in missing if info.addresses]
        calls = self._rng.sample(addresses, min(MAX_CALLS, len(addresses)))
        if seeds and (there or not zones_reached or now >= self._seed_due):
            self._seed_due = self._much_later(now)
            calls.append(self._rng.choice(seeds))
        gone = [summary for summary in unreached if is_obituary(summary)]
        if gone and now >= self._gone_due:
            self._gone_due = self._much_later(now)
            self._turn += 1
            named = gone[self._turn % len(gone)].gateways
            calls += [info.addresses[0] for info in named if info.addresses]
        return calls

    def _much_later(self, now: float) -> float:
        return now + self._config.push_pull_interval * self._rng.uniform(0.5, 1.5)
