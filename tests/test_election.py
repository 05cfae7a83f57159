"""Elections: one member list for a counter, whoever stands, and whoever dies meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from registry import Registry

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import fence_name, group_key, versions_key
from tensorhub_p2p.protocol.groups.claims import generation_of
from tensorhub_p2p.protocol.groups.election import (
    Election,
    ElectionState,
    GenerationBroken,
    GenerationFormed,
)
from tensorhub_p2p.protocol.identity import Generation, Group, Member, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, Send
from tensorhub_p2p.protocol.messages import (
    Formed,
    GenerationRecord,
    MemberLeft,
    Phase,
    Propose,
    Register,
    SlotClaim,
    VersionRecord,
    Vote,
    WholeMark,
)

GROUP = Group("policy", "rollout")
KEY, VERSIONS = group_key(GROUP), versions_key("policy")
CONFIG = GroupConfig()


def peer(number: int) -> PeerId:
    return PeerId(f"{number:016x}")


@dataclass
class Claimants(Registry):
    """A registry in which the slots of one replica are claimed, and everybody wants to work."""

    num_shards: int = 3
    formed: list[tuple[PeerId, GenerationRecord]] = field(default_factory=list)
    broken: list[tuple[PeerId, GenerationRecord]] = field(default_factory=list)

    def claim(self, shard: int, number: int, counter: int = 1, want: bool = True) -> Election:
        """The peer with this number holds the shard from now on."""
        me, slot = peer(number), Slot(GROUP, shard)
        claim = SlotClaim(shard, self.num_shards, counter, established=True)
        self.put(KEY, Register(me, f"{shard}@rollout", counter, 1, claim))
        records = self.peer(me)
        records.sequence = 100
        election = Election(me, slot, self.num_shards, records, records, CONFIG)
        election.established(counter)
        self.machines[me] = [election]
        if want:
            election.want(self.now)
        return election

    def release(self, election: Election) -> None:
        claim = SlotClaim(election.slot.shard, self.num_shards, 1, True, released=True)
        name = f"{election.slot.shard}@rollout"
        self.put(KEY, Register(election.me, name, 1, 50, claim))

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, GenerationFormed):
            self.formed.append((peer, event.record))
        elif isinstance(event, GenerationBroken):
            self.broken.append((peer, event.record))

    def check(self) -> None:
        """A counter has one generation, its members agree on the leader, and it only rises."""
        by_counter: dict[int, tuple[Generation, int]] = {}
        last: dict[PeerId, Generation] = {}
        for me, record in self.formed:
            what = (record.generation, record.leader)
            assert by_counter.setdefault(record.generation.counter, what) == what
            assert any(m.peer == me for m in record.members)
            assert record.generation > last.get(me, Generation(0, 0))
            last[me] = record.generation


def formed_alike(*elections: Election) -> bool:
    records = {e.record for e in elections if e.formed}
    return len(records) == 1 and all(e.formed for e in elections)


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(60))
def test_all_claimants_form_the_same_generation(seed: int, loss: float) -> None:
    group = Claimants(seed, loss, num_shards=1 + seed % 5)
    elections = [group.claim(shard, 10 + shard) for shard in range(group.num_shards)]
    group.until(lambda: formed_alike(*elections))
    group.check()
    record = elections[0].record
    assert record is not None
    assert record.members == tuple(Member(s, peer(10 + s), 1) for s in range(group.num_shards))


@pytest.mark.parametrize("seed", range(60))
def test_two_candidates_at_once_form_one_generation(seed: int) -> None:
    group = Claimants(seed, 0.1 * (seed % 3))
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]
    for election in elections:
        election._stand_at = 0.0
    group.until(lambda: formed_alike(*elections))
    group.check()


@pytest.mark.parametrize("seed", range(120))
def test_a_candidate_that_dies_at_any_moment_is_replaced_by_the_next(seed: int) -> None:
    group = Claimants(seed, 0.1 * (seed % 3))
    first, *others = (group.claim(shard, 10 + shard) for shard in range(3))
    for _ in range(seed % 30):
        group.step()
    group.crash(first.me)
    for _ in range(30):
        group.step()
    group.declare_dead(first.me)
    late = group.claim(0, 20, counter=2)
    for member in others:
        member.want(group.now)
    group.declare_dead(first.me, to=[late.me])
    group.until(lambda: formed_alike(late, *others))
    group.check()
    assert late.record is not None
    assert late.record.members[0].peer == late.me


@pytest.mark.parametrize("seed", range(20))
def test_claimants_with_no_verb_vote_all_the_same(seed: int) -> None:
    group = Claimants(seed, 0.1)
    elections = [group.claim(shard, 10 + shard, want=shard == 2) for shard in range(3)]
    group.until(lambda: elections[2].formed)
    group.check()
    record = elections[2].record
    assert record is not None
    assert record.leader == 2


def test_the_claimant_of_the_lowest_slot_leads() -> None:
    group = Claimants()
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]
    group.until(lambda: formed_alike(*elections))
    assert {e.record.leader for e in elections if e.record is not None} == {0}


def test_nothing_is_formed_while_a_shard_is_claimed_by_nobody() -> None:
    group = Claimants()
    first, second = (group.claim(shard, 10 + shard) for shard in range(2))
    for _ in range(300):
        group.step()
    assert not group.formed
    assert "nobody holds shard 2 of 3" in first.waiting_for()
    reads = group.requests
    for _ in range(100):
        group.step()
    assert group.requests - reads < 30, "waiting costs little"
    third = group.claim(2, 12)
    group.until(lambda: formed_alike(first, second, third))


def test_whoever_waits_no_more_asks_no_more() -> None:
    group = Claimants()
    first = group.claim(0, 10)
    for _ in range(50):
        group.step()
    first.rest()
    group.until(lambda: not group.steps)
    reads = group.requests
    for _ in range(200):
        group.step()
    assert group.requests == reads


# --- votes ---


def record_of(counter: int, *members: Member, leader: int = 0) -> GenerationRecord:
    return GenerationRecord(generation_of(counter, members), 0, members, leader)


MEMBERS = (Member(0, peer(10), 1), Member(1, peer(11), 1))


def vote_of(election: Election, record: GenerationRecord) -> Vote:
    candidate = record.members[record.leader].peer
    election.receive(0.0, candidate, Propose(GROUP, election.slot.shard, record))
    (vote,) = [i.message for i in election.outbox.drain() if isinstance(i, Send)]
    assert isinstance(vote, Vote)
    return vote


def test_a_claimant_accepts_a_counter_once_but_repeats_its_vote() -> None:
    group = Claimants(num_shards=2)
    voter = group.claim(1, 11, want=False)
    record = record_of(3, *MEMBERS)
    assert vote_of(voter, record).accepted
    assert vote_of(voter, record).accepted, "the first vote may have been lost"
    rival = record_of(3, *MEMBERS, leader=1)
    assert not vote_of(voter, rival).accepted
    refused = vote_of(voter, record_of(2, *MEMBERS))
    assert (refused.accepted, refused.highest) == (False, 3)
    assert vote_of(voter, record_of(4, *MEMBERS)).accepted


@pytest.mark.parametrize(
    "mine", [Member(1, peer(11), 2), Member(1, peer(12), 1)], ids=["older claim", "other peer"]
)
def test_a_claimant_votes_only_for_lists_that_name_its_very_claim(mine: Member) -> None:
    group = Claimants(num_shards=2)
    voter = group.claim(1, 11, want=False)
    assert not vote_of(voter, record_of(3, MEMBERS[0], mine)).accepted


def test_a_claimant_that_closed_votes_for_nothing() -> None:
    group = Claimants(num_shards=2)
    voter = group.claim(1, 11, want=False)
    voter.stop(0.0)
    assert not vote_of(voter, record_of(3, *MEMBERS)).accepted


def test_a_candidate_counts_only_votes_of_the_members_that_they_name() -> None:
    group = Claimants(num_shards=2)
    candidate = group.claim(0, 10)
    group.claim(1, 11, want=False)
    group.machines[peer(11)] = []
    group.until(lambda: candidate.state is ElectionState.PROPOSING)
    proposal = candidate._proposal
    assert proposal is not None
    vote = Vote(GROUP, 0, proposal.generation, True, 1, (-1, -1), 1)
    candidate.receive(group.now, peer(99), vote)
    states = [candidate.state]
    candidate.receive(group.now, peer(11), vote)
    states.append(candidate.state)
    assert states == [ElectionState.PROPOSING, ElectionState.WRITING]


def test_a_candidate_gives_up_on_a_voter_that_was_replaced_meanwhile() -> None:
    group = Claimants(num_shards=2)
    candidate = group.claim(0, 10)
    group.claim(1, 11, want=False)
    group.machines[peer(11)] = []
    group.until(lambda: candidate.state is ElectionState.PROPOSING)
    late = group.claim(1, 22, counter=2)
    group.until(lambda: formed_alike(candidate, late))


@pytest.mark.parametrize("seed", range(20))
def test_the_floor_of_a_generation_is_the_highest_that_a_voter_had(seed: int) -> None:
    group = Claimants(seed)
    elections = [group.claim(shard, 10 + shard, want=False) for shard in range(3)]
    elections[seed % 3].floor = (0, 7)
    for election in elections:
        election.want(0.0)
    group.until(lambda: formed_alike(*elections))
    assert [e.floor for e in elections] == [(0, 7)] * 3


# --- what is read and written ---


def test_the_record_is_at_the_versions_key_before_it_is_at_the_group_key() -> None:
    group = Claimants()
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]

    def records(key: object) -> list[object]:
        return [
            r.value
            for r in group.registers(key)  # type: ignore[arg-type]
            if isinstance(r.value, GenerationRecord)
        ]

    def over() -> bool:
        assert len(records(VERSIONS)) >= len(records(KEY))
        assert not any(e.formed for e in elections) or records(KEY)
        return formed_alike(*elections)

    group.until(over)


def test_a_generation_has_the_highest_epoch_that_is_on_record() -> None:
    group = Claimants(num_shards=1)
    old = Publication(2, 5, "trainer", Generation(1, 1))
    group.put(VERSIONS, Register(PeerId(""), "whole", 0, 1, WholeMark(old, 1)))
    newer = Publication(3, 1, "trainer", Generation(1, 1))
    slot = Slot(Group("policy", "trainer"), 0)
    record = VersionRecord(slot, 1, newer, Phase.HIDDEN, Generation(1, 1))
    group.put(VERSIONS, Register(peer(1), "0@trainer", 0, 1, record))
    only = group.claim(0, 10)
    group.until(lambda: only.formed)
    assert only.record is not None
    assert only.record.epoch == 3


def test_a_generation_is_above_every_one_that_the_versions_key_knows_of() -> None:
    group = Claimants(num_shards=1)
    fence = record_of(8, Member(0, peer(1), 1))
    group.put(VERSIONS, Register(peer(1), fence_name(GROUP), 8, 1, fence))
    only = group.claim(0, 10)
    group.until(lambda: only.formed)
    assert only.record is not None
    assert only.record.generation.counter == 9


# --- ends ---


def three(seed: int = 0) -> tuple[Claimants, list[Election]]:
    group = Claimants(seed)
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]
    group.until(lambda: formed_alike(*elections))
    group.until(lambda: not group.steps)
    return group, elections


def test_a_declared_death_breaks_the_generation_once_and_for_good() -> None:
    group, elections = three()
    group.crash(elections[1].me)
    group.declare_dead(elections[1].me)
    group.declare_dead(elections[1].me)
    group.settle()
    assert [me for me, _ in group.broken] == [elections[0].me, elections[2].me]
    group.gone.clear()
    assert not elections[0].formed, "a refuted death was acted on all the same"


def test_a_refuted_death_leads_to_a_higher_generation_of_the_same_members() -> None:
    group, elections = three()
    before = elections[0].record
    group.declare_dead(elections[1].me, to=[elections[0].me])
    group.gone.clear()
    elections[0].want(group.now)
    group.until(lambda: formed_alike(*elections) and elections[0].record != before)
    group.check()
    assert before is not None
    assert elections[0].record is not None
    assert elections[0].record.members == before.members


def test_a_member_that_closes_tells_the_others() -> None:
    group, elections = three()
    elections[2].stop(group.now)
    group.until(lambda: len(group.broken) == 2, 50)
    assert not elections[0].formed
    assert not elections[1].formed


def test_members_notice_a_closed_one_also_when_its_goodbye_is_lost() -> None:
    group, elections = three()
    group.machines.pop(elections[2].me)
    group.release(elections[2])
    group.until(lambda: len(group.broken) == 2, 50)


def test_members_notice_that_a_slot_has_a_new_holder() -> None:
    group, elections = three()
    group.machines.pop(elections[2].me)
    group.claim(2, 22, counter=2, want=False)
    group.until(lambda: len(group.broken) == 2, 50)


def test_a_goodbye_of_an_earlier_generation_or_a_stranger_changes_nothing() -> None:
    _, elections = three()
    record = elections[0].record
    assert record is not None
    old = Generation(record.generation.counter - 1, 5)
    elections[0].receive(0.0, elections[2].me, MemberLeft(GROUP, 0, old, 2))
    elections[0].receive(0.0, peer(99), MemberLeft(GROUP, 0, record.generation, 2))
    elections[0].receive(0.0, elections[1].me, MemberLeft(GROUP, 0, record.generation, 2))
    assert elections[0].formed


def test_who_waits_long_for_the_others_reads_rarely_and_goes_on_at_once_when_they_come() -> None:
    group = Claimants(num_shards=2)
    early = group.claim(0, 10)
    group.until(lambda: group.now > 60)
    before = group.requests
    group.until(lambda: group.now > 180)
    assert group.requests - before <= 120 / CONFIG.look_interval + 1
    began, late = group.now, group.claim(1, 11)
    group.until(lambda: formed_alike(early, late))
    assert group.now - began < 1.0, "it watches"


def test_who_waits_for_the_others_finds_them_also_when_nothing_tells_of_them() -> None:
    group = Claimants(num_shards=2)
    early = group.claim(0, 10)
    group.until(lambda: group.now > 60)
    group.watches.clear()
    late = group.claim(1, 11, want=False)
    group.until(lambda: formed_alike(early, late))


def test_a_member_that_missed_formed_finds_the_record() -> None:
    group = Claimants()
    elections = [group.claim(shard, 10 + shard) for shard in range(3)]
    deaf = elections[2]
    hear = deaf.receive

    def receive(now: float, sender: PeerId, message: object) -> None:
        if not isinstance(message, Formed):
            hear(now, sender, message)  # type: ignore[arg-type]

    deaf.receive = receive  # type: ignore[method-assign]
    group.until(lambda: formed_alike(*elections))


def test_whoever_is_told_of_a_lower_generation_keeps_its_own() -> None:
    _, elections = three()
    record = elections[1].record
    lower = GenerationRecord(Generation(0, 9), 0, record.members, 0)  # type: ignore[union-attr]
    elections[1].receive(0.0, elections[0].me, Formed(GROUP, 1, lower))
    assert elections[1].record == record


def test_a_doubted_generation_is_broken_unless_the_reading_explains_it() -> None:
    group, elections = three()
    elections[0].doubt(group.now)
    group.until(lambda: bool(group.broken), 50)
    assert group.broken[0][0] == elections[0].me
    elections[0].want(group.now)
    group.until(lambda: formed_alike(*elections))
    group.check()
