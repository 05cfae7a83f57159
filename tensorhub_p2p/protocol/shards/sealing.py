"""The list of digests, left with the owners by an origin that goes.

Rules of this file. `Sealing` belongs to one slot. It sees to it that all digests of what the slot
serves are taken, and writes their list where pullers look for holders; why, and what is waited
for, withdrawing.py says.

Theory of operation (DESIGN, "Unpublishing", step 2). A chunk counts only if it matches the
origin's digest. While somebody is still bringing the version, and nobody else knows all
digests (`ShardServer.sealed`), the list must outlive the origin: it is written to W owners of
the shard's holders key, and pulls get it with the holders (following.py). So partial holders can
make the version whole among themselves. It is forgotten some time after its slot was hidden, as
references are (groups/forgetting.py).

Bounds: one list a slot, of at most `MAX_BYTES`, as all that is on record under a key has to fit
into one message. A longer one is not written: then only what pullers have been told is known.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.protocol.directory.records import Records, Refused, holders_key, slot_name
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import DigestList
from tensorhub_p2p.protocol.pulls.serving import DigestsWanted, ShardServer

MAX_BYTES = 64 << 10
"""4096 chunks: of 64 GiB, at the largest size of a chunk."""


class Sealing:
    """Of one slot; `server` gives what it serves at present."""

    def __init__(
        self, slot: Slot, records: Records, server: Callable[[], ShardServer | None], outbox: Outbox
    ) -> None:
        self._slot = slot
        self._records = records
        self._server = server
        self._outbox = outbox
        self._key = holders_key(slot.group.model, slot.shard)
        self._name = f"digests/{slot_name(slot)}"
        self._turn = 0
        """Counts who waits: only the last one is told."""

    @property
    def complete(self) -> bool:
        """All digests are taken."""
        server = self._server()
        return server is None or server.manifest.complete

    @property
    def sealed(self) -> bool:
        """Somebody else knows them all."""
        server = self._server()
        return server is None or server.sealed

    @property
    def digests(self) -> tuple[bytes, ...]:
        """All of them, in order; they are complete."""
        server = self._server()
        chunks = range(server.layout.num_chunks) if server is not None else ()
        return tuple(server.manifest[chunk] for chunk in chunks) if server is not None else ()

    def hurry(self) -> None:
        """Have those taken that are missing."""
        server = self._server()
        if server is not None and not server.manifest.complete:
            chunks = range(server.layout.num_chunks)
            missing = tuple(chunk for chunk in chunks if server.manifest.get(chunk) is None)
            self._outbox.emit(DigestsWanted(self._slot, server.publication, missing))

    def leave(self, now: float, generation: int, then: Callable[[float], None]) -> None:
        """Write the list; `then` once it is on W owners, at once if it is too long."""
        server = self._server()
        digests = b"".join(self.digests)
        if server is None or len(digests) > MAX_BYTES:
            then(now)
            return
        value = DigestList(server.publication, server.layout.digest, digests)

        self._turn += 1
        turn = self._turn

        def written(now: float, _refused: Refused | None) -> None:
            if turn == self._turn:
                then(now)

        self._records.write(now, self._key, self._name, generation, value, written)

    def stop(self) -> None:
        """Nobody waits for it any more; what is being written is written."""
        self._turn += 1

    def forget(self, now: float) -> None:
        """The slot is hidden: the list goes some time later."""
        self._records.forget(now, self._key, self._name)
