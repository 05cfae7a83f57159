"""What membership tells its driver, and what the connections tell membership.

Rule of this file. Values only. `Evidence` goes into `Swim.evidence`; the events come out
of its outbox, in the order in which they were noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.messages import Status, ZoneSummary


class Evidence(Enum):
    """What the connections tell of a peer, faster and surer than probes can.

    Who dials learns from the other's kernel whether anybody listens, and from its ZeroMQ
    I/O thread, which needs no Python, whether the process runs.
    """

    DISCONNECTED = auto()
    """A standing connection ended without a goodbye: a reason to probe at once, no more."""
    REFUSED = auto()
    """Nobody listens where it did: its process is almost surely gone."""
    ACCEPTED = auto()
    """Its kernel takes connections, nobody greets: the process is there and stands still."""
    GREETED = auto()
    """Its I/O thread answers handshakes or heartbeats: the process runs, whatever Python does."""
    UNREACHABLE = auto()
    """A watch ended, and nothing answered its re-dials: the host is gone, or the way to it."""


@dataclass(frozen=True)
class Look(Event):
    """A member is silent: what do its sockets show? The driver answers by `Swim.evidence`.

    REFUSED, ACCEPTED or GREETED, within about half a second, or nothing by then. GREETED needs
    fresh evidence: a handshake made now, or a watch whose heartbeats were answered since. The
    latter is known only when they would have ended the watch else, and so may come a second or
    two after the look (twice `WireConfig.watch_interval`, and `watch_timeout`). Nor does it come
    after a disconnect until the peer itself is heard of.
    """

    peer: PeerId


@dataclass(frozen=True)
class WasAbsent(Event):
    """This peer was paused, cut off or held for silent: others may have gone on without it."""

    reason: str


@dataclass(frozen=True)
class Unheard(Event):
    """A member sends to this peer but doesn't answer it: what goes there seems to get lost."""

    peer: PeerId


@dataclass(frozen=True)
class ZoneNews(Event):
    """Somebody knows of a newer summary of this zone than this peer did."""

    summary: ZoneSummary


@dataclass(frozen=True)
class MemberChanged(Event):
    """A member came, or its status changed. `old` is None for a newcomer."""

    member: MemberView
    old: Status | None


@dataclass(frozen=True)
class MemberForgotten(Event):
    """One dead or left for so long that it isn't looked for any more, or that made room.

    It needn't have been a member here: of a peer that died before this one came only the death
    is known. What it wrote may be dropped.
    """

    peer: PeerId


@dataclass(frozen=True)
class Joined(Event):
    """A seed answered; `peer` is who. Once in a peer's life.

    By now this peer knows whoever was known to a member of its pool that told its view: that is the
    seed itself, unless it had too much to tell, or is of another zone.
    """

    peer: PeerId


@dataclass(frozen=True)
class SeedIsSelf(Event):
    """This seed address leads back to this very peer."""

    address: str


@dataclass(frozen=True)
class Refuted(Event):
    """Others held this peer for something else than alive; it said otherwise."""

    incarnation: int
    claim: Status


@dataclass(frozen=True)
class NewerVersion(Event):
    """Somebody knows of a newer version of this model than this peer did."""

    model: str
    epoch: int
    version: int


@dataclass(frozen=True)
class Left(Event):
    """The goodbye is on its way, in the outbox before this event; the machine is silent now."""
