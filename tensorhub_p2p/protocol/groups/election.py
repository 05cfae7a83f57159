"""Generations: all claimants of a group's slots agree on one member list and a leader.

Rules of this file. One `Election` belongs to one handle whose slot claim is established.
It knows the group's key, the claims there (read by claims.py), and the votes; it knows
nothing of calls beyond the floor that it carries from the old generation to the new one.

Theory of operation. A group can work only with all its shards, so a quorum is everyone:

    IDLE        nothing wanted: the last generation (if any) stays what it is
    GATHERING   read the claims: a generation that lists exactly the claims in force is
                adopted; while some shard is claimed by nobody, wait for the key to change.
                With all claimed, a candidate stands: the claimant of the lowest slot at
                once, others after a back-off (candidate.py has what it reads first)
    PROPOSING   the candidate sends its member list under a counter above all that it read
                or ever accepted, and needs all votes; without them it gathers again
    WRITING     all voted: the candidate writes the record to W owners
    VOTED       accepted somebody's proposal; waits for `Formed`, or gathers again in time
    FORMED      a generation is in force

A claimant accepts only counters above any that it ever accepted, and only a list that
names its own claim: so no counter has two accepted generations, and a claimant that was
replaced votes for nothing. `Formed` says that the record is on W owners; a member that
misses it finds the record there.

What wakes a member that waits in GATHERING: a change of the group's key, which it watches (claims,
generations), and the return of a peer that was gone, which counts as one. A death only takes a
claim away, for which nobody waits. Besides, it looks by itself, at pauses that double up to
`look_interval`.

A generation breaks, for the member that notices it, when another member is declared dead,
left, released its claim or lost it to a higher one. That is final, also if the death is
refuted. Members watch the group's key, as news of all that may be lost. The broken
generation stays the last one, until a higher one is formed. A replica of one shard goes
the same way: all votes are its own.
"""

from __future__ import annotations

from enum import Enum

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    group_key,
    versions_key,
)
from tensorhub_p2p.protocol.groups.candidate import Candidate
from tensorhub_p2p.protocol.groups.claims import lost_member, members_in, newest_generation
from tensorhub_p2p.protocol.groups.floors import floor_on_record
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR
from tensorhub_p2p.protocol.identity import Generation, Member, PeerId, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.messages import (
    Formed,
    GenerationRecord,
    MemberLeft,
    Message,
    Propose,
    Vote,
)

PATIENCE = 4
"""Retry intervals that a candidate waits for votes, and a voter for `Formed`."""


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
    def __init__(self, record: GenerationRecord, why: str) -> None:
        self.record = record
        self.why = why


