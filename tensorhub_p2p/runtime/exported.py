"""What one handle lets others read: its region, exported by every transport of the peer."""

from __future__ import annotations

from collections.abc import Mapping

from tensorhub_p2p.protocol.chunks import ChunkSet
from tensorhub_p2p.protocol.messages import Endpoint
from tensorhub_p2p.transfer.memory import Region
from tensorhub_p2p.transfer.transports.base import Transport


class Exported:
    """Exports of one region. `allowed` may grow while a pull verifies chunks."""

    def __init__(
        self, transports: Mapping[str, Transport], region: Region, allowed: ChunkSet
    ) -> None:
        self.region = region
        self.allowed = allowed
        self._by_transport = {
            transport: transport.export(region, allowed)
            for transport in transports.values()
            if transport.unavailable() is None
        }

    @classmethod
    def whole(cls, transports: Mapping[str, Transport], region: Region) -> Exported:
        """All chunks may be read at once."""
        return cls(transports, region, ChunkSet.full(region.layout.num_chunks))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """What pullers are told, in the peer's order of preference."""
        return tuple(Endpoint(t.name, blob) for t, blob in self._by_transport.items())

    def drain(self, deadline: float) -> None:
        """Stop serving. On return no byte of the region is being sent."""
        for transport, blob in self._by_transport.items():
            transport.withdraw(blob)
        for transport, blob in self._by_transport.items():
            transport.drain(blob, deadline)

    def release(self) -> None:
        """After `drain`, once the memory is to be freed: no transport holds a right to it."""
        for transport in self._by_transport:
            transport.release(self.region)
