"""The puller's end of reads through UCX: one stream from one holder, by a worker of its own.

Rule of this file. It takes the bytes that it is told to read, and feeds the hasher. UCX
receives into staging buffers, never into the tensors: a read that was given up is over whatever
UCX still has in flight.

Who waits for whom. A puller gives up on a source that brings no step for `silence` seconds. It
sleeps in the kernel while nothing happens.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any

from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
)
from tensorhub_p2p.transfer.transports.borrowed import Borrowed
from tensorhub_p2p.transfer.transports.ucx_wire import (
    AHEAD,
    FULL,
    HEADER,
    MAGIC,
    REQUEST,
    REQUEST_TAG,
    SERVED,
    STEP_BYTES,
    Endpoint,
)
from tensorhub_p2p.transfer.transports.ucx_worker import Worker

LOOK_SECONDS = 0.05
"""How often a sleeping reader looks whether it was closed."""


class UcxReader(Reader):
    """One stream from one holder."""

    def __init__(self, borrowed: Borrowed[Worker], endpoint: Endpoint, silence: float) -> None:
        self._borrowed = borrowed
        self._endpoint = endpoint
        self._silence = silence
        self._name = borrowed.name
        self._staging: list[Scratch] = []

    def open(self, deadline: float) -> None:
        """See whether the holder serves this export."""
        try:
            with self._using() as worker:
                self._ask(worker, 0, 0, deadline)
        except SourceGone as error:
            raise CannotReach(str(error)) from error

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        with self._using() as worker:
            tag = self._ask(worker, start, length, deadline)
            self._staging = self._staging or [Scratch(STEP_BYTES) for _ in range(AHEAD)]
            free, coming = list(self._staging), []
            asked, end = start, start + length
            while start < end:
                while free and asked < end:
                    size = min(STEP_BYTES, end - asked)
                    staging = free.pop()
                    coming.append((worker.receive(staging, size, tag), staging, size))
                    asked += size
                request, staging, size = coming.pop(0)
                self._await(worker, request, deadline)
                hasher.update(staging.memory[:size])
                staging.scatter(into.pieces(start, size))
                free.append(staging)
                start += size

    def _ask(self, worker: Worker, start: int, length: int, deadline: float) -> int:
        """Send a request and take the header of its answer; returns the tag of its bytes."""
        tag = secrets.randbits(63) | 1 << 63
        export, address = self._endpoint.export, worker.address
        asked = REQUEST.pack(MAGIC, tag, export, start, length, len(address)) + address
        header = bytearray(HEADER.size)
        answer = worker.receive(header, len(header), tag)
        sent = worker.send(self._endpoint.worker, bytearray(asked), len(asked), REQUEST_TAG)
        self._await(worker, sent, deadline)
        self._await(worker, answer, deadline)
        magic, status, due = HEADER.unpack(header)
        if magic != MAGIC:
            raise CannotReach(f"{self._name} is something else: it answers {bytes(header[:4])!r}")
        if status == FULL:
            raise CannotReach(f"{self._name} serves as many readers as it may")
        if status != SERVED:
            raise SourceWithdrew(f"{self._name} doesn't serve this (any more): status {status}")
        if due != length:
            raise SourceGone(f"{self._name} offers {due} bytes where {length} were asked for")
        return tag

    def _await(self, worker: Worker, request: Any, deadline: float) -> None:
        silent_at = min(deadline, time.monotonic() + self._silence)
        while True:
            worker.progress()
            if request.completed:
                request.check_error()
                return
            self._borrowed.check()
            left = silent_at - time.monotonic()
            if left <= 0:
                raise SourceSilent(f"{self._name} sent nothing in time")
            worker.sleep(min(left, LOOK_SECONDS))

    @contextlib.contextmanager
    def _using(self) -> Iterator[Worker]:
        """Own the worker, and say what its errors mean. After a failure it isn't used again."""
        with self._borrowed.using() as worker:
            try:
                yield worker
            except (ReadFailed, IndexError):
                raise
            except Exception as error:  # UCXX's kinds are only known once it is loaded
                raise SourceGone(f"{self._name} broke the connection: {error!r}") from error

    def close(self) -> None:
        self._borrowed.close()
