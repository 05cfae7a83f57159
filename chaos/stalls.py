"""How long faults hold up those whom they were not done to.

Rules of this file. Only bystanders count: rollouts that no fault was done to while they pulled, nor
to any member of their replica. A pull's stall is what it took beyond the median of the undisturbed
pulls that asked the same kind of question, and is never below 0. A "latest" that fails has not
ended the wait: its time counts for the next one too. A stall is set down to every fault that
the pull overlaps: of several at once, nobody can tell which one held it up.

A fault reaches `AFTER` seconds beyond its end: what it broke is not whole again at once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median

import msgspec

from chaos.history import Call, History, Spell

AFTER = 5.0
LATEST, FORMER, NUMBER = "latest", "latest-k", "number"
MAYBE_NEVER_THERE = frozenset({"Timeout", "VersionUnavailable"})
"""What a question for one of the older versions may rightly end in."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The pull that was held up for the longest. `at`: when it began, in seconds of its run."""

    seconds: float
    at: float
    who: str
    what: str
    error: str
    seed: int


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """A `replicate`, with the tries that failed before it, and the faults that these overlap.

    One that never ended lasts until the end. The caller's rests between tries don't count.
    """

    tries: tuple[Call, ...]
    seconds: float
    beside: list[Spell]

    @property
    def began(self) -> float:
        return self.tries[0].began

    @property
    def call(self) -> Call:
        """The last try."""
        return self.tries[-1]

    @property
    def question(self) -> str:
        return question(self.call.called.what)

    @property
    def error(self) -> str:
        """Of the last try that failed."""
        errors = [call.ended.error for call in self.tries if call.ended is not None]
        return next((error for error in reversed(errors) if error), "")

    @property
    def maybe_never_there(self) -> bool:
        return self.question != LATEST and self.error in MAYBE_NEVER_THERE


def longest(history: History, began: float, seed: int) -> dict[str, Stall]:
    """By kind of fault; a kind whose faults no bystander pulled beside is missing."""
    pulls = pulls_of(history)
    usual = _usual_seconds(pulls)
    names = _Names(history)
    found: dict[str, Stall] = {}
    for pull in pulls:
        if pull.maybe_never_there or not names.is_bystander(pull):
            continue
        seconds = max(0.0, pull.seconds - usual.get(pull.question, 0.0))
        for spell in pull.beside:
            if spell.kind not in found or seconds > found[spell.kind].seconds:
                found[spell.kind] = Stall(
                    seconds=seconds,
                    at=pull.began - began,
                    who=pull.call.who,
                    what=pull.call.called.what,
                    error=pull.error,
                    seed=seed,
                )
    return found


def question(what: str) -> str:
    """Which kind of question: these take times of their own, undisturbed too."""
    if what == LATEST:
        return LATEST
    return FORMER if what.startswith(LATEST) else NUMBER


def pulls_of(history: History) -> list[Pull]:
    """In the order in which they began, but for those that died with their process."""
    lives = history.lives
    pulls: list[Pull] = []
    failed: dict[str, Pull] = {}
    """By who: its last "latest", if that failed, which the next one goes on with."""
    for call in sorted(history.calls, key=lambda call: call.began):
        if call.verb != "replicate" or (call.ended is None and lives[call.who].exited):
            continue
        seconds = min(call.over, history.last) - call.began
        pull = Pull(tries=(call,), seconds=seconds, beside=[])
        if pull.question == LATEST:
            before = failed.pop(call.who, None)
            if before is not None:
                pulls.remove(before)
                tries, seconds = (*before.tries, call), before.seconds + seconds
                pull = Pull(tries=tries, seconds=seconds, beside=[])
            if not call.succeeded:
                failed[call.who] = pull
        pulls.append(pull)
    pulls.sort(key=lambda pull: pull.began)
    _set_beside(pulls, history.spells)
    return pulls


def _set_beside(pulls: Sequence[Pull], spells: Sequence[Spell]) -> None:
    """Only those that began early enough, and not too early, are looked at for each fault."""
    begins = [pull.began for pull in pulls]
    most = max((pull.call.over - pull.began for pull in pulls), default=0.0)
    for spell in spells:
        first = bisect_left(begins, spell.begin.at - most)
        for pull in pulls[first : bisect_right(begins, spell.end + AFTER)]:
            if spell.overlaps(pull.began, pull.call.over, AFTER):
                pull.beside.append(spell)


def _usual_seconds(pulls: Sequence[Pull]) -> dict[str, float]:
    """By kind of question; where all pulls of a kind were disturbed, it's the median of these."""
    undisturbed: dict[str, list[float]] = {}
    successful: dict[str, list[float]] = {}
    for pull in pulls:
        if pull.call.succeeded:
            successful.setdefault(pull.question, []).append(pull.seconds)
            if not pull.beside:
                undisturbed.setdefault(pull.question, []).append(pull.seconds)
    return {kind: median(times) for kind, times in (successful | undisturbed).items()}


def name_of(who: str) -> str:
    """The worker's name, which all of its lives share: "r1" of "r1.2"."""
    name, dot, life = who.rpartition(".")
    return name if dot and life.isdigit() else who


class _Names:
    """Who is a rollout, and who belongs to whom."""

    def __init__(self, history: History) -> None:
        started = [life.started for life in history.lives.values()]
        self._rollouts = {event.who for event in started if event.role == "rollout"}
        self._replicas = {name_of(event.who): event.replica for event in started if event.replica}

    def is_bystander(self, pull: Pull) -> bool:
        """Whether no life of its replica's members is a target of the faults beside it."""
        ours = self._group(pull.call.who)
        return pull.call.who in self._rollouts and not any(
            self._group(target) == ours for spell in pull.beside for target in spell.begin.targets
        )

    def _group(self, who: str) -> tuple[str, str]:
        """Its replica or, if that has no name, itself."""
        name = name_of(who)
        replica = self._replicas.get(name, "")
        return (replica, "") if replica else ("", name)
