"""What the machines of a handle decided, and what that means for its other machines and its verb.

Rules of this file. A table: for each event that concerns the handle one function, which tells the
machines that have to know, and ends the verb that waited for it. What isn't in the table is for the
driver. Nothing is decided here that a machine could decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub_p2p.errors import RetentionLost, SlotTaken, VersionConflict
from tensorhub_p2p.protocol.directory.admission import FENCED
from tensorhub_p2p.protocol.groups.calls import CallAnswered, CallFailed
from tensorhub_p2p.protocol.groups.election import (
    GenerationBroken,
    GenerationFormed,
    GroupClaimsRead,
)
from tensorhub_p2p.protocol.groups.slots import SlotEstablished, SlotLost
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.machine import Output
from tensorhub_p2p.protocol.pulls.serving import Drained
from tensorhub_p2p.protocol.shards.publishing import (
    Aborted,
    Announced,
    Conflicts,
    Contradicted,
    Hidden,
)
from tensorhub_p2p.protocol.shards.verbs import Answer, PublicationLost, StopDigests
from tensorhub_p2p.protocol.shards.withdrawing import Unkept

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.shards.machines import Machines


def take(shard: Machines, now: float, item: Output) -> None:
    """Act on an event that concerns the handle; the rest is for the driver."""
    handler = HANDLERS.get(type(item))
    if handler is None:
        shard.outbox.items.append(item)
    else:
        handler(shard, now, item)


# --- its slot ---


def on_established(shard: Machines, now: float, event: SlotEstablished) -> None:
    def retained(_now: float) -> None:
        if shard.running.is_a("open"):
            shard.done(None)

    shard.part.election.established(event.counter)
    if shard.running.is_a("open"):
        shard.retaining.set(now, shard.slot, shard.retain, retained)


def on_slot_lost(shard: Machines, now: float, event: SlotLost) -> None:
    who = shard.liveness.name(event.rival)
    shard.replaced = SlotTaken(
        f"{shard.slot} can't be held: {who} has it ({event.reason}). Open another slot, or "
        "another replica"
    )
    shard.part.stop(now)
    if not shard.running.is_a("unpublish"):
        shard.fail(shard.replaced)


def on_claims_read(shard: Machines, now: float, event: GroupClaimsRead) -> None:
    # That we were replaced comes before whatever else the election read there.
    shard.claim.learn(now, event.registers)
    for item in shard.claim.outbox.drain():
        take(shard, now, item)


# --- its group ---


def on_formed(shard: Machines, now: float, event: GenerationFormed) -> None:
    shard.part.formed(now, event.record)
    shard.numbering.next_generation()
    shard.references.reissue(now, event.record.generation)
    if shard.part.notices.pending is not None and shard.running.needs_its_generation:
        shard.fail_with_notice()
    shard.running.go(now)


def on_broken(shard: Machines, now: float, event: GenerationBroken) -> None:
    shard.part.broke(now, event)
    told = shard.part.notices.pending is not None
    if shard.running.is_a("publish") and shard.references.held is None and told:
        # Refused, as a higher generation exists.
        shard.fail_with_notice()


def on_answered(shard: Machines, now: float, event: CallAnswered) -> None:
    if shard.part.calls.generation is not None and shard.running.is_a("ask"):
        decision = event.decision
        shard.part.keep_answer(event)
        answer = Answer(event.call, decision.publication, decision.num_shards, event.sources)
        shard.done(answer)


def on_call_failed(shard: Machines, now: float, event: CallFailed) -> None:
    shard.part.call_failed(event)
    if shard.running.is_a("ask"):
        shard.fail_with_notice()


# --- what it holds ---


def on_announced(shard: Machines, now: float, event: Announced) -> None:
    if shard.running.is_a("publish"):
        shard.numbering.published(event.publication)
        shard.done(event.publication)
    elif shard.running.is_a("hold"):
        shard.done(None)


def on_conflict(shard: Machines, now: float, event: Conflicts) -> None:
    shard.stop_serving(now, "its version conflicts with another")
    if event.why != FENCED:
        refuse(shard, event.publication, _in_the_way(event))
    elif shard.part.notices.pending is not None:
        shard.fail_with_notice()
    else:
        # An owner knows a higher generation: the end of ours is told, once we know of it.
        shard.part.election.doubt(now)


def _in_the_way(event: Conflicts) -> str:
    ours, other = event.publication, event.existing
    if other is None:
        return event.why
    if (other.replica, other.order) == (ours.replica, ours.order):
        return "this replica had it whole before, and the bytes might differ now"
    return f"{other} exists"


def refuse(shard: Machines, publication: Publication, why: str) -> None:
    """End the publish that is under way."""
    shard.numbering.refused()
    shard.fail(
        VersionConflict(
            f"can't publish {publication}: {why}. Publish a higher version, "
            "or pass rewind=True to begin a new epoch"
        )
    )


def on_hidden(shard: Machines, now: float, event: Hidden) -> None:
    shard.numbering.withdrawn(event.publication, was_whole=event.was_whole)
    shard.lost = event.lost
    shard.outbox.emit(StopDigests(shard.slot, event.publication))
    shard.let_readers_go(now)


def on_unkept(shard: Machines, now: float, event: Unkept) -> None:
    whom = ", ".join(event.retained)
    shard.fail(
        RetentionLost(
            f"can't give up {event.publication}: it is kept for {whom}, and {event.why}. It is "
            "still published. Raise offload_limit, or pass force=True to lose it"
        )
    )


def on_aborted(shard: Machines, now: float, event: Aborted) -> None:
    shard.outbox.emit(StopDigests(shard.slot, event.publication))
    shard.outbox.emit(PublicationLost(shard.slot, event.publication))
    shard.stop_serving(now, "aborted")


def on_contradicted(shard: Machines, now: float, event: Contradicted) -> None:
    """Its id is used up: whoever pulled it has other bytes than the version has."""
    shard.numbering.withdrawn(event.publication, was_whole=True)
    shard.outbox.emit(StopDigests(shard.slot, event.publication))
    shard.outbox.emit(PublicationLost(shard.slot, event.publication))
    shard.stop_serving(now, "its version has other bytes")
    shard.conflict = VersionConflict(
        f"{event.publication} is not published any more: its bytes are not those of "
        f"{event.standing}, which stands. Replicate version {event.standing.version} to have "
        "those, or publish a higher one"
    )


def on_drained(shard: Machines, now: float, event: Drained) -> None:
    shard.served.drained()
    shard.readers_gone(now)


HANDLERS: dict[type, Callable[..., None]] = {
    SlotEstablished: on_established,
    SlotLost: on_slot_lost,
    GroupClaimsRead: on_claims_read,
    GenerationFormed: on_formed,
    GenerationBroken: on_broken,
    CallAnswered: on_answered,
    CallFailed: on_call_failed,
    Announced: on_announced,
    Conflicts: on_conflict,
    Hidden: on_hidden,
    Unkept: on_unkept,
    Aborted: on_aborted,
    Contradicted: on_contradicted,
    Drained: on_drained,
}
