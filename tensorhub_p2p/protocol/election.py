"""Generations: all claimants of a group's slots agree on one member list and a leader.

Rules of this file. One `Election` belongs to one handle whose slot claim is established.
It knows the group's key, the claims there, and the votes; it knows nothing of calls
beyond the floor that it carries from the old generation to the new one.

Theory of operation. A group can work only with all its shards, so a quorum is everyone:

    IDLE        nothing wanted: the generation in force (if any) stays
    GATHERING   read the claims and the highest generation from R owners. A generation
                that lists exactly the claims in force is adopted; with all slots claimed
                the candidate goes on; else wait for the key to change, and read again
    PROPOSING   the candidate (claimant of the lowest slot at once, others after a back-off)
                sends its member list under a counter above all it read, and needs all votes
    WRITING     all voted: write the record to W owners before anybody acts on it
    VOTED       accepted somebody's proposal; waits for `Formed`, or reads again in time
    FORMED      a generation is in force

A claimant accepts only counters above any that it ever accepted, and only a list that
names its own claim: so no counter has two accepted generations, and a claimant that was
replaced votes for nothing. `Formed` says that the record is on W owners; a member that
misses it finds the record there. A declared death of a member breaks the generation:
it stays the last one (for its floor), and the next one must be elected.

A replica of one shard needs no election: its claim's counter is the generation's.
"""

from __future__ import annotations

from enum import Enum

import mmh3
import msgspec

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.identity import Generation, Member, PeerId, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.messages import (
    Formed,
    GenerationRecord,
    MemberLeft,
    Message,
    Propose,
    SlotClaim,
    VersionRecord,
    Vote,
    WholeMark,
)
from tensorhub_p2p.protocol.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    group_key,
    values,
    versions_key,
)

Floor = tuple[int, int]
NO_FLOOR: Floor = (-1, -1)


class ElectionState(Enum):
    IDLE = "no generation wanted"
    GATHERING = "waiting until every shard of the replica is claimed"
    PROPOSING = "collecting votes"
    WRITING = "writing the generation"
    VOTED = "waiting for the candidate to form the generation"
    FORMED = "formed"


class GenerationFormed(Event):
    def __init__(self, record: GenerationRecord) -> None:
        self.record = record


class GenerationBroken(Event):
    """A member was declared dead (or left)."""

    def __init__(self, record: GenerationRecord, member: Member) -> None:
        self.record = record
        self.member = member


class GroupClaimsRead(Event):
    """The group's key was read: whoever holds our slot now is in there."""

    def __init__(self, registers: Registers) -> None:
        self.registers = registers


def generation_of(counter: int, members: tuple[Member, ...]) -> Generation:
    """(counter, hash of the member ids): equal only for equal member lists."""
    ids = ",".join(f"{m.shard}:{m.peer}:{m.claim}" for m in members)
    return Generation(counter, mmh3.hash64(ids, signed=False)[0] >> 1)


def highest_epoch(registers: Registers) -> int:
    """The highest epoch that the versions key speaks of."""
    records = (record.publication.epoch for _, record in values(registers, VersionRecord))
    marks = (mark.publication.epoch for _, mark in values(registers, WholeMark))
    return max(*records, *marks, 0, 0)


