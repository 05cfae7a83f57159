"""One worker process: a peer, its program, and what it can be told to do to itself.

Rules of this file. The program runs in the main thread, as a user's would; orders come as JSON
lines over stdin, to a thread of their own, and are answered with one line each on stdout. The end
of stdin ends the process: whoever started it is gone. All that happens is written to the journal
at once.

Orders: {"do": "look"}                       who I am to others just now (`Standing`)
        {"do": "hog", "seconds": s}          hold Python's lock
        {"do": "flip"}                       flip bits of what is held here
        {"do": "descriptors", "seconds": s}  use up all file descriptors
        {"do": "end"}                        finish, close the peer, exit
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import tensorhub_p2p as th
from chaos import content
from chaos.journal import (
    Called,
    Compared,
    Ended,
    Event,
    Joined,
    Journal,
    Listed,
    Met,
    Spoilt,
    Started,
    Trouble,
    now,
)
from tensorhub_p2p.config import Config, SwimConfig
from tensorhub_p2p.protocol.directory.records import versions_key
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.shards.machines import Machines
from tensorhub_p2p.protocol.shards.verbs import Answer

MODEL = "m"
CLOSE_SECONDS = 20.0
OPEN_SECONDS = 20.0
WRONG_BYTES = "sent wrong bytes"
"""How a report of a source begins whose bytes didn't match their digest."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is. Sizes in bytes; `began` is what versions are counted from."""

    name: str
    life: int
    role: str
    replica: str
    directory: str
    cluster: str
    seeds: tuple[str, ...]
    seed: int
    began: float
    shard: int = 0
    num_shards: int = 1
    zone: str = "a"
    host: str = ""
    bind: str = "127.0.0.1:0"
    transports: tuple[str, ...] = ()
    tensors: int = 4
    size: int = 1 << 20
    period: float = 2.0
    step: float = 0.2
    """Seconds before the next version in which the tensors are nobody's but the trainer's."""
    unresponsive: float = 60.0
    """Seconds for which who is silent keeps its slots (`SwimConfig.unresponsive_limit`)."""
    newest: int = 0
    spot: bool = False
    pulls: int = 0
    """An elastic one leaves after so many."""
    bug: str = ""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to others at this moment."""

    leads: bool = False
    owns: bool = False
    gateway: bool = False
    readers: int = 0
    pulling: bool = False
    verb: str = ""
    version: int = -1


class VerbFailed(Exception):
    """The verb ended with an error, which is in the journal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Answers:
    """In which generation each slot's last group call was answered (on the control thread)."""

    def __init__(self) -> None:
        self._last: dict[Slot, tuple[str, int, str]] = {}
        plain, last = Machines.done, self._last

        def done(machines: Machines, result: object) -> None:
            generation = machines.part.calls.generation
            if isinstance(result, Answer) and generation is not None:
                said = (str(generation.generation), result.call, str(result.publication))
                last[machines.slot] = said
            plain(machines, result)

        setattr(Machines, "done", done)  # noqa: B010  of a method, mypy allows nothing else

    def of(self, slot: Slot) -> tuple[str, int, str]:
        return self._last.get(slot, ("", 0, ""))


