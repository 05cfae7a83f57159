"""The one control thread of a peer: drives its machine with real messages and real time.

Theory. The thread sleeps until a message, a connection's event, a call from another
thread, or the machine's own next deadline; then it hands everything that is there to the
machine, and carries out what the machine put into its outbox. The machine is touched on
this thread only: other threads ask for that with `call` and `post`. Nothing polls, so an
idle peer costs nothing and a message is acted on as soon as it has arrived.

One turn: calls, incoming messages (at most `receive_batch`), messages to the own peer,
connection events, the due tick; after each, the outbox. What the machine or a callback
raises is a *fault*: logged, counted, kept in `faults`, and the thread goes on, since
one bad message must not end a peer.

Bounds: beyond `call_queue` waiting calls the callers wait for room. Stopping takes at
most `close_linger` seconds (the last messages go out) and ends all waiting calls with
PeerClosed. At interpreter exit peers that were forgotten are stopped. A forked child
gets PeerClosed from every use and destroys nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq

from tensorhub_p2p.errors import PeerClosed
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event, Machine, Send, SendTo, earliest
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.protocol.messages import Message
from tensorhub_p2p.runtime.forkguard import ForkGuard
from tensorhub_p2p.runtime.links import Links
from tensorhub_p2p.runtime.monitor import LinkFact

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

MAX_FAULTS_KEPT = 32
LONG_TURN = 0.1
"""Seconds. Threads wait for a processor, or for Python's lock, on a machine that is overloaded."""
_PAUSE_AFTER_FAULT = 0.05
"""Seconds without ticks after a fault, so that a deadline that stays due can't spin the thread."""
_EXIT_TIMEOUT = 2.0

_running: weakref.WeakSet[ControlThread] = weakref.WeakSet()


