"""Whole clusters: retained versions stay, copies are made, handed on and freed."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import LAYOUT, QUICK, ROLLOUT, TRAINER, Cluster

from tensorhub_p2p.config import Config, GroupConfig, RetentionConfig
from tensorhub_p2p.errors import GroupBroken, RetentionLost, TensorHubError
from tensorhub_p2p.protocol.directory.records import retains_key, versions_key
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.messages import Question, Retain
from tensorhub_p2p.protocol.shards.verbs import OffloadWanted
from tensorhub_p2p.sim.link import Link

T = [Slot(TRAINER, 0), Slot(TRAINER, 1)]
R = [Slot(ROLLOUT, 0), Slot(ROLLOUT, 1)]
TRAINERS, ROLLOUTS, RETAINER = [0, 1], [2, 3], 4
WATCHER = Slot(Group("policy", "watcher"), 0)
ROOM = 100 * LAYOUT.num_bytes


def trainers(
    retain: Retain | None = None, limit: int = ROOM, seed: int = 0, peers: int = 5, **options: Any
) -> Cluster:
    """A trainer of two shards, and somebody who retains."""
    options.setdefault("config", Config(swim=QUICK))
    cluster = Cluster(seed, peers, offload_limit=limit, **options)
    cluster.form(TRAINER, TRAINERS)
    if retain is not None:
        cluster.wait(cluster.open(RETAINER, WATCHER, 1, retain=retain))
    return cluster


def unpublish_all(cluster: Cluster, **options: Any) -> list[TensorHubError | None]:
    return cluster.errors(*(cluster.unpublish(p, T[s], **options) for s, p in enumerate(TRAINERS)))


def next_version(cluster: Cluster, number: int) -> None:
    assert unpublish_all(cluster) == [None, None]
    cluster.publish_all(TRAINER, TRAINERS, number)


def kept(cluster: Cluster) -> dict[int, int]:
    """By version: how many copies there are in host memory."""
    found: dict[int, int] = {}
    for publication in cluster.copies.values():
        found[publication.version] = found.get(publication.version, 0) + 1
    return dict(sorted(found.items()))


def can_be_had(cluster: Cluster, peer: int, version: int) -> bool:
    """Whether a newcomer's call for it is decided."""
    slot = Slot(Group("policy", f"newcomer-{cluster.now}"), 0)
    cluster.wait(cluster.open(peer, slot, 1))
    number = cluster.ask(peer, slot, Question("replicate", str(version)), timeout=1.5)
    (error,) = cluster.errors(number)
    cluster.wait(cluster.close(peer, slot))
    return error is None


# --- retained ---


def test_what_nobody_retains_is_given_up_with_no_copy() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    next_version(cluster, 2)
    assert not kept(cluster)
    assert not can_be_had(cluster, 4, 1)


def test_the_newest_two_stay_and_older_ones_go_once_they_are_safe() -> None:
    cluster = trainers(Retain(newest=2))
    for version in range(1, 6):
        if version > 1:
            assert unpublish_all(cluster) == [None, None]
        cluster.publish_all(TRAINER, TRAINERS, version)
        cluster.net.run_for(8.0)
    # Version 5 lives in the trainer's tensors only: it displaces nothing.
    assert kept(cluster) == {3: 2, 4: 2}
    assert can_be_had(cluster, 4, 3)
    assert not can_be_had(cluster, 4, 2)


def test_a_version_that_is_retained_by_its_number_stays_until_its_retainer_closes() -> None:
    cluster = trainers(Retain(versions=(1,)))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    for version in (2, 3, 4):
        next_version(cluster, version)
    assert kept(cluster) == {1: 2}
    cluster.wait(cluster.close(RETAINER, WATCHER))
    cluster.until(lambda: not cluster.copies)
    assert not can_be_had(cluster, 4, 1)
    assert all(not len(node.keeps) for node in cluster.nodes)
    assert all(node.custody.reserve.room(cluster.now) == ROOM for node in cluster.nodes)


def test_what_a_dead_retainer_wanted_stays() -> None:
    cluster = trainers(Retain(versions=(1,)))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.crash(RETAINER)
    cluster.until_dead(RETAINER)
    next_version(cluster, 2)
    cluster.net.run_for(10.0)
    assert kept(cluster) == {1: 2}


