"""What its deadline means for a verb, and what an interrupt does.

Rules of this file. Every verb ends by its deadline (G8); here is what it leaves behind.

    open       the slot is given back
    publish    once begun: the references are dropped
    ask        once asked: the question is taken back, unless it is decided already
    hold       the references stay, but nobody may count on them
    unpublish  it is still published; past the point of no return the readers get one lease more
    close      it is closed all the same (closing.py)

An interrupt does the same before the time, but takes an unpublish back wherever that can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorhub_p2p.errors import Timeout
from tensorhub_p2p.protocol.shards import closing
from tensorhub_p2p.protocol.shards.running_verb import Verb
from tensorhub_p2p.protocol.shards.verbs import VerbId

if TYPE_CHECKING:
    from tensorhub_p2p.protocol.shards.machines import Machines


def interrupt(shard: Machines, now: float, number: VerbId) -> None:
    """End this verb as if its deadline had come, if it is still the one under way."""
    verb = shard.running.verb
    if verb is not None and verb.number == number:
        expire(shard, now, interrupted=True)
        if shard.running.verb is verb:
            # An unpublish past its point of no return: it goes on alone.
            shard.fail(Timeout(f"{verb.what} was interrupted"))


def expire(shard: Machines, now: float, *, interrupted: bool = False) -> None:
    """The verb's deadline has passed."""
    verb = shard.running.verb
    assert verb is not None
    reason = shard.explanation.waiting_for(verb)
    if verb.name == "close":
        closing.cut(shard, now)
    elif verb.draining:
        shard.served.end()
        shard.done(shard.lost)
    elif verb.name == "unpublish" and not _taken_back(shard, now, interrupted):
        # Too late to take it back: the readers get their one lease, then it is done.
        verb.draining, shard.held_up = True, reason
        verb.deadline = now + shard.pull_config.lease_seconds
        shard.pump(now)
    else:
        _leave(shard, now, verb)
        stays = "; it is still published" if verb.name == "unpublish" else ""
        shard.fail(Timeout(f"{verb.what} timed out: {reason}{stays}"))


def _taken_back(shard: Machines, now: float, interrupted: bool) -> bool:
    """Whether what was being unpublished is still published."""
    if interrupted and shard.references.restore(now):
        return True
    return shard.references.expire(now)


def _leave(shard: Machines, now: float, verb: Verb) -> None:
    """What was begun is ended, or taken back."""
    if verb.name == "open":
        shard.claim.release(now)
        shard.closing.over()
        shard.retaining.set(now, shard.slot, None, lambda _now: None)
    elif verb.name == "ask" and verb.go is None:
        shard.part.calls.withdraw()
    elif verb.name == "publish" and verb.go is None:
        shard.references.drop(now)
        shard.stop_serving(now, "its publish timed out")
    elif verb.name == "hold":
        shard.references.disowned = True
