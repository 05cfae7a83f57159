"""Replicas that publish the same version: whether they have the same bytes, and what if not."""

from __future__ import annotations

import pytest
from cluster import LAYOUT, ROLLOUT, Cluster

from chaos.checks.content import OTHER_BYTES  # the chaos suite knows conflicts by their words
from tensorhub_p2p.errors import VersionConflict
from tensorhub_p2p.protocol.directory.records import Registers, values, versions_key
from tensorhub_p2p.protocol.identity import Group, Publication, Slot
from tensorhub_p2p.protocol.messages import Phase, PullBye, PullGone, PullHello, VersionRecord
from tensorhub_p2p.protocol.shards.verbs import PublicationLost, PullMessage, StopDigests

LOWER, HIGHER = Group("policy", "trainer-0"), Group("policy", "trainer-1")
FIRST, SECOND, READER = [0, 1], [2, 3], 4
"""The peers of the two trainers, and one that reads."""


def trainers(*deviant: Group) -> Cluster:
    cluster = Cluster(0, 5)
    cluster.deviant = {group.replica for group in deviant}
    cluster.form(LOWER, FIRST)
    cluster.form(HIGHER, SECOND)
    return cluster


def side_by_side(*deviant: Group) -> Cluster:
    """Both have published version 1, the lower one first."""
    cluster = trainers(*deviant)
    cluster.publish_all(LOWER, FIRST, 1)
    cluster.net.run_for(0.2)  # until it has looked whether it is whole
    cluster.publish_all(HIGHER, SECOND, 1)
    return cluster


def peers_of(group: Group) -> list[int]:
    return FIRST if group == LOWER else SECOND


def on_record(c: Cluster, group: Group) -> dict[int, tuple[VersionRecord, int]]:
    """By shard: what a group's slots have at the versions key, and how often it was written."""
    found: list[Registers] = []
    c.nodes[READER].records.read(c.now, versions_key("policy"), lambda _now, r: found.append(r))
    c.net.settle(c.nodes[READER].info.peer_id)
    c.until(lambda: bool(found))
    of_versions = values(found[0], VersionRecord)
    return {
        record.slot.shard: (record, register.sequence)
        for register, record in of_versions
        if record.slot.group == group
    }


def said(c: Cluster, group: Group) -> list[bytes]:
    return [record.digests for _, (record, _) in sorted(on_record(c, group).items())]


def look_in(c: Cluster, group: Group, *, seconds: float = 0.2) -> None:
    """Somebody reads from all of the group's shards for so long, and goes again."""
    reader = c.nodes[READER].info.peer_id
    for shard, peer in enumerate(peers_of(group)):
        slot, node = Slot(group, shard), c.nodes[peer]
        server = c.shard(peer, slot).server
        assert server is not None
        hello = PullHello(f"{slot}", slot, server.publication, LAYOUT.digest, ("tcp",))
        node.receive(c.now, reader, hello)
        c.net.settle(node.info.peer_id)
    c.net.run_for(seconds)
    for shard, peer in enumerate(peers_of(group)):
        c.nodes[peer].receive(c.now, reader, PullBye(f"{Slot(group, shard)}", Slot(group, shard)))
        c.net.settle(c.nodes[peer].info.peer_id)


def holds(c: Cluster, group: Group) -> list[bool]:
    return [c.nodes[p].holds(Slot(group, s)) for s, p in enumerate(peers_of(group))]


def unpublish(c: Cluster, group: Group) -> list[Exception | None]:
    verbs = [c.unpublish(p, Slot(group, s)) for s, p in enumerate(peers_of(group))]
    return list(c.errors(*verbs))


def looks(c: Cluster, group: Group) -> bool:
    """Whether any of its shards goes on looking at the key."""
    return any(
        c.shard(peer, Slot(group, shard)).references.comparing.next_wakeup() is not None
        for shard, peer in enumerate(peers_of(group))
    )


