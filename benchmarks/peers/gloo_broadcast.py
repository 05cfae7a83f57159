"""gloo, through torch.distributed: a broadcast from the source, or a send and a receive.

Settings: `call` ("broadcast", the default, or "send"), `source` (the address where the
source's store listens), `rank` and `ranks` (default: a source and one target), `pieces` (broadcasts
that the tensor is cut into, all under way at once, default 1).
"""

from __future__ import annotations

import datetime

import torch.distributed as dist
from serving import Side, Span, Stopwatch, serve


class Rank(Side):
    rank = 0

    def join(self, port: int) -> None:
        """Blocks until all ranks have joined."""
        address = self.settings.get("source", "127.0.0.1")
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.settings.get("rank", self.rank),
            world_size=self.settings.get("ranks", 2),
            timeout=datetime.timedelta(seconds=200),
        )

    def _move(self) -> Span:
        with Stopwatch() as watch:
            if self.settings.get("call", "broadcast") == "broadcast":
                pieces = self.tensor.chunk(self.settings.get("pieces", 1))
                calls = [dist.broadcast(piece, src=0, async_op=True) for piece in pieces]
                for call in calls:
                    call.wait()
            elif self.rank == 0:
                dist.send(self.tensor, dst=1)
            else:
                dist.recv(self.tensor, src=0)
        return watch.span


class Source(Rank):
    def describe(self) -> int:
        address = self.settings.get("source", "127.0.0.1")
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def accept(self) -> None:
        self.join(self._store.port)

    def give(self) -> Span:
        return self._move()


class Target(Rank):
    rank = 1

    def connect(self, about: int) -> None:
        self.join(about)

    def take(self) -> Span:
        return self._move()


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
