"""`ShardHandle`: one shard of one replica, and the verbs on it.

States, and which calls fit (anything else is a StateError that says what to call first):

    OPEN         register                                          wait_for  retract  close
    REGISTERED   publish    replicate  prefetch  unregister        wait_for  retract  close
    PUBLISHED    unpublish  replicate  prefetch                    wait_for  retract  close
    TORN         publish    replicate  prefetch  unregister        wait_for  retract  close
    REPLICATING  (inside replicate)                                                   close
    CLOSED       (nothing)

A handle is used by one thread at a time: a second one in its verbs is a StateError.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from tensorhub_p2p.errors import PeerClosed, RetentionLost, StateError, Timeout
from tensorhub_p2p.options import MAX_VERSION, check_flag, check_timeout, checked_integer
from tensorhub_p2p.protocol.groups.selection import newer_than as newer_than_selector
from tensorhub_p2p.protocol.groups.selection import selector_of
from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.messages import Question, Retain
from tensorhub_p2p.protocol.shards.attempts import Attempts
from tensorhub_p2p.protocol.shards.verbs import Answer, VerbId
from tensorhub_p2p.results import HandleState, Pull
from tensorhub_p2p.runtime.driver import Driver
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.runtime.misfits import misfit
from tensorhub_p2p.runtime.prefetching import Prefetch, Prefetcher
from tensorhub_p2p.runtime.pulling import PullRun, announcing, is_intact
from tensorhub_p2p.runtime.tenure import Tenure
from tensorhub_p2p.runtime.verbs import Running, Then
from tensorhub_p2p.transfer.memory import Region

_log = logging.getLogger(__name__)

NEEDS = {
    HandleState.OPEN: "register() the tensors first",
    HandleState.REGISTERED: "publish() or replicate() first",
    HandleState.PUBLISHED: "unpublish() first",
    HandleState.REPLICATING: "a replicate() is under way",
    HandleState.TORN: "replicate() or publish() first: its tensors are a mix of two versions",
    HandleState.CLOSED: "the handle is closed: open() another one",
}
UNREGISTER_FIRST = {
    HandleState.REGISTERED: "unregister() first",
    HandleState.PUBLISHED: "unpublish() and unregister() first",
    HandleState.TORN: "unregister() first",
}
"""What `register` lacks in these states; it differs from what the others lack."""
REGISTERED, PUBLISHED, TORN = HandleState.REGISTERED, HandleState.PUBLISHED, HandleState.TORN
AT_REST = (HandleState.OPEN, REGISTERED, PUBLISHED, TORN)


class ShardHandle:
    """Made by `Peer.open`. Use it as a context manager, or call `close()`.

    Each `timeout` is in seconds from the call on. Besides what a verb names, any may raise
    StateError (the call doesn't fit the handle's state), PeerClosed, and ConfigError (a ValueError)
    for an argument that can't be meant, such as a selector that is none.
    """

    def __init__(
        self, driver: Driver, slot: Slot, num_shards: int, *, spot: bool, retain: Retain
    ) -> None:
        self.model = slot.group.model
        self.replica = slot.group.replica
        self.shard = slot.shard
        self.num_shards = num_shards
        self.spot = spot
        self.retain = retain
        self._slot = slot
        self._driver = driver
        self._tenure = Tenure(driver, slot)
        self._attempts = Attempts(driver.config.pull.unavailable_after, alone=num_shards == 1)
        self._pull: PullRun | None = None
        """The pull under way."""
        self._coming: Publication | None = None
        """What that brings."""
        self._prefetcher = Prefetcher(
            driver, slot, num_shards, lambda: self._coming or self._tenure.holds
        )
        self._busy = threading.Lock()
        self._verb = ""
        self._verb_thread: int | None = None
        """Who is in a verb."""
        self._closed = threading.Lock()
        """Held by the one who closes, and kept."""

    # --- questions -----------------------------------------------------------------------

    @property
    def state(self) -> HandleState:
        """What the handle is doing."""
        return self._tenure.state

    @property
    def version(self) -> int | None:
        """The version that is published here or was replicated; None if there is none."""
        tenure = self._tenure
        return tenure.holds.version if tenure.holds is not None and not tenure.is_lost else None

    @property
    def sealed(self) -> bool:
        """Every digest of what is held here is taken, and known to somebody else as well."""

        def look(_now: float) -> bool:
            server = self._driver.node.shards[self._slot].server
            return server is not None and server.sealed

        return self._tenure.state is not HandleState.CLOSED and bool(self._driver.ask(look))

    def __repr__(self) -> str:
        version = f", version {self.version}" if self._tenure.holds is not None else ""
        return (
            f"<ShardHandle {self._slot} of {self.num_shards}: {self._tenure.state.name}{version}>"
        )

    # --- tensors -------------------------------------------------------------------------

    def register(self, tensors: object) -> None:
        """Name the memory of this shard: an nn.Module, a mapping, or (name, tensor) pairs.

        Tensors are torch's or numpy arrays, in host memory. They are written in place by
        `replicate` and read in place after `publish`. Raises StateError, which names the tensor,
        for one that can't be moved (CUDA, DTensor, meta, sparse and others: the guide lists them),
        for duplicate, empty or overlong names, and if there is nothing to register.
        """
        with self._in_verb("register", HandleState.OPEN):
            region = Region.of(tensors)
            if not region.layout.tensors:
                raise StateError(_nothing_in(tensors))
            self._tenure.region = region
            self._driver.huge_pages.ask(self._tenure.region)
            self._tenure.become(REGISTERED)

    def unregister(self) -> None:
        """Forget the tensors; afterwards nothing reads or writes them any more."""
        with self._in_verb("unregister", REGISTERED, TORN):
            self._leave_failed_call()
            self._prefetcher.end("the tensors were unregistered")
            self._tenure.end_exports(time.monotonic() + self._tenure.lease)
            self._tenure.release()
            self._tenure.become(HandleState.OPEN)

    # --- publishing ----------------------------------------------------------------------

    def publish(self, version: int, *, rewind: bool = False, timeout: float = 60.0) -> None:
        """Make the tensors readable as `version`; they may not change until `unpublish`.

        Returns once the references are on a majority of their owners, in a time that does not
        depend on the size: digests are taken in the background. `rewind=True` begins a
        new epoch, in which versions may start lower again. Raises VersionConflict if a
        higher version exists, GroupBroken, SlotTaken, Timeout.

        Several replicas may publish the same version. If one's bytes turn out to be others than
        those of a replica with a lower name, its next call, whichever but close(), raises
        VersionConflict: it is not published any more then, and its tensors may change. They
        have to register alike: the order of the tensors counts, too.
        """
        version = checked_integer("version", version, 0, MAX_VERSION)
        check_flag("rewind", rewind)
        check_timeout(timeout)
        with self._in_verb("publish", REGISTERED, TORN):
            region = self._registered()
            region.check_unmoved()
            deadline = time.monotonic() + timeout
            self._leave_failed_call()
            self._tenure.end_exports(deadline)
            exported = Exported.whole(self._driver.transports, region)
            self._driver.regions[self._slot] = region
            try:
                self._tenure.holds = self._run(
                    max(0.01, deadline - time.monotonic()),
                    lambda node, now, number, deadline: node.publish(
                        now,
                        number,
                        deadline,
                        self._slot,
                        version,
                        rewind,
                        region.layout,
                        exported.endpoints,
                    ),
                )
            except BaseException:
                self._tenure.drop()  # an interrupt may come when it is announced already
                self._driver.regions.pop(self._slot, None)
                exported.drain(time.monotonic() + 1.0)
                raise
            self._tenure.exported = exported
            self._driver.digests.start(self._slot, self._published(), region)
            self._tenure.become(PUBLISHED)

    def unpublish(self, timeout: float = 30.0, *, force: bool = False) -> None:
        """Take the version back; on return the tensors may change.

        Readers are sent elsewhere and get the time for the chunks in flight. Where this is the
        last copy of a version that somebody retains, or whose pull is decided, it is
        copied to host memory first. RetentionLost if that can't be (`offload_limit`): it
        names who retains the version, and nothing was given up. `force=True` gives it
        up all the same, and never makes a copy. Timeout: then it is still published. If a
        decided pull is all that holds it, and no copy can be made, it waits for its timeout
        and then gives it up. Readers have their lease (`PullConfig.lease_seconds`) in any case:
        where one makes no progress, it may take so much longer than its timeout.
        """
        check_flag("force", force)
        check_timeout(timeout)
        with self._in_verb("unpublish", PUBLISHED):
            self._tenure.unpublish(timeout, force=force)

    def retract(self, version: int, timeout: float = 30.0) -> None:
        """Declare a version bad, in the newest epoch that has it: nobody gets it from now on.

        Who publishes or replicated it keeps its tensors, but serves them no longer; pulls of
        it that are under way end with VersionUnavailable, and nothing retains it. The number
        can't be published again in its epoch. Raises VersionUnavailable if there is no such
        version, Timeout.
        """
        version = checked_integer("version", version, 0, MAX_VERSION)
        check_timeout(timeout)
        with self._in_verb("retract", *AT_REST):
            self._run(
                timeout,
                lambda node, now, number, deadline: node.retract(
                    now, number, deadline, self.model, version
                ),
            )

    # --- replicating ---------------------------------------------------------------------

    def replicate(
        self, version: int | str = "latest", timeout: float = 120.0, *, progress: bool = False
    ) -> Pull:
        """Bring the tensors to `version`: a number, "latest", or "latest-k" for the k-th before.

        All shards of the replica get the same publication for the same call. An absent
        version is waited for. Afterwards the handle serves the version, with no publish call.
        On an error after the first byte was written the handle is TORN; a retry of the
        same call gets the same publication. Raises LayoutMismatch (no byte was written),
        VersionUnavailable, IntegrityError, TransferError, GroupBroken, GroupDivergence, SlotTaken,
        Timeout;
        RetentionLost if the version held before is the last copy of one that somebody
        retains, and can't be kept: then it is still published.
        """
        if not isinstance(version, str):
            version = checked_integer("version", version, 0, MAX_VERSION)
        question = Question("replicate", selector_of(version))
        check_timeout(timeout)
        with self._in_verb("replicate", REGISTERED, PUBLISHED, TORN):
            started = time.monotonic()
            region = self._registered()
            region.check_unmoved()
            region.check_writable()
            answer = self._ask(question, timeout)
            held = self._tenure.holds == answer.publication
            if held or self._take_arrived(answer, started + timeout):
                self._prefetcher.replicated(answer.publication)
                self._finish(answer)
                return self._up_to_date(answer, time.monotonic() - started)
            self._check_shards(answer)
            pull = self._bring(answer, region, started + timeout, progress)
            if pull.ended is not None:
                raise pull.ended
            return pull.report(time.monotonic() - started)

    def _bring(self, answer: Answer, region: Region, deadline: float, progress: bool) -> PullRun:
        """Pull it, or copy what was prefetched of it; afterwards the handle has it."""
        self._coming = answer.publication
        try:
            stock = self._prefetcher.stock_for(answer.publication)
            left = max(0.01, deadline - time.monotonic())
            pull = PullRun(self._driver, self._slot, region, answer, left, progress, stock)
            self._pull = pull
            if self._tenure.state is HandleState.CLOSED:
                pull.cancel()
            try:
                exported = pull.run(self._tenure.old_version())
            except BaseException as error:
                self._pull_failed(pull, answer, error)
                raise
            self._tenure.exported, self._tenure.holds = exported, answer.publication
        finally:
            self._pull = self._coming = None
        self._attempts.succeed()
        self._tenure.become(PUBLISHED)
        self._prefetcher.replicated(answer.publication)
        return pull

    # --- prefetching ---------------------------------------------------------------------

    def prefetch(self, version: int | str = "latest", timeout: float = 600.0) -> Prefetch:
        """Begin to pull a version into host memory, and return at once: the tensors stay in use.

        `version` is as for `replicate`, which then copies what has come and pulls the rest. The
        version is found by what exists now, for this shard alone: what the group decides at the
        next `replicate` counts, and nothing is kept for it meanwhile. One prefetch a handle: a
        newer one takes the place of one of another version. The returned `Prefetch` has `done()`,
        `result(timeout)`, `version`, `bytes` and `cancel()`; it ends by `timeout`. If the handle
        holds the version already, it is done at once. No error of a prefetch is one of the
        handle's: `replicate` just pulls; `result` raises it.
        """
        if not isinstance(version, str):
            version = checked_integer("version", version, 0, MAX_VERSION)
        selector = selector_of(version)
        check_timeout(timeout)
        with self._in_verb("prefetch", REGISTERED, PUBLISHED, TORN):
            return self._prefetcher.ask(selector, timeout, self._registered())

    # --- what replicate does -------------------------------------------------------------

    def _take_arrived(self, answer: Answer, deadline: float) -> bool:
        """All of it came with the try before, which could not tell the others: do that now.

        False if it did not, or if somebody wrote into the tensors since.
        """
        exported = self._tenure.exported
        if exported is None or self._tenure.arrived != answer.publication:
            return False
        if not is_intact(self._driver, self._slot, exported.region):
            return False
        announce = announcing(self._driver, self._slot, answer, exported, complete=True)
        self._driver.run(self._slot, max(0.01, deadline - time.monotonic()), announce)
        self._tenure.holds, self._tenure.arrived = answer.publication, None
        self._attempts.succeed()
        self._tenure.become(PUBLISHED)
        return True

    def _check_shards(self, answer: Answer) -> None:
        """A replica that is cut into another number of shards would get only part of the model."""
        if answer.num_shards != self.num_shards:
            error = misfit(
                self.model,
                answer.publication,
                answer.sources,
                self._driver.name,
                f"it has {answer.num_shards} shards, replica {self.replica!r} has "
                f"{self.num_shards}: open it with num_shards={answer.num_shards}",
            )
            self._give_up(answer, error)
            raise error

    def _pull_failed(self, pull: PullRun, answer: Answer, error: BaseException) -> None:
        if self._tenure.state is HandleState.REPLICATING:
            self._tenure.become(TORN)
        # What was verified is served on, until the handle's next verb.
        self._tenure.exported = pull.exported or self._tenure.exported
        self._tenure.arrived = answer.publication if pull.complete else None
        gives_up = self._attempts.fail(
            answer,
            moved=pull.moved,
            lasted=pull.lasted,
            quiet=pull.quiet,
            timed_out=isinstance(error, Timeout),
            unavailable=pull.unavailable,
        )
        if gives_up:
            self._give_up(answer, error)

    def _leave_failed_call(self) -> None:
        """A replicate failed and isn't tried again: its version is kept for it no longer."""
        failed = self._attempts.leave()
        if failed is not None:
            self._give_up(failed, StateError("it did not ask again"))

    def _give_up(self, answer: Answer, error: BaseException) -> None:
        """Asking again would end the same way: end the call for the whole group."""
        reason = f"shard {self.shard}: {error}"[:1000]
        node = self._driver.node
        self._driver.ask(lambda now: node.give_up(now, self._slot, answer.call, reason))

    def wait_for(self, newer_than: int, timeout: float = 60.0) -> int:
        """Wait until a version above `newer_than` can be replicated; returns that version.

        -1 stands for any version; after a rewind any of the new epoch counts as above. A group
        call, as `replicate` is: all shards of the replica get the same answer. It keeps the
        version for nobody: that may be gone when `replicate` asks for it. Raises GroupBroken,
        GroupDivergence, SlotTaken, Timeout.
        """
        newer_than = checked_integer("newer_than", newer_than, -1, MAX_VERSION)
        check_timeout(timeout)
        with self._in_verb("wait_for", *AT_REST):
            selector = newer_than_selector(newer_than) if newer_than >= 0 else "latest"
            # Nothing is left to do for it: on the control thread, as everybody who waits is told.
            answer = self._ask(Question("wait_for", selector), timeout, self._finished)
            return answer.publication.version

    def _ask(self, question: Question, timeout: float, then: Then | None = None) -> Answer:
        answer: Answer = self._run(
            timeout,
            lambda node, now, number, deadline: node.ask(
                now, number, deadline, self._slot, question
            ),
            then,
        )
        return answer

    def _finish(self, answer: Answer) -> None:
        """The call is done here. Raises the error that it was ended with meanwhile, if it was."""
        self._driver.ask(lambda now: self._finished(now, answer))

    def _finished(self, now: float, answer: Answer) -> Answer:
        """The same, on the control thread."""
        error = self._driver.node.finish(now, self._slot, answer.call)
        if error is not None:
            raise error
        return answer

    def _up_to_date(self, answer: Answer, seconds: float) -> Pull:
        version, epoch = answer.publication.version, answer.publication.epoch
        return Pull(self.model, version, epoch, 0, seconds, up_to_date=True, waiting=seconds)

    # --- twins that return a future ------------------------------------------------------

    def publish_async(
        self, version: int, *, rewind: bool = False, timeout: float = 60.0
    ) -> Future[None]:
        """`publish` on a thread of its own."""
        return _in_background(lambda: self.publish(version, rewind=rewind, timeout=timeout))

    def unpublish_async(self, timeout: float = 30.0, *, force: bool = False) -> Future[None]:
        """`unpublish` on a thread of its own."""
        return _in_background(lambda: self.unpublish(timeout, force=force))

    def replicate_async(
        self, version: int | str = "latest", timeout: float = 120.0
    ) -> Future[Pull]:
        """`replicate` on a thread of its own."""
        return _in_background(lambda: self.replicate(version, timeout))

    def wait_for_async(self, newer_than: int, timeout: float = 60.0) -> Future[int]:
        """`wait_for` on a thread of its own."""
        return _in_background(lambda: self.wait_for(newer_than, timeout))

    # --- the end -------------------------------------------------------------------------

    def close(self, timeout: float = 30.0) -> None:
        """Give the slot back and stop serving; a verb under way in another thread ends first.

        That verb raises StateError. What other handles retain and is held only here is handed
        on, or copied to host memory, as in `unpublish`. By its deadline the handle is
        closed in any case, and the tensors are neither read nor written; RetentionLost is
        raised then if something that is retained was lost.
        """
        check_timeout(timeout)
        if self._may_close():
            deadline = time.monotonic() + timeout
            try:
                self._await_close(self._start_close(timeout))
            finally:
                self._let_go(deadline)

    def _may_close(self) -> bool:
        """Whether it is the caller who closes: nobody did before. It has to go on then."""
        return not self._driver.foreign and self._closed.acquire(blocking=False)

    def _start_close(self, timeout: float) -> Running | None:
        """None if the peer was closed first, and let go of everything."""
        self._tenure.become(HandleState.CLOSED)
        pull = self._pull
        if pull is not None:
            pull.cancel()
        node, slot = self._driver.node, self._slot
        try:
            return self._driver.verb(
                timeout, lambda now, number, deadline: node.close(now, number, deadline, slot)
            )
        except PeerClosed:
            return None

    def _await_close(self, running: Running | None) -> None:
        """Raises RetentionLost."""
        if running is not None:
            with suppress(PeerClosed):
                self._driver.wait(self._slot, running)

    def _let_go(self, deadline: float) -> None:
        """On return the tensors are neither read nor written."""
        self._wait_for_verb(deadline)
        self._prefetcher.end("the handle was closed")
        # Readers had their time: what is left is at most what they read without a lease.
        self._tenure.end_exports(min(time.monotonic() + 1.0, deadline))
        self._tenure.release()

    def _wait_for_verb(self, deadline: float) -> None:
        """Until the verb under way has ended; unless this is its own thread (a signal handler)."""
        if self._verb_thread == threading.get_ident():
            return
        if self._busy.acquire(timeout=max(1.0, deadline - time.monotonic())):
            self._busy.release()

    def __enter__(self) -> ShardHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RetentionLost as lost:
            if error is None:
                raise
            _log.error("%s", lost)  # the error that ends the block is raised

    # --- small parts ---------------------------------------------------------------------

    def _claim(self, timeout: float, *, elastic: bool) -> None:
        """Claim the slot; `Peer.open` calls it. `elastic`: the replica's name was made up."""
        self._run(
            timeout,
            lambda node, now, number, deadline: node.open(
                now,
                number,
                deadline,
                self._slot,
                self.num_shards,
                self.spot,
                self.retain,
                elastic,
            ),
        )

    @contextmanager
    def _in_verb(self, verb: str, *states: HandleState) -> Iterator[None]:
        self._driver.check_process()
        if not self._busy.acquire(blocking=False):
            raise StateError(
                f"{verb}() on {self._slot}: another thread is in its {self._verb}(); "
                "a handle is used by one thread at a time"
            )
        try:
            self._verb, self._verb_thread = verb, threading.get_ident()
            if self._tenure.is_lost:
                self._tenure.accept_loss()
            if self._tenure.state not in states:
                raise self._misfit(verb)
            yield
        finally:
            self._verb_thread = None
            self._busy.release()

    def _misfit(self, verb: str) -> StateError:
        peer_closed = self._driver.closing or not self._driver.running
        if self._tenure.state is HandleState.CLOSED and peer_closed:
            return PeerClosed(f"{verb}() on {self._slot}: its peer is closed, start a new Peer")
        needs = NEEDS[self._tenure.state]
        if verb == "register":
            needs = UNREGISTER_FIRST.get(self._tenure.state, needs)
        return StateError(f"{verb}() on {self._slot}, which is {self._tenure.state.name}: {needs}")

    def _run(
        self,
        timeout: float,
        start: Callable[[Any, float, VerbId, float], None],
        then: Then | None = None,
    ) -> Any:
        """Run a verb of the node and wait for its end, which comes by the deadline."""
        node = self._driver.node
        return self._driver.run(
            self._slot,
            timeout,
            lambda now, number, deadline: start(node, now, number, deadline),
            then,
        )

    def _registered(self) -> Region:
        assert self._tenure.region is not None
        return self._tenure.region

    def _published(self) -> Publication:
        assert self._tenure.holds is not None
        return self._tenure.holds


def _in_background(verb: Callable[[], Any]) -> Future[Any]:
    """Run a verb on a daemon thread: it must not keep the interpreter from exiting."""
    future: Future[Any] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(verb())
            except BaseException as error:  # noqa: BLE001 - it is raised by future.result()
                future.set_exception(error)

    threading.Thread(target=run, name="tensorhub-verb", daemon=True).start()
    return future


def _nothing_in(tensors: object) -> str:
    used_up = ": an iterator gives its tensors only once" if isinstance(tensors, Iterator) else ""
    return f"there is nothing to register in this {type(tensors).__name__}{used_up}"
