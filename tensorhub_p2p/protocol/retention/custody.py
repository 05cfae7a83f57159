"""What one peer has for keeping versions, shared by all that it holds.

Rules of this file. Values and interfaces only; withdrawing.py and keeping.py use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from tensorhub_p2p.config import RetentionConfig
from tensorhub_p2p.protocol.directory.records import Liveness, Records
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.messages import Retain
from tensorhub_p2p.protocol.retention.held import Held
from tensorhub_p2p.protocol.retention.reserving import Reserve
from tensorhub_p2p.protocol.retention.retention import Wish

Elsewhere = Callable[[str], tuple[Wish, ...]]
"""What other zones say is retained there, by model."""


class Offloads(Protocol):
    """Copies in host memory."""

    def begin(
        self,
        now: float,
        slot: Slot,
        held: Held,
        digests: tuple[bytes, ...],
        then: Callable[[float, str], None],
    ) -> Slot | None:
        """Copy what the slot holds, in memory that is taken already. None if it can't begin.

        `then` is called once: with "" when others find the copy, else with what went wrong.
        """

    def cancel(self, now: float, keep: Slot) -> None:
        """It isn't needed after all; `then` is not called any more."""


@dataclass
class Custody:
    """One peer's."""

    me: PeerId
    records: Records
    liveness: Liveness
    config: RetentionConfig = field(default_factory=RetentionConfig)
    reserve: Reserve = field(default_factory=lambda: Reserve(0))
    elsewhere: Elsewhere = lambda _model: ()
    own: Callable[[str], Retain | None] = lambda _model: None
    """What this peer's own handles retain, by model."""
    is_responsive: Callable[[PeerId], bool] = lambda _peer: True
    members: Callable[[], tuple[PeerId, ...]] = tuple
    """Who could take a copy: the responsive members of the zone."""
    has_other_zones: Callable[[], bool] = lambda: False
    """Whether anybody may retain something of which this zone has not heard yet."""
    offloads: Offloads | None = None
    leaving: bool = False
    """The peer goes away: it promises, copies and adopts nothing."""
    spots: int = 0
    """Open handles of this peer that may be gone at any time; while there are any, it adopts
    nothing."""
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def number(self) -> int:
        """For a request; never given twice."""
        return next(self._numbers)