class Election:
    """Forms generations for one handle."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        num_shards: int,
        records: Records,
        liveness: Liveness,
        config: GroupConfig,
    ) -> None:
        self.me = me
        self.slot = slot
        self.num_shards = num_shards
        self.state = ElectionState.IDLE
        self.record: GenerationRecord | None = None
        """The last generation in force here; `broken` says that it no longer is."""
        self.broken = False
        self.floor = NO_FLOOR
        """(epoch, version) of the last answer of the group; written by whoever runs the calls."""
        self.outbox = Outbox()
        self._claim = 0
        self._accepted = 0
        self._proposal: GenerationRecord | None = None
        self._votes: dict[int, Floor] = {}
        self._missing: tuple[int, ...] = ()
        self._stand_at = 0.0
        self._retry_at: float | None = None
        self._watch: int | None = None
        self._records = records
        self._liveness = liveness
        self._config = config
        self._key = group_key(slot.group)

    @property
    def formed(self) -> bool:
        """A generation is in force, as far as this member knows."""
        return self.record is not None and not self.broken

    @property
    def is_leader(self) -> bool:
        return self.record is not None and self.record.leader == self.slot.shard

    # --- forming a generation ---

    def established(self, counter: int) -> None:
        """The slot claim is established under this counter."""
        self._claim = counter

    def want(self, now: float) -> None:
        """Somebody's verb needs a generation."""
        if self.formed or self.state not in {ElectionState.IDLE, ElectionState.FORMED}:
            return
        # The lowest slot's claimant stands first; the others only if it does not.
        self._stand_at = now + self.slot.shard * self._config.election_backoff
        if self.num_shards > 1 and self._watch is None:
            self._watch = self._records.watch(now, self._key, self._changed)
        self._gather(now)

    def _changed(self, now: float) -> None:
        if self.state is ElectionState.GATHERING:
            self._gather(now)
        elif self.formed:
            self._records.read(now, self._key, self._check_members)

    def _check_members(self, now: float, registers: Registers) -> None:
        """A member whose slot somebody else holds by now is gone, whatever we heard of it."""
        self.outbox.emit(GroupClaimsRead(registers))
        if self.record is None or self.broken:
            return
        for member in self._members_in(registers):
            ours = self.record.members[member.shard]
            if member.peer != ours.peer and member.claim > ours.claim:
                self._break(ours)
                return

    def _gather(self, now: float) -> None:
        self.state = ElectionState.GATHERING
        self._retry_at = now + self._config.retry_interval
        if self.num_shards == 1:
            members = (Member(self.slot.shard, self.me, self._claim),)
            self._read_epoch(now, generation_of(self._claim, members), members)
        else:
            self._records.read(now, self._key, self._on_claims)

    def _on_claims(self, now: float, registers: Registers) -> None:
        self.outbox.emit(GroupClaimsRead(registers))
        if self.state is not ElectionState.GATHERING:
            return
        members = self._members_in(registers)
        known = [record for _, record in values(registers, GenerationRecord)]
        newest = max(known, key=lambda record: record.generation, default=None)
        self._missing = tuple(set(range(self.num_shards)) - {m.shard for m in members})
        if self._missing or Member(self.slot.shard, self.me, self._claim) not in members:
            return
        if newest is not None and newest.members == members and self._supersedes(newest):
            self._form(now, newest)
        elif now >= self._stand_at:
            highest = newest.generation.counter if newest else 0
            counter = max(highest, self._accepted) + 1
            self._read_epoch(now, generation_of(counter, members), members)

    def _members_in(self, registers: Registers) -> tuple[Member, ...]:
        """One member a slot: the established claim with the highest counter."""
        best: dict[int, Member] = {}
        for register, claim in values(registers, SlotClaim):
            if not claim.established or claim.num_shards != self.num_shards:
                continue
            if self._liveness.is_gone(register.writer):
                continue
            member = Member(claim.shard, register.writer, claim.counter)
            rival = best.get(claim.shard)
            if rival is None or (member.claim, rival.peer) > (rival.claim, member.peer):
                best[claim.shard] = member
        return tuple(sorted(best.values()))

    def _supersedes(self, record: GenerationRecord) -> bool:
        """Above the last one in force here: also where that one broke, its end is final."""
        return self.record is None or record.generation > self.record.generation

    def _read_epoch(self, now: float, generation: Generation, members: tuple[Member, ...]) -> None:
        def then(now: float, registers: Registers) -> None:
            if self.state is not ElectionState.GATHERING:
                return
            epoch = highest_epoch(registers)
            record = GenerationRecord(generation, epoch, members, self.slot.shard, self.floor)
            if self.num_shards == 1:
                self._form(now, record)
            elif generation.counter > self._accepted:
                self._propose(now, record)

        self._records.read(now, versions_key(self.slot.group.model), then)

    # --- the candidate ---

    def _propose(self, now: float, record: GenerationRecord) -> None:
        self.state = ElectionState.PROPOSING
        self._accepted = record.generation.counter
        self._proposal = record
        self._votes = {self.slot.shard: self.floor}
        self._ask_votes(now, record)

    def _ask_votes(self, now: float, record: GenerationRecord) -> None:
        for member in record.members:
            if member.shard not in self._votes:
                self.outbox.send(member.peer, Propose(self.slot.group, member.shard, record))
        self._retry_at = now + self._config.retry_interval

    def _on_vote(self, now: float, sender: PeerId, message: Vote) -> None:
        record = self._proposal
        if self.state is not ElectionState.PROPOSING or record is None:
            return
        if message.generation != record.generation:
            return
        voters = [m.shard for m in record.members if m.peer == sender]
        if message.sender_shard not in voters:
            return
        if not message.accepted:
            # Stand again above what the claimant accepted, unless that one forms first.
            self._accepted = max(self._accepted, message.highest)
            self._back_off(now)
            return
        self._votes[message.sender_shard] = message.floor
        if len(self._votes) == self.num_shards:
            self._write(now, msgspec.structs.replace(record, floor=max(self._votes.values())))

    def _write(self, now: float, record: GenerationRecord) -> None:
        self.state = ElectionState.WRITING
        self._retry_at = None

        def then(now: float, refused: Refused | None) -> None:
            if refused is not None:
                self._back_off(now)
                return
            for member in record.members:
                if member.peer != self.me or member.shard != self.slot.shard:
                    self.outbox.send(member.peer, Formed(self.slot.group, member.shard, record))
            if self.state is ElectionState.WRITING and self._supersedes(record):
                self._form(now, record)

        self._records.write(now, self._key, "generation", record.generation.counter, record, then)

    def _back_off(self, now: float) -> None:
        self._stand_at = now + (1 + self.slot.shard) * self._config.election_backoff
        self._gather(now)

    # --- the voter ---

    def _on_propose(self, now: float, sender: PeerId, message: Propose) -> None:
        record = message.record
        mine = Member(self.slot.shard, self.me, self._claim)
        fresh = record.generation.counter > self._accepted
        again = record == self._proposal
        accepted = self._claim > 0 and mine in record.members and (fresh or again)
        if accepted and fresh:
            self._accepted = record.generation.counter
            self._proposal = record
            if self.state is not ElectionState.FORMED or self.broken:
                self.state = ElectionState.VOTED
                # Long enough for the record's write and `Formed`; then we look for ourselves.
                self._retry_at = now + 4 * self._config.retry_interval
        vote = Vote(
            self.slot.group,
            record.leader,
            record.generation,
            accepted,
            self._accepted,
            self.floor,
            self.slot.shard,
        )
        self.outbox.send(sender, vote)

    def _on_formed(self, now: float, message: Formed) -> None:
        record = message.record
        mine = Member(self.slot.shard, self.me, self._claim)
        if mine in record.members and self._supersedes(record):
            self._form(now, record)

    def _form(self, now: float, record: GenerationRecord) -> None:
        self.state = ElectionState.FORMED
        self._retry_at = None
        self._accepted = max(self._accepted, record.generation.counter)
        self.record = record
        self.broken = False
        self.floor = max(self.floor, record.floor)
        self.outbox.emit(GenerationFormed(record))
        for member in record.members:
            if self._liveness.is_gone(member.peer):
                self.peer_gone(now, member.peer)
                return

    # --- messages, deaths, time ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, Propose):
            self._on_propose(now, sender, message)
        elif isinstance(message, Vote):
            self._on_vote(now, sender, message)
        elif isinstance(message, Formed):
            self._on_formed(now, message)
        elif isinstance(message, MemberLeft):
            self._on_left(sender, message)

    def _on_left(self, sender: PeerId, message: MemberLeft) -> None:
        if self.record is None or self.broken or message.generation != self.record.generation:
            return
        for member in self.record.members:
            if member.peer == sender and member.shard == message.sender_shard:
                self._break(member)
                return

    def peer_gone(self, now: float, peer: PeerId) -> None:
        """Declared dead or left. Acting on it is final, also if the death is refuted later."""
        if self.state in {ElectionState.PROPOSING, ElectionState.VOTED} and self._proposal:
            if any(member.peer == peer for member in self._proposal.members):
                self._gather(now)
        if self.record is None or self.broken:
            return
        for member in self.record.members:
            if member.peer == peer:
                self._break(member)
                return

    def _break(self, member: Member) -> None:
        assert self.record is not None
        self.broken = True
        if self.state is ElectionState.FORMED:
            self.state = ElectionState.IDLE
        self.outbox.emit(GenerationBroken(self.record, member))

    def tick(self, now: float) -> None:
        if self._retry_at is None or now < self._retry_at:
            return
        if self.state is ElectionState.PROPOSING and self._proposal is not None:
            self._ask_votes(now, self._proposal)
        else:
            self._gather(now)

    def next_wakeup(self) -> float | None:
        return self._retry_at

    def stop(self, now: float) -> None:
        """The handle closes: tell the members, and vote for nothing any more."""
        if self.record is not None and self.formed:
            for member in self.record.members:
                if member.shard != self.slot.shard:
                    left = MemberLeft(
                        self.slot.group, member.shard, self.record.generation, self.slot.shard
                    )
                    self.outbox.send(member.peer, left)
        self._claim = 0
        self._retry_at = None
        self.state = ElectionState.IDLE
        if self._watch is not None:
            self._records.unwatch(now, self._watch)
            self._watch = None

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        what = f"generation of {self.slot.group}: {self.state.value}"
        if self.state is ElectionState.GATHERING and self._missing:
            missing = ", ".join(map(str, sorted(self._missing)))
            return f"{what} (nobody holds shard {missing} of {self.num_shards})"
        if self.state is ElectionState.PROPOSING and self._proposal is not None:
            silent = [m for m in self._proposal.members if m.shard not in self._votes]
            return f"{what} ({', '.join(self._liveness.name(m.peer) for m in silent)} silent)"
        return what
