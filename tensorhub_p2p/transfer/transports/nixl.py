"""One-sided reads through NIXL's UCX backend: over RDMA, or between processes of one machine.

Rule of this file. It says what may be read, reads it, and says what an end means. It
moves bytes without the source's Python, which only answers those who connect.

Theory. The holder has one agent, and registers memory once: for as long as somebody has
the region, over all versions. For each order of the tensors there is a *card*, memory that
is registered too: a row of seals, the table of the pieces, and the metadata that reading
them takes. An endpoint is small however many tensors there are: it leads to the card,
and names one seal in the row. The reader reads the card once, prepares lists for the pair
of memories (nixl_agents.py), and then chunk by chunk; every read takes the seals along. A
withdrawn export's seal is zero, and the next export there has another one. What slips
through between seal and bytes shows in the digest.

Where it works. Between machines that both have RDMA devices. On one machine without them
UCX reads through the kernel, like `cma`, and checks nothing else: that is how this is
tested. Nothing is encrypted, and no port is opened.

Fences. Each reading thread borrows an agent, so that a source that fails takes no other
read with it (borrowed.py). An agent with a read that was given up, or that met a failure, is ended
before `read` returns, and not used again: bytes of it can't land later.

Threads. One, named tensorhub_p2p-nixl, that answers who connects, and deregisters memory
whose region is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
import weakref
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from tensorhub_p2p.config import NixlConfig
from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.layout import MAX_BYTES, MAX_TENSORS
from tensorhub_p2p.transfer.digest import Hasher
from tensorhub_p2p.transfer.memory import Extents, Region, view
from tensorhub_p2p.transfer.scratch import STEP_BYTES, Scratch, are_small
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
    Transport,
)
from tensorhub_p2p.transfer.transports.borrowed import Borrowed
from tensorhub_p2p.transfer.transports.cma import host_id
from tensorhub_p2p.transfer.transports.nixl_agents import (
    ROW,
    SEAL,
    SEALS,
    Agent,
    Lists,
    Posted,
    Span,
    library,
    spans,
    trouble,
)
from tensorhub_p2p.transfer.transports.optional import rdma_devices

MAX_METADATA = 16 << 20
"""Bytes of metadata on one card."""
AHEAD = 3
"""Steps that are posted before the first of them is there."""
ENTRIES = 1024
"""Pieces of one posted read, at most."""
FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 2e-3
"""Seconds between two looks at a read, doubling from the one to the other."""

_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)

Word = Annotated[int, Meta(ge=0)]
Seal = Annotated[bytes, Meta(min_length=SEAL, max_length=SEAL)]


class _Endpoint(msgspec.Struct, frozen=True, array_like=True):
    host: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    rdma: bool
    metadata: Annotated[bytes, Meta(max_length=8192)]
    """Of the agent, and of its card."""
    card: Seal
    address: Word
    card_metadata: Annotated[int, Meta(ge=0, le=MAX_METADATA)]
    """Bytes of the memory's metadata, which lie on the card."""
    seal: Seal
    place: Annotated[int, Meta(ge=0, lt=SEALS)]
    pieces: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Endpoint).decode


def _buffer(size: int) -> tuple[Any, int]:
    """Zeroed memory and its address."""
    memory = (ctypes.c_char * size)()
    return memory, ctypes.addressof(memory)


class _Card:
    """What one order of the tensors in registered memory looks like to readers."""

    def __init__(self, agent: Agent, extents: Extents, metadata: bytes) -> None:
        self.id = secrets.token_bytes(SEAL)
        words = extents.addresses.tobytes() + extents.lengths.tobytes()
        size = ROW + len(words) + len(metadata)
        self.memory, self.address = _buffer(size)
        view(self.address + ROW, size - ROW)[:] = words + metadata
        self.num_metadata = len(metadata)
        self.registered = agent.register(((self.address, size),))
        self.metadata = agent.metadata(self.registered, connect=True)
        self.free = list(range(SEALS))

    def seal(self, place: int) -> memoryview:
        return view(self.address + SEAL * place, SEAL)


