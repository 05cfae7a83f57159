"""Group calls, the leader's side: decide call k once, for all members.

Rules of this file. A `CallLeader` exists on the leader's shard of a generation, and for
that generation only. It sees its members through messages alone, its own shard's too.

Theory of operation, call by call (the conversation is drawn in calls.py):

    OPEN       nobody has asked yet
    RESOLVING  `Resolver` looks for a publication and writes its pin to W owners
    RECORDING  every member records the decision; nobody has been told yet
    DECIDED    tell everyone who asks, until all members said `CallDone`
    ENDING     void, or diverged: tell all members until each acknowledged that

    OVER       the generation broke before this call was decided: it will not be

The next call opens only after DECIDED or ENDING is through with every member.

A question that differs from the call's ends it for all. But a member may ask something
else after a timeout, as long as nothing is decided: its verbs in one call are numbered
*attempts*, and only questions of the same attempt must agree. What a later attempt asks
has its turn once nobody waits with the earlier question any more.

A decided call that not all have done ends its pin some time in any case: once no member has shown
a sign of it for `pin_idle_seconds`, it is void. A sign is its first `CallDone`, and each
`CallAsk`, which a member repeats while its verb waits and, now and then, while its pull goes on.
Who is done and asks for the next call shows none: the pin is for the others.

The floor is the highest of the generation's and of what each member said last that its own
is; once all are done with a call, it is put on record (floors.py). A member may say so when the
question is being resolved, or its answer recorded; then that begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.groups.calls import falls_below, head
from tensorhub_p2p.protocol.groups.floors import FloorKeeper
from tensorhub_p2p.protocol.groups.selection import Floor, Sources
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDecided,
    CallDivergence,
    CallDone,
    CallDoneAck,
    CallGiveUp,
    CallOverAck,
    CallRecord,
    CallRecorded,
    CallVoid,
    CallWithdraw,
    Decision,
    GenerationRecord,
    GroupMessage,
    Message,
    Question,
)


class Resolver(Protocol):
    """Finds and pins the answer to one question at a time."""

    def resolve(
        self,
        now: float,
        question: Question,
        call: int,
        floor: Floor,
        then: Callable[[float, Decision, Sources], None],
    ) -> None:
        """Look, and look again whenever something changed, until there is a pinned answer.

        `then` gets it, and who holds it.
        """

    def stop(self, now: float) -> None:
        """Forget the question, and end its pin."""


class LeaderState(Enum):
    OPEN = "nobody has asked"
    RESOLVING = "looking for a version that answers"
    RECORDING = "having every member record the decision"
    DECIDED = "decided, until every member has it"
    ENDING = "telling every member that the call is over"
    OVER = "undecided when the generation broke"


UNDECIDED = {LeaderState.RESOLVING, LeaderState.RECORDING}


@dataclass(frozen=True)
class Ask:
    """One member's verb in a call."""

    attempt: int
    question: Question
    floor: Floor


