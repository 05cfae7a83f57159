"""The policy: a transformer of two blocks, cut in two halves, one for each shard.

Shard 0 holds the front half (embeddings, first block), shard 1 the back half (second
block, norm, head). A replica is two processes that pass activations to each other, so
no process ever has the other's weights: see pipeline.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tensorhub_p2p.cli.demo.plan import Plan
from tensorhub_p2p.cli.demo.task import ALPHABET


class Block(nn.Module):
    """Pre-norm causal self-attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(self.attention_norm(x))
        packed = packed.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.down(functional.gelu(self.up(self.perceptron_norm(x))))
        return x + thought


class Front(nn.Module):
    """Tokens (batch, length) → activations (batch, length, width)."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.tokens = nn.Embedding(plan.vocabulary, plan.width)
        self.positions = nn.Embedding(plan.answer_from + plan.digits, plan.width)
        self.block = Block(plan.width, plan.heads)
        nn.init.normal_(self.tokens.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        activations: Tensor = self.block(x)
        return activations


class Back(nn.Module):
    """Activations (batch, length, width) → logits of the ten digits (batch, length, 10).

    The head has a row for the whole vocabulary; decoding is constrained to digits.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.block = Block(plan.width, plan.heads)
        self.norm = nn.LayerNorm(plan.width)
        self.head = nn.Linear(plan.width, plan.vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.block(x)) @ self.head.weight[:ALPHABET].T
        return logits


def half(plan: Plan, shard: int, seed: int) -> nn.Module:
    """The half that belongs to `shard`, with weights drawn from `seed`."""
    torch.manual_seed(seed + shard)
    return Front(plan) if shard == 0 else Back(plan)
