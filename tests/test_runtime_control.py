"""The control thread: calls, wake-ups, faults, and how it ends."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runtime_echo import PATIENCE, EchoPeer, eventually, free_port

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.errors import PeerClosed
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.messages import Ack, Ping
from tensorhub_p2p.runtime.control import LONG_TURN

HERE = Path(__file__).parent


class Noted(Event):
    pass


def test_calls_run_on_the_control_thread_in_their_order() -> None:
    with EchoPeer() as a:
        seen: list[int] = []
        threads = set()

        def step(n: int) -> int:
            seen.append(n)
            threads.add(threading.current_thread().name)
            return n

        futures = [a.control.call(lambda now, n=n: step(n)) for n in range(200)]
        assert [f.result(PATIENCE) for f in futures] == list(range(200))
        assert seen == list(range(200))
        assert threads == {f"tensorhub-control {a.me}"}


def test_calls_from_many_threads_are_all_answered() -> None:
    with (
        EchoPeer(config=WireConfig(call_queue=4)) as a,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        answers = pool.map(
            lambda n: a.control.call(lambda now: n).result(PATIENCE), range(500), timeout=PATIENCE
        )
        assert list(answers) == list(range(500))


def test_a_calls_error_is_its_callers_and_no_fault() -> None:
    with EchoPeer() as a:
        with pytest.raises(ZeroDivisionError):
            a.control.call(lambda now: 1 // 0).result(PATIENCE)
        assert a.control.fault_count == 0


def test_a_cancelled_call_is_not_run() -> None:
    with EchoPeer() as a:
        hold, held = threading.Event(), threading.Event()
        a.control.post(lambda now: (held.set(), hold.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        ran = []
        future = a.control.call(lambda now: ran.append(1))
        assert future.cancel()
        hold.set()
        a.control.call(lambda now: None).result(PATIENCE)
        assert not ran


def test_beyond_the_bound_callers_wait_for_room() -> None:
    with EchoPeer(config=WireConfig(call_queue=2)) as a:
        hold, held = threading.Event(), threading.Event()
        a.control.post(lambda now: (held.set(), hold.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        for _ in range(2):
            a.control.post(lambda now: None)
        third = threading.Thread(target=a.control.post, args=(lambda now: None,))
        third.start()
        third.join(0.05)
        assert third.is_alive()
        hold.set()
        third.join(PATIENCE)
        assert not third.is_alive()


def test_the_machine_is_ticked_when_its_deadline_has_come_and_not_before() -> None:
    with EchoPeer() as a:
        began = time.monotonic()

        def arm(now: float) -> None:
            a.machine.wakeup = now + 0.1

        a.control.call(arm).result(PATIENCE)
        assert a.machine.ticked.wait(PATIENCE)
        assert time.monotonic() - began >= 0.1


def test_long_turns_count_as_lag_and_waiting_does_not() -> None:
    with EchoPeer() as a:
        a.control.call(lambda now: None).result(PATIENCE)
        before = a.control.lag
        time.sleep(2 * LONG_TURN)
        assert a.control.lag == before
        for _ in range(100):
            a.control.call(lambda now: None).result(PATIENCE)
        grown = a.control.lag - before  # by none of them; or by some that did take long
        assert grown == 0.0 or grown > LONG_TURN
        before = a.control.lag
        hold, held = threading.Event(), threading.Event()
        a.control.post(lambda now: (held.set(), hold.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        began = time.monotonic()
        eventually(lambda: a.control.lag > before + LONG_TURN, "the turn counts")
        passed = time.monotonic() - began
        assert a.control.lag >= before + passed  # also of the turn that is under way
        hold.set()
        a.control.call(lambda now: None).result(PATIENCE)
        after = a.control.lag
        assert after > before + LONG_TURN
        time.sleep(2 * LONG_TURN)
        assert a.control.lag == after


def test_an_idle_peer_sleeps() -> None:
    with EchoPeer() as a:
        turns = []
        turn = a.control._turn
        a.control._turn = lambda: (turns.append(1), turn())[1]  # type: ignore[method-assign]
        a.control.call(lambda now: None).result(PATIENCE)
        before = len(turns)
        time.sleep(0.2)  # the absence of something: there is nothing to wait for
        assert len(turns) - before <= 1


def test_a_message_to_oneself_never_touches_the_wire() -> None:
    with EchoPeer() as a:
        a.ping_peer(a.me, 5)
        assert a.machine.got.get(timeout=PATIENCE) == (a.me, Ping(5))
        assert a.machine.got.get(timeout=PATIENCE) == (a.me, Ack(5))
        assert a.links.counters["sent"] == 0


def test_a_seed_that_is_oneself_shows_as_a_message_from_the_own_id() -> None:
    with EchoPeer() as a:
        a.ping(a.address, 5)
        assert a.machine.got.get(timeout=PATIENCE) == (a.me, Ping(5))


def test_events_reach_their_owner_in_order_and_on_the_control_thread() -> None:
    with EchoPeer() as a:
        events = [Noted() for _ in range(10)]
        a.control.post(lambda now: [a.machine.outbox.emit(e) for e in events])
        assert [a.events.get(timeout=PATIENCE) for _ in events] == events


def test_what_an_events_owner_has_the_machine_ask_for_is_done_in_the_same_turn() -> None:
    """An idle peer would do it only when something else wakes it."""
    with EchoPeer() as a:
        follows = Noted()

        def on_event(event: Event) -> None:
            a.events.put(event)
            if event is not follows:
                a.machine.outbox.emit(follows)

        a.control._on_event = on_event
        first = Noted()
        a.control.post(lambda now: a.machine.outbox.emit(first))
        assert a.events.get(timeout=PATIENCE) is first
        assert a.events.get(timeout=PATIENCE) is follows


def test_connections_are_looked_after_only_when_something_happened_there() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        b.ping(a.address, 1)
        a.machine.got.get(timeout=PATIENCE)
        b.machine.got.get(timeout=PATIENCE)
        a.control.call(lambda now: None).result(PATIENCE)
        services = []
        service = a.links.service

        def count(now: float) -> None:
            services.append(now)
            service(now)

        a.links.service = count  # type: ignore[method-assign]
        for number in range(2, 60):
            b.ping(a.address, number)
            a.machine.got.get(timeout=PATIENCE)
        assert len(services) < 30, "messages on standing connections are no reason"
        services.clear()
        b.control.stop()
        eventually(lambda: bool(services), "the end of a connection is a reason")


def test_a_fault_in_the_machine_is_kept_and_logged_and_the_peer_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with EchoPeer() as a, EchoPeer() as b:
        receive, b.machine.receive = b.machine.receive, _raise  # type: ignore[method-assign]
        a.ping(b.address)
        eventually(lambda: b.control.fault_count == 1, "the fault is counted")
        assert isinstance(b.control.faults[0], AssertionError)
        assert b.me in caplog.text
        b.machine.receive = receive  # type: ignore[method-assign]
        b.faults_expected = True
        a.reach(b)


def test_a_tick_that_always_fails_does_not_spin_the_thread() -> None:
    with EchoPeer() as a:
        a.machine.tick = _raise  # type: ignore[method-assign]
        a.machine.wakeup = 0.0
        a.control.call(lambda now: None).result(PATIENCE)
        began, faults = time.monotonic(), a.control.fault_count
        eventually(lambda: a.control.fault_count >= faults + 3, "it is tried again")
        assert time.monotonic() - began >= 0.1
        a.faults_expected = True


def _raise(*_: object) -> None:
    raise AssertionError("a bug")


def test_a_failing_event_handler_is_a_fault() -> None:
    with EchoPeer() as a:
        a.control._on_event = _raise  # type: ignore[assignment]
        a.control.call(lambda now: a.machine.outbox.emit(Noted())).result(PATIENCE)
        eventually(lambda: a.control.fault_count == 1, "the fault is counted")
        a.faults_expected = True


def test_stopping_ends_waiting_calls_and_refuses_new_ones() -> None:
    a = EchoPeer()
    with a:
        hold, held = threading.Event(), threading.Event()
        a.control.post(lambda now: (held.set(), hold.wait(PATIENCE)))
        assert held.wait(PATIENCE)
        waiting = a.control.call(lambda now: 1)
        stopper = threading.Thread(target=a.control.stop)
        stopper.start()
        eventually(lambda: a.control._stopping, "stop has begun")
        hold.set()
        stopper.join(PATIENCE)
        with pytest.raises(PeerClosed):
            waiting.result(PATIENCE)
    with pytest.raises(PeerClosed, match="closed"):
        a.control.call(lambda now: 1)
    assert a.control.stop()


def test_the_last_messages_go_out_before_the_sockets_close() -> None:
    with EchoPeer() as b:
        for seq in range(5):
            with EchoPeer() as a:
                a.ping(b.address, seq)  # dials, and stops at once
            assert b.machine.got.get(timeout=PATIENCE) == (a.me, Ping(seq))


def test_stopping_is_quick_when_nobody_is_there_to_take_the_last_message() -> None:
    with EchoPeer() as a:
        a.ping(f"127.0.0.1:{free_port()}")
        began = time.monotonic()
        assert a.control.stop()
        assert time.monotonic() - began < 2 * a.links.config.close_linger + 1


def test_a_peer_that_was_never_started_stops_too() -> None:
    a = EchoPeer()
    assert a.control.stop()
    with pytest.raises(PeerClosed):
        a.control.call(lambda now: 1)


def test_the_control_thread_can_stop_itself() -> None:
    with EchoPeer() as a:
        a.control.call(lambda now: a.control.stop()).result(PATIENCE)
        a.control._thread.join(PATIENCE)
        assert not a.control._thread.is_alive()


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "raise SystemExit"])
def test_a_forgotten_peer_is_stopped_at_exit_and_keeps_no_interpreter_alive(ending: str) -> None:
    script = f"""
import atexit, sys
atexit.register(lambda: print("running" if a.control._thread.is_alive() else "stopped"))
from runtime_echo import EchoPeer
a = EchoPeer().__enter__()
b = EchoPeer().__enter__()
a.reach(b)
a.control.call(lambda now: setattr(a.machine, "wakeup", now + 3600)).result()
print("done", flush=True)
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\nstopped\n", "")
