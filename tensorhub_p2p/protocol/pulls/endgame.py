"""The last chunks: what is under way at a slow source is taken back, and asked of another one.

Rule of this file. It says which reads are to be broken off. Breaking off is the driver's job,
and choosing anew dispatch.py's.

Theory of operation. Near the end some sources have nothing left to give while others still
sit on a chunk. If a source that could give such a chunk has nothing to do, and the chunk is
under way for longer than that source would need LATE_CHUNKS times over (and `late_after` at
least; time behind the slow one's chunks before is not its own), it is *taken back*: the read is
broken off, comes back as failed, and only then is the chunk asked of another source. So no two
readers ever write the same bytes, and what is lost is the part of one chunk that had come, each
time. The slow source is not asked for that chunk again while anybody else has it who was not too
slow with it, too.

Bound: a chunk is taken back MAX_TAKEN_BACK times at most; then it is left where it is.
"""

from __future__ import annotations

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.pull_events import TakeBack
from tensorhub_p2p.protocol.pulls.sources import Source

LATE_CHUNKS = 3
"""Chunks that the other source could have sent meanwhile."""
MAX_TAKEN_BACK = 2


class Endgame:
    """Which reads of one pull are broken off."""

    def __init__(self, ledger: Ledger, config: PullConfig, outbox: Outbox) -> None:
        self._ledger = ledger
        self._config = config
        self._outbox = outbox
        self._times: dict[int, int] = {}
        """By chunk: how often it was taken back."""
        self._due: float | None = None

    def judge(self, now: float, sources: list[Source], withheld: int, across: int) -> None:
        """Take back what idle ones of these open `sources` would bring sooner.

        Those that share their cable are not asked for what is `withheld`; those of other zones
        only for what is in `across`.
        """
        self._due = None
        for idle in sources:
            if idle.in_flight:
                continue
            there = idle.have & ~(idle.bad | idle.given_up) & ~(withheld if idle.shared else 0)
            if idle.far:
                there &= across
            if there & self._ledger.wanted:
                continue  # it has something to do
            late = there & self._ledger.flying
            if late:
                self._take_back(now, late, self._patience(idle), sources)

    def next_wakeup(self) -> float | None:
        """When the next chunk is under way for too long."""
        return self._due

    def _take_back(self, now: float, chunks: int, patience: float, sources: list[Source]) -> None:
        for slow in sources:
            for chunk, asked in slow.in_flight.items():
                if not chunks >> chunk & 1 or slow.given_up >> chunk & 1:
                    continue
                if self._times.get(chunk, 0) >= MAX_TAKEN_BACK:
                    continue
                late_at = max(asked, slow.delivered_at) + patience
                if now < late_at:
                    self._due = earliest(self._due, late_at)
                    continue
                self._times[chunk] = self._times.get(chunk, 0) + 1
                slow.given_up |= 1 << chunk
                self._outbox.emit(TakeBack(slow.id, chunk))

    def _patience(self, idle: Source) -> float:
        """How long a chunk may be under way if this one could give it."""
        if not idle.pace:
            return self._config.source_timeout / 4
        return max(self._config.late_after, LATE_CHUNKS / idle.pace)