class Worker:
    """The process, as its program sees it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.who = f"{settings.name}.{settings.life}"
        self.journal = Journal(Path(settings.directory), self.who)
        self.random = random.Random(f"{settings.seed}/{self.who}")
        self.stop = threading.Event()
        self.tensors = content.blank(settings.tensors, settings.size)
        self.answers = Answers()
        self.verb_now = ""
        self._calls = 0
        self._troubles = 0
        self.peer: th.Peer
        self.handle: th.ShardHandle

    # --- the journal ---

    def write(self, kind: type[Event], /, **what: Any) -> None:
        self.journal.write(kind(at=now(), who=self.who, **what))

    def run(self, verb: str, what: object, timeout: float, call: Callable[[], Any]) -> Any:
        """One verb, with its beginning and its end. Raises VerbFailed."""
        self._calls += 1
        number = self._calls
        self.write(Called, call=number, verb=verb, what=str(what), timeout=timeout)
        try:
            self.verb_now = verb
            result = call()
            self.verb_now = ""
        except BaseException as error:
            self.verb_now = ""
            self._failed(number, error)
            self._look_for_trouble()
            if verb == "replicate" and self._state == "PUBLISHED":
                self._compare(number, self.handle.version)  # no byte of it may have been touched
            raise VerbFailed(error) from error
        self._look_for_trouble()
        self._succeeded(number, result)
        return result

    def interrupted(self, _number: int, _frame: object) -> None:
        """Ctrl-C ends the verb that runs; between verbs it is no business of ours."""
        if self.verb_now:
            raise KeyboardInterrupt

    def _failed(self, number: int, error: BaseException) -> None:
        name, message = type(error).__name__, str(error)[:500]
        state = self.handle.state.name if hasattr(self, "handle") else ""
        self.write(Ended, call=number, error=name, message=message, state=state)
        if not isinstance(error, (th.TensorHubError, KeyboardInterrupt)):
            trace = "".join(traceback.format_exception(error))[-2000:]
            self.write(Trouble, what=f"an error without a type of ours: {name}: {message}\n{trace}")

    def _succeeded(self, number: int, result: Any) -> None:
        if not isinstance(result, th.Pull):
            version = result if isinstance(result, int) else -1
            self.write(Ended, call=number, version=version, state=self._state)
            return
        generation, count, publication = self.answers.of(self.handle._slot)
        self.write(
            Ended,
            call=number,
            version=result.version,
            epoch=result.epoch,
            publication=publication,
            generation=generation,
            number=count,
            bytes=result.over_links,
            seconds=result.seconds,
            waiting=result.waiting,
            registering=result.registering,
            moving=result.moving,
            retried=result.retried,
            up_to_date=result.up_to_date,
            sources=tuple(source.name for source in result.sources if source.bytes),
            mismatched=tuple(
                source.name
                for source in result.sources
                if any(note.startswith(WRONG_BYTES) for note in source.notes)
            ),
            transports=tuple(report.transport for report in result.transports),
            state=self._state,
        )
        self._compare(number, result.version)

    def _compare(self, number: int, version: int | None) -> None:
        if version is not None:
            wrong = content.wrong(self.tensors, self.settings.shard, version)
            self.write(Compared, call=number, version=version, wrong=wrong)

    @property
    def _state(self) -> str:
        return self.handle.state.name if hasattr(self, "handle") else ""

    def _look_for_trouble(self) -> None:
        """Errors on the control thread: there should be none, ever."""
        if not hasattr(self, "peer"):
            return
        faults = list(self.peer._driver.control.faults)
        for fault in faults[self._troubles :]:
            self.write(Trouble, what=f"on the control thread: {fault!r}"[:500])
        self._troubles = len(faults)

    # --- the peer ---

    def join(self) -> None:
        settings = self.settings
        self.write(
            Started,
            pid=os.getpid(),
            role=settings.role,
            replica=settings.replica,
            shard=settings.shard,
            num_shards=settings.num_shards,
            zone=settings.zone,
            host=settings.host,
            newest=settings.newest,
            spot=settings.spot,
        )
        self.peer = self.run(
            "join", ",".join(settings.seeds), 30.0, lambda: self._start_peer(settings)
        )
        self.write(Joined, peer_id=self.peer.peer_id)
        th.close_on_sigterm(self.peer, CLOSE_SECONDS)

    def _start_peer(self, settings: Settings) -> th.Peer:
        return th.Peer(
            cluster=settings.cluster,
            seeds=settings.seeds,
            zone=settings.zone,
            bind=settings.bind,
            insecure=True,
            name=self.who,
            host=settings.host or None,
            transports=settings.transports or None,
            join_timeout=30.0,
            config=Config(swim=SwimConfig(unresponsive_limit=settings.unresponsive)),
        )

    def open(self) -> None:
        """Claim the slot, and register; again after it was lost."""
        settings = self.settings
        retain = th.newest(settings.newest) if settings.newest else None
        self.handle = self.run(
            "open",
            settings.replica,
            OPEN_SECONDS,
            lambda: self.peer.open(
                MODEL,
                replica=settings.replica,
                shard=settings.shard,
                num_shards=settings.num_shards,
                retain=retain,
                spot=settings.spot,
                timeout=OPEN_SECONDS,
            ),
        )
        self.handle.register(self.tensors)

    def list_versions(self) -> list[th.VersionInfo]:
        found: list[th.VersionInfo] = self.run(
            "versions", MODEL, 10.0, lambda: self.peer.versions(MODEL, 10.0)
        )
        self.write(Listed, found=tuple((v.epoch, v.version, v.whole) for v in found))
        return found

    def close(self) -> None:
        if hasattr(self, "peer"):
            self.run("close", "", CLOSE_SECONDS, lambda: self.peer.close(CLOSE_SECONDS))

    # --- orders ---

    def obey(self) -> None:
        """Until stdin ends; then the process does."""
        try:
            for line in sys.stdin:
                order = msgspec.json.decode(line)
                done = getattr(self, f"_do_{order.pop('do')}")(**order)
                os.write(1, msgspec.json.encode(done) + b"\n")
        finally:  # whoever gives orders is gone: so is their pipe, or the other one
            os._exit(3)

    def _do_look(self) -> Standing:
        if not hasattr(self, "peer"):
            return Standing(verb=self.verb_now)
        driver = self.peer._driver

        def look(_now: float) -> Standing:
            node, me = driver.node, driver.info.peer_id
            shards = list(node.shards.values())
            records = [(shard, shard.generation()) for shard in shards]
            servers = [shard.server for shard in shards]
            return Standing(
                leads=any(
                    record is not None and record.leader == shard.slot.shard
                    for shard, record in records
                ),
                owns=me in node.directory.owners(versions_key(MODEL)),
                gateway=node.zones.is_gateway,
                readers=sum(len(server.readers()) for server in servers if server is not None),
                pulling=hasattr(self, "handle") and self.handle._pull is not None,
                verb=self.verb_now,
                version=(self.handle.version or -1) if hasattr(self, "handle") else -1,
            )

        try:
            found: Standing = driver.ask(look)
        except th.TensorHubError:  # it is closing: nobody to others any more
            return Standing(verb=self.verb_now)
        return found

    def _do_hog(self, seconds: float) -> bool:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the lock
        return True

    def _do_flip(self) -> int:
        """Every 64th KiB of each tensor, so that each chunk is hit; the version that is spoilt."""
        version = self.handle.version if hasattr(self, "handle") else None
        self.write(Spoilt, version=-1 if version is None else version)
        for tensor in self.tensors.values():
            tensor[:: 64 << 10] ^= 0xFF
        return -1 if version is None else version

    def _do_descriptors(self, seconds: float) -> int:
        """Take all that the limit leaves, for so long."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, used + 16), hard))
        taken = []
        try:
            while True:
                taken.append(os.dup(2))
        except OSError:
            pass  # that was the last one
        self.stop.wait(seconds)
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return len(taken)

    def _do_end(self) -> bool:
        if hasattr(self, "peer"):
            with contextlib.suppress(th.PeerClosed):
                names = tuple(member.name for member in self.peer.members())
                self.write(Met, names=names)
        self.stop.set()
        return True
