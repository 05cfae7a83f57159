"""What goes between two workers of UCX, and in which steps.

Rule of this file. It knows the form of requests and answers, and nothing of who asks or
serves.

On the wire. An endpoint leads to the holder's worker. The puller sends it a request: magic,
a tag of its own, export id, start, length, and the address of its worker. Everything comes
back under that tag, in order: a header of magic, status and length, then the bytes in
steps of STEP_BYTES. A tag is a new random number for each request: what comes late fits
nothing. Requests are of bounded size, and few are taken in at a time.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta

STEP_BYTES = 1 << 20
MAX_ADDRESS = 4096
"""Bytes of a worker's address."""
AHEAD = 2
"""Steps on their way at a time, and staging buffers of one stream."""

MAGIC = b"THU1"
REQUEST_TAG = 0x5448554250325052
REQUEST = struct.Struct("!4sQ16sQQH")
HEADER = struct.Struct("!4sB3xQ")
SERVED = 0
FULL = 255


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    worker: Annotated[bytes, Meta(max_length=MAX_ADDRESS)]
    export: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sealed: bool
    """It belongs to a cluster with a secret."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Endpoint).decode
