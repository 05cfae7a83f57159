"""What watches and looks tell of a peer: ended, refused, stands still, runs, unreachable."""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import zmq
from runtime_echo import PATIENCE, deaf_address, free_port

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.swim_events import Evidence
from tensorhub_p2p.runtime.doubts import Doubts
from tensorhub_p2p.runtime.routes import Routes
from tensorhub_p2p.runtime.security import curve_keys, secure
from tensorhub_p2p.runtime.watching import State, Watching

PEER, OTHER = PeerId("1" * 16), PeerId("2" * 16)
QUICK = WireConfig(look_timeout=0.2, watch_connect_timeout=0.3, handshake_timeout=0.4)
DISCONNECTED, REFUSED, ACCEPTED, GREETED, UNREACHABLE = Evidence
SECRET = "a secret that is long enough"

Context = zmq.Context[zmq.Socket[bytes]]


class Watcher:
    """A `Watching`, driven as the control thread drives it, but only when the test says so."""

    def __init__(self, context: Context, config: WireConfig = QUICK, secret: str = "") -> None:
        self.told: list[tuple[PeerId, Evidence]] = []
        self.doubts = Doubts(9)
        self.routes = Routes(9, 0.5)
        self.counters: Counter[str] = Counter()
        self.watching = Watching(
            context,
            config,
            curve_keys(secret) if secret else None,
            self.counters,
            self.routes,
            self.doubts,
            lambda peer, evidence: self.told.append((peer, evidence)),
        )
        self._selector = selectors.DefaultSelector()
        self.watching.attach(self._selector)

    def watch(self, *addresses: str) -> None:
        self.watching.watch({PEER: addresses})
        self.watching.service(time.monotonic())

    def watch_until_up(self, address: str) -> None:
        self.watch(address)
        self.until(lambda: self.watching.is_up(PEER))

    def look(self, *addresses: str) -> None:
        self.watching.look(PEER, addresses, time.monotonic())

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        self.watching.service(time.monotonic())
        while not true():
            now = time.monotonic()
            assert now < end, f"waited in vain, was told {self.told}"
            wakeup = self.watching.next_wakeup()
            self._selector.select(max(0.0, min(wakeup or end, end) - now))
            self.watching.service(time.monotonic())

    def until_told(self, *evidence: Evidence) -> None:
        """Just this comes next."""
        self.until(lambda: len(self.told) >= len(evidence))
        assert [told for _, told in self.told[: len(evidence)]] == list(evidence)
        del self.told[: len(evidence)]

    def run_for(self, seconds: float) -> None:
        """To see that something does not happen."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._selector.select(min(end - now, 0.05))
            self.watching.service(time.monotonic())

    @property
    def state(self) -> State:
        return self.watching._watches[PEER].state


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def watcher(context: Context) -> Iterator[Watcher]:
    watcher = Watcher(context)
    yield watcher
    watcher.watching.close()


class Process:
    """The sockets of a process that runs, stands still, or has ended, at one port."""

    def __init__(self, context: Context, secret: str = "") -> None:
        self.context = context
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.secret = secret
        self.open: Any = None

    def run(self) -> None:
        """Listen with a ROUTER, as peers do; it takes a stopped one's backlog over."""
        router = self.context.socket(zmq.ROUTER)
        if self.secret:
            secure(router, curve_keys(self.secret), server=True)
        if self.open is None:
            router.bind(f"tcp://{self.address}")
            self.open = router
            return
        listening, self.open = self.open, router
        router.setsockopt(zmq.USE_FD, listening.detach())
        router.bind(f"tcp://{self.address}")

    def stand_still(self) -> None:
        """The kernel accepts, nobody greets."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self.open = listener

    def end(self) -> None:
        """As a kill: the kernel closes what there is. Returns when the port is free."""
        if isinstance(self.open, socket.socket):
            self.open.close()
        else:
            self.open.close(linger=0)
            end = time.monotonic() + PATIENCE
            while not _free(self.port):
                assert time.monotonic() < end
                time.sleep(0.005)
        self.open = None


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def process(context: Context) -> Iterator[Process]:
    process = Process(context)
    yield process
    if process.open is not None:
        process.end()


# --- watches ---


def test_a_watch_that_comes_about_is_no_news(watcher: Watcher, process: Process) -> None:
    process.run()
    watcher.watch_until_up(process.address)
    assert watcher.told == []


def test_a_process_that_ends_is_disconnected_and_refused(
    watcher: Watcher, process: Process
) -> None:
    process.run()
    watcher.watch_until_up(process.address)
    process.end()
    watcher.until_told(DISCONNECTED, REFUSED)
    watcher.until_told(REFUSED)
    assert PEER in watcher.doubts


def test_a_process_that_stands_still_when_the_watch_begins_is_accepted_and_later_greets(
    watcher: Watcher, process: Process
) -> None:
    process.stand_still()
    watcher.watch(process.address)
    watcher.until_told(ACCEPTED)
    process.run()
    watcher.until_told(GREETED)
    assert watcher.state is State.UP


def test_a_process_that_stands_still_is_not_dialled_again_and_again(
    watcher: Watcher, process: Process
) -> None:
    process.stand_still()
    watcher.watch(process.address)
    watcher.until_told(ACCEPTED)
    watcher.run_for(1.0)
    assert watcher.told == []
    process.open.setblocking(False)
    accepted = 0
    while True:
        try:
            process.open.accept()[0].close()
        except BlockingIOError:
            break
        accepted += 1
    assert accepted == 2, "the look, and the watch"


def test_a_process_that_ends_while_it_stands_still_is_disconnected_and_refused(
    watcher: Watcher, process: Process
) -> None:
    process.stand_still()
    watcher.watch(process.address)
    watcher.until_told(ACCEPTED)
    watcher.until(lambda: watcher.state is State.GREETING)
    process.end()
    watcher.until_told(DISCONNECTED, REFUSED)


def test_a_host_that_does_not_answer_after_its_watch_ended_is_unreachable_again_and_again(
    watcher: Watcher, process: Process
) -> None:
    process.run()
    watcher.watch_until_up(process.address)
    watch = watcher.watching._watches[PEER]
    with deaf_address() as deaf:
        # As if the host of the process fell silent.
        watcher.routes.find(watch.destination, 0.0).candidates = (deaf,)
        watch.address = watch.was_up_at = deaf
        watcher.watching._ended(watch, time.monotonic())
        watcher.until_told(DISCONNECTED, UNREACHABLE)
        watcher.until_told(UNREACHABLE)


def test_what_was_never_reached_is_not_told_as_unreachable(watcher: Watcher) -> None:
    with deaf_address() as address:
        watcher.watch(address)
        watcher.until(lambda: watcher.state is State.RESTING)
        assert watcher.told == []


def test_nobody_at_one_of_two_addresses_is_no_evidence_and_the_other_is_watched(
    watcher: Watcher, process: Process
) -> None:
    process.run()
    watcher.watch(f"127.0.0.1:{free_port()}", process.address)
    watcher.until(lambda: watcher.watching.is_up(PEER))
    assert watcher.told == []
    process.end()
    watcher.until_told(DISCONNECTED, REFUSED)


def test_retries_come_ever_more_rarely(context: Context, process: Process) -> None:
    watcher = Watcher(context, replace(QUICK, watch_retry_limit=1.0))
    watcher.watch(process.address)
    pauses = []
    for _ in range(4):
        watcher.until(lambda: watcher.told != [])
        watcher.until_told(REFUSED)
        watch = watcher.watching._watches[PEER]
        pauses.append(round(watch.retry_at - time.monotonic(), 1))
        watch.retry_at = time.monotonic()
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 1.0], abs=0.1)
    watcher.watching.close()


def test_a_watch_that_is_not_wanted_any_more_ends_and_tells_nothing(
    watcher: Watcher, process: Process
) -> None:
    process.run()
    watcher.watch_until_up(process.address)
    watcher.watching.watch({})
    watcher.until(lambda: PEER not in watcher.watching)
    process.end()
    watcher.run_for(0.2)
    assert watcher.told == []


def test_a_peer_that_moved_is_watched_where_it_is_now(
    watcher: Watcher, process: Process, context: Context
) -> None:
    process.run()
    watcher.watch_until_up(process.address)
    moved = Process(context)
    moved.run()
    watcher.watch_until_up(moved.address)
    assert watcher.watching._watches[PEER].address == moved.address
    assert watcher.told == []
    moved.end()


@pytest.mark.parametrize("theirs", ["", "another secret of good length"], ids=["none", "another"])
def test_who_refuses_the_handshake_is_tried_rarely_and_told_of_not_at_all(
    context: Context, theirs: str
) -> None:
    watcher = Watcher(context, secret=SECRET)
    process = Process(context, secret=theirs)
    process.run()
    watcher.watch(process.address)
    watcher.until(lambda: watcher.watching._watches[PEER].pause >= 1.0)
    assert set(watcher.told) <= {(PEER, ACCEPTED)}
    watcher.watching.close()
    process.end()


def test_a_watch_speaks_curve_where_there_is_a_secret(context: Context) -> None:
    watcher = Watcher(context, secret=SECRET)
    process = Process(context, secret=SECRET)
    process.run()
    watcher.watch_until_up(process.address)
    process.end()
    watcher.until_told(DISCONNECTED, REFUSED)
    watcher.watching.close()


def test_what_comes_on_a_watch_is_dropped(
    watcher: Watcher, process: Process, context: Context
) -> None:
    """A DEALER's routing id is chosen by the ROUTER: a rogue has to guess it."""
    process.run()
    watcher.watching._socket.setsockopt(zmq.ROUTING_ID, b"known")
    watcher.watch_until_up(process.address)
    process.open.setsockopt(zmq.ROUTER_MANDATORY, 1)
    process.open.send_multipart([b"known", b"x" * 100])
    watcher.until(lambda: watcher.counters["dropped: came back on a watch"] == 1)
    assert watcher.watching.is_up(PEER)
    process.open.send_multipart([b"known", b"x" * 5000])
    watcher.until_told(DISCONNECTED, GREETED)