def test_who_publishes_alone_neither_writes_nor_reads_for_it() -> None:
    c = trainers()
    c.publish_all(LOWER, FIRST, 1)
    c.net.run_for(0.02)
    before = {shard: count for shard, (_, count) in on_record(c, LOWER).items()}
    look_in(c, LOWER, seconds=5.0)
    assert {shard: count for shard, (_, count) in on_record(c, LOWER).items()} == before
    assert said(c, LOWER) == [b"", b""]
    assert not looks(c, LOWER)


def test_who_sees_a_rival_says_what_it_consists_of_once() -> None:
    c = side_by_side()
    c.until(lambda: all(said(c, HIGHER)))
    before = on_record(c, HIGHER)
    assert said(c, LOWER) == [b"", b""], "it came first, and nobody asked it yet"
    look_in(c, LOWER)
    c.net.run_for(30.0)
    assert said(c, LOWER) == said(c, HIGHER)
    assert len(set(said(c, LOWER))) == 2, "one for each shard"
    assert on_record(c, HIGHER) == before


def test_equal_bytes_disturb_nobody_and_nobody_goes_on_looking() -> None:
    c = side_by_side()
    look_in(c, LOWER)
    c.until(lambda: not looks(c, HIGHER))
    assert not looks(c, LOWER)
    assert holds(c, LOWER) == holds(c, HIGHER) == [True, True]
    assert unpublish(c, HIGHER) == unpublish(c, LOWER) == [None, None]


@pytest.mark.parametrize("first", [LOWER, HIGHER], ids=["lower first", "higher first"])
def test_of_two_that_differ_the_higher_one_is_told_at_its_next_verb_and_once(first: Group) -> None:
    c = trainers(HIGHER)
    for group in (first, HIGHER if first == LOWER else LOWER):
        c.publish_all(group, peers_of(group), 1)
        c.net.run_for(0.2)
    for group in (LOWER, HIGHER):
        look_in(c, group)  # as a pull does, of all who have the version
    c.until(lambda: holds(c, HIGHER) == [False, False])
    for error in unpublish(c, HIGHER):
        assert isinstance(error, VersionConflict)
        assert f"by trainer-1 is not published any more: {OTHER_BYTES}" in str(error)
        assert "by trainer-0, which stands" in str(error)
    assert unpublish(c, HIGHER) == [None, None]
    c.publish_all(HIGHER, SECOND, 2)
    assert holds(c, LOWER) == [True, True]
    assert unpublish(c, LOWER) == [None, None]


def test_a_group_call_tells_of_it_as_well() -> None:
    c = side_by_side(HIGHER)
    look_in(c, LOWER)
    c.until(lambda: holds(c, HIGHER) == [False, False])
    asks = [c.ask(p, Slot(HIGHER, s)) for s, p in enumerate(SECOND)]
    assert all(isinstance(error, VersionConflict) for error in c.errors(*asks))
    assert c.replicate_all(HIGHER, SECOND).publication.replica == "trainer-0"


def test_what_is_contradicted_is_hidden_and_served_no_more_and_no_digest_is_taken() -> None:
    c = side_by_side(HIGHER)
    slot, node = Slot(HIGHER, 0), c.nodes[2]
    server = c.shard(2, slot).server
    assert server is not None
    reader = c.nodes[READER].info.peer_id
    look_in(c, LOWER)
    while node.holds(slot):  # somebody reads on, and renews its lease
        node.receive(c.now, reader, PullHello("pull", slot, server.publication, LAYOUT.digest, ()))
        c.net.settle(node.info.peer_id)
        c.net.run_for(0.5)
    events = [event for _, peer, event in c.events if peer == 2]
    assert any(isinstance(e, StopDigests) for e in events)
    assert any(isinstance(e, PublicationLost) for e in events)
    c.until(lambda: all(r.phase is Phase.HIDDEN for r, _ in on_record(c, HIGHER).values()))

    def told() -> list[str]:
        said = [event.message for _, _, event in c.events if isinstance(event, PullMessage)]
        return [message.reason for message in said if isinstance(message, PullGone)]

    c.until(lambda: told() == ["its version has other bytes"])


