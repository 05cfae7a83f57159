"""G2 to G5: one publication for a group, whole, never an older one, and as new as can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from math import inf

from chaos.checks.judging import HEALS, Found, check, published_versions, pulls
from chaos.history import CUTS, PARTED, Call, History, Life

ABROAD_SECONDS = 7.0
"""Within which other zones see a version; with two for a full machine."""
ON_RECORD_WITHIN = 4.0
"""Seconds until what a group has got is on record; with two for a full machine."""
READING = frozenset({"wait_for", "prefetch", "versions"})
"""Verbs that give nothing up."""


@check("G2")
def one_publication_for_a_call(history: History) -> Found:
    """Of a replica of several shards; one alone may ask something else in a call that failed."""
    for replica, lives in history.by_replica().items():
        first: dict[tuple[str, int], Call] = {}
        for call in pulls(lives):
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


@check("G3")
def whole_versions_only(history: History) -> Found:
    """When a version was first got anywhere, all shards of a replica had been there at once.

    What a rollout holds was whole before, so the first to get it is judged by its publishers.
    """
    stays = _stays(history)
    seen: set[tuple[int, int]] = set()
    for call in pulls(list(history.lives.values())):
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


@check("G4")
def never_backwards(history: History) -> Found:
    """A replica's "latest" never goes back, whoever of it died.

    An answer counts once all shards have it: a call that one of them couldn't finish is void. What
    the dead had counts if it was on record: not what they had just got, nor behind a cut.
    """
    for replica, lives in history.by_replica().items():
        latest = _of_all_shards([c for c in pulls(lives) if c.called.what == "latest"], lives)
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
    """Whoever had it made the later call, or was there all the while, or had put it on record.

    Who is stopped while another process takes its slot is there no more, for that one.
    """
    life = history.lives[before.who]
    end = min(life.end, history.replaced_at(life))
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
        for version, replica, since, until, zone in published_versions(history)
    ]
    there += _held(history)
    cuts = [spell for spell in history.spells if spell.kind in PARTED]
    for call in pulls(list(history.lives.values())):
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

    for call in pulls(list(history.lives.values())):
        first[key(call)] = min(call.began, first.get(key(call), inf))
    return lambda call: first[key(call)]


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


def _lives_of(history: History, replica: str) -> list[str]:
    return [life.who for life in history.lives.values() if life.started.replica == replica]
