"""Whether what one slot published are the bytes that the version has already.

Rules of this file. A `Comparing` belongs to one slot's references (publishing.py). It sees to it
that a publisher with a rival says what it consists of, and notices that a lower publication of the
version consists of something else; which one that is, selection.py finds in the registers. What
follows from it, publishing.py and shard.py do. Only publishers compare: whoever pulls checks each
chunk against the list of the publication that its group resolved.

Theory of operation. Data-parallel trainers publish the same version side by side, each under an
id of its own. Its *content* is the digest of layout and digest list.

    ALONE      no other replica's publication of the version is known: nothing is written or read
               for its sake, but each record that is written anyway, once all digests were taken,
               says the content (`References.write`)
    RIVALLED   another replica's own slot has the version: the content is written, once, as soon
               as all digests are taken; then the key is read until the lowest rival said its own
    AGREED     that one's content is ours, shard for shard: nothing more is read for it. The
               lowest itself has only to say its own
    (over)     a lower one has other bytes: `References.contradicted`

Rivals are seen in what is read of the versions key for other reasons: right after announcing, when
a generation formed, and while somebody reads from here (retracting.py), which is when a rival that
came later begins to matter: pulls ask the holders of all publications of a version. So two that
differ are told apart once anybody pulls the version, and often before. Of a rival that nobody asks
and that came later nothing is known, nor does it matter.

Which of two is known to whom depends on buckets (directory/buckets.py), so one that waits looks as
far as the look did that found the rival: at its own replica's bucket, or at all of them.

What bounds it: one read under way; pauses that double, from `interval` to `LONGEST_PAUSE`; one
write a publication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Registers,
    values,
    versions_key,
)
from tensorhub_p2p.protocol.groups.selection import Holding, holdings
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.messages import Phase, VersionRecord
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.retention.held import RefState

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.shards.publishing import References

LONGEST_PAUSE = 60.0
"""Seconds between two looks whether a rival has said its content."""


def content_of(server: ShardServer) -> bytes:
    """16 bytes that stand for all that it serves; b"" as long as some digest isn't taken.

    blake2b of the standard library: the shards' bytes were hashed before, so it need not be fast,
    and no two lists may meet in it by chance.
    """
    if not server.manifest.complete:
        return b""
    digest = hashlib.blake2b(server.layout.digest, digest_size=16)
    digest.update(b"".join(server.manifest[c] for c in range(server.layout.num_chunks)))
    return digest.digest()


class Comparing:
    """Of one slot; `interval` in seconds."""

    def __init__(
        self, references: References, records: Records, liveness: Liveness, interval: float
    ) -> None:
        self._references = references
        self._liveness = liveness
        self._interval = self._pause = interval
        group = references.slot.group
        key = versions_key(group.model)
        self._far = Inquiry(records, key, self.saw)
        self._near = Inquiry(records, key, self.saw_near, near=group.replica)
        self._again = self._far
        """How the next look is to be."""
        self._look_at: float | None = None
        self._owes = self._said = False
        """The content is to be written once it is known; it was."""

    def stop(self) -> None:
        """It is given up, or held anew: whatever was known of rivals is forgotten."""
        self._far.stop()
        self._near.stop()
        self._look_at, self._pause = None, self._interval
        self._owes = self._said = False

    def look_at_digests(self, now: float) -> None:
        """Some may have been taken."""
        if self._owes and self._references.content:
            self._owes, self._said = False, True
            self._references.say_content(now)

    # --- what others read of the versions key, or we ourselves ---

    def saw_near(self, now: float, registers: Registers) -> None:
        """The own replica's bucket."""
        self._saw(now, registers, self._near)

    def saw(self, now: float, registers: Registers) -> None:
        """All of it."""
        self._saw(now, registers, self._far)

    def _saw(self, now: float, registers: Registers, look: Inquiry) -> None:
        held, shard = self._references.held, self._references.slot.shard
        if self._references.state is not RefState.HELD or not self._references.is_own:
            return
        assert held is not None
        rivals = set(self._rivals(registers, held.publication))
        if not rivals:
            self._rest(look)
            return
        found = holdings(registers, self._liveness.is_gone)
        mine, lowest = found.get(held.publication), found[min(rivals)]
        if mine is None:
            return  # the read began before our own record was written
        if mine.contradicted_by is not None:
            self._references.contradicted(now, mine.contradicted_by)
            return
        self._owes = self._owes or not (self._said or shard in mine.digests)
        self.look_at_digests(now)
        if _is_settled(mine, lowest):
            self._rest(look)
        elif self._look_at is None or look is self._far:
            self._again = look
            self._look_at = self._look_at or now + self._pause

    def _rest(self, look: Inquiry) -> None:
        """This look leaves nothing to wait for; one that goes further may have."""
        if look is self._far or self._again is self._near:
            self._look_at = None

    def _rivals(self, registers: Registers, publication: Publication) -> Iterator[Publication]:
        """Of the version, by other replicas, which have them, or said what they were."""
        for register, record in values(registers, VersionRecord):
            theirs, replica = record.publication, record.slot.group.replica
            if theirs.order != publication.order or theirs.replica == publication.replica:
                continue
            there = record.phase is not Phase.HIDDEN and not self._liveness.is_gone(register.writer)
            if replica == theirs.replica and (there or record.digests):
                yield theirs

    # --- time ---

    def tick(self, now: float) -> None:
        if self._look_at is not None and now >= self._look_at:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._look_at = now + self._pause
            self._again.look(now)

    def next_wakeup(self) -> float | None:
        return self._look_at


def _is_settled(mine: Holding, lowest: Holding) -> bool:
    """Nothing that is still to be said would change what we know of it."""
    if lowest.publication > mine.publication or lowest.num_shards != mine.num_shards:
        return True
    shards = set(range(mine.num_shards))
    return shards <= mine.digests.keys() and shards <= lowest.digests.keys()
