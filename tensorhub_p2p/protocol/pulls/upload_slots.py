"""The upload slots of one peer: each model that is pulled from it gets an even part of them.

Rule of this file. It says how many slots a shard may give; who gets one is leases.py's choice.

Theory. A shard serves `upload_slots` pullers at a time. But a peer has one cable, and all whom it
serves share it: a model with many pullers would leave hardly anything to one with few. So while
several models are being pulled from this peer, a shard has its model's even part of the slots, one
at least. A model counts as long as a shard of it has a lease, granted or waiting.
"""

from __future__ import annotations

from typing import Protocol

from tensorhub_p2p.config import PullConfig


class Pulled(Protocol):
    """The leases of one shard."""

    @property
    def model(self) -> str: ...

    def __len__(self) -> int: ...


class UploadSlots:
    """The slots of one peer, among all that it serves."""

    def __init__(self, config: PullConfig) -> None:
        self.config = config
        self._shards: list[Pulled] = []

    def add(self, shard: Pulled) -> None:
        self._shards.append(shard)

    def remove(self, shard: Pulled) -> None:
        """It is served no more. May come twice."""
        self._shards = [other for other in self._shards if other is not shard]

    def each(self) -> int:
        """The slots that a shard may give at present."""
        models = {shard.model for shard in self._shards if len(shard)}
        return max(1, self.config.upload_slots // max(1, len(models)))
