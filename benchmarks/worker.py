"""A worker process with a peer, told over a pipe what to do. Times are taken in it.

Rule of this file. `Worker` is what runs in the process, `Remote` the other end of its pipe:
`remote.publish(...)` runs `Worker.publish(...)` there and returns what it returned. A
worker uses the library as a user does; the two looks inside are marked.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import bare

from tensorhub_p2p.transfer.credentials import Credentials
from tensorhub_p2p.transfer.native_loops import READ_BYTES, Source, native_hasher

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

    def open_tensors(
        self,
        model: str,
        replica: str,
        sizes: list[tuple[str, int]],
        views: bool,
        shuffled: bool,
    ) -> None:
        """The same for tensors of these names and sizes, that lie in this order in memory.

        They are allocated one by one, or are views of one buffer. They are registered in
        this order, or in a random one.
        """
        whole = self._filled(sum(size for _, size in sizes)) if views else None
        tensors, at = [], 0
        for name, size in sizes:
            tensor = self._filled(size) if whole is None else whole[at : at + size // 4]
            tensors.append((name, tensor))
            at += size // 4
        registered = list(tensors)
        if shuffled:
            random.shuffle(registered)
        handle = self._peer.open(model, replica=replica)
        handle.register(registered)
        self._handles[model], self._tensors[model] = handle, [tensor for _, tensor in tensors]

    def wait_for_huge_pages(self) -> None:
        """Until no more huge pages are asked for; a look inside."""
        if not self._peer._driver.huge_pages.settled(120):
            raise RuntimeError("huge pages are still being asked for")

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

    def held(self) -> dict[str, int]:
        """What this process holds: bytes resident, file descriptors, threads, exports."""
        gc.collect()
        transports = self._peer._driver.transports.values()  # a look inside
        return {
            "memory": _status("VmRSS"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "exports": sum(_num_exports(transport) for transport in transports),
        }

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

        def read(*order: Any) -> None:
            time.sleep(seconds)
            plain(*order)

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

    # --- a trainer that is read ----------------------------------------------------------

    def pin(self, core: int) -> None:
        """Keep this thread on that core, and all others of the process on other ones."""
        cores = os.sched_getaffinity(0)
        me = threading.get_native_id()
        for task in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(task, {core} if task == me else cores - {core} or cores)

    def pin_all(self, core: int) -> None:
        """Keep all threads of this process on that core."""
        for task in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(task, {core})

    def compute(self, until: float) -> float:
        """Matrix products until that time; returns how many a second."""
        torch = self._torch
        a, b = torch.rand(512, 512), torch.rand(512, 512)
        result = torch.empty(512, 512)
        began, steps = time.monotonic(), 0
        while time.monotonic() < until:
            torch.mm(a, b, out=result)
            steps += 1
        return steps / (time.monotonic() - began)

    def pull_again_and_again(self, model: str, size: int, until: float) -> int:
        """One new replica after the other pulls the model; returns the bytes until that time."""
        if model not in self._tensors:
            self._tensors[model] = [self._filled(size)]
        read = 0
        while time.monotonic() < until:
            with self._peer.open(model) as handle:
                handle.register([("layer.0", self._tensors[model][0])])
                read += handle.replicate().bytes
        return read

    def bare_read_at(self, pid: int, address: int, rate: float, until: float) -> int:
        """A bare read, over and over, at so many bytes a second; returns the bytes."""
        step, size = 8 << 20, self._bare.nbytes
        began, read = time.monotonic(), 0
        while time.monotonic() < until:
            offset = read % size
            length = min(step, size - offset)
            bare.read_memory(pid, address + offset, self._bare.data_ptr() + offset, length)
            read += length
            time.sleep(max(0.0, began + read / rate - time.monotonic()))
        return read

    def hold_gil(self, seconds: float) -> tuple[float, float]:
        """Hold Python's lock in one call into C; returns from when until when."""
        began = time.monotonic()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return began, time.monotonic()

    def replicate_watched(self, model: str) -> list[tuple[float, int]]:
        """How many bytes of the pull had come, and when; a look inside."""
        handle, seen = self._handles[model], []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                pull = handle._pull
                if pull is not None:
                    seen.append((time.monotonic(), pull.moved))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            num_bytes = handle.replicate().bytes
        finally:
            over.set()
            watcher.join()
        seen.append((time.monotonic(), num_bytes))
        return seen

    # --- bare ----------------------------------------------------------------------------

    def bare_memory(self, num_bytes: int) -> tuple[int, int]:
        """Memory for the bare figures, beside the registered: (pid, address)."""
        bare.allow_reading()
        self._bare = self._filled(num_bytes)
        self._tensors["bare"] = [self._bare]
        return os.getpid(), self._bare.data_ptr()

    def bare_huge_pages(self) -> None:
        """Collapse the bare memory into huge pages."""
        bare.collapse(self._bare.data_ptr(), self._bare.nbytes)

    def bare_read(
        self, pid: int, address: int, threads: int = 1, hashed: bool = False
    ) -> dict[str, float]:
        local, size = self._bare.data_ptr(), self._bare.nbytes
        before = resource.getrusage(resource.RUSAGE_SELF)
        if threads == 1:
            seconds = bare.read_memory(pid, address, local, size, hashed)
        else:
            read = partial(bare.read_memory, hashed=hashed)
            seconds = bare.read_with_threads(pid, address, local, size, threads, read)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"seconds": seconds, "cpu": cpu}

    def loop_read(self, pid: int, address: int, threads: int = 1) -> dict[str, float]:
        """The same by the loop that pulls read with, a chunk at a time, with nothing around it."""
        memory = self._bare.data_ptr(), self._bare.nbytes
        return {"seconds": bare.read_with_threads(pid, address, *memory, threads, _read_in_loop)}

    def bare_source(self, host: str = "127.0.0.1", secret: str = "") -> int:
        """Serve the bare memory over bare sockets; returns the port.

        With a secret in TLS, with the certificate and the settings that we use ourselves.
        """
        tls = Credentials.from_secret(secret).server_context() if secret else None
        memory = self._bare.data_ptr(), self._bare.nbytes
        self._source = bare.StreamSource(*memory, host, tls)
        return self._source.port

    def bare_target(self, port: int, host: str = "127.0.0.1", secret: str = "") -> None:
        tls = Credentials.from_secret(secret).client_context() if secret else None
        memory = self._bare.data_ptr(), self._bare.nbytes
        self._target = bare.StreamTarget(port, *memory, host, tls)

    def bare_receive(self, hashed: bool = False) -> dict[str, float]:
        assert self._target is not None
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = self._target.receive(hashed)
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


