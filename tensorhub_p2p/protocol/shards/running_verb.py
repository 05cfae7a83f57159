"""The one verb that a handle has under way, and its one end.

Rules of this file. A `RunningVerb` belongs to one handle. It knows a verb's number, name
and times, and sees that it ends exactly once, as `Done` or `Failed`; what a verb does is
shard.py's.

    (none)  --begin-->  wants a generation  --go-->  begun  --done, fail-->  (none)

A verb that needs no generation is begun at once. A second verb fails with StateError, and
the first goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_p2p.errors import StateError, TensorHubError
from tensorhub_p2p.protocol.identity import Slot
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.shards.verbs import Done, Failed, VerbId


@dataclass
class Verb:
    """The verb under way."""

    number: VerbId
    name: str
    deadline: float
    what: str
    """For the error: what was asked for."""
    go: Callable[[float], None] | None = None
    """What follows once a generation is in force; None when that is done."""
    explain_at: float | None = None
    """When to read what exists, for the error that is near."""
    look_at: float | None = None
    """When to look whether the generation is still in force, as news of its end may be lost."""
    draining: bool = False
    """Past the deadline, and past the point where it could be taken back."""


class RunningVerb:
    """At most one verb. `ended(verb, failed)` is called before an end is told."""

    def __init__(self, slot: Slot, outbox: Outbox, ended: Callable[[Verb, bool], None]) -> None:
        self.verb: Verb | None = None
        self._slot = slot
        self._outbox = outbox
        self._ended = ended

    def begin(self, verb: Verb, *, closed: bool) -> bool:
        """Make it the verb under way; False (and failed) if there is another, or it is closed."""
        why = ""
        if self.verb is not None:
            why = f"{self.verb.what} is still under way"
        elif closed:
            why = "the handle is closed"
        if why:
            error = StateError(f"{verb.what}: on {self._slot} {why}")
            self._outbox.emit(Failed(verb.number, error))
            return False
        self.verb = verb
        return True

    def go(self, now: float) -> None:
        """A generation is in force: do what the verb wanted it for, once."""
        verb = self.verb
        if verb is not None and verb.go is not None:
            go, verb.go = verb.go, None
            go(now)

    def done(self, result: object) -> None:
        verb = self._end(failed=False)
        if verb is not None:
            self._outbox.emit(Done(verb.number, result))

    def fail(self, error: TensorHubError) -> None:
        verb = self._end(failed=True)
        if verb is not None:
            self._outbox.emit(Failed(verb.number, error))

    def _end(self, *, failed: bool) -> Verb | None:
        verb, self.verb = self.verb, None
        if verb is not None:
            self._ended(verb, failed)
        return verb

    # --- what it waits for ---

    def is_a(self, *names: str) -> bool:
        return self.verb is not None and self.verb.name in names

    @property
    def needs_its_generation(self) -> bool:
        """It has begun what it wanted a generation for."""
        return self.verb is not None and self.verb.go is None and self.is_a("ask", "publish")

    def explains(self, now: float) -> bool:
        """It is time, once, to read what exists."""
        verb = self.verb
        if verb is None or verb.explain_at is None or now < verb.explain_at:
            return False
        verb.explain_at = None
        return True

    def looks(self, now: float, interval: float) -> bool:
        """It is time, each `interval`, to look whether the generation is still in force."""
        verb = self.verb
        if verb is None or verb.look_at is None or now < verb.look_at:
            return False
        verb.look_at = now + interval
        return True

    def next_wakeup(self) -> float | None:
        verb = self.verb
        return earliest(verb.deadline, verb.explain_at, verb.look_at) if verb else None
