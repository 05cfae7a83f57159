"""NIXL: one-sided READs through its UCX backend, as its Python examples do them.

Both sides register their tensor once. The target prepares one transfer, reposts it for each
read and polls its state. Settings: `progress_thread` (default: on, as NIXL's), `pieces` (how
many descriptors the tensor is cut into, default 1), `rest` (seconds slept between polls).
"""

from __future__ import annotations

import base64
import time
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config
from serving import Side, Span, Stopwatch, serve


class Agent(Side):
    name = ""

    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(size, **settings)
        thread = settings.get("progress_thread", True)
        self.agent = nixl_agent(self.name, nixl_agent_config(enable_prog_thread=thread))
        if not self.agent.register_memory([self.tensor]):
            raise RuntimeError("NIXL did not register the tensor")

    def pieces(self) -> Any:
        return self.agent.get_xfer_descs(list(self.tensor.chunk(self.settings.get("pieces", 1))))


class Source(Agent):
    name = "source"

    def describe(self) -> dict[str, str]:
        pieces = self.agent.get_serialized_descs(self.pieces())
        return {"agent": _text(self.agent.get_agent_metadata()), "pieces": _text(pieces)}


class Target(Agent):
    name = "target"

    def connect(self, about: dict[str, str]) -> None:
        remote = self.agent.add_remote_agent(base64.b64decode(about["agent"]))
        theirs = self.agent.deserialize_descs(base64.b64decode(about["pieces"]))
        self._read = self.agent.initialize_xfer("READ", self.pieces(), theirs, remote)

    def take(self) -> Span:
        rest = self.settings.get("rest")
        with Stopwatch() as watch:
            state = self.agent.transfer(self._read)
            while state == "PROC":
                if rest is not None:
                    time.sleep(rest)
                state = self.agent.check_xfer_state(self._read)
        if state != "DONE":
            raise RuntimeError(f"NIXL's read ended as {state}")
        return watch.span


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
