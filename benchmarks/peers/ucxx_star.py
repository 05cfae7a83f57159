"""UCXX, point to point: everyone who comes is sent the whole tensor by one hub.

The hub's listener answers each connection with the tensor. UCX itself is set through its
environment variables. Setting: `progress` (UCXX's progress mode; default: UCXX's own).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ucxx
from serving import Side, Span, Stopwatch, serve


class Messenger(Side):
    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, **settings)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.array = self.tensor.numpy().view("u1")
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        ucxx.init(progress_mode=self.settings.get("progress"))


class Hub(Messenger):
    async def _start(self) -> None:
        await super()._start()
        self._listener = ucxx.create_listener(self._serve)
        self._served: asyncio.Queue[Any] = asyncio.Queue()

    async def _serve(self, endpoint: Any) -> None:
        await endpoint.send(self.array)
        self._served.put_nowait(endpoint)

    def describe(self) -> int:
        port: int = self._listener.port
        return port

    def give_to(self, count: int) -> None:
        """Until so many were sent all of it."""

        async def wait() -> None:
            for _ in range(count):
                await self._served.get()

        self.loop.run_until_complete(wait())


class Spoke(Messenger):
    def join_and_take(self, about: int, moment: float) -> Span:
        """At that moment, as one who is new: connect and receive."""
        time.sleep(max(0.0, moment - time.monotonic()))
        with Stopwatch() as watch:
            self.loop.run_until_complete(self._receive(about))
        return watch.span

    async def _receive(self, port: int) -> None:
        self._endpoint = await ucxx.create_endpoint(self.settings["source"], port)
        await self._endpoint.recv(self.array)

    def leave(self) -> None:
        self.loop.run_until_complete(self._endpoint.close())


if __name__ == "__main__":
    serve({"hub": Hub, "spoke": Spoke})
