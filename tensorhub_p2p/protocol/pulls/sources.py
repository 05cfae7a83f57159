"""One source of one pull, as the puller sees it: its state, what it has, how it does.

Rule of this file. A `Source` is what the swarm remembers about one holder; it decides
nothing and sends nothing. Which source is asked is decided in courting.py, and what is
fetched from it in dispatch.py.

    known    --asked-->                         asking
    asking   --offer-->                         open (granted) or waiting (its slots are full)
    waiting  --granted later-->                 open;   open --rotated out--> waiting
    asking, waiting, open --a fault-->          resting (asked again after a back-off)
    resting  --the back-off is over-->          known
    any      --two mismatches-->                shunned (never asked again; unless it then says that
                                                it withdrew, and they were lost chunks: resting)
    any      --membership says dead-->          dead;   dead --it is alive after all--> known

Chunks in flight belong to the readers until they report, whatever became of the source
meanwhile: a chunk is never in two readers' hands.

A source may hold another publication of the version than the one that is pulled: data-parallel
trainers publish the same bytes side by side. Of such a *twin* only those chunks count that have
the digest, by its own list, that they have in the list of the publication that is pulled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import Endpoint, Phase

MAX_FAULTS_REMEMBERED = 8
RATE_WEIGHT = 0.3
"""Weight of the newest chunk in the moving average of a source's rate."""
SHORTEST_RATED = 0.0005
"""Seconds; over less than that no rate is measured."""
MAX_STREAK = 3
"""Failed reads in a row until a source that answers doesn't count as having anything."""
AT_HAND, SAME_HOST, FARTHEST = -1, 0, 3
"""Localities: of what lies in this process's own memory, of one on this host, and of one about
which nothing is known."""


class SourceId(NamedTuple):
    """Who, and which of its slots."""

    peer: PeerId
    slot: Slot

    def __str__(self) -> str:
        return f"{self.slot} at {self.peer}"


@dataclass(frozen=True)
class Candidate:
    """A holder as the directory knows it.

    `locality`: -1 this process's memory, 0 same host, 1 rack, 2 zone, 3 other.
    """

    peer: PeerId
    slot: Slot
    phase: Phase
    locality: int
    publication: Publication
    """What it holds: the one that is pulled, or another one of the same version."""

    @property
    def source(self) -> SourceId:
        return SourceId(self.peer, self.slot)


class Fault(Enum):
    """Why a chunk didn't arrive from a source. The value completes "source …"."""

    MISMATCH = "sent bytes that don't match the digest"
    GONE = "is gone"
    WITHDREW = "withdrew the publication"
    SILENT = "delivered nothing in time"
    UNREACHABLE = "can't be reached by any transport"
    GIVEN_UP = "was slower than another one would have been"


class SourceState(Enum):
    KNOWN = "not asked"
    ASKING = "asked, no answer yet"
    WAITING = "its upload slots are full"
    OPEN = "serving"
    RESTING = "failed lately"
    SHUNNED = "sent wrong bytes"
    DEAD = "died"


ANSWERED = frozenset({SourceState.OPEN, SourceState.WAITING})
ACTIVE = ANSWERED | {SourceState.ASKING}


@dataclass(frozen=True)
class SourceFacts:
    """What `peer.explain` tells about a source. `rate` in bytes a second, None if unmeasured."""

    source: SourceId
    locality: int
    state: SourceState
    bytes: int
    chunks: int
    mismatches: int
    rate: float | None
    failing: bool
    """It answers, but reads from it failed time and again."""
    notes: tuple[str, ...]
    """What it refused or what went wrong, oldest first, at most MAX_FAULTS_REMEMBERED."""