def test_one_shard_that_differs_takes_the_others_of_its_replica_along() -> None:
    c = trainers(HIGHER)
    take = c.digest_of

    def digest_of(publication: Publication, shard: int, chunk: int) -> bytes:
        lower = Publication(publication.epoch, publication.version, "trainer-0", (1, 1))  # type: ignore[arg-type]
        return take(publication if shard == 1 else lower, shard, chunk)

    c.digest_of = digest_of  # type: ignore[method-assign]
    c.publish_all(LOWER, FIRST, 1)
    c.publish_all(HIGHER, SECOND, 1)
    look_in(c, LOWER)
    c.until(lambda: holds(c, HIGHER) == [False, False])
    lower, higher = said(c, LOWER), said(c, HIGHER)
    assert lower[0] == higher[0]
    assert lower[1] != higher[1]


def test_its_number_is_used_up_also_if_it_was_never_whole() -> None:
    c = trainers(HIGHER)
    c.publish_all(LOWER, FIRST, 1)
    slot = Slot(HIGHER, 0)
    c.wait(c.publish(2, slot, 1))
    look_in(c, LOWER)
    c.until(lambda: not c.nodes[2].holds(slot))
    assert [type(e) for e in c.errors(c.unpublish(2, slot))] == [VersionConflict]
    assert [type(e) for e in c.errors(c.publish(2, slot, 1))] == [VersionConflict]
    c.wait(c.publish(2, slot, 2))


def test_bytes_that_were_never_whole_bind_nobody_to_them() -> None:
    c = trainers(HIGHER)
    c.publish_all(LOWER, FIRST, 1)
    c.wait(c.publish(2, Slot(HIGHER, 0), 1))
    c.net.run_for(1.0)
    assert said(c, HIGHER) != [b""]
    c.wait(c.unpublish(2, Slot(HIGHER, 0)))
    assert said(c, HIGHER) == [b""]
    c.deviant.clear()
    c.publish_all(HIGHER, SECOND, 1)
    look_in(c, LOWER)
    c.until(lambda: not looks(c, HIGHER))
    assert holds(c, HIGHER) == [True, True]


def test_who_withdraws_leaves_on_record_what_it_consisted_of() -> None:
    c = trainers()
    c.publish_all(LOWER, FIRST, 1)
    c.net.run_for(1.0)
    assert unpublish(c, LOWER) == [None, None]
    assert all(said(c, LOWER))


def test_a_lower_one_that_dies_contradicts_nobody_any_more() -> None:
    c = trainers(HIGHER)
    c.publish_all(LOWER, FIRST, 1)
    c.net.run_for(1.0)
    look_in(c, LOWER)
    for peer in FIRST:
        c.crash(peer)
    for peer in FIRST:
        c.until_dead(peer)
    c.publish_all(HIGHER, SECOND, 1)
    look_in(c, HIGHER, seconds=5.0)
    assert holds(c, HIGHER) == [True, True]
    assert not looks(c, HIGHER), "nobody is going to say more"


def test_a_lower_one_whose_publisher_let_it_go_stands_while_others_have_it() -> None:
    c = trainers(HIGHER)
    c.wait(*(c.open(READER, Slot(ROLLOUT, shard)) for shard in range(2)))
    c.publish_all(LOWER, FIRST, 1)
    c.net.run_for(1.0)
    c.replicate_all(ROLLOUT, [READER, READER])
    assert unpublish(c, LOWER) == [None, None]
    c.publish_all(HIGHER, SECOND, 1)
    c.until(lambda: holds(c, HIGHER) == [False, False])


def test_those_who_wait_for_the_version_get_the_lower_one() -> None:
    c = trainers(HIGHER)
    late = c.start()
    c.wait(*(c.open(late, Slot(ROLLOUT, shard)) for shard in range(2)))
    c.publish_all(LOWER, FIRST, 1)
    c.publish_all(HIGHER, SECOND, 1)
    look_in(c, LOWER)
    c.until(lambda: holds(c, HIGHER) == [False, False])
    assert c.replicate_all(ROLLOUT, [late, late]).publication.replica == "trainer-0"
