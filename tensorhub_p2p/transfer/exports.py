"""What this process serves: regions under random ids, until they are revoked.

Rule of this file. It knows who may read which chunks of what, and how many reads are
under way. It moves nothing. All of it may be called from any thread.

States of an export: open (reads are admitted, for the chunks that `allowed` has at that
moment) → revoked (no read is admitted any more) → drained (none is under way, and the
memory may change). An id is 16 random bytes, so that it can't be guessed, nor be valid at
another process that took over the port.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

from tensorhub_p2p.errors import StateError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.memory import Region

_log = logging.getLogger(__name__)

EXPORT_ID_BYTES = 16
PATIENT_READS = 4
"""Reads of one reader that a drain waits for; of one who asked for more ahead, for none."""
CUT_SECONDS = 1.0
"""How long a read that was cut off may take to notice."""


class Refusal(IntEnum):
    """Why a read isn't admitted."""

    UNKNOWN = 1
    """No such export: revoked long ago, or of another process."""
    REVOKED = 2
    NOT_HELD = 3
    """Not all of the range may be served (yet)."""
    OUT_OF_RANGE = 4


class Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.name)
        self.refusal = refusal


class _Export:
    __slots__ = ("allowed", "cuts", "region", "revoked")

    def __init__(self, region: Region, allowed: ChunkSet) -> None:
        self.region = region
        self.allowed = allowed
        self.revoked = False
        self.cuts: list[Callable[[], None]] = []
        """One for each read under way: ends it."""


def _check_in_place(region: Region, start: int, length: int) -> None:
    try:
        region.check_in_place(start, length)
    except StateError as error:
        _log.warning("what is published can't be read any more: %s", error)
        raise Refused(Refusal.REVOKED) from error


class Exports:
    """The open exports of one transport."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._exports: dict[bytes, _Export] = {}

    def add(self, region: Region, allowed: ChunkSet) -> bytes:
        """Serve the chunks of `region` in `allowed`, which may grow; returns the id."""
        export_id = secrets.token_bytes(EXPORT_ID_BYTES)
        with self._changed:
            self._exports[export_id] = _Export(region, allowed)
        return export_id

    @contextmanager
    def reading(
        self, export_id: bytes, start: int, length: int, cut: Callable[[], None]
    ) -> Iterator[Region]:
        """Admit one read of [start, start + length), or raise Refused.

        `cut` may be called from another thread and must make the read fail soon; it is the
        same for all reads of one reader.
        """
        with self._changed:
            export = self._exports.get(export_id)
            if export is None:
                raise Refused(Refusal.UNKNOWN)
            if export.revoked:
                raise Refused(Refusal.REVOKED)
            layout = export.region.layout
            if start + length > layout.num_bytes:
                raise Refused(Refusal.OUT_OF_RANGE)
            if not export.allowed.has_all(layout.chunks_of(start, length)):
                raise Refused(Refusal.NOT_HELD)
            export.cuts.append(cut)
        try:
            _check_in_place(export.region, start, length)
            yield export.region
        finally:
            with self._changed:
                export.cuts.remove(cut)
                self._changed.notify_all()

    def revoke(self, export_id: bytes) -> None:
        """Admit no more reads. Harmless when it is revoked already, or unknown."""
        with self._changed:
            export = self._exports.get(export_id)
            if export is not None:
                export.revoked = True

    def drain(self, export_id: bytes, deadline: float) -> None:
        """Revoke, wait for the reads under way until `deadline`, then cut those that remain.

        Who asked for more than `PATIENT_READS` at a time, to be sent whatever happens here, is
        cut at once: to have sent it all may take long. On return no byte of the region is being
        sent, and the id is forgotten.
        """
        self.revoke(export_id)
        with self._changed:
            export = self._exports.get(export_id)
            if export is None:
                return
            for cut, reads in Counter(export.cuts).items():
                if reads > PATIENT_READS:
                    cut()
            self._changed.wait_for(lambda: not export.cuts, deadline - time.monotonic())
            for cut in export.cuts:
                cut()
            self._changed.wait_for(lambda: not export.cuts, CUT_SECONDS)
            self._exports.pop(export_id, None)
