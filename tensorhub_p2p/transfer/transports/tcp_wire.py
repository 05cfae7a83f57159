"""What goes over a data connection, and the socket calls that both ends need.

Rule of this file. It knows the form of requests and answers, and nothing of who asks or
serves.

On the wire. A request is magic, export id, start, length. The answer is a header of magic,
status and length, then that many bytes. An empty range asks "do you serve this?". Requests
may be sent before earlier ones are answered; answers come in the order of the requests.
Nothing is of variable size but the bytes that were asked for, so there is no length to lie
about.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct

import msgspec

from tensorhub_p2p.transfer.exports import Refusal

MAGIC = b"THR1"
REQUEST = struct.Struct("!4s16sQQ")
ANSWER = struct.Struct("!4sB3xQ")
SERVED = 0
REFUSALS = {
    Refusal.UNKNOWN: "doesn't know these tensors (any more)",
    Refusal.REVOKED: "withdrew these tensors",
    Refusal.NOT_HELD: "doesn't hold all of this range",
    Refusal.OUT_OF_RANGE: "has a shorter layout",
}


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """What a puller must know. `addresses` are host:port, the best first."""

    addresses: tuple[str, ...]
    export: bytes
    tls: bool


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Endpoint).decode


def why_refused(status: int) -> str:
    """What a status other than SERVED says about the holder."""
    known = status in Refusal._value2member_map_
    return REFUSALS[Refusal(status)] if known else f"refuses with status {status}"


def timeval(seconds: float) -> bytes:
    """A struct timeval for SO_RCVTIMEO and SO_SNDTIMEO; zero would mean "for ever"."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("ll", micros // 1_000_000, micros % 1_000_000)


def tls_reason(error: ssl.SSLError) -> str:
    return f"TLS failed ({error.reason or error}): do both peers have the same secret?"


def shut(connection: socket.socket) -> None:
    """End whatever another thread does on this connection. The owner closes it."""
    with contextlib.suppress(OSError):
        # Not SSLSocket's own: that takes the TLS state away under the other thread.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """No waiting for more to send, and a dead host is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