@dataclass(eq=False)
class Source:
    """Sets of chunks are ints (bit c for chunk c), as `ChunkSet.bits`."""

    id: SourceId
    locality: int
    phase: Phase
    publication: Publication
    """What it holds, and is asked for."""
    listed: bool
    """The directory names it, or a source that serves it did in an offer."""
    state: SourceState = SourceState.KNOWN
    since: float = 0.0
    """When it entered its state."""
    have: int = 0
    """What is to be had there; of a twin, only what is known to be the same."""
    claimed: int = 0
    stated: dict[int, bytes] = field(default_factory=dict)
    """Of a twin: the chunks that it has, and their digests by its own list."""
    bad: int = 0
    """Chunks of which it sent wrong bytes."""
    given_up: int = 0
    """Chunks that were taken back from it (endgame.py)."""
    heard: bool = False
    """It made an offer."""
    spring: bool = False
    """It had everything when we first heard of it."""
    serving: frozenset[SourceId] = frozenset()
    """Who else is being served there."""
    endpoints: tuple[Endpoint, ...] = ()
    in_flight: dict[int, float] = field(default_factory=dict)
    """Chunk → when its reader was asked for it."""
    retry_at: float = 0.0
    """ASKING: when to ask again. RESTING: when it may be asked again."""
    asks: int = 0
    """Requests since it last began to be asked."""
    streak: int = 0
    """Failed reads since the last good chunk."""
    told_at: float = 0.0
    """When it last heard from us."""
    told: tuple[bool, bool] = (False, False)
    """Whether it heard that we have something, and that we know all digests."""
    wanted: int = 0
    """Chunks whose digests it was asked for last."""
    heard_at: float = float("-inf")
    """When it said something last."""
    unanswered: float | None = None
    """Since when it has left what we asked of it unanswered."""
    carrying: int | None = 0
    """Chunks that it says it is fetching from other zones; None: it fetches nothing more."""
    owes_bye: bool = False
    """It may hold a lease for us: say goodbye once nothing is in flight."""
    bytes: int = 0
    chunks: int = 0
    mismatches: int = 0
    rate: float | None = None
    pace: float = 0.0
    """Chunks a second, by the newest ones; 0 if unmeasured."""
    delivered_at: float = float("-inf")
    """When the newest chunk came."""
    unrated: tuple[int, int, float] = (0, 0, 0.0)
    """Bytes, chunks, and seconds that they took, since the rate was measured last."""
    notes: list[str] = field(default_factory=list)

    @property
    def far(self) -> bool:
        """It is of another zone, or nobody knows where."""
        return self.locality >= FARTHEST

    def enter(self, now: float, state: SourceState) -> None:
        self.state, self.since = state, now
        if state is SourceState.WAITING:
            self.note(state.value)

    def holds_now(self, publication: Publication) -> None:
        """What it said before was of another one."""
        self.publication = publication
        self.have = self.wanted = self.claimed = 0
        self.carrying = 0
        self.heard = self.spring = False
        self.stated = {}

    def weigh(self, manifest: Manifest) -> None:
        """Of a twin: find what is to be had there, by the list of what is pulled."""
        same = (c for c, digest in self.stated.items() if manifest.get(c) == digest)
        self.have = self.claimed & sum(1 << chunk for chunk in same)

    def note(self, what: str) -> None:
        """Remember for `explain`; the oldest note goes at the bound, repeats are not kept."""
        if what not in self.notes:
            self.notes.append(what)
            del self.notes[:-MAX_FAULTS_REMEMBERED]

    def delivered(self, now: float, num_bytes: int, asked: float) -> None:
        """A good chunk came, asked for at `asked`; time behind its chunks before is not its own."""
        self.bytes += num_bytes
        self.chunks += 1
        self.streak = 0
        came, chunks, took = self.unrated
        came, chunks = came + num_bytes, chunks + 1
        took += max(0.0, now - max(asked, self.delivered_at))
        self.delivered_at = max(now, self.delivered_at)
        if took < SHORTEST_RATED:
            self.unrated = (came, chunks, took)
            return
        self.unrated = (0, 0, 0.0)
        self.pace = chunks / took
        rate = came / took
        old = rate if self.rate is None else self.rate
        self.rate = old + RATE_WEIGHT * (rate - old)

    def postpone(self, late: float) -> None:
        """For so long nobody can be blamed for anything."""
        self.in_flight = {chunk: asked + late for chunk, asked in self.in_flight.items()}

    def was_slow(self, num_bytes: int, took: float) -> None:
        """It did not bring a chunk in so many seconds."""
        self.rate = min(self.rate or num_bytes / took, num_bytes / took)
        self.pace = min(self.pace or 1 / took, 1 / took)

    @property
    def shared(self) -> bool:
        """It has all, and its cable is what a swarm waits for (sharing.py).

        What crosses from another zone is crossing.py's.
        """
        return self.spring and SAME_HOST < self.locality < FARTHEST

    @property
    def failing(self) -> bool:
        """Reads from it fail time and again: it doesn't count as having anything."""
        return self.streak >= MAX_STREAK

    def facts(self) -> SourceFacts:
        return SourceFacts(
            source=self.id,
            locality=self.locality,
            state=self.state,
            bytes=self.bytes,
            chunks=self.chunks,
            mismatches=self.mismatches,
            rate=self.rate,
            failing=self.failing,
            notes=tuple(self.notes),
        )
