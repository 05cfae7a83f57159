"""Giving up what a slot holds, so that nothing is lost that others count on.

Rules of this file. A `Withdrawal` belongs to one slot's references (publishing.py), whose
state it moves from HELD to EMPTY, step by step. It decides when the copy may go. It knows of
readers no more than that there are some: serving.py drains them afterwards.

Theory of operation (the steps of DESIGN, "Unpublishing").

    LOOKING     only if this slot doesn't know whether what it published was whole: if all its
                shards are ready now, it is marked so, as it is too late for that afterwards
    MARKING     step 1: "withdrawing" to W owners, who refuse later marks; meanwhile what
                is retained is read
    JUDGING     who needs it? (needs.py) Never whole: nobody. Not needed: on to HIDING. Mere
                pins: too, if somebody else has all of it
    ASKING      it is retained, or promised: one holder after the other is asked to keep it
                (promising.py). All said no: judged once more, as they may have made copies
    SEALING     step 2: all digests of it are taken; who still brings it, and is nobody whom
                anybody waits for, gets the list of them (sealing.py), and it is hidden
    RESERVING   step 3: memory for a copy, here and for the other shards of the group
    OFFLOADING  the driver copies it into host memory
    ADOPTING    instead of the last three, where a copy here would be of no use (the peer
                leaves, or may be gone at any time): another peer is asked to take one
    WAITING     it can't be kept, but is only pinned: until a reader has all of it, or the pin
                ends, or the deadline comes; a handle that closes: until somebody keeps it.
                Meanwhile the list of digests is left with the owners
    HIDING      step 4: hidden at W owners; from here on no digest is taken

HIDING is waited for only where that says more than "withdrawing" does. Once W owners have taken
that, they refuse marks and pins of it, and who reads of it finds nothing that is ready: so nobody
gets it here any more, and the caller is told before the hidden record is written. It is waited for
where others go by it: where somebody keeps the version (pins are refused until owners know of it);
where what was never whole may be published again under its id (owners judge that as a new publish
only once it was hidden); and where the memory, or the peer, may be gone right afterwards.

Before HIDING it can be taken back (`restore`). What is retained and can't be kept is taken
back at once (`Unkept`), before anything was given up. What may not wait, does not: `force`
skips from JUDGING to HIDING, and a handle that closes hides at `closing_by` in any case, or when
it has looked for a keeper `CLOSING_ROUNDS` times in vain; both say for whom it was lost.

A promise that was given meanwhile binds as a retain does: it makes the withdrawal look for a
yes of its own. What bounds it: one read, one plea and one reservation under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub_p2p.config import GroupConfig
from tensorhub_p2p.protocol.directory.records import Refused, Registers, versions_key
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot
from tensorhub_p2p.protocol.machine import Event, earliest
from tensorhub_p2p.protocol.messages import GenerationRecord, KeepAsk, Message, Phase
from tensorhub_p2p.protocol.pulls.serving import ShardServer
from tensorhub_p2p.protocol.retention.custody import Custody
from tensorhub_p2p.protocol.retention.held import REVOCABLE, Held, RefState
from tensorhub_p2p.protocol.retention.needs import Need, Needs
from tensorhub_p2p.protocol.retention.promising import (
    Candidate,
    Plea,
    Promise,
    Stance,
    Verdict,
    keepers,
    rank,
)
from tensorhub_p2p.protocol.retention.reserving import GroupReserve, no_room
from tensorhub_p2p.protocol.shards.sealing import Sealing

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.shards.publishing import References


STAYS = {
    RefState.LOOKING,
    RefState.MARKING,
    RefState.JUDGING,
    RefState.ASKING,
    RefState.SEALING,
    RefState.RESERVING,
}
"""States in which one that ranks first may still promise to stay."""


CLOSING_ROUNDS = 3
"""How often a handle that closes looks for somebody who keeps what it has."""


class Unkept(Event):
    """A retained version can't be kept: the withdrawal was taken back."""

    def __init__(self, publication: Publication, retained: tuple[str, ...], why: str) -> None:
        self.publication = publication
        self.retained = retained
        self.why = why


