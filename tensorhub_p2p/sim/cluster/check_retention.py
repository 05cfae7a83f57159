"""Checks of retention: what is wanted stays, what is not wanted is freed, what is bad is gone.

Rules of this file: those of checks.py. What is there is seen in the memory of the processes:
tokens that are a publisher's, and may be read by others. What is wanted is what users said
when they opened their handles. Neither the directory nor any machine is asked, but for one
thing: whether a process has heard what users in other zones want.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from tensorhub_p2p.protocol.directory.records import versions_key
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged
from tensorhub_p2p.protocol.messages import Retain, Retraction
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import Asking, ClusterCheck, Offers
from tensorhub_p2p.sim.cluster.history import (
    Answered,
    Began,
    Ended,
    Fact,
    HandleId,
    Holding,
    LeftWell,
    LetGo,
    Lost,
    Opened,
    Withdraws,
)
from tensorhub_p2p.sim.cluster.keeping import Kept
from tensorhub_p2p.sim.cluster.memory import Token
from tensorhub_p2p.sim.cluster.programs import MODEL
from tensorhub_p2p.sim.cluster.stage import ClusterSim

Order = tuple[int, int]
DEATH_TAKES = 15.0
"""Seconds after which everybody has noticed a crash."""
FREEING_TAKES = 5.0
"""Seconds at most from the look that found a copy unneeded until it is freed, if nobody slept."""
FREED_WITHIN = 15.0
"""Seconds of calm in which a copy that nobody needs is freed."""


@dataclass
class Wish:
    """What one handle wants kept, and from when to when it surely is on record."""

    handle: HandleId
    retain: Retain
    began: float
    ended: float = inf


class Wishes:
    """Of all users."""

    def __init__(self) -> None:
        self.all: dict[HandleId, Wish] = {}

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, Opened) and fact.retain is not None:
            self.all[fact.handle] = Wish(fact.handle, fact.retain, now)
        elif isinstance(fact, Began) and fact.verb == "close":
            self._end(now, fact.handle)
        elif isinstance(fact, Began) and fact.verb == "open":
            for handle in self.all:
                if handle.slot == fact.handle.slot:
                    self._end(now, handle)  # it may be replaced from here on

    def _end(self, now: float, handle: HandleId) -> None:
        if handle in self.all:
            self.all[handle].ended = min(now, self.all[handle].ended)


class Heard:
    """Since when each process knows what users in other zones want, by its own account."""

    def __init__(self, sim: ClusterSim, wishes: Wishes) -> None:
        self._sim = sim
        self._wishes = wishes
        self._since: dict[tuple[PeerId, HandleId], float] = {}

    def listen(self, now: float, peer: PeerId) -> None:
        """Look what this process knows now."""
        told = dict(self._sim.process(peer).wanted_elsewhere(MODEL))
        for wish in self._wishes.all.values():
            said, key = told.get(self.zone(wish.handle.peer)), (peer, wish.handle)
            all_of_it = (
                said is not None
                and said.newest >= wish.retain.newest
                and set(said.versions) >= set(wish.retain.versions)
            )
            if all_of_it:
                self._since.setdefault(key, now)
            else:
                self._since.pop(key, None)

    def known_since(self, peer: PeerId, wish: Wish) -> float:
        """Infinity: it has not heard. In the own zone what is on record counts as heard."""
        near = self.zone(wish.handle.peer) == self.zone(peer)
        return wish.began if near else self._since.get((peer, wish.handle), inf)

    def zone(self, peer: PeerId) -> str:
        return self._sim.process(peer).info.zone


class Bad:
    """Which versions users took back: since when for some, since when for everybody."""

    def __init__(self) -> None:
        self.begun: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self._calls: dict[int, int] = {}

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, Began) and fact.verb == "retract":
            self.begun.setdefault(fact.version, now)
            self._calls[fact.number] = fact.version
        elif isinstance(fact, Ended) and fact.verb == "retract" and fact.error is None:
            self.done.setdefault(self._calls[fact.number], now)


@dataclass(frozen=True)
class There:
    """A copy in some process's memory, that others may read."""

    peer: PeerId
    publication: Publication
    shard: int
    lives: bool
    """Its process is there."""
    live: bool
    """The tensors of the replica that published it."""


