"""Reading a group's claims and generations out of registers.

Rules of this file. Pure functions over registers; nothing here sends, waits or remembers.
What is done about what they say is election.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import mmh3

from tensorhub_p2p.protocol.directory.records import Registers, fence_name, values
from tensorhub_p2p.protocol.identity import Generation, Group, Member, PeerId
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    GroupMessage,
    MemberLeft,
    SlotClaim,
    VersionRecord,
    WholeMark,
)


def generation_of(counter: int, members: tuple[Member, ...]) -> Generation:
    """(counter, hash of the member ids): equal only for equal member lists."""
    ids = ",".join(f"{m.shard}:{m.peer}:{m.claim}" for m in members)
    return Generation(counter, mmh3.hash64(ids, signed=False)[0] >> 1)


def members_in(
    registers: Registers, num_shards: int, is_gone: Callable[[PeerId], bool]
) -> tuple[Member, ...]:
    """One member a slot, of the group's key: the highest established claim, unless given up."""
    best: dict[int, tuple[int, PeerId, SlotClaim]] = {}
    for register, claim in values(registers, SlotClaim):
        if claim.established and claim.num_shards == num_shards:
            rival = best.get(claim.shard, (0, register.writer, claim))
            if (claim.counter, rival[1]) >= (rival[0], register.writer):
                best[claim.shard] = (claim.counter, register.writer, claim)
    return tuple(
        Member(shard, peer, counter)
        for shard, (counter, peer, claim) in sorted(best.items())
        if not claim.released and not is_gone(peer)
    )


def newest_generation(registers: Registers) -> GenerationRecord | None:
    """The highest generation on record at the group's key."""
    return max(
        (record for _, record in values(registers, GenerationRecord)),
        key=lambda record: record.generation,
        default=None,
    )


def lost_member(registers: Registers, record: GenerationRecord) -> Member | None:
    """A member of the generation that released its claim, or lost it to a higher one."""
    for register, claim in values(registers, SlotClaim):
        if claim.shard >= len(record.members) or not claim.established:
            continue
        member = record.members[claim.shard]
        given_back = claim.released and register.writer == member.peer
        if claim.counter > member.claim or (given_back and claim.counter == member.claim):
            return member
    return None


def highest_epoch(registers: Registers) -> int:
    """The highest epoch that the versions key speaks of."""
    records = (record.publication.epoch for _, record in values(registers, VersionRecord))
    marks = (mark.publication.epoch for _, mark in values(registers, WholeMark))
    return max(*records, *marks, 0, 0)


def highest_fence(registers: Registers, group: Group) -> int:
    """The highest generation counter of the group that the versions key knows of."""
    return max(
        (
            record.generation.counter
            for register, record in values(registers, GenerationRecord)
            if register.name == fence_name(group)
        ),
        default=0,
    )


def left(message: GroupMessage) -> MemberLeft:
    """The answer to a message for a slot that has no part in its generation (any more)."""
    return MemberLeft(message.group, message.sender_shard, message.generation, message.shard)
