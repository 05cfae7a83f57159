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

    read, write, mark   DirectoryRead/Write to the owners that quorum.py says; to the silent ones
                        again each `retry_interval`, and at once to all when the owners change.
                        What W owners have taken is offered to the others for `LAGS` more tries:
                        an owner that knows only a part may refuse what they take
    watch               DirectoryWatch to all owners, and again well before it lapses, with the
                        fingerprint of what is known of the key (views.py): a change whose push
                        got lost is told then (watchers.py). So nobody has to poll
    members_changed     DirectoryCheck to the new owners of keys with own registers, as below, over
                        `rewrite_jitter` or, if there are many, at `rewrite_rate`: a join or a death
                        makes no storm. Marks of such keys again, to all owners
    let_go              the register is withdrawn, `forget_hidden_after` later
    every repair_interval (jittered)  DirectoryCheck to the owners of each key with own registers:
                        the fingerprint of what they should hold; less often where nobody needs
                        it any more (own.py). Who holds something else
                        answers DirectoryLacks, and is told what it lacks (own.py)

A refused write may have been stored by a minority. The directory then writes what stood
there before (or a withdrawal) with a higher sequence, so that the refused value fades.

What ends a request: done, one refusal, its deadline, `cancel`. Events carry the number
that the call returned; they may come before the call returns when this peer is the only
owner, as they wait in the outbox.

What bounds it: requests by their callers' deadlines, remembered registers as own.py says,
watches by what its callers watch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.own import OwnRegisters, Place
from tensorhub_p2p.protocol.directory.owner import Admit, Owner, Refusal, admit_all
from tensorhub_p2p.protocol.directory.quorum import Request
from tensorhub_p2p.protocol.directory.registers import Mark
from tensorhub_p2p.protocol.directory.ring import Owners, Ring, owners_hash
from tensorhub_p2p.protocol.directory.views import Views
from tensorhub_p2p.protocol.directory.warming import Reachable
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    DirectoryChanged,
    DirectoryCheck,
    DirectoryLacks,
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
)

__all__ = ["Admit", "Directory", "Refusal", "admit_all"]

FOREVER = float("inf")
RARELY = 6
"""Keys in which nobody needs what is written are compared each so many rounds."""
LAGS = 40
"""Tries for which owners that a done write doesn't need are asked on: until the writer's registers
are compared."""
RENEWAL = 0.4
"""A watch is renewed when this part of its time is over: twice before it lapses."""

_FOR_OWNER = (
    DirectoryWrite,
    DirectoryRead,
    DirectoryMerge,
    DirectoryMerged,
    DirectoryWatch,
    DirectoryCheck,
)


@dataclass(frozen=True)
class ReadDone(Event):
    """What R owners hold of the key, merged; withdrawn registers are left out."""

    request: int
    key: Key
    registers: tuple[Register, ...]


@dataclass(frozen=True)
class WriteDone(Event):
    """W owners have it. What they say of the key's buckets: see `DirectoryWritten`."""

    request: int
    key: Key
    crowded: bool = False
    buckets: int = 1
    sure_buckets: int = 1
    """So many are known to each of the W owners."""
    seen: tuple[Register, ...] | None = None
    """What all owners held right after it; None if it wasn't asked, or not all have said so."""


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
    """A watched key changed, or may have, or what it says counts again.

    `Directory.known` is what it holds now, if that was told; else read it. Comes once for each
    owner that tells, and once for an own write.
    """

    key: Key


