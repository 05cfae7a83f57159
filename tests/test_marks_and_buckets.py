"""What a replica had whole is known after its records are gone, and pins in whatever bucket."""

from __future__ import annotations

import pytest
from cluster import QUICK, ROLLOUT, TRAINER, Cluster

from tensorhub_p2p.config import Config, DirectoryConfig
from tensorhub_p2p.errors import Timeout, VersionConflict
from tensorhub_p2p.protocol.directory.buckets import bucket_of
from tensorhub_p2p.protocol.directory.records import holders_key, versions_key
from tensorhub_p2p.protocol.identity import Group, PeerId, Slot
from tensorhub_p2p.protocol.messages import Question, Retain

T0, R0 = Slot(TRAINER, 0), Slot(ROLLOUT, 0)
KEY = versions_key("policy")
FORGOTTEN = 70.0
"""Seconds after which nothing of a closed handle's own records is left."""


def pull(c: Cluster, peer: int, slot: Slot) -> None:
    """A whole call of a replica of one shard."""
    (answer,) = c.wait(c.ask(peer, slot))
    c.wait(c.hold(peer, slot, answer))
    assert c.finish(peer, slot, answer) is None


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("held_for", [0.0, 1.0])
def test_nothing_is_published_below_what_was_whole_also_when_all_of_it_is_gone(
    shards: int, pulled: bool, held_for: float
) -> None:
    c = Cluster(0, 6)
    peers = list(range(shards))
    slots = c.form(TRAINER, peers)
    c.publish_all(TRAINER, peers, 5)
    c.net.run_for(held_for)
    if pulled and shards == 1:
        c.wait(c.open(4, R0, 1))
        pull(c, 4, R0)
        c.wait(c.close(4, R0))
    c.wait(*(c.close(p, s) for p, s in zip(peers, slots, strict=True)))
    c.net.run_for(FORGOTTEN)
    other = Slot(Group("policy", "trainer-b"), 0)
    c.wait(c.open(3, other, 1))
    (error,) = c.errors(c.publish(3, other, 3))
    assert isinstance(error, VersionConflict)
    c.wait(c.publish(3, other, 6))


def test_a_publication_that_a_group_decided_for_is_not_published_again_under_its_id() -> None:
    """Its publish timed out: its record was on W owners, and what pullers look for was not."""
    for seed in range(60):
        c = Cluster(seed, 9)
        owners = [int(p, 16) for p in c.nodes[0].directory.owners(KEY)]
        others = [int(p, 16) for p in c.nodes[0].directory.owners(holders_key("policy", 0))]
        slow = [peer for peer in others if peer not in owners]
        if len(slow) >= 2:
            break
    trainer, rollout = [peer for peer in range(9) if peer not in slow][:2]
    c.wait(c.open(trainer, T0, 1), c.open(rollout, R0, 1))
    for peer in slow[:2]:
        c.pause(peer)
    ask = c.ask(rollout, R0, timeout=20)
    c.net.run_for(0.3)
    (error,) = c.errors(c.publish(trainer, T0, 5, timeout=0.15))
    assert isinstance(error, Timeout)
    (answer,) = c.wait(ask)
    for peer in slow[:2]:
        c.resume(peer)
    c.net.run_for(0.2)
    (error,) = c.errors(c.publish(trainer, T0, 5))
    assert isinstance(error, VersionConflict), answer


def crowd(c: Cluster, number: int) -> list[tuple[int, Slot]]:
    """Rollouts that pull, so that the key grows a second bucket; on which peers, by which slot."""
    rollouts = [(1 + k % 11, Slot(Group("policy", f"r{k}"), 0)) for k in range(number)]
    for peer, slot in rollouts:
        c.wait(c.open(peer, slot, 1))
        pull(c, peer, slot)
    c.net.run_for(1.0)
    return rollouts


def in_bucket_one(name: str) -> Slot:
    names = (f"{name}{number}" for number in range(99))
    return Slot(
        Group("policy", next(n for n in names if bucket_of(n, 2) == bucket_of(n, 4) == 1)), 0
    )


SMALL = Config(swim=QUICK, directory=DirectoryConfig(bucket_registers=12))


def test_who_withdraws_sees_a_pin_in_a_bucket_that_it_has_not_heard_of() -> None:
    c = Cluster(0, 12, config=SMALL)
    c.wait(c.open(0, T0, 1))
    c.wait(c.publish(0, T0, 1))
    c.net.run_for(3.0)
    rollouts = crowd(c, 12)
    late = in_bucket_one("late")
    c.wait(c.open(5, late, 1))
    for peer, slot in rollouts:
        c.wait(c.unpublish(peer, slot))
    c.net.run_for(1.0)
    assert c.nodes[5].records.buckets(KEY) > 1
    assert c.nodes[0].records.buckets(KEY) == 1
    (answer,) = c.wait(c.ask(5, late))
    unpublish = c.unpublish(0, T0, timeout=8.0)
    c.net.run_for(4.0)
    assert c.verbs[unpublish].end is None, "it is the only copy, and decided for"
    c.wait(c.hold(5, late, answer))
    c.wait(unpublish)


def test_who_waits_is_told_of_a_version_in_a_bucket_that_came_meanwhile() -> None:
    c = Cluster(0, 14, config=SMALL)
    c.wait(c.open(0, T0, 1))
    c.wait(c.publish(0, T0, 1))
    other = in_bucket_one("t")
    c.wait(c.open(12, R0, 1), c.open(13, other, 1))
    wait = c.ask(12, R0, Question("wait_for", ">1"), timeout=120)
    c.net.run_for(20.0)  # it looks by itself at long pauses now
    crowd(c, 12)
    found: list[object] = []
    c.nodes[13].records.read(c.now, KEY, lambda _now, registers: found.append(registers))
    c.net.settle(PeerId(c.nodes[13].info.peer_id))
    c.net.run_for(0.3)
    assert c.nodes[13].records.buckets(KEY) > 1
    c.wait(c.publish(13, other, 2))
    began = c.now
    c.wait(wait)
    assert c.now - began < 0.1


def test_who_withdraws_knows_that_it_was_whole_whichever_bucket_its_other_shards_wrote_to() -> None:
    """One shard was published before the key grew, the other after that."""
    c = Cluster(0, 14, config=SMALL)
    group = in_bucket_one("t").group
    first, last = c.form(group, [12, 13])
    c.wait(c.open(0, R0, 1, retain=Retain(newest=1)), c.open(0, T0, 1))
    c.wait(c.publish(0, T0, 1))
    c.wait(c.publish(12, first, 2))
    crowd(c, 12)
    c.nodes[13].records.read(c.now, KEY, lambda _now, _registers: None)
    c.net.settle(PeerId(c.nodes[13].info.peer_id))
    c.net.run_for(0.5)
    assert c.nodes[13].records.buckets(KEY) > 1
    c.wait(c.publish(13, last, 2))
    c.net.run_for(0.5)
    (error,) = c.errors(c.unpublish(13, last))
    assert error is not None, "a retainer wants it, and nobody else has it"
