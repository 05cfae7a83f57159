"""The task with a checkable answer: read a few digits, write them sorted.

A sequence is `digits`, the separator, then the answer, one token each. The reward is
given per token: 1 where the written digit is the right one, else 0. So a policy that
guesses gets 0.1, and one that can sort gets 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensorhub_p2p.cli.demo.plan import Plan

ALPHABET = 10
SEPARATOR = 10


def prompts(plan: Plan, generator: torch.Generator) -> Tensor:
    """Random tasks: int64, (batch, digits + 1), separator included."""
    digits = torch.randint(0, ALPHABET, (plan.batch, plan.digits), generator=generator)
    return torch.cat([digits, torch.full((plan.batch, 1), SEPARATOR)], dim=1)


def rewards(plan: Plan, sequences: Tensor) -> Tensor:
    """float32, (batch, digits): 1 where the answer's token is right."""
    digits, answer = sequences[:, : plan.digits], sequences[:, plan.answer_from :]
    return (answer == digits.sort(dim=1).values).float()
