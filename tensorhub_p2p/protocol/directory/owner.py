"""The owner's side of the directory: stores what others write, and answers what they read.

Rules of this file. An `Owner` serves the keys that its own ring gives it. It never
starts a write; what it merges it asks for. Whether a write is allowed is the admission
policy's business (`Admit`), given from outside. Replies leave by `post`.

Who sends what when:

    DirectoryWrite -> DirectoryWritten      stored, or already superseded; with what is held of
                                            the key now, if that is asked; no word about a
                                            repair (request 0)
                   -> DirectoryValue(warming) the owner can't judge it yet; one of the
                                            others follows as soon as it can
                   -> DirectoryRefused      the policy forbids it, or there is no room
                   -> DirectoryMismatch     another owner list than by the own ring, or
                                            the key is closed (warming.py)
    DirectoryRead  -> DirectoryValue        or, from an owner that isn't warm yet,
                                            DirectoryValue(warming) now and the full one
                                            as soon as it is
                   -> DirectoryMismatch     as above
    DirectoryMerge -> DirectoryMerged       always: cold or warm, owner or not; but none to
                                            a notice that the key exists (request 0)
    DirectoryWatch -> DirectoryChanged      at each change by others, until it lapses
                                            (watchers.py)
    DirectoryCheck -> DirectoryLacks        if other registers of that writer are held here

Warming owners and writes. What an owner that isn't warm acknowledges counts for W, as far
as nothing but the writer's own register depends on it. A *conditional* write, which other
registers may forbid, is judged by an owner that is warm, or it would be admitted by those
who know least: until then it is parked, as reads are. A register that came by a merge was
judged by another owner, with what that one knew; when its writer asks for it here, it is
judged again.

Who sent a mismatch has it told (`on_mismatch`), unless it was to a writer of another zone:
membership compares views with that peer, so that whoever is behind catches up at once.

A key is warmed when it is first heard of: by a read, a write, or a DirectoryMerge, which
the earlier owners send to new ones, soon after a change of the ring, to say that the key
exists. Nothing is handed over unasked, and a former owner keeps what it holds for a while.

What bounds it: `max_registers` in all, `max_key_registers` a key, `max_keys`. Beyond them new
ones are refused (registers), or left waiting until their deadline (reads of a new key). Twice as
many are taken of those that say that something is given up: refused, it would go on standing where
it was published.
Watchers have bounds of their own (watchers.py), and so has what was withdrawn (cells.py). Of
one key `MAX_PARKED` requests are parked; later ones ask again each `retry_interval`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from tensorhub_p2p.config import DirectoryConfig
from tensorhub_p2p.protocol.directory.buckets import WIDE, count_in, is_crowded, is_valid
from tensorhub_p2p.protocol.directory.cells import Cells
from tensorhub_p2p.protocol.directory.registers import BUCKETS_NAME, Cell
from tensorhub_p2p.protocol.directory.ring import Owners, Ring, owners_hash
from tensorhub_p2p.protocol.directory.warming import Debts, Past, Reachable, same
from tensorhub_p2p.protocol.directory.watchers import Post, Watchers
from tensorhub_p2p.protocol.identity import NOBODY, PeerId
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.messages import (
    Buckets,
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
    HolderRecord,
    Key,
    Message,
    Phase,
    Register,
    Retraction,
    VersionRecord,
    WholeMark,
)

MAX_PARKED = 1024
"""Requests for one key that wait for it to become warm."""
MAX_LISTED = 256
"""Registers that an owner lists of a writer, as messages/directory.py has it."""
MAX_LOOKED_AT = 256
"""Registers that an owner sends along with the answer to a write; of more it is asked apart."""
MAX_DEPARTED = 10_000
"""Members that left the ring and are remembered, to tell who returns."""


@dataclass(frozen=True)
class Refusal:
    """A write that the owner must not take; `because` is the register that forbids it."""

    reason: str
    because: Register | None = None


@dataclass(frozen=True)
class Admit:
    """Which writes an owner must not take."""

    refusal: Callable[[Key, Cells, Register], Refusal | None]
    """What forbids the register, given all the registers that the owner holds of the key."""
    is_conditional: Callable[[Key, Register], bool]
    """Whether that depends on what is held: only a warm owner can tell then."""

    def __call__(self, key: Key, held: Cells, register: Register) -> Refusal | None:
        return self.refusal(key, held, register)


admit_all = Admit(lambda _key, _held, _register: None, lambda _key, _register: False)
"""The policy that forbids nothing."""


@dataclass
class KeyCopy:
    """One key as one owner has it."""

    debts: Debts
    touched: float
    cells: Cells = field(default_factory=Cells)
    unjudged: dict[Cell, None] = field(default_factory=dict)
    """Conditional registers that came by a merge, with nobody asking for them here."""
    crowd: tuple[int, int, bool] = (0, 0, False)
    """For how many buckets it was judged last whether this one is crowded, holding how much, and
    what came of it."""
    merge: int = 0
    """Number of the merge under way; an answer to an earlier one is stale."""
    asked: dict[PeerId, None] = field(default_factory=dict)
    """Peers asked in this round of the merge."""
    ask_at: float = 0.0
    parked: dict[tuple[PeerId, int], DirectoryRead | DirectoryWrite] = field(default_factory=dict)
    """What waits until the key is warm, by asker and request."""


def _gives_up(register: Register) -> bool:
    """It takes back what its writer published before, here or at other owners."""
    value = register.value
    if isinstance(value, VersionRecord | HolderRecord):
        return value.phase >= Phase.WITHDRAWING
    return value is None


class Owner:
    """What one peer stores for the others."""

    def __init__(
        self,
        me: PeerId,
        ring: Ring,
        config: DirectoryConfig,
        rng: Random,
        admit: Admit,
        post: Post,
        on_mismatch: Callable[[PeerId], None],
        reachable: Reachable | None = None,
    ) -> None:
        self.me = me
        self.ring = ring
        self._config = config
        self._rng = rng
        self._admit = admit
        self._post = post
        self._on_mismatch = on_mismatch
        self._reachable = reachable or self._is_member
        self._held: dict[Key, KeyCopy] = {}
        self._count = 0
        """Registers held in all."""
        self._past = Past()
        self._members: frozenset[PeerId] = frozenset(ring.members)
        self._departed: dict[PeerId, None] = {}
        self._warming: dict[Key, KeyCopy] = {}
        self._merges: dict[int, Key] = {}
        self._last_merge = 0
        self._warm_at: float | None = None
        self._notices: list[tuple[float, Key, Owners]] = []
        """Keys whose new owners are to be told that they exist: when, and whom."""
        self._watchers = Watchers(config, post)
        self._sweep_at: float | None = None

    def _is_member(self, peer: PeerId) -> bool:
        return peer in self._members

    def owners(self, key: Key) -> Owners:
        return self.ring.owners(key, self._config.replicas)

    def copy(self, key: Key) -> tuple[Register, ...]:
        """All that is held of the key here, withdrawn registers too."""
        held = self._held.get(key)
        return held.cells.registers() if held is not None else ()

    # -- the four-part face --

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if self._sweep_at is None:
            self._sweep_at = now + self._config.watch_seconds
        if isinstance(message, DirectoryWrite):
            self._on_write(now, sender, message)
        elif isinstance(message, DirectoryRead):
            self._on_read(now, sender, message)
        elif isinstance(message, DirectoryMerge):
            self._on_merge(now, sender, message)
        elif isinstance(message, DirectoryMerged):
            self._on_merged(now, sender, message)
        elif isinstance(message, DirectoryWatch):
            self._on_watch(now, sender, message)
        elif isinstance(message, DirectoryCheck):
            self._on_check(now, sender, message)

    def tick(self, now: float) -> None:
        self._watchers.tick(now)
        if self._warm_at is not None and now >= self._warm_at:
            self._warm_due(now)
        while self._notices and self._notices[0][0] <= now:
            _, key, fresh = heappop(self._notices)
            for peer in fresh:
                self._post(now, peer, DirectoryMerge(0, key, self.owners(key)))
        if self._sweep_at is not None and now >= self._sweep_at:
            self._sweep(now)

    def next_wakeup(self) -> float | None:
        notice = self._notices[0][0] if self._notices else None
        return earliest(self._watchers.next_wakeup(), self._warm_at, notice, self._sweep_at)

    # -- requests --

    def _on_write(self, now: float, sender: PeerId, message: DirectoryWrite) -> None:
        register = message.register
        if register.writer != sender and not self._is_mark(register):
            return
        held = self._serving(now, sender, message)
        if held is None:
            return
        if not self._is_settled(held, register):
            if not held.debts.warm and self._admit.is_conditional(message.key, register):
                self._post(now, sender, DirectoryValue(message.request, (), warming=True))
                self._park(sender, message, held)
                return
            refusal = self._judge(message.key, held, register)
            if refusal is not None:
                refused = DirectoryRefused(message.request, refusal.reason, refusal.because)
                self._post(now, sender, refused)
                return
            held.unjudged.pop(register.cell, None)
            self._store(now, message.key, held, (register,), sender)
        if message.request:
            self._post(now, sender, self._written(message, held))

    def _is_mark(self, register: Register) -> bool:
        """Written by nobody in particular; anybody may."""
        value = register.value
        if isinstance(value, Buckets) and not is_valid(value.count, self._config.max_buckets):
            return False
        return register.writer == NOBODY and isinstance(value, (WholeMark, Retraction, Buckets))

    def _written(self, message: DirectoryWrite, held: KeyCopy) -> DirectoryWritten:
        """It is stored; what its writer should know of the key's buckets."""
        key, cells = message.key, held.cells
        registers = None
        if message.looks and held.debts.warm and len(cells) <= MAX_LOOKED_AT:
            registers = cells.registers()
        if key.kind not in WIDE:
            return DirectoryWritten(message.request, registers=registers)
        buckets = cells.get((NOBODY, BUCKETS_NAME))
        count = max(message.buckets, count_in((buckets,) if buckets is not None else ()))
        crowded = self._is_crowded(key, held, count)
        return DirectoryWritten(message.request, crowded, count, registers)

    def _is_crowded(self, key: Key, held: KeyCopy, count: int) -> bool:
        """Judged anew only when enough has come or gone, as it means to look at all of it."""
        most, standing = self._config.bucket_registers, held.cells.standing
        if standing <= most:
            return False
        before, then, crowded = held.crowd
        if before != count or abs(standing - then) > most // 8:
            crowded = is_crowded(key, held.cells.values(), count, most)
            held.crowd = (count, standing, crowded)
        return crowded

    def _is_settled(self, held: KeyCopy, register: Register) -> bool:
        """Whether this write was taken before, or is superseded."""
        before = held.cells.get(register.cell)
        if before is None or register.order > before.order:
            return False
        return register.order < before.order or register.cell not in held.unjudged

    def _judge(self, key: Key, held: KeyCopy, register: Register) -> Refusal | None:
        before = held.cells.get(register.cell)
        if before is not None and before.order == register.order:
            # It came by a merge: it must not speak for itself.
            total = len(held.cells)
            held.cells.drop(before.cell)
            refusal = self._admit(key, held.cells, register)
            held.cells.merge(0.0, (before,))
            self._count += len(held.cells) - total
            return refusal
        refusal = self._admit(key, held.cells, register)
        return self._room(held, register) if refusal is None and before is None else refusal

    def _park(self, sender: PeerId, message: DirectoryRead | DirectoryWrite, held: KeyCopy) -> None:
        if len(held.parked) < MAX_PARKED:
            held.parked[(sender, message.request)] = message

    def _on_read(self, now: float, sender: PeerId, message: DirectoryRead) -> None:
        held = self._serving(now, sender, message)
        if held is None:
            return
        warm = held.debts.warm
        self._post(now, sender, DirectoryValue(message.request, held.cells.registers(), not warm))
        if not warm:
            self._park(sender, message, held)

    def _serving(
        self, now: float, sender: PeerId, message: DirectoryWrite | DirectoryRead
    ) -> KeyCopy | None:
        """The key, if this request may be answered; else the sender is told why not."""
        key = message.key
        owners = self.owners(key)
        abroad = isinstance(message, DirectoryWrite) and message.abroad
        if self.me not in owners or message.owners_hash != owners_hash(owners):
            self._disagree(now, sender, message.request, abroad=abroad)
            return None
        held = self._held.get(key)
        if held is None:
            held = self._take_up(now, key, owners, keep=isinstance(message, DirectoryWrite))
            if held is None:
                if isinstance(message, DirectoryWrite):
                    self._post(now, sender, DirectoryRefused(message.request, "full"))
                return None
        held.touched = now
        if held.debts.closed:
            self._disagree(now, sender, message.request, abroad=abroad)
            return None
        if not held.debts.warm and (key not in self._warming or not held.merge):
            self._ask(now, key, held)
        return held

    def _take_up(self, now: float, key: Key, owners: Owners, keep: bool) -> KeyCopy | None:
        """A key that is heard of for the first time; None if there is no room for it.

        One that is warm and empty needn't be remembered, unless something is to be kept.
        """
        lapse = now + self._config.returned_seconds
        debts = self._past.debts(self.me, key, self._config.replicas, owners, lapse)
        held = KeyCopy(debts, now)
        if held.debts.settle(now, self._reachable) and not keep:
            return held
        if len(self._held) >= self._config.max_keys:
            return None
        self._held[key] = held
        return held

    def _room(self, held: KeyCopy, register: Register) -> Refusal | None:
        """What is given up may always be said: it stands where it was published, if not here."""
        room = 2 if _gives_up(register) else 1
        full = self._count >= room * self._config.max_registers
        if full or len(held.cells) >= room * self._config.max_key_registers:
            return Refusal("full")
        return None

    def _store(
        self,
        now: float,
        key: Key,
        held: KeyCopy,
        registers: tuple[Register, ...],
        sender: PeerId | None = None,
    ) -> None:
        before = len(held.cells)
        risen = held.cells.merge(now, registers)
        if risen:
            held.unjudged = {cell: None for cell in held.unjudged if cell in held.cells}
            self._watchers.changed(now, key, risen, sender)
        self._count += len(held.cells) - before

    def _disagree(self, now: float, sender: PeerId, request: int, *, abroad: bool = False) -> None:
        """Tell the sender that we take others for the owners, and see why."""
        self._post(now, sender, DirectoryMismatch(request))
        self._see_why(sender, abroad=abroad)

    def _see_why(self, sender: PeerId, *, abroad: bool) -> None:
        if sender != self.me and not abroad:
            self._on_mismatch(sender)

    # -- watching --

    def _on_watch(self, now: float, sender: PeerId, message: DirectoryWatch) -> None:
        held = self._held.get(message.key)
        is_sound = held is not None and held.debts.warm and self.me in held.debts.served
        self._watchers.watch(
            now, sender, message, held.cells.fingerprint if held is not None and is_sound else 0
        )

    # -- comparing --

    def _on_check(self, now: float, sender: PeerId, message: DirectoryCheck) -> None:
        """A writer says what should be here of it: silence says yes."""
        key = message.key
        owners = self.owners(key)
        if self.me not in owners or message.owners_hash != owners_hash(owners):
            self._see_why(sender, abroad=False)
            return
        held = self._held.get(key)
        if held is not None:
            held.touched = now
            if held.cells.print_by(sender) == message.fingerprint:
                return
        live = held.cells.live_by(sender)[-MAX_LISTED:] if held is not None else []
        if live or message.fingerprint:
            listed = tuple((r.name, r.generation, r.sequence) for r in live)
            self._post(now, sender, DirectoryLacks(key, listed))

    # -- warming --

    def ring_changed(self, now: float, ring: Ring) -> bool:
        """The ring has other members. Whether some of them were members before, and not since."""
        before, self.ring = self.ring, ring
        members = frozenset(ring.members)
        if ring is before:
            return False
        alone = all(member == self.me for member in before.members)
        added = [m for m in ring.members if m not in self._members]
        returned = [m for m in added if m in self._departed]
        somebody_returned = bool(returned)
        for member in before.members:
            if member not in members:
                self._departed[member] = None
        for member in returned:
            del self._departed[member]
        while len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]
        self._members = members
        self._past.add(before)
        if alone:
            returned = added
            self._past.add(Ring.of(added, ring.virtual_nodes))
        others = Ring.of(returned, ring.virtual_nodes) if returned else None
        for key, held in self._held.items():
            lapse = None if alone else now + self._config.returned_seconds
            self._reown(now, key, held, others, lapse)
        return somebody_returned

    def was_absent(self, now: float) -> None:
        """The others may have gone on without this peer, and with another ring."""
        others = self.ring.of_members(m for m in self.ring.members if m != self.me)
        self._past.add(others)
        if not len(others):
            return
        for key, held in self._held.items():
            if self.me in held.debts.served:
                lapse = now + self._config.returned_seconds
                held.debts.absent(others.owners(key, self._config.replicas), lapse)
                self._end_merge(key, held)
                self._warm_later(key, held, now + self._rng.random() * self._config.warm_spread)

    def _reown(
        self, now: float, key: Key, held: KeyCopy, others: Ring | None, lapse: float | None
    ) -> None:
        """Adjust one key to the new ring."""
        owners = self.owners(key)
        before = held.debts.served
        if owners != before:
            fresh = tuple(p for p in owners if p not in before and p != self.me)
            if held.cells and fresh and self.me in before:
                when = now + self._rng.random() * self._config.warm_spread
                heappush(self._notices, (when, key, fresh))
            held.debts.move(owners)
            held.touched = now
            self._end_merge(key, held)
            if others is not None:
                held.debts.owe(others.owners(key, self._config.replicas), lapse)
        if self.me not in owners:
            self._end_merge(key, held)
            held.parked.clear()
        elif held.parked or not held.debts.warm:
            soon = 0.0 if held.parked else self._rng.random() * self._config.warm_spread
            self._warm_later(key, held, now + soon)

    def _warm_later(self, key: Key, held: KeyCopy, when: float) -> None:
        self._warming[key] = held
        held.ask_at = when
        self._warm_at = when if self._warm_at is None else min(self._warm_at, when)

    def _warm_due(self, now: float) -> None:
        due = [(key, held) for key, held in self._warming.items() if held.ask_at <= now]
        for key, held in due:
            held.asked.clear()
            held.debts.reopen(now)
            self._ask(now, key, held)
        self._warm_at = min((h.ask_at for h in self._warming.values()), default=None)

    def _ask(self, now: float, key: Key, held: KeyCopy) -> None:
        """Ask those whose answers are wanted and who weren't asked in this round."""
        reachable = self._reachable
        if held.debts.settle(now, reachable):
            if held.debts.closed:
                # It owes nothing yet: what its successor took is owed once it reopens.
                self._warm_later(key, held, max(now, held.debts.reopen_at))
            else:
                self._warmed(now, key, held)
            return
        if not held.merge:
            self._last_merge += 1
            held.merge = self._last_merge
            self._merges[held.merge] = key
        for peer in held.debts.to_ask(reachable):
            if peer not in held.asked:
                held.asked[peer] = None
                ask = DirectoryMerge(held.merge, key, held.debts.served)
                self._post(now, peer, ask)
        self._warm_later(key, held, now + self._config.retry_interval)

    def _end_merge(self, key: Key, held: KeyCopy) -> None:
        self._warming.pop(key, None)
        self._merges.pop(held.merge, None)
        held.merge = 0
        held.asked.clear()

    def _warmed(self, now: float, key: Key, held: KeyCopy) -> None:
        self._end_merge(key, held)
        parked, held.parked = held.parked, {}
        for (asker, _), message in parked.items():
            # As if it came now: the ring may have changed, or an earlier one of these decides.
            if isinstance(message, DirectoryWrite):
                self._on_write(now, asker, message)
            else:
                self._on_read(now, asker, message)

    def _on_merge(self, now: float, sender: PeerId, message: DirectoryMerge) -> None:
        key = message.key
        owners = self.owners(key)
        held = self._held.get(key)
        if message.owners and not same(message.owners, owners):
            self._see_why(sender, abroad=False)
            if self.me in owners and message.request:
                held = held or self._take_up(now, key, owners, keep=True)
                if held is None:
                    return
                held.debts.close(now + self._config.settle_seconds, message.owners)
                held.parked.clear()
                self._end_merge(key, held)
                self._warm_later(key, held, now + self._config.settle_seconds)
        elif held is None and self.me in owners:
            held = self._take_up(now, key, owners, keep=True)
            if held is not None and not held.debts.warm:
                self._ask(now, key, held)
        if not message.request:
            return
        debts = (
            held.debts if held else self._past.debts(self.me, key, self._config.replicas, owners)
        )
        registers = held.cells.registers() if held else ()
        sets = (owners, *debts.owed)
        self._post(now, sender, DirectoryMerged(message.request, registers, sets))

    def _on_merged(self, now: float, sender: PeerId, message: DirectoryMerged) -> None:
        key = self._merges.get(message.request)
        held = self._held.get(key) if key is not None else None
        if key is None or held is None or sender not in held.asked:
            return
        held.debts.told(sender, message.sets)
        self._store(now, key, held, message.registers)
        for register in message.registers:
            risen = held.cells.get(register.cell) is register
            if risen and self._admit.is_conditional(key, register):
                held.unjudged[register.cell] = None
            elif risen:
                held.unjudged.pop(register.cell, None)
        self._ask(now, key, held)

    # -- forgetting --

    def forget(self, writers: Collection[PeerId]) -> None:
        """Drop all that these peers wrote; only for peers that are dead for good."""
        gone = frozenset(writers)
        for held in self._held.values():
            for cell in [cell for cell in held.cells if cell[0] in gone]:
                held.cells.drop(cell)
                held.unjudged.pop(cell, None)
                self._count -= 1

    def _sweep(self, now: float) -> None:
        """Drop lapsed watches, keys with nothing in them, and what was handed over long ago."""
        self._sweep_at = now + self._config.watch_seconds
        self._watchers.sweep(now)
        for key, held in list(self._held.items()):
            self._count -= held.cells.forget_withdrawn(now - self._config.keep_former_seconds)
            idle = now - held.touched
            former = self.me not in held.debts.served
            if (former and idle > self._config.keep_former_seconds) or (
                not held.cells and idle > self._config.watch_seconds and key not in self._warming
            ):
                self._end_merge(key, held)
                self._count -= len(held.cells)
                del self._held[key]
