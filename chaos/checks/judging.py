"""What a check is: a promise, and a search of a history for where it was broken.

Rules of this file. The register of all checks, and what several of them ask of a history. Limits
that more than one has are here; others stand beside their check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec

from chaos.history import Call, History, Life

HEALS = 12.0
"""Seconds after a cut until all know each other again."""


class Violation(msgspec.Struct, frozen=True):
    """A promise that was broken: which, found by whom, when, and how."""

    guarantee: str
    check: str
    at: float
    who: str
    what: str


Found = Iterator[tuple[float, str, str]]
"""When, who, what."""
CHECKS: dict[str, tuple[str, Callable[[History], Found]]] = {}


def check(guarantee: str) -> Callable[[Callable[[History], Found]], Callable[[History], Found]]:
    def enlist(function: Callable[[History], Found]) -> Callable[[History], Found]:
        CHECKS[function.__name__] = (guarantee, function)
        return function

    return enlist


def violations(history: History) -> list[Violation]:
    found = [
        Violation(guarantee, name, min(at, history.last), who, what)  # what never ended has no time
        for name, (guarantee, function) in CHECKS.items()
        for at, who, what in function(history)
    ]
    return sorted(found, key=lambda violation: violation.at)


def pulls(lives: list[Life]) -> list[Call]:
    calls = [call for life in lives for call in life.of("replicate") if call.succeeded]
    return sorted(calls, key=lambda call: call.over)


def published_versions(history: History) -> list[tuple[int, str, float, float, str]]:
    """(version, replica, all returned, the first withdrawal began, zone) of whole publishes."""
    found = []
    for replica, lives in history.by_replica().items():
        parts: dict[int, list[tuple[Life, Call]]] = defaultdict(list)
        for life in lives:
            for call in life.of("publish"):
                if call.succeeded:
                    parts[int(call.called.what)].append((life, call))
        for version, done in parts.items():
            if len({life.started.shard for life, _ in done}) < lives[0].started.num_shards:
                continue
            since = max(call.over for _, call in done)
            until = min(withdrawn(life, call) for life, call in done)
            found.append((version, replica, since, until, lives[0].started.zone))
    return found


def withdrawn(life: Life, publish: Call) -> float:
    """When the next verb after this publish began, which may take it back; or its process ended."""
    return min((c.began for c in life.calls if c.began > publish.over), default=life.end)
