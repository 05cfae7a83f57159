"""Reading another process's memory on the same machine: Linux cross-memory attach.

Rule of this file. One system call, `process_vm_readv`, moves bytes straight from the
source's tensors into the puller's. The source's Python does nothing, not even when its
GIL is held or the process is stopped.

Theory. An endpoint names the machine (boot id, pid namespace, label), the process, and
three addresses in it: a *seal* of 32 bytes and the table of the region's pieces. The seal
is a number drawn by the process and one drawn for the export. A process that took over the pid
has another first half, so its memory is never taken for the source's; a withdrawn export has
another second half (zero, then whatever uses the seal next). Neither ever becomes again what it
was: a native loop reads some megabytes and then the seal, and what it finds held all the while.
In Python each read fetches the seal as its first vector, in the same call as the bytes; a
withdrawal that comes between the two shows in the digest. `connect` reads the table in that way,
so the endpoint stays small however many tensors there are. The endpoint has the table's digest:
one that was read before is not read again, as the next version lies where this one does.

How it reads. A little at a time, which is hashed while it is in the processor's cache. Where
both sides are large pieces, straight from one into the other, without the GIL
(native_loops.py). Where they are small ones, through spans (spans.py), a hundred tensors in one
call (steps.py).

Permission. The same user, and where Yama restricts ptrace, PR_SET_PTRACER by the
source. A refusal is a CannotReach that says what the machine's settings are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Annotated, NamedTuple, NoReturn

import msgspec
import xxhash
from msgspec import Meta

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.layout import MAX_BYTES, MAX_TENSORS
from tensorhub_p2p.transfer.digest import Hasher, update_pieces
from tensorhub_p2p.transfer.memory import Extents, Region, address_of, view
from tensorhub_p2p.transfer.native_loops import READ_BYTES, NativeHasher, Source
from tensorhub_p2p.transfer.scratch import STEP_BYTES, are_small
from tensorhub_p2p.transfer.spans import Spans
from tensorhub_p2p.transfer.steps import Step, Steps
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)

HALF_SEAL = 16
SEAL_BYTES = 2 * HALF_SEAL

MAX_TABLES = 64
MAX_TABLE_PIECES = 1 << 21
"""Tables of others' memory that a transport remembers, and pieces in all of them together."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value

_libc = ctypes.CDLL(None, use_errno=True)

Half = Annotated[bytes, Meta(min_length=HALF_SEAL, max_length=HALF_SEAL)]
Address = Annotated[int, Meta(ge=0)]


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    host: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    process: Half
    export: Half
    seal: Address
    addresses: Address
    lengths: Address
    pieces: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    table: Half
    """Digest of the addresses and lengths."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Endpoint).decode


def host_id(label: str = "") -> str:
    """What two processes share when they can address each other by pid: boot and namespace.

    `label` is free text, for keeping apart what the kernel calls one machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux, or no /proc: nothing here is shared with anybody
        return f"unknown-{secrets.token_hex(8)}/{label}"
    return f"{boot}/{namespace}/{label}"


def _read_memory(pid: int, local: array[int], remote: array[int]) -> int:
    """One process_vm_readv; returns the bytes, raises OSError."""
    moved: int = _libc.process_vm_readv(
        pid, address_of(local), len(local) // 2, address_of(remote), len(remote) // 2, 0
    )
    if moved < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return moved


def _probe() -> str | None:
    """Why process_vm_readv can't be used here; None if reading the own memory works."""
    if not sys.platform.startswith("linux") or not hasattr(_libc, "process_vm_readv"):
        return "process_vm_readv needs Linux"
    _libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    source, target = array("Q", [secrets.randbits(64)]), array("Q", [0])
    try:
        _read_memory(
            os.getpid(),
            array("Q", [address_of(target), 8]),
            array("Q", [address_of(source), 8]),
        )
    except OSError as error:
        return f"process_vm_readv is not permitted here ({error.strerror}): seccomp?"
    return None if source == target else "process_vm_readv returns wrong bytes"


def _permission_hint() -> str:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            return f"ptrace_scope is {file.read().strip()}; the same user must run both processes"
    except OSError:
        return "the same user must run both processes"


class _Table:
    """Where the pieces of a region lie in the process that exported it."""

    def __init__(self, addresses: array[int], lengths: array[int]) -> None:
        self.extents = Extents.of_table(addresses, lengths)
        self.digest = _table_digest(self.extents)

    @cached_property
    def spans(self) -> Spans:
        return Spans(self.extents)


def _table_digest(extents: Extents) -> bytes:
    hasher = xxhash.xxh3_128(extents.addresses)
    hasher.update(extents.lengths)
    return hasher.digest()


