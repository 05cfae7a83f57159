"""Processes are killed, stopped and held up; the others come to hold the right thing of them.

With `BY_SOCKETS` a death that only silence shows is declared after minutes: what these tests
see within seconds, the sockets have shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import membership_steps as steps
import pytest
from workers import Worker

import tensorhub_p2p as th

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
Take = Callable[[int], list[Worker]]
PATIENCE = 40.0
BY_SOCKETS = th.Config(swim=th.SwimConfig(suspicion_multiplier=100.0))
BY_SILENCE = th.Config(swim=th.SwimConfig(suspicion_multiplier=1.0))
"""A death that silence shows is declared within six seconds; one whose sockets answer, not."""


@dataclass
class Process:
    """One worker with a peer."""

    worker: Worker
    peer_id: str
    address: str


class Cluster:
    """Worker processes that know each other."""

    def __init__(self, take: Take, name: str, count: int, **options: Any) -> None:
        self.processes: list[Process] = []
        for worker in take(count):
            seeds = [self.processes[0].address] if self.processes else []
            self.processes.append(Process(worker, *worker.do(steps.join, name, seeds, **options)))
        for process in self.processes:
            self.wait_until(process, {"alive"})

    def others(self, *but: Process) -> list[Process]:
        return [p for p in self.processes if p not in but and p.worker.alive]

    def wait_until(self, process: Process, states: set[str]) -> None:
        """Until all the others hold it for one of these."""
        end = time.monotonic() + PATIENCE
        while True:
            held = {
                other.peer_id: other.worker.do(steps.states).get(process.peer_id)
                for other in self.others(process)
            }
            if states.issuperset(held.values()):
                return
            assert time.monotonic() < end, f"{process.peer_id} should be {states}: {held}"
            time.sleep(0.05)

    def assert_nobody_died(self) -> None:
        for process in self.processes:
            assert process.worker.do(steps.deaths) == set()
            assert process.worker.do(steps.faults) == []


@pytest.fixture
def start(take: Take, cluster: str) -> Callable[..., Cluster]:
    def start(count: int, **options: Any) -> Cluster:
        return Cluster(take, cluster, count, **options)

    return start


@contextlib.contextmanager
def stopped(*processes: Process) -> Iterator[None]:
    for process in processes:
        process.worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.worker.signal(signal.SIGCONT)


def test_a_killed_process_is_dead_for_all_long_before_silence_would_tell(
    start: Callable[..., Cluster],
) -> None:
    c = start(5, config=BY_SOCKETS)
    c.processes[2].worker.kill()
    c.wait_until(c.processes[2], {"dead"})
    for process in c.others():
        assert process.worker.do(steps.deaths) == {c.processes[2].peer_id}


def test_a_killed_process_whose_forked_child_lives_on_is_dead_all_the_same(
    start: Callable[..., Cluster],
) -> None:
    c = start(3, config=BY_SOCKETS)
    child = c.processes[1].worker.do(steps.fork_a_child, 4 * PATIENCE)
    try:
        # Not `kill`, which waits for the end of a pipe that the child has inherited too.
        c.processes[1].worker.signal(signal.SIGKILL)
        c.wait_until(c.processes[1], {"dead"})
    finally:
        os.kill(child, signal.SIGKILL)  # raises if it was gone before


def test_a_stopped_process_is_unresponsive_for_all_and_alive_again_when_it_goes_on(
    start: Callable[..., Cluster],
) -> None:
    c = start(5)
    with stopped(c.processes[1]):
        c.wait_until(c.processes[1], {"unresponsive"})
    c.wait_until(c.processes[1], {"alive"})
    c.assert_nobody_died()


def test_a_process_killed_while_it_was_stopped_is_dead_for_all(
    start: Callable[..., Cluster],
) -> None:
    c = start(4, config=BY_SOCKETS)
    victim = c.processes[3]
    victim.worker.signal(signal.SIGSTOP)
    c.wait_until(victim, {"unresponsive"})
    victim.worker.kill()
    c.wait_until(victim, {"dead"})


def test_pauses_of_up_to_three_seconds_kill_nobody(start: Callable[..., Cluster]) -> None:
    c = start(5)
    for victim, seconds in zip(c.processes, (0.5, 1.0, 2.0, 3.0), strict=False):
        with stopped(victim):
            time.sleep(seconds)
        c.wait_until(victim, {"alive"})
    with stopped(*c.processes):  # all at once, and nobody's clock stood still
        time.sleep(3.0)
    for process in c.processes:
        c.wait_until(process, {"alive"})
    c.assert_nobody_died()


def test_a_process_that_holds_pythons_lock_for_ten_seconds_is_held_up_and_kills_nobody(
    start: Callable[..., Cluster],
) -> None:
    c = start(5)
    holders = c.processes[1:3]
    for holder in holders:
        holder.worker.begin(steps.hold_the_lock, 10.0)
        holder.worker.wait_said("holding")
    for process in c.others(*holders):
        states: dict[str, str] = {}
        end = time.monotonic() + 9.0
        while any(states.get(holder.peer_id) != "unresponsive" for holder in holders):
            assert time.monotonic() < end, states
            states = process.worker.do(steps.states)
            time.sleep(0.05)
    for holder in holders:
        holder.worker.finish()
    for holder in holders:
        c.wait_until(holder, {"alive"})
    c.assert_nobody_died()


@contextlib.contextmanager
def taken_over(c: Cluster, victim: Process) -> Iterator[tuple[str, int]]:
    """The victim is dead, and nobody could look before its port is used again."""
    with stopped(*c.others(victim)):
        victim.worker.kill()
        host, _, port = victim.address.rpartition(":")
        yield host, int(port)


def test_a_dead_peer_whose_port_a_silent_listener_uses_is_dead(
    start: Callable[..., Cluster],
) -> None:
    c = start(4, config=BY_SILENCE)
    victim = c.processes[1]
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with taken_over(c, victim) as address:
            stranger.bind(address)
            stranger.listen()
        c.wait_until(victim, {"dead"})


def test_a_dead_peer_whose_port_a_peer_of_another_cluster_uses_is_dead(
    start: Callable[..., Cluster], cluster: str
) -> None:
    c = start(4, config=BY_SILENCE)
    victim = c.processes[1]
    with contextlib.ExitStack() as stack:
        with taken_over(c, victim):
            stranger = th.Peer(cluster=f"not-{cluster}", bind=victim.address)
            stack.enter_context(stranger)
        c.wait_until(victim, {"dead"})
        assert len(stranger.members()) == 1


def test_a_restart_at_the_same_address_is_a_new_member_and_the_old_one_is_dead(
    start: Callable[..., Cluster], take: Take, cluster: str
) -> None:
    c = start(4, config=BY_SOCKETS)
    victim = c.processes[1]
    with taken_over(c, victim):
        pass
    (worker,) = take(1)
    seeds = [c.processes[0].address]
    options = {"bind": victim.address, "config": BY_SOCKETS}
    again = Process(worker, *worker.do(steps.join, cluster, seeds, **options))
    c.wait_until(victim, {"dead"})
    c.processes.append(again)
    c.wait_until(again, {"alive"})


def test_a_peer_that_closes_has_left_and_nobody_takes_it_for_dead(
    start: Callable[..., Cluster],
) -> None:
    c = start(5)
    leaver = c.processes.pop(2)
    leaver.worker.do(steps.close)
    c.wait_until(leaver, {"left"})
    c.assert_nobody_died()


def test_watches_and_looks_of_a_calm_cluster_tell_nothing(start: Callable[..., Cluster]) -> None:
    c = start(4)
    time.sleep(3.0)  # the absence of something: there is nothing to wait for
    for process in c.processes:
        told = [key for key in process.worker.do(steps.counters) if key.startswith("evidence")]
        assert told == []
