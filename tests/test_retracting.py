"""Bad weights taken back: nobody gets them any more, and nobody keeps them."""

from __future__ import annotations

from cluster import LAYOUT, ROLLOUT, TRAINER, Cluster

from tensorhub_p2p.errors import Timeout, VersionConflict, VersionUnavailable
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.messages import PullGone, PullHello, Question, Retain
from tensorhub_p2p.protocol.shards.verbs import PullMessage

T = [Slot(TRAINER, 0), Slot(TRAINER, 1)]
TRAINERS, ROLLOUTS, RETAINER = [0, 1], [2, 3], 4
ROOM = 100 * LAYOUT.num_bytes


def published(*versions: int, retain: Retain | None = None) -> Cluster:
    cluster = Cluster(0, 5, offload_limit=ROOM)
    cluster.form(TRAINER, TRAINERS)
    if retain is not None:
        watcher = Slot(Group("policy", "watcher"), 0)
        cluster.wait(cluster.open(RETAINER, watcher, 1, retain=retain))
    for version in versions:
        if version != versions[0]:
            cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
        cluster.publish_all(TRAINER, TRAINERS, version)
    return cluster


def test_a_retracted_version_answers_no_question_any_more() -> None:
    cluster = published(1)
    cluster.wait(cluster.retract(4, 1))
    cluster.form(ROLLOUT, ROLLOUTS)
    slots = [Slot(ROLLOUT, shard) for shard in range(2)]
    for selector in ("latest", "1"):
        asks = [
            cluster.ask(p, slots[s], Question("replicate", selector), 1.0)
            for s, p in enumerate(ROLLOUTS)
        ]
        for error in cluster.errors(*asks):
            assert isinstance(error, Timeout)
            assert "retracted" in str(error)
    assert cluster.nodes[0].holds(T[0]), "it is still published there"


def test_it_is_not_listed_any_more() -> None:
    cluster = published(1, 2)
    assert [version.version for version in cluster.wait(cluster.versions(4))[0]] == [2]
    cluster.wait(cluster.retract(4, 2))
    assert cluster.wait(cluster.versions(4)) == [()]


def test_it_can_not_be_published_again_but_the_next_one_can() -> None:
    cluster = published(1)
    cluster.wait(cluster.retract(4, 1))
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    for error in cluster.errors(*(cluster.publish(p, T[s], 1) for s, p in enumerate(TRAINERS))):
        assert isinstance(error, VersionConflict)
    cluster.publish_all(TRAINER, TRAINERS, 2)
    cluster.form(ROLLOUT, ROLLOUTS)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 2


def test_copies_of_it_are_freed_and_it_counts_as_none_of_the_newest() -> None:
    cluster = published(1, 2, 3, retain=Retain(newest=2))
    versions = [publication.version for publication in cluster.copies.values()]
    assert sorted(versions) == [1, 1, 2, 2]
    cluster.wait(cluster.retract(RETAINER, 2))
    cluster.until(lambda: {p.version for p in cluster.copies.values()} == {1})
    cluster.net.run_for(10.0)
    assert {p.version for p in cluster.copies.values()} == {1}


def test_who_serves_it_sends_its_readers_away() -> None:
    cluster = published(1)
    server = cluster.shard(0, T[0]).server
    assert server is not None
    cluster.wait(cluster.retract(4, 1))
    node, reader = cluster.nodes[0], cluster.nodes[3].info.peer_id
    hello = PullHello("pull-1", T[0], server.publication, LAYOUT.digest, ("tcp",))
    node.receive(cluster.now, reader, hello)
    cluster.net.settle(node.info.peer_id)
    assert server.readers()

    def told() -> list[str]:
        events = [event for _, _, event in cluster.events if isinstance(event, PullMessage)]
        return [e.message.reason for e in events if isinstance(e.message, PullGone)]

    cluster.until(lambda: bool(told()), 3.0)
    assert told()[0] == "it was retracted"
    cluster.wait(cluster.unpublish(0, T[0]))


def test_retracting_twice_is_harmless_and_an_unknown_version_is_an_error() -> None:
    cluster = published(1)
    cluster.wait(cluster.retract(4, 1))
    cluster.wait(cluster.retract(3, 1))
    (error,) = cluster.errors(cluster.retract(3, 7))
    assert isinstance(error, VersionUnavailable)
    assert "version 1" in str(error)


def test_without_owners_a_retraction_ends_by_its_deadline() -> None:
    cluster = published(1)
    for other in (0, 1, 2, 3):
        cluster.pause(other)
    (error,) = cluster.errors(cluster.retract(4, 1, timeout=1.0))
    assert isinstance(error, Timeout)
