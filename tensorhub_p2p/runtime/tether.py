"""Which side ended a connection that ZeroMQ held? A second descriptor of it can tell.

ZeroMQ says that a connection ended, not why: it closes one whose heartbeats aren't answered
itself, and the other side's kernel closes those of a process that ends. The difference is
that between a process that stands still and one that is gone. A tether is made when the
connection comes about (its descriptor is the event's value) and outlives ZeroMQ's closing:
then TCP still has the connection as ESTABLISHED if nothing came from the other side.

Costs one descriptor a connection. What can't be found out counts as closed by the peer: that
is the careful answer, for then a handshake proves little (doubts.py).
"""

from __future__ import annotations

import os
import socket

_ESTABLISHED = 1
"""TCP_ESTABLISHED in Linux's netinet/tcp.h; the first byte of TCP_INFO is the state."""


class Tether:
    def __init__(self, tcp: socket.socket) -> None:
        self._tcp = tcp

    @classmethod
    def to(cls, descriptor: int) -> Tether | None:
        """None if that can't be had: no descriptor is left, or the connection ended already."""
        try:
            own = os.dup(descriptor)
        except OSError:
            return None
        try:
            return cls(socket.socket(fileno=own))
        except OSError:  # the number means something else by now
            os.close(own)
            return None

    @property
    def closed_by_peer(self) -> bool:
        """Whether the other side ended the connection."""
        try:
            info = self._tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:
            return True
        return info[0] != _ESTABLISHED

    def cut(self) -> None:
        """Close it; with ZeroMQ's own descriptor closed, that ends the connection."""
        self._tcp.close()
