"""What stands in the directory: keys, registers, and all that a register can say."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorhub_p2p.protocol.identity import Generation, Group, Member, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages.message import Count, Short


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What a directory entry is filed under; its place on the ring is the hash of all three.

    kind "versions": part "" (which publications of the model exist, marks and pins);
    kind "holders": part = shard number (who has this shard of which publication);
    kind "group": part = replica name (slot claims, generations, floors);
    kind "retains": part "" (which versions of the model open handles want kept).
    """

    kind: Short
    model: Short
    part: Short = ""


class SlotClaim(msgspec.Struct, frozen=True, array_like=True, tag="slot"):
    """At key "group": the writer claims this shard of the replica (slots.py)."""

    shard: Count
    num_shards: Count
    counter: Count
    established: bool
    released: bool = False
    """Given back. The record stays, so that the next claim's counter is higher."""


class GenerationRecord(msgspec.Struct, frozen=True, array_like=True, tag="gen"):
    """An elected generation; `epoch` is the highest its candidate read.

    At key "group", where members find it, and at key "versions", where owners refuse what
    lower generations of the group still say (admission.py).
    """

    generation: Generation
    epoch: Count
    members: tuple[Member, ...]
    leader: Count
    """The leader's shard."""
    floor: tuple[int, int] = (-1, -1)
    """(epoch, version) of the group's last answer: the maximum over the members' votes."""


class Phase(IntEnum):
    """How far a shard's hold on a publication has come."""

    PARTIAL = 0
    """Pulling it: has some verified chunks, or none yet."""
    READY = 1
    """Has all of it: published it, or pulled it whole."""
    WITHDRAWING = 2
    """Still has it, but is about to hide it: no later mark may make it whole."""
    HIDDEN = 3
    """Gave it up. The record stays, so that owners can refuse late marks and pins."""


class VersionRecord(msgspec.Struct, frozen=True, array_like=True, tag="version"):
    """At key "versions": what one slot has at present. One register per slot and writer."""

    slot: Slot
    num_shards: Count
    publication: Publication
    phase: Phase
    generation: Generation
    """Of the writer's group, when it wrote this."""
    was_whole: bool = False
    """The writer knows that the publication was whole once."""
    spot: bool = False
    """The writer may be gone at any time: never a safe copy."""
    offload: bool = False
    """A copy in host memory, kept for others: not what a trainer or a rollout works with."""
    kept: bool = False
    """With WITHDRAWING or HIDDEN: somebody else has promised to keep this shard."""
    digests: bytes = b""
    """Of layout and digest list, by who published: equal ones are equal bytes (comparing.py)."""


class WholeMark(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """At key "versions": every shard of the publishing replica was ready at once (G3)."""

    publication: Publication
    num_shards: Count


class Pin(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """At key "versions": a group decided to pull this publication in this call."""

    publication: Publication
    group: Group
    generation: Generation
    call: Count
    zone: Short = ""
    """The writer's, if that is another zone than the key's."""
    shards: tuple[Count, ...] = ()
    """Those that this zone has to keep for it; () stands for all."""


class HolderRecord(msgspec.Struct, frozen=True, array_like=True, tag="holder"):
    """At key "holders": the writer has this shard of this publication, whole or in part."""

    slot: Slot
    publication: Publication
    phase: Phase
    was_whole: bool
    num_bytes: Count
    memory: Short = "host"
    spot: bool = False
    offload: bool = False


class Retain(msgspec.Struct, frozen=True, array_like=True, tag="retain"):
    """At key "retains": what this peer's open handles want kept; one register a peer."""

    newest: Count = 0
    versions: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()


class DigestList(msgspec.Struct, frozen=True, array_like=True, tag="digests"):
    """At key "holders": a publication's chunk digests, left there by who withdraws it."""

    publication: Publication
    layout: bytes
    """Digest of the layout."""
    digests: Annotated[bytes, Meta(max_length=1 << 20)]
    """16 bytes a chunk."""


class Retraction(msgspec.Struct, frozen=True, array_like=True, tag="retracted"):
    """At key "versions": this version is bad and to be used by nobody. Writer `NOBODY`."""

    epoch: Count
    version: Count


class GroupFloor(msgspec.Struct, frozen=True, array_like=True, tag="floor"):
    """At key "group": (epoch, version) of a group's last answer, for those that replace it."""

    generation: Generation
    floor: tuple[int, int]


class Buckets(msgspec.Struct, frozen=True, array_like=True, tag="buckets"):
    """In bucket 0 of a key: over how many it is spread. Only doubles. Writer `NOBODY`."""

    count: Count


Value = (
    SlotClaim
    | GenerationRecord
    | VersionRecord
    | WholeMark
    | Pin
    | HolderRecord
    | Retain
    | DigestList
    | Retraction
    | GroupFloor
    | Buckets
)


class Register(msgspec.Struct, frozen=True, array_like=True):
    """One cell of the directory, written by one peer under one name.

    Merging is a maximum over (generation, sequence); withdrawing is a higher sequence
    with no value, never a deletion. `WholeMark`s are the exception that needs none:
    anyone may write one, under writer `NOBODY`, and all write the same.

    `generation` is the counter of the writer's generation; for a `SlotClaim`, of which
    generations are made, it is the claim's own counter.
    """

    writer: PeerId
    name: Annotated[str, Meta(max_length=1024)]
    generation: Count
    sequence: Count
    value: Value | None

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.sequence)

    @property
    def cell(self) -> tuple[PeerId, str]:
        return (self.writer, self.name)
