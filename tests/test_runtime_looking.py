"""One TCP connect, and what it shows of whoever is there."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from runtime_echo import PATIENCE, EchoPeer, deaf_address, free_port, has_ipv6_loopback

from tensorhub_p2p.runtime.addresses import parse
from tensorhub_p2p.runtime.looking import Looker, Seen, Sight


class Look:
    """A looker with a selector, driven as the control thread drives it."""

    def __init__(self, limit: int = 64) -> None:
        self.looker: Looker[str] = Looker(limit)
        self.selector = selectors.DefaultSelector()
        self.looker.attach(self.selector)

    def begin(self, address: str, connect: float = 0.3, greeting: float = 0.3) -> bool:
        now = time.monotonic()
        return self.looker.look(address, parse(address), now, connect, greeting)

    def next(self) -> Sight[str]:
        end = time.monotonic() + PATIENCE
        while (now := time.monotonic()) < end:
            sights = self.looker.sights(now)
            if sights:
                (sight,) = sights
                assert not self.selector.get_map()
                return sight
            wakeup = self.looker.next_wakeup()
            assert wakeup is not None
            self.selector.select(max(0.0, wakeup - now))
        raise AssertionError("nothing was seen")

    def at(self, address: str) -> Seen:
        assert self.begin(address)
        return self.next().seen


@pytest.fixture
def look() -> Look:
    return Look()


@contextmanager
def listener(greeting: bytes | None = None, hang_up: bool = False) -> Iterator[str]:
    """A server that accepts one connection; without a greeting not even that."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if greeting is None and not hang_up:
            yield address
            return
        # It is accepted by the kernel already; who reads comes to it when it comes.
        import threading

        def serve() -> None:
            connection, _ = server.accept()
            connection.sendall(greeting or b"")
            connections.append(connection)
            if hang_up:
                connection.close()

        connections: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield address
        thread.join(PATIENCE)
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("secret", [None, "a secret that is long enough"])
def test_a_peer_greets_whatever_its_secret(look: Look, secret: str | None) -> None:
    with EchoPeer(secret=secret) as peer:
        assert look.at(peer.address) is Seen.GREETED


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
def test_a_peer_greets_over_ipv6(look: Look) -> None:
    with EchoPeer(bind="[::1]:0") as peer:
        assert look.at(peer.address) is Seen.GREETED


def test_a_closed_port_refuses(look: Look) -> None:
    assert look.at(f"127.0.0.1:{free_port()}") is Seen.REFUSED


def test_a_listener_that_never_accepts_is_there_and_does_not_greet(look: Look) -> None:
    with listener() as address:
        assert look.at(address) is Seen.ACCEPTED


def test_without_a_time_for_the_greeting_connecting_is_all(look: Look) -> None:
    with listener() as address:
        began = time.monotonic()
        look.begin(address, connect=PATIENCE, greeting=0)
        assert look.next().seen is Seen.ACCEPTED
        assert time.monotonic() - began < PATIENCE / 2


def test_no_answer_at_all_is_unreachable(look: Look) -> None:
    with deaf_address() as address:
        look.begin(address)
        sight = look.next()
    assert sight.seen is Seen.UNREACHABLE
    assert "timed out" in sight.error


def test_an_address_to_which_there_is_no_way_is_unreachable_at_once(look: Look) -> None:
    look.begin("255.255.255.255:9", connect=PATIENCE)
    assert look.next().seen is Seen.UNREACHABLE


@pytest.mark.parametrize(
    ("greeting", "hang_up"), [(b"SSH-2.0-x\r\n", False), (b"", True)], ids=["ssh", "hangs up"]
)
def test_another_protocol_is_a_stranger(look: Look, greeting: bytes, hang_up: bool) -> None:
    with listener(greeting, hang_up) as address:
        assert look.at(address) is Seen.STRANGER


def test_what_arrived_counts_before_the_clock(look: Look) -> None:
    """After a pause of the own process all deadlines have passed, and all answers are there."""
    with EchoPeer() as peer:
        look.begin(peer.address, connect=PATIENCE, greeting=PATIENCE)
        look.selector.select(PATIENCE)
        far = time.monotonic() + 1000
        assert look.looker.sights(far) in ([], [Sight(peer.address, Seen.GREETED)])
        if peer.address in look.looker:
            look.selector.select(PATIENCE)
            assert look.looker.sights(far + 2000) == [Sight(peer.address, Seen.GREETED)]


def test_no_more_looks_are_taken_than_the_limit() -> None:
    look = Look(limit=1)
    with listener() as one, listener() as two:
        assert look.begin(one)
        assert look.begin(one), "it runs already"
        assert not look.begin(two)
        look.next()
        assert look.begin(two)


def test_a_look_that_is_cancelled_tells_nothing(look: Look) -> None:
    with listener() as address:
        look.begin(address)
        look.looker.cancel(address)
        refused = f"127.0.0.1:{free_port()}"
        look.begin(refused)
        assert look.next().key == refused
    look.looker.cancel("what was never begun")


def test_closing_leaves_no_descriptor_registered(look: Look) -> None:
    with listener() as address:
        look.begin(address)
        look.looker.close()
        assert not look.selector.get_map()
        assert look.looker.next_wakeup() is None
