"""How long faults hold up those whom they were not done to.

Rules of this file. Only bystanders count: rollouts that no fault was done to while they pulled,
nor to any member of their replica. Only questions for "latest" count: an older version may not be
there, whatever is done to anybody. A pull's stall is what it took beyond the median of the
undisturbed ones that, like it, moved bytes (or had nothing to move), and is never below 0. One that
fails has not ended the wait: its time counts for the next one too. A stall is set down to every
fault that the pull overlaps: of several at once, nobody can tell which one held it up. What is
longest beside no fault shows how much pulls differ by themselves.

A fault reaches `AFTER` seconds beyond its end: what it broke is not whole again at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf
from statistics import median

import msgspec

from chaos.history import Call, History, Spell

AFTER = 5.0
UNDISTURBED = "(nothing)"
"""The fault beside which undisturbed pulls stall."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The pull that was held up for the longest. `at`: when it began, in seconds of its run."""

    seconds: float
    at: float
    who: str
    error: str
    seed: int


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A `replicate("latest")`, with the tries that failed before it, and the faults beside them.

    One that never ended lasts until the end. The caller's rests between tries don't count.
    """

    tries: tuple[Call, ...]
    seconds: float
    beside: list[Spell]

    @property
    def began(self) -> float:
        return self.tries[0].began

    @property
    def last(self) -> Call:
        return self.tries[-1]

    @property
    def moved(self) -> bool:
        """Whether it took bytes, or would have: these take longer than those that bring nothing."""
        ended = self.last.ended
        return ended is None or bool(ended.error) or not ended.up_to_date

    @property
    def error(self) -> str:
        """Of the last try that failed."""
        errors = [call.ended.error for call in self.tries if call.ended is not None]
        return next((error for error in reversed(errors) if error), "")


def longest(history: History, began: float, seed: int) -> dict[str, Stall]:
    """By kind of fault, or UNDISTURBED; one beside which no bystander pulled is missing."""
    pulls = pulls_of(history)
    usual = _usual_seconds(pulls)
    names = _Names(history)
    found: dict[str, Stall] = {}
    for pull in pulls:
        if not names.is_bystander(pull):
            continue
        seconds = max(0.0, pull.seconds - usual.get(pull.moved, 0.0))
        for kind in {spell.kind for spell in pull.beside} or {UNDISTURBED}:
            if kind not in found or seconds > found[kind].seconds:
                found[kind] = Stall(
                    seconds=seconds,
                    at=pull.began - began,
                    who=pull.last.who,
                    error=pull.error,
                    seed=seed,
                )
    return found


def pulls_of(history: History) -> list[Pull]:
    """In the order in which they began, from when all workers were there until they are to end.

    Left out: those that died with their process.
    """
    lives, begun = history.lives, history.phases.get("begun", -inf)
    closing = history.phases.get("closing", inf)
    pulls: list[Pull] = []
    failed: dict[str, Pull] = {}
    """By who: the last one, if it failed; the next one goes on with it."""
    for call in sorted(history.calls, key=lambda call: call.began):
        died = call.ended is None and lives[call.who].exited is not None
        if call.verb != "replicate" or call.called.what != "latest" or died:
            continue
        if call.began < begun or call.over > closing:
            continue
        before = failed.pop(call.who, None)
        seconds = min(call.over, history.last) - call.began
        pull = Pull(tries=(call,), seconds=seconds, beside=[])
        if before is not None:
            pulls.remove(before)
            tries = (*before.tries, call)
            pull = Pull(tries=tries, seconds=before.seconds + seconds, beside=[])
        if not call.succeeded:
            failed[call.who] = pull
        pulls.append(pull)
    pulls.sort(key=lambda pull: pull.began)
    _set_beside(pulls, history.spells)
    return pulls


def _set_beside(pulls: Sequence[Pull], spells: Sequence[Spell]) -> None:
    """Only those that began early enough, and not too early, are looked at for each fault."""
    begins = [pull.began for pull in pulls]
    most = max((pull.last.over - pull.began for pull in pulls), default=0.0)
    for spell in spells:
        first = bisect_left(begins, spell.begin.at - most)
        for pull in pulls[first : bisect_right(begins, spell.end + AFTER)]:
            if spell.overlaps(pull.began, pull.last.over, AFTER):
                pull.beside.append(spell)


def _usual_seconds(pulls: Sequence[Pull]) -> dict[bool, float]:
    """By whether bytes were moved; where all were disturbed, it's the median of these."""
    undisturbed: dict[bool, list[float]] = {}
    successful: dict[bool, list[float]] = {}
    for pull in pulls:
        if pull.last.succeeded:
            successful.setdefault(pull.moved, []).append(pull.seconds)
            if not pull.beside:
                undisturbed.setdefault(pull.moved, []).append(pull.seconds)
    return {moved: median(times) for moved, times in (successful | undisturbed).items()}


def name_of(who: str) -> str:
    """The worker's name, which all of its lives share: "r1" of "r1.2"."""
    name, dot, life = who.rpartition(".")
    return name if dot and life.isdigit() else who


class _Names:
    """Who is a rollout, and who belongs to whom."""

    def __init__(self, history: History) -> None:
        started = [life.started for life in history.lives.values()]
        self._rollouts = {e.who for e in started if e.role == "rollout"}
        self._replicas = {name_of(event.who): event.replica for event in started if event.replica}

    def is_bystander(self, pull: Pull) -> bool:
        """Whether no life of its replica's members is a target of the faults beside it."""
        ours = self._group(pull.last.who)
        return pull.last.who in self._rollouts and not any(
            self._group(target) == ours for spell in pull.beside for target in spell.begin.targets
        )

    def _group(self, who: str) -> tuple[str, str]:
        """Its replica or, if that has no name, itself."""
        name = name_of(who)
        replica = self._replicas.get(name, "")
        return (replica, "") if replica else ("", name)
