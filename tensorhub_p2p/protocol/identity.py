"""Who and what the protocols talk about: the names that travel in every message.

Values only. Everything here is immutable, hashable where it is used as a key,
and ordered where the order carries meaning.
"""

from __future__ import annotations

from typing import NewType

import msgspec

PeerId = NewType("PeerId", str)
"""One process start of one peer: 16 hex digits drawn at random, never reused."""

NOBODY = PeerId("")
"""Addressee of a message to an address whose peer is not known yet (a join)."""


class PeerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a peer tells about itself once; it does not change during its life.

    `addresses` are control endpoints (`"host:port"`, IPv6 in brackets), the first
    one preferred. `data_addresses` are the tcp transport's. `host` identifies the
    machine for same-host transports (boot id, pid namespace and label), `rack` is
    free text used as a preference.
    """

    peer_id: PeerId
    name: str
    zone: str
    addresses: tuple[str, ...]
    data_addresses: tuple[str, ...] = ()
    host: str = ""
    rack: str = ""


class Group(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The peers that hold the shards of one replica of one model."""

    model: str
    replica: str

    def __str__(self) -> str:
        return f"{self.model}/{self.replica}"


class Slot(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One shard of one group: what a handle claims. A peer opens a slot at most once at a time."""

    group: Group
    shard: int

    def __str__(self) -> str:
        return f"{self.group}#{self.shard}"


class Member(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An established claim: this peer holds this shard, by the claim with this counter."""

    shard: int
    peer: PeerId
    claim: int


class Generation(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One elected membership of a group; ordered by `counter`, then by the members' hash."""

    counter: int
    members_hash: int

    def __str__(self) -> str:
        return f"g{self.counter}.{self.members_hash & 0xFFFF:04x}"


NO_GENERATION = Generation(0, 0)


class Publication(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One act of publishing. Ordered by (epoch, version) first, as "latest" needs it."""

    epoch: int
    version: int
    replica: str
    generation: Generation

    @property
    def order(self) -> tuple[int, int]:
        """(epoch, version): the order in which versions supersede each other."""
        return (self.epoch, self.version)

    def __str__(self) -> str:
        epoch = f" of epoch {self.epoch}" if self.epoch else ""
        return f"version {self.version}{epoch} by {self.replica}"
