"""Giving up a version, step by step: what each step does when it is stopped, late or in vain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from registry import Registry

from tensorhub_p2p.config import GroupConfig, PullConfig, RetentionConfig
from tensorhub_p2p.protocol.directory.admission import WITHDRAWN, admit
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.owner import Refusal
from tensorhub_p2p.protocol.directory.records import holders_key, retains_key, versions_key
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR, holdings, select
from tensorhub_p2p.protocol.identity import Generation, Group, Member, PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout, TensorSpec
from tensorhub_p2p.protocol.messages import (
    DigestList,
    GenerationRecord,
    HolderRecord,
    KeepAnswer,
    KeepAsk,
    Key,
    Phase,
    Pin,
    Question,
    Register,
    Retain,
    Retraction,
    VersionRecord,
)
from tensorhub_p2p.protocol.pulls.serving import DigestsWanted, ShardServer
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import REVOCABLE, Held, RefState
from tensorhub_p2p.protocol.retention.promising import rank
from tensorhub_p2p.protocol.retention.reserving import Reserve
from tensorhub_p2p.protocol.retention.retention import RETAIN
from tensorhub_p2p.protocol.shards.publishing import Hidden, References, Whole
from tensorhub_p2p.protocol.shards.withdrawing import Surroundings, Unkept

G1 = Generation(1, 7)
V1 = Publication(0, 1, "trainer", G1)
KEY = versions_key("policy")
ME, SLOT = PeerId("trainer0"), Slot(Group("policy", "trainer"), 0)
NEWEST = Retain(newest=1)
LAYOUT = Layout([TensorSpec("w", "float32", (1024,), 4096)])


@dataclass
class Stage(Registry):
    """One trainer of one shard that has published version 1, and whatever a test adds."""

    limit: int = 1 << 20
    copy_fails: str = ""
    begun: list[Slot] = field(default_factory=list)
    cancelled_copies: list[Slot] = field(default_factory=list)
    finish_copy: Callable[[], None] = lambda: None
    sealed: bool = True
    members: tuple[PeerId, ...] = (ME, PeerId("other"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.admit = admit
        records = self.peer(ME)
        self.custody = Custody(
            ME,
            records,
            records,
            RetentionConfig(),
            Reserve(self.limit),
            members=lambda: self.members,
            offloads=self,
        )
        config = GroupConfig()
        self.server = ShardServer(SLOT, V1, LAYOUT, (), PullConfig())
        around = Surroundings(server=lambda: self.server)
        self.references = References(SLOT, config, self.custody, around)
        self.references.generation = G1
        self.machines[ME] = [self.references]
        self.references.publish(self.now, Held(V1, 1, 4096, Phase.READY, was_whole=False))
        self.until(lambda: any(isinstance(event, Whole) for _, event in self.events))
        if self.sealed:
            self.digest()

    def digest(self) -> None:
        self.server.digested(self.now, 0, bytes(16))
        self.references.withdrawal.look_at_digests(self.now)

    # copies

    def begin(
        self,
        now: float,
        slot: Slot,
        held: Held,
        digests: tuple[bytes, ...],
        then: Callable[[float, str], None],
    ) -> Slot | None:
        keep = Slot(Group("policy", "kept"), 0)
        self.begun.append(keep)
        assert digests == (bytes(16),)
        self.finish_copy = lambda: then(self.now, self.copy_fails)
        return keep

    def cancel(self, now: float, keep: Slot) -> None:
        self.cancelled_copies.append(keep)

    # what others do

    def retain(self, retain: Retain | None = NEWEST) -> None:
        self.requests += 1
        register = Register(PeerId("retainer"), RETAIN, 0, self.requests, retain)
        self.put(retains_key("policy"), register)

    def pin(self, ended: bool = False) -> None:
        value = None if ended else Pin(V1, Group("policy", "rollout"), G1, 1)
        name = "pin/0@rollout"
        self.put(KEY, Register(PeerId("leader"), name, 1, 2 if ended else 1, value))

    def other(self, phase: Phase, spot: bool = False) -> None:
        slot = Slot(Group("policy", "copy"), 0)
        record = VersionRecord(slot, 1, V1, phase, G1, True, spot=spot)
        self.put(KEY, Register(PeerId("other"), "0@copy", 1, 1, record))

    @property
    def state(self) -> RefState:
        return self.references.state

    def reach(self, state: RefState) -> None:
        self.until(lambda: self.state is state)

    def phase(self) -> Phase:
        (record,) = [r.value for r in self.registers(KEY) if r.writer == ME]
        assert isinstance(record, VersionRecord)
        return record.phase

    def rest(self, steps: int = 60) -> None:
        for _ in range(steps):
            self.step()

    def said(self, kind: type) -> list[object]:
        return [event for _, event in self.events if isinstance(event, kind)]


def test_a_version_that_nobody_needs_goes_with_no_step_in_between() -> None:
    stage = Stage()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.EMPTY)
    assert not stage.begun
    assert not stage.sent


@pytest.mark.parametrize("seed", range(20))
def test_it_is_gone_before_its_owners_have_it_hidden(seed: int) -> None:
    """Once they know that it withdraws nobody resolves or pins it: that needs no other word."""
    stage = Stage(seed=seed)
    stage.references.withdraw(stage.now)
    stage.until(lambda: bool(stage.said(Hidden)))
    assert stage.phase() is Phase.WITHDRAWING
    latest = Question("replicate", "latest")
    found = holdings(stage.registers(KEY), lambda _peer: False)
    assert select(latest, found, NO_FLOOR) is None
    pin = Pin(V1, Group("policy", "rollout"), G1, 1)
    refusal = stage.put(KEY, Register(PeerId("leader"), "pin/0@rollout", 1, 1, pin))
    assert refusal is not None
    assert refusal.reason == WITHDRAWN
    stage.rest()
    assert stage.phase() is Phase.HIDDEN
    (holder,) = stage.registers(holders_key("policy", 0))
    assert isinstance(holder.value, HolderRecord)
    assert holder.value.phase is Phase.HIDDEN


def hide_kept(stage: Stage) -> None:
    stage.retain()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.OFFLOADING)
    stage.finish_copy()


def hide_freed(stage: Stage) -> None:
    stage.references.withdraw(stage.now, freeing=True)


def hide_closing(stage: Stage) -> None:
    stage.references.close(stage.now, stage.now + 100.0)


def refuse_withdrawals(key: Key, held: Cells, new: Register) -> Refusal | None:
    withdrawing = getattr(new.value, "phase", None) is Phase.WITHDRAWING
    return Refusal("full") if withdrawing else admit(key, held, new)


def hide_refused(stage: Stage) -> None:
    stage.admit = refuse_withdrawals
    stage.references.withdraw(stage.now, force=True)


def hide_never_whole(stage: Stage) -> None:
    stage.references.drop(stage.now)
    stage.rest()
    v2 = Publication(0, 2, "trainer", G1)
    stage.references.publish(stage.now, Held(v2, 2, 4096, Phase.READY, was_whole=False))
    stage.reach(RefState.HELD)
    stage.references.withdraw(stage.now)


@pytest.mark.parametrize(
    "begin", [hide_kept, hide_freed, hide_closing, hide_refused, hide_never_whole]
)
def test_where_others_count_on_the_hidden_record_it_is_waited_for(
    begin: Callable[[Stage], None],
) -> None:
    """Pins wait to know who keeps it, a publish under the same id to be judged anew; memory, and
    the peer, go right after it.
    """
    stage = Stage()
    begin(stage)
    stage.until(lambda: bool(stage.said(Hidden)))
    assert stage.phase() is Phase.HIDDEN


def test_nobody_is_judged_to_need_it_before_the_owners_know_that_it_withdraws() -> None:
    stage = Stage()
    stage.admit = refuse_withdrawals
    stage.references.withdraw(stage.now)
    stage.rest(400)
    assert stage.state is RefState.MARKING
    assert stage.phase() is Phase.READY
    stage.admit = admit
    stage.until(lambda: bool(stage.said(Hidden)))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_read_too_late_takes_nothing_back(seed: int) -> None:
    """It could not wait for whether it was whole: it is hidden, and stays so."""
    stage = Stage(seed=seed)
    stage.references.drop(stage.now)
    stage.rest()
    v2 = Publication(0, 2, "trainer", G1)
    stage.references.publish(stage.now, Held(v2, 2, 4096, Phase.READY, was_whole=False))
    stage.reach(RefState.HELD)
    stage.references.close(stage.now, stage.now)
    assert stage.state is RefState.LOOKING
    stage.references.tick(stage.now)
    assert stage.state is RefState.HIDING
    phases = []
    for _ in range(60):
        stage.step()
        phases.append(stage.phase())
    assert Phase.HIDDEN in phases
    assert set(phases[phases.index(Phase.HIDDEN) :]) == {Phase.HIDDEN}


@pytest.mark.parametrize("seed", range(20))
def test_the_hidden_record_never_comes_after_the_next_publish(seed: int) -> None:
    stage = Stage(seed=seed)
    stage.references.withdraw(stage.now)
    stage.references.next_wakeup = lambda: None  # type: ignore[method-assign]
    stage.reach(RefState.EMPTY)
    v2 = Publication(0, 2, "trainer", G1)
    stage.references.publish(stage.now, Held(v2, 1, 4096, Phase.READY, was_whole=False))
    del stage.references.next_wakeup  # type: ignore[method-assign]
    stage.rest()
    for key in (KEY, holders_key("policy", 0)):
        (record,) = [r.value for r in stage.registers(key) if r.writer == ME]
        assert isinstance(record, (VersionRecord, HolderRecord))
        assert (record.publication, record.phase) == (v2, Phase.READY)


def test_a_retained_version_is_copied_and_goes_once_the_copy_is_there() -> None:
    stage = Stage()
    stage.retain()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.OFFLOADING)
    stage.rest()
    assert stage.state is RefState.OFFLOADING
    assert stage.phase() is Phase.WITHDRAWING
    stage.finish_copy()
    stage.reach(RefState.EMPTY)
    (record,) = [r.value for r in stage.registers(KEY) if r.writer == ME]
    assert isinstance(record, VersionRecord)
    assert record.kept


def test_a_spot_holder_is_not_asked_and_does_not_count() -> None:
    stage = Stage()
    stage.retain()
    stage.other(Phase.READY, spot=True)
    stage.references.withdraw(stage.now)
    stage.reach(RefState.OFFLOADING)
    assert not stage.sent


def test_what_is_merely_pinned_goes_at_once_if_somebody_else_has_it() -> None:
    stage = Stage()
    stage.pin()
    stage.other(Phase.READY, spot=True)
    stage.references.withdraw(stage.now)
    stage.reach(RefState.EMPTY)
    assert not stage.begun


def test_digests_that_are_missing_are_taken_before_the_copy_is_made() -> None:
    stage = Stage(sealed=False)
    stage.retain()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.SEALING)
    stage.rest()
    (wanted,) = stage.said(DigestsWanted)
    assert isinstance(wanted, DigestsWanted)
    assert wanted.chunks == (0,)
    stage.digest()
    stage.reach(RefState.OFFLOADING)


def digests_left(stage: Stage) -> list[DigestList]:
    values = [r.value for r in stage.registers(holders_key("policy", 0))]
    return [value for value in values if isinstance(value, DigestList)]


def test_whoever_is_bringing_it_gets_the_list_of_digests_before_it_goes() -> None:
    stage = Stage(sealed=False)
    stage.other(Phase.PARTIAL)
    stage.references.withdraw(stage.now)
    stage.reach(RefState.SEALING)
    stage.rest()
    assert stage.state is RefState.SEALING
    assert not digests_left(stage)
    stage.digest()
    stage.until(lambda: bool(digests_left(stage)))
    assert stage.phase() is Phase.WITHDRAWING
    (left,) = digests_left(stage)
    assert (left.publication, left.layout, left.digests) == (V1, LAYOUT.digest, bytes(16))
    stage.reach(RefState.EMPTY)
    assert not stage.begun


def test_a_promise_that_is_given_while_the_list_is_left_binds() -> None:
    stage = Stage(sealed=False)
    stage.other(Phase.PARTIAL)
    stage.references.withdraw(stage.now)
    stage.reach(RefState.SEALING)
    me = (ME, SLOT)
    askers = [(PeerId(f"asker{n}"), Slot(Group("policy", "copy"), 0)) for n in range(20)]
    peer, slot = next(asker for asker in askers if rank(V1, me) < rank(V1, asker))
    stage.references.receive(stage.now, peer, KeepAsk(1, SLOT, V1, asker=slot))
    stage.settle()
    assert any(isinstance(s.message, KeepAnswer) and s.message.yes for _, s in stage.sent)
    stage.digest()
    stage.reach(RefState.OFFLOADING)


def test_while_it_waits_for_readers_they_get_the_list_too() -> None:
    stage = Stage(limit=0)
    stage.pin()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.WAITING)
    stage.until(lambda: bool(digests_left(stage)))
    assert not stage.references.expire(stage.now)
    assert stage.state is RefState.EMPTY


STATES = sorted(
    REVOCABLE - {RefState.LOOKING, RefState.ADOPTING, RefState.WAITING}, key=lambda s: s.name
)


def stage_in(state: RefState, **options: object) -> Stage:
    """A withdrawal of a retained version, stopped in this state."""
    stage = Stage(sealed=state is not RefState.SEALING, **options)  # type: ignore[arg-type]
    stage.retain()
    if state is RefState.ASKING:
        stage.other(Phase.READY)
    if state is RefState.RESERVING:
        members = tuple(Member(n, PeerId(f"m{n}"), 1) for n in range(2))
        record = GenerationRecord(G1, 0, members, 0)
        around = Surroundings(lambda: stage.server, lambda: record)
        stage.references.withdrawal._around = around
    stage.references.withdraw(stage.now)
    stage.reach(state)
    return stage


@pytest.mark.parametrize("state", STATES)
def test_it_can_be_taken_back_in_each_state_and_nothing_of_it_is_left(state: RefState) -> None:
    stage = stage_in(state)
    assert stage.references.restore(stage.now)
    assert stage.state is RefState.HELD
    stage.rest(400)
    assert stage.state is RefState.HELD
    assert stage.phase() is Phase.READY
    assert stage.cancelled_copies == stage.begun
    assert stage.references.next_wakeup() is None
    assert stage.custody.reserve.room(stage.now) == stage.limit or stage.begun
    assert not stage.watches


@pytest.mark.parametrize("state", STATES)
def test_at_the_deadline_it_is_taken_back_in_each_state(state: RefState) -> None:
    stage = stage_in(state)
    assert stage.references.expire(stage.now)
    stage.rest()
    assert stage.phase() is Phase.READY


@pytest.mark.parametrize("state", STATES)
def test_a_handle_that_closes_gives_it_up_in_each_state_by_its_time(state: RefState) -> None:
    stage = stage_in(state)
    stage.references.close(stage.now, stage.now + 0.3)
    stage.until(lambda: bool(stage.said(Hidden)))
    assert stage.now < 30
    (hidden,) = stage.said(Hidden)
    assert isinstance(hidden, Hidden)
    assert "retainer" in hidden.lost[0] or state is RefState.MARKING


@pytest.mark.parametrize("why", ["no memory", "the copy differs"])
def test_a_copy_that_fails_leaves_it_published(why: str) -> None:
    stage = stage_in(RefState.OFFLOADING, copy_fails=why)
    stage.finish_copy()
    stage.rest()
    (unkept,) = stage.said(Unkept)
    assert isinstance(unkept, Unkept)
    assert unkept.why == why
    assert stage.phase() is Phase.READY


def test_a_copy_that_is_done_after_it_was_taken_back_changes_nothing() -> None:
    stage = stage_in(RefState.OFFLOADING)
    assert stage.references.restore(stage.now)
    stage.finish_copy()
    stage.rest()
    assert stage.state is RefState.HELD


def test_force_asks_nobody() -> None:
    stage = Stage()
    stage.retain()
    stage.pin()
    stage.other(Phase.READY)
    stage.references.withdraw(stage.now, force=True)
    stage.reach(RefState.EMPTY)
    assert not stage.sent
    assert not stage.begun


def test_pins_with_no_memory_for_a_copy_are_waited_for_and_are_void_at_the_deadline() -> None:
    stage = Stage(limit=0)
    stage.pin()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.WAITING)
    stage.rest()
    assert "policy/rollout" in stage.references.waiting_for()
    assert not stage.references.expire(stage.now)
    stage.rest()
    assert stage.phase() is Phase.HIDDEN


def test_what_comes_to_be_retained_while_it_waits_for_pins_stays() -> None:
    stage = Stage(limit=0)
    stage.pin()
    stage.references.withdraw(stage.now)
    stage.reach(RefState.WAITING)
    stage.retain()
    stage.until(lambda: bool(stage.said(Unkept)))
    assert stage.state is RefState.HELD


def test_a_copy_is_freed_only_if_nobody_needs_it() -> None:
    stage = Stage()
    stage.retain()
    stage.references.withdraw(stage.now, freeing=True)
    stage.until(lambda: stage.state is RefState.JUDGING)
    stage.until(lambda: stage.state is RefState.HELD)
    stage.retain(None)
    stage.references.withdraw(stage.now, freeing=True)
    stage.reach(RefState.EMPTY)


def test_a_retracted_version_goes_whoever_retains_or_pins_it() -> None:
    stage = Stage(limit=0)
    stage.retain()
    stage.pin()
    bad = Register(PeerId(""), "retracted:0.1", 0, 1, Retraction(0, 1))
    stage.put(KEY, bad)
    stage.references.withdraw(stage.now)
    stage.reach(RefState.EMPTY)


def test_the_last_peer_of_all_does_not_wait_for_a_keeper() -> None:
    stage = Stage(limit=0, members=(ME,))
    stage.retain()
    stage.references.close(stage.now, stage.now + 1000.0)
    stage.reach(RefState.EMPTY)
    assert stage.now < 10.0


def test_a_publication_that_is_found_whole_only_now_is_marked_before_it_is_withdrawn() -> None:
    """Both shards were published; this one, the first, never saw the other."""
    stage = Stage()
    other = Slot(Group("policy", "trainer"), 1)
    v2 = Publication(0, 2, "trainer", G1)
    stage.references.drop(stage.now)
    stage.rest()
    stage.retain(Retain(versions=(2,)))
    stage.references.publish(stage.now, Held(v2, 2, 4096, Phase.READY, was_whole=False))
    stage.rest()
    record = VersionRecord(other, 2, v2, Phase.READY, G1)
    stage.put(KEY, Register(PeerId("trainer1"), "1@trainer", 1, 1, record))
    stage.references.withdraw(stage.now)
    stage.until(lambda: stage.state in {RefState.OFFLOADING, RefState.EMPTY})
    assert stage.state is RefState.OFFLOADING
