"""A worker process with a peer, told over a pipe what to do. Times are taken in it.

Rule of this file. `Worker` is what runs in the process, `Remote` the other end of its pipe:
`remote.publish(...)` runs `Worker.publish(...)` there and returns what it returned. A
worker uses the library as a user does; the two looks inside are marked.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import bare

PAGE_BYTES = 4096


class Worker:
    """Commands of one worker process. Models are told apart by name."""

    def __init__(self, name: str, seeds: list[str], options: dict[str, Any]) -> None:
        import torch

        import tensorhub_p2p as th

        torch.set_num_threads(1)  # idle OpenMP threads would spin beside what is measured
        self._torch = torch
        self._peer = th.Peer(cluster="benchmark", seeds=seeds, name=name, **options)
        self._handles: dict[str, Any] = {}
        self._tensors: dict[str, list[Any]] = {}
        self._beside: Future[dict[str, Any]]
        self._bare: Any = None
        self._source: bare.StreamSource | None = None
        self._target: bare.StreamTarget | None = None
        self._echo: bare.Echo | None = None
        self._bare_links: dict[int, socket.socket] = {}

    def address(self) -> str:
        return self._peer.address

    def members(self) -> int:
        return len(self._peer.members())

    # --- tensors -------------------------------------------------------------------------

    def open(self, model: str, replica: str, num_tensors: int, tensor_bytes: int) -> None:
        """Open a handle and register tensors whose pages are all touched."""
        tensors = [self._filled(tensor_bytes) for _ in range(num_tensors)]
        handle = self._peer.open(model, replica=replica)
        handle.register([(f"layer.{i}", tensor) for i, tensor in enumerate(tensors)])
        self._handles[model], self._tensors[model] = handle, tensors

    def _filled(self, num_bytes: int) -> Any:
        """Memory of torch's allocator, every page of it touched."""
        return self._torch.empty(num_bytes // 4, dtype=self._torch.int32).random_()

    def write(self, model: str) -> None:
        """Give every byte range of the tensors a new content."""
        for tensor in self._tensors[model]:
            tensor.add_(0x01010101)

    def fingerprint(self, model: str) -> str:
        """A digest over the tensors of the model, or over the bare memory."""
        import hashlib

        whole = hashlib.blake2b(digest_size=16)
        for tensor in self._tensors[model]:
            whole.update(tensor.numpy())
        return whole.hexdigest()

    # --- verbs ---------------------------------------------------------------------------

    def publish(self, model: str, version: int) -> float:
        """Returns the seconds of the call."""
        began = time.perf_counter()
        self._handles[model].publish(version)
        return time.perf_counter() - began

    def publish_at(self, model: str, version: int) -> float:
        """Returns when the call was made, on the clock that all processes share."""
        began = time.monotonic()
        self._handles[model].publish(version)
        return began

    def wait_for_digests(self, model: str) -> float:
        """Until all digests of what is published are taken; returns the seconds."""
        handle, driver = self._handles[model], self._peer._driver  # a look inside
        began = time.perf_counter()
        while True:
            server = driver.ask(lambda _now: driver.node.shards[handle._slot].server)
            if server.manifest.complete:
                return time.perf_counter() - began
            time.sleep(0.002)

    def unpublish(self, model: str) -> float:
        began = time.perf_counter()
        self._handles[model].unpublish()
        return time.perf_counter() - began

    def replicate(self, model: str, version: int | str = "latest") -> dict[str, Any]:
        """The call as its caller sees it (`seconds`), and what it says of itself."""
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        pull = self._handles[model].replicate(version)
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "moving": pull.moving,
            "waiting": pull.waiting,
            "registering": pull.registering,
            "bytes": pull.bytes,
            "retried": pull.retried,
            "transports": sorted({s.transport for s in pull.sources if s.chunks}),
            "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            "switches": after.ru_nvcsw - before.ru_nvcsw,
        }

    def begin_replicate(self, model: str, version: int | str = "latest") -> None:
        """The same on a thread of its own; `end_replicate` waits for it."""
        pulls = ThreadPoolExecutor(1)
        self._beside = pulls.submit(self.replicate, model, version)
        pulls.shutdown(wait=False)

    def end_replicate(self) -> dict[str, Any]:
        return self._beside.result()

    def have(self, model: str, version: int) -> int:
        """Which chunks others can read here: bit c for chunk c; a look inside."""
        slot, driver = self._handles[model]._slot, self._peer._driver
        server = driver.ask(lambda _now: driver.node.shards[slot].server)
        if server is None or server.publication.version != version:
            return 0
        return int(server.have.bits)

    def replicate_peak(self, model: str) -> dict[str, Any]:
        """The same; `extra_bytes` is how far the resident memory rose above that before it."""
        _reset_peak()
        before = _status("VmRSS")
        report = self.replicate(model)
        report["extra_bytes"] = max(0, _status("VmHWM") - before)
        return report

    def wait_for(self, model: str, newer_than: int) -> float:
        """Returns when the newer version was seen, on the clock that all processes share."""
        self._handles[model].wait_for(newer_than)
        return time.monotonic()

    # --- at a pace -----------------------------------------------------------------------

    def train(self, model: str, until: float, step: float) -> dict[str, Any]:
        """Publish, wait a step, unpublish, write, until that time; what was done when."""
        copies = self._count_offloads()
        published: list[tuple[int, float]] = []
        unpublishes: list[float] = []
        version = 0
        while time.monotonic() < until:
            version += 1
            self._handles[model].publish(version)
            published.append((version, time.monotonic()))
            time.sleep(step)
            unpublishes.append(self.unpublish(model))
            self.write(model)
        return {"published": published, "unpublishes": unpublishes, "offloads": len(copies)}

    def _count_offloads(self) -> list[object]:
        """A list that grows with each offload that this peer makes; a look inside."""
        offloads, made = self._peer._driver.offloads, []
        plain = offloads.copy

        def copy(*what: Any) -> None:
            made.append(what[1])
            plain(*what)

        offloads.copy = copy
        return made

    def slow_reads(self, seconds: float) -> None:
        """Have the read of each chunk take so long; a look inside."""
        from tensorhub_p2p.transfer.links import Link

        plain = Link._read

        def read(link: Any, chunk: int, digest: bytes, reader: Any) -> None:
            time.sleep(seconds)
            plain(link, chunk, digest, reader)

        Link._read = read  # type: ignore[method-assign]

    def follow(self, model: str, until: float) -> dict[str, Any]:
        """Replicate "latest" again and again, until that time."""
        from tensorhub_p2p import TensorHubError

        pulls: list[dict[str, Any]] = []
        errors: list[str] = []
        newest = -1
        while time.monotonic() < until:
            try:
                self._handles[model].wait_for(newest, timeout=10)
                pull = self._handles[model].replicate(timeout=30)
            except TensorHubError as error:
                errors.append(f"{type(error).__name__}: {error}")
                continue
            newest = pull.version
            ended = time.monotonic()
            pulls.append({"version": newest, "seconds": pull.seconds, "ended": ended})
        return {"pulls": pulls, "errors": errors}

    # --- bare ----------------------------------------------------------------------------

    def bare_memory(self, num_bytes: int) -> tuple[int, int]:
        """Memory for the bare figures, beside the registered: (pid, address)."""
        bare.allow_reading()
        self._bare = self._filled(num_bytes)
        self._tensors["bare"] = [self._bare]
        return os.getpid(), self._bare.data_ptr()

    def bare_read(self, pid: int, address: int) -> dict[str, float]:
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = bare.read_memory(pid, address, self._bare.data_ptr(), self._bare.nbytes)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": seconds, "cpu": cpu}

    def bare_source(self) -> int:
        """Serve the bare memory over plain sockets; returns the port."""
        self._source = bare.StreamSource(self._bare.data_ptr(), self._bare.nbytes)
        return self._source.port

    def bare_target(self, port: int) -> None:
        self._target = bare.StreamTarget(port, self._bare.data_ptr(), self._bare.nbytes)

    def bare_receive(self) -> dict[str, float]:
        assert self._target is not None
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = self._target.receive()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": seconds, "cpu": cpu}

    def bare_echo(self) -> int:
        """Echo small messages over plain TCP; returns the port."""
        self._echo = bare.Echo()
        return self._echo.port

    def bare_round_trip(self, ports: list[int]) -> float:
        """To the processes with these ports, one after the other; the mean of the seconds."""
        for port in ports:
            if port not in self._bare_links:
                link = socket.create_connection(("127.0.0.1", port))
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._bare_links[port] = link
        times = [bare.round_trip(self._bare_links[port], b"x" * 200) for port in ports]
        return sum(times) / len(times)

    def close(self) -> None:
        self._peer.close()


