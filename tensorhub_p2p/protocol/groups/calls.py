"""Group calls, the member's side: every shard gets the same publication for the same call (G2).

Rules of this file. One `CallMember` belongs to one handle; it knows the generation in
force, the leader and its own verb. It moves no bytes and knows no deadline. The
leader's side is leading.py.

Theory of operation. `replicate` and `wait_for` are numbered calls of the generation.
Member and leader go through call k together:

    member                          leader (leading.py)
    CallAsk(k), until answered -->  resolves the question, pins the publication
    records it <------------------  CallRecord(k) to all members
    CallRecorded(k) ------------->  once all have recorded it: decided
    acts on it <------------------  CallDecided(k)
    CallDone(k), until acked ---->  once all are done: the pin ends, k+1 opens

A member that waits asks at pauses that double up to `ask_retry_limit`, as there may be no answer
for hours; with its record the answer is near, and they begin anew. All else is said again each
`retry_interval`, since it is answered at once.

Before any member acts, all have recorded the decision. Another shard's failure holds the
next call back, so nobody goes on unaware of it. Only success uses a call up: a retry asks
k again (its next *attempt* at k) and gets the same publication. k is over without an answer
when the leader says `CallVoid` (a member found that the publication can't be had) or
`CallDivergence` (two members asked different questions): every member fails exactly one
verb for it, the present one or its next, and goes on with k+1, so that the members' counters
never drift apart. After a void the floor is again what it was before k.

While its pull goes on, or with a retry, a member asks again what is decided, as a sign that it
counts on that; once in `SIGN_PART` of the leader's `pin_idle_seconds`. A call of which nobody shows
a sign is void in the end. A group of one isn't told, as it has nobody to keep in step with; and it
may ask something else at any time, which replaces what was decided in its call, pin and all.

A member's floor is its last answer. The generation's floor is the highest that its members
voted with, but a pull that one of them began before the election may end after it: so every
`CallAsk` brings the member's floor, and nobody records a "latest" below its own, nor below
what it is still pulling (`unfinished`).

When the generation breaks, whoever waits asks the survivors too (`CallRecall`): what one
of them heard decided, all of them may finish. Nobody records any more, so that nothing is
decided later. Nothing heard within `recall_seconds` means that the call died with the
generation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR, Floor
from tensorhub_p2p.protocol.identity import Member, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDecided,
    CallDivergence,
    CallDone,
    CallDoneAck,
    CallGiveUp,
    CallOverAck,
    CallRecall,
    CallRecord,
    CallRecorded,
    CallVoid,
    CallWithdraw,
    Decision,
    GenerationRecord,
    GroupMessage,
    Message,
    Question,
    Source,
)

SIGN_PART = 0.2
"""Signs may get lost: so often within the time that the leader waits for one."""


class CallAnswered(Event):
    """The verb that asked may act on this decision; `sources` held its shard a moment ago."""

    def __init__(self, call: int, decision: Decision, sources: tuple[Source, ...] = ()) -> None:
        self.call = call
        self.decision = decision
        self.sources = sources


class CallFailed(Event):
    """Call `call` is over without an answer: the present verb, or the next one, fails for it."""

    def __init__(self, call: int, reason: str, *, diverged: bool = False) -> None:
        self.call = call
        self.reason = reason
        self.diverged = diverged


@dataclass
class Part:
    """One member's part in its current call."""

    call: int = 1
    attempt: int = 0
    """Verbs that asked in this call so far."""
    question: Question | None = None
    """Set while a verb waits for the answer."""
    record: tuple[Question, Decision] | None = None
    decided: bool = False
    sources: tuple[Source, ...] = ()
    """Who held what is decided, for the first verb that acts on it."""


def falls_below(question: Question, decision: Decision, floor: Floor) -> bool:
    """The decision would take a group backwards (G4). Asked for by number it may be older."""
    newest = question.selector == "latest" or question.selector.startswith(">")
    return newest and decision.publication.order < floor


def head(record: GenerationRecord, me: Slot, to: Member, call: int) -> tuple[object, ...]:
    """The common first fields of a GroupMessage."""
    return (me.group, record.generation, to.shard, me.shard, call)


