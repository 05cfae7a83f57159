"""What a dialled connection tells about the other side: refused, gone, lost, silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from runtime_echo import PATIENCE, EchoPeer, deaf_address, free_port

from tensorhub_p2p.config import WireConfig
from tensorhub_p2p.protocol.identity import PeerInfo
from tensorhub_p2p.protocol.membership.swim_events import Evidence
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


def test_a_timeout_is_unreachable_and_never_gone() -> None:
    config = WireConfig(handshake_timeout=1.0, connect_timeout=0.3)
    with EchoPeer(config=config) as a, deaf_address() as address:
        fact = a.keep_pinging(address, Fact.UNREACHABLE)
        assert "timed out" in fact.detail


def test_a_name_that_does_not_resolve_is_unreachable_and_named() -> None:
    with EchoPeer() as a:
        fact = a.keep_pinging("nowhere.invalid:7946", Fact.UNREACHABLE)
        assert fact.names == ("nowhere.invalid:7946",)
        assert "can't be resolved" in a.links.describe("nowhere.invalid:7946")


def facts_until(a: EchoPeer, last: Fact) -> list[LinkFact]:
    facts = [a.facts.get(timeout=PATIENCE)]
    while facts[-1].fact is not last:
        facts.append(a.facts.get(timeout=PATIENCE))
    return facts


def test_a_peer_that_closes_is_lost_and_then_gone_and_its_successor_is_reached() -> None:
    with EchoPeer() as a:
        with EchoPeer() as b:
            a.reach(b)
            a.reach_peer(b.me)
            address = b.address
        facts = facts_until(a, Fact.LOST)
        assert facts[-1].peers == (b.me,)
        facts_until(a, Fact.GONE)
        assert a.evidence_until(Evidence.REFUSED)[0] is Evidence.DISCONNECTED
        with EchoPeer(bind=address) as c:
            fact = a.keep_pinging(address, Fact.UP)
            assert fact.peers == (b.me,)  # dialled for b; that c answers shows in its messages
            a.reach(c)


def test_who_dials_us_and_leaves_shows_nothing() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        b.ping(a.address)  # only b dials: its connection says nothing about ours
        a.control.call(lambda now: None).result(5)
        assert a.facts.empty() or a.facts.get().fact is Fact.UP


def test_nobody_at_one_of_several_addresses_is_no_evidence_of_a_death() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        info = PeerInfo(b.me, "b", "z", (f"127.0.0.1:{free_port()}", b.address))
        a.control.call(lambda now: a.links.learn(info)).result(5)
        a.ping_peer(b.me)
        fact = facts_until(a, Fact.GONE)[-1]
        assert fact.peers == ()
        a.reach_peer(b.me)
        assert a.evidence.empty()


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
