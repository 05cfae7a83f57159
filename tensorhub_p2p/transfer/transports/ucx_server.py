"""The holder's end of reads through UCX: one thread, for all readers.

Rule of this file. It serves only what `Exports` admits, and trusts nothing that comes in. Bytes
are copied out of the tensors into staging buffers: once an export was drained UCX has nothing
of it in hand but copies.

Who waits for whom. The holder has one thread, which serves all readers in turn, a step at a
time: one that takes nothing holds up nobody, and is given up after `stall_timeout`. It sleeps
in the kernel while nothing happens.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

from tensorhub_p2p.config import UcxConfig
from tensorhub_p2p.transfer.exports import Exports, Refused
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports.ucx_wire import (
    AHEAD,
    FULL,
    HEADER,
    MAGIC,
    MAX_ADDRESS,
    REQUEST,
    REQUEST_TAG,
    SERVED,
    STEP_BYTES,
)
from tensorhub_p2p.transfer.transports.ucx_worker import Worker

_log = logging.getLogger(__name__)

_Serving = Generator[Any, None, None]


class _Session:
    """One request that is being served: what it waits for, and until when."""

    def __init__(self, reader: bytes) -> None:
        self.reader = reader
        self.steps: _Serving | None = None
        self.request: Any = None
        self.deadline = 0.0
        self.cut = False


class Server:
    """The thread that serves."""

    def __init__(self, worker: Worker, exports: Exports, config: UcxConfig) -> None:
        self.address = worker.address
        self._worker = worker
        self._exports = exports
        self._config = config
        self._sessions: list[_Session] = []
        self._inbox: list[tuple[Any, bytearray]] = []
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tensorhub_p2p-ucx", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._rouse()
        self._thread.join()

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        try:
            while not self._closed:
                self._worker.progress()
                if not (self._take() | self._advance()):
                    self._worker.sleep(self._patience(), self._woken.fileno())
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
        except Exception:  # noqa: BLE001  the thread's own end
            _log.exception("serving through ucx ended; other transports go on")
        finally:
            for session in self._sessions:
                self._end(session)
            self._worker.close()
            self._wake.close()
            self._woken.close()

    def _patience(self) -> float:
        now = time.monotonic()
        return min([1.0, *(session.deadline - now for session in self._sessions)])

    def _take(self) -> bool:
        """Take in requests; whether there were any."""
        while len(self._inbox) < min(8, self._config.max_waiting):
            buffer = bytearray(REQUEST.size + MAX_ADDRESS)
            taking = self._worker.receive(buffer, len(buffer), REQUEST_TAG)
            self._inbox.append((taking, buffer))
        taken = [pair for pair in self._inbox if pair[0].completed]
        self._inbox = [pair for pair in self._inbox if not pair[0].completed]
        for request, buffer in taken:
            try:
                request.check_error()
                self._begin(buffer)
            except Exception as error:  # noqa: BLE001  whatever came in: the others are served
                _log.debug("a request through ucx was dropped: %r", error)
        return bool(taken)

    def _begin(self, buffer: bytearray) -> None:
        magic, tag, export, start, length, size = REQUEST.unpack_from(buffer)
        if magic != MAGIC or size > MAX_ADDRESS or not tag >> 63:
            raise ValueError(f"this is no request: {bytes(buffer[:4])!r}")
        session = _Session(bytes(buffer[REQUEST.size : REQUEST.size + size]))
        full = len(self._sessions) >= self._config.max_readers
        session.steps = (
            self._refuse(session, tag, FULL)
            if full
            else self._serve(session, tag, export, start, length)
        )
        self._sessions.append(session)
        self._resume(session)

    def _advance(self) -> bool:
        """Go on with every session whose step is done; whether there were any."""
        moved = False
        for session in list(self._sessions):
            if session.cut or session.request.completed:
                self._resume(session)
                moved = True
            elif time.monotonic() > session.deadline:
                self._fail(session, "it takes nothing")
        return moved

    def _resume(self, session: _Session) -> None:
        assert session.steps is not None
        try:
            if session.cut:
                self._end(session)
                return
            if session.request is not None:
                session.request.check_error()
            session.request = next(session.steps)
            session.deadline = time.monotonic() + self._config.stall_timeout
        except StopIteration:
            self._end(session)
            self._worker.forget_least_used(self._config.max_readers)
        except Exception as error:  # noqa: BLE001  UCXX's kinds: this reader's trouble alone
            self._fail(session, repr(error))

    def _fail(self, session: _Session, why: str) -> None:
        _log.debug("a read through ucx ended: %s", why)
        self._end(session)
        with contextlib.suppress(Exception):
            self._worker.forget(session.reader)

    def _end(self, session: _Session) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
        if session.steps is not None:
            session.steps.close()

    def _refuse(self, session: _Session, tag: int, status: int) -> _Serving:
        header = bytearray(HEADER.pack(MAGIC, status, 0))
        yield self._worker.send(session.reader, header, len(header), tag)

    def _serve(
        self, session: _Session, tag: int, export: bytes, start: int, length: int
    ) -> _Serving:
        """The answer, step by step; what is yielded must be done before the next one."""

        def cut() -> None:
            session.cut = True
            self._rouse()

        try:
            with self._exports.reading(export, start, length, cut) as region:
                header = bytearray(HEADER.pack(MAGIC, SERVED, length))
                before = self._worker.send(session.reader, header, len(header), tag)
                end = start + length
                staging = [Scratch(STEP_BYTES) for _ in range(min(AHEAD, -(-length // STEP_BYTES)))]
                while start < end:
                    size = min(STEP_BYTES, end - start)
                    staging.append(buffer := staging.pop(0))
                    buffer.gather(region.pieces(start, size))
                    request = self._worker.send(session.reader, buffer, size, tag)
                    yield before
                    before, start = request, start + size
                yield before
        except Refused as refused:
            yield from self._refuse(session, tag, refused.refusal)
