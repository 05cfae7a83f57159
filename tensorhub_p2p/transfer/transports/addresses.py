"""Addresses of data ports: host:port, and listening sockets for what they stand for.

Rule of this file. It splits, joins and binds addresses; it doesn't know what is spoken there.
"""

from __future__ import annotations

import socket

from tensorhub_p2p.errors import JoinError

BACKLOG = 128
"""Connections that the kernel accepts while the process doesn't."""


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; ValueError if it is neither."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{address!r}: put an IPv6 address in brackets, as in [::1]:7946")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address: give host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(told: str, port: int) -> str:
    """`told` as host:port: it may be a bare host, name or IPv6 literal."""
    try:
        return join_address(split_address(told)[0], split_address(told)[1] or port)
    except ValueError:
        return join_address(told.strip("[]"), port)


def listen(bind: str) -> list[socket.socket]:
    """Sockets for every address that `bind` stands for, all on one port. Raises JoinError."""
    host, port = split_address(bind)
    listeners: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # [::] is for IPv4 too, where that is possible
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
            listener.setblocking(False)
            port = listener.getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise JoinError(
            f"cannot listen for data on {bind}: {error.strerror or error}; "
            "choose another data_bind, or port 0 for any free port"
        ) from error
    return listeners
