"""What a handle serves at present: no shard, or one, or one that it is taking back.

Rules of this file. `Served` belongs to one handle; it makes and ends its `ShardServer`s,
and passes on to it what is about the very publication that it serves. Leases and news are
serving.py's; when to serve or stop is shard.py's.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.layout import Layout
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.pulls.upload_slots import UploadSlots


class Served:
    """At most one server of a handle."""

    def __init__(self, slot: Slot, uploads: UploadSlots) -> None:
        """`uploads` are the slots of the peer."""
        self.server: ShardServer | None = None
        self._slot = slot
        self._uploads = uploads
        self._stopping = False

    def begin(
        self,
        publication: Publication,
        layout: Layout,
        endpoints: tuple[Endpoint, ...],
        *,
        origin: bool,
    ) -> None:
        """Serve this one from now on: all of it as its origin, else what gets verified."""
        have = None if origin else ChunkSet(layout.num_chunks)
        self.end()
        self._stopping = False
        self.server = ShardServer(
            *(self._slot, publication, layout, endpoints, self._uploads.config),
            have=have,
            origin=origin,
            uploads=self._uploads,
        )

    def serves(self, publication: Publication) -> bool:
        """It is being served, and not being taken back."""
        return self._of(publication) is not None and not self._stopping

    def stop(self, now: float, reason: str) -> None:
        """Send the readers elsewhere; the server's `Drained` follows."""
        if self.server is not None:
            self._stopping = True
            self.server.withdraw(now, reason)

    def drained(self) -> None:
        """The readers are gone, unless this is of a server before."""
        if self._stopping:
            self.end()

    def end(self) -> None:
        """Serve nothing, whoever still reads."""
        if self.server is not None:
            self.server.end()
            self.server = None

    def _of(self, publication: Publication) -> ShardServer | None:
        same = self.server is not None and self.server.publication == publication
        return self.server if same else None

    def digested(
        self, now: float, publication: Publication, digests: Iterable[tuple[int, bytes]]
    ) -> None:
        """The origin's digests of chunks were taken."""
        server = self._of(publication)
        if server is not None:
            server.digested_all(now, digests)

    def verified(
        self,
        now: float,
        publication: Publication,
        chunks: Iterable[tuple[int, bytes, frozenset[PeerId]]],
    ) -> None:
        """A pull verified chunks: serve them on. As `ShardServer.verified_all` has it."""
        server = self._of(publication)
        if server is not None:
            server.verified_all(now, chunks)

    def carries(self, now: float, publication: Publication, chunks: int | None) -> None:
        """A pull has these on their way from other zones; None: it is over."""
        server = self._of(publication)
        if server is not None:
            server.carries(now, chunks)

    def revoked(self, now: float, publication: Publication, chunk: int) -> None:
        """A pull takes a verified chunk back: serve it no longer."""
        server = self._of(publication)
        if server is not None:
            server.revoked(now, chunk)