@dataclass(frozen=True)
class Orders:
    """How a withdrawal is meant."""

    force: bool = False
    """Give it up, whoever needs it."""
    freeing: bool = False
    """Only if nobody needs it: else it stays."""
    closing_by: float | None = None
    """When it is given up in any case, as its handle closes."""


@dataclass(frozen=True)
class Surroundings:
    """What a slot has around its references."""

    server: Callable[[], ShardServer | None] = lambda: None
    record: Callable[[], GenerationRecord | None] = lambda: None
    """The generation of its group, if there is one in force."""
    spot: bool = False
    """The slot's copy may be gone at any time."""
    offload: bool = False
    """The slot is a copy itself."""


class Withdrawal:
    """Moves one slot's references from HELD to EMPTY, once at a time."""

    def __init__(
        self,
        references: References,
        custody: Custody,
        config: GroupConfig,
        around: Surroundings,
    ) -> None:
        self.need: Need | None = None
        """What was read last."""
        self.promise = Promise(custody.config)
        self._references = references
        self._custody = custody
        self._config = config
        self._around = around
        self._orders = Orders()
        self._lost: tuple[str, ...] = ()
        self._keep: Slot | None = None
        """The copy that is being made."""
        self._asked_twice = False
        self._rounds = 0
        """How often a handle that closes has looked for a keeper, in vain."""
        self._ask_from = 0.0
        """When to look for a keeper (again), however often the key changes before."""
        self._sealed: Callable[[float], None] | None = None
        """What follows once all digests are taken."""
        self._told_pullers = False
        self._marked = False
        """W owners have taken the "withdrawing"."""
        self._watch: int | None = None
        self._retry_at: float | None = None
        outbox, me, slot = references.outbox, references.me, references.slot
        self._needs = Needs(me, slot, custody, self._on_need)
        self._plea = Plea(outbox, custody.number, custody.config, self._ask_of, self._on_plea)
        self._group_reserve: GroupReserve | None = None
        self._sealing = Sealing(slot, custody.records, around.server, outbox)
        self._key = versions_key(slot.group.model)

    # --- its begin, and its ends ---

    def begin(self, now: float, orders: Orders) -> None:
        """Step 1; `Hidden` or `Unkept` follows, unless it is stopped first."""
        self._orders, self._lost = orders, ()
        self._asked_twice = self._told_pullers = self._marked = False
        self._rounds = 0
        self._ask_from = now
        self.need = None
        self._needs.begin(now, self._held.publication)
        if self._references.knows_whole:
            self._mark(now)
        else:
            self._become(RefState.LOOKING)
            self._references.marking.judge(now, self._looked)

    def close_by(self, now: float, time: float) -> None:
        """The handle closes: from now on it is given up by then, kept or not."""
        self._orders = Orders(closing_by=time)
        if self.state is RefState.WAITING:
            self._ask_from = now
            self._judge(now)

    def stop(self, now: float) -> None:
        """It is taken back, or has done what it can."""
        self._retry_at = None
        self._needs.stop()
        self._plea.stop()
        self._sealing.stop()
        self._sealed = None
        if self._group_reserve is not None:
            self._group_reserve.stop()
            self._group_reserve = None
        held = self._references.held
        if held is not None:
            self._custody.reserve.release((self._references.slot, held.publication))
        if self._keep is not None and self._custody.offloads is not None:
            keep, self._keep = self._keep, None
            self._custody.offloads.cancel(now, keep)
        if self._watch is not None:
            self._custody.records.unwatch(now, self._watch)
            self._watch = None

    def give_up(self, now: float) -> None:
        """Hide it now, kept or not."""
        bound = self._bound_by(now) if self._orders.force else self._retained
        whom, what = ", ".join(bound), self._held.publication
        shard = self._references.slot.shard
        self._lost = (f"shard {shard} of {what}, kept for {whom}",) if whom else ()
        self._hide(now, kept=False)

    def is_void(self, now: float) -> bool:
        """It waits for mere pins only: when the wait is over, so are they."""
        return self.state is RefState.WAITING and not self._bound_by(now)

    @property
    def state(self) -> RefState:
        return self._references.state

    @property
    def _held(self) -> Held:
        held = self._references.held
        assert held is not None
        return held

    def _become(self, state: RefState) -> None:
        self._references.state = state

    # --- judging ---

    def _looked(self, now: float, _whole: bool) -> None:
        if self.state is RefState.LOOKING:  # else it could not wait for that, and is hidden
            self._mark(now)

    def _mark(self, now: float) -> None:
        self._become(RefState.MARKING)
        self._references.write_and_look(now, Phase.WITHDRAWING, self._on_marked)

    def _on_marked(self, now: float, refused: Refused | None, seen: Registers | None) -> None:
        if refused is not None and not self._orders.force:
            # The owners are full. Who asks there would still find it ready.
            self._retry_at = now + 4 * self._config.retry_interval
            return
        self._marked = refused is None
        self._judge(now, seen)

    def _judge(self, now: float, seen: Registers | None = None) -> None:
        self._become(RefState.JUDGING)
        self._retry_at = now + 4 * self._config.retry_interval
        self._needs.look(now, seen=seen)

    def _look(self, now: float) -> None:
        """The versions key changed, or may have, pins too."""
        if self.state in {RefState.JUDGING, RefState.WAITING}:
            self._retry_at = now + 4 * self._config.retry_interval
            self._needs.look(now, anew=self.state is RefState.WAITING)

    def _on_need(self, now: float, need: Need) -> None:
        if self._references.held is None:
            return
        self.need = need
        if need.whole:
            self._references.is_whole()
        if self.state in {RefState.JUDGING, RefState.WAITING}:
            self._decide(now, need)

    def _decide(self, now: float, need: Need) -> None:
        # A spot copy is nobody's safe copy: where it is only freed, no retain holds it back.
        free = need.retracted or (self._orders.freeing and self._around.spot)
        bound = () if free else self._bound_by(now)
        if self._orders.force:
            self.give_up(now)
        elif need.retracted:
            self._hide(now, kept=False)
        elif not bound and (need.ready or not need.pinned):
            # Mere pins: our own record says "withdrawing", so of two such readers one stays.
            self._hide_sealed(now, need)
        elif self._orders.freeing:
            self._references.restore(now)
        elif bound and now >= self._ask_from:
            self._ask(now, need)
        elif self.state is RefState.JUDGING:
            self._copy(now)

    def _bound_by(self, now: float) -> tuple[str, ...]:
        """For whom it must not be given up."""
        return self._retained or (
            ("somebody who was promised it",) if self.is_promised(now) else ()
        )

    @property
    def _retained(self) -> tuple[str, ...]:
        return self.need.retained if self.need is not None else ()

    def is_promised(self, now: float) -> bool:
        """Whether a promise asks for more than what was read (promising.py)."""
        publication = self._held.publication
        if self._custody.has_other_zones():
            return self.promise.binds(now, publication)
        return self.promise.binds_since(publication, self._needs.asked_at)

    @property
    def pinned(self) -> tuple[str, ...]:
        """The groups whose pins are known to hold it back."""
        return self.need.pinned if self.need is not None else ()

    # --- a promise ---

    def stance(self) -> Stance:
        """What to answer who asks whether this slot keeps it."""
        held = self._references.held
        if held is None or held.phase is not Phase.READY:
            return Stance.GIVES_UP
        if self._around.spot or self._custody.leaving or self._references.disowned:
            return Stance.GIVES_UP
        if self.state is RefState.HELD:
            return Stance.HOLDS
        if self._orders.force or self._orders.closing_by is not None:
            return Stance.GIVES_UP  # it can't answer for being done by its time
        if self.state is RefState.OFFLOADING:
            return Stance.COPIES
        return Stance.WITHDRAWS if self.state in STAYS else Stance.GIVES_UP

    def promised(self, now: float) -> None:
        """A yes was given here: what was asked before doesn't count any more."""
        self._plea.again(now)

    def _linger(self, now: float) -> None:
        """It takes a while: pullers turn to others first."""
        if not self._told_pullers:
            self._told_pullers = True
            self._references.tell_pullers(now, Phase.WITHDRAWING)

    def _ask(self, now: float, need: Need) -> None:
        self._linger(now)
        self._become(RefState.ASKING)
        self._plea.begin(
            now,
            keepers(
                need.copies,
                self._held.publication,
                (self._references.me, self._references.slot),
                self._custody.is_responsive,
                self._is_near,
            ),
        )

    def _is_near(self, peer: PeerId) -> bool:
        return self._custody.liveness.zone(peer) == self._custody.liveness.home

    def _ask_of(self, request: int, candidate: Candidate) -> KeepAsk:
        held = self._held
        return KeepAsk(
            request,
            candidate.slot,
            held.publication,
            adopt=self.state is RefState.ADOPTING,
            num_shards=held.num_shards,
            num_bytes=held.num_bytes,
            asker=self._references.slot,
        )

    def _on_plea(self, now: float, verdict: Verdict) -> None:
        if verdict is Verdict.KEPT:
            self._hide(now, kept=True)
        elif self.state is RefState.ADOPTING:
            self._denied(now, "no other peer took a copy")
        elif self._plea.refused and not self._asked_twice:
            self._asked_twice = True
            self._judge(now)
        else:
            self._copy(now)

    # --- a copy ---

    def _copy(self, now: float) -> None:
        if self._around.spot or self._custody.leaving:
            self._adopt(now)
        elif self._custody.offloads is None or self._around.offload:
            self._denied(now, "no other holder keeps it")
        elif not self._custody.reserve.limit:
            self._denied(now, "this peer's offload_limit is 0")
        else:
            self._seal(now, self._reserve)

    def _adopt(self, now: float) -> None:
        self._linger(now)
        self._become(RefState.ADOPTING)
        me, slot, publication = self._references.me, self._references.slot, self._held.publication
        others = [peer for peer in self._custody.members() if peer != me]
        retainers = self._needs.retainers
        others.sort(key=lambda peer: (peer not in retainers, rank(publication, (peer, slot))))
        self._plea.begin(now, [Candidate(peer, slot) for peer in others])

    def _seal(self, now: float, then: Callable[[float], None]) -> None:
        """Go on with `then` once all digests are taken."""
        self._linger(now)
        self._become(RefState.SEALING)
        self._sealed = then
        self._sealing.hurry()
        self.look_at_digests(now)

    def look_at_digests(self, now: float) -> None:
        """Some may have been taken."""
        if self._sealed is not None and self._sealing.complete:
            then, self._sealed = self._sealed, None
            then(now)

    def _hide_sealed(self, now: float, need: Need) -> None:
        """Whoever is still bringing it can go on without this origin."""
        if self._sealing.sealed or not need.read or self._orders.closing_by is not None:
            self._hide(now, kept=False)
        else:
            self._seal(now, self._leave_list)

    def _leave_list(self, now: float) -> None:
        counter = self._references.generation.counter
        self._sealing.leave(now, counter, self._hide_unless_bound)

    def _hide_unless_bound(self, now: float) -> None:
        """Somebody may have been promised it meanwhile."""
        if self._bound_by(now):
            self._judge(now)
        else:
            self._hide(now, kept=False)

    def _leave_list_early(self, now: float) -> None:
        """It waits for pinned readers: they will need the list if it can't wait any more."""
        if not self._sealing.sealed:
            counter = self._references.generation.counter
            self._sealing.hurry()
            self._sealed = lambda now: self._sealing.leave(now, counter, lambda _now: None)
            self.look_at_digests(now)

    def _reserve(self, now: float) -> None:
        self._become(RefState.RESERVING)
        held, slot, reserve = self._held, self._references.slot, self._custody.reserve
        until = now + self._custody.config.reserve_seconds
        if not reserve.take(now, (slot, held.publication), held.num_bytes, until):
            self._denied(now, no_room(now, self._custody.reserve, held.num_bytes))
            return
        self._group_reserve = GroupReserve(
            self._references.outbox,
            slot,
            held.publication,
            self._custody.number(),
            self._custody.config,
            self._on_reserved,
        )
        self._group_reserve.begin(now, self._around.record())

    def _on_reserved(self, now: float, why: str) -> None:
        self._group_reserve = None
        if why:
            self._denied(now, why)
            return
        self._become(RefState.OFFLOADING)
        held, slot, offloads = self._held, self._references.slot, self._custody.offloads
        assert offloads is not None
        self._keep = offloads.begin(now, slot, held, self._sealing.digests, self._on_offloaded)
        if self._keep is None:
            self._denied(now, "this peer keeps as many copies as it may")

    def _on_offloaded(self, now: float, why: str) -> None:
        self._keep = None
        if self.state is not RefState.OFFLOADING:
            return
        if why:
            self._denied(now, why)
        else:
            self._hide(now, kept=True)

    def _denied(self, now: float, why: str) -> None:
        """There is nobody to keep it, and no copy."""
        bound = self._bound_by(now)
        if bound and self._orders.closing_by is None:
            publication = self._held.publication
            self._references.restore(now)
            self._references.outbox.emit(Unkept(publication, bound, why))
            return
        if bound and self._is_in_vain():
            self.give_up(now)
            return
        self._custody.reserve.release((self._references.slot, self._held.publication))
        self._become(RefState.WAITING)
        self._linger(now)
        if self._watch is None:
            # What changed before the owners know of the watch is seen by the look to come.
            self._watch = self._custody.records.watch(now, self._key, self._look, pins=True)
        self._retry_at = self._ask_from = now + 4 * self._config.retry_interval
        self._leave_list_early(now)

    def _is_in_vain(self) -> bool:
        """A handle that closes has tried what there is: nobody is on the way to having it."""
        self._rounds += 1
        coming = self.need is not None and (self.need.pinned or self.need.read)
        alone = set(self._custody.members()) <= {self._references.me}
        nobody = alone and not self._custody.has_other_zones()
        return nobody or (not coming and self._rounds >= CLOSING_ROUNDS)

    # --- the end ---

    def _hide(self, now: float, *, kept: bool) -> None:
        self.stop(now)
        self._sealing.forget(now)
        self._become(RefState.HIDING)
        self._references.hide(now, self._lost, kept=kept, confirmed=self._is_awaited(kept=kept))

    def _is_awaited(self, *, kept: bool) -> bool:
        """Whether somebody may act on it only once W owners know that it is hidden."""
        freed = self._orders.freeing or self._orders.closing_by is not None
        return kept or freed or not (self._marked and self._held.was_whole)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        self._plea.receive(now, sender, message)
        if self._group_reserve is not None:
            self._group_reserve.receive(now, sender, message)

    def tick(self, now: float) -> None:
        if self.state not in REVOCABLE:
            return
        by = self._orders.closing_by
        if by is not None and now >= by:
            self.give_up(now)
            return
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            if self.state is RefState.MARKING:
                self._mark(now)
            else:
                self._look(now)
        self._plea.tick(now)
        if self._group_reserve is not None:
            self._group_reserve.tick(now)

    def next_wakeup(self) -> float | None:
        if self.state not in REVOCABLE:
            return None
        reserve = self._group_reserve
        return earliest(
            self._orders.closing_by,
            self._retry_at,
            self._plea.next_wakeup(),
            reserve.next_wakeup() if reserve is not None else None,
        )

    def waiting_for(self) -> str:
        """For the error of whoever runs into a deadline."""
        publication, shard = self._held.publication, self._references.slot.shard
        if self.state is RefState.WAITING and self.pinned:
            groups = ", ".join(self.pinned)
            return (
                f"{publication} is being pulled by {groups}, and nobody else has shard {shard} yet"
            )
        asked = self._plea.asked
        who = f" ({self._custody.liveness.name(asked)})" if asked is not None else ""
        return self.state.value + who
