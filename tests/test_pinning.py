"""A version that a group was told to pull stays somewhere until it has been pulled."""

from __future__ import annotations

import random

import pytest
from cluster import Cluster

from tensorhub_p2p.errors import Timeout
from tensorhub_p2p.protocol.identity import Group, Slot
from tensorhub_p2p.protocol.publishing import RefState

TRAINER, READER = (Slot(Group("policy", name), 0) for name in ("trainer", "reader"))


def holds(cluster: Cluster) -> bool:
    """The trainer would still serve the version."""
    references = cluster.shard(0, TRAINER).references
    return references.held is not None and references.state is not RefState.HIDING


@pytest.mark.parametrize("seed", range(40))
def test_a_decision_and_the_withdrawal_of_what_it_is_for_may_cross(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(seed, 3, latency=(0.001, 0.1))
    cluster.wait(cluster.open(0, TRAINER, 1), cluster.open(1, READER, 1))
    cluster.wait(cluster.publish(0, TRAINER, 1))
    cluster.net.run_for(1.0)
    ask = cluster.verbs[cluster.ask(1, READER, timeout=3.0)]
    cluster.net.run_for(rng.uniform(0.0, 0.25))
    cluster.unpublish(0, TRAINER, timeout=5.0)
    cluster.until(lambda: ask.end is not None)
    if isinstance(ask.error, Timeout):
        assert not holds(cluster), "it must not time out for what is there"
        return
    end = cluster.now + 1.0
    while cluster.now < end:
        assert holds(cluster), "it was decided for, and nobody has it any more"
        cluster.net.run_for(0.01)
