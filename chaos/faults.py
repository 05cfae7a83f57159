"""What can be done to a cluster: one generator a kind of fault.

Rules of this file. A fault chooses whom it strikes, strikes, yields once what it did and for how
long, and after that is over undoes it: `with` the arena's own means, never the machine's (no
clock is set, no other process is touched). Who is struck is busy until then, and no other fault
chooses it. A fault that finds nobody to strike raises `NoTarget`.

To add one: write the generator, `@fault("its name")`, and say with `needs` what it takes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos.arena import Arena
from chaos.worker import Standing

STOPS = (1.0, 60.0)
"""Seconds of SIGSTOP: most are short (the logarithm is drawn evenly)."""
RESTARTS = (0.2, 4.0)
"""Seconds until who was killed is started again."""
ROOM_UNDER_PRESSURE = 1 << 20
"""Bytes that a process may still take; what it had before counts for the group that it was in."""
FORMER_SECONDS = 8.0
"""Who was replaced goes on for so long, and then ends."""
FAKETIME = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
)
CGROUPS = Path("/sys/fs/cgroup/memory")


class NoTarget(Exception):
    """There is nobody just now to whom this could be done."""


@dataclass(frozen=True)
class Struck:
    """What was done: to whom (name and life), for how many seconds; a word for the reader."""

    targets: tuple[str, ...]
    seconds: float
    detail: str = ""


Strike = Callable[[Arena, random.Random], Iterator[Struck]]


@dataclass(frozen=True)
class Fault:
    kind: str
    strike: Strike
    needs: str
    """"" (nothing), "bed" (a testbed, and nftables), "faketime", "cgroup", "mounts"."""
    weight: float


CLOCK_JUMP = "clock jump"
FAULTS: dict[str, Fault] = {}


def fault(kind: str, needs: str = "", weight: float = 1.0) -> Callable[[Strike], Strike]:
    def enlist(strike: Strike) -> Strike:
        FAULTS[kind] = Fault(kind, strike, needs, weight)
        return strike

    return enlist


def possible(*, bed: bool) -> dict[str, str | None]:
    """By kind: why it can't be had here, or None."""
    return {kind: _why_not(fault.needs, bed=bed) for kind, fault in FAULTS.items()}


def _why_not(needs: str, *, bed: bool) -> str | None:
    if needs == "bed":
        if not bed:
            return "no testbed"
        return None if shutil.which("nft") else "no nft: install nftables"
    if needs == "faketime":
        return None if faketime() else "no libfaketime"
    if needs == "cgroup":
        return None if os.access(CGROUPS / "cgroup.procs", os.W_OK) else "no memory cgroup (v1)"
    if needs == "mounts":
        return None if os.geteuid() == 0 else "private mounts need root"
    return None


def faketime() -> str | None:
    return next((path for path in FAKETIME if os.path.exists(path)), None)


# --- choosing ---


def free(arena: Arena) -> list[str]:
    return [life.role.name for life in arena.running() if life.role.name not in arena.busy]


def choose(
    arena: Arena, rng: random.Random, wanted: Callable[[str, Standing], bool] = lambda *_: True
) -> str:
    """One that runs, is not busy, and is what is wanted by its own word of this moment."""
    standings = arena.look()
    fit = [name for name in free(arena) if name in standings and wanted(name, standings[name])]
    if not fit:
        raise NoTarget
    return rng.choice(sorted(fit))


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def killed(arena: Arena, rng: random.Random, *names: str) -> Iterator[Struck]:
    """kill -9, and a new life after a while."""
    whos = tuple(arena.lives[name].who for name in names)
    for name in names:
        arena.kill(name)
    yield Struck(whos, rng.uniform(*RESTARTS))
    for name in names:
        arena.start_again(name)


# --- deaths ---


