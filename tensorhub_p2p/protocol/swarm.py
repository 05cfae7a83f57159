"""The puller's side: one shard of one publication, fetched from whoever has its chunks.

Rule of this file. A `Swarm` decides which holders are asked, which chunk is fetched from
whom, and when to give up. It may not know how bytes move (a `Fetch` is somebody else's
job, and comes back as `fetched` or `failed`), what a version means, or who the members
are. The thread of the pull drives it; it ends with the pull.

Theory of operation (DESIGN, "Swarm"). Candidates come from the directory, and from full
sources that name those whom they serve. Up to `max_sources` of them are asked for a lease
(`PullHello`); every offer carries what that holder has and the digests it knows. The
first offer also fixes the publication's layout: equal to ours, or fetched page by page
and checked against its digest. Then the driver says `begin`, and chunks are fetched:

    missing --Fetch(source, chunk, digest)--> in flight --fetched--> held
                                              in flight --failed-->  missing

A chunk is fetched only once its digest is known (unknown ones are asked for by
`PullProgress.wanted`, and the origin takes those first), from one source at a time;
different chunks come from several sources at once, the rarest first. Near sources come
first, and among equally near ones the one with the highest measured rate. A fault costs a
source its chunks in flight and a rest (sources.py has its states); two mismatches from a
source that did not withdraw, and it is shunned. Verified chunks are kept.

Who decides what is right: the origin's digests. If two sources state different digests
for a chunk, the origin's counts, else the first; that is remembered as a fact.

Ends: `Completed`; `Starved` or `Corrupt` when for `unavailable_after` seconds no holder
that answers has some chunk (Corrupt if wrong bytes of it came before). `stop` ends it
from outside. Then every source is told `PullBye`, and nothing more comes out.

Bounds: `max_candidates` sources remembered, `max_sources` leases, 2 x `reader_threads`
chunks in flight (not counting those that a stalled source sits on).
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import PeerId, Publication
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.manifest import Manifest, unpack
from tensorhub_p2p.protocol.messages import (
    LayoutPage,
    LayoutRequest,
    Message,
    Phase,
    PullBye,
    PullGone,
    PullHello,
    PullOffer,
    PullProgress,
    PullUpdate,
)
from tensorhub_p2p.protocol.pages import LayoutAgreement
from tensorhub_p2p.protocol.picking import (
    best_source,
    fetchable,
    rarest,
    rarity_levels,
    some_of,
)
from tensorhub_p2p.protocol.pull_events import (
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
)
from tensorhub_p2p.protocol.sources import (
    ACTIVE,
    ANSWERED,
    FARTHEST,
    Candidate,
    Fault,
    Source,
    SourceFacts,
    SourceId,
    SourceState,
)

MAX_MISMATCHES = 2
"""Wrong chunks until a source is shunned."""
MIN_IN_FLIGHT = 2
"""Chunks that one source may always have in flight."""
MAX_WANTED = 32
"""Digests asked for at a time."""
MAX_BACKOFF = 8
"""Longest back-off, in units of `retry_interval`."""
MAX_NAMED = 16
"""Chunks named in `Starved`."""


class Swarm:
    """The machine of one pull.

    `pull` is unique among the peer's pulls. `own` is the slot that pulls, which others are
    told about and which is never a source (another slot of the same peer may be). `layout`
    is ours; `transports` are the names of those that we have, in the order of preference.
    """

    def __init__(
        self,
        pull: str,
        publication: Publication,
        own: SourceId,
        layout: Layout,
        transports: Iterable[str],
        config: PullConfig,
        rng: random.Random,
    ) -> None:
        self.pull = pull
        self.publication = publication
        self.done = False
        self.dropped = 0
        """Malformed messages that were dropped."""
        self._own = own
        self._transports = tuple(transports)
        self._config = config
        self._rng = rng
        self._sources: dict[SourceId, Source] = {}
        self._agreement = LayoutAgreement(layout)
        self._page_from: Source | None = None
        """Who was asked for the next page of the layout, last at `_page_at`."""
        self._page_at = 0.0
        self._manifest = Manifest(0)
        self._begun = False
        self._held = 0
        self._flying = 0
        self._dry = 0
        self._dry_since: float | None = None
        self._ticked = float("-inf")
        self._outbox = Outbox()

    # --- what the driver may ask ---------------------------------------------------------

    @property
    def outbox(self) -> Outbox:
        return self._outbox

    @property
    def layout(self) -> Layout | None:
        """The publication's, once it is known."""
        return self._agreement.found

    @property
    def held(self) -> ChunkSet:
        """What is here and verified."""
        return ChunkSet(self._manifest.num_chunks, self._held)

    def facts(self) -> tuple[SourceFacts, ...]:
        """All sources that were considered, those that delivered most first."""
        facts = [source.facts() for source in self._sources.values()]
        return tuple(sorted(facts, key=lambda f: (-f.bytes, f.locality, f.source)))

    # --- inputs of the driver ------------------------------------------------------------

    def candidates(self, now: float, candidates: Iterable[Candidate]) -> None:
        """All holders that the directory names at present; replaces what it named before."""
        for known in self._sources.values():
            known.listed = False
        for candidate in sorted(candidates, key=lambda c: c.locality):
            source = self._remember(candidate.source, candidate.locality, candidate.phase)
            if source is not None:
                source.listed = True
                source.locality, source.phase = candidate.locality, candidate.phase
                if source.state is SourceState.DEAD and not source.in_flight:
                    source.enter(now, SourceState.KNOWN)  # its death was refuted
        self.tick(now)

    def begin(self, now: float) -> None:
        """From now on chunks may be fetched: bytes of ours will change."""
        self._begun = True
        self.tick(now)

    def fetched(self, now: float, source: SourceId, chunk: int, digest: bytes) -> None:
        """The chunk came from there, and its bytes hash to `digest`."""
        origin = self._landed(source, chunk)
        if origin is None or self.layout is None:
            return
        at, asked = origin
        at.delivered(now, self.layout.chunk_range(chunk)[1], asked)
        if self._manifest.get(chunk) == digest:
            self._held |= 1 << chunk
            if not self.done:
                self._outbox.emit(ChunkHeld(chunk, digest))
        if at.state is SourceState.OPEN:
            self._advance(now)  # the rest of a tick can wait until it is due: chunks come fast
        else:
            self.tick(now)

    def failed(self, now: float, source: SourceId, chunk: int, fault: Fault, why: str = "") -> None:
        """The chunk did not come from there, or not the right bytes. `why` is for people."""
        origin = self._landed(source, chunk)
        if origin is None:
            return
        at, _ = origin
        if fault is Fault.MISMATCH:
            self._mismatch(now, at, chunk)
        elif at.state in ACTIVE:
            at.streak += 1
            self._rest(now, at, f"{fault.value}{': ' if why else ''}{why}")
        self.tick(now)

    def unreachable(self, now: float, source: SourceId, why: str) -> None:
        """No transport can read there."""
        at = self._sources.get(source)
        if at is not None and at.state in ACTIVE:
            at.streak += 1
            self._rest(now, at, f"{Fault.UNREACHABLE.value}: {why}")
        self.tick(now)

    def lost(self, now: float, peer: PeerId) -> None:
        """Membership says that the peer is dead."""
        for source in self._sources.values():
            if source.id.peer == peer and source.state is not SourceState.DEAD:
                source.enter(now, SourceState.DEAD)
                source.owes_bye = False
                self._outbox.emit(SourceLost(source.id))
        self.tick(now)

    def stop(self, now: float) -> None:
        """End the pull from outside: say goodbye everywhere."""
        if not self.done:
            self._finish(now, complete=False)

    # --- the machine ---------------------------------------------------------------------

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if not isinstance(message, (PullOffer, PullUpdate, PullGone, LayoutPage)):
            return
        source = self._sources.get(SourceId(sender, message.slot))
        if message.pull != self.pull or source is None or self.done:
            return
        try:
            if isinstance(message, PullOffer):
                self._offered(now, source, message)
            elif isinstance(message, PullUpdate):
                self._updated(source, message)
            elif isinstance(message, PullGone):
                self._gone(now, source, message)
            else:
                self._paged(now, source, message)
        except ValueError as error:
            self.dropped += 1
            source.note(f"sent a malformed {type(message).__name__}: {error}")
        self.tick(now)

    def tick(self, now: float) -> None:
        if self.done:
            return
        self._hold_verdicts(now)
        for source in self._sources.values():
            self._tend(now, source)
        self._ask_more(now)
        self._ask_layout(now)
        self._advance(now)
        self._check_dry(now)

    def _advance(self, now: float) -> None:
        """Hand out what can be fetched; notice the end."""
        self._ticked = now
        if self.done or not self._begun or self.layout is None:
            return
        self._dispatch(now)
        if self._held.bit_count() == self.layout.num_chunks:
            self._outbox.emit(Completed())
            self._finish(now, complete=True)

    def _hold_verdicts(self, now: float) -> None:
        """After a pause of our own, what came meanwhile is still unread: nobody was silent."""
        planned = self.next_wakeup()
        late = 0.0 if planned is None else now - max(planned, self._ticked)
        if late <= self._config.retry_interval:
            return
        for source in self._sources.values():
            if source.state is SourceState.ASKING:
                source.since += late
        if self._dry_since is not None:
            self._dry_since += late

    def next_wakeup(self) -> float | None:
        if self.done:
            return None
        return earliest(
            *(self._tend_at(source) for source in self._sources.values()),
            self._page_at + self._config.retry_interval if self._page_from else None,
            None if self._dry_since is None else self._dry_since + self._config.unavailable_after,
            self._stall_at() if self._begun else None,
        )

    # --- finding sources -----------------------------------------------------------------

    def _remember(self, source: SourceId, locality: int, phase: Phase) -> Source | None:
        """The source's entry; None if it is ourselves, or one too many."""
        known = self._sources.get(source)
        if known is not None or source == self._own:
            return known
        if len(self._sources) >= self._config.max_candidates and not self._forget_one():
            return None
        known = self._sources[source] = Source(source, locality, phase, listed=False)
        return known

    def _forget_one(self) -> bool:
        """Make room: forget a source that is of no use and has no story."""
        for id, source in self._sources.items():
            idle = source.state not in ACTIVE and not source.in_flight and not source.owes_bye
            if idle and not source.listed and not source.bytes and not source.mismatches:
                del self._sources[id]
                return True
        return False

    def _ask_more(self, now: float) -> None:
        """Ask the most promising candidates, up to `max_sources` at a time."""
        patience = self._config.retry_interval * 2
        busy = sum(
            source.state in ANSWERED
            or (source.state is SourceState.ASKING and now < source.since + patience)
            for source in self._sources.values()
        )
        room = self._config.max_sources - busy
        if room <= 0:
            return
        fresh = [s for s in self._sources.values() if s.state is SourceState.KNOWN and s.listed]
        self._rng.shuffle(fresh)
        # Who withdraws comes last, but if it is the only one it waits for us to have it all.
        fresh.sort(key=lambda s: (s.locality, s.phase is Phase.PARTIAL))
        fresh.sort(key=lambda s: s.phase is Phase.WITHDRAWING)
        for source in fresh[:room]:
            source.enter(now, SourceState.ASKING)
            source.asks = 0
            self._hello(now, source)

    def _hello(self, now: float, source: Source) -> None:
        source.owes_bye = True
        source.asks += 1
        source.retry_at = now + self._backoff(source.asks)
        self._told(now, source)
        hello = PullHello(
            pull=self.pull,
            slot=source.id.slot,
            publication=self.publication,
            layout=self._agreement.own.digest,
            transports=self._transports,
            have=self.held.to_bytes(),
            puller=self._own.slot,
        )
        self._outbox.send(source.id.peer, hello)

    def _backoff(self, attempt: int) -> float:
        """Seconds until the next attempt; the first is number 1."""
        return self._config.retry_interval * float(min(MAX_BACKOFF, 1 << min(attempt - 1, 8)))

    def _told(self, now: float, source: Source) -> None:
        source.told_at = now
        source.told = self._state()

    def _state(self) -> tuple[bool, bool]:
        """What a source wants to know of us: have we something, do we know all digests."""
        return (self._held != 0, self._agreement.settled and self._manifest.complete)

    # --- tending the ones we have --------------------------------------------------------

    def _tend_at(self, source: Source) -> float | None:
        """When this source needs something from us next."""
        config = self._config
        if source.state is SourceState.ASKING:
            return min(source.retry_at, source.since + config.source_timeout)
        if source.state is SourceState.RESTING:
            return None if source.in_flight or not source.listed else source.retry_at
        if source.state in ANSWERED:
            if self._wanting(source):
                return source.told_at  # at once: readers may be idle for want of a digest
            if source.told != self._state():
                return source.told_at + config.update_interval
            return source.told_at + config.lease_seconds / 3
        return None

    def _tend(self, now: float, source: Source) -> None:
        if source.owes_bye and source.state not in ACTIVE and not source.in_flight:
            source.owes_bye = False
            self._outbox.send(source.id.peer, PullBye(self.pull, source.id.slot))
        due = self._tend_at(source)
        if due is None or now < due:
            return
        if source.state is SourceState.RESTING:
            source.enter(now, SourceState.KNOWN)
        elif source.state is SourceState.ASKING:
            if now >= source.since + self._config.source_timeout:
                self._rest(now, source, "doesn't answer")
            else:
                self._hello(now, source)
        else:
            self._progress(now, source)

    def _progress(self, now: float, source: Source) -> None:
        """Renew the lease. Where nothing is to be had, ask for the whole state again.

        That mends a lost offer, grant or update, of which neither side would hear.
        """
        wanted = self._wanting(source)
        busy = source.in_flight or wanted or fetchable(source, self._open(), self._wanted())
        idle = source.state is SourceState.WAITING or not busy
        if idle and source.told == self._state() and self._needed():
            self._hello(now, source)
            return
        chunks = some_of(wanted, MAX_WANTED, self._rng)
        if chunks:
            source.wanted = sum(1 << chunk for chunk in chunks)
        self._told(now, source)
        have, known = self.held.to_bytes(), len(self._manifest)
        self._outbox.send(
            source.id.peer,
            PullProgress(self.pull, source.id.slot, have, tuple(chunks), known),
        )

    def _wanting(self, source: Source) -> int:
        """The chunks whose digests to ask for there now: only if we run out of known ones."""
        if source.state is not SourceState.OPEN:
            return 0
        if self._wanted().bit_count() >= self._in_flight_limit():
            return 0
        unknown = self._needed() & source.have & ~self._manifest.known.bits
        return 0 if source.wanted & unknown else unknown

    def _rest(self, now: float, source: Source, why: str) -> None:
        """Leave it alone for a while; what it has in flight comes back through `failed`."""
        source.note(why)
        source.retry_at = now + self._backoff(max(1, source.streak))
        source.have = source.wanted = 0
        source.enter(now, SourceState.RESTING)

    def _mismatch(self, now: float, source: Source, chunk: int) -> None:
        if source.state not in ACTIVE:
            return  # It withdrew or died: the chunk is lost, and nobody lied.
        source.mismatches += 1
        source.bad |= 1 << chunk
        source.note(f"sent wrong bytes of chunk {chunk}")
        if source.mismatches >= MAX_MISMATCHES:
            source.enter(now, SourceState.SHUNNED)
            self._outbox.emit(SourceLost(source.id))

    # --- what sources say ----------------------------------------------------------------

    def _offered(self, now: float, source: Source, offer: PullOffer) -> None:
        if source.state not in ACTIVE or offer.publication != self.publication:
            return
        num_chunks = self._agreement.grid(offer)
        have = ChunkSet.from_bytes(num_chunks, offer.have)
        digests = unpack(num_chunks, offer.known, offer.digests)
        if not self._agreement.settled:
            self._settle(offer)
        if offer.layout != self._agreement.digest:
            self._rest(now, source, "offers another layout of the same publication")
            return
        source.have = have.bits
        self._learn(source, digests)
        for peer, slot in offer.others:
            other = self._remember(SourceId(peer, slot), FARTHEST, Phase.PARTIAL)
            if other is not None and other.state is SourceState.KNOWN:
                other.listed = True
        if not offer.granted:
            if source.state is not SourceState.WAITING:
                source.enter(now, SourceState.WAITING)
        elif not offer.endpoints:
            source.streak += 1
            self._rest(now, source, "offers no transport that we have")
        elif source.state is not SourceState.OPEN or source.endpoints != offer.endpoints:
            source.endpoints = offer.endpoints
            source.enter(now, SourceState.OPEN)
            self._outbox.emit(SourceFound(source.id, offer.endpoints))

    def _updated(self, source: Source, update: PullUpdate) -> None:
        if source.state in ANSWERED and self._agreement.settled:
            source.have = ChunkSet.from_bytes(self._manifest.num_chunks, update.have).bits
            self._learn(source, update.digests)

    def _gone(self, now: float, source: Source, gone: PullGone) -> None:
        """It withdrew, or our lease lapsed: what came out wrong before was lost, not a lie."""
        forgiven = (
            source.state is SourceState.SHUNNED and now < source.since + self._config.lease_seconds
        )
        if source.state in ACTIVE or forgiven:
            source.bad = source.mismatches = 0
            self._rest(now, source, f"let us go: {gone.reason}")

    def _learn(self, source: Source, digests: Iterable[tuple[int, bytes]]) -> None:
        is_origin = source.id.slot.group.replica == self.publication.replica
        new: list[tuple[int, bytes]] = []
        for chunk, digest in digests:
            if not self._manifest.admits(chunk, digest):
                raise ValueError(f"no digest of chunk {chunk}")
            old = self._manifest.get(chunk)
            if old == digest:
                continue
            if old is not None:
                source.note(f"states another digest for chunk {chunk} than a source before it")
                if not is_origin:
                    continue
                self._revoke(chunk)
            self._manifest.put(chunk, digest)
            new.append((chunk, digest))
        if new and self.layout is not None:
            self._outbox.emit(DigestsLearnt(tuple(new)))

    def _revoke(self, chunk: int) -> None:
        if self._held >> chunk & 1:
            self._held &= ~(1 << chunk)
            self._outbox.emit(ChunkRevoked(chunk))

    # --- the layout ----------------------------------------------------------------------

    def _settle(self, offer: PullOffer) -> None:
        """The first sound offer decides which layout we go by."""
        self._agreement.settle(offer)
        self._manifest = Manifest(self._agreement.num_chunks)
        if self._agreement.found is not None:
            self._layout_found(self._agreement.found)

    def _ask_layout(self, now: float) -> None:
        """Ask one source that answers for the next page; another one if it stays silent."""
        if self._agreement.next is None:
            return
        asked = self._page_from
        patient = now < self._page_at + self._config.retry_interval
        if asked is not None and asked.state in ANSWERED and patient:
            return
        answering = [s for s in self._sources.values() if s.state in ANSWERED]
        others = [s for s in answering if s is not asked] or answering
        if others:
            self._request_page(now, min(others, key=lambda s: s.locality))
        else:
            self._page_from = None

    def _request_page(self, now: float, source: Source) -> None:
        first = self._agreement.next
        if first is not None:
            self._page_from, self._page_at = source, now
            self._outbox.send(source.id.peer, LayoutRequest(self.pull, source.id.slot, first))

    def _paged(self, now: float, source: Source, page: LayoutPage) -> None:
        if self._agreement.next is None:
            return
        try:
            was_next = self._agreement.add(page)
        except LayoutMismatch as error:
            self._start_over(now, source, str(error))
            return
        if self._agreement.found is not None:
            self._layout_found(self._agreement.found)
        elif was_next:
            self._request_page(now, source)

    def _start_over(self, now: float, liar: Source, why: str) -> None:
        """The layout that was announced does not exist: ask everybody again what it is."""
        self._page_from = None
        self._manifest = Manifest(0)
        self._rest(now, liar, why)
        for source in self._sources.values():
            source.have = source.wanted = 0
            if source.state in ANSWERED:
                source.enter(now, SourceState.ASKING)
                source.asks = 0
                self._hello(now, source)

    def _layout_found(self, layout: Layout) -> None:
        self._page_from = None
        self._dry, self._dry_since = 0, None
        self._outbox.emit(LayoutFound(layout))
        known = tuple((chunk, self._manifest[chunk]) for chunk in self._manifest.known)
        if known:
            self._outbox.emit(DigestsLearnt(known))

    # --- fetching ------------------------------------------------------------------------

    def _needed(self) -> int:
        return ((1 << self._manifest.num_chunks) - 1) & ~self._held

    def _wanted(self) -> int:
        """Chunks that could be asked for now, if somebody has them."""
        return self._needed() & self._manifest.known.bits & ~self._flying

    def _open(self) -> list[Source]:
        return [s for s in self._sources.values() if s.state is SourceState.OPEN]

    def _in_flight_limit(self) -> int:
        """Chunks in flight altogether: one in work and one queued for each reader."""
        return 2 * self._config.reader_threads

    def _stalls_at(self, asked: float) -> float:
        """From then on a chunk in flight no longer keeps others from being asked for."""
        return asked + self._config.source_timeout / 4

    def _stall_at(self) -> float | None:
        """When the next chunk in flight becomes stalled, so that another one may go."""
        stalls = [
            self._stalls_at(asked)
            for source in self._sources.values()
            for asked in source.in_flight.values()
        ]
        return earliest(*(at for at in stalls if at > self._ticked))

    def _dispatch(self, now: float) -> None:
        """Hand out fetches as long as there are readers and chunks for them."""
        flying = sum(
            now < self._stalls_at(asked)
            for source in self._sources.values()
            for asked in source.in_flight.values()
        )
        room = self._in_flight_limit() - flying
        sources = self._open()
        if room <= 0 or not sources or not self._wanted():
            return
        limit = max(MIN_IN_FLIGHT, self._in_flight_limit() // len(sources))
        levels = rarity_levels(s.have for s in self._sources.values() if s.state in ANSWERED)
        num_needed = self._needed().bit_count()
        while room > 0:
            choice = best_source(sources, self._wanted(), num_needed, limit, self._rng)
            if choice is None:
                return
            source, among = choice
            chunk = rarest(levels, among, self._rng)
            source.in_flight[chunk] = now
            self._flying |= 1 << chunk
            self._outbox.emit(Fetch(source.id, chunk, self._manifest[chunk]))
            room -= 1

    def _landed(self, source: SourceId, chunk: int) -> tuple[Source, float] | None:
        """A reader is through with the chunk: (its source, when it was asked for)."""
        at = self._sources.get(source)
        asked = None if at is None else at.in_flight.pop(chunk, None)
        if at is None or asked is None:
            return None
        self._flying &= ~(1 << chunk)
        return at, asked

    # --- the end -------------------------------------------------------------------------

    def _check_dry(self, now: float) -> None:
        """Give up once the same chunk was to be had nowhere for too long."""
        if self.done:
            return
        dry = self._unavailable()
        still = self._dry & dry
        if not still:
            self._dry, self._dry_since = dry, now if dry else None
            return
        self._dry = still
        if self._dry_since is None or now < self._dry_since + self._config.unavailable_after:
            return
        self._outbox.emit(self._verdict(still))
        self._finish(now, complete=False)

    def _unavailable(self) -> int:
        """Chunks that nobody who answers has; a lone bit for the unknown whole."""
        answering = [s for s in self._sources.values() if s.state in ANSWERED]
        if self.layout is None:
            return 0 if answering else 1
        reachable = 0
        for source in answering:
            if not source.failing:
                reachable |= source.have
        return self._needed() & ~reachable

    def _verdict(self, dry: int) -> Event:
        if self.layout is None:
            return Starved((), self.facts())
        for chunk in ChunkSet(self._manifest.num_chunks, dry):
            liars = tuple(s.id for s in self._sources.values() if s.bad >> chunk & 1)
            if liars:
                return Corrupt(chunk, liars)
        chunks = some_of(dry, MAX_NAMED, self._rng)
        return Starved(tuple(sorted(chunks)), self.facts())

    def _finish(self, now: float, *, complete: bool) -> None:
        self.done = True
        for source in self._sources.values():
            if source.owes_bye:
                source.owes_bye = False
                self._outbox.send(source.id.peer, PullBye(self.pull, source.id.slot, complete))
