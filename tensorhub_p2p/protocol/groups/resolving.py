"""From a question to a pinned publication: what a leader does to decide a call.

Rules of this file. One `DirectoryResolver` belongs to one handle and works on one
question at a time. It reads and writes the versions key and nothing else; the reading of
registers, and the choice of zones, is selection.py's.

Theory of operation.

    READING   read the versions key; nothing there that answers: watch the key and read it once
              more; then wait for it to change, and look at what was told of it, or read it
              again if that wasn't told
    PINNING   write the pin to W owners; they refuse it for what was withdrawn meanwhile. And the
              mark, if it may not be there yet (G3), also when a mark was read, as that may be on
              a single owner
    CHECKING  is it still covered, by what the owners held right after the pin, or by what is
              read then? A holder that withdraws says so before it looks at the pins, and we pin
              before we look who withdraws: one of the two sees the other (quorum.py). Only what
              W owners hold counts here: whoever asks after us must see it, too
    PINNED    answered, with a few of the own zone's holders of each shard, which the group's
              pulls may begin with; the pin stays until `stop`

Other zones are looked at unless the own one has an answer that none of them can better. Mark
and pin are written where the publication is covered: in the own zone if it is there, and
checked there alone; but in another one if the own zone's holders are silent and that one's
are not.

A call that waits is woken by a change of the key, by the return of a member of the own zone, and
by news of another zone. Besides, it looks again at growing pauses, of `LONGEST_REST` at most,
since thousands of groups may wait for what one trainer will publish. What it notices only then:
that somebody is back in another zone, or has again what its zone never ceased to name; and, where
more watch a key than its owners tell (`max_watchers`), any change.

A refusal, of mark or pin, or a holder lost at the last moment, sends it back to READING,
without the pin: it must not hold back those who withdraw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.admission import FENCED
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    everywhere,
    slot_name,
    versions_key,
)
from tensorhub_p2p.protocol.directory.registers import PIN_NAME
from tensorhub_p2p.protocol.groups.selection import (
    NO_FLOOR,
    Floor,
    Holding,
    Places,
    Sources,
    decision_of,
    describe,
    holdings,
    places,
    select,
    sources_for,
    stands,
)
from tensorhub_p2p.protocol.identity import Generation, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import Decision, Pin, Question, WholeMark

LONGEST_REST = 8.0
"""Seconds between two looks without any news."""


class ResolverState(Enum):
    IDLE = "idle"
    READING = "reading which versions exist"
    PINNING = "marking and pinning the version"
    CHECKING = "looking whether the pinned version is still held"
    PINNED = "pinned"


class DirectoryResolver:
    """Resolves questions of one group from the directory.

    `fenced(now)` is called when an owner knows of a higher generation of the group.
    """

    def __init__(
        self,
        slot: Slot,
        records: Records,
        liveness: Liveness,
        config: GroupConfig,
        fenced: Callable[[float], None],
    ) -> None:
        self.slot = slot
        self.state = ResolverState.IDLE
        self.exists = ""
        """What the last reading found, for errors."""
        self.generation = Generation(0, 0)
        """Of the group whose calls are resolved; set by whoever composes this."""
        self._question: Question | None = None
        self._call = 0
        self._floor = NO_FLOOR
        self._then: Callable[[float, Decision, Sources], None] | None = None
        self._answer: Holding | None = None
        """What is being marked, pinned and checked."""
        self._places: Places = {}
        """Where it is, and is to be kept."""
        self._near: dict[Publication, Holding] | None = None
        """What the own zone's responsive peers hold, if that was asked for since the reading
        began; else there is no other zone to choose."""
        self._rest = 0.0
        """Seconds until the next look, if nothing happens before."""
        self._pinned = False
        self._seen: Registers | None = None
        """What the owners held right after the pin, if they have said so."""
        self._marked: tuple[Publication, frozenset[str]] | None = None
        """What was marked last, in which zones; who waited for it asks again soon, to pull it."""
        self._watch: int | None = None
        self._retry_at: float | None = None
        self._round = 0
        """What was written in an earlier round means nothing any more."""
        self._fenced = fenced
        self._records = records
        self._liveness = liveness
        self._config = config
        self._key = versions_key(slot.group.model)
        self._inquiry = Inquiry(records, self._key, self._on_registers)

    def resolve(
        self,
        now: float,
        question: Question,
        call: int,
        floor: Floor,
        then: Callable[[float, Decision, Sources], None],
    ) -> None:
        self._question, self._call, self._floor, self._then = question, call, floor, then
        self._rest = 4 * self._config.retry_interval
        self._enter_reading(now + self._rest)
        # Fresh: what was read before this call began does not answer it (G5).
        self._inquiry.look_anew(now, self._is_enough)

    def stop(self, now: float) -> None:
        self.state = ResolverState.IDLE
        self._round += 1
        self._retry_at = None
        self._inquiry.stop()
        if self._watch is not None:
            self._records.unwatch(now, self._watch)
            self._watch = None
        self._unpin(now)

    def _unpin(self, now: float) -> None:
        if self._pinned:
            self._pinned = False
            self._write_pins(now, None, lambda _now, _refused: None)

    def _changed(self, now: float) -> None:
        """The key is another one, or another zone has something new."""
        if self.state is not ResolverState.READING:
            return
        known = self._records.known(self._key)
        near = [r for r in known or () if self._liveness.is_responsive(r.writer)]
        alone = self._records.elsewhere(self.slot.group.model) is None
        if known is not None and (self._is_enough(tuple(near)) or alone):
            # It may be behind by now: what is pinned is checked by a read.
            self._on_registers(now, known)
        else:
            self._read(now)

    def _read(self, now: float) -> None:
        self._enter_reading(now + self._rest)
        self._inquiry.look(now, self._is_enough)

    def _enter_reading(self, retry_at: float) -> None:
        self.state = ResolverState.READING
        self._near = None
        self._round += 1
        self._retry_at = retry_at

    def _is_enough(self, registers: Registers) -> bool:
        """Whether the own zone has an answer, and no other zone a better one.

        The registers are those of its responsive peers.
        """
        if self._question is None:
            return True
        self._near = holdings(registers, self._liveness.is_gone)
        answer = select(self._question, self._near, self._floor)
        elsewhere = self._records.elsewhere(self.slot.group.model)
        return answer is not None and stands(self._question, answer, elsewhere)

    def _on_registers(self, now: float, registers: Registers) -> None:
        if self._question is None:
            return
        found = holdings(registers, self._liveness.is_gone)
        if self.state is ResolverState.CHECKING and self._answer is not None:
            self._check(now, found.get(self._answer.publication))
        elif self.state is ResolverState.READING:
            self._select(now, self._question, found)

    def _select(self, now: float, question: Question, found: dict[Publication, Holding]) -> None:
        self.exists = describe(found)
        answer = select(question, found, self._floor)
        if answer is None:
            self._wait(now)
            return
        near = self._near.get(answer.publication) if self._near is not None else answer
        near_is_read = near is not None and near.covered
        self._retry_at = None
        self._answer = answer
        zone, home = self._liveness.zone, self._liveness.home
        self._places = places(answer, zone, home, home_first=near_is_read)
        self._pin(now, answer)

    def _wait(self, now: float) -> None:
        """Nothing answers: be told of changes. What changed before is seen by one more read."""
        if self._watch is None:
            self._watch = self._records.watch(now, self._key, self._changed)
            self._inquiry.look(now, self._is_enough)

    def _pin(self, now: float, answer: Holding) -> None:
        self.state = ResolverState.PINNING
        self._pinned = True
        this_round = self._round

        def then(now: float, refused: Refused | None) -> None:
            if self._round != this_round:
                return
            if refused is None:
                self._look_again(now)
                return
            self._again(now)
            if refused.reason == FENCED:
                self._fenced(now)

        written = _AllOf(("mark", "pin"), then)
        self._write_mark(now, answer, written.part("mark"))
        if self._is_at_home:
            self._pin_and_look(now, answer.publication, written.part("pin"))
        else:
            self._write_pins(now, answer.publication, written.part("pin"))

    def _pin_and_look(
        self, now: float, publication: Publication, then: Callable[[float, Refused | None], None]
    ) -> None:
        """What the owners held right after the pin is as good as what they say later."""
        ((zone, shards),) = self._places.items()

        def looked(now: float, refused: Refused | None, seen: Registers | None) -> None:
            self._seen = seen
            then(now, refused)

        pin = self._pin_of(publication, zone, shards)
        name, counter = PIN_NAME + slot_name(self.slot), self.generation.counter
        self._seen = None
        self._records.write_and_look(now, self._key, name, counter, pin, looked, agreed=True)

    @property
    def _is_at_home(self) -> bool:
        """It is to be kept in the own zone alone."""
        return set(self._places) == {self._liveness.home}

    def _look_again(self, now: float) -> None:
        self.state = ResolverState.CHECKING
        seen, self._seen = self._seen, None
        if seen is not None:
            self._on_registers(now, seen)
        else:
            enough = None if self._is_at_home else everywhere
            self._inquiry.look_anew(now, enough, agreed=True)

    def _write_mark(
        self, now: float, answer: Holding, then: Callable[[float, Refused | None], None]
    ) -> None:
        """Mark it whole wherever it is to be kept, unless it is sure to be marked."""
        place = (answer.publication, frozenset(self._places))
        if answer.marked or self._marked == place:
            then(now, None)
            return
        mark = WholeMark(answer.publication, answer.num_shards)

        def marked(now: float, refused: Refused | None) -> None:
            if refused is None:
                self._marked = place
            then(now, refused)

        written = _AllOf(self._places, marked)
        for zone in self._places:
            self._records.mark(now, self._key, mark, written.part(zone), zone)

    def _check(self, now: float, pinned: Holding | None) -> None:
        if pinned is None or not pinned.covered_at(self._places, self._liveness.zone):
            self._again(now)
            return
        self.state = ResolverState.PINNED
        assert self._then is not None
        sources = sources_for(self.slot.group, pinned, self._is_near)
        self._then(now, decision_of(pinned), sources)

    def _is_near(self, peer: PeerId) -> bool:
        """All of the group know it, and it answers."""
        return self._liveness.zone(peer) == self._liveness.home and self._liveness.is_responsive(
            peer
        )

    def _again(self, now: float) -> None:
        """The owners refused, or know better: look again, but not in a tight loop."""
        self._unpin(now)
        self._rest = 2 * self._config.retry_interval
        self._enter_reading(now + self._config.retry_interval)

    def _write_pins(
        self,
        now: float,
        publication: Publication | None,
        then: Callable[[float, Refused | None], None],
    ) -> None:
        """Pin it wherever it is to be kept, or take the pins back."""
        name, counter = PIN_NAME + slot_name(self.slot), self.generation.counter
        written = _AllOf(self._places, then)
        for zone, shards in self._places.items():
            pin = self._pin_of(publication, zone, shards) if publication is not None else None
            part = written.part(zone)
            self._records.write(now, self._key, name, counter, pin, part, zone)

    def _pin_of(self, publication: Publication, zone: str, shards: tuple[int, ...]) -> Pin:
        home, group = self._liveness.home, self.slot.group
        whence = home if zone != home else ""
        return Pin(publication, group, self.generation, self._call, whence, shards)

    def tick(self, now: float) -> None:
        if self._retry_at is not None and now >= self._retry_at:
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._read(now)

    def next_wakeup(self) -> float | None:
        return self._retry_at


class _AllOf:
    """Several writes: done when all of them are, refused when one is."""

    def __init__(self, parts: Iterable[str], then: Callable[[float, Refused | None], None]) -> None:
        self._missing = set(parts)
        self._then = then

    def part(self, name: str) -> Callable[[float, Refused | None], None]:
        def then(now: float, refused: Refused | None) -> None:
            if name not in self._missing:
                return
            self._missing.discard(name)
            if refused is not None:
                self._missing.clear()
            if not self._missing:
                self._then(now, refused)

        return then
