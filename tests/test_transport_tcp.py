"""Reading over TCP: right bytes, or an error in time; and a port that nothing brings down."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext

import numpy
import pytest
from holder_process import Holder, arrays, blank

from tensorhub_p2p.config import TcpConfig
from tensorhub_p2p.errors import JoinError
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.credentials import Credentials
from tensorhub_p2p.transfer.digest import digest, timed_hasher
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.scratch import Scratch
from tensorhub_p2p.transfer.transports import tcp_wire
from tensorhub_p2p.transfer.transports.addresses import join_address, split_address
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    ReadFailed,
    SourceGone,
    SourceSilent,
    SourceWithdrew,
)
from tensorhub_p2p.transfer.transports.tcp import TcpTransport

MiB = 1 << 20
SHAPES = {
    "one flat tensor": [3 * MiB + 5],
    "thousands of small ones": [4096] * 1500 + [1] * 1500 + [0] * 3,
    "everything mixed": [0, 1, MiB + 3, 0, 7, 7, 7, 100_000, 0, 600_000, 65_536] * 2,
    "nothing": [],
    "only empty ones": [0, 0],
}
SECRETS = {"plain": None, "TLS": "s3cret"}
WAIT = 10.0


def soon() -> float:
    return time.monotonic() + 20


def credentials(secret: str | None) -> Credentials | None:
    return Credentials.from_secret(secret) if secret else None


def read_all(reader: Reader, into: Region) -> list[bytes]:
    return read_chunks(reader, into, range(into.layout.num_chunks))


def read_chunks(reader: Reader, into: Region, chunks: Iterable[int]) -> list[bytes]:
    """Returns their digests."""
    digests = []
    for chunk in chunks:
        hasher = timed_hasher()
        reader.read(*into.layout.chunk_range(chunk), into, soon(), hasher)
        digests.append(hasher.digest())
    return digests


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.005)


class Pair:
    """A holder and a puller in this process, and a region of the first."""

    def __init__(
        self,
        sizes: list[int],
        secret: str | None = None,
        silence: float = 5.0,
        config: TcpConfig | None = None,
        bind: str = "127.0.0.1:0",
    ) -> None:
        self.sizes = sizes
        self.holder = TcpTransport(bind, credentials=credentials(secret), config=config)
        self.puller = TcpTransport(credentials=credentials(secret), silence=silence)
        self.expected = arrays(sizes, 1)
        self.region = Region.of(self.expected)
        self.allowed = ChunkSet.full(self.region.layout.num_chunks)
        self.endpoint = self.holder.export(self.region, self.allowed)

    def connect(self) -> Reader:
        return self.puller.connect(self.endpoint, soon())

    def check(self) -> None:
        """A new reader gets all the bytes."""
        target = blank(self.sizes)
        reader = self.connect()
        read_all(reader, Region.of(target))
        reader.close()
        assert all(numpy.array_equal(target[n], self.expected[n]) for n in target)

    def raw(self) -> socket.socket:
        """A bare connection to the holder's port."""
        connection = socket.create_connection(split_address(self.holder.addresses[0]), timeout=WAIT)
        connection.settimeout(WAIT)
        return connection

    @property
    def connections(self) -> int:
        return len(self.holder._server._connections)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.holder.close()
        self.puller.close()


def ask(connection: socket.socket, endpoint: bytes, start: int, length: int) -> None:
    export = tcp_wire.decode(endpoint).export
    connection.sendall(tcp_wire.REQUEST.pack(tcp_wire.MAGIC, export, start, length))


def until_closed(connection: socket.socket) -> bytes:
    """What still comes in; the other end may close with a reset, because of what it got."""
    received = b""
    try:
        while more := connection.recv(4096):
            received += more
    except ConnectionError:
        pass
    return received


# --- right bytes -------------------------------------------------------------------------


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("loops")
def test_every_byte_arrives_and_is_hashed(shape: str, secret: str) -> None:
    sizes = SHAPES[shape]
    with Pair(sizes, SECRETS[secret]) as pair:
        target = blank(sizes)
        into = Region.of(target)
        digests = read_all(pair.connect(), into)
        assert all(numpy.array_equal(target[n], pair.expected[n]) for n in target)
        scratch = Scratch()
        assert digests == [digest(into, c, scratch) for c in range(into.layout.num_chunks)]


