"""What must hold, whatever was done: each check is one promise of docs/guarantees.md.

Rules of this file. A check reads a history and yields violations. Where a guarantee has limits,
the check has the same, and says so: it accuses nobody for what is not promised, and leaves out
what it can't tell. Each is seen to find something (tests/test_chaos_checks.py), and some of them
deliberate bugs in real runs (bugs.py).
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from math import inf

import msgspec

from chaos.history import (
    CUTS,
    DEADLY,
    INTERRUPTED,
    PARTED,
    SILENCES,
    STARVED,
    STRANGERS,
    TERMINATED,
    USURPED,
    Call,
    History,
    Life,
)

FLIPS_WITHIN = 0.5
"""Seconds from the word that bits will be flipped until they are."""
TO_CLOSE = 20.0
"""Seconds that a worker gives its peer for closing (worker.CLOSE_SECONDS)."""
GRACE = 8.0
"""Seconds after its deadline within which a verb ends: two for the lease of its readers, the others
as the machine may be full."""
PROMPT = 4.0
"""Seconds within which a signal is obeyed on such a machine."""
ABROAD_SECONDS = 7.0
"""Within which other zones see a version; with two for a full machine."""
HEALS = 12.0
"""Seconds after a cut until all know each other again."""
RECOVERS = 6.0
"""Seconds after any other fault, or a death, until nothing has to fail for it."""
RETAIN_HEARD_ABROAD = 12.0
TAKEN_OVER_WITHIN = 1.0
"""Seconds for which a version may not be there while a copy of it is being taken."""
ON_RECORD_WITHIN = 4.0
"""Seconds until what a group has got is on record; with two for a full machine."""
LIVELY_WITHIN = 20.0
INTERRUPTED_AFTER = 0.5
"""A verb that began so long before the signal was sent is the one that it meets."""
SETTLES = 8.0
"""Seconds of a life after which what it uses is its usual."""
READING = frozenset({"wait_for", "prefetch", "versions"})
"""Verbs that give nothing up."""
MAX_GROWTH = 96 << 20
MAX_DESCRIPTORS = 256
MAX_THREADS = 96


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
        Violation(guarantee, name, at, who, what)
        for name, (guarantee, function) in CHECKS.items()
        for at, who, what in function(history)
    ]
    return sorted(found, key=lambda violation: violation.at)


# --- G1 ---


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
    for call in history.calls:
        asked = call.called.what
        if call.verb == "replicate" and call.succeeded and asked.isdigit():
            assert call.ended is not None
            if call.ended.version != int(asked):
                yield call.over, call.who, f"asked for {asked}, got {call.ended.version}"


# --- G2 ---


@check("G2")
def one_publication_for_a_call(history: History) -> Found:
    """Of a replica of several shards; one alone may ask something else in a call that failed."""
    for replica, lives in history.by_replica().items():
        first: dict[tuple[str, int], Call] = {}
        for call in _pulls(lives):
            assert call.ended is not None
            if history.lives[call.who].started.num_shards == 1 or not call.ended.generation:
                continue
            key = (call.ended.generation, call.ended.number)
            other = first.setdefault(key, call)
            assert other.ended is not None
            if other.ended.publication != call.ended.publication:
                yield (
                    call.over,
                    call.who,
                    f"call {key} of {replica}: {call.ended.publication}, but {other.who} "
                    f"got {other.ended.publication}",
                )


@check("G2")
def no_end_of_a_generation_unnoticed(history: History) -> Found:
    """Between calls of two generations some verb of the process failed."""
    for life in history.lives.values():
        if life.started.num_shards == 1:
            continue
        last, failed = "", False
        for call in life.calls:
            if call.ended is None:
                continue
            failed = failed or bool(call.ended.error)
            if not call.ended.generation:
                continue
            if last and call.ended.generation != last and not failed:
                yield call.over, life.who, f"from {last} to {call.ended.generation} with no error"
            last, failed = call.ended.generation, False


def _pulls(lives: list[Life]) -> list[Call]:
    calls = [call for life in lives for call in life.of("replicate") if call.succeeded]
    return sorted(calls, key=lambda call: call.over)


# --- G3 ---


@check("G3")
def whole_versions_only(history: History) -> Found:
    """When a version was first got anywhere, all shards of a replica had been there at once.

    What a rollout holds was whole before, so the first to get it is judged by its publishers.
    """
    stays = _stays(history)
    seen: set[tuple[int, int]] = set()
    for call in _pulls(list(history.lives.values())):
        assert call.ended is not None
        key = (call.ended.epoch, call.ended.version)
        if key in seen:
            continue
        seen.add(key)
        if not any(_were_together(shards, call.over) for shards in stays[call.ended.version]):
            yield call.over, call.who, f"got version {call.ended.version}, which was never whole"


Stay = tuple[float, float]


def _stays(history: History) -> dict[int, list[list[list[Stay]]]]:
    """By version: for each replica that published it, of each shard when it was published."""
    found: dict[int, list[list[list[Stay]]]] = defaultdict(list)
    for lives in history.by_replica().values():
        by_version: dict[int, list[list[Stay]]] = {}
        for life in lives:
            for call in life.of("publish"):
                shards = by_version.setdefault(
                    int(call.called.what), [[] for _ in range(life.started.num_shards)]
                )
                shards[life.started.shard].append((call.began, _taken_back(life, call)))
        for version, shards in by_version.items():
            found[version].append(shards)
    return found


def _taken_back(life: Life, publish: Call) -> float:
    """When at the latest what this published was gone: its withdrawal had ended."""
    for call in life.of("unpublish", "close", "close handle"):
        if call.began > publish.began and call.succeeded:
            return call.over
    return life.end


def _were_together(shards: list[list[Stay]], until: float) -> bool:
    """Whether at one moment before `until` each shard was there."""
    moments = [begin for stays in shards for begin, _ in stays if begin <= until]
    return any(
        all(any(begin <= at <= end for begin, end in stays) for stays in shards) for at in moments
    )


# --- G4 ---


@check("G4")
def never_backwards(history: History) -> Found:
    """A replica's "latest" never goes back, whoever of it died.

    An answer counts once all shards have it: a call that one of them couldn't finish is void. What
    the dead had counts if it was on record: not what they had just got, nor behind a cut.
    """
    for replica, lives in history.by_replica().items():
        latest = _of_all_shards([c for c in _pulls(lives) if c.called.what == "latest"], lives)
        for after in latest:
            earlier = [call for call in latest if call.over < after.began]
            higher = [call for call in earlier if _order(call) > _order(after)]
            before = next((c for c in higher if _is_remembered(history, c, after)), None)
            if before is not None:
                was, now = _order(before), _order(after)
                yield after.over, after.who, f"{replica} had {was} by {before.who}, then {now}"


def _of_all_shards(calls: list[Call], lives: list[Life]) -> list[Call]:
    """Those of calls of the group in which every shard succeeded."""
    shard = {life.who: life.started.shard for life in lives}
    done: dict[tuple[str, int], set[int]] = defaultdict(set)
    for call in calls:
        assert call.ended is not None
        done[call.ended.generation, call.ended.number].add(shard[call.who])
    return [
        call
        for call in calls
        if call.ended is not None
        and len(done[call.ended.generation, call.ended.number]) == lives[0].started.num_shards
    ]


def _order(call: Call) -> tuple[int, int]:
    assert call.ended is not None
    return (call.ended.epoch, call.ended.version)


def _is_remembered(history: History, before: Call, after: Call) -> bool:
    """Whoever had it made the later call, or was there all the while, or had put it on record."""
    end = history.lives[before.who].end
    if before.who == after.who or end > after.over:
        return True
    if end - before.over < ON_RECORD_WITHIN:
        return False
    struck = history.done_to(history.group_of(before.who))
    return not any(
        spell.overlaps(before.over, before.over + ON_RECORD_WITHIN) for spell in struck
    ) and not any(
        spell.kind in CUTS and spell.overlaps(before.over, after.over, HEALS)
        for spell in history.spells
    )


# --- G5 ---


@check("G5")
def fresh(history: History) -> Found:
    """Who asks for "latest" after a publish of all shards returned gets that, or newer.

    So does who asks while a replica has it that had pulled it before, whatever became of the
    publisher (G9). Left out: cuts, and what was done to them or to who asks; other zones have
    their time.
    """
    asked_at = _asked_at(history)
    there = [
        (version, replica, _lives_of(history, replica), since, until, zone)
        for version, replica, since, until, zone in _published(history)
    ]
    there += _held(history)
    cuts = [spell for spell in history.spells if spell.kind in PARTED]
    for call in _pulls(list(history.lives.values())):
        assert call.ended is not None
        if call.called.what != "latest" or any(
            spell.overlaps(call.began, call.over, HEALS) for spell in cuts
        ):
            continue
        life = history.lives[call.who]
        for version, replica, holders, since, until, zone in there:
            wait = 0.0 if zone == life.started.zone else ABROAD_SECONDS
            fits = since + wait < asked_at(call) and call.over < until
            if not fits or call.ended.version >= version or call.ended.epoch > 0:
                continue
            struck = history.done_to([*holders, *history.group_of(call.who)])
            if any(spell.overlaps(since, call.over, HEALS) for spell in struck):
                continue
            yield (
                call.over,
                call.who,
                f"got {call.ended.version}, {asked_at(call) - since:.2f} s after {version} was "
                f"there, whole at {replica}",
            )
            break


def _asked_at(history: History) -> Callable[[Call], float]:
    """When the first member of the group asked: a call is decided once, for all shards."""
    first: dict[tuple[str, str, int], float] = {}

    def key(call: Call) -> tuple[str, str, int]:
        assert call.ended is not None
        replica = history.lives[call.who].started.replica
        return (replica, call.ended.generation, call.ended.number)

    for call in _pulls(list(history.lives.values())):
        first[key(call)] = min(call.began, first.get(key(call), inf))
    return lambda call: first[key(call)]


def _published(history: History) -> list[tuple[int, str, float, float, str]]:
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
            until = min(_withdrawn(life, call) for life, call in done)
            found.append((version, replica, since, until, lives[0].started.zone))
    return found


def _held(history: History) -> list[tuple[int, str, list[str], float, float, str]]:
    """(version, replica, its processes, all had it, the first may have given it up, zone)."""
    found = []
    for replica, lives in history.by_replica().items():
        shards: list[list[tuple[int, str, float, float]]] = [
            [] for _ in range(lives[0].started.num_shards)
        ]
        for life in lives:
            for call in life.of("replicate"):
                if call.ended is not None and call.succeeded and call.ended.state == "PUBLISHED":
                    stay = (call.ended.version, life.who, call.over, _given_up(life, call))
                    shards[life.started.shard].append(stay)
        for parts in product(*shards):
            since, until = max(part[2] for part in parts), min(part[3] for part in parts)
            if len({version for version, *_ in parts}) == 1 and since < until:
                whos = [who for _, who, *_ in parts]
                zone = lives[0].started.zone
                found.append((parts[0][0], replica, whos, since, until, zone))
    return found


def _given_up(life: Life, pull: Call) -> float:
    """When the next verb began that may take it back; or its process ended."""
    verbs = (c.began for c in life.calls if c.began > pull.over and c.verb not in READING)
    return min(verbs, default=life.end)


def _withdrawn(life: Life, publish: Call) -> float:
    """When the next verb after this publish began, which may take it back; or its process ended."""
    return min((c.began for c in life.calls if c.began > publish.over), default=life.end)


def _lives_of(history: History, replica: str) -> list[str]:
    return [life.who for life in history.lives.values() if life.started.replica == replica]


# --- G6 ---


@check("G6")
def retained_versions_stay(history: History) -> Found:
    """What somebody retains is there whenever he looks, or soon after: while one holder withdraws,
    another may be just taking it over. Left out: whatever was done to anybody since it was
    published, as it may have been the one with the copy. Other zones hear of a retain later.
    """
    zones = {life.started.zone for life in history.lives.values()}
    published = sorted(_published(history), key=lambda one: one[2])
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


# --- G7 ---


@check("G7")
def who_was_replaced_changes_nothing(history: History) -> Found:
    """Once another process has opened a slot, no verb that the former one begins succeeds."""
    by_slot: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for life in history.lives.values():
        for call in life.of("open"):
            if call.succeeded:
                by_slot[life.slot].append((call.over, life.who))
    for slot, opens in by_slot.items():
        for (_, old), (at, new) in pairwise(sorted(opens)):
            if old == new:
                continue
            again = min((t for t, who in opens if who == old and t > at), default=inf)
            for call in history.lives[old].of("publish", "replicate"):
                if at < call.began < again and call.succeeded and call.over < again:
                    yield call.over, old, f"{call.verb} of {slot}, which {new} had opened"


# --- G8 ---


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
    for life in history.lives.values():
        for trouble in life.troubles:
            yield trouble.at, life.who, trouble.what
    for trouble in history.runner_troubles:
        yield trouble.at, trouble.who, trouble.what


# --- G9 ---


@check("G9")
def lively_once_it_is_calm(history: History) -> Found:
    """After the last fault every trainer publishes, and all others get something: in a call of
    that time, also one that began before it or ended after it, as pulls are slow on a full machine.
    """
    calm, closing = history.phases.get("calm"), history.phases.get("closing")
    if calm is None or closing is None:
        return
    for life in history.lives.values():
        if life.end < closing or life.started.role == "elastic" or life.started.at > calm:
            continue
        if history.was_replaced(life):
            continue
        until = min(closing, calm + LIVELY_WITHIN)
        during = [c for c in life.of("publish", "replicate") if c.began < closing and calm < c.over]
        if not any(call.succeeded for call in during):
            last = life.calls[-1] if life.calls else None
            what = f"{last.verb} {last.called.what}" if last is not None else "no verb"
            error = last.ended.message if last is not None and last.ended is not None else "no end"
            yield until, life.who, f"nothing succeeds although it is calm; last: {what}: {error}"


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

    Left out: an older version, which may be gone; slots, which may be another's; waiting for what
    nobody published; what flipped bits lead to.
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


# --- what stays behind ---


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
    for life in history.lives.values():
        usual = [s for s in life.samples if s.at > life.started.at + SETTLES]
        if len(usual) < 2:
            continue
        first, last = usual[0], usual[-1]
        if last.rss - first.rss > MAX_GROWTH:
            yield last.at, life.who, f"memory from {first.rss >> 20} to {last.rss >> 20} MiB"
        if last.descriptors > MAX_DESCRIPTORS:
            yield last.at, life.who, f"{last.descriptors} file descriptors"
        if last.threads > MAX_THREADS:
            yield last.at, life.who, f"{last.threads} threads"