def _num_exports(transport: Any) -> int:
    """How much a transport has open to others, for those that keep a table; a look inside."""
    table = getattr(transport, "_exports", ())
    registered = getattr(transport, "_memories", ())
    return len(getattr(table, "_exports", table)) + len(registered)


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

    `options` are those of its peer, and `namespace`: the network namespace that it lives in (of
    a testbed's host), ours if there is none.
    """

    def __init__(self, name: str, seeds: list[str], options: dict[str, Any]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_work, args=(theirs, name, seeds, options), daemon=True
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

    def stop(self) -> None:
        """As a debugger does, or a machine that hangs: nothing of it runs until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        """Close the peer and end the process."""
        if self._process.is_alive():
            self.begin("close")
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def _read_in_loop(pid: int, remote: int, local: int, length: int) -> None:
    """Read and hash another process's memory natively. What lies there first is the seal."""
    found = (ctypes.c_char * 32)()
    bare.read_memory(pid, remote, ctypes.addressof(found), 32)
    source = Source(pid, (ctypes.addressof(found), 32), (remote, 32), found.raw)
    for done in range(0, length, READ_BYTES):
        hasher = native_hasher()
        step = min(READ_BYTES, length - done)
        if hasher is None or hasher.read_process(source, local + done, remote + done, step) != step:
            raise RuntimeError("there are no native loops here, or one ended early")
        hasher.digest()


def _work(pipe: Any, name: str, seeds: list[str], options: dict[str, Any]) -> None:
    _enter(options.pop("namespace", None))
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


def _enter(namespace: str | None) -> None:
    """Go on in that network namespace; all threads that are started later are there, too."""
    if namespace is not None:
        with open(f"/run/netns/{namespace}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


class Cluster:
    """Worker processes that are joined. A context manager; ends them all."""

    def __init__(
        self, count: int, each: list[dict[str, Any]] | None = None, **options: Any
    ) -> None:
        """`options` are those of all peers, `each` holds more for one peer each."""
        own = [options | more for more in each or [{}] * count]
        self.workers = [Remote("worker-0", [], own[0])]
        try:
            seed = self.workers[0].address()
            self.workers += [Remote(f"worker-{i}", [seed], own[i]) for i in range(1, count)]
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
