"""Strangers at both ports, wrong secrets, wrong clusters, ports in use, forked children."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from steps import blank, fill, wrong

import tensorhub_p2p as th

StartPeer = Callable[..., th.Peer]
SECRET = "a secret that is long enough"
MIB = 1 << 20

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
GARBAGE = {
    "random": random.Random(1).randbytes(4096),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "ones": b"\xff" * 4096,
    "zeros": bytes(4096),
    "a frame of 2**64 bytes": GREETING + b"\x02" + b"\xff" * 8,
    "a command of 2**40 bytes": GREETING + b"\x06" + (1 << 40).to_bytes(8, "big") + b"x" * 1000,
    "a request of 2**63 bytes": struct.pack("!4s16sQQ", b"THR1", bytes(16), 0, 1 << 63),
    "a TLS hello of 16 MiB": b"\x16\x03\x01\xff\xff\x01\xff\xff\xff" + bytes(1000),
}


def ports_of(handle: th.ShardHandle) -> dict[str, tuple[str, int]]:
    """The two ports on which the handle's peer listens."""
    info = handle._driver.info
    found = {}
    for kind, address in (("control", info.addresses[0]), ("data", info.data_addresses[0])):
        host, _, port = address.rpartition(":")
        found[kind] = (host, int(port))
    return found


