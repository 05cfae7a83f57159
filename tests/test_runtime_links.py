"""Messages between runtimes: delivery, checks on receipt, bounds."""

from __future__ import annotations

import os
import socket

import pytest
from runtime_echo import EchoPeer, eventually, free_port, has_ipv6_loopback

from tensorhub_p2p.config import ConfigError, WireConfig
from tensorhub_p2p.errors import JoinError
from tensorhub_p2p.protocol.identity import Group, PeerId, PeerInfo, Slot
from tensorhub_p2p.protocol.messages import Ack, Ping, PullProgress
from tensorhub_p2p.runtime import resolving
from tensorhub_p2p.runtime.addresses import Address, AddressError
from tensorhub_p2p.runtime.book import AddressBook
from tensorhub_p2p.runtime.monitor import Fact

SECRET = "a secret that is long enough"


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_message_to_an_address_is_answered_to_the_sender(secret: str | None) -> None:
    with EchoPeer(secret=secret) as a, EchoPeer(secret=secret) as b:
        a.ping(b.address, 5)
        assert a.next_ack() == (b.me, Ack(5))


def test_after_one_message_both_sides_can_reach_each_other_by_id() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        a.ping(b.address)
        a.next_ack()
        a.ping_peer(b.me, 6)
        assert a.next_ack() == (b.me, Ack(6))
        b.ping_peer(a.me, 7)
        assert b.next_ack() == (a.me, Ack(7))


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("secret", [None, SECRET])
def test_ipv6_works_as_ipv4_does(secret: str | None) -> None:
    with EchoPeer(bind="[::1]:0", secret=secret) as a, EchoPeer(secret=secret) as b:
        assert a.address.startswith("[::1]:")
        a.ping(b.address, 1)
        assert a.next_ack() == (b.me, Ack(1))
        b.ping(a.address, 2)
        assert b.next_ack() == (a.me, Ack(2))


def test_a_seed_can_be_a_name() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        port = b.address.rpartition(":")[2]
        a.ping(f"localhost:{port}", 3)
        a.keep_pinging(f"localhost:{port}", Fact.UP)
        assert a.next_ack()[0] == b.me


def test_a_name_with_several_addresses_is_tried_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = free_port()
    with EchoPeer() as a, EchoPeer() as b:
        port = int(b.address.rpartition(":")[2])
        # A name may stand for another machine, so another address, at which nobody listens.
        two = [Address("127.0.0.1", dead), Address("127.0.0.1", port)]
        monkeypatch.setattr(
            resolving, "resolve", lambda address: two if address.host == "seed" else [address]
        )
        a.keep_pinging("seed:1", Fact.UP)
        assert a.next_ack()[0] == b.me
        assert "connection refused" in a.links.describe("seed:1")


def test_a_peer_with_several_addresses_is_reached_through_the_one_that_works() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        info = PeerInfo(b.me, "b", "z", (f"127.0.0.1:{free_port()}", b.address))
        a.control.call(lambda now: a.links.learn(info)).result(5)

        a.reach_peer(b.me)


def test_an_unknown_peer_is_found_through_the_lookup() -> None:
    infos: dict[PeerId, PeerInfo] = {}
    with EchoPeer(lookup=infos.get) as a, EchoPeer() as b:
        a.ping_peer(b.me)
        eventually(
            lambda: a.links.counters["dropped: address not known"] == 1, "the message is dropped"
        )
        infos[b.me] = PeerInfo(b.me, "b", "z", (b.address,))
        a.ping_peer(b.me, 4)
        assert a.next_ack() == (b.me, Ack(4))


def test_another_clusters_messages_are_dropped_and_counted() -> None:
    with EchoPeer(cluster="one") as a, EchoPeer(cluster="two") as b:
        a.ping(b.address)
        eventually(lambda: b.links.counters["dropped: another cluster"] == 1, "it is counted")
        assert b.machine.got.empty()
        eventually(lambda: "connected" in a.links.describe(b.address), "it is told")


def test_a_message_for_the_previous_peer_at_a_reused_address_is_dropped() -> None:
    gone = PeerId("0123456789abcdef")
    with EchoPeer() as a, EchoPeer() as b:
        a.control.call(lambda now: a.links.learn(PeerInfo(gone, "gone", "z", (b.address,)))).result(
            5
        )
        a.ping_peer(gone)
        eventually(lambda: b.links.counters["dropped: for another peer"] == 1, "it is counted")
        assert b.machine.got.empty()


def test_a_port_in_use_is_an_error_that_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JoinError, match=f"{address}.*in use"):
            EchoPeer(bind=address)


def test_an_address_of_another_machine_cannot_be_bound_and_the_error_says_what_to_do() -> None:
    with pytest.raises(JoinError, match="advertise"):
        EchoPeer(bind="203.0.113.77:0", secret=SECRET)


def test_without_a_secret_a_public_bind_is_refused_before_any_socket_opens() -> None:
    with pytest.raises(AddressError, match="no secret"):
        EchoPeer(bind="0.0.0.0:0")
    with EchoPeer(bind="0.0.0.0:0", insecure=True) as a:
        assert not a.address.startswith("0.0.0.0")


