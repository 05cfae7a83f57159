"""What the verbs return and the questions answer: values, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class HandleState(Enum):
    """What a handle is doing, and which calls fit (handle.py has the table)."""

    OPEN = "open: register() tensors next"
    REGISTERED = "registered: publish() or replicate() next"
    PUBLISHED = "published: others may read; unpublish() or replicate() next"
    REPLICATING = "replicating: the tensors are being written"
    TORN = "torn: the last pull failed and left a mix of bytes; replicate() or publish() next"
    CLOSED = "closed"


MEMORY = "memory"
"""The transport of what was prefetched: it crosses no link."""


@dataclass(frozen=True)
class TransportReport:
    """What one transport brought. `rate`: bytes a second that one of its reader threads got."""

    transport: str
    bytes: int
    chunks: int
    rate: float | None


@dataclass(frozen=True)
class Fallback:
    """A transport that was tried at a source, and gave way to another one there.

    `instead` is the one that took over; "" if none was left.
    """

    transport: str
    why: str
    instead: str


@dataclass(frozen=True)
class SourceReport:
    """One source of a pull, as it turned out.

    `verdict` is "chosen" (it brought bytes), "not needed" (it would have), "rejected" or "not
    asked", and `why` says why. `state` is what was known of it at the end. `transport` is the one
    that was used last, "memory" for what was prefetched; `locality` is "memory", "host", "rack",
    "zone" or "far"; `rate` in bytes a second, None if it delivered nothing. `transports` say what
    came over each; `fallbacks` which gave way to which; `unfit` why others were not even tried
    there. `notes` say what it refused or what went wrong, oldest first.
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
    verdict: str = "chosen"
    why: str = ""
    transports: tuple[TransportReport, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pull:
    """What one `replicate` did. Times in seconds.

    `seconds` is the whole call, the sum of three: `registering` went into references and into
    exporting the memory to the transports, `moving` into bytes on the way, and `waiting` is the
    rest: until there was an answer to what was asked and a first source, and until the readers
    of the old version were gone. Digests are checked as the bytes arrive, so `verifying` is no
    fourth part: it is what that cost the reader threads, summed over them. `bytes` came and were
    verified; `prefetched` of them lay in this process's memory already. `retried` chunks were
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
    prefetched: int = 0

    @property
    def over_links(self) -> int:
        """Bytes that this call moved over links: what was not prefetched."""
        return self.bytes - self.prefetched

    @property
    def gigabytes_per_second(self) -> float:
        """Of the time in which bytes moved; 0 if none did."""
        return self.bytes / self.moving / 1e9 if self.moving else 0.0

    @property
    def transports(self) -> tuple[TransportReport, ...]:
        """What came over each transport, from all sources; most bytes first."""
        found: dict[str, list[TransportReport]] = {}
        for source in self.sources:
            for report in source.transports:
                found.setdefault(report.transport, []).append(report)
        sums = [_sum(name, reports) for name, reports in found.items()]
        return tuple(sorted(sums, key=lambda report: -report.bytes))

    def as_json(self) -> dict[str, Any]:
        """All of it as what `json.dumps` takes: fields and properties, by their names."""
        return {
            **asdict(self),
            "over_links": self.over_links,
            "gigabytes_per_second": self.gigabytes_per_second,
            "transports": [asdict(report) for report in self.transports],
        }


def _sum(transport: str, reports: list[TransportReport]) -> TransportReport:
    total = sum(report.bytes for report in reports)
    seconds = sum(report.bytes / report.rate for report in reports if report.rate)
    chunks = sum(report.chunks for report in reports)
    return TransportReport(transport, total, chunks, total / seconds if seconds else None)


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
