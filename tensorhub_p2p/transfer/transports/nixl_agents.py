"""NIXL agents, and what one of them knows: memory that is registered, lists that are prepared.

Rule of this file. All that touches the library is here, one step above it; what is read
when, and what an end means, nixl.py says. An `Agent` is used by one thread at a time.

Theory. An agent is an end of NIXL: it registers memory, tells others of it (metadata), and
posts reads. Those to be posted are chosen by index from two prepared lists, one of local and one
of remote pieces, that are made once for a pair of memories and used for all chunks of all
versions. Names of agents are random and never used twice: the library shuns the name of an
agent that it once saw fail.

What is left out, and why (each was seen to happen with NIXL 1.5 over UCX 1.21):

    tcp              UCX emulates one-sided reads over it in software: the source sends whatever
                     address is asked for, registered or not, to whoever reaches its port; it
                     dies of a late read of memory that was unmapped; and bytes of a read that
                     was given up, and released, still land
    progress threads they poll without a pause, and burn a core on each side
    release()        it is no fence: only the end of the agent is
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import logging
import secrets
import weakref
from array import array
from bisect import bisect_left
from collections import OrderedDict
from typing import Any

from tensorhub_p2p.transfer.memory import Extents, Region
from tensorhub_p2p.transfer.transports.optional import installed, try_apart

MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
"""What picks the one that fits this machine's CUDA, and the two by themselves."""
TRY_SECONDS = 20.0
"""What the library may take to start, in a process of its own."""
_TRY = """
from tensorhub_p2p.transfer.transports.nixl_agents import Agent
Agent({module!r}, rdma={rdma!r}).close()
"""
UCX_TRANSPORTS = "^tcp"
"""What UCX may use: all but that, see above."""
PAGE = 4096
SEAL = 16
SEALS = 64
ROW = SEAL * SEALS
"""Bytes of the row of seals on a card."""
MAX_LISTS = 4
"""Pairs of memories that one agent keeps lists for; those used least lately go first."""

Span = tuple[int, int]


def library() -> str | None:
    """The module's name, if it is installed."""
    return installed(MODULES)


def trouble(module: str, rdma: bool) -> str | None:
    """Why an agent can't be made here, or None."""
    return try_apart(module, _TRY.format(module=module, rdma=rdma), TRY_SECONDS)


def _load(module: str) -> Any:
    # Wheels bring a libnl of their own beside the system's, and where both are loaded in
    # that order the process crashes as it exits.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")
    return importlib.import_module(module)


def spans(extents: Extents) -> tuple[Span, ...]:
    """The memory of all pieces as few (address, bytes), in order of address.

    Pieces with no whole page between them are joined: thousands of small tensors that were
    allocated one after the other are registered as one.
    """
    joined: list[list[int]] = []
    for address, length in sorted(zip(extents.addresses, extents.lengths, strict=True)):
        if joined and address // PAGE <= (joined[-1][1] - 1) // PAGE + 1:
            joined[-1][1] = max(joined[-1][1], address + length)
        else:
            joined.append([address, address + length])
    return tuple((start, end - start) for start, end in joined)


class Lists:
    """Prepared lists for reading all of one remote memory into one local memory.

    Entry 0 is the seals; entry i + 1 are the bytes from `cuts[i]` on.
    """

    def __init__(self, cuts: array[int], local: Any, remote: Any) -> None:
        self.cuts = cuts
        self.local = local
        self.remote = remote

    def entries(self, start: int, end: int) -> list[int] | None:
        """Of exactly [start, end); None if it isn't cut there."""
        first, last = bisect_left(self.cuts, start), bisect_left(self.cuts, end)
        if self.cuts[first] != start or self.cuts[last] != end:
            return None
        return list(range(first + 1, last + 1))

    def release(self) -> None:
        """Free what the library keeps. The agent ends only when nobody holds these any more."""
        (local, self.local), (remote, self.remote) = (self.local, None), (self.remote, None)
        for prepared in (local, remote):
            if prepared is not None:
                prepared.release()