# --- somebody else at the address ---


def taken_over(watcher: Watcher, process: Process) -> None:
    """The process of a watched peer ends, and its port is used again before it is noticed."""
    process.run()
    watcher.watch_until_up(process.address)
    process.end()


def test_a_listener_that_took_the_port_over_is_not_told_as_accepting(
    watcher: Watcher, process: Process
) -> None:
    taken_over(watcher, process)
    process.stand_still()
    watcher.until_told(DISCONNECTED)
    watcher.until(lambda: watcher.watching._watches[PEER].stands_still)
    watcher.look(process.address)
    watcher.until(lambda: PEER not in watcher.watching._looks)
    assert watcher.told == []


def test_a_peer_that_took_the_port_over_is_told_as_greeting_only_once_the_first_was_heard(
    watcher: Watcher, process: Process
) -> None:
    taken_over(watcher, process)
    process.run()
    watcher.doubts.heard(PEER)  # on its way when the process ended
    watcher.until_told(DISCONNECTED)
    watcher.until(lambda: watcher.watching.is_up(PEER))
    watcher.look(process.address)
    watcher.until(lambda: PEER not in watcher.watching._looks)
    assert watcher.told == []
    watcher.doubts.heard(PEER)
    watcher.look(process.address)
    watcher.until_told(GREETED)