def test_a_holder_that_stays_spares_the_copy() -> None:
    cluster = trainers(Retain(newest=2))
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    next_version(cluster, 2)
    assert not kept(cluster)
    # Now the rollout has the last copy, and is bound by its promise.
    errors = cluster.errors(*(cluster.unpublish(p, R[s]) for s, p in enumerate(ROLLOUTS)))
    assert errors == [None, None]
    assert kept(cluster) == {1: 2}


@pytest.mark.parametrize("seed", range(6))
def test_of_all_that_withdraw_at_once_few_make_a_copy_and_none_is_lost(seed: int) -> None:
    cluster = trainers(Retain(versions=(1,)), seed=seed, peers=7)
    groups = {Group("policy", f"r{n}"): [2 + n, 3 + n] for n in range(4)}
    for group, peers in groups.items():
        cluster.form(group, peers)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    for group, peers in groups.items():
        cluster.replicate_all(group, peers)
    numbers = [cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)]
    for group, peers in groups.items():
        numbers += [cluster.unpublish(p, Slot(group, s)) for s, p in enumerate(peers)]
    cluster.wait(*numbers)
    assert 2 <= sum(kept(cluster).values()) <= 4
    assert can_be_had(cluster, 1, 1)


def test_three_that_withdraw_what_is_only_pinned_do_not_all_go() -> None:
    """Their writes reach the owners in turns: any two owners know of one other's only."""
    cluster = Cluster(0, 9, config=Config(swim=QUICK))
    owners = cluster.nodes[0].directory.owners(versions_key("policy"))
    outside = [i for i, node in enumerate(cluster.nodes) if node.info.peer_id not in owners]
    *holders, reader = outside[:4]
    slots = [Slot(Group("policy", f"r{n}"), 0) for n in range(3)]
    for peer, slot in zip(holders, slots, strict=True):
        cluster.form(slot.group, [peer])
    cluster.publish_all(slots[0].group, holders[:1], 1)
    for peer, slot in zip(holders[1:], slots[1:], strict=True):
        cluster.replicate_all(slot.group, [peer])
    cluster.form(WATCHER.group, [reader])
    (answer,) = cluster.ask_all(WATCHER.group, [reader])
    cluster.net.run_for(1.0)
    for n, peer in enumerate(holders):
        me = cluster.nodes[peer].info.peer_id
        for owner, delay in zip(owners[n:] + owners[:n], (0.001, 0.005, 0.1), strict=True):
            cluster.net.links[me, owner] = Link((delay, delay))
    numbers = [cluster.unpublish(p, s, timeout=1.0) for p, s in zip(holders, slots, strict=True)]
    cluster.net.run_for(0.5)
    held = [cluster.shard(p, s).references.held for p, s in zip(holders, slots, strict=True)]
    assert answer.publication in [what.publication for what in held if what is not None]
    cluster.ends(*numbers)


def test_a_spot_holder_is_no_safe_copy() -> None:
    cluster = trainers(Retain(newest=1))
    cluster.form(ROLLOUT, ROLLOUTS, spot=True)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    assert unpublish_all(cluster) == [None, None]
    assert kept(cluster) == {1: 2}


def test_a_spot_peer_that_has_the_last_copy_has_another_peer_take_one() -> None:
    cluster = Cluster(0, 5, offload_limit=ROOM)
    cluster.wait(cluster.open(RETAINER, WATCHER, 1, retain=Retain(newest=1)))
    cluster.form(TRAINER, TRAINERS, spot=True)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    assert unpublish_all(cluster) == [None, None]
    assert {peer for peer, _ in cluster.copies} == {RETAINER}
    assert can_be_had(cluster, 3, 1)


def test_a_copy_whose_announcement_timed_out_is_not_counted_on() -> None:
    """Its handle is torn, and may write over it at any time."""
    cluster = trainers(Retain(newest=1))
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    held = [cluster.hold(p, R[s], answers[s], timeout=1e-6) for s, p in enumerate(ROLLOUTS)]
    assert None not in cluster.errors(*held)
    cluster.net.run_for(3.0)
    assert unpublish_all(cluster) == [None, None]
    assert kept(cluster) == {1: 2}


# --- limits ---


