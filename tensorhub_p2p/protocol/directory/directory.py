"""The directory: who has what, kept by the members themselves.

Rules of this file. One `Directory` belongs to each peer. It is both sides: the owner of
the keys that the ring gives this peer (`owner.py`), and the client that reads, writes and
watches keys for the protocols above. It knows nothing of what the registers mean: what
may be written is decided by the admission policy that it is given.

Theory of operation. Every key lives on its n = min(3, members) ring successors, and a
request is done when a majority has answered (`quorum.py`). The own part of a request is
done at once, with no message. Requests carry the hash of the owner list; who disagrees
says so, and has the driver let membership compare the two views (`OwnersDiffer`), and tell
the directory what became of it (`members_changed`), which aims the requests anew. Two that
disagree thus agree within two round trips, and no request is answered by a wrong set of owners.

Who sends what when, as a client:

    read, write, mark   DirectoryRead/Write to all owners at once; to the silent ones again
                        each `retry_interval`, and at once to all when the owners change
    watch               DirectoryWatch to all owners, and again well before it lapses
    members_changed     own registers of keys with new owners again, within `rewrite_jitter`
    every repair_interval (jittered)  all own registers again: repairs owners that lost them

A refused write may have been stored by a minority. The directory then writes what stood
there before (or a withdrawal) with a higher sequence, so that the refused value fades.

What ends a request: done, one refusal, its deadline, `cancel`. Events carry the number
that the call returned; they may come before the call returns when this peer is the only
owner, as they wait in the outbox.

What bounds it: requests by their callers' deadlines, remembered registers by the number
of names in use (`MAX_WITHDRAWN` withdrawn ones and `MAX_MARKS` marks besides).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.owner import Admit, Owner, Refusal, admit_all
from tensorhub_p2p.protocol.directory.quorum import Request
from tensorhub_p2p.protocol.directory.registers import of_mark
from tensorhub_p2p.protocol.directory.ring import Owners, Ring
from tensorhub_p2p.protocol.directory.warming import Reachable
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    DirectoryChanged,
    DirectoryMerge,
    DirectoryMerged,
    DirectoryMismatch,
    DirectoryRead,
    DirectoryRefused,
    DirectoryValue,
    DirectoryWatch,
    DirectoryWrite,
    DirectoryWritten,
    Key,
    Message,
    Register,
    Value,
    WholeMark,
)

__all__ = ["Admit", "Directory", "Refusal", "admit_all"]

MAX_MARKS = 64
MAX_WITHDRAWN = 1024
FOREVER = float("inf")

_FOR_OWNER = (DirectoryWrite, DirectoryRead, DirectoryMerge, DirectoryMerged, DirectoryWatch)


@dataclass(frozen=True)
class ReadDone(Event):
    """What R owners hold of the key, merged; withdrawn registers are left out."""

    request: int
    key: Key
    registers: tuple[Register, ...]


@dataclass(frozen=True)
class WriteDone(Event):
    """W owners have it."""

    request: int
    key: Key


@dataclass(frozen=True)
class WriteRefused(Event):
    """An owner refused it; `because` is the register that forbids it, if one does."""

    request: int
    key: Key
    reason: str
    because: Register | None


@dataclass(frozen=True)
class RequestExpired(Event):
    """The deadline passed. `silent` owners said nothing; with none silent, they disagreed."""

    request: int
    key: Key
    silent: tuple[PeerId, ...]


@dataclass(frozen=True)
class KeyChanged(Event):
    """A watched key changed at an owner, or may have: read it. Comes once for each owner."""

    key: Key


@dataclass(frozen=True)
class OwnersDiffer(Event):
    """This peer takes others for the owners of a key: membership should compare views with it."""

    peer: PeerId


Place = tuple[Key, str]
"""Where an own register lives: key and name."""


class Directory:
    """One peer's directory, with the common four-part face.

    `admit` decides on writes at this peer as an owner, and `reachable` is whether membership
    holds a peer for neither dead nor left (without it: the ring's members are).
    The ring is this peer alone until the first `members_changed`.
    """

    def __init__(
        self,
        me: PeerId,
        config: DirectoryConfig,
        rng: Random,
        admit: Admit,
        reachable: Reachable | None = None,
    ) -> None:
        self.me = me
        self.outbox = Outbox()
        self._config = config
        self._rng = rng
        ring = Ring.of((me,), config.virtual_nodes)
        differs = self._owners_differ
        self._owner = Owner(me, ring, config, rng, admit, self._post, differs, reachable)
        self._requests: dict[int, Request] = {}
        self._last_request = 0
        self._last_sequence = 0
        self._mine: dict[Place, Register] = {}
        self._marks: dict[Place, Register] = {}
        self._repairs: dict[Place, int] = {}
        self._rewrites: list[tuple[float, Key, str]] = []
        self._repair_at: float | None = None
        self._watched: dict[Key, Owners] = {}
        self._watch_at: float | None = None

    def owners(self, key: Key) -> Owners:
        """The key's owners by the own ring."""
        return self._owner.owners(key)

    @property
    def members(self) -> Owners:
        """The members of the own ring."""
        return self._owner.ring.members

    # -- what the protocols above ask --

    def read(self, now: float, key: Key, deadline: float = FOREVER) -> int:
        """Read the key from R owners; ends in ReadDone or RequestExpired."""
        return self._begin(now, Request(self._number(), key, deadline))

    def write(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value | None,
        deadline: float = FOREVER,
    ) -> int:
        """Write the own register `name` to W owners.

        Ends in WriteDone, WriteRefused or RequestExpired. The register is rewritten to new
        owners from now on, also after it expired, until another write replaces it.
        """
        place = (key, name)
        before = self._mine.get(place)
        register = self._remember(place, generation, value)
        self._plan_repair(now)
        return self._begin(now, Request(self._number(), key, deadline, register, before=before))

    def withdraw(
        self, now: float, key: Key, name: str, generation: int, deadline: float = FOREVER
    ) -> int:
        """Withdraw the own register `name`: a write of no value."""
        return self.write(now, key, name, generation, None, deadline)

    def mark(self, now: float, key: Key, value: WholeMark, deadline: float = FOREVER) -> int:
        """Write a mark, which belongs to nobody and is the same whoever writes it."""
        register = of_mark(value)
        self._marks[(key, register.name)] = register
        if len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]
        self._plan_repair(now)
        return self._begin(now, Request(self._number(), key, deadline, register))

    def cancel(self, request: int) -> None:
        """Forget a request: no event will come. A write may still happen."""
        self._requests.pop(request, None)

    def watch(self, now: float, key: Key) -> None:
        """Be told of changes of the key by KeyChanged, until `unwatch`."""
        if key not in self._watched:
            self._watched[key] = self.owners(key)
            self._send_watch(now, key, self._config.watch_seconds)
            if self._watch_at is None:
                self._watch_at = now + self._config.watch_seconds * 0.4

    def unwatch(self, now: float, key: Key) -> None:
        if self._watched.pop(key, None) is not None:
            self._send_watch(now, key, 0.0)

    # -- what membership tells --

    def members_changed(self, now: float, members: Sequence[PeerId]) -> None:
        """The ring's members are now these."""
        before = self._owner.ring
        ring = before.of_members(members)
        self._owner.ring_changed(now, ring)
        if ring is before:
            return
        for request in list(self._requests.values()):
            owners = self.owners(request.key)
            if request.number in self._requests and owners != request.owners:
                request.aim(owners)
                self._ask(now, request)
        for key, owners in list(self._watched.items()):
            if owners != self.owners(key):
                self._watched[key] = self.owners(key)
                self._send_watch(now, key, self._config.watch_seconds)
                self.outbox.emit(KeyChanged(key))
        for key, name in (*self._mine, *self._marks):
            if before.owners(key, self._config.replicas) != self.owners(key):
                when = now + self._rng.random() * self._config.rewrite_jitter
                heappush(self._rewrites, (when, key, name))

    def was_absent(self, now: float) -> None:
        """This peer was paused, cut off or held for silent: its copies may be behind."""
        self._owner.was_absent(now)

    def forget(self, writers: Collection[PeerId]) -> None:
        """As an owner, drop all that these peers wrote; for peers that are dead for good."""
        self._owner.forget(writers)

    # -- the four-part face --

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, _FOR_OWNER):
            self._owner.receive(now, sender, message)
        else:
            self._take_answer(now, sender, message)

    def tick(self, now: float) -> None:
        self._owner.tick(now)
        for request in list(self._requests.values()):
            if now >= request.deadline:
                self._expire(request)
            elif now >= request.retry_at:
                self._ask(now, request)
        if self._watch_at is not None and now >= self._watch_at:
            self._renew_watches(now)
        self._repair_due(now)

    def next_wakeup(self) -> float | None:
        requests = [min(r.retry_at, r.deadline) for r in self._requests.values()]
        rewrite = self._rewrites[0][0] if self._rewrites else None
        return earliest(
            self._owner.next_wakeup(), *requests, self._watch_at, self._repair_at, rewrite
        )

    # -- requests --

    def _number(self) -> int:
        self._last_request += 1
        return self._last_request

    def _begin(self, now: float, request: Request) -> int:
        """Aim the request at the key's owners. It replaces a repair of the same register."""
        if request.register is not None:
            place = (request.key, request.register.name)
            self._requests.pop(self._repairs.pop(place, 0), None)
            if request.quiet:
                self._repairs[place] = request.number
        self._requests[request.number] = request
        request.aim(self.owners(request.key))
        self._ask(now, request)
        return request.number

    def _end(self, request: Request, event: Event) -> None:
        """The request is over; of a repair nobody is told."""
        del self._requests[request.number]
        if not request.quiet:
            self.outbox.emit(event)
        elif request.register is not None:
            self._repairs.pop((request.key, request.register.name), None)

    def _ask(self, now: float, request: Request) -> None:
        """Ask the owners that haven't answered; the own part is answered before this returns."""
        request.retry_at = now + self._config.retry_interval
        self._conclude(request)
        message = request.message()
        for peer in sorted(request.unanswered(), key=self.me.__ne__):
            if request.number in self._requests:
                self._post(now, peer, message)

    def _post(self, now: float, to: PeerId, message: Message) -> None:
        """Send; what is for this very peer needs no message."""
        if to == self.me:
            self.receive(now, self.me, message)
        else:
            self.outbox.send(to, message)

    def _take_answer(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, DirectoryChanged):
            if message.key in self._watched:
                self.outbox.emit(KeyChanged(message.key))
            return
        if not isinstance(
            message, (DirectoryMismatch, DirectoryValue, DirectoryWritten, DirectoryRefused)
        ):
            return
        request = self._requests.get(message.request)
        if request is None or sender not in request.owners:
            return
        writing = request.register is not None
        if isinstance(message, DirectoryMismatch):
            request.disagree(now, sender, self._config.mismatch_pause, self._config.retry_interval)
        elif isinstance(message, DirectoryValue) and message.warming:
            request.heard[sender] = None
        elif isinstance(message, DirectoryValue) and not writing:
            request.answer(sender, message.registers)
            self._conclude(request)
        elif isinstance(message, DirectoryWritten) and writing:
            request.answer(sender)
            self._conclude(request)
        elif isinstance(message, DirectoryRefused) and writing:
            self._refuse(now, request, message)

    def _owners_differ(self, peer: PeerId) -> None:
        self.outbox.emit(OwnersDiffer(peer))

    def _conclude(self, request: Request) -> None:
        if not request.done or request.number not in self._requests:
            return
        if request.register is None:
            self._end(request, ReadDone(request.number, request.key, request.merged()))
        else:
            self._end(request, WriteDone(request.number, request.key))

    def _refuse(self, now: float, request: Request, refused: DirectoryRefused) -> None:
        because, key = refused.because, request.key
        self._end(request, WriteRefused(request.number, key, refused.reason, because))
        register = request.register
        if request.quiet or register is None:
            return
        place = (key, register.name)
        if self._marks.get(place) is register:
            del self._marks[place]
        elif self._mine.get(place) is register:
            before = request.before.value if request.before else None
            self._remember(place, register.generation, before)
            self._rewrite(now, place)

    def _expire(self, request: Request) -> None:
        self._end(request, RequestExpired(request.number, request.key, request.silent()))

    # -- own registers --

    def _remember(self, place: Place, generation: int, value: Value | None) -> Register:
        """A new register for this place, above the one before, kept for later owners."""
        self._last_sequence += 1
        register = Register(self.me, place[1], generation, self._last_sequence, value)
        self._mine.pop(place, None)
        self._mine[place] = register
        if value is None and len(self._mine) > MAX_WITHDRAWN:
            withdrawn = [p for p, r in self._mine.items() if r.value is None]
            for old in withdrawn[:-MAX_WITHDRAWN]:
                del self._mine[old]
        return register

    def _plan_repair(self, now: float) -> None:
        if self._repair_at is None:
            jitter = 0.5 + self._rng.random()
            self._repair_at = now + self._config.repair_interval * jitter

    def _repair_due(self, now: float) -> None:
        while self._rewrites and self._rewrites[0][0] <= now:
            _, key, name = heappop(self._rewrites)
            self._rewrite(now, (key, name))
        if self._repair_at is not None and now >= self._repair_at:
            self._repair_at = None
            for place in (*self._mine, *self._marks):
                when = now + self._rng.random() * self._config.rewrite_jitter
                heappush(self._rewrites, (when, *place))
            self._plan_repair(now)

    def _rewrite(self, now: float, place: Place) -> None:
        """Write an own register again, for owners that may lack it; nobody waits for it."""
        register = self._mine.get(place) or self._marks.get(place)
        if register is None:
            return
        deadline = now + self._config.repair_interval
        self._begin(now, Request(self._number(), place[0], deadline, register, quiet=True))

    # -- watches --

    def _send_watch(self, now: float, key: Key, seconds: float) -> None:
        for peer in self.owners(key):
            self._post(now, peer, DirectoryWatch(key, seconds))

    def _renew_watches(self, now: float) -> None:
        self._watch_at = None
        if self._watched:
            self._watch_at = now + self._config.watch_seconds * 0.4
            for key in self._watched:
                self._send_watch(now, key, self._config.watch_seconds)