def test_the_port_being_refused_is_told_whatever_the_doubt(
    watcher: Watcher, process: Process
) -> None:
    taken_over(watcher, process)
    process.stand_still()
    watcher.until_told(DISCONNECTED)
    watcher.until(lambda: watcher.watching._watches[PEER].stands_still)
    watcher.until(lambda: watcher.state is State.GREETING)
    process.end()
    watcher.until_told(DISCONNECTED, REFUSED)


# --- heartbeats ---


def test_a_watch_whose_heartbeats_stop_is_not_the_peers_doing(
    watcher: Watcher, process: Process
) -> None:
    """The process stands still: the handshake that comes when it goes on counts at once."""
    process.stand_still()
    watcher.watch(process.address)
    watcher.until(lambda: watcher.state is State.GREETING)
    # By hand: greet as a ROUTER would, say that it is ready, and then nothing more.
    process.open.settimeout(PATIENCE)
    process.open.accept()[0].close()  # the look
    connection, _ = process.open.accept()
    with connection:
        greet_by_hand(connection)
        watcher.until_told(ACCEPTED)
        watcher.until_told(GREETED)
        watcher.until_told(DISCONNECTED, ACCEPTED)
        assert PEER not in watcher.doubts
    process.run()
    watcher.until(lambda: (PEER, GREETED) in watcher.told)


