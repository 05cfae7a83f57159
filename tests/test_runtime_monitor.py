"""What a dialled connection tells about the other side: refused, gone, lost, silent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import zmq
from runtime_echo import IMPATIENT, PATIENCE, EchoPeer, free_port

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.runtime.monitor import Fact, Link, LinkFact, LinkState, advance

SECRET, OTHER = "a secret that is long enough", "another secret of good length"


@pytest.mark.parametrize(
    ("mine", "theirs"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)], ids=str
)
def test_a_different_secret_is_refused_handshakes_in_a_row(
    mine: str | None, theirs: str | None
) -> None:
    with EchoPeer(secret=mine) as a, EchoPeer(secret=theirs) as b:
        fact = a.keep_pinging(b.address, Fact.REFUSED, count=3)
        assert fact.names == (b.address,)
        assert "refuses the handshake" in a.links.describe(b.address)
        assert "in a row" in a.links.describe(b.address)
        assert b.machine.got.empty()


def test_a_peer_that_is_refused_still_serves_those_with_the_right_secret() -> None:
    with EchoPeer(secret=SECRET) as a, EchoPeer(secret=OTHER) as b, EchoPeer(secret=SECRET) as c:
        b.keep_pinging(a.address, Fact.REFUSED, count=2)
        c.reach(a)


@contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that is no peer; gives its address."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)


def speak_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + b"x" * 100)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("serve", [speak_http, lambda connection: None], ids=["http", "hangs up"])
def test_a_server_that_is_no_peer_refuses(
    secret: str | None, serve: Callable[[socket.socket], None]
) -> None:
    with listener(serve) as address, EchoPeer(secret=secret) as a:
        a.keep_pinging(address, Fact.REFUSED, count=3)


def test_a_process_that_accepts_and_says_nothing_is_silent_not_refusing() -> None:
    with socket.socket() as server, EchoPeer() as a:
        server.bind(("127.0.0.1", 0))
        server.listen()
        fact = a.keep_pinging(f"127.0.0.1:{server.getsockname()[1]}", Fact.SILENT)
        assert fact.count == 1


def test_a_closed_port_is_gone_and_counted_in_a_row() -> None:
    dead = f"127.0.0.1:{free_port()}"
    with EchoPeer() as a:
        fact = a.keep_pinging(dead, Fact.GONE, count=2)
        assert fact.address == dead
        assert "connection refused, 2 times in a row" in a.links.describe(dead)


def test_a_timeout_is_unreachable_and_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with EchoPeer() as a:
        # As a dial into a network that drops everything ends.
        redialer = a.links._outgoing._redialer
        monkeypatch.setattr(redialer, "_timeout", -1.0)
        monkeypatch.setattr("tensorhub_p2p.runtime.redial._PENDING", range(200))
        monkeypatch.setattr(socket.socket, "getsockopt", lambda *args: 0)
        fact = a.keep_pinging(f"127.0.0.1:{free_port()}", Fact.UNREACHABLE)
        assert "timed out" in fact.detail


def test_a_name_that_does_not_resolve_is_unreachable_and_named() -> None:
    with EchoPeer() as a:
        fact = a.keep_pinging("nowhere.invalid:7946", Fact.UNREACHABLE)
        assert fact.names == ("nowhere.invalid:7946",)
        assert "can't be resolved" in a.links.describe("nowhere.invalid:7946")


def _run_echo(pipe: Connection) -> None:
    with EchoPeer() as peer:
        pipe.send((peer.me, peer.address))
        if pipe.recv() == "hold":
            pipe.send("holding")
            ctypes.PyDLL(None).usleep(2_500_000)  # a PyDLL's functions keep Python's lock
            pipe.send("held")
            pipe.recv()


@contextmanager
def process(pipe: list[Connection] | None = None) -> Iterator[tuple[BaseProcess, PeerId, str]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_run_echo, args=(theirs,))
    child.start()
    theirs.close()
    try:
        me, address = ours.recv()
        if pipe is not None:
            pipe.append(ours)
        yield child, me, address
    finally:
        child.kill()
        child.join()


def watch(a: EchoPeer, peer: PeerId, address: str) -> None:
    a.keep_pinging(address, Fact.UP)
    assert a.next_ack()[0] == peer
    a.control.call(lambda now: a.links.watch([peer])).result(5)
    a.reach_peer(peer)


def facts_until(a: EchoPeer, last: Fact) -> list[LinkFact]:
    facts = [a.facts.get(timeout=PATIENCE)]
    while facts[-1].fact is not last:
        facts.append(a.facts.get(timeout=PATIENCE))
    return facts


@pytest.mark.processes
def test_a_killed_process_is_lost_and_then_gone_with_nothing_sent() -> None:
    with EchoPeer() as a, process() as (child, peer, address):
        watch(a, peer, address)
        child.kill()
        facts = facts_until(a, Fact.GONE)
        assert [f.fact for f in facts] == [Fact.LOST, Fact.GONE]
        assert all(f.peers == (peer,) for f in facts)


@pytest.mark.processes
def test_a_stopped_process_is_lost_but_not_gone_and_comes_back_up() -> None:
    with EchoPeer(config=IMPATIENT) as a, process() as (child, peer, address):
        watch(a, peer, address)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        try:
            facts = facts_until(a, Fact.SILENT)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        assert [f.fact for f in facts][-2:] == [Fact.LOST, Fact.SILENT]
        assert Fact.GONE not in [f.fact for f in facts]
        facts_until(a, Fact.UP)
        a.reach_peer(peer)


@pytest.mark.processes
def test_a_process_that_holds_pythons_lock_is_not_lost_and_takes_new_connections() -> None:
    pipes: list[Connection] = []
    with EchoPeer(config=IMPATIENT) as a, EchoPeer() as late, process(pipes) as (_, peer, address):
        watch(a, peer, address)
        pipes[0].send("hold")
        assert pipes[0].recv() == "holding"
        late.keep_pinging(address, Fact.UP)
        # Still holding: nothing but the I/O thread can have shaken hands.
        assert not pipes[0].poll()
        assert pipes[0].recv() == "held"
        assert late.next_ack()[0] == peer
        assert a.facts.empty()


def test_a_restarted_peer_at_the_same_address_is_reached_again() -> None:
    with EchoPeer() as a:
        with EchoPeer() as b:
            watch(a, b.me, b.address)
            address = b.address
        facts_until(a, Fact.GONE)
        with EchoPeer(bind=address) as c:
            fact = a.keep_pinging(address, Fact.UP)
            assert fact.peers == (b.me,)  # dialled for b; that c answers shows in its messages
            a.reach(c)


def test_no_watched_connection_means_no_facts_about_a_peer_that_leaves() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        b.ping(a.address)  # only b dials: its connection says nothing about ours
        a.control.call(lambda now: None).result(5)
        assert a.facts.empty() or a.facts.get().fact is Fact.UP


def test_a_late_event_of_the_last_connection_changes_nothing() -> None:
    link = Link("127.0.0.1:1", LinkState.GREETING)
    assert advance(link, zmq.EVENT_CONNECT_RETRIED, 0.0, 5.0) is None
    assert link.state is LinkState.GREETING
    link = Link("127.0.0.1:1", LinkState.CLOSED)
    assert advance(link, zmq.EVENT_DISCONNECTED, 0.0, 5.0) is None


def test_a_repeated_fact_is_counted_and_another_one_starts_again() -> None:
    link = Link("127.0.0.1:1")
    counts = [link.note(f).count for f in (Fact.REFUSED, Fact.REFUSED, Fact.UP, Fact.REFUSED)]
    assert counts == [1, 2, 1, 1]
