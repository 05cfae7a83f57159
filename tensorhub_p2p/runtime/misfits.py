"""A `LayoutMismatch` as its caller is told: whose version it is that doesn't fit, and why not.

Rule of this file. It puts into words what is known anyway; it asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from tensorhub_p2p.errors import LayoutMismatch
from tensorhub_p2p.protocol.identity import PeerId, Publication, Slot


class Known(Protocol):
    """Somebody who has a shard of the version."""

    @property
    def peer(self) -> PeerId: ...
    @property
    def slot(self) -> Slot: ...


def misfit(
    model: str,
    publication: Publication,
    holders: Iterable[Known],
    name_of: Callable[[PeerId], str],
    why: str,
) -> LayoutMismatch:
    """The error, with the publisher's peers as far as they are among the holders."""
    peers = sorted({h.peer for h in holders if h.slot.group.replica == publication.replica})
    told = [
        f"peer {name} ({peer})" if (name := name_of(peer)) else f"peer {peer}" for peer in peers
    ]
    publisher = f", which is {', '.join(told)}" if told else ""
    return LayoutMismatch(f"model {model!r}, {publication}{publisher}: {why}")
