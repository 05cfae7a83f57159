"""Which id a handle's next publication gets, and which ids are used up.

Rules of this file. `Numbering` belongs to one handle, knows what that handle published
before, and sends nothing. What others published, the owners of the versions key know
(admission.py).

A publication's epoch is the one that its generation read, plus one for each rewind of the
generation before, plus one if it rewinds itself. A rewind counts once it has come through, or was
refused: the epoch that it wanted has something higher, and so all shards leave it behind alike,
whichever of them were refused. One that timed out, or was interrupted, does not: it is tried again,
and has to go where the other shards' went.

A handle never publishes below its own last publication, nor again an id that was whole and was
withdrawn: whoever holds that id has other bytes (G1).
"""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.messages import GenerationRecord


class Numbering:
    """The publications of one handle, by their ids."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._rewinds = 0
        """Rewinds that count, of this generation."""
        self._rewinding = False
        """The publication under way is one that may come to count."""
        self._last_published = (-1, -1)
        self._last_whole: Publication | None = None
        """The last own one that was withdrawn after it had been whole: its id is used up."""

    def next_generation(self) -> None:
        """Its epoch counts the rewinds that came before it."""
        self._rewinds = 0

    def propose(self, record: GenerationRecord, version: int, *, rewind: bool) -> Publication:
        """The id under which `version` would be published in this generation."""
        epoch = record.epoch + self._rewinds + (1 if rewind else 0)
        self._rewinding = rewind
        return Publication(epoch, version, self._replica, record.generation)

    def forbids(self, publication: Publication) -> str:
        """Why this handle may not publish it; "" if it may."""
        if publication.order >= self._last_published and publication != self._last_whole:
            return ""
        epoch, newest = self._last_published
        return f"this handle published version {newest} of epoch {epoch} before"

    def published(self, publication: Publication) -> None:
        """It is on W owners."""
        self._last_published = max(self._last_published, publication.order)
        self._count()

    def refused(self) -> None:
        """There is something higher, or it is not this handle's to publish."""
        self._count()

    def _count(self) -> None:
        self._rewinds += self._rewinding
        self._rewinding = False

    def withdrawn(self, publication: Publication, *, was_whole: bool) -> None:
        """It is hidden; it may also be one that was pulled from others."""
        if was_whole and publication.replica == self._replica:
            self._last_whole = publication
