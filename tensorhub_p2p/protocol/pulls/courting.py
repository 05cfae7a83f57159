"""Courting sources: whom to ask for a lease, how to keep it, and whom to leave alone.

Rule of this file. It talks to sources: every `PullHello`, `PullProgress` and `PullBye` is
sent here. What they say in return swarm.py takes in; which chunk is fetched from them is
dispatch.py's choice. The states of a source are described in sources.py.

Theory of operation. Up to `max_sources` candidates are asked at a time, the nearest first
and whoever withdraws last. One that doesn't answer a `PullHello` is asked again after a
back-off that doubles up to MAX_BACKOFF, and rests once it was silent for `source_timeout`.
One that is asked for two retry intervals already keeps no place from others.

While chunks have to cross from other zones, who carries them has a place in any case, and at most
half of the others are for holders there; who carries nothing lets those go (crossing.py).

Twins (sources.py) are asked for what they hold. They have no say in the layout, and are asked
once it is settled; digests come from the others, so half of the places are theirs at most.

A lease is renewed by `PullProgress` each third of it, or along with others once a quarter of it
is over; sooner if what we have or know changed (after `update_interval`), and at once if we run
out of chunks with known digests: then it names up to MAX_WANTED whose digests we want, which the
origin takes first. Where nothing is to be had though something is missing, `PullHello` is said
again instead: the answer is the source's whole state, which mends whatever message was lost. So
it is where somebody carries what is missing here: the answer shows that it lives.

A fault costs a source a rest, after which it is a candidate again; MAX_MISMATCHES wrong
chunks, and it is shunned. Whoever may hold a lease for us is owed a `PullBye`, and gets it
once nothing is in flight there, or at the end.
"""

from __future__ import annotations

import random

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import Phase, PullBye, PullHello, PullProgress
from tensorhub_p2p.protocol.pulls.crossing import Crossing
from tensorhub_p2p.protocol.pulls.dispatch import in_flight_limit
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.picking import fetchable, some_of
from tensorhub_p2p.protocol.pulls.pull_events import SourceLost
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import ACTIVE, ANSWERED, Source, SourceState

MAX_MISMATCHES = 2
"""Wrong chunks until a source is shunned."""
MAX_WANTED = 32
"""Digests asked for at a time."""
MAX_BACKOFF = 8
"""Longest back-off, in units of `retry_interval`."""