class _Tables:
    """The tables that were read lately, by digest; those used least lately are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[bytes, _Table] = OrderedDict()

    def get(self, digest: bytes) -> _Table | None:
        with self._lock:
            if digest in self._tables:
                self._tables.move_to_end(digest)
            return self._tables.get(digest)

    def add(self, table: _Table) -> None:
        with self._lock:
            self._tables[table.digest] = table
            pieces = sum(len(known.extents) for known in self._tables.values())
            while len(self._tables) > MAX_TABLES or (
                pieces > MAX_TABLE_PIECES and len(self._tables) > 1
            ):
                _, oldest = self._tables.popitem(last=False)
                pieces -= len(oldest.extents)


class _Sealed(NamedTuple):
    """An export and all that must stay where it is while others may read it."""

    region: Region
    seal: ctypes.Array[ctypes.c_char]


class CmaTransport(Transport):
    """process_vm_readv between processes of one machine."""

    name = "cma"

    def __init__(self, host: str = "") -> None:
        """`host` is the label in `host_id`."""
        self.host = host_id(host)
        self._unavailable = _probe()
        self._process = secrets.token_bytes(HALF_SEAL)
        self._lock = threading.Lock()
        self._exports: dict[bytes, _Sealed] = {}
        # Seals are never freed: a late reader must find a seal there, and no other data.
        self._free_seals: list[ctypes.Array[ctypes.c_char]] = []
        self._tables = _Tables()
        self._steps = Steps()

    def unavailable(self) -> str | None:
        return self._unavailable

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        # May fail (no Yama): then nothing restricts ptrace in the first place.
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
        extents, export = region.extents, secrets.token_bytes(HALF_SEAL)
        with self._lock:
            seal = self._free_seals.pop() if self._free_seals else _new_seal()
            seal.raw = self._process + export
            self._exports[export] = _Sealed(region, seal)
        return _encode(
            _Endpoint(
                self.host,
                os.getpid(),
                self._process,
                export,
                ctypes.addressof(seal),
                address_of(extents.addresses),
                address_of(extents.lengths),
                len(extents),
                extents.num_bytes,
                _table_digest(extents),
            )
        )

    def withdraw(self, endpoint: bytes) -> None:
        export = _decode(endpoint).export
        with self._lock:
            sealed = self._exports.pop(export, None)
            if sealed is not None:
                sealed.seal.raw = self._process + bytes(HALF_SEAL)
                self._free_seals.append(sealed.seal)

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self.withdraw(endpoint)

    def reachable(self, endpoint: bytes) -> str | None:
        if self._unavailable is not None:
            return self._unavailable
        try:
            host = _decode(endpoint).host
        except msgspec.DecodeError as error:
            return f"its endpoint can't be read: {error}"
        return None if host == self.host else "it is on another machine, or in another container"

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        reason = self.reachable(endpoint)
        if reason is not None:
            raise CannotReach(f"cma: {reason}")
        return CmaReader(_decode(endpoint), self._tables, self._steps)

    def close(self) -> None:
        with self._lock:
            for sealed in self._exports.values():
                sealed.seal.raw = bytes(SEAL_BYTES)
                self._free_seals.append(sealed.seal)
            self._exports.clear()


def _new_seal() -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * SEAL_BYTES)()


class CmaReader(Reader):
    """Reads one region of one process."""

    def __init__(self, endpoint: _Endpoint, tables: _Tables, steps: Steps) -> None:
        self._endpoint = endpoint
        self._name = f"cma: process {endpoint.pid}"
        self._expected = endpoint.process + endpoint.export
        self._seal = (ctypes.c_char * SEAL_BYTES)()
        self._local_seal = array("Q", [ctypes.addressof(self._seal), SEAL_BYTES])
        self._remote_seal = array("Q", [endpoint.seal, SEAL_BYTES])
        self._source = Source(
            endpoint.pid, tuple(self._local_seal), tuple(self._remote_seal), self._expected
        )
        self._steps = steps
        self._closed = False
        self._sealed_read(self._local_seal, self._remote_seal)
        self._table = tables.get(endpoint.table) or self._read_table(tables)
        if self._table.extents.num_bytes != endpoint.num_bytes:
            raise SourceWithdrew(f"{self._name} has a table of memory that does not fit")

    def _read_table(self, tables: _Tables) -> _Table:
        endpoint = self._endpoint
        table = _Table(self._read_words(endpoint.addresses), self._read_words(endpoint.lengths))
        if table.digest != endpoint.table:
            raise SourceWithdrew(f"{self._name} changed its table of memory while it was read")
        tables.add(table)
        return table

    def _read_words(self, source: int) -> array[int]:
        """One column of the source's table, from its memory."""
        words = array("Q", bytes(8 * self._endpoint.pieces))
        done, due = 0, 8 * self._endpoint.pieces
        while done < due:
            local = self._local_seal + array("Q", [address_of(words) + done, due - done])
            remote = self._remote_seal + array("Q", [source + done, due - done])
            done += self._sealed_read(local, remote)
        return words

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        if into.layout.num_bytes != self._endpoint.num_bytes:
            raise ValueError("the target's layout is not the source's")
        if not length:
            return
        table = self._table
        known = self._steps.known(table.digest, into, start, length)
        if known is not None:
            self._read_small(known, deadline, hasher)
            return
        remote, local = table.extents.pieces(start, length), into.pieces(start, length)
        if are_small(remote, length) or are_small(local, length):
            steps = self._steps.cut(table.digest, table.spans, into, start, length)
            self._read_small(steps, deadline, hasher)
            return
        for there, here, run in _runs(remote, local):
            self._read_run(there, here, run, deadline, hasher)

    def _go_on(self, deadline: float) -> None:
        if self._closed:
            raise SourceGone(f"{self._name}: the reader was closed")
        if time.monotonic() > deadline:
            raise SourceSilent(f"{self._name}: the deadline passed")

    def _read_run(
        self, there: int, here: int, length: int, deadline: float, hasher: Hasher
    ) -> None:
        """Read and hash memory that is in one piece on both sides."""
        if isinstance(hasher, NativeHasher):
            done = self._read_natively(there, here, length, deadline, hasher)
            if done < length:
                self._say_why(there + done, here + done, length - done)
            return
        local = self._local_seal + array("Q", [here, 0])
        remote = self._remote_seal + array("Q", [there, 0])
        end = here + length
        while here < end:
            self._go_on(deadline)
            local[3] = remote[3] = min(STEP_BYTES, end - here)
            moved = self._sealed_read(local, remote)
            hasher.update(view(here, moved))
            here = local[2] = here + moved
            remote[2] += moved

    def _read_natively(
        self, there: int, here: int, length: int, deadline: float, hasher: NativeHasher
    ) -> int:
        """As much of it as goes well; returns the bytes."""
        done, moved = 0, -1
        while moved and done < length:
            self._go_on(deadline)
            step = min(READ_BYTES, length - done)
            moved = hasher.read_process(self._source, here + done, there + done, step)
            done += moved
        return done

    def _say_why(self, there: int, here: int, length: int) -> NoReturn:
        """A native loop ended early: the same read in Python finds the reason."""
        step = min(STEP_BYTES, length)
        local, remote = array("Q", [here, step]), array("Q", [there, step])
        self._sealed_read(self._local_seal + local, self._remote_seal + remote)
        # Something passing. What was hashed may be more than what was read: not to be gone on with.
        raise ReadFailed(f"{self._name}: a read failed, and went well when it was tried again")

    def _read_small(self, steps: Iterable[Step], deadline: float, hasher: Hasher) -> None:
        """The same where many small tensors are behind the range, on either side."""
        for vectors, pieces in steps:
            self._go_on(deadline)
            local, remote = self._local_seal + vectors.local, self._remote_seal + vectors.remote
            if self._sealed_read(local, remote) != vectors.num_bytes:
                raise self._freed()
            update_pieces(hasher, pieces)

    def _sealed_read(self, local: array[int], remote: array[int]) -> int:
        """Read some of `remote` into `local`, both of which begin with the seal.

        Returns the bytes without the seal's, not 0 unless there is only a seal. The kernel stops
        where either side's memory ends, so it may be fewer.
        """
        try:
            moved = _read_memory(self._endpoint.pid, local, remote)
        except OSError as error:
            self._fail(error)
        seal = self._seal.raw
        if seal != self._expected or moved < SEAL_BYTES:
            raise self._broken(seal if moved >= SEAL_BYTES else b"")
        if moved == SEAL_BYTES and len(local) > 2:
            raise self._freed()
        return moved - SEAL_BYTES

    def _broken(self, seal: bytes) -> ReadFailed:
        """What another seal than the expected one means."""
        if seal[:HALF_SEAL] != self._expected[:HALF_SEAL]:
            return SourceGone(f"{self._name} is another process by now, or closed its peer")
        return SourceWithdrew(f"{self._name} withdrew these tensors")

    def _freed(self) -> ReadFailed:
        return SourceWithdrew(f"{self._name} freed the memory, or it was freed here")

    def _fail(self, error: OSError) -> NoReturn:
        if error.errno == errno.ESRCH:
            raise SourceGone(f"{self._name} has ended") from error
        if error.errno == errno.EPERM:
            raise CannotReach(
                f"{self._name} may not be read from here: {_permission_hint()}"
            ) from error
        if error.errno == errno.EFAULT:  # not even the seal is there
            raise SourceGone(f"{self._name} is another process by now") from error
        raise ReadFailed(f"{self._name}: {error.strerror}") from error

    def close(self) -> None:
        self._closed = True


def _runs(remote: array[int], local: array[int]) -> Iterator[tuple[int, int, int]]:
    """What is in one piece on both sides, in order: (address there, address here, length)."""
    theirs = ours = 0
    used_there = used_here = 0
    while theirs < len(remote):
        left_there, left_here = remote[theirs + 1] - used_there, local[ours + 1] - used_here
        run = min(left_there, left_here)
        yield remote[theirs] + used_there, local[ours] + used_here, run
        used_there, used_here = used_there + run, used_here + run
        if run == left_there:
            theirs, used_there = theirs + 2, 0
        if run == left_here:
            ours, used_here = ours + 2, 0