@pytest.mark.processes
@pytest.mark.parametrize("secret", SECRETS)
def test_another_process_is_read_by_several_streams_at_once(secret: str) -> None:
    sizes = [5, 3 * MiB, 70, 70_000]
    puller = TcpTransport(credentials=credentials(SECRETS[secret]))
    with Holder("tcp", sizes, secret=SECRETS[secret]) as holder:
        targets = [blank(sizes) for _ in range(3)]
        readers = [puller.connect(holder.endpoint, soon()) for _ in targets]
        threads = [
            threading.Thread(target=read_all, args=(reader, Region.of(target)))
            for reader, target in zip(readers, targets, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = arrays(sizes, 1)
    assert all(numpy.array_equal(t[n], expected[n]) for t in targets for n in expected)
    puller.close()


@pytest.mark.processes
@pytest.mark.usefixtures("loops")
def test_a_holder_whose_gil_is_held_goes_on_sending_all_that_was_asked_for() -> None:
    sizes = [24 * MiB]  # more than the sockets' buffers take
    puller = TcpTransport(silence=WAIT)
    with Holder("tcp", sizes) as holder:
        target = blank(sizes)
        into = Region.of(target)
        reader = puller.connect(holder.endpoint, soon())
        chunks = list(range(into.layout.num_chunks))
        ask_ahead(reader, into, chunks[1:])
        began = time.monotonic()
        reader.read(*into.layout.chunk_range(0), into, soon(), timed_hasher())
        # By now its thread is in the system call that sends the rest, or will never be.
        holder.tell(("hold the GIL", 3.0))
        read_chunks(reader, into, chunks[1:])
        assert not holder.has_answered(), "the GIL was free before all bytes had come"
        assert time.monotonic() - began < WAIT
    expected = arrays(sizes, 1)
    assert all(numpy.array_equal(target[n], expected[n]) for n in target)
    puller.close()


# --- asking ahead ------------------------------------------------------------------------


def ask_ahead(reader: Reader, into: Region, chunks: list[int]) -> None:
    """Let the reader know that these are read next, in this order."""
    left = iter(chunks)

    def following() -> tuple[int, int] | None:
        chunk = next(left, None)
        return None if chunk is None else into.layout.chunk_range(chunk)

    reader.ahead = following  # type: ignore[method-assign]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("shape", ["one flat tensor", "thousands of small ones"])
@pytest.mark.usefixtures("loops")
def test_ranges_that_are_asked_for_ahead_come_in_their_order(shape: str, secret: str) -> None:
    sizes = SHAPES[shape] * 2
    with Pair(sizes, SECRETS[secret]) as pair:
        target = blank(sizes)
        into = Region.of(target)
        order = list(range(into.layout.num_chunks))[::-1]
        reader = pair.connect()
        ask_ahead(reader, into, order[1:])
        digests = read_chunks(reader, into, order)
        assert digests == [digest(into, chunk, Scratch()) for chunk in order]
        assert all(numpy.array_equal(target[n], pair.expected[n]) for n in target)


def test_the_next_range_is_on_its_way_before_the_present_one_has_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        puller = TcpTransport(silence=WAIT)
        endpoint = fake_endpoint(server)
        asked: list[tuple[int, int]] = []

        def serve() -> None:
            with server.accept()[0] as connection:
                for expected in (1, 2, 1):  # the first byte comes once all three are asked for
                    for _ in range(expected):
                        request = connection.recv(tcp_wire.REQUEST.size, socket.MSG_WAITALL)
                        asked.append(tcp_wire.REQUEST.unpack(request)[2:])
                        if len(asked) == 1:
                            connection.sendall(tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 0, 0))
                for _start, length in asked[1:]:
                    header = tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 0, length)
                    connection.sendall(header + bytes(length))

        thread = threading.Thread(target=serve)
        thread.start()
        into = Region.of(blank([3 * MiB]))
        size = into.layout.chunk_bytes
        reader = puller.connect(endpoint, soon())
        ask_ahead(reader, into, [1, 2])
        read_chunks(reader, into, [0, 1, 2])
        thread.join()
        assert asked == [(0, 0), (0, size), (size, size), (2 * size, size)]
        puller.close()


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.usefixtures("loops")
def test_a_refusal_among_ranges_asked_for_ahead_costs_only_its_own(secret: str) -> None:
    sizes = [4 * MiB]
    with Pair(sizes, SECRETS[secret]) as pair:
        pair.allowed.bits = 0b1101
        target = blank(sizes)
        into = Region.of(target)
        size = into.layout.chunk_bytes
        reader = pair.connect()
        ask_ahead(reader, into, [1, 2, 3])
        for chunk in range(4):
            expected = pytest.raises(SourceWithdrew) if chunk == 1 else nullcontext()
            with expected:
                reader.read(*into.layout.chunk_range(chunk), into, soon(), timed_hasher())
        got, due = target["t0"], pair.expected["t0"]
        for chunk in (0, 2, 3):
            part = slice(chunk * size, (chunk + 1) * size)
            assert numpy.array_equal(got[part], due[part])
        assert not got[size : 2 * size].any()


