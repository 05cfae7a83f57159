"""G7 and G8: who was replaced, has a deadline, or is told to stop, ends; and how processes end."""

from __future__ import annotations

import signal
from collections import defaultdict
from itertools import pairwise
from math import inf

from chaos.checks.judging import HEALS, Found, check
from chaos.history import (
    CUTS,
    DEADLY,
    INTERRUPTED,
    SILENCES,
    STARVED,
    STRANGERS,
    TERMINATED,
    USURPED,
    Call,
    History,
    Life,
)

TO_CLOSE = 20.0
"""Seconds that a worker gives its peer for closing (worker.CLOSE_SECONDS)."""
GRACE = 8.0
"""Seconds after its deadline within which a verb ends: two for the lease of its readers, the others
as the machine may be full."""
PROMPT = 4.0
"""Seconds within which a signal is obeyed on such a machine."""
INTERRUPTED_AFTER = 0.5
"""A verb that began so long before the signal was sent is the one that it meets."""
SETTLES = 8.0
"""Seconds of a life after which what it uses is its usual."""
MAX_GROWTH = 96 << 20
MAX_DESCRIPTORS = 256
MAX_THREADS = 96


@check("G7")
def who_was_replaced_changes_nothing(history: History) -> Found:
    """Once another process has opened a slot, and worked there, no verb of the former succeeds.

    It is the new one's generation that fences it, and that is formed for its first verb.
    """
    by_slot: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for life in history.lives.values():
        for call in life.of("open"):
            if call.succeeded:
                by_slot[life.slot].append((call.over, life.who))
    for slot, opens in by_slot.items():
        for (_, old), (at, new) in pairwise(sorted(opens)):
            if old == new:
                continue
            at = _works(history.lives[new], at)
            again = min((t for t, who in opens if who == old and t > at), default=inf)
            for call in history.lives[old].of("publish", "replicate"):
                if at < call.began < again and call.succeeded and call.over < again:
                    yield call.over, old, f"{call.verb} of {slot}, which {new} had opened"


def _works(life: Life, since: float) -> float:
    """When the first of its verbs after that had succeeded."""
    verbs = (c.over for c in life.of("publish", "replicate") if c.succeeded and c.began > since)
    return min(verbs, default=inf)


@check("G8")
def no_hang(history: History) -> Found:
    """Every verb has ended soon after its deadline; time in which its process was stopped apart."""
    for life in history.lives.values():
        for call in life.calls:
            slept = _slept(history, life.who, call.began, call.over)
            due = call.began + call.called.timeout + slept + GRACE
            if due < min(call.over, life.end, history.last):
                late = min(call.over, life.end, history.last) - call.began
                yield due, life.who, f"{call.verb} {call.called.what}: {late:.1f} s and no end"


def _slept(history: History, who: str, since: float, until: float) -> float:
    """Seconds of that time in which it could do nothing."""
    until = min(until, history.last)
    return sum(
        max(0.0, min(spell.end, until) - max(spell.begin.at, since))
        for spell in history.done_to([who], SILENCES)
    )


@check("G8")
def who_is_told_to_stop_does(history: History) -> Found:
    """SIGTERM ends the process within the time that it has for closing, and no verb that begins
    meanwhile succeeds; Ctrl-C ends the verb that runs.
    """
    closing = history.phases.get("closing", history.last)
    for spell in history.spells:
        for life in (history.lives[who] for who in spell.begin.targets if who in history.lives):
            at = spell.begin.at
            if spell.kind == TERMINATED:
                due = at + TO_CLOSE + _slept(history, life.who, at, life.end) + GRACE
                if due < min(life.end, closing):
                    yield due, life.who, f"SIGTERM at {at:.1f} has not ended it"
                late = next((c for c in life.calls if _goes_on(history, c, at)), None)
                if late is not None:
                    what = f"{late.verb} {late.called.what}"
                    yield late.over, life.who, f"{what}, {late.began - at:.1f} s after SIGTERM"
            for call in life.calls if spell.kind == INTERRUPTED else ():
                due = at + _slept(history, life.who, at, call.over) + PROMPT
                if call.began < at - INTERRUPTED_AFTER and due < min(
                    call.over, life.end, history.last
                ):
                    yield due, life.who, f"Ctrl-C has not ended {call.verb} {call.called.what}"


def _goes_on(history: History, call: Call, since: float) -> bool:
    """Whether it began well after that, and succeeded all the same."""
    slept = _slept(history, call.who, since, call.began)
    return call.began > since + slept + PROMPT and call.succeeded and call.verb != "close"


@check("G8")
def only_typed_errors(history: History) -> Found:
    """Left out: what Python says where the kernel refuses memory."""
    for life in history.lives.values():
        starved = history.done_to([life.who], STARVED)
        for trouble in life.troubles:
            at, what = trouble.at, trouble.what
            if not (any(s.overlaps(at, at, 1.0) for s in starved) and _is_of_memory(what)):
                yield at, life.who, what
    for trouble in history.runner_troubles:
        yield trouble.at, trouble.who, trouble.what


def _is_of_memory(what: str) -> bool:
    return "MemoryError" in what or "can't start new thread" in what


@check("leaks")
def every_end_is_one_that_was_meant(history: History) -> Found:
    """Whom nobody killed ends with 0; and all have ended."""
    for life in history.lives.values():
        code = life.exited.code if life.exited is not None else None
        if code != 0 and life.who not in history.leaked and not _was_meant(history, life, code):
            yield life.end, life.who, f"exit code {code}"
    for who in history.leaked:
        yield history.last, who, "it did not end, and was killed"


def _was_meant(history: History, life: Life, code: int | None) -> bool:
    """Killed by a fault; or it ended with an error of a verb (2) while something was wrong with it
    or with its way to others.

    Or the kernel refused it memory, which libzmq answers with SIGABRT.
    """
    struck = history.done_to([life.who])
    if code == -signal.SIGKILL:  # a fault is told once it struck; who was replaced is killed later
        return any(
            spell.kind in DEADLY and spell.overlaps(life.end, life.end + 1.0, 1.0)
            for spell in struck
        ) or any(spell.kind in USURPED for spell in struck)
    if code == -signal.SIGTERM:
        return any(spell.kind == TERMINATED and spell.begin.at < life.end for spell in struck)
    if code is None:
        return bool(struck) or history.was_replaced(life)
    if code == -signal.SIGABRT:
        starved = history.done_to([life.who], STARVED)
        return any(spell.overlaps(life.end, life.end, 1.0) for spell in starved)
    return code == 2 and any(
        spell.overlaps(life.started.at, life.end, HEALS)
        for spell in history.spells
        if spell in struck or spell.kind in CUTS | STRANGERS
    )


@check("leaks")
def nothing_grows(history: History) -> Found:
    """Left out: the end, when who is still there takes over what the others kept."""
    closing = history.phases.get("closing", inf)
    for life in history.lives.values():
        usual = [s for s in life.samples if life.started.at + SETTLES < s.at < closing]
        if len(usual) < 2:
            continue
        first, last = usual[0], usual[-1]
        if last.rss - first.rss > MAX_GROWTH:
            yield last.at, life.who, f"memory from {first.rss >> 20} to {last.rss >> 20} MiB"
        if last.descriptors > MAX_DESCRIPTORS:
            yield last.at, life.who, f"{last.descriptors} file descriptors"
        if last.threads > MAX_THREADS:
            yield last.at, life.who, f"{last.threads} threads"