@pytest.mark.parametrize("limit", [0, LAYOUT.num_bytes - 1])
def test_without_memory_a_retained_version_stays_published_and_the_error_says_for_whom(
    limit: int,
) -> None:
    cluster = trainers(Retain(newest=1), limit=limit)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    for error in unpublish_all(cluster):
        assert isinstance(error, RetentionLost)
        assert "p4" in str(error)
        assert "newest 1" in str(error)
        assert "offload_limit" in str(error)
        assert "force=True" in str(error)
    assert all(cluster.nodes[p].holds(T[s]) for s, p in enumerate(TRAINERS))
    assert can_be_had(cluster, 3, 1)


def test_force_gives_up_what_is_retained_and_says_what_was_lost() -> None:
    cluster = trainers(Retain(newest=1), limit=0)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    lost = cluster.wait(*(cluster.unpublish(p, T[s], force=True) for s, p in enumerate(TRAINERS)))
    assert all("p4" in text for (text,) in lost)
    assert not can_be_had(cluster, 3, 1)


def test_a_group_makes_no_copy_unless_all_its_shards_have_room() -> None:
    cluster = trainers(Retain(newest=1))
    cluster.nodes[1].custody.reserve.limit = 10
    cluster.publish_all(TRAINER, TRAINERS, 1)
    first, second = unpublish_all(cluster)
    assert isinstance(first, RetentionLost)
    assert "shard 1" in str(first)
    assert isinstance(second, RetentionLost)
    assert not [e for _, _, e in cluster.events if isinstance(e, OffloadWanted)]
    cluster.net.run_for(1.0)
    assert cluster.nodes[0].custody.reserve.room(cluster.now) == ROOM


def test_a_shard_that_somebody_else_has_needs_no_room() -> None:
    cluster = trainers(Retain(newest=1))
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    cluster.wait(cluster.unpublish(ROLLOUTS[0], R[0]))
    cluster.nodes[1].custody.reserve.limit = 10
    cluster.wait(cluster.unpublish(0, T[0]))
    assert kept(cluster) == {1: 1}
    cluster.wait(cluster.unpublish(1, T[1]))
    assert kept(cluster) == {1: 1}, "the rollout has the other shard"


def test_tensors_that_were_written_to_while_published_are_not_kept_as_if_they_were_right() -> None:
    cluster = trainers(Retain(newest=1))
    (publication, _) = cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.spoilt.add(publication)
    for error in unpublish_all(cluster):
        assert isinstance(error, RetentionLost)
        assert "written to" in str(error)
    cluster.until(lambda: not cluster.copies)


# --- pins ---


def test_an_unpublish_of_a_pinned_last_copy_makes_one_copy_until_the_pin_ends() -> None:
    cluster = trainers()
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    began = cluster.now
    next_version(cluster, 2)
    assert cluster.now < began + 2.0, "it needn't wait for the readers"
    assert kept(cluster) == {1: 2}
    cluster.net.run_for(10.0)
    assert kept(cluster) == {1: 2}
    cluster.wait(*(cluster.hold(p, R[s], answers[s]) for s, p in enumerate(ROLLOUTS)))
    for shard, peer in enumerate(ROLLOUTS):
        assert cluster.finish(peer, R[shard], answers[shard]) is None
    cluster.until(lambda: not cluster.copies)


def decided_and_copied() -> tuple[Cluster, list[Any]]:
    """A group has decided for a version that lives in copies only, for its sake."""
    group = GroupConfig(pin_idle_seconds=10.0)
    cluster = trainers(config=Config(swim=QUICK, group=group))
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    next_version(cluster, 2)
    assert kept(cluster) == {1: 2}
    return cluster, answers


def test_a_group_that_never_asks_again_keeps_no_copy_for_ever() -> None:
    cluster, _ = decided_and_copied()
    cluster.net.run_for(8.0)
    assert kept(cluster) == {1: 2}
    cluster.until(lambda: not cluster.copies, 10.0)
    errors = cluster.errors(*(cluster.ask(p, R[s]) for s, p in enumerate(ROLLOUTS)))
    assert all(isinstance(error, GroupBroken) for error in errors)
    assert "shard 0, 1 showed no sign of it" in str(errors[0])
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 2