class CallMember:
    """The calls of one generation, as one of its members makes them."""

    def __init__(self, slot: Slot, config: GroupConfig) -> None:
        self.slot = slot
        self.generation: GenerationRecord | None = None
        self.floor = NO_FLOOR
        """(epoch, version) of the last answer that was used up here."""
        self.unfinished = NO_FLOOR
        """The same of the present answer, while its pull may still succeed."""
        self.part = Part()
        self.outbox = Outbox()
        self._broken = ""
        """Why the generation is no longer in force; empty while it is."""
        self._done = 0
        """The last call that succeeded here; reported until acknowledged."""
        self._done_acked = True
        self._last: tuple[Question, Decision] | None = None
        """What `_done` was about, for survivors that ask."""
        self._floor_before = NO_FLOOR
        self._voiding: tuple[int, str] | None = None
        """A call that we asked the leader to void, until it said so to all."""
        self._over = 0
        """The last call that ended without an answer, as far as we were told."""
        self._give_up_at: float | None = None
        self._retry_at: float | None = None
        self._pause = 0.0
        """Until a waiting verb asks again."""
        self._sign_at = 0.0
        """When the leader may be told again that its decision is counted on."""
        self._progress = 0
        self._config = config

    def begin(self, record: GenerationRecord) -> None:
        """A generation was formed: counters start at 1."""
        self.generation = record
        self.floor = self._floor_before = max(self.floor, record.floor)
        self.part = Part()
        self._broken = ""
        self._done, self._done_acked, self._over = 0, True, 0
        self._last = self._voiding = None
        self._give_up_at = self._retry_at = None

    def end(self) -> None:
        """The handle closes, or lost its slot."""
        self.generation = None
        self.part = Part()
        self._retry_at = self._give_up_at = None

    # --- the verb's side ---

    def ask(self, now: float, question: Question) -> None:
        """A verb begins: `CallAnswered` or `CallFailed` will follow."""
        self.part.attempt += 1
        self.part.question = question
        if self.part.decided and self._matches(question):
            self._answer()
            self._sign(now)
        else:
            if self._alone:
                self._change_mind()
            self._ask_often()
            self._retry(now)

    def _change_mind(self) -> None:
        """A group of one asks something else: what was decided is not, nor pinned, from here on."""
        self.part.record, self.part.decided, self.part.sources = None, False, ()

    def withdraw(self) -> None:
        """The verb ended by its deadline; its question is taken back."""
        self.part.question = None
        self._to_leader(CallWithdraw, self.part.call)

    def succeeded(self, now: float, call: int) -> bool:
        """The pull (or wait) of `call` succeeded and uses it up; False if it is void by now."""
        if call != self.part.call or self.part.record is None or not self.part.decided:
            return False
        self.unfinished = NO_FLOOR
        self._floor_before = self.floor
        self.floor = max(self.floor, self.part.record[1].publication.order)
        # A leader whose generation broke opens no next call.
        self._done, self._done_acked, self._last = call, bool(self._broken), self.part.record
        self.part = Part(call=call + 1)
        self._retry(now)
        return True

    def give_up(self, now: float, call: int, reason: str) -> None:
        """The decided publication can't be had: have the leader void the call for all."""
        self.unfinished = NO_FLOOR
        if call == self.part.call and self.part.decided:
            self._voiding = (call, reason) if not self._broken else None
            self._over = call
            self.part = Part(call=call + 1)
            self._retry(now)

    def finished_late(self, publication: Publication) -> None:
        """The pull of an earlier generation's answer succeeded: its decision stands."""
        self.unfinished = NO_FLOOR
        self.floor = max(self.floor, publication.order)

    def pulling(self, now: float, progress: int) -> None:
        """The pull of the present answer has come so far: progress is a sign of its call."""
        if progress != self._progress and self.unfinished != NO_FLOOR:
            self._progress = progress
            self._sign(now)

    def _sign(self, now: float) -> None:
        """Let the leader know that its decision is counted on, if that was long ago."""
        counts = self.part.decided and not self._broken
        if counts and now >= self._sign_at and self.part.record is not None:
            self._plan_sign(now)
            self._send_ask(self.part.record[0])

    def _plan_sign(self, now: float) -> None:
        self._sign_at = now + SIGN_PART * self._config.pin_idle_seconds

    # --- messages ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        """A message of this generation from the member it names (the composer checked both)."""
        if isinstance(message, CallRecord):
            self._record(now, message)
        elif isinstance(message, CallDecided):
            self._decided(now, message)
        elif isinstance(message, CallRecall):
            self._recall(message)
        elif isinstance(message, CallDoneAck):
            self._done_acked = self._done_acked or message.call == self._done
        elif isinstance(message, CallVoid):
            self._is_over(CallFailed(message.call, message.reason))
        elif isinstance(message, CallDivergence):
            self._is_over(CallFailed(message.call, self._divergence(message), diverged=True))

    def _record(self, now: float, message: CallRecord) -> None:
        part = self.part
        if message.call > part.call or self._broken:
            return
        if message.call == part.call and part.question not in (None, message.question):
            return  # the leader will hear what we ask now, before it decides
        if message.call == part.call and not part.decided:
            self._ask_soon(now)
            if falls_below(message.question, message.decision, self.unfinished):
                return  # the leader asks again; by then that pull has ended or failed
            if not falls_below(message.question, message.decision, self.floor):
                part.record = (message.question, message.decision)
        self._to_leader(CallRecorded, message.call, round=message.round, floor=self.floor)

    def _decided(self, now: float, message: CallDecided) -> None:
        part = self.part
        if message.call != part.call or (part.decided and message.question != part.question):
            return
        if self._alone and part.question != message.question:
            return  # the leader hears what we ask now, and decides that instead
        part.record, part.decided = (message.question, message.decision), True
        part.sources = message.sources
        self._plan_sign(now)
        if part.question is not None and self._matches(part.question):
            self._answer()

    def _matches(self, question: Question) -> bool:
        """Otherwise we go on asking, and the leader tells all members who asked what."""
        return self.part.record is not None and self.part.record[0] == question

    def _answer(self) -> None:
        assert self.part.record is not None
        self.part.question = None
        self._give_up_at = None
        self.unfinished = self.part.record[1].publication.order
        sources, self.part.sources = self.part.sources, ()
        self.outbox.emit(CallAnswered(self.part.call, self.part.record[1], sources))

    def _recall(self, message: CallRecall) -> None:
        known = self._last if message.call == self._done else None
        if message.call == self.part.call and self.part.decided:
            known = self.part.record
        if known is not None:
            to = self._member(message.sender_shard)
            self._to(to, CallDecided, message.call, question=known[0], decision=known[1])

    def _is_over(self, failed: CallFailed) -> None:
        """Told by the leader, again and again until it hears that we know."""
        self._to_leader(CallOverAck, failed.call)
        if self._voiding is not None and self._voiding[0] == failed.call:
            self._voiding = None
        if failed.call <= self._over:
            return
        self._over = failed.call
        self.unfinished = NO_FLOOR
        if failed.call == self._done:
            self.floor = self._floor_before
        waits = self.part.question is not None
        # A member that succeeded already stands at the next call: that verb fails instead.
        self.part = Part(call=failed.call + 1)
        self._give_up_at = None
        if waits or not self._alone:
            self.outbox.emit(failed)

    @property
    def _alone(self) -> bool:
        return self.generation is not None and len(self.generation.members) == 1

    def _divergence(self, message: CallDivergence) -> str:
        return (
            f"in call {message.call} of {self.slot.group}, shard {message.by} asked to "
            f"{message.asked.verb} {message.asked.selector}, but shard {message.but_by} to "
            f"{message.but.verb} {message.but.selector}: all shards must make the same calls"
        )

    # --- deaths and time ---

    def broke(self, now: float, why: str) -> None:
        """The generation broke: finish what some survivor heard decided, or give it up soon."""
        self._broken = why
        self._done_acked, self._voiding = True, None  # there is no next call to open
        if self.part.question is not None:
            self._give_up_at = now + self._config.recall_seconds
            self._ask_often()
            self._retry(now)

    def _retry(self, now: float) -> None:
        """Send again whatever the leader has not answered."""
        self._retry_at = None
        if self._voiding is not None:
            self._to_leader(CallGiveUp, self._voiding[0], reason=self._voiding[1])
        elif self.part.question is not None:
            self._send_ask(self.part.question)
            if self._give_up_at is not None and self.generation is not None:
                for member in self.generation.members:
                    self._to(member, CallRecall, self.part.call)
        if not self._done_acked:
            self._to_leader(CallDone, self._done)
        if self._voiding or not self._done_acked:
            self._retry_at = now + self._config.retry_interval
        elif self.part.question is not None:
            self._retry_at = now + self._pause
            self._pause = min(2 * self._pause, self._config.ask_retry_limit)

    def _ask_often(self) -> None:
        self._pause = self._config.retry_interval

    def _ask_soon(self, now: float) -> None:
        """The answer is near: if it gets lost, it is asked for before long."""
        self._ask_often()
        if self._retry_at is not None:
            self._retry_at = min(self._retry_at, now + self._pause)

    def tick(self, now: float) -> None:
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            if self.part.question is not None:
                self.part.question = None
                self.outbox.emit(CallFailed(self.part.call, self._broken))
        if self._retry_at is not None and now >= self._retry_at:
            self._retry(now)

    def next_wakeup(self) -> float | None:
        return earliest(self._retry_at, self._give_up_at)

    # --- sending ---

    def _send_ask(self, question: Question) -> None:
        part = self.part
        self._to_leader(
            CallAsk, part.call, question=question, attempt=part.attempt, floor=self.floor
        )

    def _member(self, shard: int) -> Member:
        assert self.generation is not None
        return self.generation.members[shard]

    def _to(self, member: Member, kind: type[GroupMessage], call: int, **fields: object) -> None:
        assert self.generation is not None
        message = kind(*head(self.generation, self.slot, member, call), **fields)  # type: ignore[arg-type]
        self.outbox.send(member.peer, message)

    def _to_leader(self, kind: type[GroupMessage], call: int, **fields: object) -> None:
        if self.generation is not None:
            self._to(self._member(self.generation.leader), kind, call, **fields)
