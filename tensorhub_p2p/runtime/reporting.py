"""What a pull did, as its caller is told: sources, transports and times, each with its why.

Rule of this file. It turns the engine's account (transfer/engine.py) into values of results.py;
it asks nobody and changes nothing.

Times. The engine's clock begins with the pull; `seconds` is the whole call, of which the pull is
a part. What is neither registering nor moving was waiting: so the three add up.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.protocol.identity import PeerId, Publication
from tensorhub_p2p.protocol.pulls.sources import AT_HAND, SourceFacts, SourceState
from tensorhub_p2p.results import MEMORY, Fallback, Pull, SourceReport, TransportReport
from tensorhub_p2p.transfer.engine import Moved, PullOutcome, SourceOutcome

LOCALITIES = {AT_HAND: "memory", 0: "host", 1: "rack", 2: "zone", 3: "far"}
TELLING = {SourceState.WAITING, SourceState.SHUNNED, SourceState.DEAD}
"""States that say all of why a source gave nothing."""


def report(
    model: str,
    publication: Publication,
    outcome: PullOutcome,
    seconds: float,
    registering: float,
    name_of: Callable[[PeerId], str],
) -> Pull:
    """The report of a call that took `seconds`, of them `registering`."""
    asked = [s.facts.locality for s in outcome.sources if _was_asked(s.facts)]
    sources = tuple(_source(source, asked, name_of) for source in outcome.sources)
    return Pull(
        model=model,
        version=publication.version,
        epoch=publication.epoch,
        bytes=outcome.bytes,
        seconds=seconds,
        sources=sources,
        retried=outcome.retried,
        waiting=max(0.0, seconds - outcome.moving - registering),
        registering=registering,
        moving=outcome.moving,
        verifying=outcome.hashing,
        prefetched=sum(source.bytes for source in sources if source.locality == MEMORY),
    )


def _was_asked(facts: SourceFacts) -> bool:
    return facts.state is not SourceState.KNOWN or bool(facts.bytes or facts.notes)


def _source(
    outcome: SourceOutcome, asked: list[int], name_of: Callable[[PeerId], str]
) -> SourceReport:
    """`asked`: the localities of all sources that were asked."""
    facts = outcome.facts
    verdict, why = _judge(facts, asked)
    return SourceReport(
        peer_id=facts.source.peer,
        name=name_of(facts.source.peer),
        slot=str(facts.source.slot),
        transport=outcome.transport,
        locality=LOCALITIES[facts.locality],
        bytes=facts.bytes,
        chunks=facts.chunks,
        rate=facts.rate,
        state=facts.state.value,
        notes=facts.notes,
        verdict=verdict,
        why=why,
        transports=tuple(_transport(name, moved) for name, moved in outcome.moved.items()),
        fallbacks=_fallbacks(outcome),
        unfit={n: why for n, why in outcome.rejected.items() if n not in outcome.failed},
    )


def _judge(facts: SourceFacts, asked: list[int]) -> tuple[str, str]:
    """What became of a source, and why."""
    nearest = min(asked, default=facts.locality)
    if facts.locality == AT_HAND and facts.bytes:
        return "chosen", "it was prefetched"
    if facts.bytes:
        near = facts.locality == nearest
        return "chosen", "none was nearer" if near else "nearer ones had not all, or were busy"
    if not _was_asked(facts):
        near = facts.locality == nearest
        return "not asked", "others as near were enough" if near else "nearer ones were enough"
    if facts.state in (SourceState.OPEN, SourceState.ASKING):
        return "not needed", "others brought all of it first"
    if facts.state in TELLING or not facts.notes:
        return "rejected", facts.state.value
    return "rejected", facts.notes[-1]


def _transport(name: str, moved: Moved) -> TransportReport:
    rate = moved.bytes / moved.seconds if moved.seconds else None
    return TransportReport(name, moved.bytes, moved.chunks, rate)


def _fallbacks(outcome: SourceOutcome) -> tuple[Fallback, ...]:
    """Each transport that was tried and failed, with the one that came after it."""
    after = (*outcome.failed[1:], outcome.last)
    pairs = zip(outcome.failed, after, strict=False)
    return tuple(Fallback(name, outcome.rejected[name], instead) for name, instead in pairs)