def test_what_was_asked_for_must_be_read_next() -> None:
    with Pair([3 * MiB]) as pair:
        into = Region.of(blank([3 * MiB]))
        reader = pair.connect()
        ask_ahead(reader, into, [1])
        read_chunks(reader, into, [0])
        with pytest.raises(RuntimeError, match="order"):
            read_chunks(reader, into, [2])


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.usefixtures("loops")
def test_drain_cuts_off_all_that_was_asked_for_ahead(secret: str) -> None:
    sizes = [32 * MiB]
    with Pair(sizes, SECRETS[secret]) as pair:
        into = Region.of(blank(sizes))
        reader = pair.connect()
        chunks = list(range(into.layout.num_chunks))
        ask_ahead(reader, into, chunks[1:])
        read_chunks(reader, into, [0])  # the rest is being sent, unread
        began = time.monotonic()
        pair.holder.drain(pair.endpoint, began + 60)
        assert time.monotonic() - began < WAIT, "it waited for much to be sent"
        assert not pair.holder._exports._exports
        with pytest.raises(ReadFailed):
            read_chunks(reader, into, chunks[1:])
        reader.close()
        eventually(lambda: pair.connections == 0)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_puller_that_leaves_what_it_asked_for_wedges_nobody(secret: str) -> None:
    sizes = [32 * MiB]
    with Pair(sizes, SECRETS[secret]) as pair:
        into = Region.of(blank(sizes))
        for _ in range(3):
            reader = pair.connect()
            ask_ahead(reader, into, list(range(1, into.layout.num_chunks)))
            read_chunks(reader, into, [0])
            reader.close()
        eventually(lambda: pair.connections == 0)
        pair.check()
        pair.holder.drain(pair.endpoint, soon())


# --- what is served ----------------------------------------------------------------------


def test_chunks_are_served_from_the_moment_that_they_are_allowed() -> None:
    with Pair([3 * MiB]) as pair:
        pair.allowed.bits = 0
        pair.allowed.add(0)
        into = Region.of(blank([3 * MiB]))
        size = into.layout.chunk_bytes
        reader = pair.connect()
        reader.read(0, size, into, soon(), timed_hasher())
        for start, length in ((size, size), (0, size + 1), (size - 1, 2)):
            with pytest.raises(SourceWithdrew, match="doesn't hold all"):
                reader.read(start, length, into, soon(), timed_hasher())
        pair.allowed.add(1)
        reader.read(size, size, into, soon(), timed_hasher())


def test_a_range_beyond_the_end_is_refused() -> None:
    with Pair([1000]) as pair, pair.raw() as connection:
        for start, length in ((0, 1001), (1001, 0), (2**64 - 1, 2**64 - 1)):
            ask(connection, pair.endpoint, start, length)
            answer = tcp_wire.ANSWER.unpack(
                connection.recv(tcp_wire.ANSWER.size, socket.MSG_WAITALL)
            )
            assert answer == (tcp_wire.MAGIC, tcp_wire.Refusal.OUT_OF_RANGE, 0)
        pair.check()


