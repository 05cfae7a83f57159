"""The end of a handle: nothing of it may be cut off by what follows.

Rules of this file. `begin`, `readers_gone` and `cut` are the steps of the verb. `Closing` belongs
to one handle: it keeps the list of what is still under way, and sees to what the handle has on
record besides its references.

Theory of operation. A handle is closed once what it held is hidden at W owners (or, of what it
unpublished before, "withdrawing" there: the rest is on its way, withdrawing.py) and its readers are
gone, its slot is released at W owners, and what it wanted kept is off the record there. So
a peer that leaves right afterwards has told all there is to tell. At the deadline it counts as
closed all the same, and the writes go on for as long as the peer lives.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from tensorhub_p2p.errors import RetentionLost, StateError
from tensorhub_p2p.protocol.groups.forgetting import forget_group, forget_references
from tensorhub_p2p.protocol.groups.slots import SlotClaimer
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.retaining import Retaining
from tensorhub_p2p.protocol.shards.running_verb import Verb
from tensorhub_p2p.protocol.shards.verbs import VerbId

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.shards.machines import Machines


class Part(Enum):
    """What has to be over."""

    SLOT = "its slot is being released"
    RETAINS = "what it retains is being taken off the record"
    READERS = "its readers are being let go"


class Closing:
    """The end of one handle."""

    def __init__(self, slot: Slot, custody: Custody, retaining: Retaining, *, spot: bool) -> None:
        self._slot = slot
        self._custody = custody
        self._retaining = retaining
        self._spot = spot
        self._counted = False
        self._left: set[Part] = set()

    def opened(self) -> None:
        """The handle begins to live."""
        self._counted = self._spot
        self._custody.spots += self._counted

    def over(self) -> None:
        """It is no longer open."""
        self._custody.spots -= self._counted
        self._counted = False

    def begin(self, now: float, claim: SlotClaimer, through: Callable[[float], None]) -> None:
        """The handle closes; `through` is called whenever one part is."""
        self.over()
        self._left = set(Part)

        def released(now: float) -> None:
            self.through(Part.SLOT)
            through(now)

        claim.release(now, released)

        def unretained(now: float) -> None:
            self.through(Part.RETAINS)
            through(now)

        self._retaining.set(now, self._slot, None, unretained)

    def through(self, part: Part) -> None:
        self._left.discard(part)

    @property
    def done(self) -> bool:
        return not self._left

    def waiting_for(self) -> str:
        return ", ".join(sorted(part.value for part in self._left))


def begin(shard: Machines, now: float, number: VerbId, deadline: float) -> None:
    """Give everything back; a verb under way fails."""
    verb = shard.running.verb
    if verb is not None:
        shard.fail(StateError(f"{shard.slot}: the handle was closed during {verb.name}"))
    shard.last_record = shard.generation()
    shard.closed = True
    shard.lost = ()
    shard.running.begin(Verb(number, "close", deadline, f"closing {shard.slot}"), closed=False)
    shard.part.stop(now)
    shard.closing.begin(now, shard.claim, lambda now: _look(shard, now))
    if shard.references.held is None:
        shard.references.drop(now)
        shard.let_readers_go(now)
    else:
        # Readers get their lease before the deadline, if there is time for it at all.
        lease = min(shard.pull_config.lease_seconds, (deadline - now) / 2)
        shard.references.close(now, deadline - lease)


def readers_gone(shard: Machines, now: float) -> None:
    """What it held is hidden, and nobody reads it any more."""
    shard.closing.through(Part.READERS)
    _look(shard, now)


def cut(shard: Machines, now: float) -> None:
    """The close has lasted as long as it may."""
    shard.references.cut_off(now)
    shard.pump(now)
    shard.served.end()
    if shard.running.is_a("close"):
        _end(shard, now)


def _look(shard: Machines, now: float) -> None:
    """Something of what the close waits for is over."""
    if shard.closing.done and shard.references.held is None:
        _end(shard, now)


def _end(shard: Machines, now: float) -> None:
    forget_references(shard.custody.records, now, shard.slot)
    if shard.elastic:
        forget_group(shard.custody.records, now, shard.slot)
    if shard.lost:
        what = "; ".join(shard.lost)
        shard.fail(RetentionLost(f"{shard.slot} was closed, and with it is lost: {what}"))
    else:
        shard.done(None)
