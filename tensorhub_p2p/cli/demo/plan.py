"""What one run of the demo is: who takes part, for how long, and when the accident happens."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "policy"
TRAINER = "trainer"
ROLLOUTS = ("rollout-0", "rollout-1", "rollout-2")
SHARDS = 2

WITNESS = ("rollout-1", 1)
"""The process that kills the victim the moment it sees bytes of its own pull arrive."""
VICTIM = ("rollout-2", 1)
"""The process that dies while it serves that pull."""


@dataclass(frozen=True)
class Plan:
    """The numbers of a run. All times in seconds."""

    steps: int = 32
    """Training steps; the trainer publishes version 1, then one version a step."""
    vocabulary: int = 65_536
    """Rows of the embedding and of the head, of the order that a tokenizer has.

    The task uses 11 of them; all change with every step (weight decay) and are moved:
    16 MiB a shard.
    """
    width: int = 64
    heads: int = 4
    digits: int = 5
    """Length of the sequences to sort."""
    batch: int = 128
    """Sequences that one rollout replica samples from one version."""
    epochs: int = 2
    """Gradient steps on one collected batch (the ratio is clipped, as in PPO)."""
    learning_rate: float = 3e-3
    seed: int = 7
    required_rise: float = 0.4
    """The mean reward of the last quarter must beat that of the first three versions by this."""
    patience: float = 60.0
    """Longest wait for anything, by anyone."""
    time_limit: float = 300.0
    """The whole run is broken off after this."""

    @property
    def final_version(self) -> int:
        return self.steps + 1

    @property
    def accident_version(self) -> int:
        """The victim dies while others pull this version from it."""
        return 1 + self.steps // 2

    @property
    def answer_from(self) -> int:
        """Position of the answer's first token: behind the digits and the separator."""
        return self.digits + 1


QUICK = Plan(steps=8, vocabulary=32_768, required_rise=0.05)


def worker_name(replica: str, shard: int) -> str:
    """What a process is called on screen and in the cluster."""
    return f"{replica}#{shard}"
