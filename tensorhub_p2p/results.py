"""What the verbs return and the questions answer: values, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class HandleState(Enum):
    """What a handle is doing, and which calls fit (handle.py has the table)."""

    OPEN = "open: register() tensors next"
    REGISTERED = "registered: publish() or replicate() next"
    PUBLISHED = "published: others may read; unpublish() or replicate() next"
    REPLICATING = "replicating: the tensors are being written"
    TORN = "torn: the last pull failed and left a mix of bytes; replicate() or publish() next"
    CLOSED = "closed"


@dataclass(frozen=True)
class SourceReport:
    """One source of a pull, as it turned out.

    `locality` is "host", "rack", "zone" or "far"; `rate` in bytes a second, None if it
    delivered nothing; `notes` say what went wrong, or why it was not used, oldest first.
    """

    peer_id: str
    name: str
    slot: str
    transport: str
    locality: str
    bytes: int
    chunks: int
    rate: float | None
    state: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pull:
    """What one `replicate` did. Times in seconds.

    `seconds` is the whole call; of it `waiting` passed until there was an answer to what
    was asked and a first source, `registering` went into references, `moving` into bytes
    on the way. Digests are checked as the bytes arrive: `verifying` is what that cost the
    reader threads, summed over them. `bytes` were moved and verified; `retried` chunks were
    fetched again from elsewhere. `up_to_date`: the handle held the version already.
    """

    model: str
    version: int
    epoch: int
    bytes: int
    seconds: float
    sources: tuple[SourceReport, ...] = ()
    retried: int = 0
    up_to_date: bool = False
    waiting: float = 0.0
    registering: float = 0.0
    moving: float = 0.0
    verifying: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Of the time in which bytes moved; 0 if none did."""
        return self.bytes / self.moving / 1e9 if self.moving else 0.0


@dataclass(frozen=True)
class Member:
    """One member of the cluster, as this peer sees it. `state` is "alive", "suspect", ..."""

    peer_id: str
    name: str
    address: str
    zone: str
    state: str


@dataclass(frozen=True)
class ZoneInfo:
    """One zone, by the newest news of it. `members` is about how many peers it has.

    `gateways` are the addresses of those that speak for it, `newest` the highest (epoch,
    version) of each model that is whole there.
    """

    name: str
    members: int
    gateways: tuple[str, ...]
    newest: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class VersionInfo:
    """One version of a model. `whole`: it can be replicated now; `holders` counts slots."""

    epoch: int
    version: int
    whole: bool
    holders: int
    zones: tuple[str, ...] = field(default=())
