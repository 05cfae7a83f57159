"""Strangers on the control port: garbage, half-open connections, junk from a real client."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_echo import EchoPeer, eventually

from tensorhub_p2p.protocol.envelope import MAX_MESSAGE_BYTES, WIRE_VERSION, Envelope, encode
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.runtime.security import secure

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


@pytest.fixture(params=[None, "a secret that is long enough"], ids=["plain", "curve"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[EchoPeer, EchoPeer]]:
    with EchoPeer(secret=request.param) as a, EchoPeer(secret=request.param) as b:
        yield a, b


def connect(peer: EchoPeer) -> socket.socket:
    host, _, port = peer.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize(
    "garbage",
    [
        random.Random(1).randbytes(4096),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 4096,
        bytes(4096),
        GREETING + b"\x02" + b"\xff" * 8,  # a frame that claims 2**64 - 1 bytes
        GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + b"x" * 1000,
        GREETING + b"\x04\xff" + b"\x05READY" + b"\xff" * 249,
    ],
    ids=["random", "http", "ones", "zeros", "huge frame", "huge command", "bad ready"],
)
def test_garbage_on_the_port_harms_nobody(pair: tuple[EchoPeer, EchoPeer], garbage: bytes) -> None:
    a, b = pair
    before = _peak_memory()
    for _ in range(20):
        with connect(b) as stranger:
            stranger.sendall(garbage)
            a.reach(b)
    assert b.control.fault_count == 0
    assert _peak_memory() - before < 32 << 20


OLD_GREETING = b"\x01\x00"
"""Of ZMTP 1.0: an identity of no bytes. Most garbage looks like one, too."""


def test_handshakes_of_old_protocols_are_refused(pair: tuple[EchoPeer, EchoPeer]) -> None:
    """In the middle of one libzmq aborts the process when the socket is closed."""
    _, b = pair
    with connect(b) as stranger:
        stranger.sendall(OLD_GREETING)
        while stranger.recv(4096):  # until it hangs up
            pass


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_they_are_refused_where_we_dial_too(kind: int) -> None:
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialling = context.socket(kind)
        secure(dialling, None, server=False)
        dialling.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        answering, _ = server.accept()
        with answering:
            answering.settimeout(5)
            answering.sendall(OLD_GREETING)
            while answering.recv(4096):
                pass
        dialling.close(0)
    context.term()


CLOSES_AMID_GARBAGE = """
import os, random, socket, threading, time, zmq
from tensorhub_p2p.runtime.security import secure
server = socket.create_server(("127.0.0.1", 0))

def talk(connection):
    try:
        connection.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n" + os.urandom(200))
        time.sleep(random.uniform(0, 0.02))
        connection.sendall(os.urandom(400))
        connection.recv(4096)
    except OSError:
        pass  # it hung up
    connection.close()

def serve():
    while True:
        threading.Thread(target=talk, args=server.accept()[:1], daemon=True).start()

threading.Thread(target=serve, daemon=True).start()
context, until = zmq.Context(), time.monotonic() + 3.0
while time.monotonic() < until:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    secure(router, None, server=False)
    for _ in range(4):
        router.connect("tcp://127.0.0.1:{}".format(server.getsockname()[1]))
    time.sleep(random.uniform(0, 0.01))
    router.close()