def test_a_withdrawn_export_is_refused_to_old_readers_and_new_ones() -> None:
    with Pair([1000]) as pair:
        reader = pair.connect()
        pair.holder.withdraw(pair.endpoint)
        with pytest.raises(SourceWithdrew, match="withdrew"):
            read_all(reader, Region.of(blank([1000])))
        pair.holder.drain(pair.endpoint, soon())
        with pytest.raises(SourceWithdrew, match="doesn't know"):
            pair.connect()
        other = pair.holder.export(pair.region, pair.allowed)
        read_all(pair.puller.connect(other, soon()), Region.of(blank([1000])))


def test_drain_waits_for_reads_under_way_but_not_beyond_its_deadline() -> None:
    size = 24 * MiB
    with Pair([size]) as pair, pair.raw() as slow, pair.raw() as stuck:
        for connection in (slow, stuck):
            ask(connection, pair.endpoint, 0, size)
            assert connection.recv(tcp_wire.ANSWER.size, socket.MSG_WAITALL)
        drained = threading.Event()
        began = time.monotonic()
        drain = threading.Thread(
            target=lambda: (pair.holder.drain(pair.endpoint, began + 1.0), drained.set())
        )
        drain.start()
        got = 0
        while got < size:
            got += len(slow.recv(MiB))
        assert not drained.wait(0.01), "drain returned while the other read was under way"
        assert drained.wait(WAIT)
        assert time.monotonic() - began >= 1.0
        drain.join()
        got = 0
        while more := stuck.recv(MiB):
            got += len(more)
        assert got < size


def test_drain_with_no_read_under_way_returns_at_once() -> None:
    with Pair([1000]) as pair:
        pair.check()
        began = time.monotonic()
        pair.holder.drain(pair.endpoint, began + 60)
        assert time.monotonic() - began < 5


# --- failing sources ---------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.usefixtures("loops")
def test_a_source_that_is_killed_is_gone_and_cannot_be_reached_again(secret: str) -> None:
    puller = TcpTransport(credentials=credentials(SECRETS[secret]))
    with Holder("tcp", [MiB], secret=SECRETS[secret]) as holder:
        reader = puller.connect(holder.endpoint, soon())
        holder.kill()
        with pytest.raises(SourceGone, match="broke the connection"):
            read_all(reader, Region.of(blank([MiB])))
        with pytest.raises(CannotReach, match="refused"):
            puller.connect(holder.endpoint, soon())
    puller.close()


@pytest.mark.processes
@pytest.mark.parametrize("secret", SECRETS)
def test_a_source_that_is_stopped_is_silent_after_the_silence_and_no_sooner(secret: str) -> None:
    puller = TcpTransport(credentials=credentials(SECRETS[secret]), silence=0.3)
    with Holder("tcp", [MiB], secret=SECRETS[secret]) as holder:
        reader = puller.connect(holder.endpoint, soon())
        holder.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(SourceSilent, match=r"nothing for 0\.3 s"):
            read_all(reader, Region.of(blank([MiB])))
        assert 0.25 < time.monotonic() - began < 5
        holder.signal(signal.SIGCONT)
    puller.close()


@pytest.mark.parametrize("after", [0, 1000])
@pytest.mark.parametrize("sizes", [[3 * MiB], [4096] * 768])
@pytest.mark.usefixtures("loops")
def test_a_source_that_falls_silent_within_a_chunk_is_noticed(after: int, sizes: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        puller = TcpTransport(silence=0.2)
        endpoint = fake_endpoint(server)

        def serve() -> None:
            connection, _ = server.accept()
            for sent in (0, after):
                request = connection.recv(tcp_wire.REQUEST.size, socket.MSG_WAITALL)
                length = tcp_wire.REQUEST.unpack(request)[3]
                connection.sendall(tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 0, length) + bytes(sent))
            connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        reader = puller.connect(endpoint, soon())
        with pytest.raises(SourceSilent):
            read_all(reader, Region.of(blank(sizes)))
        reader.close()
        thread.join()
        puller.close()


def fake_endpoint(server: socket.socket) -> bytes:
    address = join_address(*server.getsockname()[:2])
    return tcp_wire.encode(tcp_wire.Endpoint((address,), bytes(16), False))


