"""Sampling from, and training, a policy whose two halves live in two processes.

Rule of this file: tensors only; nothing here knows versions, peers or handles.

The front half (shard 0) leads. To sample a token it sends activations and gets the
token back; to train it sends activations and gets their gradient back. Both sides run
in lock step, so at most one message is under way. Every message carries a tag that
both sides know (the version at work): what is left over from a round that broke off is
dropped by the next one. A partner that died, or says nothing within the patience, is a
`LinkBroken`.
"""

from __future__ import annotations

import select
import time
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tensorhub_p2p.cli.demo import task
from tensorhub_p2p.cli.demo.plan import Plan


class LinkBroken(Exception):
    """The process with the other half is gone, or silent for too long."""


class Link:
    """The pipe to the process that holds the other half."""

    def __init__(self, connection: Connection, patience: float) -> None:
        self._connection = connection
        self._patience = patience

    def send(self, tag: int, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        data = bytearray(tensor.numel() * tensor.element_size())
        torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        try:
            self._connection.send((tag, tensor.dtype, tuple(tensor.shape)))
            self._connection.send_bytes(data)
        except OSError as error:
            raise LinkBroken(str(error)) from error

    def receive(self, tag: int) -> Tensor:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    raise LinkBroken(f"the other half said nothing for {self._patience} s")
                got, dtype, shape = self._connection.recv()
                data = bytearray(self._connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise LinkBroken(str(error) or "the other half's process ended") from error
            if got == tag:
                return torch.frombuffer(data, dtype=dtype).view(shape)

    def alive(self) -> bool:
        """Whether the other end is still open; reads nothing."""
        poll = select.poll()
        poll.register(self._connection.fileno(), 0)  # an empty mask still reports a hang-up
        return not poll.poll(0)

    def close(self) -> None:
        self._connection.close()


@torch.no_grad()
def sample_front(
    plan: Plan, front: nn.Module, link: Link, version: int, generator: torch.Generator
) -> Tensor:
    """Sequences sampled by both halves: int64, (batch, digits + 1 + digits)."""
    sequences = task.prompts(plan, generator)
    for _ in range(plan.digits):
        link.send(version, front(sequences))
        sequences = torch.cat([sequences, link.receive(version)], dim=1)
    return sequences


@torch.no_grad()
def sample_back(plan: Plan, back: nn.Module, link: Link, version: int) -> None:
    """The other side of `sample_front`: draws each token."""
    for _ in range(plan.digits):
        activations = link.receive(version)
        likelihood = functional.softmax(back(activations)[:, -1], dim=-1)
        link.send(version, torch.multinomial(likelihood, 1))


def gradients_front(front: nn.Module, link: Link, version: int, sequences: Tensor) -> None:
    """Add the policy gradient of one batch to the front half's parameters."""
    activations = front(sequences[:, :-1])
    link.send(version, activations)
    activations.backward(link.receive(version))


class BackTrainer:
    """The other side of `gradients_front`, for all epochs over one batch.

    The advantage of a token is its reward above the batch's mean reward at the same
    position (REINFORCE with a baseline); from the second epoch on the ratio to the
    sampling policy is clipped as in PPO.
    """

    CLIP = 0.2

    def __init__(self, plan: Plan, sequences: Tensor, rewards: Tensor) -> None:
        self._from = plan.answer_from
        self._answers = sequences[:, self._from :]
        advantage = rewards - rewards.mean(dim=0, keepdim=True)
        self._advantage = advantage / (advantage.std() + 1e-6)
        self._sampled_at: Tensor | None = None

    def gradients(self, back: nn.Module, link: Link, version: int) -> None:
        activations = link.receive(version).requires_grad_()
        log_likelihood = functional.log_softmax(back(activations)[:, self._from - 1 :], dim=-1)
        taken = log_likelihood.gather(2, self._answers.unsqueeze(2)).squeeze(2)
        if self._sampled_at is None:
            self._sampled_at = taken.detach()
        ratio = (taken - self._sampled_at).exp()
        clipped = ratio.clamp(1 - self.CLIP, 1 + self.CLIP)
        loss = -torch.minimum(ratio * self._advantage, clipped * self._advantage).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        assert activations.grad is not None
        link.send(version, activations.grad)
