"""One simulated computer with one process on it: a machine, and what state it is in.

Rules of this file. Facts only; network.py changes them and sockets.py reads them.

The states, and what others see of each:

    state     its machine                      messages to it        its sockets
    RUNNING   runs                             reach it              connect and greet
    STALLED   does nothing (the GIL is held)   wait until it wakes   connect and greet
    PAUSED    does nothing (SIGSTOP)           wait until it wakes   connect, never greet
    CRASHED   is gone, its kernel is there     are lost              refuse
    DOWN      is gone with its host            are lost              are silent
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Machine
from tensorhub_p2p.protocol.membership.swim_events import Evidence


class State(Enum):
    """Of a host: see the table above."""

    RUNNING = "running"
    STALLED = "stalled"
    PAUSED = "paused"
    CRASHED = "crashed"
    DOWN = "down"


GONE = frozenset({State.CRASHED, State.DOWN})
ASLEEP = frozenset({State.PAUSED, State.STALLED})

Arrival = bytes | tuple[PeerId, Evidence]
"""What waits for a machine that doesn't run: a message, or what its sockets noticed."""


@dataclass(eq=False)
class Host:
    """One peer in the simulation."""

    peer_id: PeerId
    addresses: tuple[str, ...]
    machine: Machine
    zone: str
    state: State = State.RUNNING
    since: float = 0.0
    """When it came into this state."""
    backlog: deque[Arrival | None] = field(default_factory=deque)
    """What it has not come to, asleep or slow, in order."""
    wakeup: float | None = None
    """When its next entry in the queue is due; an entry with another time is stale."""
    due: float | None = None
    """When the machine wants to be woken; no earlier than `wakeup`."""
    last_tick: float = -1.0
    spins: int = 0
    cost: float = 0.0
    """Seconds that each message and each tick takes; 0 is a process of ordinary speed."""
    is_working: bool = False
    """A slow process is about to come to the next that waits in `backlog`."""
    tick_queued: bool = False
    """One tick (None) waits there too; further ones would be the same."""
    is_free: bool = True
    """It runs, at ordinary speed, with nothing queued: what arrives is handled at once."""
    sends: int = 0
    """Bits of the weather's rules that apply to what it sends (weather.py)."""
    hears: int = 0
    """The same for what is sent to it."""
    sent: int = 0
    """Messages sent; then bytes sent, messages received, bytes received."""
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0

    def __post_init__(self) -> None:
        machine = self.machine
        self.reply_to = self.addresses[0] if self.addresses else ""
        self.watched: Callable[[], Sequence[PeerId]] | None = getattr(machine, "watched", None)
        """Whose sockets its driver keeps a connection to, if the machine says so."""
        self.take_evidence: Callable[[float, PeerId, Evidence], None] | None = getattr(
            machine, "evidence", None
        )

    @property
    def is_gone(self) -> bool:
        return self.state in GONE

    @property
    def is_asleep(self) -> bool:
        return self.state in ASLEEP
