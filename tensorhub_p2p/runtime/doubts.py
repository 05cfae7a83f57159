"""Peers whose process may be gone, while somebody else greets at their address.

Rule of this file. A peer comes under doubt when its side closed a connection without a
goodbye: mostly its process ended, and ports are soon used again. From then on a handshake
at its address is no sign of *its* life, until a message that names it has come after such
a handshake. Who was never under doubt is believed.

Bounded: beyond `limit` the oldest doubt is dropped.
"""

from __future__ import annotations

from collections import OrderedDict

from tensorhub_p2p.protocol.identity import PeerId


class Doubts:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._greeted: OrderedDict[PeerId, bool] = OrderedDict()
        """Whether somebody greeted at the address since; by the peer under doubt."""

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._greeted

    def closed(self, peer: PeerId) -> None:
        """It ended a connection."""
        self._greeted[peer] = False
        self._greeted.move_to_end(peer)
        if len(self._greeted) > self._limit:
            self._greeted.popitem(last=False)

    def greeted(self, peer: PeerId) -> None:
        """Somebody greets at its address: what it sends from now on ends the doubt."""
        if peer in self._greeted:
            self._greeted[peer] = True

    def heard(self, sender: PeerId) -> None:
        """A message that names this sender has arrived."""
        if self._greeted.get(sender):
            del self._greeted[sender]

    def forget(self, peer: PeerId) -> None:
        self._greeted.pop(peer, None)
