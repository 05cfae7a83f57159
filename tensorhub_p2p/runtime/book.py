"""Where each peer can be reached: what it said of itself, or what its messages said.

Bounded: beyond `limit` the least recently used peer is forgotten, and found again
through `lookup` (the membership's own table) or by its next message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.runtime.addresses import AddressError, dialable

MAX_ADDRESSES_OF_ONE_PEER = 8

Lookup = Callable[[PeerId], PeerInfo | None]


class AddressBook:
    def __init__(self, limit: int, lookup: Lookup | None = None) -> None:
        self._limit = limit
        self._lookup = lookup
        self._addresses: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        """Remember a peer's addresses, the usable ones of the first few; False if none is."""
        usable = tuple(a for a in addresses[:MAX_ADDRESSES_OF_ONE_PEER] if _usable(a))
        if usable:
            self._addresses[peer] = usable
            self._addresses.move_to_end(peer)
            if len(self._addresses) > self._limit:
                self._addresses.popitem(last=False)
        return bool(usable)

    def hear(self, peer: PeerId, reply_to: str) -> bool:
        """A message of `peer` named its address: use it if none is known. False if unusable."""
        return peer in self._addresses or self.learn(peer, (reply_to,))

    def addresses_of(self, peer: PeerId) -> tuple[str, ...] | None:
        known = self._addresses.get(peer)
        if known is not None:
            self._addresses.move_to_end(peer)
            return known
        info = self._lookup(peer) if self._lookup is not None else None
        if info is not None and self.learn(peer, info.addresses):
            return self._addresses[peer]
        return None

    def forget(self, peer: PeerId) -> None:
        self._addresses.pop(peer, None)


def _usable(address: str) -> bool:
    try:
        dialable(address)
    except AddressError:
        return False
    return True
