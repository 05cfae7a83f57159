"""What a run leaves behind: one file of JSON lines for each process, in one directory.

Rules of this file. Every line is one `Event`, in one `write`, so that what a process did is
there although it was killed right after. `at` is the machine's monotonic clock, which all its
processes share: so lines of different files have one order. Nobody who writes judges, and the
judge knows nothing but these files.

What a worker writes:   Started, Joined, then for each verb Called and Ended, after a pull
                        Compared; Listed, whatever `versions` told; Met, whom it knows in the end;
                        Trouble, when the peer's own thread met an error of the library
What the runner writes: Fault (begin and end), Exited, Sampled, and the phases of the run
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

RUNNER = "runner"


class Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, kw_only=True):
    """Something that happened at `at`, written by `who` (a worker's name and life, "r1.2")."""

    at: float
    who: str


class Started(Event, frozen=True, kw_only=True):
    """A process begins. `newest`: it retains so many versions."""

    pid: int
    role: str
    replica: str
    shard: int
    num_shards: int
    zone: str
    host: str
    newest: int = 0
    spot: bool = False


class Joined(Event, frozen=True, kw_only=True):
    """It is a member of the cluster."""

    peer_id: str


class Called(Event, frozen=True, kw_only=True):
    """A verb begins. `what`: the version or question that it is about."""

    call: int
    verb: str
    what: str
    timeout: float


class Ended(Event, frozen=True, kw_only=True):
    """The verb `call` has ended, with what it returned or, if there is one, an error.

    `generation` and `number` say which call of the group it was; `state` what the handle is now.
    """

    call: int
    error: str = ""
    message: str = ""
    version: int = -1
    epoch: int = 0
    publication: str = ""
    generation: str = ""
    number: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    registering: float = 0.0
    moving: float = 0.0
    retried: int = 0
    up_to_date: bool = False
    sources: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    """Sources that sent bytes which don't match the digest."""
    transports: tuple[str, ...] = ()
    state: str = ""


class Compared(Event, frozen=True, kw_only=True):
    """Every byte that `call` brought was compared; `wrong` are the tensors that differ."""

    call: int
    version: int
    wrong: tuple[str, ...] = ()


class Listed(Event, frozen=True, kw_only=True):
    """What `versions` told: (epoch, version, whole)."""

    found: tuple[tuple[int, int, bool], ...]


class Met(Event, frozen=True, kw_only=True):
    """It is told to end, and these are the members of its zone as it knows them, by name."""

    names: tuple[str, ...]


class Spoilt(Event, frozen=True, kw_only=True):
    """Bits of the process's own tensors were flipped, on purpose: what it holds is wrong now."""

    version: int


class Trouble(Event, frozen=True, kw_only=True):
    """An error that the library should not have met, or something that stayed behind."""

    what: str


class Fault(Event, frozen=True, kw_only=True):
    """A fault begins or ends. `targets`: whom it is done to, as name and life."""

    number: int
    kind: str
    ends: bool = False
    targets: tuple[str, ...] = ()
    detail: str = ""


class Exited(Event, frozen=True, kw_only=True):
    """A process is gone. `name` is its name and life; a negative code is a signal."""

    name: str
    code: int


class Sampled(Event, frozen=True, kw_only=True):
    """What a process uses, as the kernel tells."""

    name: str
    rss: int
    descriptors: int
    threads: int


class Phase(Event, frozen=True, kw_only=True):
    """ "begun", "calm" (no fault from here on), "closing", "over"."""

    phase: str
    detail: str = ""


AnyEvent = (
    Started
    | Joined
    | Called
    | Ended
    | Compared
    | Listed
    | Met
    | Spoilt
    | Trouble
    | Fault
    | Exited
    | Sampled
    | Phase
)
_encode = msgspec.json.Encoder().encode
_decode: Callable[[bytes], AnyEvent] = msgspec.json.Decoder(AnyEvent).decode


def now() -> float:
    """The clock of every journal on this machine."""
    return time.monotonic()


class Journal:
    """Where one process writes."""

    def __init__(self, directory: Path, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(directory / f"{name}.jsonl", flags, 0o644)
        self.name = name

    def write(self, event: Event) -> None:
        os.write(self._file, _encode(event) + b"\n")


def read(directory: Path) -> list[AnyEvent]:
    """All that was written down, in the order in which it happened.

    A process that is killed while it writes may leave half a line; anything else that can't be
    read is an error.
    """
    found: list[AnyEvent] = []
    for file in sorted(directory.glob("*.jsonl")):
        *lines, last = file.read_bytes().split(b"\n")
        if last:
            lines += [last] if last.endswith(b"}") else []
        found.extend(_decode(line) for line in lines)
    return sorted(found, key=lambda event: event.at)
