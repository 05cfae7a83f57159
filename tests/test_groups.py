"""Groups of several processes, end to end over all protocols: what a verb's caller is told."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from cluster import LATEST, QUICK, ROLLOUT, TRAINER, Cluster, version

from chaos.checks.content import ONCE_MORE  # the chaos suite knows conflicts by their words
from tensorhub_p2p.config import Config, DirectoryConfig, GroupConfig
from tensorhub_p2p.errors import (
    GroupBroken,
    GroupDivergence,
    SlotTaken,
    StateError,
    Timeout,
    VersionConflict,
)
from tensorhub_p2p.protocol.directory.buckets import bucket_of
from tensorhub_p2p.protocol.directory.directory import KeyChanged
from tensorhub_p2p.protocol.directory.records import fence_name, versions_key
from tensorhub_p2p.protocol.groups.selection import newer_than
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Slot
from tensorhub_p2p.protocol.machine import Output, Send
from tensorhub_p2p.protocol.messages import (
    CallDecided,
    Decision,
    GroupMessage,
    MemberLeft,
    Message,
    Propose,
    Question,
    WholeMark,
)
from tensorhub_p2p.protocol.shards.verbs import PublicationLost

T = [Slot(TRAINER, 0), Slot(TRAINER, 1)]
R = [Slot(ROLLOUT, 0), Slot(ROLLOUT, 1)]
TRAINERS, ROLLOUTS = [0, 1], [2, 3]
LOSSES = [0.0, 0.05, 0.2]


def whole(
    seed: int = 0, loss: float = 0.0, published: int = 1, config: Config | None = None
) -> Cluster:
    """A trainer of two shards that has published a version, and a rollout of two shards."""
    cluster = Cluster(seed, 5, loss, config=config or Config(swim=QUICK))
    cluster.form(TRAINER, TRAINERS)
    cluster.form(ROLLOUT, ROLLOUTS)
    if published:
        cluster.publish_all(TRAINER, TRAINERS, published)
    return cluster


def next_version(cluster: Cluster, number: int) -> None:
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    cluster.publish_all(TRAINER, TRAINERS, number)


# --- G2: one version for a group ---


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(2))
def test_versions_go_from_group_to_group(seed: int, loss: float) -> None:
    cluster = whole(seed, loss)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 1
    for number in (2, 3):
        next_version(cluster, number)
        assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == number
    cluster.check_ends()


def test_a_call_waits_for_a_version_that_is_not_there_yet() -> None:
    cluster = whole(published=0)
    asks = [cluster.ask(p, R[s]) for s, p in enumerate(ROLLOUTS)]
    cluster.net.run_for(2.0)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    first, second = cluster.wait(*asks)
    assert first == second
    assert first.publication.version == 1


def test_wait_for_gives_all_shards_the_same_newer_version() -> None:
    cluster = whole()
    newer = Question("wait_for", newer_than(1))
    asks = [cluster.ask(p, R[s], newer) for s, p in enumerate(ROLLOUTS)]
    cluster.net.run_for(1.0)
    next_version(cluster, 2)
    assert [a.publication.version for a in cluster.wait(*asks)] == [2, 2]


def test_a_timeout_names_what_exists() -> None:
    cluster = whole()
    errors = cluster.errors(*(cluster.ask(p, R[s], version(9), 2.0) for s, p in enumerate((2, 3))))
    assert all(isinstance(error, Timeout) for error in errors)
    assert "replicate(9) of model 'policy'" in str(errors[1])
    assert "version 1 by trainer (whole)" in str(errors[1])


def test_a_retry_after_a_timeout_gets_the_publication_that_the_others_got() -> None:
    cluster = whole()
    other = Group("policy", "other")
    cluster.form(other, [4])
    (answer,) = cluster.wait(cluster.ask(2, R[0]))
    cluster.wait(cluster.publish(4, Slot(other, 0), 2))
    (late,) = cluster.wait(cluster.ask(3, R[1]))
    (again,) = cluster.wait(cluster.ask(2, R[0]))
    assert answer == late == again
    assert answer.publication.version == 1


@pytest.mark.parametrize("seed", range(6))
def test_after_a_timeout_all_shards_may_ask_something_else(seed: int) -> None:
    cluster = whole(seed, loss=0.1 * (seed % 3))
    cluster.replicate_all(ROLLOUT, ROLLOUTS)  # attempts count from the generation on
    asks = [cluster.ask(p, R[s], version(9), 1.0 + 0.3 * s) for s, p in enumerate(ROLLOUTS)]
    (first,) = cluster.errors(asks[0])
    assert isinstance(first, Timeout)
    again = [cluster.ask(2, R[0])]
    assert isinstance(cluster.errors(asks[1])[0], Timeout)
    again.append(cluster.ask(3, R[1]))
    assert [a.publication.version for a in cluster.wait(*again)] == [1, 1]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(2))
def test_different_questions_fail_for_all_at_once_and_only_once(seed: int, loss: float) -> None:
    cluster = whole(seed, loss)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    errors = cluster.errors(cluster.ask(2, R[0]), cluster.ask(3, R[1], version(1)))
    assert all(isinstance(error, GroupDivergence) for error in errors)
    assert "replicate latest" in str(errors[0])
    assert "replicate 1" in str(errors[0])
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 1


def test_divergence_is_told_at_once() -> None:
    cluster = whole(published=0)
    number = cluster.ask(2, R[0])
    cluster.net.run_for(1.0)
    began = cluster.now
    cluster.errors(number, cluster.ask(3, R[1], version(7)))
    assert cluster.now - began < 0.5


def test_a_publication_that_one_shard_can_not_have_fails_one_verb_of_each() -> None:
    cluster = whole()
    one, two = cluster.ask_all(ROLLOUT, ROLLOUTS)
    cluster.wait(cluster.hold(2, R[0], one))
    assert cluster.finish(2, R[0], one) is None
    cluster.give_up(3, R[1], two, "no reachable holder has chunk 3")
    cluster.net.run_for(1.0)
    (error,) = cluster.errors(cluster.ask(2, R[0]))
    assert isinstance(error, GroupBroken)
    assert "chunk 3" in str(error)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 1


def test_a_shard_in_the_middle_of_its_pull_hears_of_the_void_when_it_finishes() -> None:
    cluster = whole()
    one, two = cluster.ask_all(ROLLOUT, ROLLOUTS)
    cluster.give_up(3, R[1], two)
    cluster.net.run_for(1.0)
    assert isinstance(cluster.finish(2, R[0], one), GroupBroken)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)


# --- G4: never backwards ---


@pytest.mark.parametrize("die", [False, True])
def test_a_replica_whose_processes_were_all_replaced_does_not_go_backwards(die: bool) -> None:
    cluster = whole()
    other = Group("policy", "other")
    cluster.form(other, [4, 4])
    old = cluster.replicate_all(other, [4, 4])
    next_version(cluster, 2)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 2
    if die:
        cluster.net.run_for(0.5)
        for peer in ROLLOUTS:
            cluster.crash(peer)
        for peer in ROLLOUTS:
            cluster.until_dead(peer)
    else:
        cluster.wait(*(cluster.close(p, R[s]) for s, p in enumerate(ROLLOUTS)))
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    cluster.form(ROLLOUT, [0, 1])
    errors = cluster.errors(*(cluster.ask(p, R[s], timeout=3.0) for s, p in enumerate((0, 1))))
    assert all(isinstance(error, Timeout) for error in errors), errors
    assert str(old.publication) in str(errors[0])
    cluster.publish_all(TRAINER, TRAINERS, 3)
    assert cluster.replicate_all(ROLLOUT, [0, 1]).publication.version == 3
    cluster.check_ends()


def test_handles_under_made_up_names_leave_nothing_behind_but_marks() -> None:
    cluster = Cluster(0, 4)
    for number in range(20):
        slot = Slot(Group("policy", f"made-up-{number}"), 0)
        cluster.wait(cluster.verb(0, "open", slot, 1, False, None, True))
        cluster.wait(cluster.publish(0, slot, number + 1))
        cluster.wait(cluster.unpublish(0, slot))
        cluster.wait(cluster.close(0, slot))
    cluster.net.run_for(cluster.config.directory.forget_hidden_after + 2.0)
    for node in cluster.nodes:
        owned = node.directory._owner._held.values()
        left = [r for held in owned for r in held.cells.values() if r.value is not None]
        assert all(isinstance(register.value, WholeMark) for register in left)


# --- a member dies ---


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("loss", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(3))
def test_a_death_is_told_once_and_a_new_peer_takes_the_slot(
    seed: int, loss: float, dead: int
) -> None:
    cluster = whole(seed, loss)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    next_version(cluster, 2)
    cluster.crash(ROLLOUTS[dead])
    alive = ROLLOUTS[1 - dead]
    (error,) = cluster.errors(cluster.ask(alive, R[1 - dead], timeout=40))
    assert isinstance(error, GroupBroken)
    assert f"shard {dead}" in str(error)
    waiting = cluster.ask(alive, R[1 - dead], timeout=40)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, R[dead], timeout=40))
    answers = cluster.wait(waiting, cluster.ask(newcomer, R[dead], timeout=40))
    assert answers[0] == answers[1]
    assert answers[0].publication.version == 2
    cluster.check_ends()


@pytest.mark.parametrize("seed", range(16))
def test_a_death_at_any_moment_of_a_call_leaves_no_shard_unaware(seed: int) -> None:
    cluster = whole(seed, loss=0.1 * (seed % 3))
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    dead, alive = ROLLOUTS[seed % 2], ROLLOUTS[1 - seed % 2]
    asks = [cluster.ask(p, R[s], timeout=30) for s, p in enumerate(ROLLOUTS)]
    cluster.net.run_for(0.0007 * seed)
    cluster.crash(dead)
    mine = cluster.ends(asks[alive - 2])[0]
    if mine.error is None:
        # It had been decided: the survivor finishes, and its next verb is told.
        cluster.wait(cluster.hold(alive, R[alive - 2], mine.result))
        assert cluster.finish(alive, R[alive - 2], mine.result) is None
        (error,) = cluster.errors(cluster.ask(alive, R[alive - 2], timeout=30))
        assert isinstance(error, GroupBroken)
    else:
        assert isinstance(mine.error, GroupBroken)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, R[dead - 2], timeout=40))
    asks = [
        cluster.ask(alive, R[alive - 2], timeout=30),
        cluster.ask(newcomer, R[dead - 2], timeout=30),
    ]
    one, two = cluster.wait(*asks)
    assert one == two


def test_a_pull_that_ends_in_the_next_generation_counts_all_the_same() -> None:
    cluster = whole()
    one, _ = cluster.ask_all(ROLLOUT, ROLLOUTS)
    cluster.crash(3)
    cluster.until_dead(3)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, R[1]))
    waiting = cluster.ask(newcomer, R[1], timeout=20)
    cluster.until(lambda: cluster.shard(newcomer, R[1]).part.leader is not None)
    cluster.net.run_for(1.0)
    cluster.wait(cluster.hold(2, R[0], one))
    assert cluster.finish(2, R[0], one) is None, "it was decided for all"
    shard = cluster.shard(2, R[0])
    assert shard.part.calls.part.call == 1, "and was no call of the new generation"
    assert isinstance(cluster.errors(cluster.ask(2, R[0]))[0], GroupBroken)
    two, three = cluster.wait(cluster.ask(2, R[0]), waiting)
    assert two == three


def test_an_idle_member_is_told_at_its_next_verb_whatever_verb_it_is() -> None:
    cluster = whole()
    cluster.crash(0)
    cluster.until_dead(0)
    cluster.wait(cluster.unpublish(1, T[1]))
    (error,) = cluster.errors(cluster.publish(1, T[1], 2))
    assert isinstance(error, GroupBroken)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, T[0]))
    cluster.wait(cluster.publish(newcomer, T[0], 2), cluster.publish(1, T[1], 2))
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 2


def test_a_publication_that_was_not_whole_when_its_group_broke_is_given_up() -> None:
    cluster = whole(published=0)
    cluster.wait(cluster.publish(1, T[1], 5))
    cluster.crash(0)
    cluster.until_dead(0)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, T[0]))
    cluster.wait(cluster.publish(newcomer, T[0], 6))
    cluster.net.run_for(0.5)
    lost = [e for _, p, e in cluster.events if isinstance(e, PublicationLost) and p == 1]
    assert [e.publication.version for e in lost] == [5]
    assert isinstance(cluster.errors(cluster.publish(1, T[1], 6))[0], GroupBroken)
    cluster.wait(cluster.publish(1, T[1], 6))
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.version == 6


def test_a_whole_publication_outlives_the_death_of_its_publisher() -> None:
    cluster = whole()
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    for trainer in TRAINERS:
        cluster.crash(trainer)
    for trainer in TRAINERS:
        cluster.until_dead(trainer)
    late = [cluster.start(), cluster.start()]
    other = Group("policy", "late")
    cluster.form(other, late)
    assert cluster.replicate_all(other, late).publication.version == 1


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_closes_breaks_the_group_for_the_others(shard: int, loss: float) -> None:
    cluster = whole(3, loss)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    closer, other = ROLLOUTS[shard], ROLLOUTS[1 - shard]
    cluster.wait(cluster.close(closer, R[shard]))
    began = cluster.now
    (error,) = cluster.errors(cluster.ask(other, R[1 - shard], timeout=20))
    assert isinstance(error, GroupBroken)
    assert cluster.now - began < 4.0, "no death needs to be declared"
    cluster.wait(cluster.open(closer, R[shard]))
    asks = [cluster.ask(p, R[s]) for s, p in enumerate(ROLLOUTS)]
    one, two = cluster.wait(*asks)
    assert one == two


@pytest.mark.parametrize("lost", ["goodbye", "goodbye and news", "goodbye, news and answers"])
def test_members_notice_a_closed_shard_whatever_gets_lost(lost: str) -> None:
    """It says goodbye; watches tell; it answers whoever counts on it; and the key says so."""
    looks = 2.0 if "answers" in lost else 1000.0
    cluster = whole(config=Config(swim=QUICK, group=GroupConfig(look_interval=looks)))
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    node = cluster.nodes[2]
    hear, goodbyes = node.receive, 0

    def receive(now: float, sender: PeerId, message: Message) -> None:
        nonlocal goodbyes
        goodbyes += isinstance(message, MemberLeft)
        if isinstance(message, MemberLeft) and (goodbyes == 1 or "answers" in lost):
            return
        hear(now, sender, message)

    take = node.records.take
    if "news" in lost:
        node.records.take = lambda now, event: (  # type: ignore[method-assign]
            isinstance(event, KeyChanged) or take(now, event)
        )
    node.receive = receive  # type: ignore[method-assign]
    cluster.wait(cluster.close(3, R[1]))
    cluster.form(Group("policy", "something else"), [3])  # the closed handle is forgotten
    assert isinstance(cluster.errors(cluster.ask(2, R[0]))[0], GroupBroken)


def test_a_member_that_missed_the_election_joins_it_later() -> None:
    cluster = Cluster(0, 5)
    cluster.form(ROLLOUT, ROLLOUTS)
    deaf = cluster.nodes[3]
    hear, count = deaf.receive, Counter[str]()

    def receive(now: float, sender: object, message: object) -> None:
        count[type(message).__name__] += 1
        if type(message).__name__ != "Formed" or count["Formed"] > 3:
            hear(now, sender, message)  # type: ignore[arg-type]

    deaf.receive = receive  # type: ignore[method-assign]
    asks = [cluster.ask(p, R[s]) for s, p in enumerate(ROLLOUTS)]
    cluster.form(TRAINER, TRAINERS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    one, two = cluster.wait(*asks)
    assert one == two


def test_a_group_that_can_not_be_formed_again_falls_silent() -> None:
    cluster = whole()
    one, _ = cluster.ask_all(ROLLOUT, ROLLOUTS)
    cluster.crash(3)
    cluster.wait(cluster.hold(2, R[0], one))
    cluster.finish(2, R[0], one)
    cluster.give_up(2, R[0], one)
    cluster.until_dead(3)
    cluster.net.run_for(3.0)
    node = cluster.nodes[2]
    sent: list[Message] = []
    drain = node.outbox.drain

    def watched() -> list[Output]:
        items = drain()
        sent.extend(i.message for i in items if isinstance(i, Send))
        return items

    node.outbox.drain = watched  # type: ignore[method-assign]
    cluster.net.run_for(5.0)
    assert sent
    assert not [m for m in sent if isinstance(m, (GroupMessage, Propose))]


def test_one_peer_may_hold_several_shards_or_all_of_them() -> None:
    cluster = Cluster(0, 4)
    cluster.form(TRAINER, [0, 0])
    cluster.form(ROLLOUT, [2, 3])
    three = [Slot(Group("policy", "three"), shard) for shard in range(2)]
    cluster.form(three[0].group, [1, 1])
    cluster.publish_all(TRAINER, [0, 0], 1)
    for group, peers in ((ROLLOUT, [2, 3]), (three[0].group, [1, 1])):
        assert cluster.replicate_all(group, peers).publication.version == 1
    cluster.wait(cluster.close(1, three[1]))
    assert isinstance(cluster.errors(cluster.ask(1, three[0]))[0], GroupBroken)
    cluster.wait(cluster.open(1, three[1]))
    assert cluster.replicate_all(three[0].group, [1, 1]).publication.version == 1


# --- G4: never backwards ---


def test_a_lower_version_is_a_conflict_that_names_the_higher_one() -> None:
    cluster = whole(published=7)
    other = Group("policy", "other")
    cluster.form(other, [4])
    (error,) = cluster.errors(cluster.publish(4, Slot(other, 0), 6))
    assert isinstance(error, VersionConflict)
    assert "version 7 by trainer" in str(error)
    assert "rewind=True" in str(error)
    cluster.wait(cluster.publish(4, Slot(other, 0), 8))


def test_a_lower_version_is_a_conflict_also_where_the_model_is_spread_over_buckets() -> None:
    config = Config(swim=QUICK, directory=DirectoryConfig(bucket_registers=1))
    cluster = whole(published=7, config=config)
    key, records = versions_key("policy"), cluster.nodes[4].records
    for number in range(8):
        cluster.form(Group("policy", f"early-{number}"), [4])
        cluster.publish_all(Group("policy", f"early-{number}"), [4], 8 + number)
    spread = records.buckets(key)
    names = (f"other-{number}" for number in range(1000))
    other = Group("policy", next(name for name in names if bucket_of(name, spread) > spread // 2))
    assert spread > 4, "or the earlier ones might lie in the same bucket"
    cluster.form(other, [4])
    cluster.net.run_for(0.1)  # until it is marked, and told
    (error,) = cluster.errors(cluster.publish(4, Slot(other, 0), 6))
    assert isinstance(error, VersionConflict)
    assert "version 15 by early-7" in str(error)


def test_a_rewind_opens_an_epoch_that_everybody_follows() -> None:
    cluster = whole(published=7)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.order == (0, 7)
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    errors = cluster.errors(*(cluster.publish(p, T[s], 3) for s, p in enumerate(TRAINERS)))
    assert all(isinstance(error, VersionConflict) for error in errors)
    cluster.publish_all(TRAINER, TRAINERS, 3, rewind=True)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.order == (1, 3)
    next_version(cluster, 4)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.order == (1, 4)


def test_a_rewind_that_failed_is_not_counted() -> None:
    cluster = whole(published=7)
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    ids = [n.info.peer_id for n in cluster.nodes]
    cluster.net.partition([ids[1]], [i for i in ids if i != ids[1]])
    error = cluster.errors(cluster.publish(1, T[1], 3, rewind=True, timeout=0.3))[0]
    assert isinstance(error, Timeout)
    cluster.net.heal()
    cluster.publish_all(TRAINER, TRAINERS, 3, rewind=True)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.order == (1, 3)


def test_a_rewind_that_was_refused_is_counted() -> None:
    """Else a retry would want the same epoch again, and be refused again."""
    cluster = whole(published=7)
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    other = Group("policy", "other")
    cluster.form(other, [4])
    cluster.wait(cluster.publish(4, Slot(other, 0), 9, rewind=True))
    cluster.form(Group("policy", "reader"), [3])
    cluster.wait(cluster.ask(3, Slot(Group("policy", "reader"), 0)))
    rewinds = [cluster.publish(p, T[s], 3, rewind=True) for s, p in enumerate(TRAINERS)]
    assert all(isinstance(error, VersionConflict) for error in cluster.errors(*rewinds))
    cluster.publish_all(TRAINER, TRAINERS, 3, rewind=True)
    assert cluster.replicate_all(ROLLOUT, ROLLOUTS).publication.order == (2, 3)


def test_two_replicas_may_publish_the_same_version_and_the_lower_one_is_taken() -> None:
    cluster = Cluster(1, 6)
    groups = [Group("policy", name) for name in ("b", "a")]
    for index, group in enumerate(groups):
        cluster.form(group, [index])
        cluster.wait(cluster.publish(index, Slot(group, 0), 1))
    reader = Group("policy", "reader")
    cluster.form(reader, [4])
    assert cluster.replicate_all(reader, [4]).publication.replica == "a"


def test_a_version_that_was_whole_is_not_published_again_by_the_same_replica() -> None:
    cluster = whole()
    cluster.net.run_for(0.2)  # until it is marked: before, nobody can have had it
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    for _ in range(2):
        errors = cluster.errors(*(cluster.publish(p, T[s], 1) for s, p in enumerate(TRAINERS)))
        assert all(isinstance(error, VersionConflict) for error in errors)
    cluster.wait(cluster.close(0, T[0]), cluster.close(1, T[1]))
    cluster.form(TRAINER, TRAINERS)
    errors = cluster.errors(*(cluster.publish(p, T[s], 1) for s, p in enumerate(TRAINERS)))
    assert all(isinstance(error, VersionConflict) for error in errors)
    assert all(ONCE_MORE in str(error) for error in errors)


def test_nor_after_the_replica_has_pulled_something_else_meanwhile() -> None:
    cluster = Cluster(0, 4)
    names = ("mine", "other")
    for peer, name in enumerate(names):
        cluster.form(Group("policy", name), [peer])
        cluster.wait(cluster.publish(peer, Slot(Group("policy", name), 0), 1))
    mine = Slot(Group("policy", "mine"), 0)
    cluster.net.run_for(0.2)
    cluster.wait(cluster.unpublish(0, mine))
    assert cluster.replicate_all(mine.group, [0]).publication.replica == "other"
    cluster.wait(cluster.unpublish(0, mine))
    assert isinstance(cluster.errors(cluster.publish(0, mine, 1))[0], VersionConflict)


def test_a_group_does_not_fall_back_when_the_newest_version_is_lost() -> None:
    cluster = whole()
    copy = Group("policy", "copy")
    cluster.form(copy, [4])
    cluster.wait(cluster.ask(4, Slot(copy, 0)))
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    next_version(cluster, 2)
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    for shard, peer in enumerate(ROLLOUTS):
        cluster.wait(cluster.hold(peer, R[shard], answers[shard], complete=False))
        assert cluster.finish(peer, R[shard], answers[shard]) is None
        cluster.nodes[peer].drop(cluster.now, R[shard])
    for trainer in TRAINERS:
        cluster.crash(trainer)
    for trainer in TRAINERS:
        cluster.until_dead(trainer)
    errors = cluster.errors(*(cluster.ask(p, R[s], timeout=3.0) for s, p in enumerate(ROLLOUTS)))
    assert all(isinstance(error, Timeout) for error in errors), "version 1 would be older"


def test_the_floor_survives_the_next_election() -> None:
    cluster = whole(published=3)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    cluster.crash(3)
    cluster.until_dead(3)
    assert isinstance(cluster.errors(cluster.ask(2, R[0]))[0], GroupBroken)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, R[1]))
    cluster.wait(cluster.ask(2, R[0]), cluster.ask(newcomer, R[1]))
    assert cluster.shard(newcomer, R[1]).part.election.floor == (0, 3)


def newest_lost_while_pulled(*, finished: bool) -> tuple[Cluster, int]:
    """Version 1 lives on elsewhere; shard 1 of the rollout is the last to know of version 2.

    It got version 2 as the answer to a call; then shard 0 died, a newcomer formed the next
    generation with it, and whoever had version 2 died too. Returns the newcomer, on shard 0.
    """
    cluster = whole()
    copy = Group("policy", "copy")
    cluster.form(copy, [0, 1])
    cluster.replicate_all(copy, [0, 1])
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    other = Group("policy", "other")
    cluster.form(other, [4])
    cluster.wait(cluster.publish(4, Slot(other, 0), 2))
    _, mine = cluster.ask_all(ROLLOUT, ROLLOUTS)
    assert mine.publication.version == 2
    cluster.wait(cluster.hold(3, R[1], mine, complete=False))
    cluster.crash(2)
    cluster.until_dead(2)
    newcomer = cluster.start()
    cluster.wait(cluster.open(newcomer, R[0]))
    cluster.errors(cluster.ask(newcomer, R[0], version(9), timeout=1.0))
    assert cluster.shard(newcomer, R[0]).part.election.formed
    if finished:
        assert cluster.finish(3, R[1], mine) is None
    cluster.crash(4)
    cluster.until_dead(4)
    return cluster, newcomer


def test_a_group_does_not_fall_back_behind_an_answer_that_an_election_missed() -> None:
    cluster, newcomer = newest_lost_while_pulled(finished=True)
    early = cluster.ask(newcomer, R[0], timeout=4.0)
    cluster.net.run_for(1.0)
    assert isinstance(cluster.errors(cluster.ask(3, R[1]))[0], GroupBroken)
    late = cluster.ask(3, R[1], timeout=3.0)
    assert all(isinstance(error, Timeout) for error in cluster.errors(early, late))


def test_nor_behind_one_that_is_still_being_pulled() -> None:
    cluster, newcomer = newest_lost_while_pulled(finished=False)
    answered = cluster.shard(3, R[1]).part.answered
    assert answered is not None
    early = cluster.ask(newcomer, R[0], timeout=2.0)
    assert isinstance(cluster.errors(early)[0], Timeout)
    early = cluster.ask(newcomer, R[0], timeout=4.0)
    cluster.net.run_for(1.0)
    assert cluster.nodes[3].finish(cluster.now, R[1], 2) is None
    assert isinstance(cluster.errors(cluster.ask(3, R[1]))[0], GroupBroken)
    late = cluster.ask(3, R[1], timeout=2.0)
    assert all(isinstance(error, Timeout) for error in cluster.errors(early, late))


def test_but_what_a_failed_pull_would_have_brought_holds_nobody_back() -> None:
    cluster, newcomer = newest_lost_while_pulled(finished=False)
    early = cluster.ask(newcomer, R[0], timeout=6.0)
    assert isinstance(cluster.errors(cluster.ask(3, R[1]))[0], GroupBroken)
    late = cluster.ask(3, R[1], timeout=3.0)
    assert [answer.publication.version for answer in cluster.wait(early, late)] == [1, 1]


def test_a_version_that_is_asked_for_by_its_number_may_be_older() -> None:
    cluster, newcomer = newest_lost_while_pulled(finished=True)
    assert isinstance(cluster.errors(cluster.ask(3, R[1]))[0], GroupBroken)
    asks = cluster.ask(newcomer, R[0], version(1)), cluster.ask(3, R[1], version(1))
    assert [answer.publication.version for answer in cluster.wait(*asks)] == [1, 1]


# --- G5: fresh ---


def test_a_peer_that_membership_has_not_heard_of_is_not_gone() -> None:
    """So that what a newcomer published counts also before gossip of it has come round."""
    cluster = Cluster(0, 2)
    assert not cluster.nodes[0].liveness.is_gone(PeerId("feedfeedfeedfeed"))
    cluster.crash(1)
    cluster.until_dead(1)
    assert cluster.nodes[0].liveness.is_gone(cluster.nodes[1].info.peer_id)


# --- slots, and G7: fenced ---


def test_a_live_holder_keeps_its_slot() -> None:
    cluster = whole()
    began = cluster.now
    (error,) = cluster.errors(cluster.open(4, R[1]))
    assert isinstance(error, SlotTaken)
    assert "peer p3" in str(error)
    assert cluster.now - began < 0.5
    assert isinstance(cluster.errors(cluster.open(4, R[1]))[0], SlotTaken), "it may try again"


def test_a_slot_is_open_once_in_a_peer_and_free_after_close() -> None:
    cluster = whole()
    assert isinstance(cluster.errors(cluster.open(2, R[0]))[0], StateError)
    cluster.wait(cluster.close(2, R[0]))
    cluster.wait(cluster.open(2, R[0]))
    assert isinstance(cluster.errors(cluster.open(2, Slot(ROLLOUT, 1), timeout=1))[0], SlotTaken)


def test_a_slot_whose_open_timed_out_can_be_opened_again() -> None:
    cluster = whole()
    cluster.pause(3)
    assert isinstance(cluster.errors(cluster.open(4, R[1], timeout=0.2))[0], Timeout)
    cluster.crash(3)
    cluster.wait(cluster.open(4, R[1], timeout=30))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shards", [1, 2])
def test_a_paused_holder_that_was_replaced_is_fenced(shards: int, seed: int) -> None:
    """G7: nothing that it says changes anything, and all its verbs fail with SlotTaken."""
    cluster = Cluster(seed, 5)
    peers = [0, 1][:shards]
    cluster.form(TRAINER, peers)
    cluster.publish_all(TRAINER, peers, 1)
    cluster.pause(0)
    cluster.until_dead(0)
    newcomer = cluster.start(meet=False)
    cluster.net.run_for(1.0)
    cluster.wait(cluster.open(newcomer, T[0], shards, timeout=30))
    now = [newcomer, *peers[1:]]
    if shards == 2:
        assert isinstance(cluster.errors(cluster.publish(1, T[1], 2))[0], GroupBroken)
    cluster.publish_all(TRAINER, now, 3)
    # It wakes up in the middle of its own publish(9), before it has heard of anything.
    cluster.net.resume(cluster.nodes[0].info.peer_id)
    number = cluster.publish(0, T[0], 9)
    (error,) = cluster.errors(number)
    assert isinstance(error, SlotTaken), error
    for again in (cluster.publish(0, T[0], 9), cluster.ask(0, T[0])):
        assert isinstance(cluster.errors(again)[0], SlotTaken)
    reader = Group("policy", "reader")
    cluster.form(reader, [4])
    assert cluster.replicate_all(reader, [4]).publication.version == 3
    for peer, slot in zip(now, T, strict=False):
        cluster.wait(cluster.unpublish(peer, slot))
    cluster.publish_all(TRAINER, now, 4)
    cluster.wait(cluster.close(0, T[0]))


@pytest.mark.parametrize("seed", range(4))
def test_a_fenced_reader_is_told_and_the_group_goes_on(seed: int) -> None:
    cluster = whole(seed)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    cluster.pause(2)
    cluster.until_dead(2)
    newcomer = cluster.start(meet=False)
    cluster.net.run_for(1.0)
    cluster.wait(cluster.open(newcomer, R[0], timeout=30))
    assert isinstance(cluster.errors(cluster.ask(3, R[1]))[0], GroupBroken)
    one, two = cluster.wait(cluster.ask(newcomer, R[0]), cluster.ask(3, R[1]))
    assert one == two
    cluster.resume(2)
    assert isinstance(cluster.errors(cluster.ask(2, R[0], timeout=20))[0], SlotTaken)
    cluster.wait(cluster.hold(newcomer, R[0], one), cluster.hold(3, R[1], two))
    assert cluster.finish(newcomer, R[0], one) is None
    assert cluster.finish(3, R[1], two) is None
    one, two = cluster.wait(cluster.ask(newcomer, R[0]), cluster.ask(3, R[1]))
    assert one == two


def test_a_death_that_was_refuted_breaks_the_group_but_fences_nobody() -> None:
    cluster = whole()
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    cluster.pause(3)
    cluster.until_dead(3)
    cluster.resume(3)
    cluster.net.run_for(3.0)
    began = cluster.now
    errors = cluster.errors(cluster.ask(2, R[0]), cluster.ask(3, R[1]))
    assert all(isinstance(error, GroupBroken) for error in errors), errors
    assert cluster.now - began < 2.0
    one, two = cluster.wait(cluster.ask(2, R[0]), cluster.ask(3, R[1]))
    assert one == two


def test_nothing_is_decided_by_messages_of_strangers_or_of_older_generations() -> None:
    cluster = whole()
    answer = cluster.replicate_all(ROLLOUT, ROLLOUTS)
    record = cluster.shard(2, R[0]).part.election.record
    assert record is not None
    number = cluster.ask(3, R[1])
    forged = Decision(msgspec.structs.replace(answer.publication, version=99), 2)
    fake = CallDecided(ROLLOUT, record.generation, 1, 0, 2, LATEST, forged)
    old = msgspec.structs.replace(fake, generation=Generation(0, 1))
    for sender, message in ((4, fake), (3, fake), (2, old)):
        cluster.nodes[3].receive(cluster.now, cluster.nodes[sender].info.peer_id, message)
    cluster.net.settle(cluster.nodes[3].info.peer_id)
    (end,) = cluster.ends(number)
    assert end.result.publication.version == 1


def test_a_publish_that_is_refused_after_its_generation_broke_fails_at_once() -> None:
    """Its group's next generation is known to the owners, and nobody tells the publisher."""
    cluster = whole()
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    shard = cluster.shard(0, T[0])
    record = shard.part.election.record
    assert record is not None
    ids = [n.info.peer_id for n in cluster.nodes]
    cluster.net.partition([ids[0]], [i for i in ids if i != ids[0]])
    number = cluster.publish(0, T[0], 2, timeout=30.0)
    shard.part.election._break("shard 1 is gone")
    cluster.net.settle(ids[0])
    higher = msgspec.structs.replace(record, generation=Generation(1000, 1))
    fence = fence_name(TRAINER)
    cluster.nodes[4].records.write(
        cluster.now, versions_key("policy"), fence, 1000, higher, lambda _now, _refused: None
    )
    cluster.nodes[4].tick(cluster.now)
    cluster.net.settle(ids[4])
    cluster.net.run_for(0.3)
    cluster.net.heal()
    (error,) = cluster.errors(number)
    assert isinstance(error, GroupBroken)
    assert cluster.now < cluster.verbs[number].deadline - 20


