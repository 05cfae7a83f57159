"""What members of a zone say to each other of who is there (the room membership/)."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.messages.message import Count, Message, Short


class Status(IntEnum):
    """What is held of a member. At one incarnation the larger value overrides the smaller.

    SUSPECT: silent, and nobody knows why. UNRESPONSIVE: silent, and somebody's sockets show
    that its process is there (paused, or Python's lock held); that is better knowledge.
    """

    ALIVE = 0
    SUSPECT = 1
    UNRESPONSIVE = 2
    DEAD = 3
    LEFT = 4


class Rumour(msgspec.Struct, frozen=True, array_like=True):
    """One claim about one member. `info` comes with the first news of a member.

    `accuser` is who found that out itself: independent accusers of a suspect are counted.
    """

    peer: PeerId
    incarnation: Count
    status: Status
    info: PeerInfo | None = None
    accuser: PeerId = NOBODY


class VersionHint(msgspec.Struct, frozen=True, array_like=True):
    """The newest (epoch, version) of a model, spread to every member as a hint.

    A higher `revision` beats any version: the one named before is no more (hints.py).
    """

    model: Short
    epoch: Count
    version: Count
    revision: Count = 0


class RetainSummary(msgspec.Struct, frozen=True, array_like=True):
    """What the handles of a zone retain of a model: the most of "newest", and single versions."""

    model: Short
    newest: Count
    versions: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()


class ZoneSummary(msgspec.Struct, frozen=True, array_like=True):
    """What a zone tells the others about itself; the higher `counter` is the newer."""

    zone: Short
    counter: Count
    gateways: tuple[PeerInfo, ...]
    """Who speaks for it, the one that wrote this first."""
    members: Count = 0
    """How many it has, about."""
    newest: tuple[VersionHint, ...] = ()
    """The newest version of each model that is whole there, the most recent news first."""
    retains: Annotated[tuple[RetainSummary, ...], Meta(max_length=64)] = ()
    """What its open handles want kept, by model."""
    retracted: Annotated[tuple[VersionHint, ...], Meta(max_length=256)] = ()
    """Versions that were taken back there, the newest of each model."""


class Ping(Message, frozen=True):
    """Direct probe; `seq` comes back in the `Ack`."""

    seq: Count
    rumours: tuple[Rumour, ...] = ()


class PingRequest(Message, frozen=True):
    """Please probe `target` for me: `Ack` me if it answers, `Nack` me if it does not in time."""

    seq: Count
    target: PeerId
    rumours: tuple[Rumour, ...] = ()


class Ack(Message, frozen=True):
    """`fingerprint` is of the sender's view; 0 if it doesn't say."""

    seq: Count
    rumours: tuple[Rumour, ...] = ()
    fingerprint: Count = 0


class Nack(Message, frozen=True):
    seq: Count
    rumours: tuple[Rumour, ...] = ()


class Gossip(Message, frozen=True):
    """News that found no probe to ride on."""

    rumours: tuple[Rumour, ...] = ()
    hints: tuple[VersionHint, ...] = ()
    summaries: tuple[ZoneSummary, ...] = ()


class ViewDigest(Message, frozen=True):
    """Anti-entropy's question: the fingerprint of each part of my view (anti_entropy.py).

    Who sees parts that differ answers with a `PushPull` of just those. `news` is the
    fingerprint of the version hints and zone summaries that I know.
    """

    parts: tuple[Count, ...]
    news: Count = 0


class PushPull(Message, frozen=True):
    """Anti-entropy: what I hold; answer with yours. A join is the first of these.

    `dialled` is the bare address that this was sent to, if it was; the reply repeats it.
    `parts` are those that `view` is about; none means that it is about everything. A `hello`
    holds just the sender itself: its view comes if there is an answer.
    """

    info: PeerInfo
    view: tuple[Rumour, ...]
    joining: bool = False
    hints: tuple[VersionHint, ...] = ()
    dialled: Short = ""
    parts: tuple[Count, ...] = ()
    hello: bool = False
    summaries: tuple[ZoneSummary, ...] = ()


class PushPullReply(Message, frozen=True):
    info: PeerInfo
    view: tuple[Rumour, ...]
    hints: tuple[VersionHint, ...] = ()
    dialled: Short = ""
    parts: tuple[Count, ...] = ()
    hello: bool = False
    summaries: tuple[ZoneSummary, ...] = ()