@dataclass(frozen=True)
class OwnersDiffer(Event):
    """This peer takes others for the owners of a key: membership should compare views with it."""

    peer: PeerId


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
        self._timers: list[tuple[float, int]] = []
        """When to look at which request; stale ones, whose request has another time, too."""
        self._last_request = 0
        self._own = OwnRegisters(me, config.keep_former_seconds)
        self._repairs: dict[Place, int] = {}
        """By register: the request that writes it again."""
        self._rewrites: list[tuple[float, Place]] = []
        """When to write which mark again, as its owners have changed."""
        self._checks: list[tuple[float, Key, Owners]] = []
        """When to compare which key with which of its owners."""
        self._repair_at: float | None = None
        self._repairs_begun = 0
        self._watched: dict[Key, Owners] = {}
        self._pins_watched: set[Key] = set()
        """Of the watched keys those of whose pins this peer is told."""
        self._views = Views()
        """What is known of watched keys."""
        self._watch_at: float | None = None

    def owners(self, key: Key) -> Owners:
        """The key's owners by the own ring."""
        return self._owner.owners(key)

    @property
    def members(self) -> Owners:
        """The members of the own ring."""
        return self._owner.ring.members

    # -- what the protocols above ask --

    def read(self, now: float, key: Key, deadline: float = FOREVER, *, agreed: bool = False) -> int:
        """Read the key from R owners; ends in ReadDone or RequestExpired.

        `agreed`: only what W owners are known to hold.
        """
        return self._begin(now, Request(self._number(), key, deadline, agreed=agreed))

    def write(
        self,
        now: float,
        key: Key,
        name: str,
        generation: int,
        value: Value | None,
        deadline: float = FOREVER,
        buckets: int = 1,
        *,
        looks: bool = False,
        agreed: bool = False,
    ) -> int:
        """Write the own register `name` to W owners; the key is one of so many `buckets`.

        `looks`: and see what they hold then; `agreed`: only what W of them do (quorum.py).
        Ends in WriteDone, WriteRefused or RequestExpired. The register is rewritten to new
        owners from now on, also after it expired, until another write replaces it.
        """
        place = (key, name)
        before = self._own.get(place)
        register = self._own.put(now, place, generation, value)
        self._plan_repair(now)
        request = Request(
            self._number(),
            key,
            deadline,
            register,
            agreed,
            looks,
            before=before,
            buckets=buckets,
        )
        return self._begin(now, request)

    def withdraw(
        self, now: float, key: Key, name: str, generation: int, deadline: float = FOREVER
    ) -> int:
        """Withdraw the own register `name`: a write of no value."""
        return self.write(now, key, name, generation, None, deadline)

    def holds(self, key: Key, name: str) -> Value | None:
        """What this peer says under this name; None if it is nothing, or withdrawn."""
        register = self._own.get((key, name))
        return register.value if register is not None else None

    def copy(self, key: Key) -> tuple[Register, ...]:
        """What this peer holds of the key as an owner, or as a former one; for those who look on.

        Withdrawn registers too.
        """
        return self._owner.copy(key)

    def let_go(self, now: float, key: Key, name: str) -> None:
        """Nobody needs what the own register `name` says any more.

        It is withdrawn `forget_hidden_after` seconds later, unless it is written before.
        """
        self._own.let_go((key, name), now + self._config.forget_hidden_after)

    def mark(self, now: float, key: Key, value: Mark, deadline: float = FOREVER) -> int:
        """Write a mark, which belongs to nobody and is the same whoever writes it."""
        register = self._own.put_mark(key, value)
        self._plan_repair(now)
        return self._begin(now, Request(self._number(), key, deadline, register))

    def cancel(self, request: int) -> None:
        """Forget a request: no event will come. A write may still happen."""
        self._requests.pop(request, None)

    def watch(self, now: float, key: Key, *, pins: bool = False) -> None:
        """Be told of changes of the key by KeyChanged, until `unwatch`; of `pins`, too, or not."""
        if key not in self._watched or (pins and key not in self._pins_watched):
            self._watched[key] = self.owners(key)
            if pins:
                self._pins_watched.add(key)
            self._views.begin(key)
            self._send_watch(now, key, self._config.watch_seconds)
            if self._watch_at is None:
                self._watch_at = now + self._config.watch_seconds * RENEWAL

    def unwatch(self, now: float, key: Key) -> None:
        if self._watched.pop(key, None) is not None:
            self._send_watch(now, key, 0.0)
            self._views.end(key)
            self._pins_watched.discard(key)

    def known(self, key: Key) -> tuple[Register, ...] | None:
        """What a watched key holds, as far as was read and told since; None: read it (views.py)."""
        return self._views.known(key)

    # -- what membership tells --

    def members_changed(self, now: float, members: Sequence[PeerId]) -> None:
        """The ring's members are now these."""
        before = self._owner.ring
        ring = before.of_members(members)
        returned = self._owner.ring_changed(now, ring)
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
                self._views.lose(key)
                self._send_watch(now, key, self._config.watch_seconds)
                self.outbox.emit(KeyChanged(key))
            elif returned:
                # No register has changed, but what its writer says counts again.
                self.outbox.emit(KeyChanged(key))
        self._plan_checks(now, before)

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
        while (due := self._next_timer()) is not None and due <= now:
            request = self._requests[heappop(self._timers)[1]]
            if now >= request.deadline:
                self._expire(request)
            else:
                self._ask(now, request)
        if self._watch_at is not None and now >= self._watch_at:
            self._renew_watches(now)
        self._repair_due(now)

    def next_wakeup(self) -> float | None:
        return earliest(
            self._owner.next_wakeup(),
            self._next_timer(),
            self._watch_at,
            self._repair_at,
            self._rewrites[0][0] if self._rewrites else None,
            self._checks[0][0] if self._checks else None,
            self._own.next_due(),
        )

    # -- requests --

    def _next_timer(self) -> float | None:
        while self._timers:
            due, number = self._timers[0]
            request = self._requests.get(number)
            if request is not None and request.due == due:
                return due
            heappop(self._timers)
        return None

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
        if request.quiet:
            self._forget_repair(request)
        else:
            del self._requests[request.number]
            self.outbox.emit(event)

    def _forget_repair(self, request: Request) -> None:
        del self._requests[request.number]
        if request.register is not None:
            self._repairs.pop((request.key, request.register.name), None)

    def _ask(self, now: float, request: Request) -> None:
        """Ask the owners that haven't answered; the own part is answered before this returns."""
        owners = request.to_ask(self.me)
        config = self._config
        hedged = not request.rounds and (request.register is None or request.looks)
        request.rounds += 1
        request.retry_at = now + (config.read_patience if hedged else config.retry_interval)
        heappush(self._timers, (request.due, request.number))
        self._conclude(now, request)
        message = request.message()
        for peer in owners:
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
            self._changed(message)
            return
        if isinstance(message, DirectoryLacks):
            self._on_lacks(now, sender, message)
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
            heappush(self._timers, (request.due, request.number))
        elif isinstance(message, DirectoryValue) and message.warming:
            request.heard[sender] = None
            if not writing and not request.widened:
                request.widened = True
                self._ask(now, request)
        elif isinstance(message, DirectoryValue) and not writing:
            request.answer(sender, message.registers)
            self._conclude(now, request)
        elif isinstance(message, DirectoryWritten) and writing:
            request.answer(sender, message.registers)
            request.crowded = request.crowded or message.crowded
            request.known[sender] = message.buckets
            self._conclude(now, request)
        elif isinstance(message, DirectoryRefused) and writing:
            self._refuse(now, request, message)

    def _changed(self, message: DirectoryChanged) -> None:
        key, registers = message.key, message.registers
        if key not in self._watched:
            return
        if registers:
            self._views.tell(key, registers)
        else:
            self._views.lose(key)
        self.outbox.emit(KeyChanged(key))

    def _owners_differ(self, peer: PeerId) -> None:
        self.outbox.emit(OwnersDiffer(peer))

    def _conclude(self, now: float, request: Request) -> None:
        if not request.done or request.number not in self._requests:
            return
        if request.register is None:
            registers = request.merged()
            if not request.agreed:
                self._views.read(request.key, registers)
            self._end(request, ReadDone(request.number, request.key, registers))
        elif request.lags:
            self._forget_repair(request)
        else:
            self._written(now, request, request.register)

    def _written(self, now: float, request: Request, register: Register) -> None:
        done = WriteDone(
            request.number,
            request.key,
            request.crowded,
            max((request.buckets, *request.known.values())),
            request.sure_buckets,
            request.seen,
        )
        was_quiet = request.quiet
        self._end(request, done)
        # Its owners don't tell the writer.
        self._views.tell(request.key, (register,))
        if request.key in self._watched and not was_quiet:
            self.outbox.emit(KeyChanged(request.key))
        if len(request.answers) < len(request.owners):
            request.lags, request.quiet, request.looks = True, True, False
            request.deadline = now + LAGS * self._config.retry_interval
            self._requests[request.number] = request
            self._repairs[(request.key, register.name)] = request.number

    def _refuse(self, now: float, request: Request, refused: DirectoryRefused) -> None:
        because, key = refused.because, request.key
        self._end(request, WriteRefused(request.number, key, refused.reason, because))
        register = request.register
        if request.quiet or register is None:
            return
        place = (key, register.name)
        if self._own.get(place) is not register:
            return
        if register.writer != self.me:
            self._own.drop_mark(place)
            return
        before = request.before.value if request.before else None
        self._own.put(now, place, register.generation, before)
        self._rewrite(now, place)

    def _expire(self, request: Request) -> None:
        self._end(request, RequestExpired(request.number, request.key, request.silent()))

    # -- own registers --

    def _plan_repair(self, now: float) -> None:
        if self._repair_at is None:
            jitter = 0.5 + self._rng.random()
            self._repair_at = now + self._config.repair_interval * jitter

    def _plan_checks(self, now: float, before: Ring) -> None:
        """The ring has changed: look at new owners of what is written here, not all at once."""
        moved: dict[Key, Owners] = {}
        for key in self._own.keys:
            earlier = before.owners(key, self._config.replicas)
            fresh = tuple(peer for peer in self.owners(key) if peer not in earlier)
            if fresh:
                moved[key] = fresh
        marks = [place for place in self._own.marks() if place[0] in moved]
        spread = self._spread(len(moved) + len(marks))
        for key, fresh in moved.items():
            heappush(self._checks, (now + self._rng.random() * spread, key, fresh))
        for place in marks:
            heappush(self._rewrites, (now + self._rng.random() * spread, place))

    def _spread(self, count: int) -> float:
        """Seconds over which so many things to repair are spread."""
        return max(self._config.rewrite_jitter, count / self._config.rewrite_rate)

    def _repair_due(self, now: float) -> None:
        for place, register in self._own.due(now):
            self._own.put(now, place, register.generation, None)
            self._rewrite(now, place)
        while self._rewrites and self._rewrites[0][0] <= now:
            self._rewrite(now, heappop(self._rewrites)[1])
        if self._repair_at is not None and now >= self._repair_at:
            self._repair_at = None
            self._own.prune(now)
            self._repairs_begun += 1
            rare = self._repairs_begun % RARELY == 0
            keys = [key for key in self._own.keys if rare or not self._own.is_over(key)]
            spread = self._spread(len(keys))
            self._checks = [(now + self._rng.random() * spread, key, ()) for key in keys]
            heapify(self._checks)
            if self._own.keys:
                self._plan_repair(now)
        while self._checks and self._checks[0][0] <= now:
            _, key, fresh = heappop(self._checks)
            self._check(now, key, fresh)

    def _check(self, now: float, key: Key, only: Owners) -> None:
        """Compare what is written under this key with what its owners hold, or `only` these."""
        owners = self.owners(key)
        check = DirectoryCheck(key, owners_hash(owners), self._own.fingerprint(key))
        for peer in owners:
            if not only or peer in only:
                self._post(now, peer, check)

    def _on_lacks(self, now: float, sender: PeerId, message: DirectoryLacks) -> None:
        """An owner holds something else: tell it what it lacks. If that is lost, so be it."""
        owners = self.owners(message.key)
        if sender not in owners:
            return
        for register in self._own.missing(now, message.key, message.held):
            self._post(now, sender, DirectoryWrite(0, message.key, owners_hash(owners), register))

    def _rewrite(self, now: float, place: Place) -> None:
        """Write an own register again, for owners that may lack it; nobody waits for it."""
        register = self._own.get(place)
        if register is None:
            return
        deadline = now + self._config.repair_interval
        self._begin(now, Request(self._number(), place[0], deadline, register, quiet=True))

    # -- watches --

    def _send_watch(self, now: float, key: Key, seconds: float) -> None:
        seen, pins = self._views.seen(key), key in self._pins_watched
        message = DirectoryWatch(key, seconds, seen, pins)
        for peer in self.owners(key):
            self._post(now, peer, message)

    def _renew_watches(self, now: float) -> None:
        self._watch_at = None
        if self._watched:
            self._watch_at = now + self._config.watch_seconds * RENEWAL
            for key in list(self._watched):
                self._send_watch(now, key, self._config.watch_seconds)
