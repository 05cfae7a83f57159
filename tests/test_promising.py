"""The promise: whoever withdraws when, and whatever is lost or late, one copy stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registry import Registry

from tensorhub_p2p.config import GroupConfig, RetentionConfig
from tensorhub_p2p.protocol.directory.records import retains_key, versions_key
from tensorhub_p2p.protocol.groups.selection import Copy
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox, Send
from tensorhub_p2p.protocol.messages import KeepAnswer, KeepAsk, Phase, Register, Retain
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import Held, RefState
from tensorhub_p2p.protocol.retention.promising import (
    Candidate,
    Plea,
    Promise,
    Stance,
    Verdict,
    keepers,
    rank,
)
from tensorhub_p2p.protocol.retention.reserving import Reserve
from tensorhub_p2p.protocol.retention.retention import RETAIN
from tensorhub_p2p.protocol.shards.publishing import Hidden, References
from tensorhub_p2p.protocol.shards.withdrawing import Unkept

V1 = Publication(0, 1, "gone", Generation(1, 7))
CONFIG = RetentionConfig()


@dataclass
class Copies:
    """Host memory of one peer: copies take a while, may fail, and stay."""

    world: World
    me: PeerId
    here: bool = False

    def begin(
        self,
        now: float,
        slot: Slot,
        held: Held,
        digests: tuple[bytes, ...],
        then: Callable[[float, str], None],
    ) -> Slot | None:
        self.cancelled = False

        def end() -> None:
            if self.world.slow:
                self.world.later(self.me, end)
            elif not self.cancelled:
                fails = self.world.rng.random() < self.world.failing
                self.here = self.here or not fails
                then(self.world.now, "no memory" if fails else "")

        self.world.later(self.me, end)
        return slot

    def cancel(self, now: float, keep: Slot) -> None:
        self.cancelled = True


@dataclass
class World(Registry):
    """Holders of one shard that somebody retains, each a replica of its own."""

    twice: float = 0.0
    """How often a message arrives twice."""
    failing: float = 0.0
    """How often a copy fails."""
    other_zones: bool = False
    slow: bool = False
    """Copies take until this ends."""
    holders: list[References] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)

    def retain(self) -> None:
        key = retains_key("policy")
        self.put(key, Register(PeerId("retainer"), RETAIN, 0, 1, Retain(newest=1)))

    def holder(self, limit: int = 4096) -> References:
        me = PeerId(f"holder{len(self.holders)}")
        records = self.peer(me)
        copies = Copies(self, me)
        custody = Custody(
            me,
            records,
            records,
            CONFIG,
            Reserve(limit),
            has_other_zones=lambda: self.other_zones,
            offloads=copies,
        )
        slot = Slot(Group("policy", f"replica{len(self.holders)}"), 0)
        references = References(slot, GroupConfig(), custody)
        references.generation = Generation(1, 7)
        self.machines[me] = [references]
        self.holders.append(references)
        self.copies.append(copies)
        references.hold(self.now, Held(V1, 1, 4096, Phase.READY, was_whole=True))
        return references

    late: float = 0.0
    """How often a message is under way for long."""
    limbo: list[tuple[int, PeerId, Send]] = field(default_factory=list)

    def _post(self, sender: PeerId, item: Send) -> None:
        for _ in range(1 + (self.rng.random() < self.twice)):
            if self.rng.random() < self.late:
                self.limbo.append((self.rng.randrange(5, 60), sender, item))
            else:
                super()._post(sender, item)

    def step(self) -> None:
        super().step()
        waiting, self.limbo = self.limbo, []
        for steps, sender, item in waiting:
            if steps:
                self.limbo.append((steps - 1, sender, item))
            else:
                super()._post(sender, item)

    @property
    def kept(self) -> int:
        """Copies that are there, whatever the directory says."""
        held = [references for references in self.holders if references.held is not None]
        return len(held) + sum(copies.here for copies in self.copies)


def world_of(holders: int, **options: float) -> World:
    world = World()
    world.retain()
    for _ in range(holders):
        world.holder()
    world.until(lambda: all(h.state is RefState.HELD for h in world.holders))
    for name, value in options.items():
        setattr(world, name, value)
    return world


# --- one copy stays ---


def withdraw_and_ask(world: World, references: References) -> None:
    references.withdraw(world.now)
    world.until(lambda: references.state is RefState.ASKING)


def messages(world: World, kind: type, sender: References) -> list[Send]:
    return [s for p, s in world.sent if p == sender.me and isinstance(s.message, kind)]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rng=st.randoms(use_true_random=False),
    holders=st.integers(1, 5),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    late=st.sampled_from([0.0, 0.3]),
    failing=st.sampled_from([0.0, 0.5]),
)
def test_whoever_withdraws_whenever_at_least_one_keeps_it(
    rng: random.Random, holders: int, loss: float, late: float, failing: float
) -> None:
    run(rng, holders, loss=loss, twice=0.2, late=late, failing=failing)


@pytest.mark.parametrize("seed", range(400))
def test_in_many_runs_at_least_one_keeps_it(seed: int) -> None:
    rng = random.Random(seed)
    loss, twice = rng.choice([0.0, 0.0, 0.3]), rng.choice([0.0, 0.3])
    late, failing = rng.choice([0.0, 0.3, 0.6]), rng.choice([0.0, 0.3])
    holders, tick = rng.randint(1, 5), rng.choice([0.002, 0.01])
    run(rng, holders, loss=loss, twice=twice, late=late, failing=failing, tick=tick)


def run(rng: random.Random, holders: int, **options: float) -> None:
    world = world_of(holders, **options)
    world.rng = rng
    for _ in range(60):
        references = world.holders[rng.randrange(holders)]
        choice = rng.randrange(5)
        if references.state is RefState.HELD and choice <= 2:
            references.withdraw(world.now)
        elif choice == 4 and rng.randrange(6) == 0:
            references.restore(world.now)
        for _ in range(rng.randrange(8)):
            world.step()
            assert world.kept, "it is lost"
    for _ in range(400):
        world.step()
        assert world.kept, "it is lost"


def test_a_yes_that_is_still_under_way_when_its_giver_relies_on_the_asker_does_not_count() -> None:
    """The asker has promised to keep it meanwhile: both would go."""
    world = world_of(2, tick=0.0005)
    first, last = sorted(world.holders, key=lambda h: rank(V1, (h.me, h.slot)))
    world.loss = 1.0  # messages are carried by hand
    withdraw_and_ask(world, first)
    (question,) = messages(world, KeepAsk, first)
    last.receive(world.now, first.me, question.message)
    world.settle()
    (yes,) = messages(world, KeepAnswer, last)
    withdraw_and_ask(world, last)
    (question,) = messages(world, KeepAsk, last)
    first.receive(world.now, last.me, question.message)
    world.settle()
    (yes_too,) = messages(world, KeepAnswer, first)
    assert isinstance(yes_too.message, KeepAnswer)
    assert yes_too.message.yes
    first.receive(world.now, last.me, yes.message)
    last.receive(world.now, first.me, yes_too.message)
    world.until(lambda: RefState.EMPTY in {first.state, last.state})
    for _ in range(100):
        world.step()
    assert world.kept


def test_of_those_that_withdraw_at_once_only_the_first_in_rank_makes_a_copy() -> None:
    world = world_of(6, tick=0.0005, slow=True)
    for references in world.holders:
        references.withdraw(world.now)
    world.until(lambda: world.kept == 1)
    world.slow = False
    world.until(lambda: all(h.state is RefState.EMPTY for h in world.holders))
    assert world.kept == sum(copies.here for copies in world.copies) == 1
    first = min(world.holders, key=lambda h: rank(V1, (h.me, h.slot)))
    (copied,) = [copies.me for copies in world.copies if copies.here]
    assert copied == first.me


def test_a_holder_that_stays_is_asked_before_a_copy_is_made() -> None:
    world = world_of(3)
    world.holders[0].withdraw(world.now)
    world.until(lambda: world.holders[0].state is RefState.EMPTY)
    assert not any(copies.here for copies in world.copies)
    assert world.kept == 2


def test_the_record_of_who_gave_it_up_says_that_it_is_kept() -> None:
    world = world_of(2)
    world.holders[0].withdraw(world.now)
    world.until(lambda: world.holders[0].state is RefState.EMPTY)
    values = [r.value for r in world.registers(versions_key("policy"))]
    (hidden,) = [v for v in values if getattr(v, "phase", None) is Phase.HIDDEN]
    assert getattr(hidden, "kept", False)


def no_more_retained(world: World) -> None:
    world.put(retains_key("policy"), Register(PeerId("retainer"), RETAIN, 0, 2, None))


@pytest.mark.parametrize("other_zones", [True, False])
def test_a_giver_keeps_what_is_on_record_no_more_only_if_other_zones_may_want_it(
    other_zones: bool,
) -> None:
    world = world_of(2, other_zones=other_zones)
    first, last = world.holders
    first.withdraw(world.now)
    world.until(lambda: first.state is RefState.EMPTY)
    no_more_retained(world)
    last.withdraw(world.now)
    world.until(lambda: last.state is RefState.EMPTY)
    assert world.kept == (1 if other_zones else 0)


def test_a_promise_binds_for_a_while_only() -> None:
    world = world_of(2, other_zones=True)
    first, last = world.holders
    first.withdraw(world.now)
    world.until(lambda: first.state is RefState.EMPTY)
    no_more_retained(world)
    world.now += CONFIG.promise_seconds + 1
    last.withdraw(world.now)
    world.until(lambda: last.state is RefState.EMPTY)
    assert world.kept == 0, "nobody wants it"


def test_a_giver_whose_withdrawal_began_before_it_was_retained_is_bound_by_its_promise() -> None:
    for seed in range(50):
        world = World(seed)
        for _ in range(2):
            world.holder()
        world.until(lambda world=world: all(h.state is RefState.HELD for h in world.holders))  # type: ignore[misc]
        first, last = sorted(world.holders, key=lambda h: rank(V1, (h.me, h.slot)))
        first.withdraw(world.now)
        world.until(lambda first=first: first.withdrawal._needs._wishes is not None)  # type: ignore[misc]
        if first.state is RefState.MARKING:
            break
    else:
        pytest.fail("what is retained was never read before the withdrawal was on record")
    first.receive(world.now, last.me, KeepAsk(7, first.slot, V1, asker=last.slot))
    world.until(lambda: first.state is RefState.EMPTY)
    assert messages(world, KeepAsk, first)
    assert world.kept


def test_who_can_not_keep_it_has_it_still_and_says_for_whom() -> None:
    world = world_of(1, failing=1.0)
    (only,) = world.holders
    only.withdraw(world.now)
    world.until(lambda: any(isinstance(e, Unkept) for _, e in world.events))
    assert only.state is RefState.HELD
    (unkept,) = [e for _, e in world.events if isinstance(e, Unkept)]
    assert "retainer" in unkept.retained[0]
    assert unkept.why == "no memory"


def test_force_loses_it_and_says_for_whom() -> None:
    world = world_of(1)
    world.holders[0].withdraw(world.now, force=True)
    world.until(lambda: not world.kept)
    (hidden,) = [e for _, e in world.events if isinstance(e, Hidden)]
    assert "retainer" in hidden.lost[0]


# --- the giver ---

ME, OTHER = (PeerId("a"), Slot(Group("m", "r"), 0)), (PeerId("b"), Slot(Group("m", "s"), 0))


@pytest.mark.parametrize("stance", list(Stance))
@pytest.mark.parametrize("first", [True, False])
def test_who_says_yes(stance: Stance, first: bool) -> None:
    low, high = sorted([ME, OTHER], key=lambda holder: rank(V1, holder))
    me, asker = (low, high) if first else (high, low)
    promise = Promise(CONFIG)
    ask = KeepAsk(1, me[1], V1, asker=asker[1])
    yes = promise.consider(0.0, stance, me, asker[0], ask)
    assert (
        yes
        == {
            Stance.HOLDS: True,
            Stance.COPIES: True,
            Stance.WITHDRAWS: first,
            Stance.GIVES_UP: False,
        }[stance]
    )
    assert promise.binds(1.0, V1) == yes


# --- the asker ---


@dataclass
class Asking:
    ends: list[Verdict] = field(default_factory=list)
    outbox: Outbox = field(default_factory=Outbox)
    number: int = 0

    def __post_init__(self) -> None:
        self.plea = Plea(self.outbox, self._next, CONFIG, self._ask, self._ended)
        self.plea.begin(0.0, [Candidate(PeerId(f"c{n}"), ME[1]) for n in range(5)])

    def _next(self) -> int:
        self.number += 1
        return self.number

    def _ask(self, request: int, candidate: Candidate) -> KeepAsk:
        return KeepAsk(request, candidate.slot, V1)

    def _ended(self, _now: float, verdict: Verdict) -> None:
        self.ends.append(verdict)

    def asked(self) -> tuple[PeerId, int]:
        sent = [s for s in self.outbox.items if isinstance(s, Send)]
        assert isinstance(sent[-1].message, KeepAsk)
        return sent[-1].to, sent[-1].message.request

    def say(self, now: float, yes: bool, working: bool = False) -> None:
        peer, request = self.asked()
        self.plea.receive(now, peer, KeepAnswer(request, yes, working))


def test_a_yes_ends_a_plea() -> None:
    asking = Asking()
    asking.say(0.1, yes=True)
    assert asking.ends == [Verdict.KEPT]
    assert asking.plea.next_wakeup() is None


def test_no_more_than_max_asked_are_asked() -> None:
    asking = Asking()
    for _ in range(CONFIG.max_asked):
        assert not asking.ends
        asking.say(0.1, yes=False)
    assert asking.ends == [Verdict.IN_VAIN]


def test_silence_is_a_no_and_a_question_is_repeated_once_before_that() -> None:
    asking = Asking()
    asking.plea.tick(CONFIG.promise_patience / 2)
    assert len(asking.outbox.items) == 2
    asking.plea.tick(CONFIG.promise_patience)
    assert asking.asked()[0] == "c1"


def test_an_answer_counts_from_whom_and_for_what_was_asked_only() -> None:
    asking = Asking()
    peer, request = asking.asked()
    asking.plea.receive(0.1, PeerId("c1"), KeepAnswer(request, yes=True))
    asking.plea.receive(0.1, peer, KeepAnswer(request + 1, yes=True))
    assert not asking.ends
    asking.plea.again(0.1)
    asking.plea.receive(0.2, peer, KeepAnswer(request, yes=True))
    assert not asking.ends, "that was before the promise that was given meanwhile"
    asking.say(0.3, yes=True)
    assert asking.ends == [Verdict.KEPT]


def test_who_is_working_on_it_is_waited_for() -> None:
    asking = Asking()
    for step in range(1, 20):
        asking.say(step * 0.4, yes=False, working=True)
        asking.plea.tick(step * 0.4 + 0.3)
    assert asking.asked()[0] == "c0"
    asking.plea.tick(20.0)
    assert asking.asked()[0] == "c1", "it has fallen silent"


def test_whom_to_ask_first() -> None:
    def copy(name: str, **options: bool) -> Copy:
        flags = {"offload": False, "live": False, "withdrawing": False} | options
        return Copy(PeerId(name), Slot(Group("m", name), 0), **flags)

    copies = [copy("silent"), copy("live", live=True), copy("plain"), copy("kept", offload=True)]
    copies += [copy(f"w{n}", withdrawing=True) for n in range(6)]
    me = (PeerId("w3"), Slot(Group("m", "w3"), 0))
    order = keepers(copies, V1, me, lambda peer: peer != "silent", lambda _peer: True)
    assert [candidate.peer for candidate in order[:4]] == ["kept", "plain", "live", "silent"]
    before = [(c.peer, c.slot) for c in order[4:]]
    assert before == sorted(before, key=lambda holder: rank(V1, holder))
    assert all(rank(V1, holder) < rank(V1, me) for holder in before)