@contextmanager
def strangers(port: tuple[str, int], count: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that say something, and then stay open and silent."""
    opened = [socket.create_connection(port, timeout=5) for _ in range(count)]
    try:
        for connection in opened:
            try:
                connection.sendall(say)
            except ConnectionError:
                pass  # hung up on already, which is fine
        yield opened
    finally:
        for connection in opened:
            connection.close()


@pytest.fixture(params=[None, SECRET], ids=["plain", "secret"])
def pair(request: pytest.FixtureRequest, peer: StartPeer) -> tuple[th.ShardHandle, th.ShardHandle]:
    """A trainer and a rollout, over tcp."""
    handles = []
    for replica in ("trainer", "rollout"):
        member = peer(secret=request.param, transports=["tcp"])
        handle = member.open("m", replica=replica)
        handle.register(blank())
        handles.append(handle)
    return handles[0], handles[1]


def serve_one(pair: tuple[th.ShardHandle, th.ShardHandle], version: int) -> None:
    """The service goes on for others."""
    trainer, rollout = pair
    if trainer.state is th.HandleState.PUBLISHED:
        trainer.unpublish()
    weights, copy = blank(), blank()
    for handle, tensors in ((trainer, weights), (rollout, copy)):
        if handle.state is th.HandleState.PUBLISHED:
            handle.unpublish()
        handle.unregister()
        handle.register(tensors)
    fill(weights, version)
    trainer.publish(version)
    assert rollout.replicate(version, timeout=20).version == version
    assert not wrong(copy, version)


def test_garbage_at_both_ports_harms_nobody(
    pair: tuple[th.ShardHandle, th.ShardHandle],
) -> None:
    serve_one(pair, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for port in ports_of(pair[0]).values():
        for garbage in GARBAGE.values():
            with strangers(port, 5, garbage):
                pass
    with strangers(ports_of(pair[0])["control"], 5, GARBAGE["random"]):
        serve_one(pair, 2)
    with strangers(ports_of(pair[0])["data"], 5, GARBAGE["random"]):
        serve_one(pair, 3)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 64 * MIB
    assert pair[0]._driver.control.fault_count == 0


def test_half_open_connections_at_both_ports_hold_nobody_up(
    pair: tuple[th.ShardHandle, th.ShardHandle],
) -> None:
    control, data = ports_of(pair[0]).values()
    with strangers(control, 40), strangers(data, 40):
        serve_one(pair, 1)
    serve_one(pair, 2)


def test_another_secret_is_an_authentication_error(cluster: str, peer: StartPeer) -> None:
    seed = peer(secret=SECRET)
    started = time.monotonic()
    with pytest.raises(th.AuthenticationError, match=seed.address):
        th.Peer(cluster, [seed.address], secret="another secret, long as well", join_timeout=20)
    assert time.monotonic() - started < 15
    with pytest.raises(th.JoinError):
        th.Peer(cluster, [seed.address], join_timeout=5)
    assert len(seed.members()) == 1


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_clusters_with_different_names_never_merge(
    cluster: str, peer: StartPeer, secret: str | None
) -> None:
    seed = peer(secret=secret)
    with pytest.raises(th.JoinError, match="another name"):
        th.Peer(f"not-{cluster}", [seed.address], secret=secret, join_timeout=1.5)
    assert [member.peer_id for member in seed.members(everyone=True)] == [seed.peer_id]


def test_a_seed_that_is_not_there_is_named(cluster: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(th.JoinError, match=f"127.0.0.1:{port}"):
        th.Peer(cluster, [f"127.0.0.1:{port}"], join_timeout=1)
    assert time.monotonic() - started < 4


def test_a_port_in_use_is_a_join_error_that_names_it(cluster: str, peer: StartPeer) -> None:
    taken = peer()
    with pytest.raises(th.JoinError, match=taken.address):
        th.Peer(cluster, bind=taken.address)
    data = taken._driver.info.data_addresses[0]
    with pytest.raises(th.JoinError, match=data):
        th.Peer(cluster, data_bind=data)
    assert not [t for t in threading.enumerate() if "tensorhub" in t.name and not _of(t, taken)]


def _of(thread: threading.Thread, peer: th.Peer) -> bool:
    return peer.peer_id in thread.name or "tcp-accept" in thread.name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bind": "0.0.0.0:0"}, "secret"),
        ({"bind": "no such host:0"}, "no such host"),
        ({"bind": "fd00::2:7946"}, "brackets"),
        ({"seeds": ["127.0.0.1"]}, "port"),
        ({"seeds": "127.0.0.1:1"}, "list"),
        ({"cluster": ""}, "cluster"),
        ({"zone": "\0"}, "zone"),
        ({"secret": " "}, "secret"),
        ({"transports": ["carrier pigeon"]}, "carrier pigeon"),
        ({"transports": []}, "choose"),
        ({"transports": "tcp"}, "list"),
        ({"join_timeout": 0}, "join_timeout"),
    ],
    ids=str,
)
def test_options_are_checked_before_anything_starts(options: dict[str, object], said: str) -> None:
    before = threading.active_count()
    with pytest.raises((ValueError, th.JoinError), match=said):
        th.Peer(**options)  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_options_come_from_the_environment_unless_they_are_given(
    cluster: str, peer: StartPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = peer(secret=SECRET)
    for name, value in {
        "CLUSTER": cluster,
        "SEEDS": f"{seed.address}, 127.0.0.1:1",
        "ZONE": "eu",
        "SECRET": SECRET,
        "NAME": "from the environment",
        "TRANSPORTS": "tcp",
        "JOIN_TIMEOUT": "20",
    }.items():
        monkeypatch.setenv(f"THUB_{name}", value)
    with th.Peer(name="given") as second:
        assert second.options.transports == ("tcp",)
        mine = {member.name: member.zone for member in second.members()}
        assert mine == {"given": "eu"}, "members are those of the own zone"
        assert {zone.name for zone in second.zones()} == {"eu", seed.options.zone}
    monkeypatch.setenv("THUB_JOIN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="THUB_JOIN_TIMEOUT"):
        th.Peer()


def test_a_forked_child_gets_an_error_and_harms_nobody() -> None:
    script = """
        import os, sys
        import numpy
        import tensorhub_p2p as th
        seed = th.Peer("forks")
        peer = th.Peer("forks", [seed.address])
        trainer, rollout = peer.open("m", replica="t"), seed.open("m", replica="r")
        weights, copy = numpy.ones(1 << 20), numpy.zeros(1 << 20)
        trainer.register({"w": weights}); rollout.register({"w": copy})
        trainer.publish(1)
        pid = os.fork()
        if pid == 0:
            for call in (
                peer.members, lambda: peer.open("m"), lambda: peer.versions("m"),
                trainer.unpublish, lambda: rollout.replicate(timeout=5),
                lambda: trainer.publish(2), trainer.unregister,
                lambda: trainer.register({"w": copy}),
                lambda: peer.open("m", replica="x").register({"w": copy}),
            ):
                try:
                    call()
                except th.PeerClosed as error:
                    assert "forked child" in str(error), error
                else:
                    os._exit(3)
            trainer.close(); peer.close(); seed.close()
            sys.exit(0)  # with all the clean-up of an interpreter
        assert os.waitpid(pid, 0)[1] == 0
        assert rollout.replicate(1, timeout=20).version == 1
        assert (weights == copy).all()
        assert len(seed.members()) == 2
        peer.close(); seed.close()
        print("parent fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "THUB_CLUSTER": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "parent fine\n"
