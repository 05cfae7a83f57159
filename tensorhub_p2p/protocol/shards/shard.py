"""One handle's protocols, put together: claim, group, references, serving.

Rules of this file. A `ShardNode` is what a peer's node and its driver see of a handle: the verbs,
messages, deaths and time. It decides in which order a verb uses the machines (machines.py); what
these decide on the way is outcomes.py's.

    open       claim the slot (slots.py)
    publish    form a generation (election.py), announce the references (publishing.py)
    ask        form a generation, make the group call (group_part.py)
    hold       announce what a pull is bringing, or brought
    unpublish  withdraw the references (withdrawing.py), then drain the readers (serving.py)
    close      the same, and give the slot back; done once W owners know it (closing.py)

One verb at a time (running_verb.py), and each ends by its deadline (deadlines.py). When a
generation ends, or a call of it, one verb fails for it (notices.py). A lost slot is told by every
verb, but for those that give something up: unpublish and close.
"""

from __future__ import annotations

from tensorhub_p2p.errors import StateError, TensorHubError
from tensorhub_p2p.protocol.groups.group_part import FOR_GROUP
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR
from tensorhub_p2p.protocol.groups.slots import SlotState
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.messages import (
    Endpoint,
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
from tensorhub_p2p.protocol.retention.held import Held
from tensorhub_p2p.protocol.shards import closing, deadlines, outcomes
from tensorhub_p2p.protocol.shards.machines import Machines
from tensorhub_p2p.protocol.shards.running_verb import Verb
from tensorhub_p2p.protocol.shards.verbs import Answer, VerbId


class ShardNode(Machines):
    """Everything that one handle decides."""

    # --- verbs ---

    def open(
        self, now: float, number: VerbId, deadline: float, retain: Retain | None = None
    ) -> None:
        """Claim the slot. Done(None), or SlotTaken, or Timeout."""
        if self._begin(Verb(number, "open", deadline, f"slot {self.slot}")):
            self.closing.opened()
            self.retain = retain
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
            publication = self.numbering.propose(record, version, rewind=rewind)
            why = self.numbering.forbids(publication)
            if why:
                outcomes.refuse(self, publication, why)
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
        verb.look_at = now + self.group_config.look_interval
        self.explanation.forget()
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
        if self.replaced is not None:
            self.fail(self.replaced)
            return
        if not self.served.serves(answer.publication):
            self.served.begin(answer.publication, layout, endpoints, origin=False)
        phase = Phase.READY if complete else Phase.PARTIAL
        held = Held(answer.publication, answer.num_shards, layout.num_bytes, phase, True)
        self.references.hold(now, held)

    def finish(self, now: float, call: int) -> TensorHubError | None:
        """The pull of this call succeeded. An error if the group ended the call meanwhile."""
        return self.replaced or self.part.finish(now, call)

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
        self.lost, self.held_up = (), ""
        if held is not None:
            self.references.withdraw(now, force=force)
        elif self.conflict is not None:
            self.fail_with_conflict()
        else:
            self.let_readers_go(now)

    def drop(self, now: float) -> None:
        """What a failed pull left is given up: its references go at once, and its readers."""
        self.part.calls.unfinished = NO_FLOOR
        self.references.drop(now)
        self.stop_serving(now, "its pull failed")
        self.served.end()

    def close(self, now: float, number: VerbId, deadline: float) -> None:
        """Give everything back. Done(None), by the deadline in any case.

        RetentionLost: it is closed too, but somebody wanted kept what it held.
        """
        closing.begin(self, now, number, deadline)

    def interrupt(self, now: float, number: VerbId) -> None:
        """Nobody waits for this verb any more."""
        deadlines.interrupt(self, now, number)

    def interrupt_open(self, now: float) -> None:
        """Give the slot up, if it is still being claimed."""
        verb = self.running.verb
        if verb is not None and verb.name == "open":
            deadlines.interrupt(self, now, verb.number)

    @property
    def is_over(self) -> bool:
        """It is closed, and nothing of it goes on."""
        return self.closed and self.running.verb is None and self.server is None

    # --- how a verb begins ---

    def _begin(self, verb: Verb) -> bool:
        return self.running.begin(verb, closed=self.closed)

    def _in_group(self, now: float, verb: Verb) -> None:
        if not self._begin(verb):
            return
        self.part.calls.unfinished = NO_FLOOR  # whoever goes on has ended its last pull
        if self.replaced is not None:
            self.fail(self.replaced)
        elif self.claim.state is not SlotState.ESTABLISHED:
            self.fail(StateError(f"{self.slot} is not open: {self.claim.state.value}"))
        elif self.conflict is not None:
            self.fail_with_conflict()
        elif self.part.notices.pending is not None:
            self.fail_with_notice()
        elif self.part.election.formed:
            self.running.go(now)
        else:
            self.part.election.want(now)

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
            useless = self.spot or self.custody.leaving
            self.reserve_member.receive(now, sender, ask, 0 if useless else needed)

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
        for machine in self.all():
            machine.tick(now)
        self.part.resolver.tick(now)
        self.retraction.tick(now)
        self.pump(now)
        verb = self.running.verb
        if verb is not None and now >= verb.deadline:
            deadlines.expire(self, now)
            self.pump(now)
            return
        if self.running.explains(now):
            self.explanation.look(now)
        if self.running.looks(now, self.group_config.look_interval):
            self.part.election.look(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            *(machine.next_wakeup() for machine in self.all()),
            self.part.resolver.next_wakeup(),
            self.retraction.next_wakeup(),
            self.running.next_wakeup(),
        )