def test_a_pull_that_goes_on_keeps_the_copies_that_it_reads() -> None:
    cluster, answers = decided_and_copied()
    cluster.wait(cluster.hold(3, R[1], answers[1], complete=False))
    cluster.net.run_for(8.0)
    publication = answers[1].publication
    cluster.nodes[3].verified(cluster.now, R[1], publication, [(0, bytes(16), frozenset())])
    cluster.net.run_for(8.0)
    assert kept(cluster) == {1: 2}
    cluster.until(lambda: not cluster.copies, 10.0)


def reads(cluster: Cluster) -> list[float]:
    """When some copy asked whether it is needed."""
    times: list[float] = []
    for node in cluster.nodes:
        read = node.records.read

        def count(now: float, key: Any, *args: Any, read: Any = read, **options: Any) -> Any:
            if key == retains_key("policy"):
                times.append(now)
            return read(now, key, *args, **options)

        node.records.read = count  # type: ignore[method-assign]
    return times


def test_a_copy_asks_rarely_whether_it_is_needed_while_nothing_happens() -> None:
    cluster = trainers(Retain(versions=(1,)))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    assert unpublish_all(cluster) == [None, None]
    cluster.net.run_for(5.0)
    times = reads(cluster)
    cluster.net.run_for(120.0)
    assert kept(cluster) == {1: 2}
    assert 2 * 3 <= len(times) <= 2 * 6, "each of the two in 30 s or so"


def test_however_much_happens_a_copy_asks_at_a_slow_pace() -> None:
    cluster = trainers(Retain(versions=(1,)), peers=6)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    assert unpublish_all(cluster) == [None, None]
    slot = Slot(Group("policy", "busy"), 0)
    cluster.wait(cluster.open(5, slot, 1))
    times = reads(cluster)
    began = cluster.now
    for version in range(2, 40):
        cluster.wait(cluster.publish(5, slot, version))
        cluster.net.run_for(0.1)
        cluster.shard(5, slot).drop(cluster.now)
        cluster.net.run_for(0.1)
    looks = RetentionConfig().look_interval
    assert 4 <= len(times) <= 2 * ((cluster.now - began) / looks + 1)


def test_a_copy_is_freed_soon_after_the_reader_that_pinned_it_has_died() -> None:
    cluster = trainers(peers=12)
    directory = cluster.nodes[0].directory
    owners = {*directory.owners(retains_key("policy")), *directory.owners(versions_key("policy"))}
    # Its death changes nothing in the keys, nor who keeps them.
    reader = next(p for p in range(2, 12) if cluster.nodes[p].info.peer_id not in owners)
    slot = Slot(ROLLOUT, 0)
    cluster.wait(cluster.open(reader, slot, 1))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.wait(cluster.ask(reader, slot))
    assert unpublish_all(cluster) == [None, None]
    cluster.net.run_for(10.0)
    assert kept(cluster) == {1: 2}
    cluster.crash(reader)
    cluster.until_dead(reader)
    cluster.until(lambda: not cluster.copies, 5.0)


# --- closing, leaving ---


def test_a_close_of_a_pinned_last_copy_leaves_a_copy() -> None:
    cluster = trainers()
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.ask_all(ROLLOUT, ROLLOUTS)
    cluster.wait(*(cluster.close(p, T[s]) for s, p in enumerate(TRAINERS)))
    assert kept(cluster) == {1: 2}


def test_a_close_waits_for_pinned_readers_where_no_copy_can_be_made() -> None:
    cluster = trainers(limit=0)
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    numbers = [cluster.close(p, T[s]) for s, p in enumerate(TRAINERS)]
    cluster.net.run_for(4.0)
    assert all(cluster.verbs[number].end is None for number in numbers)
    cluster.wait(*(cluster.hold(p, R[s], answers[s]) for s, p in enumerate(ROLLOUTS)))
    cluster.wait(*numbers)


def test_a_close_that_finds_no_keeper_ends_by_its_deadline_and_says_what_was_lost() -> None:
    cluster = trainers(Retain(newest=1), limit=0)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    for error in cluster.errors(*(cluster.close(p, T[s], 5.0) for s, p in enumerate(TRAINERS))):
        assert isinstance(error, RetentionLost)
        assert "version 1" in str(error)
    cluster.form(TRAINER, TRAINERS)