@fault("kill a source", weight=3)
def kill_source(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from killed(arena, rng, choose(arena, rng, lambda _n, s: s.readers > 0))


@fault("kill a puller", weight=3)
def kill_puller(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from killed(arena, rng, choose(arena, rng, lambda _n, s: s.pulling))


@fault("kill a leader", weight=2)
def kill_leader(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from killed(arena, rng, choose(arena, rng, lambda _n, s: s.leads))


@fault("kill a ring owner", weight=2)
def kill_owner(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from killed(arena, rng, choose(arena, rng, lambda _n, s: s.owns))


@fault("kill a gateway", weight=2)
def kill_gateway(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from killed(arena, rng, choose(arena, rng, lambda _n, s: s.gateway))


@fault("kill a seed", weight=2)
def kill_seed(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from killed(arena, rng, choose(arena, rng, lambda name, _s: arena.cast[name].seed))


@fault("kill a whole group")
def kill_group(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """All shards of one replica at once."""
    free_now = set(free(arena))
    groups: dict[str, list[str]] = {}
    for name, role in arena.cast.items():
        groups.setdefault(role.replica or name, []).append(name)
    whole = [names for names in groups.values() if set(names) <= free_now]
    if not whole:
        raise NoTarget
    yield from killed(arena, rng, *rng.choice(whole))


@fault("kill all gateways")
def kill_gateways(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    standings = arena.look()
    names = [name for name in free(arena) if name in standings and standings[name].gateway]
    if not names:
        raise NoTarget
    yield from killed(arena, rng, *names)


@fault("SIGTERM in a verb", weight=2)
def terminate(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = choose(arena, rng, lambda _n, s: bool(s.verb))
    who, verb = arena.lives[name].who, arena.lives[name].standing.verb
    arena.signal(name, signal.SIGTERM)
    yield Struck((who,), rng.uniform(1.0, 6.0), verb)
    arena.start_again(name)


@fault("Ctrl-C in a verb", weight=2)
def interrupt(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = choose(arena, rng, lambda _n, s: bool(s.verb))
    arena.signal(name, signal.SIGINT)
    yield Struck((arena.lives[name].who,), 0.1, arena.lives[name].standing.verb)


# --- silence ---


@fault("stop", weight=3)
def stop(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = choose(arena, rng)
    who, seconds = arena.lives[name].who, log_uniform(rng, *STOPS)
    arena.signal(name, signal.SIGSTOP)
    yield Struck((who,), seconds)
    arena.signal(name, signal.SIGCONT)


@fault("stop a source", weight=2)
def stop_source(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = choose(arena, rng, lambda _n, s: s.readers > 0)
    who, seconds = arena.lives[name].who, log_uniform(rng, *STOPS)
    arena.signal(name, signal.SIGSTOP)
    yield Struck((who,), seconds)
    arena.signal(name, signal.SIGCONT)


@fault("hold the GIL", weight=2)
def hog(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = choose(arena, rng)
    seconds = log_uniform(rng, 0.5, 15.0)
    arena.order(name, "hog", seconds=seconds)
    yield Struck((arena.lives[name].who,), seconds)


@fault("usurp a slot")
def usurp(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """A restart under the same replica and shard while the old process is only stopped."""
    name = choose(arena, rng, lambda n, _s: bool(arena.cast[n].replica) and not arena.cast[n].seed)
    former, new = arena.usurp(name)
    yield Struck((former.who, new.who), rng.uniform(5.0, 20.0))
    arena.resume(former, FORMER_SECONDS)


# --- links ---


@fault("partition", needs="bed", weight=2)
def partition(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from _partition(arena, rng, both=True)


@fault("one-way partition", needs="bed", weight=2)
def one_way(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    yield from _partition(arena, rng, both=False)


def _partition(arena: Arena, rng: random.Random, *, both: bool) -> Iterator[Struck]:
    assert arena.bed is not None
    hosts = list(arena.bed.hosts)
    rng.shuffle(hosts)
    cut = rng.randrange(1, max(2, len(hosts) // 2))
    few, many = hosts[:cut], hosts[cut:]
    table = arena.table()
    for host in few:
        arena.drop(table, host, many)
    for host in many if both else ():
        arena.drop(table, host, few)
    yield Struck(arena.whos_on(few), log_uniform(rng, 1.0, 25.0), f"{len(few)} hosts")
    for host in hosts if both else few:
        arena.undrop(table, host)


@fault("cut a cable", needs="bed", weight=2)
def cut_cable(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """In the middle of a chunk, if anybody pulls."""
    name = _puller_or_anyone(arena, rng)
    host = arena.host_of(name)
    assert host is not None
    host.cut()
    yield Struck(arena.whos_on([host]), log_uniform(rng, 0.2, 10.0))
    host.mend()


@fault("slow link", needs="bed", weight=2)
def slow_link(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = _puller_or_anyone(arena, rng)
    host = arena.host_of(name)
    assert host is not None
    mbit = log_uniform(rng, 2.0, 30.0)
    host.limit(mbit)
    yield Struck(arena.whos_on([host]), rng.uniform(3.0, 15.0), f"{mbit:.0f} Mbit/s")
    host.limit(arena.mbit)


@fault("loss", needs="bed", weight=2)
def loss(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    assert arena.bed is not None
    host = arena.bed[rng.randrange(len(arena.bed))]
    others = [other for other in arena.bed.hosts if other is not host]
    part, table = rng.choice((1, 5, 20, 50)), arena.table()
    arena.drop(table, host, others, part)
    yield Struck(arena.whos_on([host]), rng.uniform(3.0, 15.0), f"{part} %")
    arena.undrop(table, host)


def _puller_or_anyone(arena: Arena, rng: random.Random) -> str:
    try:
        return choose(arena, rng, lambda _n, s: s.pulling)
    except NoTarget:
        return choose(arena, rng)


# --- strangers, clocks, memory ---


STRANGER = """
import os, socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("there", flush=True)
while True:
    connection, _ = server.accept()
    connection.settimeout(1.0)
    try:
        connection.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n" + os.urandom(200))
        connection.recv(4096)
    except OSError:
        pass
    connection.close()
"""


@fault("a stranger on a seed's port")
def stranger(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """A seed dies, and something else listens at its address for a while."""
    name = choose(arena, rng, lambda n, _s: arena.cast[n].seed)
    who, host = arena.lives[name].who, arena.host_of(name)
    arena.kill(name)
    address, port = arena.address(name)
    start = host.popen if host is not None else subprocess.Popen
    process = start(
        [sys.executable, "-c", STRANGER, address, str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    yield Struck((who,), rng.uniform(2.0, 6.0))
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
    arena.start_again(name)


@fault(CLOCK_JUMP, needs="faketime", weight=2)
def clock_jump(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """The wall clock of a process that was started with one of its own is set, forth or back."""
    fitted = [name for name in free(arena) if name in arena.clocks]
    if not fitted:
        raise NoTarget
    name = rng.choice(sorted(fitted))
    seconds = rng.choice((-1, 1)) * log_uniform(rng, 1.0, 1e6)
    arena.clocks[name].write_text(f"{seconds:+.0f}s\n")
    yield Struck((arena.lives[name].who,), rng.uniform(3.0, 10.0), f"by {seconds:+.0f} s")
    arena.clocks[name].write_text("+0s\n")


@fault("memory pressure", needs="cgroup")
def memory_pressure(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """It gets hardly a page more than it has: whatever asks for one waits. Then it is killed.

    As the kernel does it to who goes on asking: and where that refuses, libzmq aborts, and Python's
    `Thread.start` waits for ever for a thread that could not begin.
    """
    name = choose(arena, rng)
    life = arena.lives[name]
    group = CGROUPS / f"thub-chaos-{os.getpid()}-{life.process.pid}"
    group.mkdir()
    try:
        (group / "memory.oom_control").write_text("1")  # wait, don't kill
        (group / "memory.limit_in_bytes").write_text(str(ROOM_UNDER_PRESSURE))
        (group / "cgroup.procs").write_text(str(life.process.pid))
        yield Struck((life.who,), log_uniform(rng, 1.0, 10.0))
        (group / "memory.limit_in_bytes").write_text("-1")
        if arena.lives.get(name) is life:
            arena.kill(name)
        arena.start_again(name)
    finally:
        if life.process.poll() is None:
            (CGROUPS / "cgroup.procs").write_text(str(life.process.pid))
        arena.groups.append(group)


@fault("descriptors used up")
def descriptors(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    name = choose(arena, rng)
    seconds = log_uniform(rng, 0.5, 8.0)
    arena.order(name, "descriptors", seconds=seconds)
    yield Struck((arena.lives[name].who,), seconds)


@fault("/dev/shm is full", needs="mounts")
def full_shm(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """A worker starts again with a /dev/shm of its own that is full."""
    name = choose(arena, rng)
    who = arena.lives[name].who
    arena.kill(name)
    arena.wrappers[name] = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        "mount -t tmpfs -o size=64k none /dev/shm && head -c 1M /dev/zero > /dev/shm/full 2>&-; "
        'exec "$@"',
        "sh",
    ]
    new = arena.start(name)
    del arena.wrappers[name]
    yield Struck((who, new.who), rng.uniform(4.0, 10.0))


@fault("flipped bits", weight=2)
def flip(arena: Arena, rng: random.Random) -> Iterator[Struck]:
    """In the memory of somebody who pulled a version, and is a source of it."""
    name = choose(
        arena,
        rng,
        lambda n, s: s.version >= 0 and not s.verb and arena.cast[n].role != "trainer",
    )
    arena.order(name, "flip")
    yield Struck((arena.lives[name].who,), 0.5)
