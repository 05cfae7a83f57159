"""Every member of a generation that ended fails exactly one verb for it.

Rules of this file. `Notices` belong to one handle. They keep what the handle's next verb
must fail with; which verb that is, shard.py knows.

Theory of operation. When a generation ends, or a call of it, a *notice* is left for the
verb that must fail for it: the one that waits in the generation, else the next. One end may
be noticed twice, as a break and as the next generation: it is told once. Ends that come
before a notice was given are told by the same one, the last.
"""

from __future__ import annotations

from tensorhub_p2p.errors import GroupBroken, GroupDivergence, TensorHubError
from tensorhub_p2p.protocol.groups.calls import CallFailed
from tensorhub_p2p.protocol.identity import Group
from tensorhub_p2p.protocol.messages import GenerationRecord


class Notices:
    """What one handle has still to be told; at most one error."""

    def __init__(self, group: Group) -> None:
        self.pending: TensorHubError | None = None
        """What the next verb fails with, once."""
        self._group = group
        self._told_of: GenerationRecord | None = None
        """The generation whose end some verb fails, or has failed, for."""

    def generation_ended(self, record: GenerationRecord, why: str) -> None:
        """It broke, or the next one replaced it."""
        if self._told_of == record:
            return
        self._told_of = record
        self._leave(
            GroupBroken(
                f"group {self._group} (generation {record.generation}) broke: {why}; "
                "calls go on with its next generation"
            )
        )

    def call_over(self, event: CallFailed) -> None:
        """A call is void, or diverged.

        If the end of the generation is the reason, this very error tells of it.
        """
        kind = GroupDivergence if event.diverged else GroupBroken
        self._leave(kind(f"call {event.call} of {self._group} is void: {event.reason}"))

    def _leave(self, error: TensorHubError) -> None:
        self.pending = error

    def take(self) -> TensorHubError | None:
        """The notice, for the verb that fails with it."""
        notice, self.pending = self.pending, None
        return notice