def test_a_handle_that_alone_retains_what_it_holds_loses_nothing_that_matters() -> None:
    cluster = Cluster(0, 3)
    mine = Slot(Group("policy", "solo"), 0)
    cluster.wait(cluster.open(0, mine, 1, retain=Retain(newest=3)))
    cluster.wait(cluster.publish(0, mine, 1))
    cluster.wait(cluster.close(0, mine))


@pytest.mark.parametrize("seed", range(4))
def test_peers_that_leave_hand_on_what_they_hold_and_what_they_keep(seed: int) -> None:
    cluster = trainers(Retain(versions=(1, 2)), seed=seed)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    next_version(cluster, 2)
    assert kept(cluster) == {1: 2}
    leaving = [cluster.leave_well(peer) for peer in TRAINERS]
    closing = [cluster.close(p, T[s]) for s, p in enumerate(TRAINERS)]
    cluster.wait(*closing)
    assert cluster.wait(*leaving) == [(), ()]
    assert kept(cluster) == {1: 2, 2: 2}
    assert not {peer for peer, _ in cluster.copies} & set(TRAINERS)
    for peer in TRAINERS:
        cluster.nodes[peer].leave(cluster.now)
        cluster.net.settle(cluster.nodes[peer].info.peer_id)
        cluster.crash(peer)
    cluster.net.run_for(5.0)
    assert can_be_had(cluster, 3, 1)
    assert can_be_had(cluster, 3, 2)


def test_a_peer_that_leaves_alone_says_what_was_lost() -> None:
    cluster = trainers(Retain(versions=(1,)))
    for node in cluster.nodes[2:]:
        node.custody.reserve.limit = 0
    cluster.publish_all(TRAINER, TRAINERS, 1)
    next_version(cluster, 2)
    leaving = [cluster.leave_well(peer, 6.0) for peer in TRAINERS]
    cluster.wait(*(cluster.close(p, T[s], 6.0) for s, p in enumerate(TRAINERS)))
    for (lost,) in cluster.wait(*leaving):
        assert "version 1" in lost
        assert "p4" in lost


def test_a_peer_that_is_alone_leaves_without_a_word() -> None:
    """What only its own handles retain is wanted by nobody, whichever of them closes first."""
    cluster = Cluster(0, 1, offload_limit=ROOM)
    trainer, watcher = Slot(Group("policy", "t"), 0), Slot(Group("policy", "w"), 0)
    cluster.wait(cluster.open(0, trainer, 1))
    cluster.wait(cluster.open(0, watcher, 1, retain=Retain(newest=2)))
    for version in (1, 2, 3):
        cluster.wait(cluster.publish(0, trainer, version))
        if version < 3:
            cluster.wait(cluster.unpublish(0, trainer))
    leaving = cluster.leave_well(0)
    closing = [cluster.close(0, slot) for slot in (trainer, watcher)]
    cluster.wait(*closing)
    assert cluster.wait(leaving) == [()]


def test_everything_that_leaves_at_once_ends_by_the_deadline() -> None:
    cluster = trainers(Retain(newest=1))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    leaving = [cluster.leave_well(peer, 4.0) for peer in range(5)]
    closing = [cluster.close(p, T[s], 4.0) for s, p in enumerate(TRAINERS)]
    closing.append(cluster.close(RETAINER, WATCHER, 4.0))
    cluster.ends(*leaving, *closing)
    cluster.check_ends()


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.3, 3.0])
def test_shards_of_a_replica_that_close_one_after_the_other_all_leave_copies(pause: float) -> None:
    cluster = trainers(Retain(newest=1))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    first = cluster.close(0, T[0])
    cluster.net.run_for(pause)
    cluster.wait(first, cluster.close(1, T[1]))
    assert kept(cluster) == {1: 2}
    assert can_be_had(cluster, 3, 1)


def test_who_closes_its_own_retains_does_not_count_them_though_they_are_still_on_record() -> None:
    cluster = Cluster(0, 3)
    mine = Slot(Group("policy", "solo"), 0)
    cluster.wait(cluster.open(0, mine, 1, retain=Retain(newest=1)))
    cluster.wait(cluster.publish(0, mine, 1))
    for other in (1, 2):
        cluster.pause(other)  # so that the directory takes its time
    (error,) = cluster.errors(cluster.close(0, mine, timeout=3.0))
    assert error is None
