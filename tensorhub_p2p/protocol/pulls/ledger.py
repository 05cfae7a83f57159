"""What a pull has of its publication: digests known, chunks held, chunks in flight.

Rule of this file. It keeps the books and says what changed in them; it asks nobody and
does not know who has what. Sets of chunks are ints (bit c for chunk c), as
`ChunkSet.bits`.

Who decides what is right: the origin's digests, which it states itself, or left with the
directory when it withdrew. If two sources state different digests
for a chunk, the origin's counts, else the first; that is remembered as a fact. A chunk
that is held under a digest which the origin then contradicts is revoked: it is missing
again. Digests are announced (`DigestsLearnt`) once the layout is found, as before that
nobody knows which bytes they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.pulls.pages import LayoutAgreement
from tensorhub_p2p.protocol.pulls.pull_events import ChunkRevoked, DigestsLearnt
from tensorhub_p2p.protocol.pulls.sources import Source


class Ledger:
    """The books of one pull; empty, of no chunks, until the layout is settled.

    What twins state (sources.py) is of another publication, and none of its business.
    """

    def __init__(
        self, publication: Publication, agreement: LayoutAgreement, outbox: Outbox
    ) -> None:
        self.manifest = Manifest(0)
        self.held = 0
        """Chunks that are here and verified."""
        self.learnt = 0
        """How often something was learnt of digests, or forgotten."""
        self.flying = 0
        """Chunks that some reader is fetching."""
        self._publication = publication
        self._agreement = agreement
        self._outbox = outbox

    def renew(self) -> None:
        """Begin with the grid that is settled now, and no digests."""
        self.manifest = Manifest(self._agreement.num_chunks)
        self.learnt += 1

    @property
    def settled(self) -> bool:
        """It is known which layout the publication has, and so its chunks."""
        return self._agreement.settled

    @property
    def holding(self) -> ChunkSet:
        return ChunkSet(self.manifest.num_chunks, self.held)

    @property
    def needed(self) -> int:
        """Chunks that are missing, those in flight included."""
        return ((1 << self.manifest.num_chunks) - 1) & ~self.held

    @property
    def wanted(self) -> int:
        """Chunks that could be asked for now, if somebody has them."""
        return self.needed & self.manifest.known.bits & ~self.flying

    @property
    def all_digests_known(self) -> bool:
        return self.settled and self.manifest.complete

    def hold(self, chunk: int, digest: bytes) -> bool:
        """These bytes are here; whether they are the right ones, as far as is known by now."""
        right = self.manifest.get(chunk) == digest
        if right:
            self.held |= 1 << chunk
        return right

    def learn(self, source: Source, digests: Iterable[tuple[int, bytes]]) -> None:
        """What this source says the digests are; ValueError if one can't be, from there on."""
        is_origin = source.id.slot.group.replica == self._publication.replica
        self._learn(digests, source.note, is_origin=is_origin)

    def learn_left(self, digests: tuple[bytes, ...]) -> None:
        """All digests, as the origin left them behind; ValueError if they can't be."""
        if len(digests) != self.manifest.num_chunks:
            raise ValueError(f"{len(digests)} digests of {self.manifest.num_chunks} chunks")
        self._learn(enumerate(digests), lambda _what: None, is_origin=True)

    def _learn(
        self,
        digests: Iterable[tuple[int, bytes]],
        note: Callable[[str], None],
        *,
        is_origin: bool,
    ) -> None:
        new: list[tuple[int, bytes]] = []
        for chunk, digest in digests:
            if not self.manifest.admits(chunk, digest):
                raise ValueError(f"no digest of chunk {chunk}")
            old = self.manifest.get(chunk)
            if old == digest:
                continue
            if old is not None:
                note(f"states another digest for chunk {chunk} than a source before it")
                if not is_origin:
                    continue
                self._revoke(chunk)
            self.manifest.put(chunk, digest)
            self.learnt += 1
            new.append((chunk, digest))
        if new and self._agreement.found is not None:
            self._outbox.emit(DigestsLearnt(tuple(new)))

    def announce_known(self) -> None:
        """The layout was found just now: say what was learnt before."""
        known = tuple((chunk, self.manifest[chunk]) for chunk in self.manifest.known)
        if known:
            self._outbox.emit(DigestsLearnt(known))

    def _revoke(self, chunk: int) -> None:
        if self.held >> chunk & 1:
            self.held &= ~(1 << chunk)
            self._outbox.emit(ChunkRevoked(chunk))
