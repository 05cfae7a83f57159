"""What a puller and its sources say to each other (the room pulls/)."""

from __future__ import annotations

import msgspec

from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import TensorSpec
from tensorhub_p2p.protocol.messages.message import Count, Message, Short


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """How one transport reads one exported region; opaque to everything but that transport."""

    transport: Short
    blob: bytes


class PullHello(Message, frozen=True):
    """A puller asks a holder for a lease on one shard of one publication.

    `layout` is the digest of the puller's layout; `endpoints` are wanted for `transports`.
    """

    pull: Short
    slot: Slot
    """The holder's slot, from its HolderRecord."""
    publication: Publication
    layout: bytes
    transports: tuple[Short, ...]
    have: bytes = b""
    """Bitmap of what the puller has verified; empty for nothing."""
    puller: Slot | None = None
    """Where others can ask the puller for what it has; None if it serves nobody."""


class PullOffer(Message, frozen=True):
    """The lease: what the holder has now, the digests it knows, and how to read.

    `have` and `known` are bitmaps (bit c of byte c//8); `digests` holds 16 bytes for each
    bit of `known`, in order. Not `granted`: all upload slots are in use; `others` are
    slots and peers being served right now, who can serve you in turn.
    """

    pull: Short
    slot: Slot
    publication: Publication
    granted: bool
    layout: bytes
    num_bytes: Count
    chunk_bytes: Count
    have: bytes
    known: bytes
    digests: bytes
    endpoints: tuple[Endpoint, ...]
    others: tuple[tuple[PeerId, Slot], ...] = ()
    carrying: bytes | None = None
    """Bitmap of what the holder is fetching from other zones, empty for nothing; None: it is
    not pulling."""


class PullUpdate(Message, frozen=True):
    """News for a leaseholder: the whole `have` bitmap, and digests that it may lack."""

    pull: Short
    slot: Slot
    have: bytes
    digests: tuple[tuple[Count, bytes], ...] = ()
    carrying: bytes | None = None
    """As in `PullOffer`."""
    others: tuple[tuple[PeerId, Slot], ...] | None = None
    """Whom the holder serves besides; None if that hasn't changed."""


class PullProgress(Message, frozen=True):
    """The puller lives and moves on: renews the lease; `wanted` chunks lack a digest."""

    pull: Short
    slot: Slot
    have: bytes
    wanted: tuple[Count, ...] = ()
    known: Count = 0
    """How many digests of the publication the puller knows."""


class PullBye(Message, frozen=True):
    """The lease ends; `complete` says that the puller has, and knows the digests of, all."""

    pull: Short
    slot: Slot
    complete: bool = False


class PullGone(Message, frozen=True):
    """No lease here (any more): withdrawn, never held, or the lease lapsed."""

    pull: Short
    slot: Slot
    reason: Short


class LayoutRequest(Message, frozen=True):
    """The layouts' digests differ: please send yours, from this tensor on."""

    pull: Short
    slot: Slot
    first: Count


class LayoutPage(Message, frozen=True):
    pull: Short
    slot: Slot
    first: Count
    total: Count
    tensors: tuple[TensorSpec, ...]
