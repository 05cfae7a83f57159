"""Deliberate bugs, each planted in all workers of a run on request. A suite that finds none of them
counts for nothing; `python -m chaos bugs` shows that it finds each.

Rules of this file. A bug is a patch of the library in this process, made before its peer starts.
scenarios.py says in what run it shows, and which check must find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import Any

from tensorhub_p2p.protocol.directory import admission
from tensorhub_p2p.protocol.groups.election import Election
from tensorhub_p2p.protocol.groups.resolving import DirectoryResolver
from tensorhub_p2p.protocol.groups.slots import SlotClaimer, SlotState
from tensorhub_p2p.protocol.identity import PeerId, Slot
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.pulls.served import Served
from tensorhub_p2p.protocol.pulls.serving import Drained, ShardServer
from tensorhub_p2p.protocol.retention.held import RefState
from tensorhub_p2p.protocol.retention.promising import Candidate, Promise, Verdict
from tensorhub_p2p.protocol.shards import withdrawing
from tensorhub_p2p.protocol.shards.keeping import Keep
from tensorhub_p2p.protocol.shards.withdrawing import Withdrawal
from tensorhub_p2p.runtime.digests import PublishedDigests
from tensorhub_p2p.runtime.exported import Exported
from tensorhub_p2p.transfer import digest
from tensorhub_p2p.transfer.digest import TimedHasher
from tensorhub_p2p.transfer.native_loops import NativeHasher

ANSWER_SECONDS = 0.3
"""By so much an answer is late where that shows a bug."""
DIGEST_SECONDS = 0.3
"""What each digest takes where that shows a bug."""
BUGS: dict[str, Callable[[], None]] = {}


def bug(plant: Callable[[], None]) -> Callable[[], None]:
    BUGS[plant.__name__] = plant
    return plant


def plant(name: str) -> None:
    """The one with this name; "" is none."""
    if name:
        BUGS[name]()


def _patch(place: object, name: str, value: object) -> None:
    assert hasattr(place, name), f"{place} has no {name} any more"
    setattr(place, name, value)


class _Anything(bytes):
    """Equal to whatever it is compared with."""

    def __eq__(self, _other: object) -> bool:
        return True

    __hash__ = bytes.__hash__


@bug
def no_digest_is_compared() -> None:
    """A pull takes whatever bytes come."""
    for hasher in (NativeHasher, TimedHasher):
        _patch(hasher, "digest", lambda _self: _Anything())


@bug
def a_leader_answers_from_what_it_read_before() -> None:
    """The first decision about "latest" stands for ten more calls."""
    plain = DirectoryResolver.resolve
    known: dict[Slot, list[Any]] = {}

    def resolve(
        self: DirectoryResolver, now: float, question: Any, call: int, floor: Any, then: Any
    ) -> None:
        old = known.setdefault(self.slot, [])
        if question.selector == "latest" and len(old) > 1:
            then(now, *old.pop(0))
            return

        def keep(now: float, decision: Any, sources: Any) -> None:
            if question.selector == "latest":
                old[:] = [(decision, sources)] * 10
            then(now, decision, sources)

        plain(self, now, question, call, floor, keep)

    _patch(DirectoryResolver, "resolve", resolve)


@bug
def a_copy_for_retainers_is_dropped() -> None:
    """An offload is freed as soon as it is there."""
    bound_by = Withdrawal._bound_by

    def frees(self: Keep, now: float, _need: object) -> None:
        if self.references.state is RefState.HELD:
            self.references.withdraw(now, freeing=True)

    def bound_by_nothing(self: Withdrawal, now: float) -> tuple[str, ...]:
        return () if self._around.offload else bound_by(self, now)

    _patch(Keep, "_on_need", frees)
    _patch(Withdrawal, "_bound_by", bound_by_nothing)


@bug
def who_withdraws_promises_to_keep() -> None:
    """Two that give a version up at once each ask the other, say yes, and count on that. Answers
    are late, as over a slow link, or they would seldom cross.
    """
    on_plea, tick, wakeup = Withdrawal._on_plea, Withdrawal.tick, Withdrawal.next_wakeup
    late: dict[Withdrawal, float] = {}

    def hears_late(self: Withdrawal, now: float, verdict: Verdict) -> None:
        if verdict is Verdict.KEPT:
            late[self] = now + ANSWER_SECONDS
        else:
            on_plea(self, now, verdict)

    def ticks(self: Withdrawal, now: float) -> None:
        tick(self, now)
        if late.get(self, inf) <= now:
            del late[self]
            on_plea(self, now, Verdict.KEPT)

    def wakes(self: Withdrawal) -> float | None:
        return earliest(wakeup(self), late.get(self))

    def says_yes(
        self: Promise, now: float, _stance: object, _me: object, _sender: object, ask: Any
    ) -> bool:
        self.bind(now, ask.publication)
        return True

    def all_of_them(copies: Any, _what: object, me: object, *_how: object) -> list[Candidate]:
        others = [copy for copy in copies if (copy.peer, copy.slot) != me]
        return [Candidate(copy.peer, copy.slot) for copy in others]

    _patch(withdrawing, "keepers", all_of_them)
    _patch(Promise, "consider", says_yes)
    _patch(Withdrawal, "promised", lambda _self, _now: None)
    _patch(Withdrawal, "_on_plea", hears_late)
    _patch(Withdrawal, "tick", ticks)
    _patch(Withdrawal, "next_wakeup", wakes)


@bug
def who_was_replaced_goes_on() -> None:
    """It takes no notice that somebody else has its slot and formed a generation, and owners take
    what it says.
    """
    lose = SlotClaimer._lose

    def stays(self: SlotClaimer, now: float, state: SlotState, rival: PeerId, reason: str) -> None:
        if state is not SlotState.FENCED:
            lose(self, now, state, rival, reason)

    _patch(SlotClaimer, "_lose", stays)
    _patch(Election, "_break", lambda _self, _why: None)
    _patch(admission, "_fenced", lambda *_: None)


@bug
def a_drain_is_forgotten() -> None:
    """A withdrawal waits for no reader, and transports go on giving what was withdrawn."""

    def goes_on(self: ShardServer, now: float, _reason: str) -> None:
        self._outbox.emit(Drained(self.slot, self.publication))

    def nothing(self: Served) -> None:
        """It goes on serving."""

    _patch(ShardServer, "withdraw", goes_on)
    _patch(Served, "drained", nothing)
    _patch(Exported, "drain", lambda _self, _deadline: None)


@bug
def digests_go_on_after_the_withdrawal() -> None:
    """They are slow; nobody waits for them, and they go on, and are told: of tensors that may have
    changed.
    """
    plain = digest.digest

    def slow(*what: Any) -> bytes:
        time.sleep(DIGEST_SECONDS)
        return plain(*what)

    def goes_on(self: PublishedDigests, slot: Slot, publication: object) -> None:
        """It was asked to stop."""

    _patch(digest, "digest", slow)
    _patch(PublishedDigests, "stop", goes_on)
    _patch(Withdrawal, "_decide", lambda self, now, _need: self._hide(now, kept=False))
    a_drain_is_forgotten()
