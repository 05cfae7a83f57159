"""The leases of one shard: who may read it, who waits for that, and whose turn is next.

Rule of this file. It keeps the table and hands out upload slots. It sends nothing, and does not
know what is read: serving.py tells pullers what became of them.

    (none)   --add-->                                             waiting
    waiting  --a slot frees-->                                    granted
    granted  --its turn on the rotating slot is over-->           waiting
    granted  --another model is pulled from this peer, too-->     waiting
    granted  --withdraw-->                                        leaving
    any      --remove-->                                          (none)

One of the slots rotates: once its puller has something that it can serve on, the slot passes to a
waiting puller that has nothing yet. So everybody soon has something to trade, and load spreads
into chains and trees with no planner. How many slots there are upload_slots.py says; if they
become fewer, those wait who have something to trade, of these who came last.

Bounds: `upload_slots` and `max_waiting` leases remembered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots


class LeaseState(Enum):
    WAITING = "waiting"
    GRANTED = "granted"
    LEAVING = "leaving"


@dataclass(eq=False)
class Lease:
    """What one pull of one peer was told, and when it was heard last."""

    peer: PeerId
    pull: str
    puller: Slot | None
    transports: tuple[str, ...]
    seen: float
    since: float
    """When it entered its state."""
    state: LeaseState = LeaseState.WAITING
    has_something: bool = False
    """The puller has verified chunks that it could serve on."""
    rotating: bool = False
    """It sits on the rotating slot."""
    have_told: int = 0
    """What it was told that we have; this and the next two are sets, as `ChunkSet.bits`."""
    digests_told: int = 0
    carrying_told: bool = False
    """Whether it was told that we fetch something from other zones."""
    crowd_told: int = 0
    """By `Leases.crowd`: which others it was told of."""
    wanted: int = 0
    """Chunks whose digests it asked for and wasn't told."""
    pressing: bool = False
    """There is news that it hears from nobody else."""
    urgent: bool = False
    """There is news that it asked for."""
    answered: float = float("-inf")
    """When it last got such news."""
    updated: float = float("-inf")
    """When it got its last offer or update."""

    def enter(self, now: float, state: LeaseState, *, rotating: bool = False) -> None:
        self.state, self.since, self.rotating = state, now, rotating


class Leases:
    """By (peer, pull), in the order in which they came."""

    def __init__(self, model: str, uploads: UploadSlots) -> None:
        self.model = model
        self.crowd = 0
        """How often it changed who is being served."""
        self._leases: dict[tuple[PeerId, str], Lease] = {}
        self._withdrawn = False
        self._uploads = uploads
        uploads.add(self)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, peer: PeerId, pull: str) -> Lease | None:
        return self._leases.get((peer, pull))

    def granted(self) -> list[Lease]:
        return [lease for lease in self if lease.state is LeaseState.GRANTED]

    def add(self, lease: Lease) -> None:
        """Remember it, if there is room."""
        config = self._uploads.config
        if len(self._leases) < config.upload_slots + config.max_waiting:
            self._leases[lease.peer, lease.pull] = lease

    def remove(self, lease: Lease) -> None:
        self._leases.pop((lease.peer, lease.pull), None)
        self.crowd += lease.state is LeaseState.GRANTED

    def withdraw(self, now: float) -> None:
        """Grant nothing from now on; who waits is forgotten, who reads is about to leave."""
        self._withdrawn = True
        for lease in self:
            if lease.state is LeaseState.GRANTED:
                lease.enter(now, LeaseState.LEAVING)
            else:
                self.remove(lease)

    def end(self) -> None:
        """Forget all, for good."""
        self._leases.clear()
        self._uploads.remove(self)

    # --- upload slots --------------------------------------------------------------------

    def seat(self, now: float) -> list[Lease]:
        """Give the slots to those whose turn it is; returns whose state has changed."""
        if self._withdrawn:
            return []
        slots, granted = self._uploads.each(), len(self.granted())
        if granted == len(self) and granted <= slots:
            return []  # nobody waits
        changed = [*self._take_back(now, slots), *self._fill(now, slots), *self._rotate(now)]
        self.crowd += len(changed)
        return changed

    def _waiting(self) -> list[Lease]:
        """In the order in which they are served: those with nothing first, then by patience."""
        waiting = [lease for lease in self if lease.state is LeaseState.WAITING]
        return sorted(waiting, key=lambda lease: (lease.has_something, lease.since))

    def _take_back(self, now: float, slots: int) -> list[Lease]:
        """There are more readers than slots now."""
        granted = self.granted()
        over = len(granted) - slots
        if over <= 0:
            return []
        granted.sort(key=lambda lease: (not lease.has_something, -lease.since))
        gone, kept = granted[:over], granted[over:]
        for lease in gone:
            lease.enter(now, LeaseState.WAITING)
        if not any(lease.rotating for lease in kept):
            kept[-1].rotating = True
        return gone

    def _fill(self, now: float, slots: int) -> list[Lease]:
        """The last slot to be filled rotates."""
        granted = self.granted()
        free = max(0, slots - len(granted))
        chosen = self._waiting()[:free]
        for lease in chosen:
            lease.enter(now, LeaseState.GRANTED)
        if chosen and len(chosen) == free and not any(lease.rotating for lease in granted):
            chosen[-1].rotating = True
        return chosen

    def _rotate(self, now: float) -> list[Lease]:
        """Pass the rotating slot on, once its puller has something and another has nothing."""
        hungry = next((lease for lease in self._waiting() if not lease.has_something), None)
        seated = next((lease for lease in self.granted() if lease.rotating), None)
        if hungry is None or seated is None or not seated.has_something:
            return []
        seated.enter(now, LeaseState.WAITING)
        hungry.enter(now, LeaseState.GRANTED, rotating=True)
        return [seated, hungry]
