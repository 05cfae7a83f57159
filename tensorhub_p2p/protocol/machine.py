"""The common face of every state machine, and what it hands to its driver.

A driver (the runtime's control thread, or the simulator) calls `receive` for each
message, `tick` when `next_wakeup` has come, and after every call drains the outbox.
A machine never learns what carries its messages or who reads the clock: `now` is
always an argument, in seconds on a monotonic clock whose origin means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Message


@dataclass(frozen=True)
class Send:
    """Please deliver `message`, at most once, in no particular order, with no promise."""

    to: PeerId
    message: Message


@dataclass(frozen=True)
class SendTo:
    """The same to a bare address, for joining: nobody knows yet who answers there."""

    address: str
    message: Message


class Event:
    """Something the machine decided or noticed, for the machine or driver above it."""

    __slots__ = ()


Output = Send | SendTo | Event


class Machine(Protocol):
    """The four-part face."""

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        """Take one message in. Anything malformed or stale is dropped, never raised."""

    def tick(self, now: float) -> None:
        """Do what has become due at `now`. Calling too early or too often is harmless."""

    def next_wakeup(self) -> float | None:
        """When `tick` wants to be called next; None if nothing is pending."""

    @property
    def outbox(self) -> Outbox: ...


@dataclass
class Outbox:
    """What waits for the driver, in the order in which it was decided."""

    items: list[Output] = field(default_factory=list)

    def send(self, to: PeerId, message: Message) -> None:
        self.items.append(Send(to, message))

    def send_to(self, address: str, message: Message) -> None:
        self.items.append(SendTo(address, message))

    def emit(self, event: Event) -> None:
        self.items.append(event)

    def drain(self) -> list[Output]:
        """Everything since the last call; the outbox is empty afterwards."""
        items, self.items = self.items, []
        return items


def earliest(*times: float | None) -> float | None:
    """The first of several wake-ups; None stands for "nothing pending"."""
    first = None
    for time in times:
        if time is not None and (first is None or time < first):
            first = time
    return first
