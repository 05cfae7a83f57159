"""What membership tells its driver, and what the connections tell membership.

Rule of this file. Values only. `Evidence` goes into `Swim.evidence`; the events come out
of its outbox, in the order in which they were noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.members import MemberView
from tensorhub_p2p.protocol.messages import Status


class Evidence(Enum):
    """What the connections tell of a peer, faster than probes can."""

    DISCONNECTED = auto()
    """A connection closed without a goodbye: a reason to probe at once, no more."""
    CONNECTION_REFUSED = auto()
    """Nobody listens where it did: its process is almost surely gone."""


@dataclass(frozen=True)
class MemberChanged(Event):
    """A member came, or its status changed. `old` is None for a newcomer."""

    member: MemberView
    old: Status | None


@dataclass(frozen=True)
class MemberForgotten(Event):
    """A member dead or left for so long that it isn't looked for any more."""

    peer: PeerId


@dataclass(frozen=True)
class Joined(Event):
    """A seed answered; `peer` is who. Once in a peer's life."""

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