class CallLeader:
    """Decides the calls of one generation."""

    def __init__(
        self,
        slot: Slot,
        record: GenerationRecord,
        resolver: Resolver,
        config: GroupConfig,
        floors: FloorKeeper | None = None,
    ) -> None:
        self.slot = slot
        self.record = record
        self.floor: Floor = record.floor
        self.call = 1
        self.state = LeaderState.OPEN
        self.outbox = Outbox()
        self._asks: dict[int, Ask] = {}
        """By shard: who waits in this call, with which question."""
        self._next_asks: dict[int, Ask] = {}
        """By shard: who is done and waits in the next one."""
        self._floors: dict[int, Floor] = {}
        """By shard: the floor that it asked with, or refused a record with, last."""
        self._resolving_from: Floor = record.floor
        self._question: Question | None = None
        self._decision: Decision | None = None
        self._sources: Sources = {}
        """Who held what was decided."""
        self._round = 0
        """Counts decisions to record, so that one is not taken for another."""
        self._broken = False
        self._heard: set[int] = set()
        """Shards that have recorded, finished or acknowledged, by state."""
        self._ending: tuple[type[GroupMessage], dict[str, object]] | None = None
        self._retry_at: float | None = None
        self._idle_at: float | None = None
        """When a decided call is void, unless a member shows a sign of it before."""
        self._resolver = resolver
        self._config = config
        self._keeper = floors
        """Puts the floor on record; None: nobody does."""

    def stop(self, now: float) -> None:
        """The next generation was formed, or the handle closes."""
        self._resolver.stop(now)
        self._retry_at = self._idle_at = None
        if self._keeper is not None:
            if self.state is LeaderState.DECIDED and self._heard and self._decision is not None:
                # Some member has it, and nobody can void it any more.
                self._keeper.keep(now, self._decision.publication.order)
            self._keeper.stop(now)

    def broke(self, now: float) -> None:
        """The generation broke: end the pin; decide nothing more, but tell what was decided.

        Who has not heard of a void by now fails its one verb for the break instead.
        """
        self._broken = True
        self._resolver.stop(now)
        self._idle_at = None
        if self.state is not LeaderState.DECIDED:
            self._enter(LeaderState.OVER)

    # --- messages ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, CallAsk):
            ask = Ask(message.attempt, message.question, message.floor)
            self._asked(now, message.sender_shard, message.call, ask)
        elif isinstance(message, CallRecorded) and self.state is LeaderState.RECORDING:
            if message.round == self._round and message.call == self.call:
                self._recorded(now, message.sender_shard, message.floor)
        elif isinstance(message, CallDone):
            self._send(message.sender_shard, CallDoneAck, message.call)
            if self.state is LeaderState.DECIDED:
                self._hear(now, message.call, message.sender_shard)
        elif isinstance(message, CallOverAck) and self.state is LeaderState.ENDING:
            self._hear(now, message.call, message.sender_shard)
        elif isinstance(message, CallWithdraw) and message.call == self.call:
            self._withdrawn(now, message.sender_shard)
        elif isinstance(message, CallGiveUp):
            over = self.state in {LeaderState.ENDING, LeaderState.OVER}
            if message.call == self.call and not over and not self._broken:
                # In any other state: its member asks for nothing else until this has ended.
                self._end(now, CallVoid, {"reason": message.reason})

    def _asked(self, now: float, shard: int, call: int, ask: Ask) -> None:
        if call == self.call + 1:
            # Only a member that has finished the call, or knows that it is over, asks the next; but
            # one that had finished it may not know that it is void by now.
            if self.state is LeaderState.DECIDED:
                self._next_asks[shard] = ask
                self._hear(now, self.call, shard)
            elif self.state is LeaderState.ENDING and shard in self._heard:
                self._next_asks[shard] = ask
            return
        if call != self.call or self.state in {LeaderState.ENDING, LeaderState.OVER}:
            return
        if ask.attempt < self._asks.get(shard, ask).attempt:
            return
        self._asks[shard] = ask
        self._floors[shard] = ask.floor
        if self._question is None:
            self._resolve(now, ask.question)
        elif self._question != ask.question:
            self._differs(now, shard, ask)
        elif self.state is LeaderState.DECIDED:
            self._sign(now)
            self._tell_decision(shard)
        elif self.state in UNDECIDED and self._floor_now() != self._resolving_from:
            self._resolve(now, ask.question)

    def _withdrawn(self, now: float, shard: int) -> None:
        """A verb timed out. A question that nobody asks any more is not decided."""
        self._asks.pop(shard, None)
        if not self._asks and self.state in UNDECIDED:
            self._resolver.stop(now)
            self._question = None
            self._enter(LeaderState.OPEN)

    def _recorded(self, now: float, shard: int, floor: Floor) -> None:
        assert self._question is not None
        assert self._decision is not None
        if falls_below(self._question, self._decision, floor):
            self._floors[shard] = floor
            self._resolve(now, self._question)
        else:
            self._hear(now, self.call, shard)

    def _hear(self, now: float, call: int, shard: int) -> None:
        """One more member recorded, finished or acknowledged; with the last one, go on."""
        if call != self.call:
            return
        if shard not in self._heard:
            self._heard.add(shard)
            self._sign(now)
        if len(self._heard) < len(self.record.members):
            return
        if self.state is LeaderState.RECORDING:
            self._enter(LeaderState.DECIDED)
            self._sign(now)
            for member in self.record.members:
                self._tell_decision(member.shard)
        elif self.state is LeaderState.DECIDED:
            assert self._decision is not None
            self.floor = max(self.floor, self._decision.publication.order)
            if self._keeper is not None:
                self._keeper.keep(now, self.floor)
            self._next(now)
        else:
            self._next(now)

    def _sign(self, now: float) -> None:
        """Some member has shown that it counts on the decided call."""
        if self.state is LeaderState.DECIDED and not self._broken:
            self._idle_at = now + self._config.pin_idle_seconds

    # --- the call, step by step ---

    def _enter(self, state: LeaderState) -> None:
        self.state = state
        self._heard = set()
        self._retry_at = self._idle_at = None

    def _floor_now(self) -> Floor:
        return max([self.floor, *self._floors.values()])

    def _resolve(self, now: float, question: Question) -> None:
        self._resolver.stop(now)
        self._enter(LeaderState.RESOLVING)
        self._question = question
        self._resolving_from = self._floor_now()
        call = self.call

        def then(now: float, decision: Decision, sources: Sources) -> None:
            if self.call == call and self.state is LeaderState.RESOLVING:
                self._decision, self._sources = decision, sources
                self._round += 1
                self._enter(LeaderState.RECORDING)
                self._repeat(now)

        self._resolver.resolve(now, question, call, self._resolving_from, then)

    def _differs(self, now: float, shard: int, ask: Ask) -> None:
        assert self._question is not None
        others = [s for s, a in self._asks.items() if a.question == self._question and s != shard]
        undecided = self.state in UNDECIDED
        alone = len(self.record.members) == 1
        if alone or (undecided and not others):
            self._resolve(now, ask.question)
        elif not undecided or any(self._asks[s].attempt == ask.attempt for s in others):
            asked_by = others[0] if others else self.record.leader
            asked = {"asked": self._question, "by": asked_by}
            self._end(now, CallDivergence, {**asked, "but": ask.question, "but_by": shard})

    def _end(self, now: float, kind: type[GroupMessage], fields: dict[str, object]) -> None:
        self._resolver.stop(now)
        self._enter(LeaderState.ENDING)
        self._ending = (kind, fields)
        self._next_asks = {}
        self._repeat(now)

    def _next(self, now: float) -> None:
        self._resolver.stop(now)
        self._enter(LeaderState.OVER if self._broken else LeaderState.OPEN)
        self.call += 1
        self._question = self._decision = None
        self._asks, waiting = {}, self._next_asks
        self._next_asks = {}
        for shard, ask in waiting.items():
            self._asked(now, shard, self.call, ask)

    # --- sending ---

    def _repeat(self, now: float) -> None:
        """Say it to every member that has not confirmed it."""
        for member in self.record.members:
            if member.shard in self._heard:
                continue
            if self.state is LeaderState.ENDING and self._ending is not None:
                kind, fields = self._ending
                self._send(member.shard, kind, self.call, **fields)
            elif self.state is LeaderState.RECORDING:
                self._send(
                    member.shard,
                    CallRecord,
                    self.call,
                    question=self._question,
                    decision=self._decision,
                    round=self._round,
                )
        self._retry_at = now + self._config.retry_interval

    def _tell_decision(self, shard: int) -> None:
        self._send(
            shard,
            CallDecided,
            self.call,
            question=self._question,
            decision=self._decision,
            sources=self._sources.get(shard, ()),
        )

    def _send(self, shard: int, kind: type[GroupMessage], call: int, **fields: object) -> None:
        member = self.record.members[shard]
        message = kind(*head(self.record, self.slot, member, call), **fields)  # type: ignore[arg-type]
        self.outbox.send(member.peer, message)

    def tick(self, now: float) -> None:
        if self._retry_at is not None and now >= self._retry_at:
            self._repeat(now)
        if self._idle_at is not None and now >= self._idle_at:
            idle = f"shard {self._silent()} showed no sign of it for so long that its pin ended"
            self._end(now, CallVoid, {"reason": idle})
        if self._keeper is not None:
            self._keeper.tick(now)

    def next_wakeup(self) -> float | None:
        keeper = self._keeper.next_wakeup() if self._keeper is not None else None
        return earliest(self._retry_at, self._idle_at, keeper)

    def _silent(self) -> str:
        silent = sorted({member.shard for member in self.record.members} - self._heard)
        return ", ".join(map(str, silent))

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        what = f"call {self.call} of {self.slot.group}: {self.state.value}"
        other = [s for s, ask in self._asks.items() if ask.question != self._question]
        if self._question is not None and other:
            asks = self._asks[other[0]].question
            asked = f"{self._question.verb}({self._question.selector})"
            what += (
                f"; shard {other[0]} waits with {asks.verb}({asks.selector}), others with {asked}"
            )
        if self.state in {LeaderState.OPEN, LeaderState.RESOLVING, LeaderState.OVER}:
            return what
        return f"{what} (shard {self._silent()} has not)"
