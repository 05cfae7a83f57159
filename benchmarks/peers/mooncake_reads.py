"""Mooncake Transfer Engine, TCP: one-sided reads, as its Python documentation shows them.

Metadata by its peer-to-peer handshake, memory registered once. Settings: `address` (this
host's), `pieces` (reads in one batch, default 1). The engine itself is set through its
environment variables (MC_...).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from mooncake.engine import TransferEngine
from serving import Side, Span, Stopwatch, serve


class Engine(Side):
    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.address = settings.get("address", "127.0.0.1")
        self.engine = TransferEngine()
        if self.engine.initialize(self.address, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake's engine did not start")
        if self.engine.register_memory(self.tensor.data_ptr(), self.tensor.nbytes):
            raise RuntimeError("Mooncake's engine did not register the tensor")

    def pieces(self, base: int) -> tuple[list[int], list[int]]:
        """(addresses, lengths) of a tensor that begins at `base`."""
        count, size = self.settings.get("pieces", 1), self.tensor.nbytes
        cuts = [size * i // count for i in range(count + 1)]
        return [base + cut for cut in cuts[:-1]], [b - a for a, b in pairwise(cuts)]


class Source(Engine):
    def describe(self) -> tuple[str, int]:
        return f"{self.address}:{self.engine.get_rpc_port()}", self.tensor.data_ptr()


class Target(Engine):
    def connect(self, about: tuple[str, int]) -> None:
        self._source, base = about
        self._theirs, self._lengths = self.pieces(base)
        self._ours, _ = self.pieces(self.tensor.data_ptr())

    def take(self) -> Span:
        with Stopwatch() as watch:
            failed = self.engine.batch_transfer_sync_read(
                self._source, self._ours, self._theirs, self._lengths
            )
        if failed:
            raise RuntimeError(f"Mooncake's read returned {failed}")
        return watch.span


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
