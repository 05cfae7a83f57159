"""One secret, the same keys for everybody; another secret, no handshake."""

from __future__ import annotations

import os
import socket
import ssl
import threading

import pytest
from zmq.utils import z85

from tensorhub_p2p.transfer.credentials import Credentials


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> list[Exception | str]:
    """What the server's and the client's end make of each other: the TLS version, or an error."""
    ends = socket.socketpair()
    results: list[Exception | str] = ["", ""]

    def one(index: int, context: ssl.SSLContext) -> None:
        ends[index].settimeout(10)
        try:
            with context.wrap_socket(ends[index], server_side=index == 0) as tls:
                tls.sendall(b"hello")
                assert tls.recv(5) == b"hello"
                results[index] = tls.version() or ""
        except (OSError, AssertionError) as error:
            results[index] = error
            ends[index].close()

    threads = [threading.Thread(target=one, args=(i, c)) for i, c in enumerate((server, client))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_everybody_derives_the_same_keys_from_the_same_secret() -> None:
    assert Credentials.from_secret("s3cret") == Credentials.from_secret("s3cret")
    assert Credentials.from_secret("s3cret") != Credentials.from_secret("s3cres")


def test_the_derivation_does_not_change_between_releases() -> None:
    keys = Credentials.from_secret("s3cret")
    assert keys.curve_public.hex() == (
        "267992cc368785f1907763922c5e3a23d521ed1aff1d710f838a7060d099372d"
    )


def test_the_curve_pair_is_one_that_zeromq_takes() -> None:
    zmq = pytest.importorskip("zmq")
    keys = Credentials.from_secret("s3cret")
    assert zmq.curve_public(z85.encode(keys.curve_secret)) == z85.encode(keys.curve_public)


def test_the_same_secret_gives_a_mutual_tls_1_3_handshake() -> None:
    one, other = Credentials.from_secret("s3cret"), Credentials.from_secret("s3cret")
    assert handshake(one.server_context(), other.client_context()) == ["TLSv1.3", "TLSv1.3"]


def test_another_secret_fails_the_handshake_at_both_ends() -> None:
    one, other = Credentials.from_secret("s3cret"), Credentials.from_secret("wrong")
    server, client = handshake(one.server_context(), other.client_context())
    assert isinstance(server, ssl.SSLError)
    assert isinstance(client, ssl.SSLCertVerificationError)


def test_a_client_without_a_certificate_or_with_another_one_is_turned_away() -> None:
    keys = Credentials.from_secret("s3cret")
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    server, client = handshake(keys.server_context(), trusting)
    assert isinstance(server, ssl.SSLError)
    assert isinstance(client, Exception)
    other = Credentials.from_secret("wrong").client_context()
    other.verify_mode = ssl.CERT_NONE
    server, client = handshake(keys.server_context(), other)
    assert isinstance(server, ssl.SSLError)
    assert isinstance(client, Exception)


def test_neither_repr_nor_disk_shows_a_key(tmp_path: os.PathLike[str]) -> None:
    keys = Credentials.from_secret("s3cret")
    assert "PRIVATE" not in repr(keys)
    assert repr(keys.curve_secret) not in repr(keys)
    before = set(os.listdir("/tmp"))
    keys.server_context()
    assert not {f for f in set(os.listdir("/tmp")) - before if "tensorhub" in f}


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Credentials.from_secret("")