@pytest.mark.parametrize(
    ("answer", "failure", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", CannotReach, "something else"),
        (b"", CannotReach, "closed"),
        (b"THR1\0", CannotReach, "middle of a message"),
        (tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 77, 0), SourceWithdrew, "status 77"),
        (tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 0, 1 << 60), CannotReach, "offers"),
    ],
)
def test_what_does_not_speak_the_protocol_cannot_be_reached(
    answer: bytes, failure: type[ReadFailed], complaint: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        puller = TcpTransport()
        stack.callback(puller.close)

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        with pytest.raises(failure, match=complaint):
            puller.connect(fake_endpoint(server), soon())


def test_a_passed_deadline_ends_the_read_before_it_asks() -> None:
    with Pair([1000]) as pair:
        reader = pair.connect()
        with pytest.raises(SourceSilent, match="deadline"):
            reader.read(0, 10, Region.of(blank([1000])), time.monotonic() - 1, timed_hasher())


@pytest.mark.usefixtures("loops")
def test_closing_a_reader_ends_a_read_that_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        puller = TcpTransport(silence=60)
        asked = threading.Event()

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(tcp_wire.REQUEST.size, socket.MSG_WAITALL)
                connection.sendall(tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 0, 0))
                connection.recv(tcp_wire.REQUEST.size, socket.MSG_WAITALL)
                connection.sendall(tcp_wire.ANSWER.pack(tcp_wire.MAGIC, 0, 1000))
                asked.set()
                connection.recv(1)

        failures: list[Exception] = []

        def read() -> None:
            try:
                read_all(reader, Region.of(blank([1000])))
            except ReadFailed as error:
                failures.append(error)

        threads = [threading.Thread(target=serve)]
        threads[0].start()
        reader = puller.connect(fake_endpoint(server), soon())
        threads.append(threading.Thread(target=read))
        threads[1].start()
        assert asked.wait(WAIT)
        reader.close()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert isinstance(failures[0], SourceGone)
        with pytest.raises(SourceGone, match="closed"):
            read_all(reader, Region.of(blank([1000])))
        puller.close()


# --- secrets -----------------------------------------------------------------------------


def test_another_secret_cannot_reach_and_the_message_says_so() -> None:
    with Pair([1000], "s3cret") as pair:
        other = TcpTransport(credentials=credentials("wrong"))
        with pytest.raises(CannotReach, match="same secret"):
            other.connect(pair.endpoint, soon())
        other.close()
        pair.check()


def test_a_secret_on_one_side_only_is_known_before_dialling() -> None:
    with Pair([1000], "s3cret") as closed, Pair([1000]) as open_:
        assert "only it has" in (open_.puller.reachable(closed.endpoint) or "")
        assert "only this peer" in (closed.puller.reachable(open_.endpoint) or "")
        with pytest.raises(CannotReach, match="only it has"):
            open_.puller.connect(closed.endpoint, soon())


def test_nothing_is_served_in_the_clear_where_there_is_a_secret() -> None:
    with Pair([1000], "s3cret") as pair, pair.raw() as connection:
        ask(connection, pair.endpoint, 0, 1000)
        data = until_closed(connection)
        assert tcp_wire.MAGIC not in data
        assert len(data) < 100  # a TLS alert


# --- a port that nothing brings down -----------------------------------------------------


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "garbage",
    [
        os.urandom(100),
        os.urandom(3 * MiB),
        b"\xff" * 36,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10,
        tcp_wire.REQUEST.pack(tcp_wire.MAGIC, bytes(16), 2**64 - 1, 2**64 - 1),
        tcp_wire.MAGIC,
        b"",
    ],
    ids=["random", "much random", "ones", "http", "huge range", "half a request", "nothing"],
)
def test_garbage_hurts_nobody(garbage: bytes, secret: str) -> None:
    with Pair([MiB], SECRETS[secret]) as pair:
        reader = pair.connect()
        with pair.raw() as connection:
            try:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                assert len(until_closed(connection)) < 200
            except OSError:
                pass  # broken off in the middle of it: just as good
        read_all(reader, Region.of(blank([MiB])))
        pair.check()
        reader.close()
        eventually(lambda: pair.connections == 0)


@pytest.mark.parametrize("secret", SECRETS)
def test_half_open_connections_block_nobody_and_are_closed_in_time(secret: str) -> None:
    config = TcpConfig(handshake_timeout=0.5)
    with Pair([MiB], SECRETS[secret], config=config) as pair, ExitStack() as stack:
        half_open = [stack.enter_context(pair.raw()) for _ in range(20)]
        for connection in half_open[::2]:
            connection.sendall(tcp_wire.MAGIC)
        pair.check()
        for connection in half_open:
            assert len(until_closed(connection)) < 100
        eventually(lambda: pair.connections == 0)


