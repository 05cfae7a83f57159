"""G6: what somebody retains is there."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from chaos.checks.judging import HEALS, Found, check, published_versions
from chaos.history import History

RETAIN_HEARD_ABROAD = 12.0
TAKEN_OVER_WITHIN = 1.0
"""Seconds for which a version may not be there while a copy of it is being taken."""


@check("G6")
def retained_versions_stay(history: History) -> Found:
    """What somebody retains is there whenever he looks, or soon after: while one holder withdraws,
    another may be just taking it over. Left out: whatever was done to anybody since it was
    published, as it may have been the one with the copy. Other zones hear of a retain later.
    """
    zones = {life.started.zone for life in history.lives.values()}
    published = sorted(published_versions(history), key=lambda one: one[2])
    maybe = [(since, version) for version, _, since, _, _ in published]
    whole = [(since, version) for version, _, since, until, _ in published if since < until]
    for life in history.lives.values():
        opened = min((c.over for c in life.of("open") if c.succeeded), default=inf)
        opened += RETAIN_HEARD_ABROAD if len(zones) > 1 else 0.0
        missing: dict[int, float] = {}
        for look in life.looks if life.started.newest else ():
            there = {version for _, version, is_whole in look.found if is_whole}
            for version in _retained(whole, maybe, opened, look.at, life.started.newest):
                if version in there or not _was_calm(history, whole, version, look.at):
                    missing.pop(version, None)
                elif look.at - missing.setdefault(version, look.at) > TAKEN_OVER_WITHIN:
                    yield look.at, life.who, f"retains {version}, which is nowhere"
                    missing[version] = inf  # once is enough


def _retained(
    whole: list[tuple[float, int]],
    maybe: list[tuple[float, int]],
    opened: float,
    at: float,
    newest: int,
) -> Iterator[int]:
    """What a handle that was open since `opened` retains then: at least these.

    `maybe`: what was whole, or may have been, as shards were taken back at about the time when
    others were published.
    """
    published = {version for since, version in maybe if since < at}
    for since, version in whole:
        newer = sum(number > version for number in published)
        if opened < since < at - TAKEN_OVER_WITHIN and newer < newest:
            yield version


def _was_calm(history: History, whole: list[tuple[float, int]], version: int, until: float) -> bool:
    """Nobody died, and nothing was done to anybody, since the version was published."""
    born = min(since for since, number in whole if number == version)
    return not any(born - 1.0 < life.end < until for life in history.lives.values()) and not any(
        spell.overlaps(born, until, HEALS) for spell in history.spells
    )
