"""Who is there, as the group protocols ask about it: of the own zone and of the others.

Rule of this file. It asks membership (zones/) about the own zone, and what gateways told (abroad/)
about the others; it knows nothing by itself.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.abroad.abroad import Abroad
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.members import GONE
from tensorhub_p2p.protocol.zones.zones import Zones


class ZoneLiveness:
    """Membership, as the group protocols ask about it."""

    def __init__(self, zones: Zones, abroad: Abroad) -> None:
        self._zones = zones
        self._abroad = abroad

    @property
    def home(self) -> str:
        return self._zones.zone

    def zone(self, peer: PeerId) -> str:
        if self._zones.status(peer) is not None:
            return self.home
        return self._abroad.zone_of(peer) or self.home

    def is_gone(self, peer: PeerId, zone: str = "") -> bool:
        status = self._zones.status(peer)
        if status is not None:
            return status in GONE
        if zone in {"", self.home} and not self._abroad.zone_of(peer):
            self._zones.wonder(peer)  # new, or dead since before this peer joined
        return self._abroad.is_gone(peer, zone)

    def is_responsive(self, peer: PeerId) -> bool:
        """Not known to be silent, or gone."""
        if self._zones.status(peer) is None:
            return not self._abroad.is_gone(peer, "")
        return self._zones.is_responsive(peer)

    def info(self, peer: PeerId) -> PeerInfo | None:
        # Of another zone's gateway its zone's summary says less than was told of it as a holder.
        return self._abroad.info(peer) or self._zones.info(peer)

    def name(self, peer: PeerId) -> str:
        info = self.info(peer)
        return f"peer {info.name or peer} ({peer})" if info is not None else f"peer {peer}"
