"""What a link does to the messages on it: latency, loss, copies, order, bandwidth, size.

Rules of this file. Values only, and no state but a random generator that is passed in.
What lies between two groups of peers for a while (a partition, a clog, a burst of loss)
is weather.py's; here is what a link is like on any day.

Theory of operation. A link is directed, from one peer to another. Each message on it

    is dropped         if it is larger than `max_bytes`
    waits              behind earlier ones, if `bandwidth` is limited
    is lost            with probability `loss`
    is delayed         by a draw from `latency`
    overtakes          those sent before it, if the draws say so, with probability `reorder`;
                       else it arrives after them
    arrives twice      with probability `duplicate`, each copy with a delay of its own

A `Links` table says which link lies between two peers: the pair's own, else their zones',
else the one for any two different zones, else the network's. It holds what differs, so it
doesn't grow with the square of anything.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Protocol

from tensorhub_p2p.protocol.identity import PeerId


class Latency(Protocol):
    """A distribution of delays, in seconds."""

    def draw(self, rng: random.Random) -> float:
        """One message's delay."""

    @property
    def typical(self) -> float:
        """The median, for plans and pictures."""


@dataclass(frozen=True)
class Uniform:
    """Anything between `shortest` and `longest`, all equally likely."""

    shortest: float
    longest: float

    def draw(self, rng: random.Random) -> float:
        return self.shortest + (self.longest - self.shortest) * rng.random()

    @property
    def typical(self) -> float:
        return (self.shortest + self.longest) / 2


@dataclass(frozen=True)
class LogNormal:
    """Mostly about `median`, sometimes much later: what busy networks show.

    `spread` is the standard deviation of the delay's logarithm: with 0.5 one message in a
    hundred takes 3.2 times the median or more. No draw is longer than `longest`.
    """

    median: float
    spread: float = 0.5
    longest: float = inf

    def draw(self, rng: random.Random) -> float:
        return min(self.longest, exp(rng.gauss(log(self.median), self.spread)))

    @property
    def typical(self) -> float:
        return min(self.median, self.longest)


@dataclass(frozen=True)
class Link:
    """How messages travel in one direction between two peers.

    `latency` is a distribution, or the two ends of a uniform one, in seconds.
    """

    latency: Latency | tuple[float, float] = (0.0002, 0.002)
    loss: float = 0.0
    """Probability that a message is lost."""
    duplicate: float = 0.0
    """Probability that it arrives twice."""
    reorder: float = 1.0
    """Probability that it need not wait for those that were sent before it."""
    bandwidth: float = inf
    """Bytes a second; messages queue behind each other."""
    max_bytes: float = inf
    """Larger messages are dropped."""
    delay: Latency = field(init=False, repr=False, compare=False)
    """`latency` as a distribution."""
    is_plain: bool = field(init=False, repr=False, compare=False)
    """Nothing but latency and loss: no message depends on another one."""

    def __post_init__(self) -> None:
        delay = Uniform(*self.latency) if isinstance(self.latency, tuple) else self.latency
        object.__setattr__(self, "delay", delay)
        plain = self.duplicate == 0 and self.reorder == 1
        plain = plain and self.bandwidth == inf and self.max_bytes == inf
        object.__setattr__(self, "is_plain", plain)


ZonePair = tuple[str, str]
"""(the sender's zone, the addressee's zone)"""


@dataclass
class Links:
    """Which link lies between two peers. All of it may be changed at any time."""

    default: Link = field(default_factory=Link)
    pairs: dict[tuple[PeerId, PeerId], Link] = field(default_factory=dict)
    """By (sender, addressee)."""
    zones: dict[ZonePair, Link] = field(default_factory=dict)
    between_zones: Link | None = None
    """Between any two different zones that have no link of their own."""

    def set_zones(self, one: str, other: str, link: Link) -> None:
        """Put the same link between two zones in both directions."""
        self.zones[one, other] = self.zones[other, one] = link

    def between(self, sender: PeerId, from_zone: str, to: PeerId, to_zone: str) -> Link:
        if self.pairs:
            own = self.pairs.get((sender, to))
            if own is not None:
                return own
        if self.zones:
            zonal = self.zones.get((from_zone, to_zone))
            if zonal is not None:
                return zonal
        if self.between_zones is not None and from_zone != to_zone:
            return self.between_zones
        return self.default


class Queues:
    """When each link that keeps messages in order, or in line, is free again.

    Bounds: entries of links that have been free for long are swept out, so that only busy
    ones remain.
    """

    _SWEEP = 4096

    def __init__(self) -> None:
        self._free_at: dict[tuple[PeerId, PeerId], float] = {}
        self._sweep_at = self._SWEEP

    def next_free(self, link: tuple[PeerId, PeerId], now: float) -> float:
        """The earliest time, from now on, at which one more may follow."""
        return max(now, self._free_at.get(link, now))

    def occupy(self, link: tuple[PeerId, PeerId], until: float, now: float) -> None:
        self._free_at[link] = until
        if len(self._free_at) > self._sweep_at:
            self._free_at = _later_than(self._free_at, now)
            self._sweep_at = max(self._SWEEP, 2 * len(self._free_at))

    def __len__(self) -> int:
        return len(self._free_at)


def _later_than(
    times: Mapping[tuple[PeerId, PeerId], float], now: float
) -> dict[tuple[PeerId, PeerId], float]:
    return {link: time for link, time in times.items() if time > now}
