"""One handle's protocols, put together: claim, election, calls, references, serving.

Rules of this file. A `ShardNode` wires machines that each know one concept. It decides in
which order a verb uses them, what its end and its deadline mean for them, and whom a
message or an event concerns; all else they decide.

    open       claim the slot (slots.py)
    publish    form a generation (election.py), announce the references (publishing.py)
    ask        form a generation, make the group call (calls.py; leading.py on the leader)
    hold       announce what a pull is bringing, or brought
    unpublish  withdraw the references, then drain the readers (serving.py)
    close      give everything back

One verb at a time (running_verb.py). When a generation ends, or a call of it, one verb fails
for it (notices.py). A lost slot is told by every verb, but for those that give something up:
unpublish and close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tensorhub_p2p.config import GroupConfig, PullConfig
from tensorhub_p2p.errors import (
    GroupBroken,
    SlotTaken,
    StateError,
    TensorHubError,
    Timeout,
    VersionConflict,
)
from tensorhub_p2p.protocol.admission import FENCED
from tensorhub_p2p.protocol.calls import CallAnswered, CallFailed, CallMember
from tensorhub_p2p.protocol.claims import left
from tensorhub_p2p.protocol.election import (
    Election,
    GenerationBroken,
    GenerationFormed,
    GroupClaimsRead,
)
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.inquiry import Inquiry
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.leading import CallLeader
from tensorhub_p2p.protocol.machine import Outbox, Output, earliest
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDone,
    CallGiveUp,
    CallOverAck,
    CallRecord,
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
from tensorhub_p2p.protocol.notices import Notices
from tensorhub_p2p.protocol.numbering import Numbering
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
from tensorhub_p2p.protocol.running_verb import RunningVerb, Verb
from tensorhub_p2p.protocol.selection import NO_FLOOR, describe, holdings
from tensorhub_p2p.protocol.served import Served
from tensorhub_p2p.protocol.serving import Drained, ShardServer
from tensorhub_p2p.protocol.slots import SlotClaimer, SlotEstablished, SlotLost, SlotState
from tensorhub_p2p.protocol.verbs import (
    Answer,
    PublicationLost,
    StopDigests,
    VerbId,
)

TO_LEADER = (CallAsk, CallRecorded, CallDone, CallOverAck, CallWithdraw, CallGiveUp)
"""What members say to the leader; all other group messages are for the member."""


Ticking = SlotClaimer | Election | CallMember | CallLeader | References | ShardServer


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
        self.resolver = DirectoryResolver(slot, records, liveness, group, self.election.doubt)
        self.references = References(me, slot, records, liveness, group, spot=spot)
        self.closed = False
        """Given back, or never opened: the peer may open the slot anew."""
        self.served = Served(slot, pull)
        self.notices = Notices(slot.group)
        self._lost: SlotTaken | None = None
        self._running = RunningVerb(slot, self.outbox, self._on_end)
        self._numbering = Numbering(slot.group.replica)
        self._answered: tuple[GenerationRecord, Publication] | None = None
        """The last answer to a call, and the generation that gave it, until it is finished."""
        self._exists = ""
        key = versions_key(slot.group.model)
        self._existing = Inquiry(records, key, self._note_what_exists)
        self._liveness = liveness
        self._group = group
        self._pull = pull

    # --- verbs ---

    def open(self, now: float, number: VerbId, deadline: float) -> None:
        """Claim the slot. Done(None), or SlotTaken, or Timeout."""
        if self._begin(Verb(number, "open", deadline, f"slot {self.slot}")):
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
            publication = self._numbering.propose(record, version, rewind=rewind)
            why = self._numbering.forbids(publication)
            if why:
                self._conflict(publication, why)
                return
            self.served.begin(publication, layout, endpoints, origin=True)
            held = Held(publication, self.num_shards, layout.num_bytes, Phase.READY, False)
            self.references.publish(now, held)

        self._in_group(now, Verb(number, "publish", deadline, f"publish({version})", go))

    def ask(self, now: float, number: VerbId, deadline: float, question: Question) -> None:
        """Make the next group call. Done(Answer), or GroupBroken, GroupDivergence, Timeout."""
        selector = question.selector.replace(">", "newer_than=")
        what = f"{question.verb}({selector}) of model {self.slot.group.model!r}"

        def go(now: float) -> None:
            self.calls.ask(now, question)

        verb = Verb(number, "ask", deadline, what, go)
        verb.explain_at = deadline - min(0.5, (deadline - now) / 4)
        verb.look_at = now + self._group.look_interval
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
        if not self._begin(Verb(number, "hold", deadline, what)):
            return
        if self._lost is not None:
            self._fail(self._lost)
            return
        if not self.served.serves(answer.publication):
            self.served.begin(answer.publication, layout, endpoints, origin=False)
        phase = Phase.READY if complete else Phase.PARTIAL
        held = Held(answer.publication, answer.num_shards, layout.num_bytes, phase, True)
        self.references.hold(now, held)

    def finish(self, now: float, call: int) -> TensorHubError | None:
        """The pull of this call succeeded. An error if the group ended the call meanwhile.

        A generation that broke meanwhile has decided the call all the same: what it decided
        stands, and the next verb is told of its end.
        """
        if self._lost is not None:
            return self._lost
        if self._answered is None:
            return self._take_notice(call)
        (generation, publication), self._answered = self._answered, None
        if generation != self.calls.generation:
            self.calls.finished_late(publication)
        elif not self.calls.succeeded(now, call):
            return self._take_notice(call)
        self.election.floor = self.calls.floor
        return None

    def _take_notice(self, call: int) -> TensorHubError:
        return self.notices.take() or GroupBroken(
            f"call {call} of {self.slot.group} ended meanwhile"
        )

    def give_up(self, now: float, call: int, reason: str) -> None:
        """The publication of this call can't be had: void it for the whole group."""
        if self._answered is not None and self._answered[0] == self.calls.generation:
            self.calls.give_up(now, call, reason)

    def unpublish(self, now: float, number: VerbId, deadline: float) -> None:
        """Withdraw what is published or held. Done(None), or Timeout and it is still there."""
        held = self.references.held
        what = f"unpublish of {held.publication}" if held else "unpublish"
        if not self._begin(Verb(number, "unpublish", deadline, what)):
            return
        if held is None:
            self._drain(now)
        else:
            self.references.withdraw(now)

    def drop(self, now: float) -> None:
        """What a failed pull left is given up: its references go at once, and its readers."""
        self.calls.unfinished = NO_FLOOR
        self.references.drop(now)
        self._stop_serving(now, "its pull failed")
        self.served.end()

    def close(self, now: float, number: VerbId, deadline: float) -> None:
        """Give everything back. Done(None) once readers were let go, or at the deadline."""
        verb = self._running.verb
        if verb is not None:
            self._fail(StateError(f"{self.slot}: the handle was closed during {verb.name}"))
        self.closed = True
        self._begin(Verb(number, "close", deadline, f"closing {self.slot}"))
        held = self.references.held
        if held is not None:
            self.outbox.emit(StopDigests(self.slot, held.publication))
        self.references.drop(now)
        self.election.stop(now)
        self._stop_leading(now)
        self.calls.end()
        self.claim.release(now)
        self._drain(now)

    def interrupt(self, now: float, number: VerbId) -> None:
        """End this verb as if its deadline had come, if it is still the one under way."""
        verb = self._running.verb
        if verb is not None and verb.number == number:
            self._expire(now)
            if self._running.verb is verb:
                # An unpublish past its point of no return: it goes on alone.
                self._fail(Timeout(f"{verb.what} was interrupted"))

    # --- how a verb runs ---

    def _begin(self, verb: Verb) -> bool:
        return self._running.begin(verb, closed=self.closed and verb.name != "close")

    def _in_group(self, now: float, verb: Verb) -> None:
        if not self._begin(verb):
            return
        self.calls.unfinished = NO_FLOOR  # whoever goes on has ended its last pull
        if self._lost is not None:
            self._fail(self._lost)
        elif self.claim.state is not SlotState.ESTABLISHED:
            self._fail(StateError(f"{self.slot} is not open: {self.claim.state.value}"))
        elif self.notices.pending is not None:
            self._fail_with_notice()
        elif self.election.formed:
            self._running.go(now)
        else:
            self.election.want(now)

    def _fail_with_notice(self) -> None:
        notice = self.notices.take()
        assert notice is not None
        self._fail(notice)

    def _done(self, result: object) -> None:
        self._running.done(result)

    def _fail(self, error: TensorHubError) -> None:
        self._running.fail(error)

    def _on_end(self, verb: Verb, failed: bool) -> None:
        self.closed = self.closed or (failed and verb.name == "open")
        self.election.rest()
        self._existing.stop()

    @property
    def is_over(self) -> bool:
        """It is closed, and nothing of it goes on."""
        return self.closed and self._running.verb is None and self.server is None

    @property
    def server(self) -> ShardServer | None:
        """What others read from, if anything."""
        return self.served.server

    def _expire(self, now: float) -> None:
        """The verb's deadline has passed."""
        verb = self._running.verb
        assert verb is not None
        reason = self._waiting_for(verb)
        if verb.name == "close" or verb.draining:
            self.served.end()
            self._done(None)
            return
        if verb.name == "unpublish" and not self.references.restore(now):
            # Too late to take it back: the readers get their one lease, then it is done.
            verb.draining = True
            verb.deadline = now + self._pull.lease_seconds
            self.references.hide_unconfirmed(now)
            return
        if verb.name == "open":
            self.claim.release(now)
        elif verb.name == "ask" and verb.go is None:
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

    def _drain(self, now: float) -> None:
        if self.server is None:
            self._done(None)
        else:
            self._stop_serving(now, "withdrawn")

    def _stop_serving(self, now: float, reason: str) -> None:
        if self.server is not None:
            self.served.stop(now, reason)
            self.pump(now)

    # --- what the machines decided ---

    def pump(self, now: float) -> None:
        """Take what the machines put out; events that concern the verb end it here."""
        while True:
            items = [item for machine in self._machines() for item in machine.outbox.drain()]
            if not items:
                return
            for item in items:
                self._take(now, item)

    def _take(self, now: float, item: Output) -> None:
        """Act on an event that concerns the handle; the rest is for the driver."""
        handler = self._handlers.get(type(item))
        if handler is None:
            self.outbox.items.append(item)
        else:
            handler(self, now, item)

    def _on_established(self, now: float, event: SlotEstablished) -> None:
        self.election.established(event.counter)
        if self._running.is_a("open"):
            self._done(None)

    def _on_slot_lost(self, now: float, event: SlotLost) -> None:
        who = self._liveness.name(event.rival)
        self._lost = SlotTaken(
            f"{self.slot} is held by {who}: {event.reason}. Open another slot, or another replica"
        )
        self.election.stop(now)
        self._stop_leading(now)
        self.calls.end()
        if not self._running.is_a("unpublish"):
            self._fail(self._lost)

    def _on_claims_read(self, now: float, event: GroupClaimsRead) -> None:
        # That we were replaced comes before whatever else the election read there.
        self.claim.learn(now, event.registers)
        for item in self.claim.outbox.drain():
            self._take(now, item)

    def _on_formed(self, now: float, event: GenerationFormed) -> None:
        old = self.calls.generation
        self._stop_leading(now)
        if old is not None:
            self.notices.generation_ended(
                old, f"its next generation {event.record.generation} formed"
            )
        self.calls.begin(event.record)
        self.election.floor = self.calls.floor
        self._numbering.next_generation()
        self.resolver.generation = event.record.generation
        if event.record.leader == self.slot.shard:
            self.leader = CallLeader(self.slot, event.record, self.resolver, self._group)
        self.references.reissue(now, event.record.generation)
        if self.notices.pending is not None and self._running.needs_its_generation:
            self._fail_with_notice()
        self._running.go(now)

    def _on_broken(self, now: float, event: GenerationBroken) -> None:
        self.notices.generation_ended(event.record, event.why)
        self.calls.broke(now, event.why)
        if self.leader is not None:
            self.leader.broke(now)
        if (
            self._running.is_a("publish")
            and self.references.held is None
            and self.notices.pending is not None
        ):
            # Refused, as a higher generation exists.
            self._fail_with_notice()

    def _on_answered(self, now: float, event: CallAnswered) -> None:
        if self.calls.generation is not None and self._running.is_a("ask"):
            decision = event.decision
            self._answered = (self.calls.generation, decision.publication)
            self._done(Answer(event.call, decision.publication, decision.num_shards))

    def _on_call_failed(self, now: float, event: CallFailed) -> None:
        self.notices.call_over(event)
        self.election.floor = self.calls.floor
        if self._running.is_a("ask"):
            self._fail_with_notice()

    def _on_announced(self, now: float, event: Announced) -> None:
        if self._running.is_a("publish"):
            self._numbering.published(event.publication)
            self._done(event.publication)
        elif self._running.is_a("hold"):
            self._done(None)

    def _on_conflict(self, now: float, event: Conflicts) -> None:
        self._stop_serving(now, "its version conflicts with another")
        if event.why == FENCED:
            self._replaced(now)
            return
        existing = f"{event.existing} exists" if event.existing else event.why
        self._conflict(event.publication, existing)

    def _replaced(self, now: float) -> None:
        """An owner knows a higher generation: the end of ours is told, once we know of it."""
        if self.notices.pending is not None:
            self._fail_with_notice()
        else:
            self.election.doubt(now)

    def _conflict(self, publication: Publication, why: str) -> None:
        self._fail(
            VersionConflict(
                f"can't publish {publication}: {why}. Publish a higher version, "
                "or pass rewind=True to begin a new epoch"
            )
        )

    def _on_hidden(self, now: float, event: Hidden) -> None:
        self._numbering.withdrawn(event.publication, was_whole=event.was_whole)
        self.outbox.emit(StopDigests(self.slot, event.publication))
        self._drain(now)

    def _on_aborted(self, now: float, event: Aborted) -> None:
        self.outbox.emit(StopDigests(self.slot, event.publication))
        self.outbox.emit(PublicationLost(self.slot, event.publication))
        self._stop_serving(now, "aborted")

    def _on_drained(self, now: float, event: Drained) -> None:
        self.served.drained()
        if self._running.is_a("unpublish", "close"):
            self._done(None)

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
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
        if not self.election.takes_part_in(message.generation):
            self.outbox.send(sender, left(message))
        elif record is None or message.generation > record.generation:
            # We missed `Formed`.
            self.election.look(now)
        elif message.generation < record.generation:
            # The sender did, or it was replaced and finds itself missing.
            self.outbox.send(sender, Formed(self.slot.group, message.sender_shard, record))
        elif self._is_member(record, sender, message.sender_shard):
            self._receive_in_generation(now, sender, message)

    def _receive_in_generation(self, now: float, sender: PeerId, message: GroupMessage) -> None:
        if self.election.broken and isinstance(message, (CallAsk, CallRecord)):
            # The sender goes on with what is broken here: it has not heard of it.
            self.outbox.send(sender, left(message))
        if not isinstance(message, TO_LEADER):
            self.calls.receive(now, sender, message)
        elif self.leader is not None:
            self.leader.receive(now, sender, message)

    def _is_member(self, record: GenerationRecord, peer: PeerId, shard: int) -> bool:
        return shard < len(record.members) and record.members[shard].peer == peer

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
        verb = self._running.verb
        if verb is not None and now >= verb.deadline:
            self._expire(now)
            self.pump(now)
            return
        if self._running.explains(now):
            self._existing.look(now)
        if self._running.looks(now, self._group.look_interval):
            self.election.look(now)

    def _note_what_exists(self, now: float, registers: Registers) -> None:
        self._exists = describe(holdings(registers, self._liveness.is_gone))

    def next_wakeup(self) -> float | None:
        return earliest(
            *(machine.next_wakeup() for machine in self._machines()),
            self.resolver.next_wakeup(),
            self._running.next_wakeup(),
        )

    def _machines(self) -> list[Ticking]:
        machines: list[Ticking] = [self.claim, self.election, self.calls, self.references]
        if self.leader is not None:
            machines.append(self.leader)
        if self.server is not None:
            machines.append(self.server)
        return machines
