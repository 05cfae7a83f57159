"""The list of chunk digests that a publication's origin took, as far as somebody knows it.

Rule of this file. A manifest knows digests and nothing else: not who has the bytes, not
how they move. Every holder keeps one and serves it, so that the content of a publication
is known independently of its origin. Whether a second, different digest for a chunk may
replace the first is for the caller to decide.

On the wire the set of known chunks is a bitmap, and the digests follow in the order of
their chunks.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.chunks import ChunkSet

DIGEST_BYTES = 16
"""Bytes of one digest (xxh3, 128 bits)."""


class Manifest:
    """Digests by chunk, for `num_chunks` chunks; `known` is the set of those that are known."""

    __slots__ = ("_digests", "known", "num_chunks")

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self.known = ChunkSet(num_chunks)
        self._digests: dict[int, bytes] = {}

    def __getitem__(self, chunk: int) -> bytes:
        """The chunk's digest; KeyError if it isn't known."""
        return self._digests[chunk]

    def get(self, chunk: int) -> bytes | None:
        return self._digests.get(chunk)

    def __len__(self) -> int:
        """How many digests are known."""
        return len(self._digests)

    @property
    def complete(self) -> bool:
        return len(self._digests) == self.num_chunks

    def admits(self, chunk: int, digest: bytes) -> bool:
        """Whether this can be a digest of this publication at all."""
        return 0 <= chunk < self.num_chunks and len(digest) == DIGEST_BYTES

    def put(self, chunk: int, digest: bytes) -> None:
        """Know this digest from now on, whatever was known before; ValueError if malformed."""
        if not self.admits(chunk, digest):
            raise ValueError(
                f"a digest of {len(digest)} bytes for chunk {chunk} of {self.num_chunks}; "
                f"expected {DIGEST_BYTES} bytes"
            )
        self._digests[chunk] = digest
        self.known.add(chunk)

    def pack(self) -> tuple[bytes, bytes]:
        """(bitmap of the known chunks, their digests in order), as `PullOffer` carries them."""
        return self.known.to_bytes(), b"".join(self._digests[chunk] for chunk in self.known)


def unpack(num_chunks: int, known: bytes, digests: bytes) -> list[tuple[int, bytes]]:
    """What `Manifest.pack` packed; ValueError if the two fit neither each other nor the grid."""
    chunks = ChunkSet.from_bytes(num_chunks, known)
    if len(digests) != len(chunks) * DIGEST_BYTES:
        raise ValueError(f"{len(digests)} bytes of digests for {len(chunks)} chunks")
    return [
        (chunk, digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES])
        for i, chunk in enumerate(chunks)
    ]
