"""One handle's protocols, put together: claim, election, calls, references, serving.

Rules of this file. A `ShardNode` wires machines that each know one concept; it adds the
order in which a verb uses them, the verb's deadline, and the rule that every member of a
generation that ended fails exactly one verb for it. It decides nothing else.

    open       claim the slot (slots.py)
    publish    form a generation (election.py), announce the references (publishing.py)
    ask        form a generation, make the group call (calls.py; leading.py on the leader)
    hold       announce what a pull is bringing, or brought
    unpublish  withdraw the references, then drain the readers (serving.py)
    close      give everything back

One verb at a time: whoever drives the handle sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_p2p.config import GroupConfig, PullConfig
from tensorhub_p2p.errors import (
    GroupBroken,
    GroupDivergence,
    SlotTaken,
    StateError,
    TensorHubError,
    Timeout,
    VersionConflict,
)
from tensorhub_p2p.protocol.calls import CallAnswered, CallFailed, CallMember
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.election import (
    Election,
    GenerationBroken,
    GenerationFormed,
    GroupClaimsRead,
)
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.leading import CallLeader
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDone,
    CallGiveUp,
    CallOverAck,
    CallRecorded,
    CallWithdraw,
    Endpoint,
    Formed,
    GenerationRecord,
    GroupMessage,
    MemberLeft,
    Message,
    Phase,
    Propose,
    Question,
    SlotAnswer,
    SlotChallenge,
    Vote,
)
from tensorhub_p2p.protocol.publishing import (
    Aborted,
    Announced,
    Conflicts,
    Held,
    Hidden,
    References,
)
from tensorhub_p2p.protocol.records import Liveness, Records, Registers, versions_key
from tensorhub_p2p.protocol.resolving import DirectoryResolver
from tensorhub_p2p.protocol.selection import describe, holdings
from tensorhub_p2p.protocol.serving import Drained, ShardServer
from tensorhub_p2p.protocol.slots import SlotClaimer, SlotEstablished, SlotLost, SlotState
from tensorhub_p2p.protocol.verbs import (
    Answer,
    Done,
    Failed,
    PublicationLost,
    StopDigests,
    VerbId,
)

TO_LEADER = (CallAsk, CallRecorded, CallDone, CallOverAck, CallWithdraw, CallGiveUp)
"""What members say to the leader; all other group messages are for the member."""


Ticking = SlotClaimer | Election | CallMember | CallLeader | References | ShardServer


@dataclass
class Verb:
    """The verb under way."""

    number: VerbId
    name: str
    deadline: float
    what: str
    """For the error: what was asked for."""
    go: Callable[[float], None] | None = None
    """What follows once a generation is in force; None when that is done."""
    explain_at: float | None = None


class ShardNode:
    """Everything that one handle decides."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        num_shards: int,
        records: Records,
        liveness: Liveness,
        group: GroupConfig,
        pull: PullConfig,
        *,
        spot: bool = False,
    ) -> None:
        self.me = me
        self.slot = slot
        self.num_shards = num_shards
        self.outbox = Outbox()
        self.claim = SlotClaimer(me, slot, num_shards, records, liveness, group)
        self.election = Election(me, slot, num_shards, records, liveness, group)
        self.calls = CallMember(slot, group)
        self.leader: CallLeader | None = None
        self.resolver = DirectoryResolver(slot, records, liveness, group)
        self.references = References(me, slot, records, liveness, group, spot=spot)
        self.server: ShardServer | None = None
        self.closed = False
        self._verb: Verb | None = None
        self._notice: TensorHubError | None = None
        """What the next verb fails with, once."""
        self._told_of: GenerationRecord | None = None
        """The generation whose end some verb has failed for already."""
        self._rewinds = 0
        self._last_published = (-1, -1)
        self._exists = ""
        self._records = records
        self._liveness = liveness
        self._group = group
        self._pull = pull

    # --- verbs ---

    def open(self, now: float, number: VerbId, deadline: float) -> None:
        """Claim the slot. Done(None), or SlotTaken, or Timeout."""
        self._begin(now, Verb(number, "open", deadline, f"slot {self.slot}"))
        self.claim.start(now)

    def publish(
        self,
        now: float,
        number: VerbId,
        deadline: float,
        version: int,
        rewind: bool,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
    ) -> None:
        """Announce an own publication. Done(Publication), or VersionConflict, ..."""

        def go(now: float) -> None:
            record = self.election.record
            assert record is not None
            epoch = record.epoch + self._rewinds + (1 if rewind else 0)
            publication = Publication(epoch, version, self.slot.group.replica, record.generation)
            if publication.order < self._last_published:
                self._conflict(publication, "this handle published a newer one before")
                return
            if rewind:
                self._rewinds += 1
            self._serve(publication, layout, endpoints, origin=True)
            held = Held(publication, self.num_shards, layout.num_bytes, Phase.READY, False)
            self.references.publish(now, held)

        self._in_group(now, Verb(number, "publish", deadline, f"publish({version})", go))

    def ask(self, now: float, number: VerbId, deadline: float, question: Question) -> None:
        """Make the next group call. Done(Answer), or GroupBroken, GroupDivergence, Timeout."""
        what = f"{question.verb}({question.selector}) of model {self.slot.group.model!r}"

        def go(now: float) -> None:
            self.calls.ask(now, question)

        explain_at = deadline - min(0.5, (deadline - now) / 4)
        verb = Verb(number, "ask", deadline, what, go, explain_at)
        self._exists = ""
        self._in_group(now, verb)

    def hold(
        self,
        now: float,
        number: VerbId,
        deadline: float,
        answer: Answer,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        complete: bool,
    ) -> None:
        """Announce what a pull is bringing, and serve it on. Done(None)."""
        what = f"announcing {answer.publication}"
        self._begin(now, Verb(number, "hold", deadline, what))
        if self.server is None or self.server.publication != answer.publication:
            self._serve(answer.publication, layout, endpoints, origin=False)
        phase = Phase.READY if complete else Phase.PARTIAL
        held = Held(answer.publication, answer.num_shards, layout.num_bytes, phase, True)
        self.references.hold(now, held)

    def finish(self, now: float, call: int) -> TensorHubError | None:
        """The pull of this call succeeded. An error if the group ended the call meanwhile."""
        if self.calls.succeeded(now, call):
            return None
        notice, self._notice = self._notice, None
        return notice or GroupBroken(f"call {call} of {self.slot.group} ended meanwhile")

    def give_up(self, now: float, call: int, reason: str) -> None:
        """The publication of this call can't be had: void it for the whole group."""
        self.calls.give_up(now, call, reason)

    def unpublish(self, now: float, number: VerbId, deadline: float) -> None:
        """Withdraw what is published or held. Done(None), or Timeout and it is still there."""
        held = self.references.held
        what = f"unpublish of {held.publication}" if held else "unpublish"
        self._begin(now, Verb(number, "unpublish", deadline, what))
        if held is None:
            self._done(None)
        else:
            self.references.withdraw(now)

    def drop(self, now: float) -> None:
        """What a failed pull left is given up: its references go at once, and its readers."""
        self.references.drop(now)
        self._stop_serving(now, "its pull failed")
        self.server = None

    def close(self, now: float, number: VerbId, deadline: float) -> None:
        """Give everything back. Done(None) once readers were let go, or at the deadline."""
        if self._verb is not None:
            self._fail(StateError(f"{self.slot}: the handle was closed during {self._verb.name}"))
        self.closed = True
        self._begin(now, Verb(number, "close", deadline, f"closing {self.slot}"))
        held = self.references.held
        if held is not None:
            self.outbox.emit(StopDigests(self.slot, held.publication))
        self.references.drop(now)
        self.election.stop(now)
        self._stop_leading(now)
        self.calls.end()
        self.claim.release(now)
        self._drain(now)

    def interrupt(self, now: float) -> None:
        """End the verb under way as if its deadline had come."""
        verb = self._verb
        if verb is not None:
            self._expire(now)
            if self._verb is verb:  # an unpublish past its point of no return: it goes on alone
                self._fail(Timeout(f"{verb.what} was interrupted"))

    # --- how a verb runs ---

    def _begin(self, now: float, verb: Verb) -> None:
        assert self._verb is None, f"{self._verb} is under way"
        if self.closed and verb.name != "close":
            raise StateError(f"{self.slot}: the handle was closed")
        self._verb = verb

    def _in_group(self, now: float, verb: Verb) -> None:
        self._begin(now, verb)
        if self.claim.state is not SlotState.ESTABLISHED:
            self._fail(SlotTaken(f"{self.slot}: {self.claim.state.value}; open it again"))
        elif self._notice is not None:
            notice, self._notice = self._notice, None
            self._fail(notice)
        elif self.election.formed:
            self._go(now)
        else:
            self.election.want(now)

    def _go(self, now: float) -> None:
        verb = self._verb
        if verb is not None and verb.go is not None:
            go, verb.go = verb.go, None
            go(now)

    def _done(self, result: object) -> None:
        if self._verb is not None:
            verb, self._verb = self._verb, None
            self.outbox.emit(Done(verb.number, result))

    def _fail(self, error: TensorHubError) -> None:
        if self._verb is not None:
            verb, self._verb = self._verb, None
            self.closed = self.closed or verb.name == "open"
            self.outbox.emit(Failed(verb.number, error))

    @property
    def is_over(self) -> bool:
        """It is closed, and nothing of it goes on."""
        return self.closed and self._verb is None and self.server is None

    def _waits(self, name: str) -> bool:
        return self._verb is not None and self._verb.name == name

    def _expire(self, now: float) -> None:
        """The verb's deadline has passed."""
        verb = self._verb
        assert verb is not None
        if verb.name == "unpublish" and not self.references.restore(now):
            # Hidden already: the readers get their one lease, then it is done.
            verb.deadline = now + 2 * self._pull.lease_seconds
            if self.server is None:
                self._done(None)
            return
        if verb.name == "close":
            self.server = None
            self._done(None)
            return
        reason = self._waiting_for(verb)
        if verb.name == "open":
            self.claim.release(now)
        elif verb.name == "ask":
            self.calls.withdraw()
        elif verb.name == "publish" and verb.go is None:
            self.references.drop(now)
            self._stop_serving(now, "its publish timed out")
        self._fail(Timeout(f"{verb.what} timed out: {reason}"))

    def _waiting_for(self, verb: Verb) -> str:
        if verb.name == "open":
            return self.claim.waiting_for()
        if verb.name == "unpublish":
            return f"{self.references.waiting_for()}; it is still published"
        if verb.go is not None:
            return self.election.waiting_for()
        if verb.name == "ask":
            leader = f"; {self.leader.waiting_for()}" if self.leader is not None else ""
            return (self._exists or "the group's leader has not answered") + leader
        return self.references.waiting_for()

    # --- serving ---

    def _serve(
        self,
        publication: Publication,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        origin: bool,
    ) -> None:
        have = None if origin else ChunkSet(layout.num_chunks)
        self.server = ShardServer(
            self.slot, publication, layout, endpoints, self._pull, have=have, origin=origin
        )

    def _drain(self, now: float) -> None:
        if self.server is None:
            self._done(None)
        else:
            self._stop_serving(now, "withdrawn")

    def _stop_serving(self, now: float, reason: str) -> None:
        if self.server is not None:
            self.server.withdraw(now, reason)
            self.pump(now)

    def digested(self, now: float, publication: Publication, chunk: int, digest: bytes) -> None:
        """The origin's digest of a chunk was taken."""
        if self.server is not None and self.server.publication == publication:
            self.server.digested(now, chunk, digest)

    def verified(self, now: float, publication: Publication, chunk: int, digest: bytes) -> None:
        """A pull verified a chunk: serve it on."""
        if self.server is not None and self.server.publication == publication:
            self.server.verified(now, chunk, digest)

    def revoked(self, now: float, publication: Publication, chunk: int) -> None:
        """A pull takes a verified chunk back: serve it no longer."""
        if self.server is not None and self.server.publication == publication:
            self.server.revoked(now, chunk)

    # --- what the machines decided ---

    def pump(self, now: float) -> None:
        """Take what the machines put out; events that concern the verb end it here."""
        while True:
            items = [item for machine in self._machines() for item in machine.outbox.drain()]
            if not items:
                return
            for item in items:
                if isinstance(item, Event):
                    self._on_event(now, item)
                else:
                    self.outbox.items.append(item)

    def _on_event(self, now: float, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is None:
            self.outbox.emit(event)
        else:
            handler(self, now, event)

    def _on_established(self, now: float, event: SlotEstablished) -> None:
        self.election.established(event.counter)
        if self._waits("open"):
            self._done(None)

    def _on_slot_lost(self, now: float, event: SlotLost) -> None:
        who = self._liveness.name(event.rival)
        error = SlotTaken(f"{self.slot} is held by {who}: {event.reason}")
        self.election.stop(now)
        self._stop_leading(now)
        if self._verb is not None:
            self._fail(error)

    def _on_claims_read(self, now: float, event: GroupClaimsRead) -> None:
        self.claim.learn(now, event.registers)

    def _on_formed(self, now: float, event: GenerationFormed) -> None:
        old = self.calls.generation
        self._stop_leading(now)
        if old is not None and self._told_of != old:
            self._end_of_generation(old, f"its next generation {event.record.generation} formed")
        self.calls.floor = max(self.calls.floor, self.election.floor)
        self.calls.begin(event.record)
        self._rewinds = 0
        self.resolver.generation = event.record.generation
        if event.record.leader == self.slot.shard:
            self.leader = CallLeader(self.slot, event.record, self.resolver, self._group)
        self.references.reissue(now, event.record.generation)
        if self._notice is not None and self._verb is not None and self._verb.name == "ask":
            notice, self._notice = self._notice, None
            self._fail(notice)
        self._go(now)

    def _on_broken(self, now: float, event: GenerationBroken) -> None:
        who = f"{self._liveness.name(event.member.peer)}, shard {event.member.shard},"
        if self._told_of != event.record:
            self._end_of_generation(event.record, f"{who} is gone")
        self.calls.member_gone(now, who)
        if self._verb is not None and self._verb.go is not None:
            self.election.want(now)

    def _end_of_generation(self, record: GenerationRecord, why: str) -> None:
        self._told_of = record
        self._notice = GroupBroken(
            f"group {self.slot.group} (generation {record.generation}) broke: {why}; "
            "calls go on with its next generation"
        )

    def _on_answered(self, now: float, event: CallAnswered) -> None:
        answer = Answer(event.call, event.decision.publication, event.decision.num_shards)
        self._done(answer)

    def _on_call_failed(self, now: float, event: CallFailed) -> None:
        kind = GroupDivergence if event.diverged else GroupBroken
        # The end of the generation, if that is the reason, is told by this very error.
        self._notice = kind(f"call {event.call} of {self.slot.group} is void: {event.reason}")
        if self._waits("ask"):
            notice, self._notice = self._notice, None
            assert notice is not None
            self._fail(notice)

    def _on_announced(self, now: float, event: Announced) -> None:
        if self._waits("publish"):
            self._last_published = max(self._last_published, event.publication.order)
            self._done(event.publication)
        elif self._waits("hold"):
            self._done(None)

    def _on_conflict(self, now: float, event: Conflicts) -> None:
        self._stop_serving(now, "its version conflicts with another")
        existing = f"{event.existing} exists" if event.existing else event.why
        self._conflict(event.publication, existing)

    def _conflict(self, publication: Publication, why: str) -> None:
        self._fail(
            VersionConflict(
                f"can't publish {publication}: {why}. Publish a higher version, "
                "or pass rewind=True to begin a new epoch"
            )
        )

    def _on_hidden(self, now: float, event: Hidden) -> None:
        self.outbox.emit(StopDigests(self.slot, event.publication))
        self._drain(now)

    def _on_aborted(self, now: float, event: Aborted) -> None:
        self.outbox.emit(StopDigests(self.slot, event.publication))
        self.outbox.emit(PublicationLost(self.slot, event.publication))
        self._stop_serving(now, "aborted")

    def _on_drained(self, now: float, event: Drained) -> None:
        if self.server is not None and self.server.publication == event.publication:
            self.server = None
        if self._waits("unpublish") or self._waits("close"):
            self._done(None)

    _handlers: dict[type[Event], Callable[..., None]] = {
        SlotEstablished: _on_established,
        SlotLost: _on_slot_lost,
        GroupClaimsRead: _on_claims_read,
        GenerationFormed: _on_formed,
        GenerationBroken: _on_broken,
        CallAnswered: _on_answered,
        CallFailed: _on_call_failed,
        Announced: _on_announced,
        Conflicts: _on_conflict,
        Hidden: _on_hidden,
        Aborted: _on_aborted,
        Drained: _on_drained,
    }

    def _stop_leading(self, now: float) -> None:
        if self.leader is not None:
            self.leader.stop(now)
            self.leader = None

    # --- messages, deaths, time ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, (SlotChallenge, SlotAnswer)):
            self.claim.receive(now, sender, message)
        elif isinstance(message, (Propose, Vote, Formed, MemberLeft)):
            self.election.receive(now, sender, message)
        elif isinstance(message, GroupMessage):
            self._receive_call(now, sender, message)
        elif self.server is not None:
            self.server.receive(now, sender, message)
        self.pump(now)

    def _receive_call(self, now: float, sender: PeerId, message: GroupMessage) -> None:
        """Only from the member that it says, of the generation in force (G7)."""
        record = self.election.record
        if record is None:
            return
        if message.generation < record.generation:
            self._correct(sender, message, record)
            return
        if message.generation != record.generation:
            return
        if not 0 <= message.sender_shard < len(record.members):
            return
        if record.members[message.sender_shard].peer != sender:
            return
        if not isinstance(message, TO_LEADER):
            self.calls.receive(now, sender, message)
        elif self.leader is not None:
            self.leader.receive(now, sender, message)

    def _correct(self, sender: PeerId, message: GroupMessage, record: GenerationRecord) -> None:
        """A member that missed `Formed` is told; one that was replaced finds itself missing."""
        for member in record.members:
            if member.peer == sender and member.shard == message.sender_shard:
                self.outbox.send(sender, Formed(self.slot.group, member.shard, record))

    def peer_gone(self, now: float, peer: PeerId) -> None:
        """Membership declared the peer dead, or it left."""
        self.claim.peer_gone(now, peer)
        self.election.peer_gone(now, peer)
        if self.server is not None:
            self.server.forget_peer(now, peer)
        self.pump(now)

    def declared_dead(self, now: float) -> None:
        """This peer was declared dead and has refuted it: is the slot still ours?"""
        self.claim.check(now)
        self.pump(now)

    def tick(self, now: float) -> None:
        for machine in self._machines():
            machine.tick(now)
        self.resolver.tick(now)
        self.pump(now)
        verb = self._verb
        if verb is None:
            return
        if now >= verb.deadline:
            self._expire(now)
            self.pump(now)
        elif verb.explain_at is not None and now >= verb.explain_at:
            verb.explain_at = None
            self._records.read(now, versions_key(self.slot.group.model), self._note_what_exists)

    def _note_what_exists(self, now: float, registers: Registers) -> None:
        self._exists = describe(holdings(registers, self._liveness.is_gone))

    def next_wakeup(self) -> float | None:
        verb = self._verb
        return earliest(
            *(machine.next_wakeup() for machine in self._machines()),
            self.resolver.next_wakeup(),
            verb.deadline if verb else None,
            verb.explain_at if verb else None,
        )

    def _machines(self) -> list[Ticking]:
        machines: list[Ticking] = [self.claim, self.election, self.calls, self.references]
        if self.leader is not None:
            machines.append(self.leader)
        if self.server is not None:
            machines.append(self.server)
        return machines
