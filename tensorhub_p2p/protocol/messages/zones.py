"""What peers of different zones say to each other of who is there (the room zones/)."""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import PeerInfo
from tensorhub_p2p.protocol.messages.membership import ZoneSummary
from tensorhub_p2p.protocol.messages.message import Message, Short


class WideArea(Message, frozen=True):
    """A membership message of the pool that the gateways of all zones form (zones.py)."""

    kind: Short
    body: bytes
    """The message, packed as on the wire."""


class ZoneGreeting(Message, frozen=True):
    """To a peer of another zone that called here: who speaks for which zone, as far as I know.

    `dialled` repeats the address under which I was found, if the call named one.
    """

    info: PeerInfo
    summaries: tuple[ZoneSummary, ...] = ()
    dialled: Short = ""
