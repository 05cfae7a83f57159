"""Slot claims: at most one live peer holds a shard of a replica.

Rules of this file. One `SlotClaim`er belongs to one handle. It knows the directory key
of its group, and the rivals that it meets there or that challenge it; it knows nothing
of generations or versions. It does not wait for deadlines: whoever opened the handle does.

Theory of operation. The directory finds rivals, and a direct challenge settles between
them, so that no clock and no lock is needed:

    READING      read the group's key: is there an established holder?
    WAITING      there is one: challenge it until it answers "I hold it" (TAKEN) or is
                 declared dead (read again). A restarted worker waits here.
    CLAIMING     write a claim with a counter above all that R owners hold
    CONFIRMING   read back. W and R intersect, so of two claimants at least one sees the other
    CHALLENGING  ask every rival directly; the higher counter wins, then the lower id
    ESTABLISHING write the claim as established
    ESTABLISHED  hold it against every challenge, until released
    TAKEN        another live peer holds the slot (final)
    FENCED       a higher established claim was met: we were replaced (final)
    RELEASED     given back (final)

An established holder keeps its slot for as long as it is not declared dead, whatever
counter a challenger brings. Two claimants that both believe to have won can only come
from views that differ on a death: the one that was thought dead has the lower claim, and
is fenced as soon as anything of its handle reads the key (the election watches it; `check`
is for when it hears that it was declared dead). Until then it changes nothing: elections
need every claimant's vote for exactly its claim, and receivers refuse lower generations.

A claim is never withdrawn but marked as released, so that counters only rise: what a
closed handle was fenced by, or published under, is not used again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Refused,
    Registers,
    group_key,
    slot_name,
    values,
)
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import Event, Outbox
from tensorhub_p2p.protocol.messages import Message, SlotAnswer, SlotChallenge, SlotClaim


class SlotState(Enum):
    IDLE = "idle"
    READING = "reading who holds the slot"
    WAITING = "waiting for the holder to answer or to be declared dead"
    CLAIMING = "writing the claim"
    CONFIRMING = "reading the claim back"
    CHALLENGING = "challenging rival claimants"
    ESTABLISHING = "writing the claim as established"
    ESTABLISHED = "established"
    TAKEN = "taken by another peer"
    FENCED = "replaced by another peer"
    RELEASED = "released"


HOLDING = {SlotState.ESTABLISHING, SlotState.ESTABLISHED}
CLAIMED = {SlotState.CLAIMING, SlotState.CONFIRMING, SlotState.CHALLENGING}
FINAL = {SlotState.TAKEN, SlotState.FENCED, SlotState.RELEASED}


REPLACED = (
    "it claimed the slot after this peer did, or had learnt of a later claim. A peer that started "
    "alone meets this when it finds its cluster: start it with seeds"
)


class SlotEstablished(Event):
    def __init__(self, counter: int) -> None:
        self.counter = counter


class SlotLost(Event):
    """TAKEN or FENCED, by `rival`; or refused because the group has another size."""

    def __init__(self, rival: PeerId, reason: str) -> None:
        self.rival = rival
        self.reason = reason


class SlotClaimer:
    """Claims one slot for one handle."""

    def __init__(
        self,
        me: PeerId,
        slot: Slot,
        num_shards: int,
        records: Records,
        liveness: Liveness,
        config: GroupConfig,
    ) -> None:
        self.me = me
        self.slot = slot
        self.num_shards = num_shards
        self.state = SlotState.IDLE
        self.counter = 0
        self.rivals: dict[PeerId, int] = {}
        """Rivals that we wait for, with the counter of their claim."""
        self.outbox = Outbox()
        self._yielded: dict[PeerId, int] = {}
        self._records = records
        self._liveness = liveness
        self._config = config
        self._retry_at: float | None = None
        self._key = group_key(slot.group)

    # --- the claim, step by step ---

    def start(self, now: float) -> None:
        self.state = SlotState.READING
        self.rivals = {}
        self._retry_at = None
        self._records.read(now, self._key, self._on_read)

    def _on_read(self, now: float, registers: Registers) -> None:
        if self.state is not SlotState.READING:
            return
        if self._other_size(now, registers):
            return
        rivals = self._rivals_in(registers)
        established = {peer: claim.counter for peer, claim in rivals.items() if claim.established}
        if established:
            self.state = SlotState.WAITING
            self.rivals = established
            self._challenge(now)
            return
        highest = max((claim.counter for _, claim in values(registers, SlotClaim)), default=0)
        self.counter = max(self.counter, highest) + 1
        self.state = SlotState.CLAIMING
        self._write(now, established=False)

    def _on_written(self, now: float, refused: Refused | None) -> None:
        if refused is not None and self.state not in FINAL:
            self._lose(now, SlotState.TAKEN, self.me, f"the directory refused it: {refused.reason}")
        elif self.state is SlotState.CLAIMING:
            self.state = SlotState.CONFIRMING
            self._records.read(now, self._key, self._on_confirm)
        elif self.state is SlotState.ESTABLISHING:
            self.state = SlotState.ESTABLISHED
            self.outbox.emit(SlotEstablished(self.counter))

    def _on_confirm(self, now: float, registers: Registers) -> None:
        if self.state is not SlotState.CONFIRMING:
            return
        self.rivals = {p: claim.counter for p, claim in self._rivals_in(registers).items()}
        self.state = SlotState.CHALLENGING
        self._challenge(now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """All rivals yielded or died: go on."""
        if self.rivals:
            return
        self._retry_at = None
        if self.state is SlotState.WAITING:
            self.start(now)
        elif self.state is SlotState.CHALLENGING:
            self.state = SlotState.ESTABLISHING
            self._write(now, established=True)

    def release(self, now: float, then: Callable[[float], None] | None = None) -> None:
        """Give the slot back (the handle closes); `then` once W owners know that.

        At once if there is nothing to give back.
        """
        told = then or (lambda _now: None)
        gives_back = self.state in HOLDING | CLAIMED
        if gives_back:
            self._release_claim(now, told)
        self.state = SlotState.RELEASED
        self.rivals = {}
        self._retry_at = None
        if not gives_back:
            told(now)

    def check(self, now: float) -> None:
        """Re-read the key: were we replaced while we were thought dead?"""
        if self.state is SlotState.ESTABLISHED:
            self._records.read(now, self._key, self.learn)

    def learn(self, now: float, registers: Registers) -> None:
        """Registers of the group's key, read by anyone: a higher established claim fences us.

        Also if its writer is gone or released it: its generation has replaced ours.
        """
        if self.state is not SlotState.ESTABLISHED:
            return
        for register, claim in values(registers, SlotClaim):
            others = claim.shard == self.slot.shard and register.writer != self.me
            if others and claim.established and self._beaten_by(register.writer, claim.counter):
                self._lose(now, SlotState.FENCED, register.writer, REPLACED)
                return

    # --- messages, deaths, time ---

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, SlotChallenge):
            self._challenged(now, sender, message)
        elif isinstance(message, SlotAnswer) and sender in self.rivals:
            if message.holds:
                self._lose(now, SlotState.TAKEN, sender, "it is alive, and says so")
            elif message.counter == self._asked_with():
                # Its record may stay a while: from now on that claim counts as withdrawn.
                self._yielded[sender] = self.rivals.pop(sender)
                self._settle(now)

    def _challenged(self, now: float, sender: PeerId, message: SlotChallenge) -> None:
        beaten = self._beaten_by(sender, message.counter)
        holds = self.state in HOLDING or (self.state in CLAIMED and not beaten)
        if self.state in CLAIMED and not holds:
            self._lose(now, SlotState.TAKEN, sender, "it claims it at the same time, and wins")
        self.outbox.send(sender, SlotAnswer(self.slot, message.counter, holds))

    def peer_gone(self, now: float, peer: PeerId) -> None:
        if self.rivals.pop(peer, None) is not None:
            self._settle(now)

    def tick(self, now: float) -> None:
        if self._retry_at is None or now < self._retry_at:
            return
        # Of the death of a peer that was never met here, nobody tells.
        gone = [peer for peer in self.rivals if self._liveness.is_gone(peer)]
        for peer in gone:
            del self.rivals[peer]
        if gone and not self.rivals:
            self._settle(now)
        else:
            self._challenge(now)

    def next_wakeup(self) -> float | None:
        return self._retry_at

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        who = ", ".join(self._liveness.name(peer) for peer in self.rivals)
        return f"slot {self.slot}: {self.state.value}" + (f" ({who})" if who else "")

    # --- small parts ---

    def _rivals_in(self, registers: Registers) -> dict[PeerId, SlotClaim]:
        """Claims of others on this slot that are in force, as far as the registers tell."""
        claims = [
            (register.writer, claim)
            for register, claim in values(registers, SlotClaim)
            if claim.shard == self.slot.shard
        ]
        newest = max((claim.counter for _, claim in claims if claim.established), default=0)
        return {
            writer: claim
            for writer, claim in claims
            if writer != self.me
            and not claim.released
            and not (claim.established and claim.counter < newest)
            and not self._liveness.is_gone(writer)
            and claim.counter > self._yielded.get(writer, 0)
        }

    def _beaten_by(self, rival: PeerId, counter: int) -> bool:
        """The higher counter wins, then the lower id (ids are hex digits of one length)."""
        return (counter, self.me) > (self.counter, rival)

    def _other_size(self, now: float, registers: Registers) -> bool:
        for register, claim in values(registers, SlotClaim):
            alive = not claim.released and not self._liveness.is_gone(register.writer)
            if alive and claim.established and claim.num_shards != self.num_shards:
                self._lose(
                    now,
                    SlotState.TAKEN,
                    register.writer,
                    f"it opened {self.slot.group} with num_shards={claim.num_shards}, "
                    f"this handle with {self.num_shards}",
                )
                return True
        return False

    def _challenge(self, now: float) -> None:
        for rival in self.rivals:
            self.outbox.send(rival, SlotChallenge(self.slot, self._asked_with()))
        self._retry_at = now + self._config.retry_interval if self.rivals else None

    def _asked_with(self) -> int:
        """A claimant that waits has written no claim yet: it asks with 0, which never wins."""
        return self.counter if self.state is SlotState.CHALLENGING else 0

    def _write(self, now: float, *, established: bool) -> None:
        claim = SlotClaim(self.slot.shard, self.num_shards, self.counter, established)
        self._put(now, claim, self._on_written)

    def _release_claim(self, now: float, told: Callable[[float], None] = lambda _now: None) -> None:
        established = self.state in HOLDING
        claim = SlotClaim(
            self.slot.shard, self.num_shards, self.counter, established, released=True
        )
        self._put(now, claim, lambda now, _refused: told(now))

    def _put(
        self, now: float, claim: SlotClaim, then: Callable[[float, Refused | None], None]
    ) -> None:
        name = slot_name(self.slot)
        self._records.write(now, self._key, name, self.counter, claim, then)

    def _lose(self, now: float, state: SlotState, rival: PeerId, reason: str) -> None:
        if self.state in CLAIMED | HOLDING:
            self._release_claim(now)
        self.state = state
        self.rivals = {}
        self._retry_at = None
        self.outbox.emit(SlotLost(rival, reason))
