"""One shard of a group, asked to take memory for a copy of what it holds (reserving.py).

Rules of this file. A `ReserveMember` belongs to one slot. It says yes or no; it copies nothing,
and whether the slot gives anything up is not its business.

Theory of operation. A version is of use with all of its shards only, so the one that is about to
copy its shard asks the others first. This one grants if there is room, which it then holds; or if
it will need none: it has no more of the version, or somebody else who means to stay has all of its
shard. The latter is read from the directory, and only when there is no room: until then the asker
waits, and asks again. That the other stays nobody has promised yet. If it doesn't, this shard's
own withdrawal finds that out, as it finds out everything else that happens in between.

Bounds: one question of each other shard, one read.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import Registers, versions_key
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import ReserveAsk
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.needs import need
from tensorhub_p2p.protocol.retention.reserving import answer_to, no_room


@dataclass(frozen=True)
class Waiting:
    """A question that waits for the directory."""

    sender: PeerId
    ask: ReserveAsk
    num_bytes: int


class ReserveMember:
    """Answers for one slot."""

    def __init__(self, slot: Slot, custody: Custody, outbox: Outbox) -> None:
        self._slot = slot
        self._custody = custody
        self._outbox = outbox
        self._waiting: dict[int, Waiting] = {}
        """By the shard that asks."""
        key = versions_key(slot.group.model)
        self._versions = Inquiry(custody.records, key, self._on_versions)

    def receive(self, now: float, sender: PeerId, ask: ReserveAsk, num_bytes: int) -> None:
        """Asked by a member of the generation in force; `num_bytes` is what a copy would take."""
        reserve, what = self._custody.reserve, (self._slot, ask.publication)
        self._waiting.pop(ask.sender_shard, None)
        if ask.ends:
            reserve.release(what)
            return
        until = now + self._custody.config.reserve_seconds
        if not num_bytes or reserve.take(now, what, num_bytes, until):
            self._outbox.send(sender, answer_to(ask, ""))
            return
        self._waiting[ask.sender_shard] = Waiting(sender, ask, num_bytes)
        self._versions.look(now)

    def _on_versions(self, now: float, registers: Registers) -> None:
        waiting, self._waiting = self._waiting, {}
        custody = self._custody
        for each in waiting.values():
            publication, me, slot = each.ask.publication, custody.me, self._slot
            found = need(registers, (), publication, me, slot, custody.liveness)
            kept = any(not copy.withdrawing for copy in found.copies)
            why = "" if kept else no_room(now, custody.reserve, each.num_bytes)
            self._outbox.send(each.sender, answer_to(each.ask, why))
