"""What tensors hold, in a simulation: a token for each chunk, instead of bytes.

Rules of this file. Values and what may be read of them; who writes when is handles.py's.

A token is a text that names who wrote it, so that a check can tell where what it finds came
from. A chunk that changes while it is read gives a token of its own, as a mix of bytes
would: so does one that a bad wire damaged. Digests are hashes of tokens.

An `Export` is what transports make of a registered region: readers may begin while it is
open, of chunks that it allows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES, Layout, TensorSpec
from tensorhub_p2p.protocol.messages import Endpoint

TRANSPORT = "sim"
Token = str
BLANK: Token = "blank"
"""What tensors hold before anything was written."""


def digest_of(token: Token) -> bytes:
    """16 bytes that stand for the chunk's content, as xxh3 does for real bytes."""
    return hashlib.blake2b(token.encode(), digest_size=16).digest()


def torn(one: Token, other: Token) -> Token:
    """A read that saw both."""
    return f"torn({one}|{other})"


def damaged(token: Token) -> Token:
    """A read that came out wrong though nobody changed anything."""
    return f"damaged({token})"


def layout_of(num_chunks: int) -> Layout:
    """A real layout of so many chunks, of the smallest size; no memory is behind it."""
    size = num_chunks * MIN_CHUNK_BYTES
    return Layout([TensorSpec("w", "uint8", (size,), size)])


@dataclass(eq=False)
class Memory:
    """The registered tensors of one handle."""

    layout: Layout
    tokens: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or [BLANK] * self.layout.num_chunks

    def write(self, content: str) -> None:
        """An optimizer's step: all of it changes."""
        self.tokens = [f"{content}[{chunk}]" for chunk in range(self.layout.num_chunks)]


@dataclass(eq=False)
class Export:
    """A region that others may read."""

    number: int
    memory: Memory
    allowed: ChunkSet
    open: bool = True
    reads: int = 0
    """Reads under way."""

    def admits(self, chunk: int) -> bool:
        return self.open and chunk in self.allowed


def endpoints_of(export: Export) -> tuple[Endpoint, ...]:
    """Where it is read, as others are told."""
    return (Endpoint(TRANSPORT, str(export.number).encode()),)
