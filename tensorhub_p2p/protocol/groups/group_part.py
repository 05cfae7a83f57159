"""One handle's part in its group: its generations, their calls, and what their end means.

Rule of this file. A `GroupPart` wires the machines of a group, election.py, calls.py,
leading.py with resolving.py, notices.py and generation_gate.py, and keeps them in step. It
knows nothing of verbs, of what is published here or of who reads it: shard.py does.

Theory of operation. With each generation that forms, the member's calls begin anew, and if
this slot leads it, so does a leader of calls; the one before stops. The end of a
generation, and of a call, leaves a notice, which one verb fails with. An answer is kept
until the pull that it began is finished, for only then it counts as the group's last one
(the floor): `finish` or `give_up` says how it went, also after its generation ended.
"""

from __future__ import annotations

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.errors import GroupBroken, TensorHubError
from tensorhub_p2p.protocol.directory.records import Liveness, Records
from tensorhub_p2p.protocol.groups.calls import CallAnswered, CallFailed, CallMember
from tensorhub_p2p.protocol.groups.election import Election, GenerationBroken
from tensorhub_p2p.protocol.groups.floors import FloorKeeper
from tensorhub_p2p.protocol.groups.generation_gate import GenerationGate
from tensorhub_p2p.protocol.groups.leading import CallLeader
from tensorhub_p2p.protocol.groups.notices import Notices
from tensorhub_p2p.protocol.groups.resolving import DirectoryResolver
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallDone,
    CallGiveUp,
    CallOverAck,
    CallRecorded,
    CallWithdraw,
    Formed,
    GenerationRecord,
    GroupMessage,
    MemberLeft,
    Propose,
    Vote,
)

TO_LEADER = (CallAsk, CallRecorded, CallDone, CallOverAck, CallWithdraw, CallGiveUp)
"""What members say to the leader; all other group messages are for the member."""
FOR_GROUP = (Propose, Vote, Formed, MemberLeft, GroupMessage)
"""What concerns a group at all: its elections, and its calls."""


class GroupPart:
    """The group's machines of one handle; `outbox` is the handle's."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        num_shards: int,
        records: Records,
        liveness: Liveness,
        config: GroupConfig,
        outbox: Outbox,
    ) -> None:
        self.election = Election(me, slot, num_shards, records, liveness, config)
        self.calls = CallMember(slot, config)
        self.leader: CallLeader | None = None
        self.resolver = DirectoryResolver(slot, records, liveness, config, self.election.doubt)
        self.notices = Notices(slot.group)
        self.answered: tuple[GenerationRecord, Publication] | None = None
        """The last answer to a call, and the generation that gave it, until it is finished."""
        self._slot = slot
        self._config = config
        self._records = records
        self._gate = GenerationGate(slot, self.election, outbox)

    def receive(
        self,
        now: float,
        sender: PeerId,
        message: Propose | Vote | Formed | MemberLeft | GroupMessage,
    ) -> None:
        if isinstance(message, (Propose, Vote, Formed, MemberLeft)):
            self.election.receive(now, sender, message)
        elif not self._gate.admits(now, sender, message):
            return
        elif not isinstance(message, TO_LEADER):
            self.calls.receive(now, sender, message)
        elif self.leader is not None:
            self.leader.receive(now, sender, message)

    # --- generations come and go ---

    def formed(self, now: float, record: GenerationRecord) -> None:
        """A generation formed: whatever went on in the one before has ended."""
        old = self.calls.generation
        self._stop_leading(now)
        if old is not None:
            self.notices.generation_ended(old, f"its next generation {record.generation} formed")
        self.calls.begin(record)
        self.election.floor = self.calls.floor
        self.resolver.generation = record.generation
        if record.leader == self._slot.shard:
            floors = FloorKeeper(self._slot.group, record.generation, self._records, self._config)
            self.leader = CallLeader(self._slot, record, self.resolver, self._config, floors)

    def broke(self, now: float, event: GenerationBroken) -> None:
        self.notices.generation_ended(event.record, event.why)
        self.calls.broke(now, event.why)
        if self.leader is not None:
            self.leader.broke(now)

    def stop(self, now: float) -> None:
        """The handle closes, or lost its slot."""
        self.election.stop(now)
        self._stop_leading(now)
        self.calls.end()

    def _stop_leading(self, now: float) -> None:
        if self.leader is not None:
            self.leader.stop(now)
            self.leader = None

    # --- how a call ends ---

    def keep_answer(self, event: CallAnswered) -> None:
        """Somebody acts on it: `finish` or `give_up` will say how that went."""
        assert self.calls.generation is not None
        self.answered = (self.calls.generation, event.decision.publication)

    def call_failed(self, event: CallFailed) -> None:
        self.notices.call_over(event)
        self.election.floor = self.calls.floor

    def finish(self, now: float, call: int) -> TensorHubError | None:
        """The pull of this call succeeded. An error if the group ended the call meanwhile.

        A generation that broke meanwhile has decided the call all the same: what it decided
        stands, and the next verb is told of its end.
        """
        if self.answered is None:
            return self._take_notice(call)
        (generation, publication), self.answered = self.answered, None
        if generation != self.calls.generation:
            self.calls.finished_late(publication)
        elif not self.calls.succeeded(now, call):
            return self._take_notice(call)
        self.election.floor = self.calls.floor
        return None

    def _take_notice(self, call: int) -> TensorHubError:
        return self.notices.take() or GroupBroken(
            f"call {call} of {self._slot.group} ended meanwhile"
        )

    def give_up(self, now: float, call: int, reason: str) -> None:
        """The publication of this call can't be had: void it for the whole group."""
        if self.answered is not None and self.answered[0] == self.calls.generation:
            self.calls.give_up(now, call, reason)
