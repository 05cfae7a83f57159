"""G1: right bytes, of the version that was asked for."""

from __future__ import annotations

from chaos.checks.judging import HEALS, Found, check
from chaos.history import Call, History, Life

OTHER_BYTES = "its bytes are not those of"
ONCE_MORE = "this replica had it whole before"
"""Words of two of the library's conflicts; its tests see that it says so."""
FLIPS_WITHIN = 0.5
"""Seconds from the word that bits will be flipped until they are."""


@check("G1")
def right_bytes(history: History) -> Found:
    """Every byte that a pull brought is what its version says, and what a failed one left is what
    was there before, unless it says that it is torn. Whose own memory was spoilt is judged again
    once it has pulled anew.
    """
    for life in history.lives.values():
        for call in life.of("replicate"):
            compared = call.compared
            if compared is None or not compared.wrong or _is_spoilt(life, call):
                continue
            yield compared.at, life.who, f"{call.called.what}: wrong bytes in {compared.wrong}"


def _is_spoilt(life: Life, call: Call) -> bool:
    """Bits were flipped here since it last wrote its tensors, or while it did."""
    compared, ended = call.compared, call.ended
    assert compared is not None
    assert ended is not None
    return any(
        spoilt.at >= call.began - FLIPS_WITHIN
        or ((ended.up_to_date or ended.error) and spoilt.version == compared.version)
        for spoilt in life.spoilt
        if spoilt.at <= compared.at
    )


@check("G1")
def nobody_reads_what_was_taken_back(history: History) -> Found:
    """A source sends no wrong bytes, unless its memory was spoilt: who withdraws waits for its
    readers before the tensors may change. Of one whose name the puller had not learnt any may be
    the one that was spoilt. Left out: readers and sources to which something was
    done, as the wait is for one lease at most.
    """
    spoilt = {life.who for life in history.lives.values() if life.spoilt}
    for call in history.calls:
        for source in call.ended.mismatched if call.ended is not None else ():
            struck = history.done_to([call.who, source])
            if (
                source in spoilt
                or (not source and spoilt)
                or any(s.overlaps(call.began, call.over, HEALS) for s in struck)
            ):
                continue
            yield call.over, call.who, f"{source} sent wrong bytes of {call.called.what}"
        if call.ended is not None and call.ended.error == "IntegrityError" and not spoilt:
            yield call.over, call.who, f"{call.called.what}: {call.ended.message}"


@check("G1")
def the_version_that_was_asked_for(history: History) -> Found:
    """By its number; or, as "latest-1", not the newest; or one above what was waited from."""
    publishes = [call for life in history.lives.values() for call in life.of("publish")]
    for call in history.calls:
        if not call.succeeded:
            continue
        assert call.ended is not None
        asked, got = call.called.what, call.ended.version
        if call.verb == "replicate" and asked.isdigit() and got != int(asked):
            yield call.over, call.who, f"asked for {asked}, got {got}"
        if call.verb == "wait_for" and asked.isdigit() and got <= int(asked):
            yield call.over, call.who, f"waited for one above {asked}, got {got}"
        if call.verb == "replicate" and asked == "latest-1":
            begun = (int(c.called.what) for c in publishes if c.began < call.over)
            if got >= max(begun, default=got):
                yield call.over, call.who, f"{asked} is {got}, and nothing above it was published"


@check("G1")
def no_conflict_over_equal_bytes(history: History) -> Found:
    """All who publish a version hold the same bytes, unless somebody's were spoilt.

    Who publishes an old one is in conflict with newer ones: that is none. Nor is it one to publish
    for a second time, as who is started again soon may, what a former process had published.
    """
    if any(life.spoilt for life in history.lives.values()):
        return
    for call in history.calls:
        if call.ended is not None and call.ended.error == "VersionConflict":
            message = call.ended.message
            if (
                OTHER_BYTES in message
                or f": version {call.called.what} " in message
                or (ONCE_MORE in message and not _is_the_second(history, call))
            ):
                yield call.over, call.who, f"{call.verb} {call.called.what}: {message}"


def _is_the_second(history: History, publish: Call) -> bool:
    """The slot has published that version before."""
    slot = history.lives[publish.who].slot
    return any(
        call.called.what == publish.called.what and call.began < publish.began
        for life in history.lives.values()
        if life.slot == slot
        for call in life.of("publish")
    )