class MemoryCheck(ClusterCheck):
    """What is common to checks that look into memory."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._offers = Offers()
        self._num_shards = {job.replica: job.num_shards for job in sim.jobs}

    def _copies(self) -> Iterator[There]:
        """All whole copies that are meant to stay, of processes that are gone too."""
        for host in self.network.hosts():
            process = self.cluster.process(host.peer_id)
            lives = not host.is_gone
            for handle in process.handles:
                p, shard = handle.serves, handle.slot.shard
                if p is not None and not handle.spot and self._is(p, shard, handle.memory.tokens):
                    live = handle.slot.group.replica == p.replica
                    yield There(host.peer_id, p, shard, lives, live)
            for kept in process.keeping.kept.values():
                p, shard = kept.publication, kept.slot.shard
                if kept.export is not None and self._is(p, shard, kept.memory.tokens):
                    yield There(host.peer_id, p, shard, lives, live=False)

    def _is(self, publication: Publication, shard: int, tokens: list[Token]) -> bool:
        spans = self._offers.of(publication, shard)
        return any(span.tokens == tuple(tokens) for span in spans)

    def _safe_now(self, copies: list[There]) -> set[Order]:
        """Versions of which each shard is somewhere else than where it was published."""
        shards: dict[Publication, set[int]] = defaultdict(set)
        for copy in copies:
            if copy.lives and not copy.live:
                shards[copy.publication].add(copy.shard)
        return {p.order for p, held in shards.items() if len(held) == self._num_shards[p.replica]}


class RetainedStays(MemoryCheck):
    """Nobody takes away the last copy of a shard that somebody wants kept.

    A version counts if all its shards were published at once. `newest=k` wants one of which
    at most k - 1 newer ones ever were safe: whole somewhere else than where they were
    published. Excused is what users are told (`Lost`, or an error), what a crash took that may not
    have been noticed, and whatever depends on a process that was taken for dead and isn't.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._wishes = Wishes()
        self._heard = Heard(sim, self._wishes)
        self._bad = Bad()
        self._published: dict[Publication, set[HandleId]] = defaultdict(set)
        self._whole: set[Order] = set()
        self._elsewhere: dict[Publication, set[int]] = defaultdict(set)
        self._safe: set[Order] = set()
        self._withdraws: dict[HandleId, float] = {}
        self._told: set[tuple[HandleId, Publication]] = set()
        self._suspects: list[tuple[PeerId, str]] = []
        """What peers gave up while they left: are they told that it is lost?"""
        self._declared_dead: set[PeerId] = set()

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, MemberChanged) and not event.member.is_reachable:
            self._declared_dead.add(event.member.peer_id)

    def on_fact(self, now: float, fact: Fact) -> None:
        self._offers.on_fact(now, fact)
        self._wishes.on_fact(now, fact)
        self._bad.on_fact(now, fact)
        if isinstance(fact, Ended) and fact.verb == "publish" and fact.publication is not None:
            self._is_published(fact.handle, fact.publication)
        elif isinstance(fact, Holding) and fact.whole:
            self._is_held(fact.handle, fact.publication)
        elif isinstance(fact, Withdraws):
            self._withdraws[fact.handle] = now
            self._published[fact.publication].discard(fact.handle)
            self._heard.listen(now, fact.handle.peer)
        elif isinstance(fact, Lost):
            self._told.add((fact.handle, fact.publication))
            self._published[fact.publication].discard(fact.handle)
        elif isinstance(fact, LetGo):
            self._let_go(now, fact.handle, fact.publication)
        elif isinstance(fact, LeftWell):
            for peer, reason in self._suspects:
                if peer == fact.handle.peer and not fact.lost:
                    raise Violation(f"{reason}, and nobody was told when it left")

    def _is_published(self, handle: HandleId, publication: Publication) -> None:
        there = self._published[publication]
        there.add(handle)
        if len(there) == self._num_shards[publication.replica]:
            self._whole.add(publication.order)

    def _is_held(self, handle: HandleId, publication: Publication) -> None:
        """It may count as safe once each shard was somewhere else, if not at the same time."""
        slot, process = handle.slot, self.cluster.process(handle.peer)
        spot = any(mine.spot for mine in process.handles if mine.id == handle)
        if slot.group.replica != publication.replica and not spot:
            shards = self._elsewhere[publication]
            shards.add(slot.shard)
            if len(shards) == self._num_shards[publication.replica]:
                self._safe.add(publication.order)

    def _let_go(self, now: float, handle: HandleId, publication: Publication) -> None:
        order, shard = publication.order, handle.slot.shard
        since = self._withdraws.get(handle, now - FREEING_TAKES)
        wish = self._wish_for(handle.peer, order, since, now)
        if wish is None or order not in self._whole or publication.version in self._bad.begun:
            return
        if (handle, publication) in self._told or not self._was_copy(handle, publication):
            return
        same = [copy for copy in self._copies() if copy.publication.order == order]
        if any(copy.lives and copy.shard == shard for copy in same):
            return
        slept = self.cluster.troubled_until(handle.peer) > since
        if slept or self._is_excused(since, same, handle, wish):
            return
        process = self.cluster.process(handle.peer)
        reason = (
            f"{handle} gave up the last copy of shard {shard} of {publication}, "
            f"which {wish.handle} wants kept ({wish.retain})"
        )
        was_open = any(mine.id == handle for mine in process.handles)
        if process.leaving and not was_open:  # a copy kept for others, which may be freed by now
            self._suspects.append((handle.peer, reason))
        else:
            raise Violation(reason)

    def _was_copy(self, handle: HandleId, publication: Publication) -> bool:
        """What is let go was a whole one, meant to stay."""
        process = self.cluster.process(handle.peer)
        for mine in process.handles:
            if mine.id == handle:
                tokens = mine.memory.tokens
                return not mine.spot and self._is(publication, handle.slot.shard, tokens)
        return True

    def _wish_for(self, peer: PeerId, order: Order, since: float, now: float) -> Wish | None:
        """One of which this peer knew when it began to give the version up."""
        newer = sum(other > order for other in self._safe)
        for wish in self._wishes.all.values():
            there = not self.network.host(wish.handle.peer).is_gone
            known = self._heard.known_since(peer, wish) <= since
            stands = there and known and wish.ended >= now
            if stands and (newer < wish.retain.newest or order[1] in wish.retain.versions):
                return wish
        return None

    def look(self) -> None:
        if len(self.cluster.zones) > 1:
            for host in self.awake():
                self._heard.listen(self.network.now, host.peer_id)

    def _is_excused(self, since: float, same: list[There], handle: HandleId, wish: Wish) -> bool:
        for copy in same:
            host = self.network.host(copy.peer)
            if host.is_gone and host.since >= since - DEATH_TAKES:
                return True
        replicas = {copy.publication.replica for copy in same}
        publishers = {
            other.peer
            for publication, handles in self._published.items()
            if publication.replica in replicas
            for other in handles
        }
        involved = {handle.peer, wish.handle.peer, *publishers, *(copy.peer for copy in same)}
        return bool(involved & self._declared_dead)


