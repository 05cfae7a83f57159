"""Which publication a version is, for whoever wants it without a group: a prefetch.

Rules of this file. `Finds` answers as a group's leader would by the registers of this moment
(selection.py), but decides nothing: nothing is pinned or marked, and no other shard is asked. The
group may decide otherwise later, and the version may be gone by then.

Theory of operation. The versions key is read, in other zones too unless the own one has an answer
that none of them can better. Where nothing answers the key is watched, read once more, and looked
at again when it changed, or at growing pauses of `LONGEST_REST` at most. A find ends once: with
`Done(Found)`, or `Failed` at its deadline or when it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.errors import StateError, TensorHubError, Timeout
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import Liveness, Records, Registers, versions_key
from tensorhub_p2p.protocol.groups.resolving import LONGEST_REST
from tensorhub_p2p.protocol.groups.selection import (
    Floor,
    describe,
    holdings,
    select,
    sources_for,
    stands,
)
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import Question
from tensorhub_p2p.protocol.shards.verbs import Done, Failed, Found, VerbId


class Find:
    """One question; `then(now, end)` gets its end."""

    def __init__(
        self,
        slot: Slot,
        selector: str,
        floor: Floor,
        deadline: float,
        records: Records,
        liveness: Liveness,
        first_rest: float,
        then: Callable[[float, Found | TensorHubError], None],
    ) -> None:
        self._slot = slot
        self._question = Question("prefetch", selector)
        self._floor = floor
        self._deadline = deadline
        self._records = records
        self._liveness = liveness
        self._then = then
        self._key = versions_key(slot.group.model)
        self._inquiry = Inquiry(records, self._key, self._on_registers)
        self._watch: int | None = None
        self._rest = first_rest
        self._look_at: float | None = None
        self._exists = "its owners have not answered in time"

    def look(self, now: float) -> None:
        """Read the key."""
        self._look_at = now + self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._inquiry.look(now, self._is_enough)

    def _is_enough(self, registers: Registers) -> bool:
        answer = select(self._question, holdings(registers, self._liveness.is_gone), self._floor)
        elsewhere = self._records.elsewhere(self._slot.group.model)
        return answer is not None and stands(self._question, answer, elsewhere)

    def _on_registers(self, now: float, registers: Registers) -> None:
        found = holdings(registers, self._liveness.is_gone)
        answer = select(self._question, found, self._floor)
        if answer is not None:
            sources = sources_for(self._slot.group, answer, self._is_near)
            here = sources.get(self._slot.shard, ())
            self._end(now, Found(answer.publication, answer.num_shards, here))
            return
        self._exists = describe(found)
        if self._watch is None:
            self._watch = self._records.watch(now, self._key, self.look)
            self._inquiry.look(now, self._is_enough)

    def _is_near(self, peer: PeerId) -> bool:
        at_home = self._liveness.zone(peer) == self._liveness.home
        return at_home and self._liveness.is_responsive(peer)

    def stop(self, now: float, why: str) -> None:
        """Nobody wants to know any more."""
        self._end(now, StateError(why))

    def _end(self, now: float, end: Found | TensorHubError) -> None:
        self._inquiry.stop()
        if self._watch is not None:
            self._records.unwatch(now, self._watch)
        self._then(now, end)

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            model, selector = self._slot.group.model, self._question.selector
            self._end(now, Timeout(f"prefetch({selector}) of model {model!r}: {self._exists}"))
        elif self._look_at is not None and now >= self._look_at:
            self.look(now)

    def next_wakeup(self) -> float | None:
        return earliest(self._deadline, self._look_at)


class Finds:
    """The questions of one peer, by the number of their verb."""

    def __init__(self, records: Records, liveness: Liveness, first_rest: float) -> None:
        """`first_rest`: seconds until it is looked again, at first."""
        self.outbox = Outbox()
        self._finds: dict[VerbId, Find] = {}
        self._records = records
        self._liveness = liveness
        self._first_rest = first_rest

    def begin(
        self, now: float, number: VerbId, deadline: float, slot: Slot, selector: str, floor: Floor
    ) -> None:
        """Done(Found), or Failed(Timeout). "latest" is not below the floor."""

        def then(_now: float, end: Found | TensorHubError) -> None:
            self._finds.pop(number, None)
            if isinstance(end, Found):
                self.outbox.emit(Done(number, end))
            else:
                self.outbox.emit(Failed(number, end))

        self._finds[number] = Find(
            slot,
            selector,
            floor,
            deadline,
            self._records,
            self._liveness,
            self._first_rest,
            then,
        )
        self._finds[number].look(now)

    def stop(self, now: float, number: VerbId, why: str) -> None:
        """End it with a StateError; one that has ended is ignored."""
        find = self._finds.get(number)
        if find is not None:
            find.stop(now, why)

    def tick(self, now: float) -> None:
        for find in list(self._finds.values()):
            find.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(*(find.next_wakeup() for find in self._finds.values()))
