"""What a handle's close waits for: nothing of it may be cut off by what follows.

Rules of this file. `Closing` belongs to one handle: it keeps the list of what is still under
way, and sees to what the handle has on record besides its references. In which order things
are given up is shard.py's.

Theory of operation. A handle is closed once what it held is hidden at W owners and its readers
are gone, its slot is released at W owners, and what it wanted kept is off the record there. So
a peer that leaves right afterwards has told all there is to tell. At the deadline it counts as
closed all the same, and the writes go on for as long as the peer lives.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from tensorhub_p2p.protocol.groups.slots import SlotClaimer
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.retaining import Retaining


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
