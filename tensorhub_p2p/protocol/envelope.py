"""What surrounds every message on the wire, and the one codec.

Rules of this file. It packs and checks form, never meaning: whether a message is for this
peer, and welcome, is decided by whoever receives it. Bytes that are no message of this
wire, of another version or of a kind not known here are `Undecodable`: counted by the
receiver, never an error.
"""

from __future__ import annotations

import msgspec

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import Message, Short

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 8 << 20
"""Largest message that is sent or accepted; a layout page or digest list stays far below."""


class Undecodable(ValueError):
    """The bytes are no message of this wire: garbage, another version, or an unknown kind."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What surrounds every message.

    `cluster` and `to` are checked by the receiver, so that a peer on a reused address
    never mixes with strangers. `reply_to` is the sender's control endpoint.
    """

    version: int
    cluster: Short
    zone: Short
    sender: PeerId
    reply_to: Short
    to: PeerId
    kind: Short
    body: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decoders: dict[str, msgspec.msgpack.Decoder[Message]] = {}


def encode(envelope: Envelope) -> bytes:
    return _encode(envelope)


def pack(message: Message) -> tuple[str, msgspec.Raw]:
    """`kind` and `body` of an envelope for this message."""
    return type(message).__name__, msgspec.Raw(_encode(message))


def open_envelope(data: bytes) -> Envelope:
    """The envelope of `data`, its body still packed; raises Undecodable."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise Undecodable(f"{len(data)} bytes exceed the limit of {MAX_MESSAGE_BYTES}")
    try:
        envelope = _decode_envelope(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(str(error)) from error
    if envelope.version != WIRE_VERSION:
        raise Undecodable(f"wire version {envelope.version}, this peer speaks {WIRE_VERSION}")
    return envelope


def unpack(envelope: Envelope) -> Message:
    """The message in an envelope; raises Undecodable."""
    kind = Message.kinds.get(envelope.kind)
    if kind is None:
        raise Undecodable(f"unknown kind {envelope.kind!r}")
    decoder = _decoders.get(envelope.kind)
    if decoder is None:
        decoder = _decoders[envelope.kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(f"{envelope.kind}: {error}") from error
