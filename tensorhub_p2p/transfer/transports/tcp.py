"""Reading over TCP: parallel streams, straight from and into tensor memory.

Rule of this file. The transport itself: what it exports, whom it dials. What goes over the wire
is in tcp_wire.py, the holder's end in tcp_server.py, the puller's in tcp_reader.py.

Several streams to one holder are several readers; how many pay is found out by measurement
(streams.py) and remembered for each holder. Where there is a secret, every stream is TLS
1.3 with the cluster's certificate at both ends.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence

import msgspec

from tensorhub_p2p.config import TcpConfig
from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.transfer.credentials import Credentials
from tensorhub_p2p.transfer.exports import Exports
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.streams import StreamCount
from tensorhub_p2p.transfer.transports.addresses import split_address, with_port
from tensorhub_p2p.transfer.transports.base import (
    CannotReach,
    Reader,
    SourceGone,
    SourceSilent,
    Transport,
)
from tensorhub_p2p.transfer.transports.tcp_reader import TcpReader
from tensorhub_p2p.transfer.transports.tcp_server import Server
from tensorhub_p2p.transfer.transports.tcp_wire import Endpoint, decode, encode, keep_alive

MAX_REMEMBERED = 1024
"""Holders of which it is remembered how many streams suit them."""


class TcpTransport(Transport):
    """Serves exports on a port of its own, and reads those of others."""

    name = "tcp"

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        advertise: Sequence[str] = (),
        credentials: Credentials | None = None,
        config: TcpConfig | None = None,
        silence: float = 2.0,
    ) -> None:
        """`bind` is host:port (port 0: any); `advertise` are the hosts, or host:port, to tell.

        Without `advertise` it is the bound host. `silence`: seconds without a byte after
        which a source counts as silent. Raises JoinError if the port can't be had.
        """
        self.config = config or TcpConfig()
        self.silence = silence
        self._exports = Exports()
        self._lock = threading.Lock()
        self._streams: dict[tuple[str, ...], StreamCount] = {}
        self._client_tls = credentials.client_context() if credentials else None
        server_tls = credentials.server_context() if credentials else None
        self._server = Server(bind, self._exports, server_tls, self.config)
        host, port = split_address(bind)[0], self._server.port
        self.addresses: tuple[str, ...] = tuple(
            with_port(told, port) for told in (advertise or (host,))
        )

    def unavailable(self) -> str | None:
        return None

    def export(self, region: Region, allowed: ChunkSet) -> bytes:
        export = self._exports.add(region, allowed)
        return encode(Endpoint(self.addresses, export, self._client_tls is not None))

    def withdraw(self, endpoint: bytes) -> None:
        self._exports.revoke(decode(endpoint).export)

    def drain(self, endpoint: bytes, deadline: float) -> None:
        self._exports.drain(decode(endpoint).export, deadline)

    def reachable(self, endpoint: bytes) -> str | None:
        try:
            tls = decode(endpoint).tls
        except msgspec.DecodeError as error:
            return f"its endpoint can't be read: {error}"
        if tls != (self._client_tls is not None):
            return "only it has a cluster secret" if tls else "only this peer has a cluster secret"
        return None

    def streams(self, endpoint: bytes) -> StreamCount | None:
        addresses = decode(endpoint).addresses
        with self._lock:
            count = self._streams.pop(addresses, None) or StreamCount(
                self.config.max_streams, self.config.stream_period, self.config.stream_again_after
            )
            self._streams[addresses] = count  # the last one used is the last one forgotten
            if len(self._streams) > MAX_REMEMBERED:
                del self._streams[next(iter(self._streams))]
        return count

    def connect(self, endpoint: bytes, deadline: float) -> Reader:
        reason = self.reachable(endpoint)
        if reason is not None:
            raise CannotReach(f"tcp: {reason}")
        remote = decode(endpoint)
        refused = []
        for address in remote.addresses:
            try:
                connection = self._dial(address, deadline)
            except (OSError, ValueError) as error:
                refused.append(f"{address}: {error}")
                continue
            try:
                return TcpReader(connection, address, remote.export, self.silence, deadline)
            except (CannotReach, SourceGone, SourceSilent) as error:
                refused.append(str(error))
        raise CannotReach("tcp: " + ("; ".join(refused) or "it told no address"))

    def _dial(self, address: str, deadline: float) -> socket.socket:
        limit = min(self.config.handshake_timeout, deadline - time.monotonic())
        connection = socket.create_connection(split_address(address), timeout=max(1e-3, limit))
        try:
            keep_alive(connection)
            if self._client_tls is not None:
                return self._client_tls.wrap_socket(connection)
        except ssl.SSLError as error:
            connection.close()
            raise ConnectionError(
                f"{error.reason or error}: do both have the same secret?"
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._server.close()
