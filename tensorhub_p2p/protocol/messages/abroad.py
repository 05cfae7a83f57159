"""Questions to another zone's directory, and their answers (the room abroad/)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.messages.message import Count, Message
from tensorhub_p2p.protocol.messages.records import Key, Register


class ZoneAsk(Message, frozen=True):
    """To a gateway of another zone: what does your zone's directory hold under this key?"""

    request: Count
    key: Key


class ZoneAnswer(Message, frozen=True):
    """What others may use of the key's registers: nothing by the dead, and nothing hidden.

    `infos` are of the holders (key "holders" only), `owners` of the key's owners, in order.
    """

    request: Count
    key: Key
    registers: Annotated[tuple[Register, ...], Meta(max_length=8192)]
    infos: Annotated[tuple[PeerInfo, ...], Meta(max_length=8192)] = ()
    owners: Annotated[tuple[PeerInfo, ...], Meta(max_length=8)] = ()


class ZoneCheck(Message, frozen=True):
    """To a gateway of another zone: which of these peers of yours are dead, or have left?"""

    request: Count
    peers: Annotated[tuple[PeerId, ...], Meta(max_length=64)]


class ZoneChecked(Message, frozen=True):
    """Of those asked about: who died or left, and of whom nobody there has ever heard."""

    request: Count
    gone: Annotated[tuple[PeerId, ...], Meta(max_length=64)]
    unknown: Annotated[tuple[PeerId, ...], Meta(max_length=64)] = ()
