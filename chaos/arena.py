"""The processes of a run, and the hosts and links that they live on.

Rules of this file. It starts processes, signals them by their ids, asks them who they are to
others, and bends the links between hosts; what is done when, and to whom, is others' business.
Every start and every end of a process is written to the runner's journal.

With a testbed (root; benchmarks/testbed.py) two workers share a host, and every host has a cable of
its own; what lies between hosts can be cut, narrowed, made lossy (nftables). Without one, all live
on loopback, and only processes can be hurt.

A worker has a *name* for the whole run and a *life* for each process: "r1.2" is its second one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import IO, Any

import msgspec

from benchmarks.testbed import Host, Testbed
from chaos.journal import RUNNER, Event, Exited, Journal, Sampled, now
from chaos.worker import Settings, Standing

SEED_PORT = 7946
SAMPLE_FIELDS = {"VmRSS", "Threads"}
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Role:
    """One worker of the cast, in all its lives."""

    name: str
    role: str
    replica: str
    shard: int = 0
    num_shards: int = 1
    zone: str = "a"
    host: int = 0
    seed: bool = False
    newest: int = 0
    spot: bool = False
    pulls: int = 0
    transports: tuple[str, ...] = ()


@dataclass
class Life:
    """One process."""

    role: Role
    number: int
    process: subprocess.Popen[bytes]
    began: float
    standing: Standing = field(default_factory=Standing)
    looks: int = 0
    """Looks that were asked for and not answered yet."""

    @property
    def who(self) -> str:
        return f"{self.role.name}.{self.number}"


class Arena:
    """All workers of a run. Close it: nothing is left then."""

    def __init__(
        self,
        directory: Path,
        cast: Sequence[Role],
        *,
        seed: int,
        bed: Testbed | None = None,
        mbit: float | None = None,
        bug: str = "",
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.cast = {role.name: role for role in cast}
        self.bed = bed
        self.mbit = mbit
        """What every cable carries when nothing is done to it."""
        self.journal = Journal(directory, RUNNER)
        self.lives: dict[str, Life] = {}
        """By name: the process that runs now."""
        self._former: list[tuple[float, Life]] = []
        """Processes whose slot was given to another, and when they are killed at the latest."""
        self.busy: Counter[str] = Counter()
        """By name: how many faults are being done to it; others are left out."""
        self.clocks: dict[str, Path] = {}
        """By name: the file that sets a worker's wall clock, for those with one of their own."""
        self.pids: set[int] = set()
        """Of all processes that were ever started."""
        self.groups: list[Path] = []
        """Control groups that are to be removed."""
        self.wrappers: dict[str, list[str]] = {}
        """What a worker's next lives are started by, by name."""
        self._seed = seed
        self._bug = bug
        self._settings = settings
        self._cluster = f"chaos-{secrets.token_hex(4)}"
        self._numbers: dict[str, int] = {}
        self._began = now()
        self._tables = 0
        seeds = [role.name for role in cast if role.seed]
        self._ports = {name: self._seed_port(index) for index, name in enumerate(seeds)}

    def _seed_port(self, index: int) -> int:
        if self.bed is not None:
            return SEED_PORT + index
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
            return port

    # --- the journal ---

    def write(self, kind: type[Event], /, **what: Any) -> None:
        self.journal.write(kind(at=now(), who=RUNNER, **what))

    # --- processes ---

    def address(self, name: str) -> tuple[str, int]:
        """Where a seed listens."""
        host = self.host_of(name)
        return (host.address if host is not None else "127.0.0.1", self._ports[name])

    def host_of(self, name: str) -> Host | None:
        return self.bed[self.cast[name].host] if self.bed is not None else None

    def start_again(self, name: str) -> None:
        """The worker's next life, unless it lives: others may have seen it dead, and started it."""
        if not self.alive(name):
            self.start(name)

    def start(self, name: str) -> Life:
        """The worker's next life."""
        role = self.cast[name]
        self._ended(name)
        if name in self.lives:
            raise RuntimeError(f"{self.lives[name].who} runs: it can't have a next life yet")
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        host = self.host_of(name)
        settings = Settings(
            name=name,
            life=number,
            role=role.role,
            replica=role.replica or f"{name}-{number}",
            directory=str(self.directory),
            cluster=self._cluster,
            seeds=tuple("{}:{}".format(*self.address(seed)) for seed in self._ports),
            seed=self._seed,
            began=self._began,
            shard=role.shard,
            num_shards=role.num_shards,
            zone=role.zone,
            host=f"h{role.host}" if self.bed is not None else "",
            bind=self._bind(name),
            transports=role.transports,
            newest=role.newest,
            spot=role.spot,
            pulls=role.pulls,
            bug=self._bug,
            **self._settings,
        )
        command = [*self.wrappers.get(name, ()), sys.executable, "-m", "chaos.process"]
        command.append(msgspec.json.encode(settings).decode())
        start: Callable[..., subprocess.Popen[bytes]] = host.popen if host else subprocess.Popen
        with (self.directory / f"{name}.log").open("ab") as log:
            process = start(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=os.environ | self._clock_of(name),
            )
        self.pids.add(process.pid)
        life = self.lives[name] = Life(role, number, process, now())
        assert process.stdout is not None
        threading.Thread(
            target=self._listen, args=(life, process.stdout), name=f"listen {life.who}", daemon=True
        ).start()
        return life

    def _bind(self, name: str) -> str:
        host = self.host_of(name)
        return f"{host.address if host else '127.0.0.1'}:{self._ports.get(name, 0)}"

    def give_clock(self, name: str, library: str) -> None:
        """The worker's lives from now on have a wall clock of their own, which a file sets.

        Its monotonic clock stays the machine's: the library goes by that, and the journal too.
        """
        self.clocks[name] = self.directory / f"{name}.clock"
        self.clocks[name].write_text("+0s\n")
        self._library = library

    def _clock_of(self, name: str) -> dict[str, str]:
        if name not in self.clocks:
            return {}
        return {
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": str(self.clocks[name]),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Else each wait for Python's lock costs several locks of its own, which on a full
            # machine hold the whole process up for seconds.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "NO_FAKE_STAT": "1",
        }

    def _listen(self, life: Life, stdout: IO[bytes]) -> None:
        """A process answers orders in their order."""
        for line in stdout:
            if line.startswith(b"{"):  # only a look is answered with more than a number
                life.standing = msgspec.json.decode(line, type=Standing)
                life.looks -= 1
        stdout.close()

    def alive(self, name: str) -> bool:
        life = self.lives.get(name)
        return life is not None and life.process.poll() is None

    def running(self) -> list[Life]:
        return [life for name, life in self.lives.items() if self.alive(name)]

    def signal(self, name: str, number: signal.Signals) -> None:
        """By its id; nothing if it is gone."""
        if self.alive(name):
            self.lives[name].process.send_signal(number)

    def usurp(self, name: str) -> tuple[Life, Life]:
        """Stop the worker, and start its next life all the same; the former and the new one."""
        former = self.lives.pop(name)
        former.process.send_signal(signal.SIGSTOP)
        self._former.append((inf, former))
        return former, self.start(name)

    def resume(self, former: Life, seconds: float) -> None:
        """Let the former one go on for so long, unaware of what was done meanwhile."""
        former.process.send_signal(signal.SIGCONT)
        self._former = [(at, life) for at, life in self._former if life is not former]
        self._former.append((now() + seconds, former))

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.lives[name].process.wait()

    def order(self, name: str, do: str, **what: object) -> None:
        """Say what it is to do; a process that is gone can't hear it."""
        life = self.lives.get(name)
        if life is None:
            return
        assert life.process.stdin is not None
        life.looks += do == "look"
        with contextlib.suppress(BrokenPipeError, ValueError):
            life.process.stdin.write(msgspec.json.encode({"do": do, **what}) + b"\n")
            life.process.stdin.flush()

    def look(self, patience: float = 0.3) -> dict[str, Standing]:
        """Who is what to others now; those that don't answer in time are left out."""
        asked = [life for life in self.running() if not life.looks]
        for life in asked:
            self.order(life.role.name, "look")
        until = now() + patience
        while now() < until and any(life.looks for life in asked if life.process.poll() is None):
            time.sleep(0.005)
        return {life.role.name: life.standing for life in asked if not life.looks}

    def reap(self) -> list[Life]:
        """Processes that ended since the last call; each is told once."""
        self._end_former(now())
        found = [self._ended(name) for name in list(self.lives)]
        return [life for life in found if life is not None]

    def _ended(self, name: str) -> Life | None:
        """The worker's process, if it has just ended: that is told, once."""
        life = self.lives.get(name)
        code = life.process.poll() if life is not None else None
        if life is None or code is None:
            return None
        self.write(Exited, name=life.who, code=code)
        del self.lives[name]
        if life.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                life.process.stdin.close()
        return life

    def _end_former(self, until: float) -> None:
        """Those whose time is over by then."""
        for at, life in list(self._former):
            if at <= until:
                self._former.remove((at, life))
                life.process.kill()
                self.write(Exited, name=life.who, code=life.process.wait())

    def sample(self) -> None:
        """What each process uses just now."""
        for life in self.running():
            try:
                status = Path(f"/proc/{life.process.pid}/status").read_text()
                descriptors = len(os.listdir(f"/proc/{life.process.pid}/fd"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if not facts.keys() >= SAMPLE_FIELDS:
                continue  # it has just ended
            rss, threads = (int(facts[name].split()[0]) for name in ("VmRSS", "Threads"))
            self.write(
                Sampled, name=life.who, rss=rss << 10, descriptors=descriptors, threads=threads
            )

    # --- links (with a testbed) ---

    def table(self) -> str:
        """A name that no rule has yet."""
        self._tables += 1
        return f"chaos{self._tables}"

    def whos_on(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """The workers that live there just now."""
        indexes = {host.index for host in hosts}
        return tuple(life.who for life in self.running() if life.role.host in indexes)

    def drop(self, name: str, at: Host, senders: Iterable[Host], part: int = 100) -> None:
        """Of 100 packets that reach this host from those, lose `part`; until `undrop(name)`."""
        addresses = ", ".join(host.address for host in senders)
        lose = "drop" if part >= 100 else f"numgen random mod 100 < {part} drop"
        rules = (
            f"table inet {name} {{ chain lose {{ type filter hook input priority 0; policy accept; "
            f"ip saddr {{ {addresses} }} {lose}; }}; }}"
        )
        _inside(at, "nft", rules)

    def undrop(self, name: str, at: Host) -> None:
        _inside(at, "nft", f"delete table inet {name}")

    # --- the end ---

    def close(self) -> list[str]:
        """Kill what is left; the processes that were."""
        left = [life for life in self.lives.values() if life.process.poll() is None]
        for life in left:
            life.process.kill()
            self.write(Exited, name=life.who, code=life.process.wait())
        self.lives.clear()
        self._end_former(inf)
        for group in self.groups:
            with contextlib.suppress(OSError):  # its process is still being taken down
                group.rmdir()
        return [life.who for life in left]


def _inside(host: Host, *command: str) -> None:
    subprocess.run(
        ["nsenter", f"--net=/run/netns/{host.namespace}", "--", *command],
        check=True,
        capture_output=True,
    )


def raise_descriptor_limit() -> None:
    """The runner has three pipes for each process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
