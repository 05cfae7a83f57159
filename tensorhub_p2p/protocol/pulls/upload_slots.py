"""The upload slots of one peer: each model that is pulled from it gets an even part of them.

Rule of this file. It counts models and says how many slots a shard may give; who gets one is
serving.py's choice.

Theory. A shard serves `upload_slots` pullers at a time. But a peer has one cable, and all whom it
serves share it: a model with many pullers would leave hardly anything to one with few. So while
several models are being pulled from this peer, a shard has its model's even part of the slots, one
at least. A model counts as long as a shard of it has a lease, granted or waiting.
"""

from __future__ import annotations

from collections import Counter


class UploadSlots:
    """`slots` are those of a shard while only its own model is being pulled."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pulled: Counter[str] = Counter()
        """Model → its shards here that have leases."""

    def each(self) -> int:
        """The slots that a shard may give at present."""
        return max(1, self._slots // max(1, len(self._pulled)))

    def begins(self, model: str) -> None:
        """A shard of the model has its first lease."""
        self._pulled[model] += 1

    def ends(self, model: str) -> None:
        """It has none any more."""
        self._pulled[model] -= 1
        if not self._pulled[model]:
            del self._pulled[model]
