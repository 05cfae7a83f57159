"""Attempts at one group call: when a handle whose pulls fail gives the call up.

Rules of this file. `Attempts` belong to one handle. They remember the call whose pull failed last,
and how far its pulls came. They move nothing and tell nobody: who pulls reports here, and ends the
call for the whole group (`ShardNode.give_up`) when that is what is said.

Theory of operation. A retry of a call gets the same publication, so a call that can't succeed
has to be given up some time, or it holds its version back and the group up:

    the pull found that nobody can have it (VersionUnavailable ...)  give it up
    it timed out, and attempts have brought nothing for `patience`   give it up: many short attempts
                                                                     must find out what one long
                                                                     one does
    it failed otherwise                                              it may be asked again
    the user goes on with something else                             a group of one gives it up; in
                                                                     a larger one the others decide
                                                                     too, whether they ask again

Bytes prove progress only if there are more of them than in any attempt before: two torn handles can
feed each other the same chunks for ever.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.shards.verbs import Answer


class Attempts:
    """Of one handle, at one call at a time. `patience` in seconds (`unavailable_after`)."""

    def __init__(self, patience: float, *, alone: bool) -> None:
        self.failed: Answer | None = None
        """The call whose pull failed last, as long as it may be asked again."""
        self._patience = patience
        self._alone = alone
        self._furthest = 0
        """Bytes that the best attempt at it brought."""
        self._stalled = 0.0
        """Seconds of attempts since the last byte of that one."""

    def fail(
        self,
        answer: Answer,
        *,
        moved: int,
        lasted: float,
        quiet: float,
        timed_out: bool,
        unavailable: bool,
    ) -> bool:
        """A pull of this answer brought so many bytes in so many seconds; True: give it up.

        In the last `quiet` of these seconds nothing came.
        """
        if self.failed != answer:
            self.failed, self._furthest, self._stalled = answer, 0, 0.0
        further = moved > self._furthest
        self._furthest = max(self._furthest, moved)
        self._stalled = quiet if further else self._stalled + lasted
        in_vain = timed_out and not further and self._stalled >= self._patience
        return unavailable or in_vain

    def succeed(self) -> None:
        """It was brought, whole."""
        self.failed = None

    def leave(self) -> Answer | None:
        """The handle goes on with something else; a call to give up, if there is one."""
        failed, self.failed = self.failed, None
        return failed if self._alone else None