# --- unpublishing ---


def test_an_unpublish_waits_for_pinned_readers_and_ends_when_they_are_done() -> None:
    cluster = whole()
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    number = cluster.unpublish(0, T[0], timeout=20)
    cluster.net.run_for(3.0)
    assert cluster.verbs[number].end is None
    cluster.wait(cluster.hold(2, R[0], answers[0]))
    cluster.wait(number)


def test_an_unpublish_waits_for_mere_pins_no_longer_than_until_its_deadline() -> None:
    cluster = whole()
    cluster.ask_all(ROLLOUT, ROLLOUTS)
    number = cluster.unpublish(0, T[0], timeout=1.0)
    cluster.net.run_for(0.5)
    assert "policy/rollout" in cluster.shard(0, T[0]).references.waiting_for()
    cluster.wait(number)
    verb = cluster.verbs[number]
    assert verb.ended is not None
    assert verb.ended >= verb.deadline
    assert not cluster.nodes[0].holds(T[0])
    assert "policy/rollout" in cluster.shard(0, T[0]).held_up


def test_an_unpublish_that_can_not_find_out_who_needs_it_says_that_it_is_still_published() -> None:
    cluster = whole()
    for other in range(1, 5):
        cluster.pause(other)
    (error,) = cluster.errors(cluster.unpublish(0, T[0], timeout=0.5))
    assert isinstance(error, Timeout)
    assert "still published" in str(error)
    assert cluster.nodes[0].holds(T[0])


