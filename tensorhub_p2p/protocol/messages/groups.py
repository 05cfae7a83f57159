"""Slots, generations and group calls: what a group's members say (the room groups/)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages.message import Count, Message, Short
from tensorhub_p2p.protocol.messages.records import GenerationRecord


class SlotChallenge(Message, frozen=True):
    """I claim your slot with this counter (0: I have none yet): do you still hold it?"""

    slot: Slot
    counter: Count


class SlotAnswer(Message, frozen=True):
    """`holds`: established, or a claim that beats yours. Otherwise I have yielded to you."""

    slot: Slot
    counter: Count
    holds: bool


class Propose(Message, frozen=True):
    """The candidate asks one claimant to accept this member list under this counter."""

    group: Group
    shard: Count
    record: GenerationRecord


class Vote(Message, frozen=True):
    """The claimant's answer; `highest` is the highest counter that it has accepted."""

    group: Group
    shard: Count
    generation: Generation
    accepted: bool
    highest: Count
    floor: tuple[int, int] = (-1, -1)
    """(epoch, version) of the last answer that this claimant got from its group."""
    sender_shard: Count = 0


class Formed(Message, frozen=True):
    """All voted, and the record is on W owners: the generation exists."""

    group: Group
    shard: Count
    record: GenerationRecord


class MemberLeft(Message, frozen=True):
    """The sender is no part of this generation any more: it closed, or the generation broke."""

    group: Group
    shard: Count
    generation: Generation
    sender_shard: Count


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What a call asks. verb "replicate": selector "7", "latest", "latest-2"; "wait_for": ">7"."""

    verb: Short
    selector: Short


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a call: all shards of the group get this publication."""

    publication: Publication
    num_shards: Count


class Source(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Somebody who has all of a shard of what was decided, by this slot."""

    peer: PeerId
    slot: Slot


class GroupMessage(Message, frozen=True):
    """Common head: `shard` is the addressee's, `sender_shard` the sender's."""

    group: Group
    generation: Generation
    shard: Count
    sender_shard: Count
    call: Count


class CallAsk(GroupMessage, frozen=True):
    """A member, in its verb, asks the leader. Also says that it is through with lower calls.

    `attempt` counts the member's verbs in this call: a timeout uses one up. `floor` is the
    member's last answer, which the last election may have missed.
    """

    question: Question
    attempt: Count = 0
    floor: tuple[int, int] = (-1, -1)


class CallWithdraw(GroupMessage, frozen=True):
    """The member's verb ended by its deadline: nobody waits there. May be lost without harm."""


class CallRecord(GroupMessage, frozen=True):
    """Leader to all: record this before anybody is told. `round` rises when it is decided anew."""

    question: Question
    decision: Decision
    round: Count = 0


class CallRecorded(GroupMessage, frozen=True):
    """Member to leader: recorded, what came with this `round`.

    Unless that is below `floor`, the member's own: then it is refused.
    """

    round: Count = 0
    floor: tuple[int, int] = (-1, -1)


class CallDecided(GroupMessage, frozen=True):
    """Recorded by all and pinned: members may act on it.

    `sources` had the member's shard when that was decided. A survivor that is asked names none.
    """

    question: Question
    decision: Decision
    sources: Annotated[tuple[Source, ...], Meta(max_length=8)] = ()


class CallRecall(GroupMessage, frozen=True):
    """The leader is gone: was this call decided where you are? Answered by CallDecided."""


class CallDone(GroupMessage, frozen=True):
    """The member's pull (or wait) of this call succeeded; sent until acknowledged."""


class CallDoneAck(GroupMessage, frozen=True):
    pass


class CallGiveUp(GroupMessage, frozen=True):
    """Member to leader: the decided publication can't be had; sent until `CallVoid` comes."""

    reason: Annotated[str, Meta(max_length=1024)]


class CallVoid(GroupMessage, frozen=True):
    """Leader to all: the call is over; every member fails one verb for it and goes on."""

    reason: Annotated[str, Meta(max_length=1024)]


class CallOverAck(GroupMessage, frozen=True):
    """The member knows that the call is void, or diverged."""


class CallDivergence(GroupMessage, frozen=True):
    """Two members asked different questions in this call."""

    asked: Question
    by: Count
    but: Question
    but_by: Count
