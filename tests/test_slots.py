"""Slot claims: at most one live peer holds a shard, and whoever is replaced finds out."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from registry import Registry

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import group_key
from tensorhub_p2p.protocol.groups.slots import SlotClaimer, SlotEstablished, SlotLost, SlotState
from tensorhub_p2p.protocol.identity import Group, PeerId, Slot
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.messages import Register, SlotAnswer, SlotChallenge, SlotClaim

GROUP = Group("policy", "rollout")
SLOT = Slot(GROUP, 0)
KEY = group_key(GROUP)
A, B, C = (PeerId(f"{n:016x}") for n in (10, 11, 12))
HOLDS = {SlotState.ESTABLISHING, SlotState.ESTABLISHED}
FINAL = {SlotState.TAKEN, SlotState.FENCED, SlotState.RELEASED}


def claimer(registry: Registry, peer: PeerId, num_shards: int = 2) -> SlotClaimer:
    """A claimer on this peer; one that it had before answers no more."""
    records = registry.peer(peer)
    before = registry.machines.get(peer, [])
    if before and isinstance(before[0], SlotClaimer):
        records.sequence = 1000 * (1 + len(registry.events))
    machine = SlotClaimer(peer, SLOT, num_shards, records, records, GroupConfig())
    registry.machines[peer] = [machine]
    return machine


def start(registry: Registry, *peers: PeerId) -> list[SlotClaimer]:
    machines = [claimer(registry, peer) for peer in peers]
    for machine in machines:
        machine.start(registry.now)
    return machines


def established(registry: Registry, peer: PeerId) -> SlotClaimer:
    (machine,) = start(registry, peer)
    registry.until(lambda: machine.state is SlotState.ESTABLISHED)
    return machine


def holders(machines: Iterable[SlotClaimer]) -> list[PeerId]:
    return [machine.me for machine in machines if machine.state in HOLDS]


@pytest.mark.parametrize("loss", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(100))
def test_of_claimants_that_come_at_once_exactly_one_gets_the_slot(seed: int, loss: float) -> None:
    registry = Registry(seed, loss)
    machines = start(registry, *(A, B, C)[: 2 + seed % 2])

    def over() -> bool:
        assert len(holders(machines)) <= 1
        return all(m.state is SlotState.ESTABLISHED or m.state in FINAL for m in machines)

    registry.until(over)
    winner = [m for m in machines if m.state is SlotState.ESTABLISHED]
    assert len(winner) == 1
    assert all(m.state is SlotState.TAKEN for m in machines if m not in winner)


@pytest.mark.parametrize("seed", range(20))
def test_a_claimant_meets_the_live_holder_and_is_told_so_at_once(seed: int) -> None:
    registry = Registry(seed)
    holder = established(registry, A)
    (late,) = start(registry, B)
    registry.until(lambda: late.state is SlotState.TAKEN, 40)
    assert holder.state is SlotState.ESTABLISHED
    (lost,) = [e for _, e in registry.events if isinstance(e, SlotLost)]
    assert lost.rival == A
    assert "alive" in lost.reason


@pytest.mark.parametrize("seed", range(20))
def test_a_restarted_worker_waits_until_its_predecessor_is_declared_dead(seed: int) -> None:
    registry = Registry(seed)
    before = established(registry, A)
    registry.crash(A)
    (late,) = start(registry, B)
    for _ in range(200):
        registry.step()
    assert late.state is SlotState.WAITING
    assert "waiting for the holder" in late.waiting_for()
    assert str(A) in late.waiting_for()
    registry.declare_dead(A)
    registry.until(lambda: late.state is SlotState.ESTABLISHED)
    assert late.counter > before.counter


@pytest.mark.parametrize("seed", range(60))
def test_a_claimant_that_dies_at_any_moment_holds_nobody_up_for_good(seed: int) -> None:
    registry = Registry(seed)
    start(registry, A)
    for _ in range(seed % 15):
        registry.step()
    registry.crash(A)
    (late,) = start(registry, B)
    for _ in range(50):
        registry.step()
    registry.declare_dead(A)
    registry.until(lambda: late.state is SlotState.ESTABLISHED)


@pytest.mark.parametrize("seed", range(60))
def test_of_two_holders_the_one_that_was_thought_dead_is_fenced(seed: int) -> None:
    registry = Registry(seed)
    first = established(registry, A)
    registry.declare_dead(A, to=[B])
    second = established(registry, B)
    assert first.state is SlotState.ESTABLISHED, "it can't know yet"
    first.check(registry.now)
    registry.until(lambda: first.state is SlotState.FENCED)
    assert second.state is SlotState.ESTABLISHED
    assert second.counter > first.counter


@pytest.mark.parametrize("end", ["release", "crash"])
def test_a_holder_is_fenced_also_by_a_replacement_that_is_gone_again(end: str) -> None:
    registry = Registry()
    first = established(registry, A)
    registry.declare_dead(A, to=[B])
    second = established(registry, B)
    if end == "release":
        second.release(registry.now)
        registry.until(lambda: not registry.steps)
    else:
        registry.crash(B)
        registry.declare_dead(B)
    first.check(registry.now)
    registry.until(lambda: first.state is SlotState.FENCED)


def test_a_newcomer_passes_over_a_holder_that_was_replaced_and_does_not_know_it() -> None:
    registry = Registry()
    first = established(registry, A)
    registry.declare_dead(A, to=[B])
    established(registry, B)
    registry.crash(B)
    registry.declare_dead(B, to=[A, C])
    (third,) = start(registry, C)
    registry.until(lambda: third.state is SlotState.ESTABLISHED)
    first.check(registry.now)
    registry.until(lambda: first.state is SlotState.FENCED)


@pytest.mark.parametrize("seed", range(20))
def test_counters_rise_over_claims_that_were_released(seed: int) -> None:
    registry = Registry(seed)
    counters = []
    for peer in (A, A, B, A):
        machine = established(registry, peer)
        counters.append(machine.counter)
        machine.release(registry.now)
        registry.until(lambda: not registry.steps)
    assert counters == sorted(set(counters)), counters


def test_a_released_slot_is_free_at_once() -> None:
    registry = Registry()
    established(registry, A).release(registry.now)
    registry.until(lambda: not registry.steps)
    challenges = len(registry.sent)
    established(registry, B)
    assert len(registry.sent) == challenges, "there was nobody to ask"


def test_a_handle_with_another_number_of_shards_is_refused() -> None:
    registry = Registry()
    established(registry, A)
    late = claimer(registry, B, num_shards=4)
    late.start(registry.now)
    registry.until(lambda: late.state is SlotState.TAKEN, 20)
    (lost,) = [e for p, e in registry.events if isinstance(e, SlotLost) and p == B]
    assert "num_shards=2" in lost.reason
    assert "with 4" in lost.reason


def test_an_established_holder_answers_every_challenge_that_it_holds() -> None:
    registry = Registry()
    holder = established(registry, B)
    holder.receive(0.0, A, SlotChallenge(SLOT, 99))
    (answer,) = [i.message for i in holder.outbox.drain() if isinstance(i, Send)]
    assert answer == SlotAnswer(SLOT, 99, holds=True)
    assert holder.state is SlotState.ESTABLISHED


def test_an_answer_to_another_challenge_is_dropped() -> None:
    registry = Registry()
    first = established(registry, A)
    registry.machines[A] = []
    (late,) = start(registry, B)
    registry.until(lambda: late.state is SlotState.WAITING)
    late.receive(registry.now, A, SlotAnswer(SLOT, 77, holds=False))
    late.receive(registry.now, C, SlotAnswer(SLOT, 0, holds=True))
    assert late.state is SlotState.WAITING
    assert late.rivals == {A: first.counter}


def test_equal_claims_of_views_that_knew_nothing_of_each_other_leave_one_holder() -> None:
    registry = Registry()
    machines = [established(registry, A)]
    for cell in list(registry.held[KEY]):
        registry.held[KEY].drop(cell)
    machines.append(established(registry, B))
    assert [m.counter for m in machines] == [1, 1]
    registry.put(KEY, Register(A, "0@rollout", 1, 50, SlotClaim(0, 2, 1, True)))
    for machine in machines:
        machine.check(registry.now)
    registry.until(lambda: not registry.steps)
    assert [m.state for m in machines] == [SlotState.ESTABLISHED, SlotState.FENCED]


def test_what_happens_is_told_once() -> None:
    registry = Registry()
    established(registry, A)
    (late,) = start(registry, B)
    registry.until(lambda: late.state is SlotState.TAKEN)
    for _ in range(200):
        registry.step()
    kinds = [type(e) for _, e in registry.events]
    assert kinds == [SlotEstablished, SlotLost]


def test_a_rival_whose_death_nobody_tells_is_found_dead_all_the_same() -> None:
    """Of a peer that was never met here, membership tells no death, but answers when asked."""
    registry = Registry()
    established(registry, A)
    registry.crash(A)
    (late,) = start(registry, B)
    registry.until(lambda: late.state is SlotState.WAITING)
    registry.gone[B] = {A}
    registry.until(lambda: late.state is SlotState.ESTABLISHED)


def test_a_release_says_when_the_owners_know_of_it() -> None:
    registry = Registry()
    holder = established(registry, A)
    known: list[bool] = []

    def released(_now: float) -> None:
        claims = [r.value for r in registry.registers(KEY)]
        known.append(all(isinstance(c, SlotClaim) and c.released for c in claims))

    holder.release(registry.now, released)
    assert known == []
    registry.until(lambda: bool(known))
    holder.release(registry.now, released)
    assert known == [True, True], "there was nothing to give back: told at once"
