"""One pull, driven by the thread of the user who called `replicate`.

Rule of this file. It connects what is decided (protocol/pulls/swarm.py) with what moves bytes
(links.py): events of the swarm become orders for links, reports of links become inputs of
the swarm. It decides neither; its own business is the deadline, the order of "check the
layout, reach a source, then begin", and turning ends into typed errors.

Everything arrives in one inbox, a queue that other threads put into:

    (sender, message)      a message of this pull
    HoldersChanged         who holds the publication, according to the directory
    a PeerId               this member was declared dead
    None                   the peer was closed: the pull ends with PeerClosed
    a Report               from a link of this pull
    READY                  what `Hooks.prepare` was asked for is done

Whatever the end, `run` returns or raises only when no reader is writing into the tensors
any more. Extra memory: a scratch buffer for each reader thread, nothing that grows with
the weights.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.errors import (
    IntegrityError,
    PeerClosed,
    TensorHubError,
    Timeout,
    TransferError,
    VersionUnavailable,
)
from tensorhub_p2p.protocol.identity import PeerId, Publication
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.messages import Message
from tensorhub_p2p.protocol.pulls.pages import KnownLayouts
from tensorhub_p2p.protocol.pulls.pull_events import (
    Carrying,
    ChunkHeld,
    ChunkRevoked,
    Completed,
    Corrupt,
    DigestsLearnt,
    Fetch,
    LayoutFound,
    SourceFound,
    SourceLost,
    Starved,
    TakeBack,
)
from tensorhub_p2p.protocol.pulls.sources import Candidate, SourceFacts, SourceId
from tensorhub_p2p.protocol.pulls.swarm import Swarm
from tensorhub_p2p.protocol.shards.verbs import HoldersChanged
from tensorhub_p2p.transfer.choosing import Choices
from tensorhub_p2p.transfer.links import (
    Connected,
    ConnectFailed,
    Crashed,
    Landed,
    Link,
    Readers,
    ReadFault,
)
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.stock import Stock
from tensorhub_p2p.transfer.transports.base import Transport

READY = object()
MAX_BATCH = 64
"""Items taken from the inbox before what they led to is carried out."""
PLENTY = 4
"""What a link has to do must last for so many times as long as the pull's thread rests."""
LONGEST_WAIT = 1.0
"""Seconds for which the pull's thread waits, where it goes by no deadline."""
SHORTEST_NAP = 0.0005
"""Seconds; less is not worth it."""
MAX_TOLD = 8
"""Sources that an error message tells about."""


