"""One peer's protocols together: what its verbs, reads and handles leave behind."""

from __future__ import annotations

import random

import pytest
from cluster import LAYOUT, ROLLOUT, TRAINER, Cluster

from tensorhub_p2p.config import Config, SwimConfig
from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.directory.directory import KeyChanged
from tensorhub_p2p.protocol.directory.records import holders_key
from tensorhub_p2p.protocol.directory.ring import owners_hash
from tensorhub_p2p.protocol.identity import Group, PeerId, PeerInfo, Publication, Slot
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.membership.swim_events import Evidence, MemberForgotten
from tensorhub_p2p.protocol.messages import (
    DirectoryMismatch,
    DirectoryRead,
    DirectoryWrite,
    Gossip,
    HolderRecord,
    Key,
    LayoutPage,
    Message,
    Phase,
    Ping,
    PullGone,
    PullHello,
    PullUpdate,
    Register,
    Rumour,
    Status,
    ViewDigest,
)
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.protocol.shards.verbs import HoldersChanged, PullMessage

ALONE = Group("policy", "alone")
S = Slot(ALONE, 0)
KEY = Key("holders", "policy", "0")


def published(peers: int = 5) -> tuple[Cluster, Publication]:
    cluster = Cluster(0, peers)
    cluster.form(ALONE, [0])
    (publication,) = cluster.publish_all(ALONE, [0], 1)
    return cluster, publication


def read_from(cluster: Cluster, puller: int, publication: Publication) -> None:
    """Peer `puller` gets a lease on what peer 0 published."""
    hello = PullHello("a pull", S, publication, LAYOUT.digest, ("tcp",))
    cluster.nodes[0].receive(cluster.now, cluster.nodes[puller].info.peer_id, hello)
    cluster.net.settle(cluster.nodes[0].info.peer_id)


def reads_under_way(cluster: Cluster, peer: int) -> int:
    return len(cluster.nodes[peer].records._reads)


def test_two_models_of_one_peer_share_its_upload_slots() -> None:
    other = Group("critic", "alone")
    cluster, publication = published()
    cluster.form(other, [0])
    (theirs,) = cluster.publish_all(other, [0], 1)
    node = cluster.nodes[0]
    usual = node._uploads.each()
    read_from(cluster, 1, publication)
    assert node._uploads.each() == usual
    hello = PullHello("another", Slot(other, 0), theirs, LAYOUT.digest, ("tcp",))
    node.receive(cluster.now, cluster.nodes[2].info.peer_id, hello)
    assert node._uploads.each() == usual // 2
    cluster.wait(cluster.close(0, Slot(other, 0)))
    assert node._uploads.each() == usual