class ControlThread:
    """Runs `machine` over `links`. The callbacks are called on the control thread.

    `on_end` is called once, as the thread ends, whatever ended it.
    """

    def __init__(
        self,
        machine: Machine,
        links: Links,
        on_event: Callable[[Event], None],
        on_fact: Callable[[float, LinkFact], None] | None = None,
        on_end: Callable[[], None] | None = None,
        on_evidence: Callable[[float, PeerId, Evidence], None] | None = None,
    ) -> None:
        self.machine = machine
        self.links = links
        self.faults: deque[BaseException] = deque(maxlen=MAX_FAULTS_KEPT)
        self.fault_count = 0
        self._on_event = on_event
        self._on_fact = on_fact
        self._on_end = on_end
        self._on_evidence = on_evidence
        self._ticks_from = float("-inf")
        self._busy: tuple[float, float | None] = (0.0, None)
        """Seconds of long turns that are over, and when the present turn began."""
        self._to_self: deque[Message] = deque()
        self._calls: deque[_Call] = deque()
        self._room = threading.Condition()
        self._stopping = False
        self._signalled = False
        self._serviced_links = False
        """Nothing has happened at the connections since they were looked after last."""
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        links.on_fact = self._note_fact
        links.on_evidence = self._note_evidence
        self._arrivals = links.attach(self._selector, self._wake_links)
        self._guard = ForkGuard("this peer", (self, *links.keep_in_child), links.disown)
        self._thread = threading.Thread(
            target=self._run, name=f"tensorhub-control {links.me}", daemon=True
        )

    # --- for other threads -----------------------------------------------------------

    def start(self) -> None:
        self._guard.check()
        _running.add(self)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def lag(self) -> float:
        """Seconds, in all, of turns that took long: what arrives meanwhile is read late."""
        total, began = self._busy
        busy = 0.0 if began is None else time.monotonic() - began
        return total + (busy if busy > LONG_TURN else 0.0)

    def call(self, function: Callable[[float], _Result]) -> Future[_Result]:
        """Run `function(now)` on the control thread, in the order of the calls.

        The future has its result or error. Raises PeerClosed once stopped or in a forked
        child; a call that is still waiting when the peer stops fails with PeerClosed.
        Waiting for the future *on* the control thread would never end.
        """
        future: Future[_Result] = Future()
        self._submit(_Call(function, future))
        return future

    def post(self, function: Callable[[float], object]) -> None:
        """The same without an answer: what it raises is a fault."""
        self._submit(_Call(function, None))

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread: flush what is queued, close the sockets. True when it has ended.

        Callable from any thread and any number of times; does nothing in a forked child.
        """
        if self._guard.foreign:
            return True
        with self._room:
            self._stopping = True
            self._room.notify_all()
        self._wake()
        if self._thread.ident is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _submit(self, call: _Call) -> None:
        self._guard.check()
        with self._room:
            if threading.current_thread() is not self._thread:
                limit = self.links.config.call_queue
                self._room.wait_for(lambda: len(self._calls) < limit or self._stopping)
            if self._stopping:
                raise PeerClosed("this peer is closed: start a new Peer")
            self._calls.append(call)
        self._wake()

    def _wake(self) -> None:
        if self._signalled:
            return
        self._signalled = True
        # Full means that it is awake already; closed means that it has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"\0")

    def _wake_links(self) -> None:
        self._serviced_links = False
        self._wake()

    # --- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            more, wakeup = False, self._machine_wakeup()
            while not self._stopping:
                self._wait(more, wakeup)
                self._busy = (self._busy[0], time.monotonic())
                more, wakeup = self._turn()
                self._busy = (self.lag, None)
        except Exception as fault:
            self.faults.append(fault)
            self.fault_count += 1
            _logger.exception("the control thread of peer %s can't go on", self.links.me)
        finally:
            self._end()

    def _wait(self, more: bool, wakeup: float | None) -> None:
        """Until there is something to do; `wakeup` is the machine's."""
        timeout: float | None = 0.0
        if not (more or self._to_self):
            wakeup = earliest(wakeup, self.links.next_wakeup())
            timeout = None if wakeup is None else max(0.0, wakeup - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wake_out:
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(4096)
                # In this order: who finds it set has already queued what the turn will see.
                self._signalled = False
            elif key.fd != self._arrivals:
                self._serviced_links = False

    def _turn(self) -> tuple[bool, float | None]:
        """Everything that there is to do now.

        Returns whether messages may still be waiting, and the machine's next deadline.
        """
        now = time.monotonic()
        self._run_calls(now)
        messages, more = self.links.receive(self.links.config.receive_batch)
        for sender, message in messages:
            self._guarded(self.machine.receive, now, sender, message)
            self._carry_out()
        for _ in range(len(self._to_self)):
            self._guarded(self.machine.receive, now, self.links.me, self._to_self.popleft())
            self._carry_out()
        self._service_links(now)
        wakeup = self._machine_wakeup()
        if wakeup is not None and wakeup <= now:
            self._guarded(self.machine.tick, now)
            self._carry_out()
            wakeup = self._machine_wakeup()
        return more, wakeup

    def _service_links(self, now: float) -> None:
        """Look after the connections, if something happened there or is due."""
        due = self.links.next_wakeup()
        if not self._serviced_links or (due is not None and due <= now):
            self._serviced_links = True
            self._guarded(self.links.service, now)
            self._carry_out()

    def _run_calls(self, now: float) -> None:
        if not self._calls:
            return
        with self._room:
            calls, self._calls = self._calls, deque()
            self._room.notify_all()
        for call in calls:
            if call.future is None:
                self._guarded(call.function, now)
            elif call.future.set_running_or_notify_cancel():
                call.answer(now)
            self._carry_out()

    def _carry_out(self) -> None:
        """Do what the machine asked for, in its order, and what it asks for meanwhile."""
        while items := self.machine.outbox.drain():
            for item in items:
                if isinstance(item, Send):
                    if item.to == self.links.me:
                        self._to_self.append(item.message)
                    else:
                        self._guarded(self.links.send, item.to, item.message)
                elif isinstance(item, SendTo):
                    self._guarded(self.links.send_to, item.address, item.message)
                else:
                    self._guarded(self._on_event, item)

    def _machine_wakeup(self) -> float | None:
        wakeup = self.machine.next_wakeup()
        return None if wakeup is None else max(wakeup, self._ticks_from)

    def _note_fact(self, fact: LinkFact) -> None:
        if self._on_fact is not None:
            self._guarded(self._on_fact, time.monotonic(), fact)

    def _note_evidence(self, peer: PeerId, evidence: Evidence) -> None:
        if self._on_evidence is not None:
            self._guarded(self._on_evidence, time.monotonic(), peer, evidence)

    def _guarded(self, function: Callable[..., object], *arguments: object) -> None:
        try:
            function(*arguments)
        except zmq.ContextTerminated:
            raise
        except Exception as fault:
            self._ticks_from = time.monotonic() + _PAUSE_AFTER_FAULT
            _logger.exception("fault in the control thread of peer %s", self.links.me)
            self.faults.append(fault)
            self.fault_count += 1

    def _end(self) -> None:
        """The last thing done: nobody may be left waiting, and no socket open."""
        with self._room:
            self._stopping = True
            calls, self._calls = self._calls, deque()
            self._room.notify_all()
        for call in calls:
            if call.future is not None and call.future.set_running_or_notify_cancel():
                call.future.set_exception(PeerClosed("this peer was closed during the call"))
        if self._on_end is not None:
            self._guarded(self._on_end)
        try:
            self._carry_out()
            self.links.close()
        finally:
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()
            _running.discard(self)


class _Call:
    """A function to run on the control thread, and who waits for it."""

    __slots__ = ("function", "future")

    def __init__(self, function: Callable[[float], object], future: Future[Any] | None) -> None:
        self.function = function
        self.future = future

    def answer(self, now: float) -> None:
        assert self.future is not None
        try:
            result = self.function(now)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call was made
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def _stop_forgotten() -> None:
    for control in list(_running):
        control.stop(_EXIT_TIMEOUT)


atexit.register(_stop_forgotten)