def _status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reset_peak() -> None:
    """Let VmHWM begin anew from the present size."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


class Remote:
    """A worker process. Its methods are those of `Worker`; `begin` doesn't wait.

    `namespace`: the network namespace that it lives in (a testbed's host), "" for ours.
    """

    def __init__(
        self, name: str, seeds: list[str], options: dict[str, Any], namespace: str = ""
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_work, args=(theirs, name, seeds, options, namespace), daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(self, command: str, *arguments: object) -> None:
        """Start a command; `result` waits for it."""
        self._pipe.send((command, arguments))

    def result(self) -> Any:
        try:
            error, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"worker {self.name} died") from None
        if error:
            raise RuntimeError(f"worker {self.name}: {error}")
        return value

    def __getattr__(self, command: str) -> Callable[..., Any]:
        def run(*arguments: object) -> Any:
            self.begin(command, *arguments)
            return self.result()

        return run

    def kill(self) -> None:
        """End the process as a crash does."""
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """Close the peer and end the process."""
        if self._process.is_alive():
            self.begin("close")
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _work(pipe: Any, name: str, seeds: list[str], options: dict[str, Any], namespace: str) -> None:
    if namespace:
        _enter(namespace)
    worker = Worker(name, seeds, options)
    while True:
        command, arguments = pipe.recv()
        try:
            answer = (None, getattr(worker, command)(*arguments))
        except Exception as error:  # noqa: BLE001  it is raised at the other end of the pipe
            answer = (f"{type(error).__name__}: {error}", None)
        pipe.send(answer)
        if command == "close":
            return


def _enter(namespace: str) -> None:
    """Go on in this network namespace: before any thread is started."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")


class Cluster:
    """Worker processes that are joined. A context manager; ends them all."""

    def __init__(self, count: int, **options: Any) -> None:
        self.workers = [Remote("worker-0", [], options)]
        try:
            seed = self.workers[0].address()
            self.workers += [Remote(f"worker-{i}", [seed], options) for i in range(1, count)]
            for worker in self.workers:
                while worker.members() < count:
                    time.sleep(0.02)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> list[Remote]:
        return self.workers

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()