def test_an_unpublish_goes_on_when_the_group_that_pins_has_died() -> None:
    cluster = whole()
    cluster.ask_all(ROLLOUT, ROLLOUTS)
    number = cluster.unpublish(0, T[0], timeout=30)
    cluster.crash(2)
    cluster.wait(number)


def test_a_version_that_is_withdrawn_is_not_handed_out_any_more() -> None:
    cluster = whole()
    cluster.wait(cluster.unpublish(0, T[0]))
    errors = cluster.errors(*(cluster.ask(p, R[s], timeout=2) for s, p in enumerate(ROLLOUTS)))
    assert all(isinstance(error, Timeout) for error in errors)
    assert "no reachable holder of shard 0" in str(errors[0])


def test_unpublishing_nothing_is_done_at_once() -> None:
    cluster = whole(published=0)
    cluster.wait(cluster.unpublish(0, T[0]))


# --- G8: no verb hangs ---


@pytest.mark.parametrize("name", ["open", "publish", "ask", "unpublish", "close", "hold"])
def test_every_verb_of_a_peer_that_is_cut_off_ends_by_its_deadline(name: str) -> None:
    cluster = whole()
    answers = cluster.ask_all(ROLLOUT, ROLLOUTS)
    ids = [n.info.peer_id for n in cluster.nodes]
    peer = 4 if name == "open" else 2 if name in ("ask", "hold", "close") else 0
    if name == "publish":
        cluster.ends(cluster.close(0, T[0]), cluster.close(1, T[1]))
        cluster.form(TRAINER, TRAINERS)
    cluster.net.partition([ids[peer]], [i for i in ids if i != ids[peer]])
    verbs = {
        "open": lambda: cluster.open(4, Slot(Group("policy", "new"), 0), timeout=1.5),
        "publish": lambda: cluster.publish(0, T[0], 2, timeout=1.5),
        "ask": lambda: cluster.ask(2, R[0], timeout=1.5),
        "hold": lambda: cluster.hold(2, R[0], answers[0], timeout=1.5),
        "unpublish": lambda: cluster.unpublish(0, T[0], timeout=1.5),
        "close": lambda: cluster.close(2, R[0], timeout=1.5),
    }
    cluster.ends(verbs[name]())
    cluster.net.run_for(10.0)
    cluster.check_ends()


