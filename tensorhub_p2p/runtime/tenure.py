"""What one handle's tensors hold, who may read them, and how that ends.

Rules of this file. A `Tenure` belongs to one handle, and is changed by the thread that is in one of
its verbs, or closes it. What the verbs mean, and pulls, are handle.py's; how references are
withdrawn is the node's.

Theory of operation. The tensors hold nothing that others may count on (OPEN, REGISTERED, TORN), or
one publication, whole (PUBLISHED). That ends by

    unpublish     the references are withdrawn, then nothing is sent any more
    OldVersion    the same for a pull that brings another version, which goes on meanwhile
    accept_loss   somebody else ended it: the group broke before it was whole, or has other bytes

What may be read, in whole or in part, is `exported`: chunks of a failed pull are served on until
the next verb.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.shards.verbs import VerbId
from tensorhub_p2p.results import HandleState
from tensorhub_p2p.runtime.driver import Driver
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.runtime.verbs import Running
from tensorhub_p2p.transfer.memory import Region

_log = logging.getLogger(__name__)

SHORTEST_DRAIN = 0.1
"""Seconds for what is being sent when a handle stops serving."""


class Tenure:
    """Of one slot of this peer."""

    def __init__(self, driver: Driver, slot: Slot) -> None:
        self.region: Region | None = None
        """The registered tensors."""
        self.exported: Exported | None = None
        """What others may read of them at present."""
        self.holds: Publication | None = None
        """What they are, whole and verified."""
        self.arrived: Publication | None = None
        """What the failed call's pull brought, whole and verified, but could not announce."""
        self._state = HandleState.OPEN
        self._driver = driver
        self._slot = slot

    @property
    def state(self) -> HandleState:
        return HandleState.REGISTERED if self.is_lost else self._state

    def become(self, state: HandleState) -> None:
        """A handle that was closed meanwhile stays closed."""
        if self._state is not HandleState.CLOSED:
            self._state = state

    # --- given up ------------------------------------------------------------------------

    def unpublish(self, timeout: float, *, force: bool = False) -> None:
        by = time.monotonic() + timeout + self.lease
        with self._unpublishing(by):
            lost = self._driver.run(self._slot, timeout, self._withdrawal(force=force))
        for what in lost or ():
            _log.warning("%s: unpublish(force=True) gave up %s", self._slot, what)

    def _withdrawal(self, *, force: bool) -> Callable[[float, VerbId, float], None]:
        node, slot = self._driver.node, self._slot
        return lambda now, number, deadline: node.unpublish(now, number, deadline, slot, force)

    @contextmanager
    def _unpublishing(self, by: float) -> Iterator[None]:
        """Afterwards REGISTERED; also if it was interrupted after the references were hidden.

        In the end its readers have had their lease. They have it until `by` if it was interrupted.
        """
        try:
            yield
        except BaseException:
            self._look_whether_unpublished(by)
            raise
        self._unpublished(time.monotonic())

    def _look_whether_unpublished(self, by: float) -> None:
        if not self._driver.ask(lambda _now: self._driver.node.holds(self._slot)):
            self._unpublished(by)

    def _unpublished(self, by: float) -> None:
        self.holds = None
        self.end_exports(by)
        self.become(HandleState.REGISTERED)

    @property
    def is_lost(self) -> bool:
        """What was published here is not any more, without an unpublish.

        Its group broke before it was whole; or its version has other bytes.
        """
        lost = self._driver.lost.get(self._slot)
        return lost is not None and lost == self.holds and self._state is HandleState.PUBLISHED

    def accept_loss(self) -> None:
        """Raises VersionConflict, once, if other bytes are the reason."""
        self._unpublished(time.monotonic() + self.lease)
        shard = self._driver.node.shards[self._slot]
        conflict = self._driver.ask(lambda _now: shard.take_conflict())
        if conflict is not None:
            raise conflict

    # --- read no more --------------------------------------------------------------------

    @property
    def lease(self) -> float:
        return self._driver.config.pull.lease_seconds

    def end_exports(self, by: float) -> None:
        """On return this process sends no more bytes of the tensors.

        What is on its way is waited for until then, for a lease at most, and a moment at least.
        """
        exported, self.exported = self.exported, None
        if exported is not None:
            if self._state is HandleState.TORN:
                self.drop()
            now = time.monotonic()
            exported.drain(max(now + SHORTEST_DRAIN, min(by, now + self.lease)))
        self.arrived = None
        self._driver.regions.pop(self._slot, None)

    def release(self) -> None:
        """Forget the tensors: on return no transport has a right to their memory."""
        self.holds = None
        region, self.region = self.region, None
        if region is not None:
            self._driver.huge_pages.forget(region)
            for transport in self._driver.transports.values():
                transport.release(region)

    def drop(self) -> None:
        """Others don't find anything here from now on."""
        if self._driver.running:
            self._driver.ask(lambda now: self._driver.node.drop(now, self._slot))

    # --- for another version -------------------------------------------------------------

    def old_version(self) -> OldVersion:
        """What is held now, to be given up once."""
        return OldVersion(self, self._driver, self._slot)

    def _look_after(self, running: Running, by: float) -> None:
        """The withdrawal that began beside a pull has ended, or is about to."""
        with self._unpublishing(by):
            self._driver.wait(self._slot, running)


class OldVersion:
    """What the memory holds until a source of the new version is within reach. Use once.

    To give it up takes its readers' time. The pull goes on meanwhile, as its own sources may be
    waiting for a word of it: two that take each other's versions would else wait for each other.
    """

    def __init__(self, tenure: Tenure, driver: Driver, slot: Slot) -> None:
        self._tenure = tenure
        self._driver = driver
        self._slot = slot
        self._running: Running | None = None
        self._by = 0.0

    def begin(self, timeout: float, ready: Callable[[], None]) -> None:
        """Begin to give it up; `ready()` is called, on any thread, once `end` won't wait long."""
        tenure = self._tenure
        self._by = time.monotonic() + timeout + tenure.lease
        if tenure.holds is None:
            ready()
            return
        # A signal may come between any two steps, also when it was handed over already.
        self._running = self._driver.expect()
        self._running.future.add_done_callback(lambda _future: ready())
        self._driver.hand_over(self._running, timeout, tenure._withdrawal(force=False))

    def end(self) -> None:
        """Nobody reads it any more. Raises what kept it from being given up: then it stays."""
        if self._running is None:
            self._tenure.end_exports(self._by)
        else:
            self._tenure._look_after(self._running, self._by)
        self._tenure.become(HandleState.REPLICATING)

    @property
    def held_up(self) -> str:
        """What it was still waiting for when its time was over; "" if it was done by then."""
        shard = self._driver.node.shards[self._slot]
        return self._driver.ask(lambda _now: shard.held_up) if self._running is not None else ""

    def abandon(self) -> None:
        """The pull ended before a byte was written: keep it, if that can still be."""
        if self._running is not None and self._driver.running:
            self._driver.interrupt(self._slot, self._running)
            self._tenure._look_whether_unpublished(self._by)