class _Memory:
    """Memory that is registered for reading from."""

    def __init__(self, agent: Agent, key: tuple[Span, ...]) -> None:
        self.registered = agent.register(key) if key else None
        self.metadata = agent.metadata(self.registered, connect=False) if key else b""
        self.cards: dict[tuple[bytes, bytes], _Card] = {}
        self.owners: list[weakref.ref[Region]] = []
        self.exports: dict[bytes, tuple[_Card, int, Region]] = {}
        """By seal."""

    @property
    def unowned(self) -> bool:
        return not self.exports and all(owner() is None for owner in self.owners)

    def own(self, region: Region) -> None:
        self.owners = [ref for ref in self.owners if ref() is not None and ref() is not region]
        self.owners.append(weakref.ref(region))


class NixlTransport(Transport):
    """One-sided reads by NIXL."""

    name = "nixl"

    def __init__(
        self, host: str = "", *, config: NixlConfig | None = None, silence: float = 2.0
    ) -> None:
        """`host` is the label in `host_id`; `silence` is seconds for a step that doesn't come.

        Takes the time that trying the library takes: a second.
        """
        self.config = config or NixlConfig()
        self.silence = silence
        self.host = host_id(host)
        self.rdma = bool(rdma_devices())
        self._module = library() or ""
        self._unavailable = (
            trouble(self._module, self.rdma)
            if self._module
            else "NIXL is not installed: pip install nixl-cu12"
        )
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._memories: dict[tuple[Span, ...], _Memory] = {}
        self._idle: list[Agent] = []
        self._released = 0
        """How often memory was given back: agents in use must look at what they know."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def unavailable(self) -> str | None:
        return self._unavailable

    # --- the holder's end ----------------------------------------------------------------

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        extents, key = region.extents, spans(region.extents)
        with self._lock:
            agent = self._serving()
            memory = self._memories.get(key)
            if memory is None:
                memory = self._memories[key] = _Memory(agent, key)
            memory.own(region)
            order = (extents.addresses.tobytes(), extents.lengths.tobytes())
            card = memory.cards.get(order)
            if card is None:
                card = memory.cards[order] = _Card(agent, extents, memory.metadata)
            if not card.free:
                raise StateError(f"these tensors are exported {SEALS} times: drain some first")
            seal, place = secrets.token_bytes(SEAL), card.free.pop(0)
            memory.exports[seal] = (card, place, region)
            card.seal(place)[:] = seal
        return _encode(
            _Endpoint(
                self.host,
                os.getpid(),
                self.rdma,
                card.metadata,
                card.id,
                card.address,
                card.num_metadata,
                seal,
                place,
                len(extents),
                extents.num_bytes,
            )
        )

    def _serving(self) -> Agent:
        """The agent that others read from."""
        if self._agent is None:
            if self._closed.is_set():
                raise StateError("the peer is closed: nothing is exported any more")
            self._agent = Agent(self._module, self.rdma)
            self._thread = threading.Thread(
                target=self._answer, name="tensorhub_p2p-nixl", daemon=True
            )
            self._thread.start()
        return self._agent

    def _answer(self) -> None:
        pause = self.config.idle_pause
        while not self._closed.wait(pause):
            began = time.perf_counter()
            with self._lock:
                if self._agent is None:
                    return
                self._agent.progress()
                took = time.perf_counter() - began
                self._sweep()
            # What took long had something to do, and more of it may follow.
            pause = self.config.busy_pause if took > 50e-6 else self.config.idle_pause

    def _sweep(self) -> None:
        """Deregister what nobody can export any more."""
        for key in [key for key, memory in self._memories.items() if memory.unowned]:
            self._deregister(key)

    def _deregister(self, key: tuple[Span, ...]) -> None:
        memory = self._memories.pop(key)
        assert self._agent is not None
        for card in memory.cards.values():
            self._agent.deregister(card.registered)
        if memory.registered is not None:
            self._agent.deregister(memory.registered)

    def withdraw(self, endpoint: bytes) -> None:
        seal = _decode(endpoint).seal
        with self._lock:
            for memory in self._memories.values():
                if seal in memory.exports:
                    card, place, _ = memory.exports.pop(seal)
                    card.seal(place)[:] = bytes(SEAL)
                    card.free.append(place)
                    return

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self.withdraw(endpoint)

    def release(self, region: Region) -> None:
        key = spans(region.extents)
        with self._lock:
            memory = self._memories.get(key)
            if memory is not None and not memory.exports:
                self._deregister(key)
            self._released += 1
            for agent in self._idle:
                agent.forget(key)

    # --- the puller's end ----------------------------------------------------------------

    def reachable(self, endpoint: bytes) -> str | None:
        if self._unavailable is not None:
            return self._unavailable
        try:
            remote = _decode(endpoint)
        except msgspec.DecodeError as error:
            return f"its endpoint can't be read: {error}"
        if remote.host == self.host or (remote.rdma and self.rdma):
            return None
        where = "it is on another machine, or in another container"
        if not self.rdma and not remote.rdma:
            return f"{where}, and neither of the two has an RDMA device"
        return f"{where}, and {'it' if self.rdma else 'this machine'} has no RDMA device"

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        reason = self.reachable(endpoint)
        if reason is not None:
            raise CannotReach(f"nixl: {reason}")
        remote = _decode(endpoint)
        try:
            agent, released = self._borrow(remote.card)
        except Exception as error:
            raise CannotReach(f"nixl: no agent can be made: {error!r}") from error
        reader = NixlReader(self, remote, agent, released)
        try:
            reader.open(deadline)
        except BaseException:
            reader.close()
            raise
        return reader

    def _borrow(self, card: bytes) -> tuple[Agent, int]:
        """An agent for one thread: one that knows this card already, if there is one."""
        with self._lock:
            if self._closed.is_set():
                raise StateError("this peer is closed")
            released = self._released
            if self._idle:
                known = [i for i, agent in enumerate(self._idle) if card in agent.tables]
                return self._idle.pop(known[0] if known else -1), released
        return Agent(self._module, self.rdma), released

    def give_back(self, agent: Agent, released: int) -> None:
        """The agent isn't used any more; it must be quiet."""
        agent.forget_dead()
        with self._lock:
            if released != self._released:  # it may have been the memory that this one knows
                agent.forget_all()
            keep = not self._closed.is_set() and len(self._idle) < self.config.idle_agents
            if keep:
                self._idle.append(agent)
        if not keep:
            agent.close()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for memory in self._memories.values():
                for card, place, _ in memory.exports.values():
                    card.seal(place)[:] = bytes(SEAL)
            self._memories.clear()
            agents = [*self._idle, *([self._agent] if self._agent is not None else [])]
            self._idle, self._agent = [], None
        for agent in agents:
            agent.close()