def test_an_empty_secret_is_an_error() -> None:
    with pytest.raises(ConfigError, match="secret is empty"):
        EchoPeer(secret=" ")


def test_a_guessable_secret_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with EchoPeer(secret="short"):
        assert "keygen" in caplog.text
        assert "short" not in caplog.text.replace("has only 5 characters", "")


def test_sending_to_a_dead_destination_never_blocks_and_is_counted() -> None:
    config = WireConfig(send_queue=10)
    listener = socket.socket()  # accepts through its backlog, then says nothing: a paused process
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with listener, EchoPeer(config=config) as a, EchoPeer() as b:
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        dead = f"127.0.0.1:{free_port()}"

        def flood(now: float) -> None:
            for seq in range(100):
                a.machine.outbox.send_to(silent, Ping(seq))
                a.machine.outbox.send_to(dead, Ping(seq))

        a.control.call(flood).result(5)
        a.reach(b)
        assert a.links.counters["dropped: send queue full"] >= 100


def test_the_least_recently_used_connection_is_closed_beyond_the_bound() -> None:
    config = WireConfig(max_connections=3)
    others = [EchoPeer() for _ in range(5)]
    with EchoPeer(config=config) as a:
        for other in others:
            with other:
                a.ping(other.address)
                assert a.next_ack()[0] == other.me
                assert len(a.links._outgoing._open) <= 3


def test_an_evicted_peer_is_reached_again_at_once() -> None:
    config = WireConfig(max_connections=1)
    with EchoPeer(config=config) as a, EchoPeer() as b, EchoPeer() as c:
        for seq in range(6):
            for other in (b, c):
                a.ping(other.address, seq)
                assert a.next_ack() == (other.me, Ack(seq))
        assert a.links.counters["connections closed to make room"] == 11


def test_an_evicted_connection_really_closes() -> None:
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    others = [EchoPeer().__enter__() for _ in range(6)]
    with EchoPeer(config=WireConfig(max_connections=1)) as a:
        a.reach(others[0])
        # Their connections back to us stay; each has two ends in this process.
        allowed = open_descriptors() + 2 * len(others)
        for other in others[1:]:
            a.reach(other)
        eventually(lambda: open_descriptors() < allowed, "both ends are gone")
    for other in others:
        other.control.stop()


def test_a_burst_beyond_one_batch_arrives_whole() -> None:
    with EchoPeer(config=WireConfig(receive_batch=3)) as a, EchoPeer() as b:
        b.reach(a)
        b.control.post(lambda now: [b.machine.outbox.send(a.me, Ack(n)) for n in range(500)])
        got = [a.machine.got.get(timeout=5)[1] for _ in range(501)]
        assert got[1:] == [Ack(n) for n in range(500)]


def test_watches_do_not_count_for_the_bound_and_stay_whatever_else_is_dialled() -> None:
    config = WireConfig(max_connections=1)
    with EchoPeer(config=config) as a, EchoPeer() as b, EchoPeer() as c, EchoPeer() as d:
        a.ping(b.address)
        a.next_ack()
        a.watch(b.me)
        eventually(lambda: a.links._watching.is_up(b.me), "the watch stands")
        for other in (c, d):
            a.ping(other.address)
            assert a.next_ack()[0] == other.me
        assert list(a.links._outgoing._open) == [d.address]
        assert a.links._watching.is_up(b.me)
        assert a.evidence.empty()


def test_a_message_too_large_for_the_wire_is_dropped_by_its_sender() -> None:
    with EchoPeer() as a, EchoPeer() as b:
        a.reach(b)
        message = PullProgress("p", Slot(Group("m", "r"), 0), have=bytes(9 << 20))
        a.control.call(lambda now: a.machine.outbox.send(b.me, message)).result(5)
        eventually(lambda: a.links.counters["dropped: too large to send"] == 1, "it is counted")
        a.ping_peer(b.me, 9)
        assert a.next_ack() == (b.me, Ack(9))


def test_the_address_book_forgets_the_least_recently_used_peer() -> None:
    book = AddressBook(2)
    one, two, three = (PeerId(str(n) * 16) for n in (1, 2, 3))
    book.learn(one, ("10.0.0.1:1",))
    book.learn(two, ("10.0.0.2:1",))
    book.addresses_of(one)
    book.learn(three, ("10.0.0.3:1",))
    assert book.addresses_of(two) is None
    assert book.addresses_of(one) == ("10.0.0.1:1",)
    assert len(book) == 2


def test_the_address_book_takes_only_addresses_that_can_be_dialled() -> None:
    book = AddressBook(9)
    peer = PeerId("1" * 16)
    assert not book.hear(peer, "")
    assert not book.hear(peer, "0.0.0.0:1")
    assert book.learn(peer, ("nonsense", "10.0.0.1:1", "[::]:1"))
    assert book.addresses_of(peer) == ("10.0.0.1:1",)
