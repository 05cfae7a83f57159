"""What one zone retains, the others keep."""

from __future__ import annotations

import pytest
from cluster import LAYOUT, TRAINER
from far_cluster import FarCluster

from tensorhub_p2p.errors import RetentionLost
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.messages import Question, Retain, RetainSummary

WATCHER = Slot(Group("policy", "watcher"), 0)
ROOM = 100 * LAYOUT.num_bytes


def two_zones(limit: int = ROOM) -> FarCluster:
    """A trainer of one shard in the east, and somebody in the west who retains."""
    c = FarCluster(0, sizes={"east": 3, "west": 3}, offload_limit=limit)
    c.form(TRAINER, [trainer(c)])
    c.publish_all(TRAINER, [trainer(c)], 1)
    c.wait(c.open(c.of("west")[-1], WATCHER, 1, retain=Retain(newest=2, versions=(1,))))
    c.until(lambda: bool(said(c)))
    return c


def trainer(c: FarCluster) -> int:
    return c.of("east")[0]


def said(c: FarCluster) -> tuple[RetainSummary, ...]:
    """By the west's summary, as the trainer has it."""
    summary = c.summary(trainer(c), "west")
    return summary.retains if summary is not None else ()


def next_version(c: FarCluster, version: int) -> None:
    c.wait(c.unpublish(trainer(c), Slot(TRAINER, 0)))
    c.publish_all(TRAINER, [trainer(c)], version)


def kept(c: FarCluster) -> list[int]:
    return sorted(publication.version for publication in c.copies.values())


def test_a_version_that_another_zone_retains_stays() -> None:
    c = two_zones()
    assert said(c) == (RetainSummary("policy", 2, (1,)),)
    next_version(c, 2)
    assert kept(c) == [1]
    reader = Slot(Group("policy", "reader"), 0)
    c.wait(c.open(c.of("west")[0], reader, 1))
    (answer,) = c.wait(c.ask(c.of("west")[0], reader, Question("replicate", "1")))
    assert answer.publication.version == 1


def test_the_error_of_who_can_not_keep_it_names_the_zone() -> None:
    c = two_zones(limit=0)
    (error,) = c.errors(c.unpublish(trainer(c), Slot(TRAINER, 0)))
    assert isinstance(error, RetentionLost)
    assert "zone west" in str(error)


def test_it_goes_once_nobody_there_retains_it() -> None:
    c = two_zones()
    next_version(c, 2)
    c.wait(c.close(c.of("west")[-1], WATCHER))
    c.until(lambda: not kept(c))
    assert not said(c)


@pytest.mark.parametrize("dies", ["the retainer", "the first gateway"])
def test_it_stays_whoever_dies_there(dies: str) -> None:
    c = two_zones()
    retainer = c.of("west")[-1]
    first = c.gateways("west")[0]
    summary = c.summary(trainer(c), "west")
    assert summary is not None
    first = next(i for i in c.of("west") if c.id(i) == summary.gateways[0].peer_id)
    c.crash(retainer if dies == "the retainer" else first)
    c.net.run_for(20.0)
    next_version(c, 2)
    c.net.run_for(10.0)
    assert kept(c) == [1]


def test_a_zone_that_is_cut_off_is_taken_at_its_last_word() -> None:
    c = two_zones()
    c.cut("east", "west")
    c.net.run_for(10.0)
    next_version(c, 2)
    assert kept(c) == [1]


def test_what_is_retained_here_may_be_kept_by_a_holder_there() -> None:
    c = two_zones()
    copier, slot = c.of("west")[0], Slot(Group("policy", "copier"), 0)
    c.wait(c.open(copier, slot, 1))
    (answer,) = c.wait(c.ask(copier, slot))
    c.wait(c.hold(copier, slot, answer))
    assert c.finish(copier, slot, answer) is None
    c.net.run_for(5.0)
    next_version(c, 2)
    assert not kept(c), "the west has it, and promised to keep it"
    c.wait(c.unpublish(copier, slot))
    assert kept(c) == [1]


def test_a_single_zone_reads_nothing_for_this() -> None:
    c = FarCluster(0, sizes={"east": 3})
    c.wait(c.open(0, WATCHER, 1, retain=Retain(newest=2)))
    assert all(node.retained.said(None) == () for node in c.nodes)