class NixlReader(Reader):
    """Reads one export by an agent of its own."""

    def __init__(
        self, transport: NixlTransport, endpoint: _Endpoint, agent: Agent, released: int
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._name = f"nixl: process {endpoint.pid}"
        give_back = partial(transport.give_back, released=released)
        self._borrowed = Borrowed(agent, self._name, give_back)
        self._scratch: Scratch | None = None

    # --- connecting ----------------------------------------------------------------------

    def open(self, deadline: float) -> None:
        """Read the card, unless the agent knows it, and look whether the seal stands."""
        remote = self._endpoint
        with self._using(connecting=True) as agent:
            name = agent.meet(remote.metadata)
            size = 16 * remote.pieces + remote.card_metadata
            if remote.card not in agent.tables:
                memory, address = _buffer(ROW + size)
                registered = agent.register(((address, ROW + size),))
                request = agent.fetch(name, address, remote.address, ROW + size)
                self._await(agent, request, deadline)
                agent.deregister(registered)
                ctypes.memmove(agent.row_at, address, ROW)
                self._check_seal(agent)
                agent.tables[remote.card] = (name, self._learn(agent, memory.raw[ROW:]))
                while len(agent.tables) > SEALS:
                    agent.tables.popitem(last=False)
            else:
                request = agent.fetch(name, agent.row_at, remote.address, ROW)
                self._await(agent, request, deadline)
                self._check_seal(agent)

    def _learn(self, agent: Agent, card: bytes) -> Extents:
        """Take in the table and the metadata of a card."""
        addresses, lengths = array("Q"), array("Q")
        half = 8 * self._endpoint.pieces
        addresses.frombytes(card[:half])
        lengths.frombytes(card[half : 2 * half])
        table = Extents.of_table(addresses, lengths)
        if table.num_bytes != self._endpoint.num_bytes:
            raise CannotReach(f"{self._name}: its table of memory is not that of its endpoint")
        if table.num_bytes:
            agent.meet(card[2 * half :])
        return table

    # --- reading -------------------------------------------------------------------------

    def read(self, start: int, length: int, into: Region, deadline: float, hasher: Hasher) -> None:
        if into.layout.num_bytes != self._endpoint.num_bytes:
            raise ValueError("the target's layout is not the source's")
        if not length:
            return
        with self._using() as agent:
            agent.target(into)
            lists, entries, own = self._prepare(agent, into, start, start + length)
            try:
                self._run(agent, lists, entries, into, deadline, hasher)
            finally:
                if own and agent.quiet:
                    agent.drop(lists)

    def _prepare(
        self, agent: Agent, into: Region, start: int, end: int
    ) -> tuple[Lists, list[int], bool]:
        """Lists, the entries in them, and whether they are for this read alone."""
        remote = self._endpoint
        lists = agent.lists(remote.card, remote.address, into, (0, remote.num_bytes), STEP_BYTES)
        entries = lists.entries(start, end)
        if entries is not None:
            return lists, entries, False
        lists = agent.lists(remote.card, remote.address, into, (start, end), STEP_BYTES)
        return lists, list(range(1, len(lists.cuts))), True

    def _run(
        self,
        agent: Agent,
        lists: Lists,
        entries: list[int],
        into: Region,
        deadline: float,
        hasher: Hasher,
    ) -> None:
        """Some steps ahead of the hasher, where reads take their time."""
        steps = _steps(lists.cuts, entries)
        posted: list[tuple[Posted | None, int, int]] = []
        while steps or posted:
            while steps and len(posted) < AHEAD:
                self._check(deadline)
                first, last = steps.pop()
                request = agent.post(lists, list(range(first, last)))
                posted.append((request, lists.cuts[first - 1], lists.cuts[last - 1]))
                if agent.done(request):
                    posted[-1] = (None, *posted[-1][1:])
                    break
            waiting, begin, end = posted.pop(0)
            if waiting is not None:
                self._await(agent, waiting, deadline)
            self._check_seal(agent)
            self._hash(into, begin, end - begin, hasher)

    def _hash(self, into: Region, start: int, length: int, hasher: Hasher) -> None:
        iov = into.pieces(start, length)
        if are_small(iov, length):
            if self._scratch is None:
                self._scratch = Scratch(STEP_BYTES)
            self._scratch.gather(iov)
            hasher.update(self._scratch.memory[:length])
        else:
            for i in range(0, len(iov), 2):
                hasher.update(view(iov[i], iov[i + 1]))

    def _await(self, agent: Agent, request: Posted, deadline: float) -> None:
        pause = FIRST_PAUSE
        silent_at = min(deadline, time.monotonic() + self._transport.silence)
        while not agent.done(request):
            self._check(silent_at)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _check(self, deadline: float) -> None:
        self._borrowed.check()
        if time.monotonic() > deadline:
            raise SourceSilent(f"{self._name}: its bytes did not come in time")

    def _check_seal(self, agent: Agent) -> None:
        at = SEAL * self._endpoint.place
        if agent.row.raw[at : at + SEAL] != self._endpoint.seal:
            raise SourceWithdrew(f"{self._name} withdrew these tensors")

    # --- what ends mean -------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self, connecting: bool = False) -> Iterator[Agent]:
        with self._borrowed.using() as agent:
            try:
                yield agent
            except (ReadFailed, ValueError):
                raise
            except Exception as error:  # noqa: BLE001  the library's own kinds, which have no common base
                self._fail(error, connecting)

    def _fail(self, error: Exception, connecting: bool) -> NoReturn:
        same_host = self._endpoint.host == self._transport.host
        if same_host and not os.path.exists(f"/proc/{self._endpoint.pid}"):
            raise SourceGone(f"{self._name} has ended") from error
        what = "can't be connected to" if connecting else "can't be read any more"
        raise CannotReach(
            f"{self._name} {what} ({type(error).__name__}): it has ended, freed the memory, or "
            "may not be read from here"
        ) from error

    def close(self) -> None:
        self._borrowed.close()


def _steps(cuts: array[int], entries: list[int]) -> list[tuple[int, int]]:
    """Entries as runs [first, last) of about a step's bytes each, the last one first."""
    runs: list[tuple[int, int]] = []
    first, end = entries[0], entries[-1] + 1
    while first < end:
        last = first + 1
        while last < end and last - first < ENTRIES and cuts[last] - cuts[first - 1] <= STEP_BYTES:
            last += 1
        runs.append((first, last))
        first = last
    return runs[::-1]
