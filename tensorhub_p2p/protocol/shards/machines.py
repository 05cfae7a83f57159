"""The machines of one handle, and what several of them need of each other.

Rules of this file. `Machines` wires them, keeps the little that none of them owns, and ends the
verb under way. What an event of theirs means is outcomes.py's, a deadline deadlines.py's, the end
of the handle closing.py's; all three work on a `Machines`. The verbs are shard.py's, which adds
them.
"""

from __future__ import annotations

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.errors import SlotTaken, TensorHubError, VersionConflict
from tensorhub_p2p.protocol.groups.group_part import GroupPart
from tensorhub_p2p.protocol.groups.slots import SlotClaimer
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.machine import Machine, Outbox
from tensorhub_p2p.protocol.messages import GenerationRecord, Retain
from tensorhub_p2p.protocol.pulls.served import Served
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.granting import ReserveMember
from tensorhub_p2p.protocol.retention.retaining import Retaining
from tensorhub_p2p.protocol.shards import closing, outcomes
from tensorhub_p2p.protocol.shards.explaining import Explanation
from tensorhub_p2p.protocol.shards.numbering import Numbering
from tensorhub_p2p.protocol.shards.publishing import References
from tensorhub_p2p.protocol.shards.retracting import RetractionWatch
from tensorhub_p2p.protocol.shards.running_verb import RunningVerb, Verb
from tensorhub_p2p.protocol.shards.withdrawing import Surroundings


class Machines:
    """All machines of one handle."""

    def __init__(
        self,
        slot: Slot,
        num_shards: int,
        custody: Custody,
        retaining: Retaining,
        group: GroupConfig,
        uploads: UploadSlots,
        *,
        spot: bool = False,
        elastic: bool = False,
    ) -> None:
        me, records, liveness = custody.me, custody.records, custody.liveness
        self.me = me
        self.slot = slot
        self.num_shards = num_shards
        self.spot, self.elastic = spot, elastic
        self.custody, self.retaining, self.liveness = custody, retaining, liveness
        self.group_config, self.pull_config = group, uploads.config
        self.outbox = Outbox()
        self.claim = SlotClaimer(me, slot, num_shards, records, liveness, group)
        self.part = GroupPart(me, slot, num_shards, records, liveness, group, self.outbox)
        self.served = Served(slot, uploads)
        around = Surroundings(lambda: self.server, self.generation, spot)
        self.references = References(slot, group, custody, around)
        self.reserve_member = ReserveMember(slot, custody, self.outbox)
        self.retraction = RetractionWatch(
            slot.group.model,
            records,
            custody.config.look_interval,
            self._retracted,
            self.references.comparing.saw,
        )
        self.running = RunningVerb(slot, self.outbox, self._verb_ended)
        self.numbering = Numbering(slot.group.replica)
        self.explanation = Explanation(
            slot.group.model, self.claim, self.part, self.references, records, liveness
        )
        self.closing = closing.Closing(slot, custody, retaining, spot=spot)
        self._keep_books()

    def _keep_books(self) -> None:
        """What none of the machines owns."""
        self.closed = False
        """Given back, or never opened: the peer may open the slot anew."""
        self.retain: Retain | None = None
        """What the handle wants kept, from when it is open."""
        self.lost: tuple[str, ...] = ()
        """For whom the last withdrawal gave up what it should have kept."""
        self.held_up = ""
        """What the last unpublish was still waiting for when its time was over."""
        self.last_record: GenerationRecord | None = None
        """Of the group, when the handle was closed."""
        self.replaced: SlotTaken | None = None
        """For every verb, from when the slot was lost."""
        self.conflict: VersionConflict | None = None
        """For the next verb: what was published has other bytes than its version has."""

    def generation(self) -> GenerationRecord | None:
        """The group's generation in force, or when the handle was closed."""
        election = self.part.election
        return self.last_record if self.closed else election.record if election.formed else None

    def all(self) -> list[Machine | References]:
        """Those that have a face of four parts, at present."""
        part = self.part
        always = (self.claim, part.election, part.calls, self.references)
        at_times = (part.leader, self.server)
        return [*always, *(machine for machine in at_times if machine is not None)]

    def pump(self, now: float) -> None:
        """Take what the machines put out; events that concern the verb end it here."""
        self.references.look_at_digests(now)
        server = self.server
        if server is not None:
            self.part.calls.pulling(now, len(server.have))
        read = server.publication if server is not None and server.readers() else None
        self.retraction.serve(now, read)
        while items := [item for machine in self.all() for item in machine.outbox.drain()]:
            for item in items:
                outcomes.take(self, now, item)

    # --- how the verb under way ends ---

    def done(self, result: object) -> None:
        self.running.done(result)

    def fail(self, error: TensorHubError) -> None:
        self.running.fail(error)

    def fail_with_notice(self) -> None:
        notice = self.part.notices.take()
        assert notice is not None
        self.fail(notice)

    def fail_with_conflict(self) -> None:
        conflict = self.take_conflict()
        assert conflict is not None
        self.fail(conflict)

    def take_conflict(self) -> VersionConflict | None:
        """What became of the last publication, if it was contradicted and no verb told so yet."""
        error, self.conflict = self.conflict, None
        return error

    def _verb_ended(self, verb: Verb, failed: bool) -> None:
        self.closed = self.closed or (failed and verb.name == "open")
        self.part.election.rest()
        self.explanation.stop()

    # --- serving ---

    @property
    def server(self) -> ShardServer | None:
        """What others read from, if anything."""
        return self.served.server

    def stop_serving(self, now: float, reason: str) -> None:
        if self.server is not None:
            self.served.stop(now, reason)
            self.pump(now)

    def let_readers_go(self, now: float) -> None:
        """The last step of an unpublish, and a part of a close."""
        if self.server is None:
            self.readers_gone(now)
        else:
            self.stop_serving(now, "withdrawn")

    def readers_gone(self, now: float) -> None:
        if self.running.is_a("unpublish"):
            self.done(self.lost)
        elif self.running.is_a("close"):
            closing.readers_gone(self, now)

    def _retracted(self, now: float) -> None:
        """What is served is bad: it stays here, but nobody reads it any more."""
        self.stop_serving(now, "it was retracted")
