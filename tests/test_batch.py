"""What other threads tell the control thread of slots: in order, and many at a time."""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.protocol.identity import Generation, Group, Publication, Slot
from tensorhub_p2p.runtime.digests import Batch

SLOT, OTHER = (Slot(Group("m", name), 0) for name in ("a", "b"))
ONE, TWO = (Publication(0, version, "a", Generation(1, 1)) for version in (1, 2))


def test_what_is_added_meanwhile_is_told_in_one_call_and_apart_by_publication() -> None:
    posted: list[Callable[[float], object]] = []
    told: list[tuple[float, Slot, Publication, list[int]]] = []
    batch: Batch[int] = Batch(posted.append, lambda *what: told.append(what))
    for slot, publication, item in (
        (SLOT, ONE, 1),
        (SLOT, ONE, 2),
        (SLOT, TWO, 3),
        (OTHER, TWO, 4),
        (SLOT, TWO, 5),
    ):
        batch.add(slot, publication, item)
    [flush] = posted
    flush(7.0)
    assert told == [
        (7.0, SLOT, ONE, [1, 2]),
        (7.0, SLOT, TWO, [3]),
        (7.0, OTHER, TWO, [4]),
        (7.0, SLOT, TWO, [5]),
    ]
    batch.add(SLOT, ONE, 6)
    assert len(posted) == 2, "what comes later is a call of its own"
