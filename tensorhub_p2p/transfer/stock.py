"""What lies in this process's memory already, as a source of a pull.

Rule of this file. A `Stock` answers a pull's messages as the holder of a slot would, at once
and on the pull's own thread; the pull treats it as the nearest of its sources. It neither pulls
nor decides what its memory is for.

Theory. It states which digests the chunks have that were verified when they came. A pull of the
same publication takes these for its digests like any other holder's word; one of another
publication uses each chunk of which the origin's list says the same (a *twin*, pulls/sources.py).
What is copied is hashed again, so memory that somebody wrote into is noticed, and the chunk is
fetched from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.manifest import Manifest
from tensorhub_p2p.protocol.messages import (
    Endpoint,
    LayoutPage,
    LayoutRequest,
    Message,
    Phase,
    PullHello,
    PullOffer,
)
from tensorhub_p2p.protocol.pulls.sources import AT_HAND, Candidate, SourceId
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.transports.memory import MemoryTransport


class Stock:
    """Verified chunks of one publication. `region` is in one piece; `digests` by chunk."""

    def __init__(
        self,
        source: SourceId,
        publication: Publication,
        region: Region,
        digests: Mapping[int, bytes],
    ) -> None:
        self.source = source
        self.publication = publication
        self.transport = MemoryTransport()
        self._layout = region.layout
        self._have = ChunkSet.of(region.layout.num_chunks, digests)
        self._manifest = Manifest(region.layout.num_chunks)
        for chunk, digest in digests.items():
            self._manifest.put(chunk, digest)
        self._endpoint = Endpoint(self.transport.name, self.transport.export(region, self._have))

    @property
    def candidate(self) -> Candidate:
        """It, as a holder that the pull may ask."""
        peer, slot = self.source
        return Candidate(peer, slot, Phase.READY, AT_HAND, self.publication)

    def answer(self, message: Message) -> Message | None:
        """What it says to this; None: nothing."""
        if isinstance(message, PullHello):
            return self._offer(message.pull)
        if isinstance(message, LayoutRequest):
            tensors = self._layout.tensors
            page, total = tensors[message.first :], len(tensors)
            return LayoutPage(message.pull, self.source.slot, message.first, total, page)
        return None

    def _offer(self, pull: str) -> PullOffer:
        known, digests = self._manifest.pack()
        return PullOffer(
            pull=pull,
            slot=self.source.slot,
            publication=self.publication,
            granted=True,
            layout=self._layout.digest,
            num_bytes=self._layout.num_bytes,
            chunk_bytes=self._layout.chunk_bytes,
            have=self._have.to_bytes(),
            known=known,
            digests=digests,
            endpoints=(self._endpoint,),
        )