def test_connections_beyond_the_limit_are_closed_and_the_rest_goes_on() -> None:
    with Pair([MiB], config=TcpConfig(max_connections=3)) as pair, ExitStack() as stack:
        reader = pair.connect()
        for _ in range(2):
            stack.enter_context(pair.raw())
        eventually(lambda: pair.connections == 3)
        with pytest.raises(CannotReach):
            pair.connect()
        read_all(reader, Region.of(blank([MiB])))
        stack.close()
        eventually(lambda: pair.connections == 1)
        pair.check()


def test_an_idle_connection_is_closed_in_time() -> None:
    with Pair([MiB], config=TcpConfig(idle_timeout=0.2)) as pair:
        reader = pair.connect()
        eventually(lambda: pair.connections == 0)
        with pytest.raises(SourceGone):
            read_all(reader, Region.of(blank([MiB])))


@pytest.mark.parametrize("secret", SECRETS)
def test_a_puller_that_takes_nothing_is_broken_off(secret: str) -> None:
    size = 24 * MiB
    config = TcpConfig(stall_timeout=0.3)
    with Pair([size], SECRETS[secret], config=config) as pair, pair.raw() as connection:
        keys = credentials(SECRETS[secret])
        if keys is not None:
            connection = keys.client_context().wrap_socket(connection)
        ask(connection, pair.endpoint, 0, size)
        eventually(lambda: pair.connections == 1)
        eventually(lambda: pair.connections == 0)
        connection.close()
        pair.check()


def test_closing_the_transport_ends_its_threads_and_connections() -> None:
    pair = Pair([MiB])
    reader = pair.connect()
    with pair.raw() as half_open:
        eventually(lambda: pair.connections == 2)
        pair.holder.close()
        pair.holder.close()
        pair.puller.close()
        assert half_open.recv(1) == b""
    with pytest.raises(SourceGone):
        read_all(reader, Region.of(blank([MiB])))
    assert not [t for t in threading.enumerate() if t.name.startswith("tensorhub_p2p-tcp")]
    with pytest.raises(OSError, match="refused"):
        pair.raw()


# --- addresses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("h:1", "h", 1), ("[::1]:65535", "::1", 65535), ("10.0.0.1:0", "10.0.0.1", 0)],
)
def test_an_address_is_split_at_its_port(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "::1", "::1:80", "h:x", "h:-1", "h:65536"])
def test_what_is_no_address_says_how_one_looks(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port|brackets"):
        split_address(text)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("bind", ["localhost:0", "0.0.0.0:0", "[::1]:0", "[::]:0"])
def test_names_and_both_families_can_be_bound(bind: str) -> None:
    if "::" in bind and not has_ipv6():
        pytest.skip("no IPv6 here")
    with Pair([1000], bind=bind) as pair:
        pair.check()


def test_advertised_hosts_get_the_port_and_the_next_one_is_tried() -> None:
    told = ["127.0.0.1:1", "localhost", "[::1]", "127.0.0.1:9999"]
    transport = TcpTransport(advertise=told)
    port = transport._server.port
    assert transport.addresses == (
        "127.0.0.1:1",
        f"localhost:{port}",
        f"[::1]:{port}",
        "127.0.0.1:9999",
    )
    region = Region.of(arrays([10], 1))
    endpoint = transport.export(region, ChunkSet.full(1))
    read_all(transport.connect(endpoint, soon()), Region.of(blank([10])))
    transport.close()


def test_a_port_in_use_is_a_join_error_that_names_it() -> None:
    first = TcpTransport()
    with pytest.raises(JoinError, match=r"127.0.0.1:\d+.*in use"):
        TcpTransport(first.addresses[0])
    first.close()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x91\x01"])
def test_a_garbage_endpoint_is_a_reason_and_not_a_crash(garbage: bytes) -> None:
    transport = TcpTransport()
    assert "can't be read" in (transport.reachable(garbage) or "")
    with pytest.raises(CannotReach):
        transport.connect(garbage, soon())
    transport.close()
