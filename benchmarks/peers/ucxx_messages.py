"""UCXX: a message from the source into the target's tensor, by its Python interface.

As its documentation shows: an endpoint, `await endpoint.send(array)` there and
`await endpoint.recv(array)` here. Settings: `progress` (UCXX's progress mode; default: UCXX's
own), `pieces` (messages that the tensor is cut into, all under way at once, default 1). UCX
itself is set through its environment variables.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ucxx
from serving import Side, Span, Stopwatch, serve


class Messenger(Side):
    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.endpoint: Any = None
        pieces = settings.get("pieces", 1)
        self.arrays = [piece.numpy().view("u1") for piece in self.tensor.chunk(pieces)]
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        ucxx.init(progress_mode=self.settings.get("progress"))

    def _run(self, what: Any) -> Span:
        with Stopwatch() as watch:
            self.loop.run_until_complete(what)
        return watch.span


class Source(Messenger):
    async def _start(self) -> None:
        await super()._start()
        self._listener = ucxx.create_listener(self._connected)

    def _connected(self, endpoint: Any) -> None:
        self.endpoint = endpoint

    def describe(self) -> int:
        return self._listener.port

    def accept(self) -> None:
        async def wait() -> None:
            while self.endpoint is None:
                await asyncio.sleep(0.01)

        self.loop.run_until_complete(wait())

    def give(self) -> Span:
        return self._run(self._send())

    async def _send(self) -> None:
        await asyncio.gather(*[self.endpoint.send(array) for array in self.arrays])


class Target(Messenger):
    def connect(self, about: int) -> None:
        address = self.settings.get("source", "127.0.0.1")

        async def dial() -> None:
            self.endpoint = await ucxx.create_endpoint(address, about)

        self.loop.run_until_complete(dial())

    def take(self) -> Span:
        return self._run(self._receive())

    async def _receive(self) -> None:
        await asyncio.gather(*[self.endpoint.recv(array) for array in self.arrays])


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