# --- looks ---


def test_a_look_tells_what_is_there_now(watcher: Watcher, process: Process) -> None:
    watcher.look(process.address)
    watcher.until_told(REFUSED)
    process.stand_still()
    watcher.look(process.address)
    watcher.until_told(ACCEPTED)
    process.run()
    watcher.look(process.address)
    watcher.until_told(GREETED)


def test_a_look_without_an_answer_tells_nothing_unless_the_watch_stands(
    watcher: Watcher, process: Process
) -> None:
    with deaf_address() as deaf:
        watcher.look(deaf)
        watcher.until(lambda: PEER not in watcher.watching._looks)
        assert watcher.told == []
        process.run()
        watcher.watch_until_up(process.address)
        watcher.look(deaf)
        watcher.until_told(GREETED)


def test_a_look_that_follows_does_not_put_off_what_the_watch_says_to_the_one_before(
    watcher: Watcher, process: Process
) -> None:
    process.run()
    watcher.watch_until_up(process.address)
    with deaf_address() as deaf:
        watcher.look(deaf)
        watcher.until(lambda: PEER in watcher.watching._unanswered)
        due = watcher.watching._unanswered[PEER]
        watcher.look(deaf)
        watcher.until(lambda: PEER not in watcher.watching._looks)
        assert watcher.watching._unanswered.get(PEER, due) == due
        watcher.until_told(GREETED)


def greet_by_hand(connection: socket.socket) -> None:
    """As a ROUTER would; what is said after that is for the test."""
    connection.settimeout(PATIENCE)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    connection.sendall(b"\x04\x1c\x05READY\x0bSocket-Type" + bytes(3) + b"\x06ROUTER")


def test_a_watch_whose_end_has_not_shown_yet_answers_for_no_look(
    watcher: Watcher, process: Process
) -> None:
    process.stand_still()
    process.open.settimeout(PATIENCE)
    watcher.watch(process.address)
    with ExitStack() as stack:
        look, _ = process.open.accept()
        greet_by_hand(stack.enter_context(look))
        watcher.until(lambda: watcher.state is State.DIALLING)
        connection, _ = process.open.accept()
        greet_by_hand(stack.enter_context(connection))
        watcher.until(lambda: watcher.watching.is_up(PEER))
        with deaf_address() as deaf:
            watcher.look(deaf)
            watcher.until(lambda: PEER in watcher.watching._unanswered)
            assert watcher.watching.is_up(PEER), "its heartbeats aren't missed yet"
            watcher.until(lambda: PEER not in watcher.watching._unanswered)
    assert watcher.told[:1] == [(PEER, DISCONNECTED)]


def test_a_refused_look_at_one_of_two_addresses_tells_nothing(watcher: Watcher) -> None:
    watcher.look(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    watcher.until(lambda: PEER not in watcher.watching._looks)
    assert watcher.told == []


def test_looks_beyond_the_bound_are_counted_and_stay_unanswered(
    watcher: Watcher, process: Process
) -> None:
    process.stand_still()
    for number in range(70):
        peer = PeerId(f"{number:016x}")
        watcher.watching.look(peer, (process.address,), time.monotonic())
    assert watcher.counters["looks not taken: too many at once"] == 6
    watcher.until(lambda: len(watcher.told) == 64)
    assert {told for _, told in watcher.told} == {ACCEPTED}