class GroupClaimsRead(Event):
    """The group's key was read: whoever holds our slot now is in there."""

    def __init__(self, registers: Registers) -> None:
        self.registers = registers


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
        """(epoch, version) of the group's last answer, as far as it is known here; kept by whoever
        runs the calls, and raised by what is on record."""
        self.outbox = Outbox()
        self._claim = 0
        """The counter of our established claim; 0 for none."""
        self._accepted = 0
        self._proposal: GenerationRecord | None = None
        self._missing: tuple[int, ...] = ()
        self._wanted = False
        """A verb waits for a generation."""
        self._doubted = False
        self._stand_at = 0.0
        self._propose_until = 0.0
        self._retry_at: float | None = None
        self._rest = 0.0
        """Seconds until the next look, if nothing happens before."""
        self._watch: int | None = None
        self._records = records
        self._liveness = liveness
        self._config = config
        self._key = group_key(slot.group)
        self._claims = Inquiry(records, self._key, self._on_claims)
        versions = versions_key(slot.group.model)
        self._versions = Inquiry(records, versions, self._on_versions)
        self._candidate = Candidate(slot, records, self._key, versions, self.outbox)

    @property
    def formed(self) -> bool:
        """A generation is in force, as far as this member knows."""
        return self.record is not None and not self.broken

    @property
    def _mine(self) -> Member:
        return Member(self.slot.shard, self.me, self._claim)

    # --- forming a generation ---

    def established(self, counter: int) -> None:
        """The slot claim is established under this counter."""
        self._claim = counter

    def want(self, now: float) -> None:
        """Somebody's verb needs a generation."""
        self._wanted = True
        if self.formed or self.state not in {ElectionState.IDLE, ElectionState.FORMED}:
            return
        # The lowest slot's claimant stands first; the others only if it does not.
        self._stand_at = now + self.slot.shard * self._config.election_backoff
        self._keep_watch(now)
        self._gather(now)

    def _keep_watch(self, now: float) -> None:
        if self._watch is None:
            self._watch = self._records.watch(now, self._key, self.look)

    def rest(self) -> None:
        """No verb waits for a generation any more."""
        self._wanted = False
        if self.state is ElectionState.GATHERING:
            self.state = ElectionState.IDLE
            self._retry_at = None

    def look(self, now: float) -> None:
        """Read the group's key: something may have happened that nobody told us."""
        if self._claim:
            self._claims.look(now)

    def doubt(self, now: float) -> None:
        """An owner knows of a higher generation: if that doesn't replace us, ours is broken."""
        self._doubted = True
        if self._claim:
            self._claims.look_anew(now)

    def _gather(self, now: float) -> None:
        """Begin anew; with no verb that waits, only look whether somebody else formed one."""
        if not self._wanted:
            self.state, self._retry_at = ElectionState.IDLE, None
            self.look(now)
            return
        self.state = ElectionState.GATHERING
        self._candidate.forget_survey()
        self._rest = PATIENCE * self._config.retry_interval
        self._retry_at = now + self._rest
        self._claims.look(now)

    def _on_claims(self, now: float, registers: Registers) -> None:
        self.outbox.emit(GroupClaimsRead(registers))
        members = members_in(registers, self.num_shards, self._liveness.is_gone)
        newest = newest_generation(registers)
        in_force = newest is not None and newest.members == members
        doubted, self._doubted = self._doubted, False
        if newest is not None and in_force and self._is_next(newest):
            self._form(now, newest)
        elif self.record is not None and not self.broken:
            lost = lost_member(registers, self.record)
            if lost is not None:
                self._member_gone(lost)
            elif doubted:
                self._break("a higher generation exists")
        elif self.state is ElectionState.GATHERING:
            self.floor = max(self.floor, floor_on_record(registers))
            self._stand(now, members, newest)

    def _stand(
        self, now: float, members: tuple[Member, ...], newest: GenerationRecord | None
    ) -> None:
        """All slots claimed, and the own back-off over: survey, then propose."""
        self._missing = tuple(sorted(set(range(self.num_shards)) - {m.shard for m in members}))
        if self._missing or self._mine not in members:
            return
        if now < self._stand_at:
            self._retry_at = self._stand_at
            return
        used = newest.generation.counter if newest is not None else 0
        record = self._candidate.draft(members, max(used, self._accepted), self.floor)
        if record is not None:
            self._propose(now, record)
        elif self._candidate.stand_with(members):
            self._versions.look_anew(now)

    def _on_versions(self, now: float, registers: Registers) -> None:
        if self.state is ElectionState.GATHERING and self._candidate.survey(registers):
            self._claims.look_anew(now)

    def _is_next(self, record: GenerationRecord) -> bool:
        """It names our claim and is above the last one in force here, whose end is final."""
        above = self.record is None or record.generation > self.record.generation
        return above and self._claim > 0 and self._mine in record.members

    # --- the candidate ---

    def _propose(self, now: float, record: GenerationRecord) -> None:
        self.state = ElectionState.PROPOSING
        self._accepted = record.generation.counter
        self._proposal = record
        self._propose_until = now + PATIENCE * self._config.retry_interval
        self._retry_at = now + self._config.retry_interval
        self._candidate.propose(record, self.floor)
        self._count_votes(now, record)

    def _on_vote(self, now: float, sender: PeerId, message: Vote) -> None:
        record = self._proposal
        if self.state is not ElectionState.PROPOSING or record is None:
            return
        if not self._candidate.is_valid(record, sender, message):
            return
        if not message.accepted:
            # Stand again above what the claimant accepted, unless that one forms first.
            self._accepted = max(self._accepted, message.highest)
            self._back_off(now)
            return
        self._candidate.count(message)
        self._count_votes(now, record)

    def _count_votes(self, now: float, record: GenerationRecord) -> None:
        elected = self._candidate.elected(record)
        if elected is not None:
            self._write(now, elected)

    def _write(self, now: float, record: GenerationRecord) -> None:
        self.state = ElectionState.WRITING
        self._retry_at = None

        def goes_on() -> bool:
            return self.state is ElectionState.WRITING

        def written(now: float, refused: Refused | None) -> None:
            if refused is None:
                self._candidate.tell(record, self._mine)
                if self._is_next(record):
                    self._form(now, record)
            elif goes_on():
                self._back_off(now)

        self._candidate.write(now, record, goes_on, written)

    def _back_off(self, now: float) -> None:
        self._stand_at = now + (1 + self.slot.shard) * self._config.election_backoff
        self._gather(now)

    # --- the voter ---

    def _on_propose(self, now: float, sender: PeerId, message: Propose) -> None:
        record = message.record
        fresh = record.generation.counter > self._accepted
        again = record == self._proposal
        accepted = self._claim > 0 and self._mine in record.members and (fresh or again)
        if accepted and fresh:
            self._accepted = record.generation.counter
            self._proposal = record
            if not self.formed:
                self.state = ElectionState.VOTED
                self._retry_at = now + PATIENCE * self._config.retry_interval
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

    def _on_formed(self, now: float, record: GenerationRecord) -> None:
        if self._is_next(record):
            self._form(now, record)
        elif self.record is None or record.generation > self.record.generation:
            self.look(now)

    def _form(self, now: float, record: GenerationRecord) -> None:
        self.state = ElectionState.FORMED
        self._retry_at = None
        self._wanted = False
        self._keep_watch(now)
        self._accepted = max(self._accepted, record.generation.counter)
        self.record = record
        self.broken = False
        self.floor = max(self.floor, record.floor)
        self.outbox.emit(GenerationFormed(record))
        for member in record.members:
            if self._liveness.is_gone(member.peer):
                self._member_gone(member)
                return

    # --- how a generation ends ---

    def _on_left(self, sender: PeerId, message: MemberLeft) -> None:
        if self.record is None or self.broken or message.generation != self.record.generation:
            return
        for member in self.record.members:
            if member.peer == sender and member.shard == message.sender_shard:
                name = self._liveness.name(member.peer)
                self._break(f"{name}, which held shard {member.shard}, has left it")
                return

    def peer_gone(self, now: float, peer: PeerId) -> None:
        """Declared dead or left. Acting on it is final, also if the death is refuted later."""
        proposed = self._proposal.members if self._proposal is not None else ()
        under_way = self.state in {ElectionState.PROPOSING, ElectionState.VOTED}
        if under_way and any(member.peer == peer for member in proposed):
            self._gather(now)
        if self.record is None or self.broken:
            return
        for member in self.record.members:
            if member.peer == peer:
                self._member_gone(member)
                return

    def _member_gone(self, member: Member) -> None:
        self._break(f"{self._liveness.name(member.peer)}, which held shard {member.shard}, is gone")

    def _break(self, why: str) -> None:
        assert self.record is not None
        self.broken = True
        if self.state is ElectionState.FORMED:
            self.state = ElectionState.IDLE
        self.outbox.emit(GenerationBroken(self.record, why))

    def stop(self, now: float) -> None:
        """The handle closes, or lost its slot: tell the members, and vote no more."""
        if self.record is not None and self.formed:
            for member in self.record.members:
                if member.shard != self.slot.shard:
                    goodbye = MemberLeft(
                        self.slot.group, member.shard, self.record.generation, self.slot.shard
                    )
                    self.outbox.send(member.peer, goodbye)
        self._claim = 0
        self._retry_at = None
        self.state = ElectionState.IDLE
        self._claims.stop()
        self._versions.stop()
        if self._watch is not None:
            self._records.unwatch(now, self._watch)
            self._watch = None

    # --- messages and time ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, Propose):
            self._on_propose(now, sender, message)
        elif isinstance(message, Vote):
            self._on_vote(now, sender, message)
        elif isinstance(message, Formed):
            self._on_formed(now, message.record)
        elif isinstance(message, MemberLeft):
            self._on_left(sender, message)

    def takes_part_in(self, generation: Generation) -> bool:
        """False if whoever counts on us in this generation means a claim that is given up."""
        return self._claim > 0 and self._accepted >= generation.counter

    def tick(self, now: float) -> None:
        if self._retry_at is None or now < self._retry_at:
            return
        if self.state is ElectionState.GATHERING:
            # The key is watched: that the missing ones came is told.
            self._rest = min(2 * self._rest, self._config.look_interval)
            self._retry_at = now + self._rest
            self._claims.look(now)
        elif (
            self.state is ElectionState.PROPOSING
            and self._proposal is not None
            and now < self._propose_until
        ):
            self._candidate.ask_votes(self._proposal)
            self._retry_at = now + self._config.retry_interval
        else:
            self._gather(now)

    def next_wakeup(self) -> float | None:
        return self._retry_at

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        what = f"generation of {self.slot.group}: {self.state.value}"
        if self.state is ElectionState.GATHERING and self._missing:
            missing = ", ".join(map(str, self._missing))
            return f"{what} (nobody holds shard {missing} of {self.num_shards})"
        if self.state is ElectionState.PROPOSING and self._proposal is not None:
            silent = self._candidate.silent(self._proposal)
            return f"{what} ({', '.join(self._liveness.name(m.peer) for m in silent)} silent)"
        return what
