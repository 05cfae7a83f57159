"""A trainer process: learns from what the rollouts send, publishes a version a step.

Both shards run the same calls in the same order. Shard 0 reads the queue and leads.
The published tensors stay as they are until `unpublish` returned: gradients are
computed before that, the optimizer steps after it.
"""

from __future__ import annotations

import queue
from multiprocessing.queues import Queue

import torch
from torch import Tensor, nn

from tensorhub_p2p.cli.demo import pipeline
from tensorhub_p2p.cli.demo.pipeline import Link
from tensorhub_p2p.cli.demo.plan import ROLLOUTS, Plan
from tensorhub_p2p.cli.demo.radio import Radio
from tensorhub_p2p.cli.demo.reports import Batch, Expect, Trained
from tensorhub_p2p.cli.demo.weights import Weights


def train(
    plan: Plan,
    shard: int,
    half: nn.Module,
    weights: Weights,
    link: Link,
    radio: Radio,
    samples: Queue[Batch],
) -> None:
    optimizer = torch.optim.AdamW(half.parameters(), lr=plan.learning_rate, fused=True)
    collector = Collector(plan, radio, samples)
    radio.report(weights.publish(1))
    for version in range(1, plan.final_version + 1):
        if shard == 0:
            sequences, rewards = collector.collect(version)
        if version == plan.final_version:
            part_together(shard, link, version)
            return
        if shard == 0:
            link.send(version, sequences)
            link.send(version, rewards)
        else:
            sequences, rewards = link.receive(version), link.receive(version)
            back = pipeline.BackTrainer(plan, sequences, rewards)
        for epoch in range(plan.epochs):
            optimizer.zero_grad()
            if shard == 0:
                pipeline.gradients_front(half, link, version, sequences)
            else:
                back.gradients(half, link, version)
            nn.utils.clip_grad_norm_(half.parameters(), 1.0)
            if epoch == 0:
                weights.unpublish()
            optimizer.step()
        radio.report(weights.publish(version + 1))


def part_together(shard: int, link: Link, version: int) -> None:
    """Shard 0 knows when everybody has the final version; shard 1 serves it until then."""
    if shard == 0:
        link.send(version, torch.zeros(1))
    else:
        link.receive(version)


class Collector:
    """Waits for one batch of the current version from every replica that takes part."""

    def __init__(self, plan: Plan, radio: Radio, samples: Queue[Batch]) -> None:
        self._plan = plan
        self._radio = radio
        self._samples = samples
        self._expected = frozenset(ROLLOUTS)

    def collect(self, version: int) -> tuple[Tensor, Tensor]:
        """Sequences (n, length) and rewards (n, digits); batches of other versions are stale.

        The final version is waited for from all replicas, the one of the newcomer included.
        """
        batches: dict[str, Batch] = {}
        while not self._wanted(version) <= batches.keys():
            try:
                batch = self._samples.get(timeout=0.1)
            except queue.Empty:
                continue
            if batch.version == version:
                batches[batch.replica] = batch
        sequences = torch.tensor([s for b in batches.values() for s in b.sequences])
        rewards = torch.tensor([r for b in batches.values() for r in b.rewards])
        solved = rewards.min(dim=1).values.mean()
        self._radio.report(Trained(version, float(rewards.mean()), float(solved), sorted(batches)))
        return sequences, rewards

    def _wanted(self, version: int) -> frozenset[str]:
        while (order := self._radio.next_order(Expect)) is not None:
            self._expected = order.replicas
        return frozenset(ROLLOUTS) if version == self._plan.final_version else self._expected
