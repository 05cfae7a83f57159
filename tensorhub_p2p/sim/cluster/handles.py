"""One handle of a simulated process: the verbs, step by step as in the real handle.

Rules of this file. It re-states the steps of handle.py and runtime/pulling.py, for tensors
that are tokens and threads that are tasks; what they decide is the node's and the swarm's. A
user is a task that calls the verbs here with `yield from`. Each call, and its end, is noted.

    publish     let go of what a failed pull left, export, announce, take digests
    replicate   ask -> pull -> give up the old version once the new one is within reach
                -> announce a part, if there are several -> ... -> announce all -> finish
                what came but could not be announced is announced by the next try
    unpublish   withdraw, end the exports; `force`: whoever needs it
    retract     have nobody use a version any more
    close       end a pull under way, give the slot back, end the exports
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub_p2p.errors import RetentionLost, StateError, TensorHubError, Timeout
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.groups.selection import newer_than, selector_of
from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.messages import GenerationRecord, Question, Retain
from tensorhub_p2p.protocol.pulls.serving import NOBODY
from tensorhub_p2p.protocol.shards.attempts import Attempts
from tensorhub_p2p.protocol.shards.shard import ShardNode
from tensorhub_p2p.protocol.shards.verbs import Answer
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    Broke,
    Ended,
    GaveUp,
    HandleId,
    Holding,
    InForce,
    LetGo,
    Lost,
    Offered,
    Opened,
    Replicated,
    Withdraws,
    Wrote,
)
from tensorhub_p2p.sim.cluster.memory import Export, Memory, digest_of, endpoints_of
from tensorhub_p2p.sim.cluster.tasks import Steps
from tensorhub_p2p.sim.cluster.transfer import SimPull

if TYPE_CHECKING:
    from tensorhub_p2p.sim.cluster.history import Fact
    from tensorhub_p2p.sim.cluster.peer import SimPeer, Start, VerbCall

DRAIN_LOOK = 0.05
"""Seconds between two looks whether the last read has ended."""


class SimHandle:
    """One shard of one replica, in one process."""

    def __init__(
        self,
        peer: SimPeer,
        slot: Slot,
        num_shards: int,
        memory: Memory,
        *,
        spot: bool = False,
        retain: Retain | None = None,
        elastic: bool = False,
    ) -> None:
        self.peer = peer
        self.slot = slot
        self.num_shards = num_shards
        self.memory = memory
        self.id = HandleId(peer.peer_id, slot, peer.world.number())
        self.holds: Publication | None = None
        """What the tensors are, whole and verified."""
        self.lost: Publication | None = None
        """What was aborted behind the handle's back."""
        self.torn = False
        """Bytes of a version came, and not all of them. What was verified is served on."""
        self.spot = spot
        self.retain = retain
        self.closed = False
        self._elastic = elastic
        self._withdrawal: VerbCall | None = None
        """The last unpublish."""
        self._arrived: Publication | None = None
        """What the failed call's pull brought, whole and verified, but could not announce."""
        self._export: Export | None = None
        self._serves: Publication | None = None
        """What others find here, in whole or in part."""
        patience = peer.config.pull.unavailable_after
        self._attempts = Attempts(patience, alone=num_shards == 1)
        self._answered_by: GenerationRecord | None = None
        """The generation that gave the last answer."""
        self._pull: SimPull | None = None
        self._shard: ShardNode | None = None
        self._seen: GenerationRecord | None = None
        self._broken = False

    # --- verbs ---

    def open(self, timeout: float) -> Steps[None]:
        """Claim the slot. SlotTaken, Timeout; StateError in a process that leaves."""
        if self.peer.leaving:
            raise StateError("the peer was closed")
        self.peer.handles.append(self)
        slot, num_shards = self.slot, self.num_shards
        number = self._began("open", timeout)
        try:
            yield self._verb(
                timeout,
                lambda node, now, number, deadline: node.open(
                    now,
                    number,
                    deadline,
                    slot,
                    num_shards,
                    self.spot,
                    self.retain,
                    self._elastic,
                ),
            )
        except TensorHubError as error:
            self._ended(number, "open", error)
            self._forget()
            raise
        self._ended(number, "open")
        self._note(Opened(self.id, self.spot, self.retain))

    def write(self, content: str) -> None:
        """The user changes the tensors, as he may while nothing is published."""
        self.memory.write(content)
        self._note(Wrote(self.id, content))

    def publish(self, version: int, timeout: float, *, rewind: bool = False) -> Steps[Publication]:
        number = self._began("publish", timeout, version=version)
        self._accept_loss()
        deadline = self.peer.now + timeout
        self._leave_failed_call()
        yield from self._end_exports(deadline)
        export = self.peer.export(self.memory, ChunkSet.full(self.memory.layout.num_chunks))
        layout, endpoints = self.memory.layout, endpoints_of(export)
        self._note(Offered(self.id, version, tuple(self.memory.tokens)))
        try:
            publication: Publication = yield self._verb(
                max(0.01, deadline - self.peer.now),
                lambda node, now, number, deadline: node.publish(
                    now, number, deadline, self.slot, version, rewind, layout, endpoints
                ),
            )
        except TensorHubError as error:
            self._drop()
            self.peer.withdraw(export)
            self._ended(number, "publish", error)
            raise
        self._export, self.holds, self.torn = export, publication, False
        self._serves = publication
        self.peer.digests.start(self, publication)
        self._ended(number, "publish", publication=publication)
        return publication

    def unpublish(self, timeout: float, *, force: bool = False) -> Steps[None]:
        """Afterwards the tensors may be written. RetentionLost, unless `force`; Timeout."""
        number, publication = self._began("unpublish", timeout), self.holds
        try:
            yield from self._unpublish(timeout, force=force)
        except TensorHubError as error:
            self._ended(number, "unpublish", error, publication)
            raise
        self._ended(number, "unpublish", publication=publication)

    def _unpublish(self, timeout: float, *, force: bool = False) -> Steps[None]:
        assert self.holds is not None
        self._note(Withdraws(self.id, self.holds))
        by = self.peer.now + timeout + self._lease
        try:
            self._withdrawal = self._verb(
                timeout,
                lambda node, now, number, deadline: node.unpublish(
                    now, number, deadline, self.slot, force
                ),
            )
            lost: tuple[str, ...] = yield self._withdrawal
            if lost:
                self._note(Lost(self.id, self.holds, "; ".join(lost)))
        except TensorHubError:
            if not self.peer.node.holds(self.slot):
                yield from self._unpublished(by)
            raise
        yield from self._unpublished(by)

    def _unpublished(self, by: float) -> Steps[None]:
        self.holds = None
        yield from self._end_exports(by)

    def retract(self, version: int, timeout: float) -> Steps[None]:
        """Nobody is to use this version any more."""
        number = self._began("retract", timeout, version=version)
        model = self.slot.group.model
        try:
            yield self._verb(
                timeout,
                lambda node, now, number, deadline: node.retract(
                    now, number, deadline, model, version
                ),
            )
        except TensorHubError as error:
            self._ended(number, "retract", error)
            raise
        self._ended(number, "retract")

    def replicate(self, version: int | str, timeout: float) -> Steps[Publication]:
        """Bring the tensors to a version, which is served from then on."""
        question = Question("replicate", selector_of(version))
        number = self._began("replicate", timeout, question=question)
        deadline = self.peer.now + timeout
        self._accept_loss()
        try:
            answer = yield from self._ask(number, question, timeout)
            record = self._answered_by
            if self.holds != answer.publication and self._has_arrived(answer):
                assert self._export is not None
                left = max(0.01, deadline - self.peer.now)
                yield self.announce(answer, self._export, left, complete=True)
                self.holds, self._arrived = answer.publication, None
                self._attempts.succeed()
            elif self.holds != answer.publication:
                yield from self._replicate(answer, deadline)
            self.torn = False
            self._finish(answer)
        except TensorHubError as error:
            self._ended(number, "replicate", error)
            raise
        tokens = tuple(self.memory.tokens)
        publication = answer.publication
        self._note(Replicated(self.id, question, publication, record, answer.call, tokens))
        self._ended(number, "replicate", publication=publication)
        return publication

    def _replicate(self, answer: Answer, deadline: float) -> Steps[None]:
        began = self.peer.now
        pull = self._pull = SimPull(self, answer, max(began + 0.01, deadline))
        try:
            yield from pull.run()
            assert pull.export is not None
            left = max(0.01, deadline - self.peer.now)
            announced = self.announce(answer, pull.export, left, complete=True)
            untold = [(chunk, digest, NOBODY) for chunk, digest in pull.untold.items()]
            self.peer.node.verified(self.peer.now, self.slot, answer.publication, untold)
            self.peer.pump()
            yield announced
        except TensorHubError as error:
            self._pull_failed(pull, answer, error, self.peer.now - began)
            raise
        finally:
            self._pull = None
        self._export, self.holds = pull.export, answer.publication
        self._attempts.succeed()

    def _has_arrived(self, answer: Answer) -> bool:
        """All of it came with the try before, which could not tell the others, and is intact."""
        if self._export is None or self._arrived != answer.publication:
            return False
        server = self.peer.node.shards[self.slot].server
        return server is not None and all(
            server.manifest.get(chunk) == digest_of(token)
            for chunk, token in enumerate(self.memory.tokens)
        )

    def announce_part(self, answer: Answer, export: Export, timeout: float) -> VerbCall | None:
        """Others find what there is of it."""
        return self.announce(answer, export, timeout, complete=False)

    def announce(self, answer: Answer, export: Export, timeout: float, complete: bool) -> VerbCall:
        """Tell what a pull brings, or brought: others find it here from now on."""
        self._serves = answer.publication
        self._note(Holding(self.id, answer.publication, complete))
        layout, endpoints = self.memory.layout, endpoints_of(export)
        return self._verb(
            timeout,
            lambda node, now, number, deadline: node.hold(
                now, number, deadline, self.slot, answer, layout, endpoints, complete
            ),
        )

    def give_up_old(self, timeout: float) -> Steps[None]:
        """The new version is within reach."""
        if self.holds is not None:
            yield from self._unpublish(timeout)
        else:
            yield from self._end_exports(self.peer.now + timeout)

    def tear(self) -> None:
        self.torn = True

    def keep_old(self) -> None:
        """The pull failed meanwhile."""
        if self._withdrawal is not None:
            self.peer.node.interrupt(self.peer.now, self.slot, self._withdrawal.number)
            self.peer.pump()

    def wait_for(self, newer: int, timeout: float) -> Steps[int]:
        question = Question("wait_for", newer_than(newer) if newer >= 0 else "latest")
        number = self._began("wait_for", timeout, question=question)
        try:
            answer = yield from self._ask(number, question, timeout)
            self._finish(answer)
        except TensorHubError as error:
            self._ended(number, "wait_for", error)
            raise
        self._ended(number, "wait_for", publication=answer.publication)
        return answer.publication.version

    def close(self, timeout: float) -> Steps[None]:
        """Give the slot back; a verb under way ends first, with an error.

        RetentionLost: it is closed all the same, and what was to be kept is gone.
        """
        if self.closed:
            return
        self.closed = True
        number = self._began("close", timeout)
        if self._pull is not None:
            self._pull.put(None)
        if self.holds is not None:
            self._note(Withdraws(self.id, self.holds))
        error: RetentionLost | None = None
        try:
            yield self._verb(
                timeout,
                lambda node, now, number, deadline: node.close(now, number, deadline, self.slot),
            )
        except RetentionLost as lost:
            error = lost
            if self._serves is not None:
                self._note(Lost(self.id, self._serves, str(lost)))
        yield from self._end_exports(self.peer.now + 1.0)
        self.holds = None
        self._ended(number, "close", error)
        self._forget()
        if error is not None:
            raise error

    # --- how a pull fails ---

    def _pull_failed(
        self, pull: SimPull, answer: Answer, error: TensorHubError, lasted: float
    ) -> None:
        self._export = pull.export or self._export
        self._arrived = answer.publication if pull.complete else None
        gives_up = self._attempts.fail(
            answer,
            moved=pull.moved,
            lasted=lasted,
            quiet=min(lasted, self.peer.now - pull.moved_at),
            timed_out=isinstance(error, Timeout),
            unavailable=pull.unavailable,
        )
        if gives_up:
            self._give_up(answer, str(error))

    def _leave_failed_call(self) -> None:
        """It isn't asked again."""
        failed = self._attempts.leave()
        if failed is not None:
            self._give_up(failed, "it did not ask again")

    def _give_up(self, answer: Answer, reason: str) -> None:
        if self._answered_by is not None:
            self._note(GaveUp(self.id, self._answered_by.generation, answer.call))
        self.peer.node.give_up(self.peer.now, self.slot, answer.call, reason)
        self.peer.pump()

    # --- small parts ---

    def _ask(self, number: int, question: Question, timeout: float) -> Steps[Answer]:
        answer: Answer = yield self._verb(
            timeout,
            lambda node, now, number, deadline: node.ask(
                now, number, deadline, self.slot, question
            ),
        )
        assert self._shard is not None
        answered = self._shard.part.answered
        self._answered_by = answered[0] if answered is not None else None
        fact = Answered(
            self.id,
            number,
            question,
            answer.publication,
            answer.num_shards,
            self._answered_by,
            answer.call,
        )
        self._note(fact)
        return answer

    def _finish(self, answer: Answer) -> None:
        error = self.peer.node.finish(self.peer.now, self.slot, answer.call)
        self.peer.pump()
        if error is not None:
            raise error

    def _accept_loss(self) -> None:
        if self.lost is not None and self.lost == self.holds:
            self._note(Lost(self.id, self.lost, "nobody finds it here any more"))
            self.holds = None
            self._close_export()

    @property
    def _lease(self) -> float:
        return self.peer.config.pull.lease_seconds

    def _end_exports(self, by: float) -> Steps[None]:
        """On return nobody reads these tensors, but for one-sided reads under way."""
        if self._export is not None and self.torn:
            self._drop()
        export = self._close_export()
        if export is None:
            return
        by = min(by, self.peer.now + self._lease)
        while export.reads and self.peer.now < by and not self.peer.world.reads.one_sided:
            yield self.peer.sleep(DRAIN_LOOK)

    def _close_export(self) -> Export | None:
        """No read begins any more."""
        export, self._export = self._export, None
        if export is not None and self._serves is not None:
            self.peer.withdraw(export)
            self._note(LetGo(self.id, self._serves))
        self._serves = None
        return export

    def _drop(self) -> None:
        self.peer.node.drop(self.peer.now, self.slot)
        self.peer.pump()

    def _verb(self, timeout: float, start: Start) -> VerbCall:
        call = self.peer.verb(timeout, start)
        self._shard = self.peer.node.shards.get(self.slot, self._shard)
        return call

    def _forget(self) -> None:
        if self in self.peer.handles:
            self.peer.handles.remove(self)

    @property
    def serves(self) -> Publication | None:
        """What may be read of it by others, in whole or in part."""
        coming = self._pull.export if self._pull is not None else None
        return self._serves if self._export is not None or coming is not None else None

    def look(self) -> None:
        """Note what became of the generation, as a user can't see it but must be told."""
        if self._shard is None:
            return
        election = self._shard.part.election
        record = election.record
        if record is not None and record is not self._seen:
            if self._seen is not None and not self._broken:
                self._note(Broke(self.id, self._seen))
            self._seen, self._broken = record, False
            self._note(InForce(self.id, record))
        if record is not None and election.broken and not self._broken:
            self._broken = True
            self._note(Broke(self.id, record))

    def _began(
        self, verb: str, timeout: float, version: int = -1, question: Question | None = None
    ) -> int:
        number = self.peer.world.number()
        deadline = self.peer.now + timeout
        self._note(Began(self.id, number, verb, deadline, version, question))
        return number

    def _ended(
        self,
        number: int,
        verb: str,
        error: TensorHubError | None = None,
        publication: Publication | None = None,
    ) -> None:
        self._note(Ended(self.id, number, verb, error, publication))

    def _note(self, fact: Fact) -> None:
        self.peer.world.history.note(fact)
