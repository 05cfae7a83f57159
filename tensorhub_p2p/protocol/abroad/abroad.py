"""What crosses between zones: finding, pinning and reaching what another zone holds.

Rules of this file. It composes; each part knows one concept. To those above it is a machine,
and the `Records` of all zones (`records`); whoever needs nothing of other zones notices none.

Theory of operation. Each zone has a directory of its own, of its own members. Zone summaries
(zones.py) tell every peer which models are whole in which zone. Who looks for a model that the
own zone can't serve asks a gateway of those zones, which reads its directory and answers:

    who asks                              whom                      what comes back
    a read that home can't answer         a gateway (ZoneAsk)       registers, owners, holders
    a withdrawal that a foreign pin       a gateway (ZoneCheck)     who is gone there
      holds back
    a pin, a mark, a pin taken back       the key's owners there    taken, or refused
      (DirectoryWrite, directly)
    a pull                                the holders there         as in the own zone

    speakers.py       which zones have a model, and who speaks for them
    asking.py         ZoneAsk: one question a zone and key; answers, fresh for a while
    wide_records.py   reads and writes of several zones, for the group protocols
    remote_writes.py  pins and marks in other zones
    roll_call.py      ZoneCheck
    foreigners.py     who was met, and where
    embassy.py        the other side: a gateway's answers

Another zone's version is seen once its summary tells of it: `summary_interval`, the gossip
between gateways and the gossip at home after it is whole there.

What does not cross: groups (all shards of a replica are in one zone) and their fences;
conflicts between versions published in different zones; watches of keys.

Bounds: those of the parts; what a peer knows of other zones, and what it costs it, grows with
the zones and with what it reads there, never with the peers of other zones.
"""

from __future__ import annotations

from collections import Counter

from tensorhub_p2p.config import AbroadConfig
from tensorhub_p2p.protocol.abroad.asking import Asks, Place
from tensorhub_p2p.protocol.abroad.embassy import Embassy
from tensorhub_p2p.protocol.abroad.foreigners import Foreigners
from tensorhub_p2p.protocol.abroad.remote_writes import ANSWERS, FIRST_NUMBER, RemoteWrites
from tensorhub_p2p.protocol.abroad.roll_call import RollCall
from tensorhub_p2p.protocol.abroad.speakers import Speakers
from tensorhub_p2p.protocol.abroad.wide_records import WideRecords
from tensorhub_p2p.protocol.directory.directory import Directory
from tensorhub_p2p.protocol.directory.pending import PendingRecords
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.messages import (
    Message,
    ZoneAnswer,
    ZoneAsk,
    ZoneCheck,
    ZoneChecked,
    ZoneGreeting,
    ZoneSummary,
)
from tensorhub_p2p.protocol.zones.zones import Zones

MESSAGES = (ZoneAsk, ZoneAnswer, ZoneCheck, ZoneChecked)


class Abroad:
    """All that one peer has to do with other zones, but for membership.

    `gateways` is how many a zone has at a time.
    """

    def __init__(
        self,
        me: PeerInfo,
        zones: Zones,
        directory: Directory,
        home: PendingRecords,
        config: AbroadConfig,
        gateways: int,
    ) -> None:
        self.outbox = Outbox()
        self.zone = me.zone
        self._zones = zones
        self._foreigners = Foreigners(config.max_peers)
        speakers = Speakers(me.peer_id, me.zone, gateways, zones.zones)
        self.zones_with = speakers.with_model
        """The other zones that may have a whole version of a model."""
        self._asks = Asks(
            speakers, self._foreigners, config, self.outbox, self._is_home, self._answered
        )
        self._writes = RemoteWrites(me.peer_id, self._asks, config, self.outbox)
        self._roll_call = RollCall(speakers, self._foreigners, config, self.outbox)
        self._embassy = Embassy(me, zones, home, directory.owners, config, self.outbox)
        self.records = WideRecords(
            me.zone, home, speakers, self._asks, self._writes, config, self._is_silent
        )
        """The directory of all zones."""

    def _is_home(self, peer: PeerId) -> bool:
        return self._zones.status(peer) is not None

    def _is_silent(self, peer: PeerId) -> bool:
        """Whether it is of this zone, and can't be read from now."""
        return self._is_home(peer) and not self._zones.is_responsive(peer)

    def _answered(self, now: float, place: Place) -> None:
        self._writes.answered(now, place)
        self.records.answered(now, place)

    # -- the machine's face --

    def takes(self, message: Message) -> bool:
        """Whether the message is for this machine: its own kinds, and answers to its writes."""
        if isinstance(message, ANSWERS):
            return message.request >= FIRST_NUMBER
        return isinstance(message, MESSAGES)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, (ZoneAsk, ZoneCheck)):
            self._embassy.receive(now, sender, message)
        elif isinstance(message, ZoneAnswer):
            self._asks.receive(now, sender, message)
        elif isinstance(message, ZoneChecked):
            self._roll_call.receive(now, sender, message)
        elif isinstance(message, ANSWERS):
            self._writes.receive(now, sender, message)
        elif isinstance(message, ZoneGreeting):
            self._asks.not_a_gateway(now, sender)

    def tick(self, now: float) -> None:
        for part in self._parts():
            part.tick(now)

    def next_wakeup(self) -> float | None:
        return earliest(*(part.next_wakeup() for part in self._parts()))

    def _parts(self) -> tuple[Asks | RemoteWrites | RollCall | Embassy | WideRecords, ...]:
        return (self._asks, self._writes, self._roll_call, self._embassy, self.records)

    def awaits(self, peer: PeerId) -> bool:
        """Whether this peer was asked something, and hasn't answered."""
        return self._asks.awaits(peer) or self._roll_call.awaits(peer)

    # -- news --

    def heard(self, now: float, summary: ZoneSummary) -> None:
        """A zone says something new of itself."""
        if summary.zone != self.zone:
            self.records.heard(now, summary)

    # -- questions --

    def zone_of(self, peer: PeerId) -> str | None:
        """The zone of a peer that another zone's gateways told of."""
        return self._foreigners.zone(peer)

    def info(self, peer: PeerId) -> PeerInfo | None:
        """What is known of a peer that another zone's gateways told of."""
        return self._foreigners.info(peer)

    def is_gone(self, peer: PeerId, zone: str) -> bool:
        """What that zone said of its peer when it was last asked; it is asked again soon."""
        if zone and zone != self.zone:
            self._roll_call.wonder(zone, peer)
        return self._foreigners.is_gone(peer)

    @property
    def dropped(self) -> Counter[str]:
        """Messages, and parts of them, that were not acted on, by reason."""
        parts = (self._asks, self._writes, self._roll_call, self._embassy)
        return sum((part.dropped for part in parts), Counter())