def test_a_handle_that_closes_ends_the_verb_under_way() -> None:
    cluster = whole(published=0)
    number = cluster.ask(2, R[0], timeout=60)
    cluster.net.run_for(0.5)
    closing = cluster.close(2, R[0])
    assert isinstance(cluster.errors(number)[0], StateError)
    cluster.wait(closing)


def test_one_handle_has_one_verb_at_a_time() -> None:
    cluster = whole(published=0)
    first = cluster.ask(2, R[0], timeout=1.0)
    (error,) = cluster.errors(cluster.publish(2, R[0], 1))
    assert isinstance(error, StateError)
    assert "under way" in str(error)
    assert isinstance(cluster.errors(first)[0], Timeout)


def test_requests_do_not_pile_up_while_a_peer_is_cut_off() -> None:
    cluster = whole()
    ids = [n.info.peer_id for n in cluster.nodes]
    cluster.net.partition([ids[2]], [i for i in ids if i != ids[2]])
    for _ in range(4):
        cluster.ends(cluster.ask(2, R[0], LATEST, timeout=2.0))
    assert len(cluster.nodes[2].directory._requests) < 20


# --- what it costs ---

ONE_WAY = 0.010


def costly(cluster: Cluster, begin: float, before: Counter[str]) -> tuple[float, int]:
    """Round trips, and messages of the groups and the directory, since then."""
    sent = cluster.net.counters - before
    return (cluster.now - begin) / (2 * ONE_WAY), sent["sent"]


