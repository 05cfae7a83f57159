"""A rollout process: replicates the newest version, samples with it, sends samples back.

Both shards run the same calls in the same order. When the process with the other half
dies, `GroupBroken` is raised once; then the next `replicate` waits for the process that
takes its place, and the replica goes on, without a restart of this process.
"""

from __future__ import annotations

from multiprocessing.queues import Queue

import torch
from torch import nn

import tensorhub_p2p as th
from tensorhub_p2p.cli.demo import pipeline, task
from tensorhub_p2p.cli.demo.pipeline import Link, LinkBroken
from tensorhub_p2p.cli.demo.plan import WITNESS, Plan
from tensorhub_p2p.cli.demo.radio import Radio
from tensorhub_p2p.cli.demo.reports import Batch, Broken, Partner, Pull, Struck
from tensorhub_p2p.cli.demo.weights import Weights
from tensorhub_p2p.cli.demo.witness import Witness


class Rollout:
    def __init__(
        self,
        plan: Plan,
        replica: str,
        shard: int,
        half: nn.Module,
        weights: Weights,
        link: Link,
        radio: Radio,
        samples: Queue[Batch],
    ) -> None:
        self._plan = plan
        self._replica = replica
        self._shard = shard
        self._half = half
        self._weights = weights
        self._link = link
        self._radio = radio
        self._samples = samples
        self._generator = torch.Generator().manual_seed(hash_of(replica, plan.seed))
        self._version = 0

    def run(self) -> None:
        while True:
            try:
                self._pull()
                self._sample()
                if self._version == self._plan.final_version:
                    return
                self._weights.wait_for_newer(self._version)
            except th.GroupBroken as error:
                self._radio.report(Broken(str(error)))
                if not self._link.alive():
                    self._meet_new_partner()
            except LinkBroken:
                self._meet_new_partner()

    def _pull(self) -> None:
        witness = None
        if self._replica == WITNESS[0] and self._version == self._plan.accident_version - 1:
            order = self._radio.await_order(Pull)
            if order.victim is not None:
                witness = Witness(self._half, order.victim)
        pulled = self._weights.replicate()
        self._version = pulled.version
        if witness is not None:
            self._radio.report(Struck(witness.finish()))
        self._radio.report(pulled)

    def _sample(self) -> None:
        if self._shard == 1:
            pipeline.sample_back(self._plan, self._half, self._link, self._version)
            return
        sequences = pipeline.sample_front(
            self._plan, self._half, self._link, self._version, self._generator
        )
        rewards = task.rewards(self._plan, sequences)
        self._samples.put(Batch(self._replica, self._version, sequences.tolist(), rewards.tolist()))

    def _meet_new_partner(self) -> None:
        self._link.close()
        connection = self._radio.await_order(Partner).connection
        self._link = Link(connection, self._plan.patience)


def hash_of(replica: str, seed: int) -> int:
    """A seed that differs between replicas and repeats between runs."""
    return seed * 1000 + sum(replica.encode())