def test_a_message_for_a_pull_goes_straight_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come by the hundred: no machine of the node is looked at for one."""
    cluster, _ = published()
    node, sender = cluster.nodes[1], cluster.nodes[0].info.peer_id
    cluster.net.run_for(1.0)
    monkeypatch.setattr(node, "_drain", lambda _now: pytest.fail("looks at all machines"))
    messages: list[Message] = [
        PullUpdate("a pull", S, b""),
        PullGone("a pull", S, "why"),
        LayoutPage("a pull", S, 0, 0, ()),
    ]
    for message in messages:
        node.receive(cluster.now, sender, message)
    assert node.outbox.drain() == [PullMessage("a pull", sender, m) for m in messages]


# --- following the holders of a shard ---


def test_a_follow_has_one_read_under_way_while_its_peer_is_cut_off() -> None:
    cluster, publication = published()
    node = cluster.nodes[1]
    cluster.net.run_for(1.0)
    before = reads_under_way(cluster, 1)
    ids = [n.info.peer_id for n in cluster.nodes]
    cluster.net.partition([ids[1]], [i for i in ids if i != ids[1]])
    follow = node.follow(cluster.now, "policy", 0, publication)
    for _ in range(20):
        node.records.take(cluster.now, KeyChanged(holders_key("policy", 0)))
    assert reads_under_way(cluster, 1) == before + 1
    cluster.net.run_for(1.5)
    assert reads_under_way(cluster, 1) == before + 1
    node.unfollow(cluster.now, follow)
    assert reads_under_way(cluster, 1) == before


def test_a_follow_tells_who_holds_the_shard_and_what_changes() -> None:
    cluster, publication = published()
    cluster.form(ROLLOUT, [1])
    follow = cluster.nodes[2].follow(cluster.now, "policy", 0, publication)
    cluster.replicate_all(ROLLOUT, [1])
    cluster.net.run_for(2.0)
    told = [
        sorted(holder.peer for holder in event.holders)
        for _, peer, event in cluster.events
        if peer == 2 and isinstance(event, HoldersChanged) and event.follow == follow
    ]
    ids = [n.info.peer_id for n in cluster.nodes]
    assert told == [[ids[0]], [ids[0], ids[1]]]


def test_a_follow_names_holders_of_every_publication_of_the_version_and_no_others() -> None:
    cluster, publication = published()
    for peer, name, number in ((1, "beside", 1), (2, "later", 2)):
        cluster.form(Group("policy", name), [peer])
        cluster.publish_all(Group("policy", name), [peer], number)
    cluster.nodes[3].follow(cluster.now, "policy", 0, publication)
    cluster.net.run_for(1.0)
    told = [event for _, _, event in cluster.events if isinstance(event, HoldersChanged)]
    assert {(h.slot.group.replica, h.publication.replica) for h in told[-1].holders} == {
        ("alone", "alone"),
        ("beside", "beside"),
    }


def test_an_equal_publication_hides_no_silent_holder_of_the_one_that_is_followed() -> None:
    cluster, publication = published()
    cluster.form(TRAINER, [1])
    cluster.publish_all(TRAINER, [1], 1)
    node, ids = cluster.nodes[3], [n.info.peer_id for n in cluster.nodes]
    cluster.pause(0)
    cluster.until(lambda: not node.liveness.is_responsive(ids[0]))
    node.follow(cluster.now, "policy", 0, publication)
    cluster.net.run_for(1.0)
    told = [event for _, _, event in cluster.events if isinstance(event, HoldersChanged)]
    assert {holder.peer for holder in told[-1].holders} == {ids[0], ids[1]}


def test_whoever_unfollows_is_told_nothing_any_more() -> None:
    cluster, publication = published()
    node = cluster.nodes[2]
    follow = node.follow(cluster.now, "policy", 0, publication)
    node.unfollow(cluster.now, follow)
    cluster.net.run_for(3.0)
    assert not any(isinstance(event, HoldersChanged) for _, _, event in cluster.events)
    assert holders_key("policy", 0) not in node.directory._watched


# --- closing and interrupting ---


def test_a_slot_that_is_being_closed_can_not_be_opened_before_that_is_over() -> None:
    cluster, publication = published()
    read_from(cluster, 1, publication)
    closing = cluster.close(0, S)
    (error,) = cluster.errors(cluster.open(0, S, 1))
    assert isinstance(error, StateError)
    assert "being closed" in str(error)
    cluster.wait(closing)
    cluster.wait(cluster.open(0, S, 1))


def test_a_hidden_record_that_nobody_waited_for_is_written_before_the_slot_goes() -> None:
    cluster, _ = published()
    references = cluster.shard(0, S).references
    withdrawal = cluster.unpublish(0, S)
    references.tick = lambda _now: None  # type: ignore[method-assign]
    cluster.until(lambda: cluster.verbs[withdrawal].end is not None and references.held is None)
    cluster.wait(cluster.close(0, S))
    held = [node.directory._owner._held.get(KEY) for node in cluster.nodes]
    phases = [
        register.value.phase
        for owner in held
        if owner is not None
        for register in owner.cells.values()
        if isinstance(register.value, HolderRecord)
    ]
    assert Phase.HIDDEN in phases


def test_an_interrupt_ends_only_the_verb_that_it_names() -> None:
    cluster, publication = published()
    cluster.form(TRAINER, [1])
    (answer,) = cluster.ask_all(TRAINER, [1])
    slot = Slot(TRAINER, 0)
    held = cluster.hold(1, slot, answer)
    cluster.wait(held)
    hello = PullHello("a pull", slot, publication, LAYOUT.digest, ("tcp",))
    cluster.nodes[1].receive(cluster.now, cluster.nodes[2].info.peer_id, hello)
    closing = cluster.close(1, slot)
    cluster.nodes[1].interrupt(cluster.now, slot, held)
    cluster.net.run_for(0.5)
    assert cluster.verbs[closing].end is None, "a reader is there, and has its lease"
    cluster.nodes[1].interrupt(cluster.now, slot, closing)
    cluster.net.settle(cluster.nodes[1].info.peer_id)
    assert cluster.verbs[closing].end is not None


def test_a_newcomer_that_was_told_of_no_death_asks_whose_record_it_found() -> None:
    """It joined through a peer that knew no better; who does is asked in the end."""
    cluster, _ = published(4)
    dead = cluster.nodes[0].info.peer_id
    cluster.crash(0)
    cluster.until_dead(0)
    newcomer = cluster.start()
    cluster.net.run_for(20.0)  # all views are the same by then, but for this:
    members = cluster.nodes[newcomer].zones.home._members
    del members._tombstones[dead], members._hearsay[dead]
    assert cluster.nodes[newcomer].zones.status(dead) is None
    cluster.wait(cluster.open(newcomer, S, 1, timeout=60.0))
    assert cluster.nodes[newcomer].zones.status(dead) is Status.DEAD


# --- evidence ---


def test_a_broken_connection_is_followed_by_a_probe_at_once() -> None:
    cluster = Cluster(0, 3)
    node, other = cluster.nodes[0], cluster.nodes[1].info.peer_id
    node.evidence(cluster.now, other, Evidence.DISCONNECTED)
    sent = [item for item in node.outbox.drain() if isinstance(item, Send)]
    assert [s.to for s in sent if isinstance(s.message, Ping)] == [other]


# --- an own pause ---


def test_a_peer_that_did_not_run_doubts_its_copies_before_it_answers_the_first_message() -> None:
    cluster, _ = published()
    node, asker = cluster.nodes[0], cluster.nodes[1].info.peer_id
    cluster.net.run_for(1.0)
    key = holders_key("policy", 0)
    order: list[str] = []
    doubt, answer = node.directory.was_absent, node.directory.receive

    def was_absent(now: float) -> None:
        order.append("doubt")
        doubt(now)

    def receive(now: float, sender: PeerId, message: Message) -> None:
        order.append("answer")
        answer(now, sender, message)

    node.directory.was_absent = was_absent  # type: ignore[method-assign]
    node.directory.receive = receive  # type: ignore[method-assign]
    node.receive(cluster.now + 10.0, asker, DirectoryRead(1, key, 0))
    assert order[:2] == ["doubt", "answer"]


# --- membership and directory ---


def lone(config: Config) -> Node:
    info = PeerInfo(PeerId("me"), "me", "here", ("me:1",))
    node = Node(info, config, random.Random(1))
    node.join(0.0, [])
    node.tick(0.0)
    node.outbox.drain()
    return node


@pytest.mark.parametrize("abroad", [False, True])
def test_with_whoever_takes_others_for_owners_views_are_compared(abroad: bool) -> None:
    node, other = lone(Config()), PeerId("other")
    register = Register(other, "a", 0, 1, None)
    node.receive(0.1, other, DirectoryWrite(1, KEY, 123, register, abroad))
    sent = [item for item in node.outbox.drain() if isinstance(item, Send)]
    assert Send(other, DirectoryMismatch(1)) in sent
    compared = [item for item in sent if isinstance(item.message, ViewDigest)]
    assert len(compared) == (0 if abroad else 1), "other zones have other members"


def test_what_one_wrote_that_died_before_this_peer_came_is_dropped_in_the_end() -> None:
    node = lone(Config(swim=SwimConfig(forget_dead_after=60)))
    dead, seal = PeerId("dead"), owners_hash((node.info.peer_id,))
    node.receive(1.0, dead, DirectoryWrite(1, KEY, seal, Register(dead, "a", 0, 1, None)))
    node.receive(1.0, PeerId("other"), Gossip((Rumour(dead, 0, Status.DEAD),)))
    assert node.directory._owner._count == 1
    node.tick(60.9)
    assert node.directory._owner._count == 1
    node.tick(61.1)
    assert node.directory._owner._count == 0
    assert MemberForgotten(dead) in node.outbox.drain()
