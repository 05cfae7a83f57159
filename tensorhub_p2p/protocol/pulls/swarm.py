"""The puller's side: one shard of one publication, fetched from whoever has its chunks.

Rule of this file. A `Swarm` decides which holders are asked, which chunk is fetched from
whom, and when to give up. It may not know how bytes move (a `Fetch` is somebody else's
job, and comes back as `fetched` or `failed`), what a version means, or who the members
are. The thread of the pull drives it; it ends with the pull.

Theory of operation (DESIGN, "Swarm"). Candidates come from the directory, and from full
sources that name those whom they serve. Some of them are asked for a lease (courting.py);
every offer carries what that holder has and the digests it knows. The first offer also
fixes the publication's layout: equal to ours, or fetched page by page (pages.py). Then the
driver says `begin`, and chunks are fetched, the rarest first, from near and fast sources
before others (dispatch.py, picking.py), until the ledger holds all of them (ledger.py) or
the drought lasts too long (drought.py). Of a source that many read, each of its pullers takes a
share, and they trade (sharing.py); what lies in other zones crosses once (crossing.py); near
the end late reads are taken back (endgame.py); a source that is the only one is asked far ahead
(run_ahead.py). A fault costs a source its chunks in flight and a
rest; two mismatches from a source that did not withdraw, and it is shunned (sources.py).
Verified chunks are kept.

This file takes in what the driver and the sources say, and calls the parts in order: tend
the sources, ask more of them, ask for pages, hand out fetches, notice the end. What arrived
while the driver was busy it may `gather`, and have it acted on all at once.

Ends: `Completed`; `Starved` or `Corrupt` when for `unavailable_after` seconds no holder
that answers has some chunk (Corrupt if wrong bytes of it came before; sooner where nobody can
have it any more, as the origin died and left no digest of it). `stop` ends it
from outside. Then every source is told `PullBye`, and nothing more comes out.

Own pauses: when a call comes more than a retry interval late, this process did not run,
and nobody is judged for the silence. Nor for what the driver `held_up`: messages that came and were
not handed on.

Bounds: `max_candidates` sources remembered; `max_sources` places for those that are asked (carriers
of crossing.py besides, and who is silent for long keeps no place: of those that answer late there
may be up to four times as many); chunks in flight as dispatch.py says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import PeerId, Publication
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.manifest import unpack
from tensorhub_p2p.protocol.messages import (
    LayoutPage,
    Message,
    Phase,
    PullGone,
    PullOffer,
    PullUpdate,
)
from tensorhub_p2p.protocol.pulls.courting import Courtship
from tensorhub_p2p.protocol.pulls.crossing import Crossing
from tensorhub_p2p.protocol.pulls.dispatch import Dispatch
from tensorhub_p2p.protocol.pulls.drought import Drought
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.pages import KnownLayouts, LayoutAgreement, PageRequests
from tensorhub_p2p.protocol.pulls.pull_events import (
    Carrying,
    ChunkHeld,
    Completed,
    LayoutFound,
    SourceFound,
    SourceLost,
)
from tensorhub_p2p.protocol.pulls.sharing import Sharing
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import (
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


class Swarm:
    """The machine of one pull.

    `pull` is unique among the peer's pulls. `own` is the slot that pulls, which others are
    told about and which is never a source (another slot of the same peer may be). `layout`
    is ours, None if we go by the publication's; `transports` are the names of those that we
    have, in the order of preference. `known` are layouts that came with earlier pulls.
    `locate` says how far a peer is, as `Candidate.locality`.
    """

    def __init__(
        self,
        pull: str,
        publication: Publication,
        own: SourceId,
        layout: Layout | None,
        transports: Iterable[str],
        config: PullConfig,
        rng: random.Random,
        locate: Callable[[PeerId], int] = lambda _peer: FARTHEST,
        known: KnownLayouts | None = None,
    ) -> None:
        self.pull = pull
        self.publication = publication
        self.done = False
        self.dropped = 0
        """Malformed messages, and lists of digests, that were dropped."""
        self._config = config
        self._outbox = outbox = Outbox()
        self._sources = sources = SourceTable(own, publication, config.max_candidates)
        self._agreement = agreement = LayoutAgreement(layout, known)
        self._ledger = ledger = Ledger(publication, agreement, outbox)
        self._crossing = crossing = Crossing(own, publication, sources, ledger, config)
        self._pages = PageRequests(pull, agreement, sources, config, outbox)
        self._courtship = Courtship(
            pull,
            publication,
            own.slot,
            layout.digest if layout is not None else b"",
            tuple(transports),
            sources,
            ledger,
            crossing,
            config,
            rng,
            outbox,
        )
        self._sharing = Sharing(own, sources, ledger, config)
        self._dispatch = Dispatch(sources, ledger, crossing, config, rng, outbox, self._sharing)
        self._drought = Drought(agreement, sources, ledger, crossing, config, rng)
        self._own = own
        self._locate = locate
        self._carrying = 0
        """What is known to be on its way from other zones."""
        self._begun = False
        self._weighed = 0
        """How much the ledger had learnt when twins were last compared with it."""
        self._left: tuple[bytes, ...] = ()
        """The digests that the origin left with the directory."""
        self._ticked = float("-inf")
        self._gathering = False
        self._owed: Callable[[float], None] | None = None
        """What the inputs call for that were gathered: `tick`, or a part of it."""

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
        return self._ledger.holding

    @property
    def crosses(self) -> bool:
        """There are holders in other zones, and nobody of ours has everything."""
        return self._crossing.is_due

    def facts(self) -> tuple[SourceFacts, ...]:
        """All sources that were considered, those that delivered most first."""
        return self._sources.facts()

    # --- inputs of the driver ------------------------------------------------------------

    def gather(self) -> None:
        """From now until `act`, inputs are only taken in."""
        self._gathering = True

    def act(self, now: float) -> None:
        """Do what the inputs since `gather` call for, once for all of them."""
        self._gathering = False
        owed, self._owed = self._owed, None
        if owed is not None:
            owed(now)

    def candidates(
        self, now: float, candidates: Iterable[Candidate], digests: tuple[bytes, ...] = ()
    ) -> None:
        """All holders that the directory names at present; replaces what it named before.

        `digests` are the origin's, of all chunks, if it left them there when it withdrew.
        """
        self._left = digests
        self._learn_left()
        for known in self._sources:
            known.listed = False
        for candidate in sorted(candidates, key=lambda c: c.locality):
            if candidate.source == self._own and candidate.publication == self.publication:
                self._crossing.seen()
            source = self._sources.remember(
                candidate.source, candidate.locality, candidate.phase, candidate.publication
            )
            if source is not None:
                source.listed = True
                source.locality, source.phase = candidate.locality, candidate.phase
                self._holds_now(now, source, candidate.publication)
                if source.state is SourceState.DEAD and not source.in_flight:
                    source.enter(now, SourceState.KNOWN)  # its death was refuted
        self.tick(now)

    def _holds_now(self, now: float, source: Source, publication: Publication) -> None:
        """The slot may have gone on to another publication of the version."""
        if source.publication != publication:
            source.holds_now(publication)
            if source.state in ACTIVE:
                source.enter(now, SourceState.KNOWN)

    def _learn_left(self) -> None:
        if self._left and self._agreement.settled:
            try:
                self._ledger.learn_left(self._left)
            except ValueError:
                self.dropped += 1

    def begin(self, now: float, *, announced: bool = False) -> None:
        """From now on chunks may be fetched: bytes of ours will change.

        `announced`: the directory is being told that we pull.
        """
        self._begun = True
        self._crossing.begin(now, announced=announced)
        self.tick(now)

    def fetched(self, now: float, source: SourceId, chunk: int, digest: bytes) -> None:
        """The chunk came from there, and its bytes hash to `digest`."""
        origin = self._dispatch.landed(source, chunk)
        if origin is None or self.layout is None:
            return
        at, asked = origin
        at.delivered(now, self.layout.chunk_range(chunk)[1], asked)
        self._sharing.came()
        if self._ledger.hold(chunk, digest) and not self.done:
            known_to = frozenset() if at.spring else frozenset(id.peer for id in at.serving)
            self._outbox.emit(ChunkHeld(chunk, digest, known_to | {at.id.peer}))
        if at.state is SourceState.OPEN:
            self._go_on(now)
        else:
            self.tick(now)

    def failed(self, now: float, source: SourceId, chunk: int, fault: Fault, why: str = "") -> None:
        """The chunk did not come from there, or not the right bytes. `why` is for people."""
        origin = self._dispatch.landed(source, chunk)
        if origin is None:
            return
        at, asked = origin
        if fault is Fault.MISMATCH:
            self._courtship.mismatch(now, at, chunk)
        elif fault is Fault.GIVEN_UP and self.layout is not None:
            at.note(fault.value)
            took = now - max(asked, at.delivered_at)
            at.was_slow(self.layout.chunk_range(chunk)[1], max(took, 1e-3))
        elif at.state in ACTIVE:
            self._courtship.fault(now, at, f"{fault.value}{': ' if why else ''}{why}")
        self.tick(now)

    def unreachable(self, now: float, source: SourceId, why: str) -> None:
        """No transport can read there."""
        at = self._sources.get(source)
        if at is not None and at.state in ACTIVE:
            self._courtship.fault(now, at, f"{Fault.UNREACHABLE.value}: {why}")
        self.tick(now)

    def lost(self, now: float, peer: PeerId) -> None:
        """Membership says that the peer is dead."""
        for source in self._sources:
            if source.id.peer == peer and source.state is not SourceState.DEAD:
                source.enter(now, SourceState.DEAD)
                source.owes_bye = False
                self._outbox.emit(SourceLost(source.id))
        self.tick(now)

    def stop(self, now: float) -> None:
        """End the pull from outside: say goodbye everywhere."""
        if not self.done:
            self._finish(complete=False)

    # --- the machine ---------------------------------------------------------------------

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if not isinstance(message, (PullOffer, PullUpdate, PullGone, LayoutPage)):
            return
        source = self._sources.get(SourceId(sender, message.slot))
        if message.pull != self.pull or source is None or self.done:
            return
        source.unanswered, source.heard_at = None, now
        try:
            if isinstance(message, PullOffer):
                self._offered(now, source, message)
            elif isinstance(message, PullUpdate):
                self._updated(now, source, message)
            elif isinstance(message, PullGone):
                self._gone(now, source, message)
            else:
                self._paged(now, source, message)
        except ValueError as error:
            self.dropped += 1
            source.note(f"sent a malformed {type(message).__name__}: {error}")
        quiet = isinstance(message, PullUpdate) and not message.digests
        if quiet and not self._crossing.is_due:
            self._go_on(now)  # it has more
        else:
            self.tick(now)

    def tick(self, now: float) -> None:
        if self.done:
            return
        if self._gathering:
            self._owed = self.tick
            return
        self._hold_verdicts(now)
        self._weigh_twins()
        self._crossing.judge(now)
        self._courtship.tend_all(now)
        self._courtship.ask_more(now)
        self._pages.tick(now)
        self._advance(now)
        self._check_drought(now)

    def _go_on(self, now: float) -> None:
        """The part of a tick that can't wait until one is due: chunks come fast."""
        if self._gathering:
            self._owed = self._owed or self._go_on
            return
        if now > self._ticked + self._config.retry_interval:
            self.tick(now)  # perhaps after a pause of our own
            return
        self._crossing.judge(now)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Hand out what can be fetched; notice the end."""
        self._ticked = now
        if self.done or not self._begun or self.layout is None:
            return
        self._dispatch.hand_out(now)
        self._tell_carrying()
        if self._ledger.held.bit_count() == self.layout.num_chunks:
            self._outbox.emit(Completed())
            self._finish(complete=True)

    def _tell_carrying(self) -> None:
        carrying = self._dispatch.across()
        if carrying != self._carrying:
            self._carrying = carrying
            self._outbox.emit(Carrying(carrying))

    def _hold_verdicts(self, now: float) -> None:
        """After a pause of our own, what came meanwhile is still unread: nobody was silent."""
        planned = self.next_wakeup()
        late = 0.0 if planned is None else now - max(planned, self._ticked)
        if late > self._config.retry_interval:
            self.held_up(now, late)

    def held_up(self, now: float, late: float) -> None:
        """For so many seconds, until now, nothing that was said here could be heard."""
        self._ticked = min(now, self._ticked + late)  # they are no pause of our own besides
        for source in self._sources:
            if source.state is SourceState.ASKING:
                source.since += late
            source.postpone(late)
        self._sharing.begin_anew()
        self._drought.postpone(late)
        self._crossing.woke(now, late)

    def next_wakeup(self) -> float | None:
        if self.done:
            return None
        return earliest(
            self._courtship.next_wakeup(),
            self._pages.next_wakeup(),
            self._drought.next_wakeup(),
            self._crossing.next_wakeup() if self._begun else None,
            self._dispatch.next_wakeup(self._ticked) if self._begun else None,
        )

    # --- what sources say ----------------------------------------------------------------

    def _offered(self, now: float, source: Source, offer: PullOffer) -> None:
        if source.state not in ACTIVE or offer.publication != source.publication:
            return
        num_chunks = self._agreement.grid(offer)
        have = ChunkSet.from_bytes(num_chunks, offer.have)
        digests = unpack(num_chunks, offer.known, offer.digests)
        twin = self._courtship.is_twin(source)
        if not self._agreement.settled and not twin:
            self._settle(offer)
        if offer.layout != self._agreement.digest:
            self._courtship.rest(now, source, "offers another layout of the version")
            return
        if not source.heard:
            source.heard, source.spring = True, have.is_full and not twin
        source.serving = frozenset(SourceId(*other) for other in offer.others)
        self._says(now, source, have.bits, digests, offer.carrying)
        for peer, slot in offer.others:
            id, where = SourceId(peer, slot), self._locate(peer)
            other = self._sources.remember(id, where, Phase.PARTIAL, source.publication)
            if other is not None and other.state is SourceState.KNOWN:
                other.listed = True
        if not offer.granted:
            if source.state is not SourceState.WAITING:
                source.enter(now, SourceState.WAITING)
        elif not offer.endpoints:
            self._courtship.fault(now, source, "offers no transport that we have")
        elif source.state is not SourceState.OPEN or source.endpoints != offer.endpoints:
            source.endpoints = offer.endpoints
            source.enter(now, SourceState.OPEN)
            self._outbox.emit(SourceFound(source.id, offer.endpoints))

    def _updated(self, now: float, source: Source, update: PullUpdate) -> None:
        if source.state in ANSWERED and self._agreement.settled:
            have = ChunkSet.from_bytes(self._ledger.manifest.num_chunks, update.have).bits
            if update.others is not None:
                source.serving = frozenset(SourceId(*other) for other in update.others)
            self._says(now, source, have, update.digests, update.carrying)

    def _says(
        self,
        now: float,
        source: Source,
        have: int,
        digests: Iterable[tuple[int, bytes]],
        carrying: bytes | None,
    ) -> None:
        """What it has, and which digests; ValueError if one can't be, from there on."""
        if not self._courtship.is_twin(source):
            self._crossing.said(now, source, have, self._under_way(carrying))
            source.have = have
            self._ledger.learn(source, digests)
            return
        source.claimed = have
        source.stated.update(
            (chunk, digest)
            for chunk, digest in digests
            if self._ledger.manifest.admits(chunk, digest)
        )
        source.weigh(self._ledger.manifest)

    def _under_way(self, carrying: bytes | None) -> int | None:
        if not carrying:
            return None if carrying is None else 0
        return ChunkSet.from_bytes(self._ledger.manifest.num_chunks, carrying).bits

    def _weigh_twins(self) -> None:
        """If digests of what is pulled became known: what of it is to be had at twins?"""
        if self._weighed == self._ledger.learnt:
            return
        self._weighed = self._ledger.learnt
        for source in self._sources:
            if source.stated and source.state in ANSWERED:
                source.weigh(self._ledger.manifest)

    def _gone(self, now: float, source: Source, gone: PullGone) -> None:
        """It withdrew, or our lease lapsed: what came out wrong before was lost, not a lie."""
        forgiven = (
            source.state is SourceState.SHUNNED and now < source.since + self._config.lease_seconds
        )
        if source.state in ACTIVE or forgiven:
            source.bad = source.mismatches = 0
            self._courtship.rest(now, source, f"let us go: {gone.reason}")

    # --- the layout ----------------------------------------------------------------------

    def _settle(self, offer: PullOffer) -> None:
        """The first sound offer decides which layout we go by."""
        self._agreement.settle(offer)
        self._ledger.renew()
        self._learn_left()
        if self._agreement.found is not None:
            self._layout_found(self._agreement.found)

    def _paged(self, now: float, source: Source, page: LayoutPage) -> None:
        if self._agreement.next is None:
            return
        try:
            self._pages.take(now, source, page)
        except LayoutMismatch as error:
            self._start_over(now, source, str(error))
            return
        if self._agreement.found is not None:
            self._layout_found(self._agreement.found)

    def _start_over(self, now: float, liar: Source, why: str) -> None:
        """The layout that was announced does not exist: ask everybody again what it is."""
        self._pages.stop()
        self._ledger.renew()
        self._courtship.rest(now, liar, why)
        for source in self._sources:
            source.have = source.wanted = 0
            if source.state in ANSWERED:
                self._courtship.ask(now, source)

    def _layout_found(self, layout: Layout) -> None:
        self._pages.stop()
        self._drought.forget()
        self._outbox.emit(LayoutFound(layout))
        self._ledger.announce_known()

    # --- the end -------------------------------------------------------------------------

    def _check_drought(self, now: float) -> None:
        verdict = None if self.done else self._drought.check(now)
        if verdict is not None:
            self._finish(complete=False)  # nothing that comes after the verdict is carried out
            self._outbox.emit(verdict)

    def _finish(self, *, complete: bool) -> None:
        self.done = True
        self._courtship.end(complete=complete)
