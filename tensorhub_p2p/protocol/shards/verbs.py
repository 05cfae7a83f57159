"""Verbs: what a handle asks of the protocols, and how each one ends.

Rules of this file. Values only. A verb has a number, a deadline and exactly one end:
`Done` with a result, or `Failed` with a typed error. shard.py and node.py run them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub_p2p.errors import TensorHubError
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import Message, Phase, Source

VerbId = int


@dataclass(frozen=True)
class Done(Event):
    verb: VerbId
    result: object


@dataclass(frozen=True)
class Failed(Event):
    verb: VerbId
    error: TensorHubError


@dataclass(frozen=True)
class Answer:
    """The result of a group call."""

    call: int
    publication: Publication
    num_shards: int
    sources: tuple[Source, ...] = field(default=(), compare=False)
    """Who held its shard when that was decided, for the pull to begin with."""


@dataclass(frozen=True)
class Found:
    """What a version is at this moment, and a few who have the shard that was asked about."""

    publication: Publication
    num_shards: int
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Holder:
    """Somebody who has a shard of a version, for a pull to read from."""

    peer: PeerId
    slot: Slot
    phase: Phase
    publication: Publication
    """The one that is followed, or another one of the same version."""


@dataclass(frozen=True)
class HoldersChanged(Event):
    """The answer to a `follow`, at first and whenever it changed."""

    follow: int
    holders: tuple[Holder, ...]
    digests: tuple[bytes, ...] = ()
    """All of the origin's, if it left them when it went; one a chunk."""


@dataclass(frozen=True)
class PullMessage(Event):
    """A message for the pull that it names."""

    pull: str
    sender: PeerId
    message: Message


@dataclass(frozen=True)
class StopDigests(Event):
    """The slot's publication is hidden, or aborted: no digest of it is taken from here on."""

    slot: Slot
    publication: Publication


@dataclass(frozen=True)
class PublicationLost(Event):
    """The slot's publication was aborted, as it was not whole when its generation ended; or it was
    contradicted, as its version has other bytes."""

    slot: Slot
    publication: Publication


@dataclass(frozen=True)
class OffloadWanted(Event):
    """Copy what `slot` holds into host memory, as `keep`: `Node.offloaded` or
    `Node.offload_failed` follows."""

    slot: Slot
    keep: Slot
    publication: Publication


@dataclass(frozen=True)
class AdoptWanted(Event):
    """Pull this shard into host memory, as `keep`, for somebody who leaves: `Node.offloaded`
    or `Node.offload_failed` follows."""

    keep: Slot
    publication: Publication
    num_shards: int
    num_bytes: int


@dataclass(frozen=True)
class KeepFreed(Event):
    """Nobody needs this offload any more: stop exporting it, free it, then `Node.freed`."""

    keep: Slot


@dataclass(frozen=True)
class PrefetchGone(Event):
    """Nobody finds or reads this prefetched copy any more: stop exporting it, and free it."""

    slot: Slot


@dataclass(frozen=True)
class VersionSummary:
    """One version of a model, as the directory knows it."""

    epoch: int
    version: int
    whole: bool
    holders: int
    zones: tuple[str, ...]
