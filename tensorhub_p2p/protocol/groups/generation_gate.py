"""Which messages of calls a member listens to: those of the generation in force (G7).

Rule of this file. Before anything of a group call is taken in, the gate looks at which
generation it is of and who says so. It answers those that are behind, and knows nothing of
what a call is.

    we take no part in it         the sender counts on a claim that is given up: tell it
    newer than what is in force   we missed `Formed`: read the group's key
    older                         the sender missed it, or it was replaced and finds itself
                                  missing there: `Formed`
    in force                      let in, if the sender is the member that it says; else
                                  dropped
    in force, but broken here     let in; a sender that asks, records or gives up goes on with
                                  what is broken here, as it has not heard of it: tell it
"""

from __future__ import annotations

from tensorhub_p2p.protocol.groups.claims import left
from tensorhub_p2p.protocol.groups.election import Election
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import (
    CallAsk,
    CallGiveUp,
    CallRecord,
    Formed,
    GenerationRecord,
    GroupMessage,
)


class GenerationGate:
    """Stands before the calls of one handle."""

    def __init__(self, slot: Slot, election: Election, outbox: Outbox) -> None:
        self._slot = slot
        self._election = election
        self._outbox = outbox

    def admits(self, now: float, sender: PeerId, message: GroupMessage) -> bool:
        """Only from the member that it says, of the generation in force (G7)."""
        record = self._election.record
        if not self._election.takes_part_in(message.generation):
            self._outbox.send(sender, left(message))
        elif record is None or message.generation > record.generation:
            self._election.look(now)
        elif message.generation < record.generation:
            self._outbox.send(sender, Formed(self._slot.group, message.sender_shard, record))
        elif _is_member(record, sender, message.sender_shard):
            if self._election.broken and isinstance(message, (CallAsk, CallGiveUp, CallRecord)):
                self._outbox.send(sender, left(message))
            return True
        return False


def _is_member(record: GenerationRecord, peer: PeerId, shard: int) -> bool:
    return shard < len(record.members) and record.members[shard].peer == peer
