"""The control plane's security: CURVE with the keys that the cluster secret gives.

Theory. All peers derive one CURVE key pair from the secret and use it on both ends of
every connection. A client must know the server's public key to say hello, and that key
never travels in clear, so knowing the secret *is* the admission. There is no ZAP handler:
one would run under Python's lock, and a worker that holds the lock for seconds could
then not accept a handshake and would look dead.

The secret is shared by all, so it keeps strangers out, not members apart. Someone who
records a handshake can try guesses offline: use `keygen()`, not a word.
"""

from __future__ import annotations

import logging
import secrets

import zmq
from zmq.utils import z85

from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.transfer.credentials import Credentials

_logger = logging.getLogger(__name__)
_SHORT = 16


def keygen() -> str:
    """A fresh cluster secret with 256 bits of randomness, safe in shells and URLs."""
    return secrets.token_hex(32)


def curve_keys(secret: str) -> tuple[bytes, bytes]:
    """(public, private) CURVE keys of the cluster, in Z85. Raises ConfigError if empty."""
    if not secret.strip():
        raise ConfigError("secret is empty: leave it out, or make one with `tensorhub-p2p keygen`")
    if len(secret) < _SHORT:
        _logger.warning(
            "the cluster secret has only %d characters and could be guessed: "
            "make one with `tensorhub-p2p keygen`",
            len(secret),
        )
    credentials = Credentials.from_secret(secret)
    return z85.encode(credentials.curve_public), z85.encode(credentials.curve_secret)


def secure(socket: zmq.Socket[bytes], keys: tuple[bytes, bytes] | None, *, server: bool) -> None:
    """Make a socket speak CURVE with the cluster's keys, if there are any, before it is used.

    Without, it still refuses the handshakes of ZMTP 1 and 2, which no peer speaks: a stranger's
    first bytes are likely to look like one, and libzmq 4.3.5 aborts the process if it is in the
    middle of such a one as the socket is closed, or disconnects there (zmtp_engine.cpp:422). A ZAP
    domain has it refuse them; as there is no handler, nobody is asked.
    """
    if keys is None:
        socket.setsockopt(zmq.ZAP_DOMAIN, b"tensorhub")
        return
    public, private = keys
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    if server:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, public)
