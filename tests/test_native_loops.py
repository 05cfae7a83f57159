"""The loops in C: the digests of xxhash, as far as all goes well, and a plain reason where not."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import random
import socket
import struct
import sysconfig
import threading
import time
from array import array
from pathlib import Path

import pytest
import xxhash

from tensorhub_p2p.transfer import native_loops
from tensorhub_p2p.transfer.digest import TimedHasher, timed_hasher
from tensorhub_p2p.transfer.memory import address_of, view
from tensorhub_p2p.transfer.native_loops import (
    THE_END,
    NativeHasher,
    Source,
    native_hasher,
)

STEP = 128 << 10
SIZES = [0, 1, 16, 17, 240, 241, 1024, STEP - 1, STEP, STEP + 1, 3 * STEP + 5]
SEAL = bytes(range(32))
LATER = 1e9
"""A deadline that never comes."""

there_are_none = pytest.mark.skipif(
    bool(native_loops.why_not), reason=f"no native loops: {native_loops.why_not}"
)


def hasher() -> NativeHasher:
    made = native_hasher()
    assert made is not None
    return made


def drawn(size: int) -> bytearray:
    return bytearray(random.Random(size).randbytes(size))


def at(memory: bytearray | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


def expected(content: bytes | bytearray) -> bytes:
    return xxhash.xxh3_128(content).digest()


class Own:
    """Memory of this process, read as if it were another's."""

    def __init__(self, seal: bytes = SEAL, wanted: bytes = SEAL) -> None:
        self.seal, self.found = bytearray(seal), bytearray(len(seal))
        self.source = Source(
            os.getpid(), (at(self.found), len(seal)), (at(self.seal), len(seal)), wanted
        )


@there_are_none
@pytest.mark.parametrize("size", SIZES)
def test_what_is_fed_in_any_pieces_has_the_digest_of_xxhash(size: int) -> None:
    content = drawn(size)
    whole, pieces = hasher(), hasher()
    whole.update(memoryview(content))
    cuts = sorted({0, size, *(random.Random(1).randrange(size + 1) for _ in range(7))})
    iov = array("Q")
    for start, end in itertools.pairwise(cuts):
        iov.extend((at(content) + start, end - start))
    pieces.update_pieces(iov)
    assert whole.digest() == pieces.digest() == expected(content)


@there_are_none
@pytest.mark.parametrize("size", SIZES[1:])
def test_memory_that_is_read_arrives_and_is_fed(size: int) -> None:
    there, here, own, made = drawn(size), bytearray(size), Own(), hasher()
    assert made.read_process(own.source, at(here), at(there), size) == size
    assert here == there
    assert made.digest() == expected(there)
    assert made.seconds > 0


@there_are_none
def test_reading_ends_where_memory_does_and_feeds_what_is_there() -> None:
    size, page = 3 * STEP, mmap.PAGESIZE
    there, here, own, made = mmap.mmap(-1, size), bytearray(size), Own(), hasher()
    there.write(drawn(size))
    libc = ctypes.CDLL(None, use_errno=True)
    gone = size - STEP // 2
    begin, rest = ctypes.c_void_p(at(there) + gone), ctypes.c_size_t(size - gone)
    assert libc.mprotect(begin, rest, 0) == 0  # PROT_NONE
    assert gone % page == 0
    assert made.read_process(own.source, at(here), at(there), size) == gone
    assert made.digest() == expected(here[:gone]) == expected(drawn(size)[:gone])
    assert made.read_process(own.source, at(here), at(there) + gone, 1) == 0


@there_are_none
def test_what_lies_under_another_seal_counts_for_nothing() -> None:
    other, made = bytearray(SEAL), hasher()
    other[-1] ^= 1
    own, content, here = Own(bytes(other)), drawn(10), bytearray(10)
    assert made.read_process(own.source, at(here), at(content), 10) == 0
    own.seal[:] = SEAL
    assert made.read_process(own.source, at(here), at(content), 10) == 10


@there_are_none
def test_a_process_that_is_not_there_gives_nothing() -> None:
    own, made = Own(), hasher()
    own.source.pid = (1 << 22) + 1  # beyond what the kernel ever gives
    assert made.read_process(own.source, at(bytearray(1)), at(bytearray(1)), 1) == 0


