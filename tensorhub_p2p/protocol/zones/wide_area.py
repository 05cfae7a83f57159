"""The wrapping of membership messages that belong to the pool of all zones' gateways.

Rules of this file. It packs and checks form. A gateway is in two pools under one PeerId, and
the wrapping says which of them a message is for.

Bounds: what is wrapped is a membership message, never another wrapping, and as large as any
message of the wire may be.
"""

from __future__ import annotations

import msgspec

from tensorhub_p2p.protocol.envelope import WIRE_VERSION, Envelope, Undecodable, pack, unpack
from tensorhub_p2p.protocol.identity import NOBODY
from tensorhub_p2p.protocol.messages import (
    Ack,
    Gossip,
    Message,
    Nack,
    Ping,
    PingRequest,
    PushPull,
    PushPullReply,
    ViewDigest,
    WideArea,
)

WRAPPED = frozenset(
    kind.__name__
    for kind in (Ping, PingRequest, Ack, Nack, Gossip, ViewDigest, PushPull, PushPullReply)
)
"""Kinds of messages that one pool is made of."""


def wrap(message: Message) -> WideArea:
    kind, body = pack(message)
    return WideArea(kind, bytes(body))


def dialled_in(wrapped: WideArea) -> str:
    """The address that the caller dialled, if it says so."""
    try:
        message = unwrap(wrapped)
    except Undecodable:
        return ""
    return message.dialled if isinstance(message, PushPull) else ""


def unwrap(wrapped: WideArea) -> Message:
    """The message in it; raises Undecodable."""
    if wrapped.kind not in WRAPPED:
        raise Undecodable(f"kind {wrapped.kind!r} is not for the pool of gateways")
    body = msgspec.Raw(wrapped.body)
    return unpack(Envelope(WIRE_VERSION, "", "", NOBODY, "", NOBODY, wrapped.kind, body))
