"""Promises, and memory reserved for copies (the room retention/)."""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.protocol.messages.groups import GroupMessage
from tensorhub_p2p.protocol.messages.message import Count, Message, Short


class KeepAsk(Message, frozen=True):
    """Whoever withdraws asks a holder: do you keep this shard?

    With `adopt` a peer that doesn't have it yet is asked to take a copy from `source`.
    """

    request: Count
    slot: Slot
    """The addressee's, by which it holds the shard; with `adopt` the sender's."""
    publication: Publication
    adopt: bool = False
    num_shards: Count = 1
    num_bytes: Count = 0
    asker: Slot | None = None
    """The sender's: of two that withdraw at once its hash decides (promising.py)."""


class KeepAnswer(Message, frozen=True):
    """A yes binds the sender. `working`: it is taking a copy, ask again."""

    request: Count
    yes: bool
    working: bool = False
    why: Short = ""


class ReserveAsk(GroupMessage, frozen=True):
    """Hold host memory for your shard of this publication; `ends`: no longer."""

    publication: Publication
    request: Count = 0
    ends: bool = False


class ReserveAnswer(GroupMessage, frozen=True):
    request: Count
    granted: bool
    why: Short = ""
