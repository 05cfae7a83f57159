"""Peers of other zones, as far as this one has to do with them.

Rules of this file. A table. Membership knows the peers of its own zone and no others; who
holds, publishes or pulls something in another zone is known from what that zone's gateways
answered, and only that is remembered here: its zone, how it can be reached, whether it is gone.

Bounds: `limit` peers; those that were met least lately are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo


@dataclass
class Foreigner:
    """One peer of another zone."""

    zone: str
    info: PeerInfo | None = None
    gone: bool = False
    """Its zone says that it died, or left."""


class Foreigners:
    """The table of one peer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._table: OrderedDict[PeerId, Foreigner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def meet(self, zone: str, peer: PeerId, info: PeerInfo | None = None) -> None:
        """Its zone says that it is there."""
        foreigner = self._enter(zone, peer)
        foreigner.gone = False
        foreigner.info = info or foreigner.info

    def is_said_gone(self, zone: str, peer: PeerId) -> None:
        """Its zone says that it died, or left."""
        self._enter(zone, peer).gone = True

    def _enter(self, zone: str, peer: PeerId) -> Foreigner:
        known = self._table.get(peer)
        if known is None or known.zone != zone:
            known = self._table[peer] = Foreigner(zone)
        self._table.move_to_end(peer)
        if len(self._table) > self._limit:
            self._table.popitem(last=False)
        return known

    def zone(self, peer: PeerId) -> str | None:
        """Its zone; None for a peer that isn't remembered."""
        known = self._table.get(peer)
        return known.zone if known is not None else None

    def info(self, peer: PeerId) -> PeerInfo | None:
        """What it told about itself, if that was passed on."""
        known = self._table.get(peer)
        return known.info if known is not None else None

    def is_gone(self, peer: PeerId) -> bool:
        known = self._table.get(peer)
        return known is not None and known.gone