def test_a_publish_takes_one_round_trip_and_a_replicate_a_few(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster(5, 8, latency=(ONE_WAY, ONE_WAY))
    cluster.form(TRAINER, TRAINERS)
    cluster.form(ROLLOUT, ROLLOUTS)
    cluster.publish_all(TRAINER, TRAINERS, 1)
    cluster.replicate_all(ROLLOUT, ROLLOUTS)
    cluster.wait(*(cluster.unpublish(p, T[s]) for s, p in enumerate(TRAINERS)))
    cluster.net.run_for(1.0)

    begin, before = cluster.now, cluster.net.counters.copy()
    cluster.publish_all(TRAINER, TRAINERS, 2)
    publish = costly(cluster, begin, before)
    cluster.net.run_for(0.2)
    begin, before = cluster.now, cluster.net.counters.copy()
    cluster.ask_all(ROLLOUT, ROLLOUTS)
    ask = costly(cluster, begin, before)
    with capsys.disabled():
        print(
            f"\npublish, 2 shards: {publish[0]:.1f} round trips, {publish[1]} messages; "
            f"call, 2 shards: {ask[0]:.1f} round trips, {ask[1]} messages"
        )
    assert publish[0] <= 1.05
    assert publish[1] <= 2 * 2 * 3 * 2 + 10, "2 shards, 2 keys, 3 owners, there and back"
    assert ask[0] <= 5.05, "ask, read, pin, check, record and decide"
    assert ask[1] <= 60
