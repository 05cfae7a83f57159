"""Whole clusters: versions are found without a group, and what was prefetched serves and goes."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import LATEST, LAYOUT, ROLLOUT, TRAINER, Cluster

from tensorhub_p2p.config import Config
from tensorhub_p2p.errors import StateError, Timeout
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR, Floor
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.messages import PullGone, PullHello, PullOffer, Retain
from tensorhub_p2p.protocol.shards.verbs import Found, PrefetchGone, PullMessage

T = [Slot(TRAINER, 0), Slot(TRAINER, 1)]
TRAINERS, ROLLOUTS, AHEAD = [0, 1], [2, 3], 4
LOOK = Config().retention.look_interval


def trainers(**options: Any) -> Cluster:
    cluster = Cluster(0, 5, **options)
    cluster.form(TRAINER, TRAINERS)
    return cluster


def slot(shard: int, number: int = 1) -> Slot:
    return Slot(Group("policy", f"prefetched/4/{number}"), shard)


def find(cluster: Cluster, selector: str, floor: Floor = NO_FLOOR, timeout: float = 10.0) -> int:
    return cluster.verb(AHEAD, "find", slot(0), selector, floor, timeout=timeout)


def prefetch(cluster: Cluster, *, whole: bool = True, shards: int = 2) -> None:
    """Both shards of the newest version, on one peer."""
    (found,) = cluster.wait(find(cluster, "latest"))
    node = cluster.nodes[AHEAD]
    for shard in range(shards):
        node.prefetching(cluster.now, slot(shard), found.publication, 2, LAYOUT, ())
        if whole:
            digest = cluster.digest_of(found.publication, shard, 0)
            node.verified(cluster.now, slot(shard), found.publication, [(0, digest, frozenset())])
            node.prefetched(cluster.now, slot(shard))
    cluster.net.settle(node.info.peer_id)
    cluster.net.run_for(1.0)


def release(cluster: Cluster, shards: int = 2) -> None:
    node = cluster.nodes[AHEAD]
    for shard in range(shards):
        node.end_prefetch(cluster.now, slot(shard))
    cluster.net.settle(node.info.peer_id)


def gone(cluster: Cluster) -> set[int]:
    """The shards of which the driver may free the memory."""
    return {e.slot.shard for _, _, e in cluster.events if isinstance(e, PrefetchGone)}


def give_up(cluster: Cluster) -> None:
    assert cluster.errors(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS))) == [
        None,
        None,
    ]


# --- finding ---


def test_what_is_found_is_what_a_group_would_get_and_nothing_is_pinned() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    (found,) = cluster.wait(find(cluster, "latest"))
    assert isinstance(found, Found)
    assert (found.publication.version, found.num_shards) == (1, 2)
    assert [source.slot for source in found.sources] == [T[0]]
    give_up(cluster)  # no pin holds it back


def test_what_is_absent_is_waited_for_until_the_deadline() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    two = find(cluster, "2", timeout=60.0)
    (error,) = cluster.errors(find(cluster, "3", timeout=2.0))
    assert isinstance(error, Timeout)
    assert "there is version 1" in str(error)
    give_up(cluster)
    cluster.net.run_for(20.0)  # looks by itself are rare by now
    cluster.publish_all(TRAINER, TRAINERS, 2)
    published = cluster.now
    (found,) = cluster.wait(two)
    assert found.publication.version == 2
    assert cluster.now - published < 0.5, "it was told"


def test_the_newest_is_never_below_what_is_held_already() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    (error,) = cluster.errors(find(cluster, "latest", (0, 2), timeout=2.0))
    assert isinstance(error, Timeout)
    (found,) = cluster.wait(find(cluster, "latest", (0, 1)))
    assert found.publication.version == 1


def test_a_find_that_is_stopped_ends_at_once() -> None:
    cluster = trainers()
    number = find(cluster, "7")
    cluster.nodes[AHEAD].stop_finding(cluster.now, number, "another took its place")
    cluster.net.settle(cluster.nodes[AHEAD].info.peer_id)
    (error,) = cluster.errors(number)
    assert isinstance(error, StateError)
    assert not cluster.nodes[AHEAD].finds._finds


# --- holding ---


def test_a_version_can_be_had_from_whole_prefetched_copies_alone() -> None:
    cluster = trainers()
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster)
    give_up(cluster)
    answer = cluster.replicate_all(ROLLOUT, ROLLOUTS)
    assert answer.publication.version == 1
    assert [source.slot for source in answer.sources] == [slot(0)]


def test_a_partial_copy_makes_no_version_whole() -> None:
    cluster = trainers()
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster, whole=False)
    give_up(cluster)
    errors = cluster.errors(
        *(cluster.ask(p, Slot(ROLLOUT, s), LATEST, 2.0) for s, p in enumerate(ROLLOUTS))
    )
    assert all(isinstance(error, Timeout) for error in errors)


def test_it_is_no_safe_copy_of_what_is_retained_and_no_retain_holds_it() -> None:
    cluster = trainers(offload_limit=100 * LAYOUT.num_bytes)
    watcher = Slot(Group("policy", "watcher"), 0)
    cluster.wait(cluster.open(3, watcher, 1, retain=Retain(newest=1)))
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster)
    give_up(cluster)
    assert len(cluster.copies) == 2, "the trainers offloaded it all the same"
    release(cluster)
    cluster.net.run_for(LOOK)
    assert gone(cluster) == {0, 1}
    assert len(cluster.copies) == 2


def test_chunks_are_served_while_others_are_still_missing() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster, shards=1, whole=False)
    node = cluster.nodes[AHEAD]
    publication = node.prefetches.get(slot(0)).publication  # type: ignore[union-attr]
    digest = cluster.digest_of(publication, 0, 0)
    node.verified(cluster.now, slot(0), publication, [(0, digest, frozenset())])
    reader = cluster.nodes[2].info.peer_id
    node.receive(cluster.now, reader, PullHello("p", slot(0), publication, LAYOUT.digest, ()))
    cluster.net.settle(node.info.peer_id)
    cluster.net.run_for(0.1)
    (offer,) = [e.message for _, p, e in cluster.events if isinstance(e, PullMessage) and p == 2]
    assert isinstance(offer, PullOffer)
    assert (offer.granted, offer.have, offer.digests) == (True, b"\x01", digest)
    (summary,) = cluster.wait(cluster.versions(2))[0]
    assert summary.holders == 3, "others find it"


def test_it_is_served_and_when_it_is_released_its_readers_are_sent_elsewhere() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster, shards=1)
    node = cluster.nodes[AHEAD]
    publication = node.prefetches.get(slot(0)).publication  # type: ignore[union-attr]
    reader = cluster.nodes[2].info.peer_id
    node.receive(cluster.now, reader, PullHello("p", slot(0), publication, LAYOUT.digest, ()))
    cluster.net.settle(node.info.peer_id)
    cluster.net.run_for(0.1)
    release(cluster, shards=1)
    cluster.net.run_for(LOOK)
    told = [e.message for _, p, e in cluster.events if isinstance(e, PullMessage) and p == 2]
    assert [type(message) for message in told] == [PullOffer, PullGone]
    cluster.until(lambda: gone(cluster) == {0})
    assert not len(node.prefetches)


# --- going ---


@pytest.mark.parametrize("whole", [True, False])
def test_what_nobody_pulls_goes_at_once(whole: bool) -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster, whole=whole)
    release(cluster)
    cluster.net.run_for(1.0)
    assert gone(cluster) == {0, 1}
    assert not len(cluster.nodes[AHEAD].prefetches)
    (summary,) = cluster.wait(cluster.versions(2))[0]
    assert summary.holders == 2, "the trainers only"


def test_what_others_have_decided_to_pull_stays_until_they_have_it() -> None:
    cluster = trainers()
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster)
    give_up(cluster)
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    release(cluster)
    cluster.net.run_for(3 * LOOK)
    assert not gone(cluster)
    cluster.wait(*(cluster.hold(p, Slot(ROLLOUT, s), answers[s]) for s, p in enumerate(ROLLOUTS)))
    for shard, peer in enumerate(ROLLOUTS):
        assert cluster.finish(peer, Slot(ROLLOUT, shard), answers[shard]) is None
    cluster.net.run_for(2 * LOOK)
    assert gone(cluster) == {0, 1}


def test_what_was_retracted_goes_once_somebody_reads_it() -> None:
    cluster = trainers()
    cluster.publish_all(TRAINER, TRAINERS, 1)
    prefetch(cluster, shards=1)
    node = cluster.nodes[AHEAD]
    publication = node.prefetches.get(slot(0)).publication  # type: ignore[union-attr]
    cluster.wait(cluster.retract(0, 1))
    reader = cluster.nodes[2].info.peer_id
    node.receive(cluster.now, reader, PullHello("p", slot(0), publication, LAYOUT.digest, ()))
    cluster.net.settle(node.info.peer_id)
    cluster.until(lambda: gone(cluster) == {0})


def test_a_release_of_what_is_gone_already_is_answered_again() -> None:
    cluster = trainers()
    release(cluster, shards=1)
    assert gone(cluster) == {0}
