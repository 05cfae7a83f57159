"""Worker processes that do as they are told; spawned once, used by many tests.

Rules of this file. A test takes workers from the pool, tells them what to do (functions of
steps.py, which run in the worker's main thread with its `World` as the first argument), and
may kill, stop and interrupt them. All waits are bounded. A worker that was killed, or that
can't be reset, is replaced; at the end all are killed, by their process ids.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tensorhub_p2p.errors import RetentionLost

PATIENCE = 60.0
"""Seconds that a test waits for a worker; far above what anything takes on a busy machine."""


class World:
    """What a worker has: a peer, handles and tensors by name, and the pipe to the test."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.peer: Any = None
        self.handles: dict[str, Any] = {}
        self.tensors: dict[str, dict[str, Any]] = {}

    def pause(self, where: str) -> None:
        """Tell the test where we are, and go on when it says so.

        In short waits: a signal that comes just before a wait begins doesn't end that wait, and
        Python acts on it only after.
        """
        self.pipe.send(("paused", where))
        while not self.pipe.poll(0.05):
            continue
        self.pipe.recv()

    def say(self, what: str) -> None:
        self.pipe.send(("said", what))

    def reset(self) -> None:
        if self.peer is not None:
            with contextlib.suppress(RetentionLost):  # the last one can't hand it on
                self.peer.close(10)
        self.__init__(self.pipe)  # type: ignore[misc]


def work(pipe: Connection) -> None:
    """The worker's main loop."""
    faulthandler.register(signal.SIGUSR1)
    world = World(pipe)
    pipe.send(("done", None))
    while True:
        try:
            function, args, options = pipe.recv()
            answer = ("done", function(world, *args, **options))
        except EOFError:
            return  # the tests are over
        except BaseException as error:  # noqa: BLE001 - the test gets it, Ctrl-C too
            answer = ("raised", error)
        try:
            pipe.send(answer)
        except BrokenPipeError:
            return  # the test has ended without us


class Worker:
    """One process, seen from the test."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.ready = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def wait_ready(self) -> None:
        if not self.ready:
            self.finish()
            self.ready = True

    def do(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a step and wait for what it returns or raises."""
        self.begin(step, *args, **options)
        return self.finish()

    def begin(self, step: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._pipe.send((step, args, options))

    def finish(self, timeout: float = PATIENCE) -> Any:
        """The end of the step that was begun."""
        kind, value = self._next(timeout)
        if kind == "raised":
            raise value
        assert kind == "done", f"it {kind} {value!r} instead of ending"
        return value

    def wait_paused(self, where: str) -> None:
        assert self._next(PATIENCE) == ("paused", where)

    def wait_said(self, what: str) -> None:
        assert self._next(PATIENCE) == ("said", what)

    def go_on(self) -> None:
        self._pipe.send(None)

    def _next(self, timeout: float) -> tuple[str, Any]:
        if not self._pipe.poll(timeout):
            self.signal(signal.SIGUSR1)  # its stacks, on stderr
            raise AssertionError(f"worker {self.pid} does not answer")
        answer: tuple[str, Any] = self._pipe.recv()
        return answer

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(PATIENCE)

    def wait_ended(self) -> int | None:
        """The exit code of a process that is about to end by itself."""
        self._process.join(PATIENCE)
        return self._process.exitcode

    def reset(self) -> bool:
        """Ready for the next test? A worker in the middle of something is not."""
        with contextlib.suppress(Exception):
            self.do(World.reset)
            return not self._pipe.poll(0)
        return False


class Pool:
    """Workers that wait for a test."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    def take(self, count: int) -> list[Worker]:
        self._idle = [worker for worker in self._idle if worker.alive]
        self._idle.extend(Worker() for _ in range(count - len(self._idle)))
        taken, self._idle = self._idle[:count], self._idle[count:]
        for worker in taken:
            worker.wait_ready()
        return taken

    def give_back(self, workers: list[Worker]) -> None:
        """Resets them side by side; those that can't be are killed."""

        def give_back(worker: Worker) -> None:
            if worker.alive and worker.reset():
                self._idle.append(worker)
            elif worker.alive:
                worker.kill()

        threads = [threading.Thread(target=give_back, args=(w,)) for w in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for worker in self._idle:
            if worker.alive:
                worker.kill()


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("these tests need Linux")
