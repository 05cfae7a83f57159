"""Memory for offloads: what a peer may use, and how a group makes sure of it before it begins.

Rules of this file. `Reserve` is one peer's table of host memory for copies: it counts bytes,
and holds none. `GroupReserve` belongs to one withdrawal, and asks the other shards of its
group; it copies nothing.

Theory of operation (DESIGN, "A group reserves memory for all its shards before any of them
offloads"). A version is of use with all of its shards only. So whoever is about to offload its
shard first takes memory for it here, and asks each member of the group's generation to do the
same for its own (`ReserveAsk`, repeated until answered). A member that needs no copy has nothing to
reserve, and grants (granting.py). Once all have granted, the first begins; the others
find their reservation when they come to it. One no, or silence for `reserve_patience`, and all
are told that it ends: nothing was given up.

A reservation ends when its copy was freed, when its asker says so before it is used, or
`reserve_seconds` after it was last asked for. A group that is broken has no members to ask:
then each shard looks after itself.

Bounds: one reservation a slot and publication, one group reservation a withdrawal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tensorhub_p2p.config import RetentionConfig
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Outbox
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    Message,
    ReserveAnswer,
    ReserveAsk,
)

What = tuple[Slot, Publication]
RETRY_PART = 4
"""How often within its patience a group's members are asked."""


@dataclass(frozen=True)
class Taken:
    num_bytes: int
    until: float | None
    """When it lapses; None while a copy uses it."""


class Reserve:
    """Host memory of one peer, for copies of what others want kept. `limit` in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: dict[What, Taken] = {}

    def room(self, now: float) -> int:
        """Bytes that are free."""
        self._lapse(now)
        return self.limit - sum(taken.num_bytes for taken in self._taken.values())

    def take(self, now: float, what: What, num_bytes: int, until: float) -> bool:
        """Hold that many bytes, or go on holding them; False if there is no room."""
        taken = self._taken.get(what)
        if taken is None or taken.until is not None:
            self._taken.pop(what, None)
            if num_bytes > self.room(now) or not self.limit:
                return False
            self._taken[what] = Taken(num_bytes, until)
        return True

    def pass_on(self, now: float, what: What, keep: What, num_bytes: int) -> bool:
        """A copy is made of what memory was taken for: until `free` it is the copy's."""
        self.release(what)
        if not self.take(now, keep, num_bytes, now):
            return False
        self._taken[keep] = replace(self._taken[keep], until=None)
        return True

    def release(self, what: What) -> None:
        """Hold them no longer, unless a copy uses them."""
        taken = self._taken.get(what)
        if taken is not None and taken.until is not None:
            del self._taken[what]

    def free(self, what: What) -> None:
        """The copy is gone."""
        self._taken.pop(what, None)

    def _lapse(self, now: float) -> None:
        for what, taken in list(self._taken.items()):
            if taken.until is not None and now > taken.until:
                del self._taken[what]


def no_room(now: float, reserve: Reserve, num_bytes: int) -> str:
    """For the error of whoever wanted a copy here."""
    room = max(0, reserve.room(now))
    return (
        f"{num_bytes} bytes don't fit into its peer's memory for copies ({room} of the "
        f"offload_limit of {reserve.limit} are free)"
    )


class GroupReserve:
    """Memory for all shards of a group. `ended(now, why)` is called once; "" means granted."""

    def __init__(
        self,
        outbox: Outbox,
        slot: Slot,
        publication: Publication,
        request: int,
        config: RetentionConfig,
        ended: Callable[[float, str], None],
    ) -> None:
        self._outbox = outbox
        self._slot = slot
        self._publication = publication
        self._request = request
        self._config = config
        self._ended = ended
        self._record: GenerationRecord | None = None
        self._waits: set[int] = set()
        self._until: float | None = None
        self._repeat_at = 0.0

    def begin(self, now: float, record: GenerationRecord | None) -> None:
        """Ask the other members of this generation."""
        self._record = record
        members = range(len(record.members)) if record is not None else ()
        self._waits = set(members) - {self._slot.shard}
        self._until = now + self._config.reserve_patience
        self._ask(now)
        self._end_if_granted(now)

    def _ask(self, now: float) -> None:
        self._repeat_at = now + self._config.reserve_patience / RETRY_PART
        for shard in sorted(self._waits):
            self._send(shard, ends=False)

    def _send(self, shard: int, *, ends: bool) -> None:
        record = self._record
        if record is None:
            return
        ask = ReserveAsk(
            group=self._slot.group,
            generation=record.generation,
            shard=shard,
            sender_shard=self._slot.shard,
            call=0,
            publication=self._publication,
            request=self._request,
            ends=ends,
        )
        self._outbox.send(record.members[shard].peer, ask)

    def _end_if_granted(self, now: float) -> None:
        if not self._waits and self._until is not None:
            self._until = None
            self._ended(now, "")

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if not isinstance(message, ReserveAnswer) or message.request != self._request:
            return
        record, shard = self._record, message.sender_shard
        if self._until is None or record is None or shard not in self._waits:
            return
        if record.members[shard].peer != sender or record.generation != message.generation:
            return
        if message.granted:
            self._waits.discard(shard)
            self._end_if_granted(now)
        else:
            self._deny(now, f"shard {shard}: {message.why}")

    def _deny(self, now: float, why: str) -> None:
        self.stop()
        self._ended(now, why)

    def stop(self) -> None:
        """It isn't needed after all: the members are told."""
        if self._record is not None:
            for shard in range(len(self._record.members)):
                if shard != self._slot.shard:
                    self._send(shard, ends=True)
        self._until = None
        self._waits = set()

    def tick(self, now: float) -> None:
        if self._until is None:
            return
        if now >= self._until:
            silent = ", ".join(map(str, sorted(self._waits)))
            self._deny(now, f"shard {silent} of {self._slot.group} didn't say whether it has room")
        elif now >= self._repeat_at:
            self._ask(now)

    def next_wakeup(self) -> float | None:
        return None if self._until is None else min(self._until, self._repeat_at)


def answer_to(ask: ReserveAsk, why: str) -> ReserveAnswer:
    """Granted, unless there is a reason why not."""
    return ReserveAnswer(
        group=ask.group,
        generation=ask.generation,
        shard=ask.sender_shard,
        sender_shard=ask.shard,
        call=ask.call,
        request=ask.request,
        granted=not why,
        why=why,
    )


def nothing_to_reserve(ask: ReserveAsk) -> ReserveAnswer:
    """The answer of who has no more of the version."""
    return answer_to(ask, "")
