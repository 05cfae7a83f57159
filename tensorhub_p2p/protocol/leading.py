"""Group calls, the leader's side: decide call k once, for all members.

Rules of this file. A `CallLeader` exists on the leader's shard of a generation, and for
that generation only. It sees its members through messages alone, its own shard's too.

Theory of operation, call by call (the conversation is drawn in calls.py):

    OPEN       nobody has asked yet
    RESOLVING  `Resolver` looks for a publication and writes its pin to W owners
    RECORDING  every member records the decision; nobody has been told yet
    DECIDED    tell everyone who asks, until all members said `CallDone`
    ENDING     void, or diverged: tell all members until each acknowledged that

The next call opens only after DECIDED or ENDING is through with every member. A question
that differs from the call's ends it for all, unless its only asker changed its mind
before anything was decided (a retry with another selector after a timeout).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.calls import Floor, head
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import Outbox
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
        then: Callable[[float, Decision], None],
    ) -> None:
        """Look, and look again whenever something changed, until there is a pinned answer."""

    def stop(self, now: float) -> None:
        """Forget the question, and end its pin."""


class LeaderState(Enum):
    OPEN = "nobody has asked"
    RESOLVING = "looking for a version that answers"
    RECORDING = "having every member record the decision"
    DECIDED = "decided, until every member has it"
    ENDING = "telling every member that the call is over"


class CallLeader:
    """Decides the calls of one generation."""

    def __init__(
        self,
        slot: Slot,
        record: GenerationRecord,
        resolver: Resolver,
        config: GroupConfig,
    ) -> None:
        self.slot = slot
        self.record = record
        self.floor: Floor = record.floor
        self.call = 1
        self.state = LeaderState.OPEN
        self.outbox = Outbox()
        self._asks: dict[int, Question] = {}
        """By shard: who waits in this call, with which question."""
        self._next_asks: dict[int, Question] = {}
        """By shard: who is done and waits in the next one."""
        self._question: Question | None = None
        self._decision: Decision | None = None
        self._heard: set[int] = set()
        """Shards that have recorded, finished or acknowledged, by state."""
        self._ending: tuple[type[GroupMessage], dict[str, object]] | None = None
        self._retry_at: float | None = None
        self._resolver = resolver
        self._config = config

    def stop(self, now: float) -> None:
        """The generation ended."""
        self._resolver.stop(now)
        self._retry_at = None

    # --- messages ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, CallAsk):
            self._asked(now, message)
        elif isinstance(message, CallRecorded) and self.state is LeaderState.RECORDING:
            self._hear(now, message.call, message.sender_shard)
        elif isinstance(message, CallDone):
            self._send(message.sender_shard, CallDoneAck, message.call)
            if self.state is LeaderState.DECIDED:
                self._hear(now, message.call, message.sender_shard)
        elif isinstance(message, CallOverAck) and self.state is LeaderState.ENDING:
            self._hear(now, message.call, message.sender_shard)
        elif isinstance(message, CallWithdraw) and message.call == self.call:
            self._asks.pop(message.sender_shard, None)
        elif isinstance(message, CallGiveUp) and message.call == self.call:
            if self.state is LeaderState.DECIDED:
                self._end(now, CallVoid, {"reason": message.reason})

    def _asked(self, now: float, message: CallAsk) -> None:
        shard, question = message.sender_shard, message.question
        if message.call == self.call + 1:
            # Only a member that has finished the call, or knows that it is over, asks the next.
            if self.state in {LeaderState.DECIDED, LeaderState.ENDING}:
                self._next_asks[shard] = question
                self._hear(now, self.call, shard)
            return
        if message.call != self.call or self.state is LeaderState.ENDING:
            return
        self._asks[shard] = question
        if self._question is None:
            self._resolve(now, question)
        elif self._question != question:
            self._differs(now, shard, question)
        elif self.state is LeaderState.DECIDED:
            self._tell_decision(shard)

    def _hear(self, now: float, call: int, shard: int) -> None:
        """One more member recorded, finished or acknowledged; with the last one, go on."""
        if call != self.call:
            return
        self._heard.add(shard)
        if len(self._heard) < len(self.record.members):
            return
        if self.state is LeaderState.RECORDING:
            self._enter(LeaderState.DECIDED)
            for member in self.record.members:
                self._tell_decision(member.shard)
        elif self.state is LeaderState.DECIDED:
            assert self._decision is not None
            self.floor = max(self.floor, self._decision.publication.order)
            self._next(now)
        else:
            self._next(now)

    # --- the call, step by step ---

    def _enter(self, state: LeaderState) -> None:
        self.state = state
        self._heard = set()
        self._retry_at = None

    def _resolve(self, now: float, question: Question) -> None:
        self._enter(LeaderState.RESOLVING)
        self._question = question
        call = self.call

        def then(now: float, decision: Decision) -> None:
            if self.call == call and self.state is LeaderState.RESOLVING:
                self._decision = decision
                self._enter(LeaderState.RECORDING)
                self._repeat(now)

        self._resolver.resolve(now, question, call, self.floor, then)

    def _differs(self, now: float, shard: int, question: Question) -> None:
        assert self._question is not None
        others = [s for s, asked in self._asks.items() if asked == self._question and s != shard]
        undecided = self.state is LeaderState.RESOLVING
        if len(self.record.members) == 1 or (undecided and not others):
            self._resolver.stop(now)
            self._asks = {shard: question}
            self._resolve(now, question)
            return
        asked_by = others[0] if others else self.record.leader
        difference = {"asked": self._question, "by": asked_by, "but": question, "but_by": shard}
        self._end(now, CallDivergence, difference)

    def _end(self, now: float, kind: type[GroupMessage], fields: dict[str, object]) -> None:
        self._resolver.stop(now)
        self._enter(LeaderState.ENDING)
        self._ending = (kind, fields)
        self._next_asks = {}
        self._repeat(now)

    def _next(self, now: float) -> None:
        self._resolver.stop(now)
        self._enter(LeaderState.OPEN)
        self.call += 1
        self._question = self._decision = None
        self._asks, waiting = {}, self._next_asks
        self._next_asks = {}
        for shard, question in waiting.items():
            member = self.record.members[shard]
            ask = CallAsk(
                self.slot.group,
                self.record.generation,
                self.slot.shard,
                member.shard,
                self.call,
                question,
            )
            self._asked(now, ask)

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
                )
        self._retry_at = now + self._config.retry_interval

    def _tell_decision(self, shard: int) -> None:
        self._send(shard, CallDecided, self.call, question=self._question, decision=self._decision)

    def _send(self, shard: int, kind: type[GroupMessage], call: int, **fields: object) -> None:
        member = self.record.members[shard]
        message = kind(*head(self.record, self.slot, member, call), **fields)  # type: ignore[arg-type]
        self.outbox.send(member.peer, message)

    def tick(self, now: float) -> None:
        if self._retry_at is not None and now >= self._retry_at:
            self._repeat(now)

    def next_wakeup(self) -> float | None:
        return self._retry_at

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        silent = sorted({member.shard for member in self.record.members} - self._heard)
        what = f"call {self.call} of {self.slot.group}: {self.state.value}"
        if self.state in {LeaderState.OPEN, LeaderState.RESOLVING}:
            return what
        return f"{what} (shard {', '.join(map(str, silent))} has not)"