class Courtship:
    """What one pull says to its sources. `layout` is the digest of ours."""

    def __init__(
        self,
        pull: str,
        publication: Publication,
        puller: Slot,
        layout: bytes,
        transports: tuple[str, ...],
        sources: SourceTable,
        ledger: Ledger,
        crossing: Crossing,
        config: PullConfig,
        rng: random.Random,
        outbox: Outbox,
    ) -> None:
        self._pull = pull
        self._publication = publication
        self._puller = puller
        self._layout = layout
        self._transports = transports
        self._sources = sources
        self._ledger = ledger
        self._crossing = crossing
        self._config = config
        self._rng = rng
        self._outbox = outbox

    # --- asking for a lease --------------------------------------------------------------

    def ask_more(self, now: float) -> None:
        """Ask the most promising candidates, up to `max_sources` at a time."""
        patience = self._config.retry_interval * 2
        crossing, half = self._crossing, (self._config.max_sources + 1) // 2
        active = [s for s in self._sources if s.state in ACTIVE]
        taking = [
            source
            for source in active
            if (source.state in ANSWERED or now < source.since + patience)
            and not crossing.carries(source)
        ]
        far = sum(source.far for source in taking)
        room = self._config.max_sources - len(taking)
        room_near = room - max(0, half - far) if crossing.needs_far else room
        twins = sum(self.is_twin(s) for s in active)
        if room <= 0 and not crossing.lacks_carriers:
            return
        for source in self._fresh():
            if crossing.carries(source):
                self.ask(now, source)
            elif self.is_twin(source) and twins >= self._config.max_sources // 2:
                continue
            elif source.far and room > 0 and far < half:
                far, room = far + 1, room - 1
                self.ask(now, source)
            elif not source.far and room_near > 0:
                room, room_near = room - 1, room_near - 1
                self.ask(now, source)
            else:
                continue
            twins += self.is_twin(source)

    def _fresh(self) -> list[Source]:
        """Candidates that may be asked, the most promising first."""
        fresh = [
            source
            for source in self._sources
            if source.state is SourceState.KNOWN
            and source.listed
            and not self._crossing.stands_back(source)
        ]
        if not self._ledger.settled:
            fresh = [s for s in fresh if not self.is_twin(s)]
        self._rng.shuffle(fresh)
        # Who withdraws comes last, but if it is the only one it waits for us to have it all.
        fresh.sort(key=lambda s: (s.locality, s.phase is Phase.PARTIAL))
        fresh.sort(key=lambda s: s.phase is Phase.WITHDRAWING)
        return fresh

    def is_twin(self, source: Source) -> bool:
        """It holds another publication of the version."""
        return source.publication != self._publication

    def ask(self, now: float, source: Source) -> None:
        """Begin to ask for a lease there."""
        source.enter(now, SourceState.ASKING)
        source.asks = 0
        source.unanswered = None
        self._hello(now, source)

    def _hello(self, now: float, source: Source) -> None:
        source.owes_bye = True
        source.asks += 1
        source.unanswered = now if source.unanswered is None else source.unanswered
        source.retry_at = now + self._backoff(source.asks)
        self._told(now, source)
        hello = PullHello(
            pull=self._pull,
            slot=source.id.slot,
            publication=source.publication,
            layout=self._layout,
            transports=self._transports,
            have=self._ledger.holding.to_bytes(),
            puller=None if self.is_twin(source) else self._puller,
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
        return (self._ledger.held != 0, self._ledger.all_digests_known)

    # --- tending the ones we have --------------------------------------------------------

    def next_wakeup(self) -> float | None:
        """When some source needs something from us next."""
        state, unknown, renewal = self._state(), self._unknown(), self._config.lease_seconds / 3
        return earliest(*(self._due(source, state, unknown, renewal) for source in self._sources))

    def tend_all(self, now: float) -> None:
        """Give every source what it needs now."""
        for source in self._sources:
            self._tend(now, source)

    def _due(
        self, source: Source, state: tuple[bool, bool], unknown: int, renewal: float
    ) -> float | None:
        """When this source needs something from us next, as we are now."""
        config = self._config
        if source.state is SourceState.ASKING:
            return min(source.retry_at, source.since + config.source_timeout)
        if source.state is SourceState.RESTING:
            return None if source.in_flight or not source.listed else source.retry_at
        if source.state in ANSWERED:
            if unknown and self._wanting(source, unknown):
                return source.told_at  # at once: readers may be idle for want of a digest
            if source.told != state:
                return source.told_at + config.update_interval
            return source.told_at + renewal
        return None

    def _tend(self, now: float, source: Source) -> None:
        if source.state in ACTIVE and self._crossing.stands_back(source):
            source.have = source.wanted = 0
            source.enter(now, SourceState.KNOWN)
        if source.state not in ACTIVE and not source.in_flight:
            self._say_bye(source)
        renewal = self._config.lease_seconds / 4
        due = self._due(source, self._state(), self._unknown(), renewal)
        if due is None or now < due:
            return
        if source.state is SourceState.RESTING:
            source.enter(now, SourceState.KNOWN)
        elif source.state is SourceState.ASKING:
            if now >= source.since + self._config.source_timeout:
                self.rest(now, source, "doesn't answer")
            else:
                self._hello(now, source)
        else:
            self._progress(now, source)

    def _progress(self, now: float, source: Source) -> None:
        """Renew the lease. Where nothing is to be had, ask for the whole state again.

        That mends a lost offer, grant or update, of which neither side would hear.
        """
        wanted = self._wanting(source, self._unknown())
        busy = (
            source.in_flight
            or wanted
            or fetchable(source, self._sources.open(), self._ledger.wanted)
        )
        idle = source.state is SourceState.WAITING or not busy or self._crossing.awaits(source)
        if idle and source.told == self._state() and self._ledger.needed:
            self._hello(now, source)
            return
        chunks = some_of(wanted, MAX_WANTED, self._rng)
        if chunks:
            source.wanted = sum(1 << chunk for chunk in chunks)
        self._told(now, source)
        have = self._ledger.holding.to_bytes()
        known = 0 if self.is_twin(source) else len(self._ledger.manifest)
        self._outbox.send(
            source.id.peer,
            PullProgress(self._pull, source.id.slot, have, tuple(chunks), known),
        )

    def _unknown(self) -> int:
        """The chunks whose digests we could do with now: only if we run out of known ones."""
        ledger = self._ledger
        unknown = ledger.needed & ~ledger.manifest.known.bits
        if not unknown or ledger.wanted.bit_count() >= in_flight_limit(self._config):
            return 0
        return unknown

    def _wanting(self, source: Source, unknown: int) -> int:
        """The chunks whose digests to ask for there now, of those that we could do with."""
        if source.state is not SourceState.OPEN:
            return 0
        unknown &= source.have
        return 0 if source.wanted & unknown else unknown

    # --- letting them be -----------------------------------------------------------------

    def rest(self, now: float, source: Source, why: str) -> None:
        """Leave it alone for a while; what it has in flight comes back through `failed`."""
        source.note(why)
        source.retry_at = now + self._backoff(max(1, source.streak))
        source.have = source.wanted = 0
        source.enter(now, SourceState.RESTING)

    def fault(self, now: float, source: Source, why: str) -> None:
        """A read from there, or the way there, failed: the next rest is longer."""
        source.streak += 1
        self.rest(now, source, why)

    def mismatch(self, now: float, source: Source, chunk: int) -> None:
        """It sent wrong bytes of this chunk."""
        if source.state not in ACTIVE:
            return  # It withdrew or died: the chunk is lost, and nobody lied.
        source.mismatches += 1
        source.bad |= 1 << chunk
        source.note(f"sent wrong bytes of chunk {chunk}")
        if source.mismatches >= MAX_MISMATCHES:
            source.enter(now, SourceState.SHUNNED)
            self._outbox.emit(SourceLost(source.id))

    def end(self, *, complete: bool) -> None:
        """The pull is over: say goodbye everywhere."""
        for source in self._sources:
            self._say_bye(source, complete=complete)

    def _say_bye(self, source: Source, *, complete: bool = False) -> None:
        if source.owes_bye:
            source.owes_bye = False
            complete = complete and not self.is_twin(source)
            self._outbox.send(source.id.peer, PullBye(self._pull, source.id.slot, complete))