@there_are_none
@pytest.mark.parametrize("size", SIZES[1:])
def test_what_is_received_arrives_and_is_fed(size: int) -> None:
    ours, theirs = socket.socketpair()
    content, here, made = drawn(size), bytearray(size), hasher()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(content,))
        sender.start()
        done = 0
        while done < size:
            got, why = made.receive(ours.fileno(), at(here) + done, size - done, LATER)
            assert why == 0
            done += got
        sender.join()
    assert here == content
    assert made.digest() == expected(content)


@there_are_none
def test_receiving_says_what_ended_it() -> None:
    ours, theirs = socket.socketpair()
    here, made = bytearray(100), hasher()
    with ours, theirs:
        limit = struct.pack("@ll", 0, 50_000)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        theirs.sendall(b"begun")
        assert made.receive(ours.fileno(), at(here), 100, LATER) == (5, 0)
        assert made.receive(ours.fileno(), at(here) + 5, 95, LATER) == (0, errno.EAGAIN)
        theirs.sendall(b"end")
        theirs.close()
        assert made.receive(ours.fileno(), at(here) + 5, 95, LATER) == (3, 0)
        assert made.receive(ours.fileno(), at(here) + 8, 92, LATER) == (0, THE_END)
    assert made.receive(10_000, at(here), 1, LATER) == (0, errno.EBADF)
    assert made.digest() == expected(b"begunend")


@there_are_none
def test_past_its_deadline_it_receives_one_step_at_a_time() -> None:
    ours, theirs = socket.socketpair()
    here, made = bytearray(2 * STEP), hasher()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(bytes(2 * STEP),))
        sender.start()
        assert made.receive(ours.fileno(), at(here), 2 * STEP, time.monotonic()) == (STEP, 0)
        assert made.receive(ours.fileno(), at(here) + STEP, STEP, -1.0) == (STEP, 0)
        sender.join()


@there_are_none
def test_other_threads_run_while_a_loop_does() -> None:
    ours, theirs = socket.socketpair()
    here, made = bytearray(1), hasher()
    with ours, theirs:
        answer = threading.Timer(0.05, theirs.sendall, args=(b"x",))
        answer.start()
        assert made.receive(ours.fileno(), at(here), 1, LATER) == (1, 0)
        answer.join()


@there_are_none
def test_a_thousand_hashers_leave_no_memory_behind() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])

    for _ in range(1000):
        hasher()
    before = resident()
    for _ in range(50_000):
        hasher()
    assert (resident() - before) * mmap.PAGESIZE < 8 << 20


@pytest.mark.usefixtures("loops")
def test_both_kinds_of_hashers_say_the_same_and_tell_their_time() -> None:
    content = drawn(300_000)
    made = timed_hasher()
    made.update(memoryview(content)[:5])
    made.update(view(at(content) + 5, len(content) - 5))
    for nothing in (memoryview(content)[:0], memoryview(b"")):
        made.update(nothing)
    words = array("Q", [at(content), 7, at(content) + 7, 0])
    made.update_pieces(words)
    assert address_of(words)
    made.update(memoryview(b"read-only"))
    assert made.digest() == expected(content + content[:7] + b"read-only")
    assert made.seconds > 0


def test_without_the_library_python_does_it_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_loops, "LIBRARY", tmp_path / "nothing.so")
    loops, why = native_loops._open()
    assert loops is None
    assert "nothing.so" in why
    (tmp_path / "nothing.so").write_bytes(b"no library")
    assert native_loops._open()[0] is None
    monkeypatch.setattr(native_loops, "_loops", None)
    assert isinstance(timed_hasher(), TimedHasher)


@there_are_none
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_loops, "_VERSION", -1)
    loops, why = native_loops._open()
    assert loops is None
    assert "install the package again" in why


def test_they_are_there_where_there_is_a_compiler() -> None:
    """A package that quietly falls back is a slow one."""
    compiler = (os.environ.get("CC") or "cc").split()[0]
    if not any((Path(p) / compiler).exists() for p in os.environ["PATH"].split(os.pathsep)):
        pytest.skip(f"no C compiler here: {compiler}")
    assert not native_loops.why_not, sysconfig.get_platform()