class Posted:
    """A read that was posted, until it is done."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def release(self) -> None:
        request, self.request = self.request, None
        if request is not None:
            request.release()


def cut(local: Extents, remote: Extents, start: int, end: int, step: int) -> array[int]:
    """Where [start, end) is cut: wherever a piece of either side ends, and every `step`."""
    points = {start, end, *range(start - start % step + step, end, step)}
    for extents in (local, remote):
        points.update(point for point in extents.starts if start < point < end)
    return array("Q", sorted(points))


class Agent:
    """One agent of the library. NixlError, or what the library raises, if it can't be made."""

    def __init__(self, module: str, rdma: bool) -> None:
        nixl = _load(module)
        for quiet in (module, "nixl", "nixl._api", f"{module}._api"):
            logging.getLogger(quiet).setLevel(logging.WARNING)
        self.name = f"thub-{secrets.token_hex(8)}"
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent: Any = nixl.nixl_agent(self.name, config)
        # Shared memory can't tell of a failed peer, and would be left out if it had to.
        self._agent.create_backend(
            "UCX",
            {
                "engine_config": f"TLS={UCX_TRANSPORTS}",
                "ucx_error_handling_mode": "peer" if rdma else "none",
            },
        )
        self._targets: dict[tuple[Span, ...], tuple[Any, weakref.ref[Region]]] = {}
        self._lists: OrderedDict[tuple[bytes, bytes, bytes], Lists] = OrderedDict()
        self._posted: set[Posted] = set()
        self._made: set[Lists] = set()
        """Lists that are not kept."""
        self.row = (ctypes.c_char * ROW)()
        """Where a card's seals are read to."""
        self.row_at = ctypes.addressof(self.row)
        self.register(((self.row_at, ROW),))
        self.tables: OrderedDict[bytes, tuple[str, Extents]] = OrderedDict()
        """By card: the name of its agent, and the table."""

    # --- memory --------------------------------------------------------------------------

    def register(self, pieces: tuple[Span, ...]) -> Any:
        """Register host memory; returns what `deregister` and `metadata` take."""
        return self._agent.register_memory([(a, n, 0, "") for a, n in pieces], "DRAM")

    def deregister(self, registered: Any) -> None:
        self._agent.deregister_memory(registered)

    def metadata(self, registered: Any, connect: bool) -> bytes:
        """What another agent must know to read it, and with `connect` to reach this one."""
        told: bytes = self._agent.get_partial_agent_metadata(registered, inc_conn_info=connect)
        return told

    def progress(self) -> None:
        """Answer whoever connects. Notifications aren't used: they are dropped."""
        self._agent.get_new_notifs()

    def target(self, region: Region) -> None:
        """Register the memory of `region` to read into, once."""
        key = spans(region.extents)
        known = self._targets.get(key)
        if known is None or known[1]() is None:
            self.forget_dead()  # others may have been put where they lay
            if key:
                self._targets[key] = (self.register(key), weakref.ref(region))

    def forget(self, key: tuple[Span, ...]) -> None:
        """Read no more into this memory."""
        known = self._targets.pop(key, None)
        if known is not None:
            self._drop_lists()
            self.deregister(known[0])

    def forget_all(self) -> None:
        """Read no more into any memory that is known."""
        for key in list(self._targets):
            self.forget(key)

    def forget_dead(self) -> None:
        """Forget the memory of regions that nobody holds any more."""
        for key in [key for key, (_, region) in self._targets.items() if region() is None]:
            self.forget(key)

    # --- reading -------------------------------------------------------------------------

    def meet(self, metadata: bytes) -> str:
        """Learn of another agent, or of more of its memory; returns its name."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def lists(
        self,
        card: bytes,
        address: int,
        into: Region,
        bounds: tuple[int, int],
        step: int,
    ) -> Lists:
        """Lists for reading `bounds` of what is on the card at `address` into that of `into`.

        Those of a whole layout are kept.
        """
        whole = bounds == (0, into.layout.num_bytes)
        key = (card, into.extents.addresses.tobytes(), into.extents.lengths.tobytes())
        if whole and key in self._lists:
            self._lists.move_to_end(key)
            return self._lists[key]
        name, table = self.tables[card]
        cuts = cut(into.extents, table, *bounds, step)
        local, remote = [(self.row_at, ROW, 0)], [(address, ROW, 0)]
        for start, end in itertools.pairwise(cuts):
            local.append((into.pieces(start, end - start)[0], end - start, 0))
            remote.append((table.pieces(start, end - start)[0], end - start, 0))
        made = Lists(cuts, self._prepare("NIXL_INIT_AGENT", local), self._prepare(name, remote))
        if whole:
            self._lists[key] = made
            while len(self._lists) > MAX_LISTS:
                self._lists.popitem(last=False)[1].release()
        else:
            self._made.add(made)
        return made

    def drop(self, lists: Lists) -> None:
        """Lists of a part of a layout: they are not used again."""
        self._made.discard(lists)
        lists.release()

    def _prepare(self, name: str, pieces: list[tuple[int, int, int]]) -> Any:
        return self._agent.prep_xfer_dlist(name, pieces, "DRAM")

    def _drop_lists(self) -> None:
        while self._lists:
            self._lists.popitem()[1].release()

    def fetch(self, name: str, here: int, there: int, size: int) -> Posted:
        """Start reading `size` bytes at the address `there` to `here`; `done` tells of it."""
        lists = Lists(
            array("Q"),
            self._prepare("NIXL_INIT_AGENT", [(here, size, 0)]),
            self._prepare(name, [(there, size, 0)]),
        )
        try:
            return self._post(lists, [0])
        finally:
            lists.release()

    def post(self, lists: Lists, entries: list[int]) -> Posted:
        """Start reading the seals and these entries; `done` tells of it."""
        return self._post(lists, [0, *entries])

    def _post(self, lists: Lists, entries: list[int]) -> Posted:
        request = self._agent.make_prepped_xfer("READ", lists.local, entries, lists.remote, entries)
        posted = Posted(request)
        self._posted.add(posted)
        if self._agent.transfer(request) == "ERR":
            raise NixlError("the read could not be posted")
        return posted

    def done(self, posted: Posted) -> bool:
        """Whether the bytes of a posted read are there. Raises if they won't come."""
        state = self._agent.check_xfer_state(posted.request)
        if state == "ERR":
            raise NixlError("the read failed")
        if state != "DONE":
            return False
        self._posted.discard(posted)
        posted.release()
        return True

    @property
    def quiet(self) -> bool:
        """Nothing that was posted may still land."""
        return not self._posted

    def close(self) -> None:
        """The end of the agent. Nothing lands any more, and nobody reads here any more."""
        everything: list[Posted | Lists] = [*self._posted, *self._made, *self._lists.values()]
        for held in everything:
            with contextlib.suppress(Exception):
                held.release()
        self._posted.clear()
        self._made.clear()
        self._lists.clear()
        self._targets.clear()
        self._agent = None


class NixlError(Exception):
    """The library says no, without saying why."""
