"""Workers of UCX: an end that sends and receives messages under tags.

Rule of this file. All that touches the library is here; what is sent when, and what an end
means, its users say. A `Worker` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
from collections import OrderedDict
from typing import Any

from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.optional import installed, try_apart

TRY_SECONDS = 20.0
CLOSE_NANOSECONDS = 10_000_000
"""What each of three tries to part in order may take."""

_TRY = """
from tensorhub_p2p.transfer.transports.ucx_worker import Worker
Worker({devices!r}).close()
"""


def library() -> str | None:
    """The module's name, if it is installed."""
    return installed(("ucxx",))


def trouble(devices: str) -> str | None:
    """Why a worker can't be made here, or None."""
    return try_apart("ucxx", _TRY.format(devices=devices), TRY_SECONDS)


class Worker:
    """One worker of UCX with a context of its own. Used by one thread at a time."""

    def __init__(self, devices: str) -> None:
        # The library sets variables that its own UCX then complains of.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        ucxx = importlib.import_module("ucxx._lib.libucxx")
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._tag, self._all = ucxx.UCXXTag, ucxx.UCXXTagMaskFull
        self._make_address = ucxx.UCXAddress.create_from_buffer
        features = (ucxx.Feature.TAG, ucxx.Feature.WAKEUP)
        self._context = ucxx.UCXContext({"NET_DEVICES": devices}, feature_flags=features)
        self._worker: Any = ucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._descriptor: int = self._worker.epoll_file_descriptor
        self.address: bytes = self._worker.address.tobytes()
        self._peers: OrderedDict[bytes, Any] = OrderedDict()
        self._unfinished: list[tuple[Any, bytearray | Scratch]] = []
        """Requests, and the memory that UCX may use until they are done."""

    def send(self, to: bytes, data: bytearray | Scratch, size: int, tag: int) -> Any:
        """Send `size` bytes to the worker with this address; UCX holds them until it is done."""
        request = self._peer(to).tag_send(self._array(_start(data, size)), tag=self._tag(tag))
        self._unfinished.append((request, data))
        return request

    def receive(self, into: bytearray | Scratch, size: int, tag: int) -> Any:
        """Take the next message with this tag; one that is longer than `size` is an error."""
        request = self._worker.tag_recv(
            self._array(_start(into, size)), tag=self._tag(tag), tag_mask=self._all
        )
        self._unfinished.append((request, into))
        return request

    def _peer(self, address: bytes) -> Any:
        peer = self._peers.get(address)
        if peer is not None and peer.alive:
            self._peers.move_to_end(address)
            return peer
        made = self._worker.create_endpoint_from_worker_address(
            self._make_address(address), endpoint_error_handling=True
        )
        self._peers[address] = made
        return made

    def forget(self, address: bytes) -> None:
        """Break off with this worker."""
        peer = self._peers.pop(address, None)
        # One that broke must not be closed: UCXX crashes. It goes when nobody holds it.
        if peer is not None and peer.alive:
            peer.close_blocking(period=CLOSE_NANOSECONDS, max_attempts=3)

    def forget_least_used(self, keep: int) -> None:
        while len(self._peers) > keep:
            self.forget(next(iter(self._peers)))

    def progress(self) -> None:
        self._worker.progress()
        self._unfinished = [pair for pair in self._unfinished if not pair[0].completed]

    @property
    def quiet(self) -> bool:
        """UCX may use no memory any more that it was given."""
        return not self._unfinished

    def sleep(self, seconds: float, wake: int | None = None) -> None:
        """Until UCX has something to do, `wake` can be read, or the time is over."""
        if self._worker.arm():
            watched = [self._descriptor] if wake is None else [self._descriptor, wake]
            select.select(watched, [], [], max(0.0, seconds))

    def close(self) -> None:
        if self._worker is None:
            return
        with contextlib.suppress(Exception):
            for address in list(self._peers):
                self.forget(address)
            self._worker.cancel_inflight_requests()
            self._worker.progress()
        self._peers.clear()
        held = [memory for _, memory in self._unfinished]
        self._unfinished.clear()
        self._worker = self._context = None
        held.clear()  # only now does nobody use it any more


def _start(memory: bytearray | Scratch, size: int) -> memoryview:
    whole = memory.memory if isinstance(memory, Scratch) else memoryview(memory)
    return whole[:size]
