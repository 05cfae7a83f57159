"""What a swarm decides, for the thread of the pull to carry out. Values, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.protocol.pulls.sources import SourceFacts, SourceId


@dataclass(frozen=True)
class LayoutFound(Event):
    """The publication's layout. The driver checks it, then says `begin`. Emitted once."""

    layout: Layout


@dataclass(frozen=True)
class SourceFound(Event):
    """A lease was granted (again): read from there through one of these endpoints."""

    source: SourceId
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True)
class SourceLost(Event):
    """Nothing more will be fetched there: reads that still run may be broken off."""

    source: SourceId


@dataclass(frozen=True)
class Fetch(Event):
    """Read this chunk from there and check it; report `fetched` or `failed` exactly once."""

    source: SourceId
    chunk: int
    digest: bytes


@dataclass(frozen=True)
class TakeBack(Event):
    """Break off this read if it still runs: `failed` with GIVEN_UP, or `fetched`, follows."""

    source: SourceId
    chunk: int


@dataclass(frozen=True)
class DigestsLearnt(Event):
    """Digests of the publication, to be served on."""

    digests: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class ChunkHeld(Event):
    """The chunk's bytes are here and match: serve it on."""

    chunk: int
    digest: bytes
    known_to: frozenset[PeerId] = frozenset()
    """Peers that hear of it from where it came from, and need no word of ours at once."""


@dataclass(frozen=True)
class Carrying(Event):
    """Other chunks than before (a set, as `ChunkSet.bits`) are on their way from other zones."""

    chunks: int


@dataclass(frozen=True)
class ChunkRevoked(Event):
    """A held chunk matched a digest that the origin contradicts: serve it no longer."""

    chunk: int


@dataclass(frozen=True)
class Completed(Event):
    """Every chunk is held."""


@dataclass(frozen=True)
class Starved(Event):
    """No holder that answers has these chunks (some of them; none: nobody answered at all).

    `lost`: nobody can have them any more, as the publisher died before it had said their digests.
    """

    chunks: tuple[int, ...]
    tried: tuple[SourceFacts, ...]
    lost: bool = False


@dataclass(frozen=True)
class Corrupt(Event):
    """Every source of this chunk sent wrong bytes, and there is no other."""

    chunk: int
    sources: tuple[SourceId, ...]
