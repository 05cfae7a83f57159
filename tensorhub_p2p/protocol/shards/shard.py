"""One handle's protocols, put together: claim, group, references, serving.

Rules of this file. A `ShardNode` wires machines that each know one concept. It decides in
which order a verb uses them, what its end and its deadline mean for them, and whom a
message or an event concerns; all else they decide.

    open       claim the slot (slots.py)
    publish    form a generation (election.py), announce the references (publishing.py)
    ask        form a generation, make the group call (group_part.py)
    hold       announce what a pull is bringing, or brought
    unpublish  withdraw the references (withdrawing.py), then drain the readers (serving.py)
    close      the same, and give the slot back; done once W owners know it

One verb at a time (running_verb.py). When a generation ends, or a call of it, one verb fails
for it (notices.py). A lost slot is told by every verb, but for those that give something up:
unpublish and close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tensorhub_p2p.config import GroupConfig, PullConfig
from tensorhub_p2p.errors import (
    RetentionLost,
    SlotTaken,
    StateError,
    TensorHubError,
    Timeout,
    VersionConflict,
)
from tensorhub_p2p.protocol.directory.admission import FENCED
from tensorhub_p2p.protocol.groups.calls import CallAnswered, CallFailed
from tensorhub_p2p.protocol.groups.election import (
    GenerationBroken,
    GenerationFormed,
    GroupClaimsRead,
)
from tensorhub_p2p.protocol.groups.forgetting import forget_group, forget_references
from tensorhub_p2p.protocol.groups.group_part import FOR_GROUP, GroupPart
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR
from tensorhub_p2p.protocol.groups.slots import SlotClaimer, SlotEstablished, SlotLost, SlotState
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import Machine, Outbox, Output, earliest
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    GenerationRecord,
    KeepAnswer,
    KeepAsk,
    Message,
    Phase,
    Question,
    ReserveAnswer,
    ReserveAsk,
    Retain,
    SlotAnswer,
    SlotChallenge,
)
from tensorhub_p2p.protocol.pulls.served import Served
from tensorhub_p2p.protocol.pulls.serving import Drained, ShardServer
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held
from tensorhub_p2p.protocol.retention.reserving import ReserveMember
from tensorhub_p2p.protocol.retention.retaining import Retaining
from tensorhub_p2p.protocol.shards.closing import Closing, Part
from tensorhub_p2p.protocol.shards.explaining import Explanation
from tensorhub_p2p.protocol.shards.numbering import Numbering
from tensorhub_p2p.protocol.shards.publishing import (
    Aborted,
    Announced,
    Conflicts,
    Hidden,
    References,
)
from tensorhub_p2p.protocol.shards.retracting import RetractionWatch
from tensorhub_p2p.protocol.shards.running_verb import RunningVerb, Verb
from tensorhub_p2p.protocol.shards.verbs import Answer, PublicationLost, StopDigests, VerbId
from tensorhub_p2p.protocol.shards.withdrawing import Surroundings, Unkept


class ShardNode:
    """Everything that one handle decides."""

    def __init__(
        self,
        slot: Slot,
        num_shards: int,
        custody: Custody,
        retaining: Retaining,
        group: GroupConfig,
        pull: PullConfig,
        *,
        spot: bool = False,
        elastic: bool = False,
    ) -> None:
        me, records, liveness = custody.me, custody.records, custody.liveness
        self.me = me
        self.slot = slot
        self.num_shards = num_shards
        self.outbox = Outbox()
        self.claim = SlotClaimer(me, slot, num_shards, records, liveness, group)
        self.part = GroupPart(me, slot, num_shards, records, liveness, group, self.outbox)
        self.served = Served(slot, pull)
        around = Surroundings(lambda: self.server, self._generation, spot)
        self.references = References(slot, group, custody, around)
        self.closed = False
        """Given back, or never opened: the peer may open the slot anew."""
        self.lost: tuple[str, ...] = ()
        """For whom the last withdrawal gave up what it should have kept."""
        self._custody = custody
        self._retaining = retaining
        self._retain: Retain | None = None
        self._reserve_member = ReserveMember(slot, custody.reserve, self.outbox, custody.config)
        self._closing = Closing(slot, custody, retaining, spot=spot)
        self._retraction = RetractionWatch(
            slot.group.model, records, custody.config.look_interval, self._retracted
        )
        self._spot = spot
        self._elastic = elastic
        self._last_record: GenerationRecord | None = None
        """Of the group, when the handle was closed."""
        self._lost: SlotTaken | None = None
        self._running = RunningVerb(slot, self.outbox, self._on_end)
        self._numbering = Numbering(slot.group.replica)
        self._explanation = Explanation(
            slot.group.model, self.claim, self.part, self.references, records, liveness
        )
        self._liveness = liveness
        self._group = group
        self._pull = pull

    # --- verbs ---

    def open(
        self, now: float, number: VerbId, deadline: float, retain: Retain | None = None
    ) -> None:
        """Claim the slot. Done(None), or SlotTaken, or Timeout."""
        if self._begin(Verb(number, "open", deadline, f"slot {self.slot}")):
            self._closing.opened()
            self._retain = retain
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
            record = self.part.election.record
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
            self.part.calls.ask(now, question)

        verb = Verb(number, "ask", deadline, what, go)
        verb.explain_at = deadline - min(0.5, (deadline - now) / 4)
        verb.look_at = now + self._group.look_interval
        self._explanation.forget()
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
        """The pull of this call succeeded. An error if the group ended the call meanwhile."""
        return self._lost or self.part.finish(now, call)

    def give_up(self, now: float, call: int, reason: str) -> None:
        """The publication of this call can't be had: void it for the whole group."""
        self.part.give_up(now, call, reason)

    def unpublish(
        self, now: float, number: VerbId, deadline: float, *, force: bool = False
    ) -> None:
        """Withdraw what is published or held. Done(for whom it was lost).

        RetentionLost, or Timeout: it is still there. With `force` it is given up, whoever
        needs it.
        """
        held = self.references.held
        what = f"unpublish of {held.publication}" if held else "unpublish"
        if not self._begin(Verb(number, "unpublish", deadline, what)):
            return
        self.lost = ()
        if held is None:
            self._drain(now)
        else:
            self.references.withdraw(now, force=force)

    def drop(self, now: float) -> None:
        """What a failed pull left is given up: its references go at once, and its readers."""
        self.part.calls.unfinished = NO_FLOOR
        self.references.drop(now)
        self._stop_serving(now, "its pull failed")
        self.served.end()

    def close(self, now: float, number: VerbId, deadline: float) -> None:
        """Give everything back. Done(None), by the deadline in any case.

        RetentionLost: it is closed too, but somebody wanted kept what it held.
        """
        verb = self._running.verb
        if verb is not None:
            self._fail(StateError(f"{self.slot}: the handle was closed during {verb.name}"))
        self._last_record = self._generation()
        self.closed = True
        self.lost = ()
        self._begin(Verb(number, "close", deadline, f"closing {self.slot}"))
        self.part.stop(now)
        self._closing.begin(now, self.claim, self._look_closed)
        if self.references.held is None:
            self._drain(now)
        else:
            # Readers get their lease before the deadline, if there is time for it at all.
            lease = min(self._pull.lease_seconds, (deadline - now) / 2)
            self.references.close(now, deadline - lease)

    def _look_closed(self, now: float) -> None:
        """Something of what the close waits for is over."""
        if self._closing.done and self.references.held is None:
            self._end_close(now)

    def _end_close(self, now: float) -> None:
        forget_references(self._custody.records, now, self.slot)
        if self._elastic:
            forget_group(self._custody.records, now, self.slot)
        if self.lost:
            what = "; ".join(self.lost)
            self._fail(RetentionLost(f"{self.slot} was closed, and with it is lost: {what}"))
        else:
            self._done(None)

    def _generation(self) -> GenerationRecord | None:
        """The group's generation in force, or when the handle was closed."""
        election = self.part.election
        return self._last_record if self.closed else election.record if election.formed else None

    def interrupt(self, now: float, number: VerbId) -> None:
        """End this verb as if its deadline had come, if it is still the one under way."""
        verb = self._running.verb
        if verb is not None and verb.number == number:
            self._expire(now, interrupted=True)
            if self._running.verb is verb:
                # An unpublish past its point of no return: it goes on alone.
                self._fail(Timeout(f"{verb.what} was interrupted"))

    # --- how a verb runs ---

    def _begin(self, verb: Verb) -> bool:
        return self._running.begin(verb, closed=self.closed and verb.name != "close")

    def _in_group(self, now: float, verb: Verb) -> None:
        if not self._begin(verb):
            return
        self.part.calls.unfinished = NO_FLOOR  # whoever goes on has ended its last pull
        if self._lost is not None:
            self._fail(self._lost)
        elif self.claim.state is not SlotState.ESTABLISHED:
            self._fail(StateError(f"{self.slot} is not open: {self.claim.state.value}"))
        elif self.part.notices.pending is not None:
            self._fail_with_notice()
        elif self.part.election.formed:
            self._running.go(now)
        else:
            self.part.election.want(now)

    def _fail_with_notice(self) -> None:
        notice = self.part.notices.take()
        assert notice is not None
        self._fail(notice)

    def _done(self, result: object) -> None:
        self._running.done(result)

    def _fail(self, error: TensorHubError) -> None:
        self._running.fail(error)

    def _on_end(self, verb: Verb, failed: bool) -> None:
        self.closed = self.closed or (failed and verb.name == "open")
        self.part.election.rest()
        self._explanation.stop()

    @property
    def is_over(self) -> bool:
        """It is closed, and nothing of it goes on."""
        return self.closed and self._running.verb is None and self.server is None

    @property
    def server(self) -> ShardServer | None:
        """What others read from, if anything."""
        return self.served.server

    def _expire(self, now: float, *, interrupted: bool = False) -> None:
        """The verb's deadline has passed."""
        verb = self._running.verb
        assert verb is not None
        reason = self._explanation.waiting_for(verb)
        if verb.name == "close":
            self._cut_close(now)
            return
        if verb.draining:
            self.served.end()
            self._done(self.lost)
            return
        if verb.name == "unpublish" and not self._taken_back(now, interrupted):
            # Too late to take it back: the readers get their one lease, then it is done.
            verb.draining = True
            verb.deadline = now + self._pull.lease_seconds
            self.pump(now)
            return
        if verb.name == "open":
            self._give_slot_back(now)
        elif verb.name == "ask" and verb.go is None:
            self.part.calls.withdraw()
        elif verb.name == "publish" and verb.go is None:
            self.references.drop(now)
            self._stop_serving(now, "its publish timed out")
        elif verb.name == "hold":
            self.references.disowned = True
        self._fail(Timeout(f"{verb.what} timed out: {reason}"))

    def _taken_back(self, now: float, interrupted: bool) -> bool:
        """Whether what was being unpublished is still published."""
        if interrupted and self.references.restore(now):
            return True
        return self.references.expire(now)

    def _cut_close(self, now: float) -> None:
        """The close has lasted as long as it may."""
        self.references.cut_off(now)
        self.pump(now)
        self.served.end()
        if self._running.is_a("close"):
            self._end_close(now)

    def _give_slot_back(self, now: float) -> None:
        """The handle was never open."""
        self.claim.release(now)
        self._closing.over()
        self._retaining.set(now, self.slot, None, lambda _now: None)

    # --- serving ---

    def _drain(self, now: float) -> None:
        if self.server is None:
            self._drained(now)
        else:
            self._stop_serving(now, "withdrawn")

    def _drained(self, now: float) -> None:
        if self._running.is_a("unpublish"):
            self._done(self.lost)
        elif self._running.is_a("close"):
            self._closing.through(Part.READERS)
            self._look_closed(now)

    def _stop_serving(self, now: float, reason: str) -> None:
        if self.server is not None:
            self.served.stop(now, reason)
            self.pump(now)

    def _retracted(self, now: float) -> None:
        """What is served is bad: it stays here, but nobody reads it any more."""
        self._stop_serving(now, "it was retracted")

    # --- what the machines decided ---

    def pump(self, now: float) -> None:
        """Take what the machines put out; events that concern the verb end it here."""
        self.references.withdrawal.look_at_digests(now)
        read = self.server is not None and self.server.readers()
        self._retraction.serve(now, self.server.publication if self.server and read else None)
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
        self.part.election.established(event.counter)
        if self._running.is_a("open"):
            self._retaining.set(now, self.slot, self._retain, self._opened)

    def _opened(self, _now: float) -> None:
        if self._running.is_a("open"):
            self._done(None)

    def _on_slot_lost(self, now: float, event: SlotLost) -> None:
        who = self._liveness.name(event.rival)
        self._lost = SlotTaken(
            f"{self.slot} can't be held: {who} has it ({event.reason}). Open another slot, or "
            "another replica"
        )
        self.part.stop(now)
        if not self._running.is_a("unpublish"):
            self._fail(self._lost)

    def _on_claims_read(self, now: float, event: GroupClaimsRead) -> None:
        # That we were replaced comes before whatever else the election read there.
        self.claim.learn(now, event.registers)
        for item in self.claim.outbox.drain():
            self._take(now, item)

    def _on_formed(self, now: float, event: GenerationFormed) -> None:
        self.part.formed(now, event.record)
        self._numbering.next_generation()
        self.references.reissue(now, event.record.generation)
        if self.part.notices.pending is not None and self._running.needs_its_generation:
            self._fail_with_notice()
        self._running.go(now)

    def _on_broken(self, now: float, event: GenerationBroken) -> None:
        self.part.broke(now, event)
        if (
            self._running.is_a("publish")
            and self.references.held is None
            and self.part.notices.pending is not None
        ):
            # Refused, as a higher generation exists.
            self._fail_with_notice()

    def _on_answered(self, now: float, event: CallAnswered) -> None:
        if self.part.calls.generation is not None and self._running.is_a("ask"):
            decision = event.decision
            self.part.keep_answer(event)
            self._done(Answer(event.call, decision.publication, decision.num_shards))

    def _on_call_failed(self, now: float, event: CallFailed) -> None:
        self.part.call_failed(event)
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
        if self.part.notices.pending is not None:
            self._fail_with_notice()
        else:
            self.part.election.doubt(now)

    def _conflict(self, publication: Publication, why: str) -> None:
        self._fail(
            VersionConflict(
                f"can't publish {publication}: {why}. Publish a higher version, "
                "or pass rewind=True to begin a new epoch"
            )
        )

    def _on_hidden(self, now: float, event: Hidden) -> None:
        self._numbering.withdrawn(event.publication, was_whole=event.was_whole)
        self.lost = event.lost
        self.outbox.emit(StopDigests(self.slot, event.publication))
        self._drain(now)

    def _on_unkept(self, now: float, event: Unkept) -> None:
        whom = ", ".join(event.retained)
        self._fail(
            RetentionLost(
                f"can't give up {event.publication}: it is kept for {whom}, and {event.why}. It is "
                "still published. Raise offload_limit, or pass force=True to lose it"
            )
        )

    def _on_aborted(self, now: float, event: Aborted) -> None:
        self.outbox.emit(StopDigests(self.slot, event.publication))
        self.outbox.emit(PublicationLost(self.slot, event.publication))
        self._stop_serving(now, "aborted")

    def _on_drained(self, now: float, event: Drained) -> None:
        self.served.drained()
        self._drained(now)

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
        Unkept: _on_unkept,
        Aborted: _on_aborted,
        Drained: _on_drained,
    }

    # --- messages, deaths, time ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, (SlotChallenge, SlotAnswer)):
            self.claim.receive(now, sender, message)
        elif isinstance(message, ReserveAsk):
            self._on_reserve_ask(now, sender, message)
        elif isinstance(message, (KeepAsk, KeepAnswer, ReserveAnswer)):
            self.references.receive(now, sender, message)
        elif isinstance(message, FOR_GROUP):
            self.part.receive(now, sender, message)
        elif self.server is not None:
            self.server.receive(now, sender, message)
        self.pump(now)

    def _on_reserve_ask(self, now: float, sender: PeerId, ask: ReserveAsk) -> None:
        """Only from the member that it says, of the newest generation (G7).

        It may be broken here already: when a whole replica closes, one of its shards is first.
        """
        record, shard = self.part.election.record, ask.sender_shard
        if record is None or ask.generation != record.generation or shard >= len(record.members):
            return
        if record.members[shard].peer == sender:
            needed = self.references.bytes_for_copy(ask.publication)
            # Where a copy would be of no use, another peer is asked to take one.
            useless = self._spot or self._custody.leaving
            self._reserve_member.receive(now, sender, ask, 0 if useless else needed)

    def peer_gone(self, now: float, peer: PeerId) -> None:
        """Membership declared the peer dead, or it left."""
        self.claim.peer_gone(now, peer)
        self.part.election.peer_gone(now, peer)
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
        self.part.resolver.tick(now)
        self._retraction.tick(now)
        self.pump(now)
        verb = self._running.verb
        if verb is not None and now >= verb.deadline:
            self._expire(now)
            self.pump(now)
            return
        if self._running.explains(now):
            self._explanation.look(now)
        if self._running.looks(now, self._group.look_interval):
            self.part.election.look(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            *(machine.next_wakeup() for machine in self._machines()),
            self.part.resolver.next_wakeup(),
            self._retraction.next_wakeup(),
            self._running.next_wakeup(),
        )

    def _machines(self) -> list[Machine | References]:
        part = self.part
        always = (self.claim, part.election, part.calls, self.references)
        at_times = (part.leader, self.server)
        return [*always, *(machine for machine in at_times if machine is not None)]
