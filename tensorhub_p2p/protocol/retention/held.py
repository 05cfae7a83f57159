"""What a slot holds, and how far announcing it or giving it up has come.

Rules of this file. Values only; publishing.py and withdrawing.py lead from one state to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.messages import Phase


@dataclass(frozen=True)
class Held:
    """What the slot holds, and as what."""

    publication: Publication
    num_shards: int
    num_bytes: int
    phase: Phase
    was_whole: bool


class RefState(Enum):
    """How far holding it, or giving it up, has come.

    The first three are publishing.py's, the others withdrawing.py's.
    """

    EMPTY = "nothing held"
    ANNOUNCING = "writing the references"
    HELD = "held"
    LOOKING = "reading whether the version is whole"
    MARKING = "writing that it withdraws"
    JUDGING = "reading who needs the version"
    ASKING = "asking other holders to keep the version"
    SEALING = "waiting until all digests are taken"
    RESERVING = "reserving memory for a copy"
    OFFLOADING = "copying the version into host memory"
    ADOPTING = "asking other peers to take a copy"
    WAITING = "waiting for a reader that keeps the version"
    HIDING = "hiding the references"


REVOCABLE = set(RefState) - {
    RefState.EMPTY,
    RefState.ANNOUNCING,
    RefState.HELD,
    RefState.HIDING,
}
"""States of a withdrawal that can be taken back."""
