"""G9: once nothing is done to anybody, everything works."""

from __future__ import annotations

from math import inf

from chaos.checks.judging import HEALS, Found, check
from chaos.history import CUTS, Call, History, Life

RECOVERS = 6.0
"""Seconds after any other fault, or a death, until nothing has to fail for it."""
LIVELY_WITHIN = 20.0


@check("G9")
def lively_once_it_is_calm(history: History) -> Found:
    """After the last fault every trainer publishes, and all others get something: in a call of
    that time, also one that began before it or ended after it, as pulls are slow on a full machine.

    Left out: who holds the last copy of what is retained, with flipped bits in it. It can't be kept
    anywhere else, and so isn't given up; the other shards of its replica wait for it in vain.
    """
    calm, closing = history.phases.get("calm"), history.phases.get("closing")
    if calm is None or closing is None:
        return
    for life in history.lives.values():
        if life.end < closing or life.started.role == "elastic" or life.started.at > calm:
            continue
        group = [history.lives[who] for who in history.group_of(life.who)]
        if (
            history.was_replaced(life)
            or any(call.succeeded for call in _tries(life, calm, closing))
            or any(_can_not_part(member, calm, closing) for member in group)
        ):
            continue
        until = min(closing, calm + LIVELY_WITHIN)
        last = life.calls[-1] if life.calls else None
        what = f"{last.verb} {last.called.what}" if last is not None else "no verb"
        error = last.ended.message if last is not None and last.ended is not None else "no end"
        yield until, life.who, f"nothing succeeds although it is calm; last: {what}: {error}"


def _tries(life: Life, calm: float, closing: float) -> list[Call]:
    return [c for c in life.of("publish", "replicate") if c.began < closing and calm < c.over]


def _can_not_part(life: Life, calm: float, closing: float) -> bool:
    tries = _tries(life, calm, closing)
    errors = {call.ended.error for call in tries if call.ended is not None}
    return bool(life.spoilt) and "RetentionLost" in errors and "" not in errors


@check("G9")
def all_know_each_other_once_it_is_calm(history: History) -> Found:
    """Who was there all the while knows everybody of its zone who was, and nobody who is long dead.

    Left out: what ends soon after a cut.
    """
    calm, closing = history.phases.get("calm"), history.phases.get("closing")
    if calm is None or closing is None:
        return
    if any(spell.kind in CUTS and closing < spell.end + HEALS for spell in history.spells):
        return
    settled = [
        life
        for life in history.lives.values()
        if life.end > closing
        and not history.was_replaced(life)
        and any(call.succeeded and call.over < calm for call in life.of("join"))
    ]
    gone = {life.who for life in history.lives.values() if life.end < closing - HEALS}
    for life in settled:
        if life.met is None:
            continue
        names = set(life.met.names)
        missing = {
            other.who
            for other in settled
            if other.started.zone == life.started.zone and other.end > life.met.at
        } - names
        if missing:
            yield life.met.at, life.who, f"does not know {', '.join(sorted(missing))}"
        if names & gone:
            yield life.met.at, life.who, f"takes {', '.join(sorted(names & gone))} for alive"


@check("G9")
def nothing_fails_without_a_cause(history: History) -> Found:
    """Where nothing is done to anybody, and nobody ends, each verb succeeds.

    Left out: an older version, which may be gone; slots, which may be another's, and who was
    replaced in one; waiting for what nobody published; what flipped bits lead to.
    """
    begun, closing = history.phases.get("begun", inf), history.phases.get("closing", -inf)
    ends = sorted(life.end for life in history.lives.values())
    published = sorted(c.over for c in history.calls if c.verb == "publish" and c.succeeded)
    spoilt = any(life.spoilt for life in history.lives.values())
    for call in history.calls:
        if call.succeeded or not begun < call.began < call.over < closing or not _is_due(call):
            continue
        assert call.ended is not None
        if (
            any(
                spell.overlaps(call.began, call.over, HEALS if spell.kind in CUTS else RECOVERS)
                for spell in history.spells
            )
            or any(call.began - RECOVERS < end < call.over for end in ends)
            or history.replaced_at(history.lives[call.who]) < call.over
            or (spoilt and call.ended.error in {"IntegrityError", "RetentionLost"})
            or not any(call.began - HEALS < at < call.over for at in published)
        ):
            continue
        what = f"{call.verb} {call.called.what}"
        yield call.over, call.who, f"{what}: {call.ended.error}: {call.ended.message}"


def _is_due(call: Call) -> bool:
    if call.verb == "replicate":
        return call.called.what == "latest"
    return call.verb in {"join", "publish", "unpublish", "wait_for", "prefetch", "versions"}
