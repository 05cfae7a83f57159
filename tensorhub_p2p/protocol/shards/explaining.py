"""What a verb waits for, told to whoever runs into its deadline.

Rule of this file. It asks the machines what they wait for, and reads the versions key to
say what exists; it decides nothing, and no machine depends on it.

A call that nobody can answer is the common case: the wanted version isn't there yet. The
leader waits without a word, so the member looks itself, shortly before the deadline (when:
running_verb.py), and names the newest versions that it found.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.directory.inquiry import Inquiry
from tensorhub_p2p.protocol.directory.records import (
    Liveness,
    Records,
    Registers,
    everywhere,
    versions_key,
)
from tensorhub_p2p.protocol.groups.group_part import GroupPart
from tensorhub_p2p.protocol.groups.selection import describe, holdings
from tensorhub_p2p.protocol.groups.slots import SlotClaimer
from tensorhub_p2p.protocol.shards.publishing import References
from tensorhub_p2p.protocol.shards.running_verb import Verb


class Explanation:
    """Explains the verbs of one handle."""

    def __init__(
        self,
        model: str,
        claim: SlotClaimer,
        part: GroupPart,
        references: References,
        records: Records,
        liveness: Liveness,
    ) -> None:
        self._claim = claim
        self._part = part
        self._references = references
        self._liveness = liveness
        self._existing = Inquiry(records, versions_key(model), self._note)
        self._exists = ""

    def forget(self) -> None:
        """A new call begins: what existed at the last one doesn't count."""
        self._exists = ""

    def look(self, now: float) -> None:
        """The deadline is near: find out what exists."""
        self._existing.look(now, everywhere)

    def stop(self) -> None:
        """The verb has ended."""
        self._existing.stop()

    def _note(self, now: float, registers: Registers) -> None:
        self._exists = describe(holdings(registers, self._liveness.is_gone))

    def waiting_for(self, verb: Verb) -> str:
        if verb.name == "open":
            return self._claim.waiting_for()
        if verb.name == "unpublish" and self._references.held is None:
            return "waiting for its readers"
        if verb.go is not None:
            return self._part.election.waiting_for()
        if verb.name == "ask":
            leader = self._part.leader
            said = f"; {leader.waiting_for()}" if leader is not None else ""
            return (self._exists or "the group's leader has not answered") + said
        return self._references.waiting_for()