class Hooks:
    """What the caller wants to know, on the thread of the pull. Override what is of use."""

    def prepare(self, ready: Callable[[], None]) -> None:
        """A source is within reach and the layout fits: have done what has to be done before.

        `begin` follows once `ready()` was called, on any thread; that has to come soon after the
        pull's deadline at the latest. Meanwhile the pull goes on listening to its sources.
        """
        ready()

    def begin(self, into: Region) -> bool:
        """All is prepared; bytes change once this returns.

        `into` is the registered memory in the publisher's order. Returns whether the directory
        is being told of this pull. Whatever this raises ends the pull before a byte was written.
        """
        return False

    def digests(self, digests: tuple[tuple[int, bytes], ...]) -> None:
        """Digests of (chunk, digest) became known; those before `begin` come after it."""

    def held(self, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
        """The chunk is in place and verified: it can be served on.

        The peers in `known_to` hear of it from where it came from.
        """

    def carrying(self, chunks: int) -> None:
        """These chunks (bit c for chunk c), and no others, are on their way from other zones."""

    def revoked(self, chunk: int) -> None:
        """The chunk is not what the origin published after all: serve it no longer."""


@dataclass
class Moved:
    """What one transport brought from one source, in so many seconds of its reader threads."""

    bytes: int = 0
    chunks: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class SourceOutcome:
    """How one source did. `rejected`: transport → why it wasn't used there (any more)."""

    facts: SourceFacts
    transport: str
    """The one that was used last; "" if none was."""
    rejected: Mapping[str, str]
    failed: tuple[str, ...] = ()
    """Those of the rejected that were tried, and gave way to the next one."""
    last: str = ""
    """The one that may still work there; "" if none may."""
    moved: Mapping[str, Moved] = field(default_factory=dict)
    """By transport."""


@dataclass(frozen=True)
class PullOutcome:
    """What a pull did, whether it succeeded or not. Times in seconds.

    `waiting`: until a source was within reach and the layout known. `beginning`: from then to the
    end of `Hooks.begin`. `moving`: from then to the end. `reading`: spent in reads by all reader
    threads together, of it `hashing` for digests.
    """

    bytes: int
    total: int
    retried: int
    waiting: float
    beginning: float
    moving: float
    reading: float
    hashing: float
    sources: tuple[SourceOutcome, ...]


class ShardPull:
    """Pulls one shard of one publication into registered memory. Use once.

    `region` is that memory; or what makes it, once the publication's layout is known: a
    call that returns memory in just that layout (and `layout` is what that may well be).
    `stock` is what lies in this process's memory already, and crosses no link.
    `choices` orders the transports for each link; without it, their own order does.
    `transports` in the order of preference;
    `send` and the inbox are thread-safe; `locate` says how far a peer is (0 same host,
    1 rack, 2 zone, 3 other); `deadline` is on `time.monotonic`; `lag` counts the seconds, in all,
    in which messages that had come were not put into the inbox.
    """

    def __init__(
        self,
        *,
        pull: str,
        publication: Publication,
        own: SourceId,
        region: Region | Callable[[Layout], Region],
        transports: Mapping[str, Transport],
        config: PullConfig,
        inbox: SimpleQueue[object],
        send: Callable[[PeerId, Message], None],
        locate: Callable[[PeerId], int],
        deadline: float,
        hooks: Hooks,
        rng: random.Random,
        layout: Layout | None = None,
        stock: Stock | None = None,
        known: KnownLayouts | None = None,
        choices: Choices | None = None,
        lag: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.publication = publication
        self._lag = lag
        self._forgiven = lag()
        """Of the seconds of lag: those that were held against nobody."""
        self._choices = choices
        self._region = region
        self._every = transports
        """Those that can't be used here, too: they are explained."""
        self._transports = {
            name: transport
            for name, transport in transports.items()
            if transport.unavailable() is None
        }
        self._config = config
        self._inbox = inbox
        self._send = send
        self._locate = locate
        self._deadline = deadline
        self._hooks = hooks
        self._stock = stock
        layout = region.layout if isinstance(region, Region) else layout
        self._swarm = Swarm(
            pull, publication, own, layout, self._transports, config, rng, locate, known
        )
        self._readers: Readers | None = None
        self._copiers: Readers | None = None
        """Of the stock."""
        self._links: dict[SourceId, Link] = {}
        self._retired: list[Link] = []
        """Links that were replaced, as long as they may still be writing."""
        self._found: list[SourceFound] = []
        """Sources that were found before the layout was known."""
        self._learnt: list[tuple[int, bytes]] = []
        self._news: list[ChunkHeld] = []
        """Chunks in place that the hooks haven't heard of yet."""
        self._news_at = float("-inf")
        """When the hooks may hear of the next ones."""
        self._directory_answered = False
        self._preparing = False
        """The hooks are, so that bytes may change; they heed the deadline."""
        self._begun = False
        self._done = False
        self._moved = 0
        self._moved_by: dict[SourceId, dict[str, Moved]] = {}
        self.moved_at = float("-inf")
        """When bytes came last."""
        self._retried = 0
        self._reading = self._hashing = 0.0
        self._started = time.monotonic()
        self._reached_at = self._began_at = self._ended_at = self._started

    @property
    def crosses(self) -> bool:
        """Something of it has to come from another zone."""
        return self._swarm.crosses

    # --- the pull ------------------------------------------------------------------------

    def run(self) -> None:
        """Returns once every byte is in place and verified.

        Raises LayoutMismatch (no byte was written), VersionUnavailable, IntegrityError,
        TransferError, Timeout, PeerClosed, or what a hook raised.
        """
        try:
            if self._stock is not None:
                self._swarm.candidates(time.monotonic(), [self._stock.candidate])
                self._carry_out()
            while not self._done:
                self._take(time.monotonic())
                self._carry_out()
                if time.monotonic() >= self._news_at:
                    self._tell_news()
        finally:
            self._stop()
            self._tell_news()

    @property
    def moved(self) -> int:
        """Bytes that came so far; from any thread."""
        return self._moved

    @property
    def sources(self) -> tuple[SourceId, ...]:
        """All that were considered; to be asked after `run`."""
        return tuple(facts.source for facts in self._swarm.facts())

    def outcome(self) -> PullOutcome:
        """What was done, to be asked after `run`."""
        layout = self._swarm.layout
        return PullOutcome(
            bytes=self._moved,
            total=layout.num_bytes if layout is not None else 0,
            retried=self._retried,
            waiting=self._reached_at - self._started,
            beginning=self._began_at - self._reached_at,
            moving=self._ended_at - self._began_at if self._begun else 0.0,
            reading=self._reading,
            hashing=self._hashing,
            sources=tuple(self._source_outcome(facts) for facts in self._swarm.facts()),
        )

    def _source_outcome(self, facts: SourceFacts) -> SourceOutcome:
        link = self._links.get(facts.source)
        if link is None:
            return SourceOutcome(facts, "", {})
        moved = self._moved_by.get(facts.source, {})
        used = link.transport if facts.chunks else ""
        rejected, failed = dict(link.rejected), link.failed
        return SourceOutcome(facts, used, rejected, failed, link.choice, moved)

    def _stop(self) -> None:
        """Say goodbye, and fence the tensors off from every reader, whoever still listens."""
        try:
            self._swarm.stop(time.monotonic())
            for output in self._swarm.outbox.drain():
                if isinstance(output, Send):
                    self._say(output)
        finally:
            self._close_links()

    def _close_links(self) -> None:
        links = [*self._links.values(), *self._retired]
        for link in links:
            link.abort()
        for link in links:
            link.close()
        self._ended_at = time.monotonic()
        if not self._begun:
            self._began_at = self._reached_at = self._ended_at

    # --- in --------------------------------------------------------------------------------

    def _take(self, now: float) -> None:
        """Wait for something to happen; feed it, and what else has come, to the swarm."""
        wakeup = self._swarm.next_wakeup()
        deadline = self._deadline if not self._preparing else now + LONGEST_WAIT
        until = deadline if wakeup is None else min(wakeup, deadline)
        if self._news:
            until = min(until, self._news_at)
        self._swarm.gather()
        with contextlib.suppress(Empty):
            item = self._inbox.get(timeout=max(0.0, until - now))
            self._accept(time.monotonic(), item)
            self._let_more_come(item, until)
            for _ in range(MAX_BATCH - 1):
                item = self._inbox.get_nowait()
                self._accept(time.monotonic(), item)
        now = time.monotonic()
        self._forgive(now)
        self._swarm.act(now)
        if wakeup is not None and now >= wakeup:  # inputs tick by themselves
            self._swarm.tick(now)
        if now >= self._deadline and not self._swarm.done and not self._preparing:
            raise self._timeout()

    def _forgive(self, now: float) -> None:
        """What was said to us and has not got into the inbox yet is nobody's silence."""
        late = self._lag() - self._forgiven
        if late > self._config.retry_interval:
            self._swarm.held_up(now, late)
            self._forgiven += late

    def _let_more_come(self, item: object, until: float) -> None:
        """Rest if readers have plenty to do: each thought takes their time (the GIL).

        Until the hooks may hear of chunks again, or `until`; and not so long that a link with
        something to do, or the one that has just brought something, could run dry.
        """
        latest = self._links.get(item.source) if isinstance(item, Landed) else None
        backlogs = ((link, link.backlog) for link in self._links.values())
        least = min((left for link, left in backlogs if left or link is latest), default=0.0)
        nap = min(least / PLENTY, min(self._news_at, until) - time.monotonic())
        if nap > SHORTEST_NAP:
            time.sleep(nap)

    def _accept(self, now: float, item: object) -> None:
        swarm = self._swarm
        if isinstance(item, Landed):
            self._count(item)
            self.moved_at = now
            swarm.fetched(now, item.source, item.chunk, item.digest)
        elif isinstance(item, ReadFault):
            self._retried += 1
            swarm.failed(now, item.source, item.chunk, item.fault, item.why)
        elif isinstance(item, tuple):
            sender, message = item
            swarm.receive(now, sender, message)
        elif isinstance(item, HoldersChanged):
            self._directory_answered = True
            swarm.candidates(now, self._candidates(item), item.digests)
        elif isinstance(item, str):
            swarm.lost(now, PeerId(item))
        elif isinstance(item, Connected):
            self._prepare()
        elif item is READY:
            self._begin()
        elif isinstance(item, ConnectFailed):
            swarm.unreachable(now, item.source, item.why)
        elif isinstance(item, Crashed):
            raise item.error
        elif item is None:
            raise PeerClosed(f"this peer was closed while it pulled {self.publication}")

    def _count(self, landed: Landed) -> None:
        self._moved += landed.num_bytes
        self._reading += landed.seconds
        self._hashing += landed.hashing
        by_transport = self._moved_by.setdefault(landed.source, {})
        moved = by_transport.get(landed.transport)
        if moved is None:
            moved = by_transport[landed.transport] = Moved()
        moved.bytes += landed.num_bytes
        moved.chunks += 1
        moved.seconds += landed.seconds

    def _candidates(self, changed: HoldersChanged) -> list[Candidate]:
        """Whom the directory names, and first of all the stock, which it may name too."""
        named = [
            Candidate(h.peer, h.slot, h.phase, self._locate(h.peer), h.publication)
            for h in changed.holders
        ]
        if self._stock is None:
            return named
        stock = self._stock.candidate
        return [stock, *(other for other in named if other.source != stock.source)]

    # --- out -------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """Do what the swarm decided."""
        while outputs := self._swarm.outbox.drain():
            for output in outputs:
                if isinstance(output, Send):
                    self._say(output)
                elif isinstance(output, Event):
                    self._on_event(output)

    def _say(self, send: Send) -> None:
        """The stock is asked here, and answers before anything else is done; others are sent to."""
        stock, slot = self._stock, getattr(send.message, "slot", None)
        if stock is None or (send.to, slot) != stock.source:
            self._send(send.to, send.message)
            return
        answer = stock.answer(send.message)
        if answer is not None:
            self._swarm.receive(time.monotonic(), send.to, answer)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Fetch):
            self._links[event.source].submit(event.chunk, event.digest)
        elif isinstance(event, TakeBack):
            self._links[event.source].take_back(event.chunk)
        elif isinstance(event, ChunkHeld):
            self._news.append(event)
        elif isinstance(event, DigestsLearnt):
            self._on_digests(event.digests)
        elif isinstance(event, LayoutFound):
            self._on_layout(event.layout)
        elif isinstance(event, SourceFound):
            self._on_source(event)
        elif isinstance(event, SourceLost):
            link = self._links.get(event.source)
            if link is not None:
                link.abort()
        elif isinstance(event, Carrying):
            self._hooks.carrying(event.chunks)
        elif isinstance(event, ChunkRevoked):
            self._tell_news()
            self._hooks.revoked(event.chunk)
        elif isinstance(event, Completed):
            self._done = True
        elif isinstance(event, Starved):
            raise self._starved(event)
        elif isinstance(event, Corrupt):
            raise self._corrupt(event)

    def _tell_news(self) -> None:
        """Let the hooks know of chunks: of the first at once, then of many at a time.

        What hears of them wakes other threads, which take the readers' time.
        """
        if not self._news:
            return
        self._news_at = time.monotonic() + self._config.news_interval
        news, self._news = self._news, []
        for held in news:
            self._hooks.held(held.chunk, held.digest, held.known_to)

    def _on_layout(self, layout: Layout) -> None:
        region = self._region
        into = region.arranged(layout) if isinstance(region, Region) else region(layout)
        self._readers = Readers(
            into, self._every, self._config, self._deadline, self._inbox.put, self._choices
        )
        if self._stock is not None:
            copying = {self._stock.transport.name: self._stock.transport}
            self._copiers = Readers(into, copying, self._config, self._deadline, self._inbox.put)
        found, self._found = self._found, []
        for event in found:
            self._on_source(event)

    def _on_source(self, event: SourceFound) -> None:
        """Make a link to it; keep the one that there is if it may still work."""
        if self._readers is None:
            self._found.append(event)
            return
        link = self._links.get(event.source)
        if link is None or not link.serves(event.endpoints):
            if link is not None:
                link.abort()
                self._retired = [old for old in self._retired if old.writing] + [link]
            readers = self._readers
            stocked = self._stock is not None and event.source == self._stock.source
            if stocked and self._copiers is not None:
                readers = self._copiers
            link = self._links[event.source] = Link(event.source, event.endpoints, readers)
        if not link.usable:
            self._swarm.unreachable(time.monotonic(), event.source, link.why_not())
        elif not self._begun:
            link.connect()

    def _prepare(self) -> None:
        """The first source within reach: bytes may change once all is prepared."""
        if self._begun or self._preparing or self._readers is None:
            return
        self._preparing = True
        self._reached_at = time.monotonic()
        self._hooks.prepare(lambda: self._inbox.put(READY))

    def _begin(self) -> None:
        """Bytes may change from here on."""
        assert self._readers is not None
        self._preparing = False
        announced = self._hooks.begin(self._readers.into)
        self._begun = True
        self._began_at = time.monotonic()
        learnt, self._learnt = self._learnt, []
        if learnt:
            self._hooks.digests(tuple(learnt))
        self._swarm.begin(self._began_at, announced=announced)

    def _on_digests(self, digests: tuple[tuple[int, bytes], ...]) -> None:
        if self._begun:
            self._hooks.digests(digests)
        else:
            self._learnt.extend(digests)

    # --- ends ------------------------------------------------------------------------------

    def _timeout(self) -> Timeout:
        layout = self._swarm.layout
        if layout is None:
            what = "no holder has answered"
        else:
            what = f"{len(self._swarm.held)} of {layout.num_chunks} chunks were in place"
        return Timeout(
            f"pulling {self.publication} timed out: {what}; {self._tell(self._swarm.facts())}"
        )

    def _starved(self, event: Starved) -> TensorHubError:
        told = self._tell(event.tried)
        what = f"chunks {_some(event.chunks)}" if event.chunks else "it"
        if event.lost:
            return VersionUnavailable(
                f"{self.publication} can't be had any more: its publisher died before others had "
                f"the digests of {what}; {told}"
            )
        if any(facts.failing for facts in event.tried):
            return TransferError(
                f"{self.publication} is there, but its bytes can't be moved here: {told}"
            )
        seconds = self._config.unavailable_after
        return VersionUnavailable(
            f"{self.publication} can't be had: for {seconds:g} s no reachable holder has "
            f"had {what}; {told}"
        )

    def _tell(self, tried: tuple[SourceFacts, ...]) -> str:
        """What became of the sources, for an error message."""
        if not tried:
            answered = self._directory_answered
            return f"the directory {'names no holder' if answered else 'has not said who holds it'}"
        lines = [
            f"{facts.source}: {facts.notes[-1] if facts.notes else facts.state.value}"
            for facts in tried[:MAX_TOLD]
        ]
        more = len(tried) - MAX_TOLD
        return "tried " + "; ".join(lines) + (f"; and {more} more" if more > 0 else "")

    def _corrupt(self, event: Corrupt) -> IntegrityError:
        layout = self._swarm.layout
        assert layout is not None
        start, length = layout.chunk_range(event.chunk)
        first, last = layout.tensor_at(start).name, layout.tensor_at(start + length - 1).name
        where = f"in tensor {first!r}" if first == last else f"in tensors {first!r} to {last!r}"
        return IntegrityError(
            f"{self.publication}: bytes {start} to {start + length} ({where}) never matched the "
            f"publisher's digest, from {', '.join(map(str, event.sources))}: were published "
            "tensors changed before unpublish()?"
        )


def _some(chunks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, chunks[:MAX_TOLD]))
    return shown + (", ..." if len(chunks) > MAX_TOLD else "")
