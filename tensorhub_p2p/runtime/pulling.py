"""One `replicate`, from the group's answer to the last verified byte.

Rules of this file. It connects three things that don't know each other: the engine of a
pull (transfer/engine.py), the node that announces what the handle holds, and the handle's
exports. It owns the order of steps around the moving of bytes:

    follow the holders -> a source is within reach, the layout fits
      -> the handle gives up its old version        (the last moment without a trace; the pull
                                                     goes on listening to its sources meanwhile)
      -> export the memory, announce a partial holder (of more than one chunk, or across zones)
      -> each verified chunk is exported and served on
      -> announce a whole holder, and tell the group that this shard is done
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub_p2p.errors import (
    IntegrityError,
    LayoutMismatch,
    TensorHubError,
    Timeout,
    VersionUnavailable,
)
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.pulls.serving import NOBODY
from tensorhub_p2p.protocol.pulls.sources import SourceId
from tensorhub_p2p.protocol.shards.verbs import Answer
from tensorhub_p2p.results import Pull
from tensorhub_p2p.runtime.driver import Driver
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.runtime.misfits import misfit
from tensorhub_p2p.runtime.reporting import report
from tensorhub_p2p.runtime.tenure import OldVersion
from tensorhub_p2p.runtime.verbs import Running, Start
from tensorhub_p2p.transfer.digest import digest
from tensorhub_p2p.transfer.engine import Hooks, ShardPull
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.stock import Stock

if TYPE_CHECKING:
    from tensorhub_p2p.runtime.progress import Progress


NOBODY_CAN = (VersionUnavailable, IntegrityError, LayoutMismatch)
"""Ends that the next try would meet again, in every shard or in this one."""


def announcing(
    driver: Driver, slot: Slot, answer: Answer, exported: Exported, *, complete: bool
) -> Start:
    """A verb: tell others what a pull is bringing to the slot, or brought."""
    node, layout, endpoints = driver.node, exported.region.layout, exported.endpoints
    return lambda now, number, deadline: node.hold(
        now, number, deadline, slot, answer, layout, endpoints, complete
    )


def is_intact(driver: Driver, slot: Slot, region: Region) -> bool:
    """Whether the memory has the bytes, all of them, that a pull verified for this slot."""

    def known(_now: float) -> tuple[bytes | None, ...]:
        server = driver.node.shards[slot].server
        chunks = range(region.layout.num_chunks)
        return tuple(server.manifest.get(chunk) if server else None for chunk in chunks)

    scratch = Scratch()
    try:
        digests: tuple[bytes | None, ...] = driver.ask(known)
        return all(digest(region, chunk, scratch) == d for chunk, d in enumerate(digests))
    finally:
        scratch.close()


class PullRun(Hooks):
    """Pulls what `answer` says into `region`. Use once, on the thread that waits for it."""

    def __init__(
        self,
        driver: Driver,
        slot: Slot,
        region: Region,
        answer: Answer,
        timeout: float,
        progress: bool,
        stock: Stock | None = None,
    ) -> None:
        """`stock`: what was prefetched, and may be of use."""
        self.exported: Exported | None = None
        """What others may read of the memory; None until bytes may change."""
        self.complete = False
        """Every byte is in place and verified, whatever became of telling the others."""
        self.ended: TensorHubError | None = None
        """It is complete, but the call was ended for the whole group meanwhile."""
        self.unavailable = False
        """It failed for a reason that does not pass: asking for it again is of no use."""
        self._driver = driver
        self._slot = slot
        self._answer = answer
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._old: OldVersion
        self._announced: Running | None = None
        self._untold: dict[int, bytes] = {}
        """Chunks that were verified while nothing was announced."""
        self._registering = 0.0
        self._finishing = 0.0
        self._name = f"{driver.peer_id}/{secrets.token_hex(4)}"
        self._inbox = driver.open_inbox(self._name)
        self._progress: Progress | None = None
        if progress:
            from tensorhub_p2p.runtime.progress import Progress  # rich: slow to import

            self._progress = Progress(str(answer.publication))
        self._pull = ShardPull(
            pull=self._name,
            publication=answer.publication,
            own=SourceId(driver.peer_id, slot),
            region=region,
            transports=driver.transports,
            choices=driver.choices,
            config=driver.config.pull,
            inbox=self._inbox,
            send=driver.send,
            locate=driver.locality,
            deadline=self._deadline,
            hooks=self,
            lag=lambda: driver.control.lag,
            rng=random.Random(secrets.randbits(64)),
            stock=stock,
            known=driver.layouts,
        )

    def run(self, old: OldVersion) -> Exported:
        """Pull; returns what others may read from now on. Raises as `ShardPull.run` does.

        `old` is given up before the first byte changes.
        """
        self._old = old
        driver, answer = self._driver, self._answer
        model, shard = self._slot.group.model, self._slot.shard
        unfollow = driver.follow(
            self._inbox,
            lambda now: driver.node.follow(now, model, shard, answer.publication, answer.sources),
        )
        try:
            self._pull.run()
        except BaseException as error:
            self.unavailable = isinstance(error, NOBODY_CAN)
            if self.exported is None:
                old.abandon()
            self._end_announcement()
            if isinstance(error, LayoutMismatch):
                raise self._misfit(error) from error
            raise
        finally:
            driver.close_inbox(self._name)
            if self._progress is not None:
                self._progress.close()
            if driver.running:
                unfollow()
        self.complete = True
        self._settle_announcement()
        return self._finish()

    def _misfit(self, error: LayoutMismatch) -> LayoutMismatch:
        model, publication = self._slot.group.model, self._answer.publication
        return misfit(model, publication, self._pull.sources, self._driver.name, str(error))

    @property
    def moved(self) -> int:
        """Bytes that came."""
        return self._pull.moved

    @property
    def lasted(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    @property
    def quiet(self) -> float:
        """Seconds since the last byte came, or since it began."""
        return min(self.lasted, time.monotonic() - self._pull.moved_at)

    def cancel(self) -> None:
        """From another thread: end the pull with PeerClosed."""
        self._inbox.put(None)

    # --- hooks of the engine, on this thread ---------------------------------------------

    def prepare(self, ready: Callable[[], None]) -> None:
        self._old.begin(self._time_left(), ready)

    def begin(self, into: Region) -> bool:
        self._old.end()
        if time.monotonic() >= self._deadline:
            held_up = self._old.held_up
            raise Timeout(
                f"pulling {self._answer.publication} timed out: all the time was needed to give up "
                f"the version before{f' ({held_up})' if held_up else ''}; no byte was written"
            )
        started = time.monotonic()
        exported = Exported(self._driver.transports, into, ChunkSet(into.layout.num_chunks))
        self.exported = exported
        self._driver.regions[self._slot] = into
        into.note_written()
        crosses = self._pull.crosses
        # One chunk alone is nothing to share before it is whole; but once is enough to fetch it
        # from another zone.
        if into.layout.num_chunks > 1 or crosses:
            start = announcing(self._driver, self._slot, self._answer, exported, complete=False)
            then = self._look_for_others if crosses else None
            self._announced = self._driver.verb(self._time_left(), start, then)
        self._registering = time.monotonic() - started
        if self._progress is not None:
            self._progress.begin(into.layout)
        return self._announced is not None

    def _look_for_others(self, now: float, _result: object) -> None:
        """Our announcement stands in the directory: who else's does?"""
        self._driver.node.look_for_holders(now, self._slot.group.model, self._slot.shard)

    def digests(self, digests: tuple[tuple[int, bytes], ...]) -> None:
        if self._announced is not None:
            for chunk, known in digests:
                self._driver.learnt.add(self._slot, self._answer.publication, (chunk, known))

    def held(self, chunk: int, digest: bytes, known_to: frozenset[PeerId]) -> None:
        assert self.exported is not None
        self.exported.allowed.add(chunk)
        if self._announced is not None:
            held = (chunk, digest, known_to)
            self._driver.verified.add(self._slot, self._answer.publication, held)
        else:
            self._untold[chunk] = digest
        if self._progress is not None:
            self._progress.advance(chunk)

    def carrying(self, chunks: int | None) -> None:
        if self._announced is not None:
            node, slot, publication = self._driver.node, self._slot, self._answer.publication
            self._driver.control.post(lambda now: node.carries(now, slot, publication, chunks))

    def revoked(self, chunk: int) -> None:
        assert self.exported is not None
        self.exported.allowed.discard(chunk)
        self._untold.pop(chunk, None)
        node, slot, publication = self._driver.node, self._slot, self._answer.publication
        self._driver.control.post(lambda now: node.revoked(now, slot, publication, chunk))

    # --- announcing ----------------------------------------------------------------------

    def _time_left(self) -> float:
        return max(0.01, self._deadline - time.monotonic())

    def _settle_announcement(self) -> None:
        """The first announcement ran beside the pull; a handle has one verb at a time."""
        if self._announced is not None:
            self._announced.future.exception()

    def _end_announcement(self) -> None:
        """The same without waiting for it: the pull failed."""
        if self.exported is not None:
            if self._announced is not None:
                self._driver.interrupt(self._slot, self._announced)
                if self._driver.running:
                    self.carrying(None)
            self._settle_announcement()

    def _finish(self) -> Exported:
        started = time.monotonic()
        exported = self.exported
        assert exported is not None
        announce = announcing(self._driver, self._slot, self._answer, exported, complete=True)
        node, slot, publication = self._driver.node, self._slot, self._answer.publication

        def start(now: float, number: int, deadline: float) -> None:
            announce(now, number, deadline)
            untold = [(chunk, known, NOBODY) for chunk, known in self._untold.items()]
            node.verified(now, slot, publication, untold)

        def finish(now: float, _result: object) -> TensorHubError | None:
            return node.finish(now, slot, self._answer.call)

        self.ended = self._driver.run(self._slot, self._time_left(), start, finish)
        self._finishing = time.monotonic() - started
        return exported

    # --- the report ----------------------------------------------------------------------

    def report(self, seconds: float) -> Pull:
        """What the whole call did, of which `seconds` passed."""
        outcome = self._pull.outcome()
        registering = self._registering + self._finishing
        return report(
            self._slot.group.model,
            self._answer.publication,
            outcome,
            seconds,
            registering,
            self._driver.name,
        )
