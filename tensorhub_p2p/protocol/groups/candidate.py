"""Standing for election: what a candidate reads, whom it asks, and what it writes.

Rule of this file. A `Candidate` is the half of an election that wants to form a generation
itself. When it stands, and what becomes of the election, election.py decides; which
counters it accepted belongs to the voter there.

Theory of operation. With every slot claimed, a candidate

    surveys    the versions key, for the highest epoch and for counters in use. Then the
               claims are read once more (by election.py): had it been replaced by whoever
               uses those counters, it would see it there. A survey holds for the members
               with which it was made
    proposes   its member list under a counter above all that it read or ever accepted, and
               asks those who did not vote yet, again each retry interval
    counts     all votes are needed; the generation's floor is the highest of the voters'
    writes     first the *fence* to W owners of the versions key, which refuse what lower
               generations say from then on, then the record to W owners of the group's key:
               whoever finds the record may rely on the fence
    tells      everybody else that it is formed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tensorhub_p2p.protocol.directory.records import Records, Refused, Registers, fence_name
from tensorhub_p2p.protocol.groups.claims import generation_of, highest_epoch, highest_fence
from tensorhub_p2p.protocol.groups.selection import Floor
from tensorhub_p2p.protocol.identity import Member, PeerId, Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import Formed, GenerationRecord, Key, Propose, Vote


@dataclass(frozen=True)
class Survey:
    """What a candidate read of the versions key before it stands with these members."""

    members: tuple[Member, ...]
    epoch: int
    counter: int
    """The highest counter of the group that is in use."""


class Candidate:
    """The candidacies of one handle, one after the other."""

    def __init__(
        self, slot: Slot, records: Records, key: Key, versions_key: Key, outbox: Outbox
    ) -> None:
        self._slot = slot
        self._records = records
        self._key = key
        self._versions_key = versions_key
        self._outbox = outbox
        self._standing: tuple[Member, ...] | None = None
        """The members with which we are about to stand."""
        self._survey: Survey | None = None
        self._votes: dict[int, Floor] = {}

    # --- before it stands ---

    def forget_survey(self) -> None:
        self._standing = self._survey = None

    def stand_with(self, members: tuple[Member, ...]) -> bool:
        """Go for these members; whether that is new, so that a survey must be made."""
        new = self._standing != members
        self._standing = members
        return new

    def survey(self, registers: Registers) -> bool:
        """The versions key was read; whether it is of use."""
        if self._standing is None:
            return False
        counter = highest_fence(registers, self._slot.group)
        self._survey = Survey(self._standing, highest_epoch(registers), counter)
        return True

    def draft(
        self, members: tuple[Member, ...], above: int, floor: Floor
    ) -> GenerationRecord | None:
        """What to propose, with a counter higher than `above`; None without a survey for it."""
        survey = self._survey
        if survey is None or survey.members != members:
            return None
        generation = generation_of(max(above, survey.counter) + 1, members)
        return GenerationRecord(generation, survey.epoch, members, self._slot.shard, floor)

    # --- the votes ---

    def propose(self, record: GenerationRecord, floor: Floor) -> None:
        """Stand with this record; the own vote is given."""
        self.forget_survey()
        self._votes = {self._slot.shard: floor}
        self.ask_votes(record)

    def ask_votes(self, record: GenerationRecord) -> None:
        for member in self.silent(record):
            self._outbox.send(member.peer, Propose(self._slot.group, member.shard, record))

    def silent(self, record: GenerationRecord) -> list[Member]:
        """Those who did not vote yet."""
        return [m for m in record.members if m.shard not in self._votes]

    def is_valid(self, record: GenerationRecord, sender: PeerId, vote: Vote) -> bool:
        """Whether it is about this record, and from the member that it says."""
        voters = [m.shard for m in record.members if m.peer == sender]
        return vote.generation == record.generation and vote.sender_shard in voters

    def count(self, vote: Vote) -> None:
        """A member accepted."""
        self._votes[vote.sender_shard] = vote.floor

    def elected(self, record: GenerationRecord) -> GenerationRecord | None:
        """The record as it is to be written, once all members accepted."""
        if self.silent(record):
            return None
        return msgspec.structs.replace(record, floor=max(self._votes.values()))

    # --- once elected ---

    def write(
        self,
        now: float,
        record: GenerationRecord,
        goes_on: Callable[[], bool],
        then: Callable[[float, Refused | None], None],
    ) -> None:
        """The fence first: whoever finds the record may rely on it.

        Ends without a word if, once the fence is written, the election no longer `goes_on`.
        """
        counter = record.generation.counter

        def fenced(now: float, refused: Refused | None) -> None:
            if not goes_on():
                return
            if refused is not None:
                then(now, refused)
            else:
                self._records.write(now, self._key, "generation", counter, record, then)

        name = fence_name(self._slot.group)
        self._records.write(now, self._versions_key, name, counter, record, fenced)

    def tell(self, record: GenerationRecord, mine: Member) -> None:
        for member in record.members:
            if member != mine:
                self._outbox.send(member.peer, Formed(self._slot.group, member.shard, record))