"""


def test_who_hangs_up_on_a_stranger_lives_on() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSES_AMID_GARBAGE], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_half_open_connections_are_dropped_after_the_handshake_time(
    pair: tuple[EchoPeer, EchoPeer],
) -> None:
    a, b = pair
    strangers = [connect(b) for _ in range(30)]
    a.reach(b)
    for stranger in strangers:
        stranger.settimeout(10)
        while stranger.recv(4096):
            pass  # its greeting; then it hangs up
        stranger.close()
    a.reach(b)


def client(peer: EchoPeer, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 2000)
    dealer.connect(f"tcp://{peer.address}")
    return dealer


def envelope(peer: EchoPeer, **changes: object) -> bytes:
    good = Envelope(
        WIRE_VERSION, "c", "z", PeerId("ab" * 8), "127.0.0.1:1", peer.me, "Ping",
        msgspec.Raw(msgspec.msgpack.encode([7, []])),
    )  # fmt: skip
    return encode(msgspec.structs.replace(good, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "undecodable"),
        ({"kind": "Teleport"}, "undecodable"),
        pytest.param({"body": msgspec.Raw(b"\xc1")}, "undecodable", id="no MessagePack"),
        pytest.param(
            {"body": msgspec.Raw(msgspec.msgpack.encode([-7]))}, "undecodable", id="no such Ping"
        ),
        ({"cluster": "d"}, "another cluster"),
        ({"to": PeerId("cd" * 8)}, "for another peer"),
        ({"sender": PeerId("")}, "malformed sender"),
        ({"sender": PeerId("x" * 16)}, "malformed sender"),
        ({"sender": PeerId("ab" * 9)}, "malformed sender"),
        ({"reply_to": ""}, "no usable address to reply to"),
        ({"reply_to": "[::]:9"}, "no usable address to reply to"),
        ({"reply_to": "file:///etc/passwd"}, "no usable address to reply to"),
    ],
    ids=str,
)
def test_a_bad_envelope_is_dropped_and_counted_by_its_reason(
    changes: dict[str, object], reason: str
) -> None:
    with EchoPeer() as b, zmq.Context() as context, client(b, context) as dealer:
        dealer.send(envelope(b, **changes))
        eventually(lambda: b.links.counters[f"dropped: {reason}"] == 1, "it is counted")
        dealer.send(envelope(b))
        eventually(lambda: b.links.counters["received"] == 1, "good ones still arrive")
        eventually(lambda: b.machine.got.qsize() == 1, "and alone reach the machine")


def test_junk_from_a_real_client_is_dropped_while_others_are_served() -> None:
    with EchoPeer() as a, EchoPeer() as b, zmq.Context() as context, client(b, context) as dealer:
        for junk in ([b""], [b"", b"", b""], [b"x"] * 50, [os.urandom(1000)], [b"\x98" * 100]):
            dealer.send_multipart(junk)
        a.reach(b)
        eventually(lambda: b.links.counters["dropped: not one frame"] == 2, "parts are refused")
        eventually(lambda: b.links.counters["dropped: undecodable"] == 3, "so is garbage")


def test_an_oversized_message_ends_its_connection_and_costs_no_memory() -> None:
    with EchoPeer() as a, EchoPeer() as b, zmq.Context() as context, client(b, context) as dealer:
        dealer.send(bytes(MAX_MESSAGE_BYTES * 2))
        a.reach(b)
        assert b.links.counters["dropped: undecodable"] == 0


def test_what_comes_back_on_a_dialled_connection_is_dropped() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as rogue, EchoPeer() as a:
        port = rogue.bind_to_random_port("tcp://127.0.0.1")
        a.ping(f"127.0.0.1:{port}")
        routing_id, _ = rogue.recv_multipart()
        for _ in range(10):
            rogue.send_multipart([routing_id, envelope(a)])
        reason = "dropped: came back on a dialled connection"
        eventually(lambda: a.links.counters[reason] == 10, "it is counted")
        assert a.machine.got.empty()


@given(st.lists(st.binary(max_size=300), max_size=4))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_frames_whatever_make_the_check_raise(frames: list[bytes]) -> None:
    peer = _checked_peer()
    assert isinstance(peer.links._check(frames), str)


_checking: list[EchoPeer] = []


def _checked_peer() -> EchoPeer:
    if not _checking:
        _checking.append(EchoPeer())
    return _checking[0]


@pytest.fixture(scope="module", autouse=True)
def _stop_checking() -> Iterator[None]:
    yield
    for peer in _checking:
        peer.control.stop()


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
