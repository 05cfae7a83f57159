"""What the clients and owners of directory keys say to each other (the room directory/)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages.message import Count, Message, Short
from tensorhub_p2p.protocol.messages.records import Key, Register


class DirectoryMessage(Message, frozen=True):
    """Base of all that directories say to each other."""


class DirectoryWrite(DirectoryMessage, frozen=True):
    """`abroad`: the writer is of another zone, and views of this one's members are not for it.

    `buckets`: over how many the key is spread, as far as the writer knows (buckets.py).
    `looks`: say what you hold of the key once you have taken it.
    """

    request: Count
    key: Key
    owners_hash: Count
    register: Register
    abroad: bool = False
    buckets: Count = 1
    looks: bool = False


class DirectoryWritten(DirectoryMessage, frozen=True):
    """`crowded`: this bucket of the key holds more than it should.

    `buckets`: over how many the key is spread, as far as this owner of bucket 0 knows.
    `registers`: what it holds now, if it was asked that, and can say.
    """

    request: Count
    crowded: bool = False
    buckets: Count = 1
    registers: tuple[Register, ...] | None = None


class DirectoryRefused(DirectoryMessage, frozen=True):
    """The owner holds something that forbids this write; `because` is that register."""

    request: Count
    reason: Short
    because: Register | None = None


class DirectoryRead(DirectoryMessage, frozen=True):
    request: Count
    key: Key
    owners_hash: Count


class DirectoryValue(DirectoryMessage, frozen=True):
    """All registers of the key. A `warming` owner's answer does not count for R."""

    request: Count
    registers: tuple[Register, ...]
    warming: bool = False


class DirectoryMismatch(DirectoryMessage, frozen=True):
    """You and I disagree on who owns this key; I compare views with you (anti_entropy.py)."""

    request: Count


class DirectoryMerge(DirectoryMessage, frozen=True):
    """A warming owner asks a member of an earlier owner set for what it holds.

    `owners` is the set that the asker serves: who serves another one closes it.
    """

    request: Count
    key: Key
    owners: Annotated[tuple[PeerId, ...], Meta(max_length=64)] = ()


class DirectoryMerged(DirectoryMessage, frozen=True):
    """What the sender holds of the key, and the owner sets that it serves or must merge from."""

    request: Count
    registers: tuple[Register, ...]
    sets: Annotated[tuple[tuple[PeerId, ...], ...], Meta(max_length=64)] = ()


class DirectoryWatch(DirectoryMessage, frozen=True):
    """Tell me when this key changes, for the next `seconds`.

    `seen` is a fingerprint of what I know of it; 0: tell me only of changes from now on.
    """

    key: Key
    seconds: float
    seen: Count = 0
    pins: bool = False
    """Tell me of pins, too: most who watch don't care who pulls."""


class DirectoryChanged(DirectoryMessage, frozen=True):
    """A key that you watch has changed: these rose. None are named if there are too many, or
    if it isn't known which."""

    key: Key
    registers: Annotated[tuple[Register, ...], Meta(max_length=64)] = ()


class DirectoryCheck(DirectoryMessage, frozen=True):
    """You should hold what I wrote under this key; its fingerprint is this."""

    key: Key
    owners_hash: Count
    fingerprint: Count


class DirectoryLacks(DirectoryMessage, frozen=True):
    """I hold something else of yours under this key: please write it again.

    `held` is what I do hold: name, generation and sequence of each register.
    """

    key: Key
    held: Annotated[tuple[tuple[str, Count, Count], ...], Meta(max_length=256)] = ()