class MemoryEndsFree(MemoryCheck):
    """In the calm, a kept copy that nobody can need is freed.

    Somebody may need it if, of the versions that are newer, fewer are safe than some user ever
    wanted kept, or if it is the last answer of a group that is there. For clusters of one
    zone: with several a promise binds for longer than runs last.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._wishes = Wishes()
        self._bad = Bad()
        self._answers: dict[Group, tuple[PeerId, Publication]] = {}
        self._unneeded: dict[HandleId, float] = {}

    def on_fact(self, now: float, fact: Fact) -> None:
        self._offers.on_fact(now, fact)
        self._wishes.on_fact(now, fact)
        self._bad.on_fact(now, fact)
        if isinstance(fact, Answered):
            self._answers[fact.handle.slot.group] = (fact.handle.peer, fact.publication)

    @property
    def waiting(self) -> list[str]:
        self.look()
        return [str(handle) for handle in self._unneeded]

    def look(self) -> None:
        now = self.network.now
        if now < self.calm_since or len(self.cluster.zones) > 1:
            return
        kept = [copy for copy in self._kept() if not self._may_be_needed(copy.publication)]
        self._unneeded = {copy.id: self._unneeded.get(copy.id, now) for copy in kept}

    def _kept(self) -> Iterator[Kept]:
        for host in self.network.hosts():
            if not host.is_gone:
                yield from self.cluster.process(host.peer_id).keeping.kept.values()

    def _may_be_needed(self, publication: Publication) -> bool:
        if publication.version in self._bad.begun:
            return publication.version not in self._bad.done
        for peer, answer in self._answers.values():
            if answer == publication and not self.network.host(peer).is_gone:
                return True
        newer = sum(order > publication.order for order in self._safe_now(list(self._copies())))
        return any(
            newer < wish.retain.newest or publication.version in wish.retain.versions
            for wish in self._wishes.all.values()
            if self._counts(wish)
        )

    def _counts(self, wish: Wish) -> bool:
        """What a process that died wanted stays on record, until it is forgotten; so does what one
        wants that was not replaced after all."""
        ended = wish.ended < self.network.now - FREEING_TAKES
        handles = self.cluster.process(wish.handle.peer).handles
        stands = any(handle.id == wish.handle and not handle.closed for handle in handles)
        return not ended or stands or self.network.host(wish.handle.peer).is_gone

    def conclude(self) -> None:
        self.look()
        late = {
            str(handle): since
            for handle, since in self._unneeded.items()
            if since < self.network.now - FREED_WITHIN
        }
        if late:
            raise Violation(f"nobody needs these copies, since when: {late}")


class Retracted(ClusterCheck):
    """Who begins to ask after `retract` returned is never answered that version.

    For runs with no cuts. What no process that is there holds any more, may be forgotten.
    """

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._asking = Asking()
        self._bad = Bad()
        self._answered: set[tuple[Group, Generation, int]] = set()

    def on_fact(self, now: float, fact: Fact) -> None:
        self._asking.on_fact(now, fact)
        self._bad.on_fact(now, fact)
        if not isinstance(fact, Answered) or fact.generation is None:
            return
        group = fact.handle.slot.group
        key = (group, fact.generation.generation, fact.call)
        began = self._asking.began(fact)
        self._asking.answered(fact.handle)
        if key in self._answered:
            return
        self._answered.add(key)
        since = self._bad.done.get(fact.publication.version, inf)
        if began > since and self._is_held(fact.publication):
            raise Violation(
                f"{fact.handle} began to ask at {began:.3f} and got {fact.publication}, "
                f"retracted at {since:.3f}"
            )

    def _is_held(self, publication: Publication) -> bool:
        return any(
            isinstance(register.value, Retraction)
            and (register.value.epoch, register.value.version) == publication.order
            for copy in self.cluster.copies(versions_key(MODEL))
            for register in copy
        )
