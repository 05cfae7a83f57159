"""Which versions are to be kept, for whom: the rule of retention.

Rules of this file. Pure functions over what the registers say; nothing here sends, waits or
remembers. Who may give a copy up, and how, is decided in withdrawing.py.

A *wish* is what one retainer wants kept: the newest k versions, or versions by their number.

    newest(k)      the whole versions of the highest epoch, from the newest down, until k of
                   them are *safe*: each shard is whole at a reliable holder that isn't the
                   publisher's live tensors. So one that isn't safe yet displaces nothing.
    versions(...)  each number's newest epoch

A version is kept by one of its publications, the one that it resolves to: the lowest whole one
of which each shard is whole at a reliable holder. Where none is, all of them are kept, as it
may be any of them that can be had in the end. A retracted version is kept for nobody.

In doubt a version counts as protected: one too many costs memory, one too few is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensorhub_p2p.protocol.directory.records import Registers, values
from tensorhub_p2p.protocol.groups.selection import Holding
from tensorhub_p2p.protocol.identity import PeerId, Publication
from tensorhub_p2p.protocol.messages import Retain

Order = tuple[int, int]
RETAIN = "retain"
"""The name of a peer's register at a retains key."""


@dataclass(frozen=True)
class Wish:
    """What one retainer wants kept."""

    who: str
    newest: int = 0
    versions: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """For the error of whoever can't keep it."""
        wanted = [f"newest {self.newest}"] if self.newest else []
        if self.versions:
            wanted.append("versions " + ", ".join(map(str, self.versions[:5])))
        return f"{self.who} ({'; '.join(wanted)})"


def wishes_in(registers: Registers, names: Mapping[PeerId, str] | None = None) -> tuple[Wish, ...]:
    """What is on record at a retains key, the dead retainers' too; `names` are for errors."""
    names = names or {}
    return tuple(
        Wish(names.get(register.writer, f"peer {register.writer}"), value.newest, value.versions)
        for register, value in values(registers, Retain)
        if value.newest or value.versions
    )


def protected(
    found: Mapping[Publication, Holding], wishes: Iterable[Wish]
) -> dict[Publication, tuple[str, ...]]:
    """The publications that nobody may be the last to give up, and for whom each is kept."""
    by_order: dict[Order, list[Holding]] = {}
    for publication, holding in found.items():
        if holding.whole and holding.slots and not holding.retracted:
            by_order.setdefault(publication.order, []).append(holding)
    reasons: dict[Publication, tuple[str, ...]] = {}
    for wish in wishes:
        wanted = {*_newest(by_order, wish.newest), *_numbered(by_order, wish.versions)}
        for order in sorted(wanted):
            for publication in _kept_by(by_order[order]):
                reasons[publication] = (*reasons.get(publication, ()), wish.reason)
    return reasons


def _newest(by_order: Mapping[Order, list[Holding]], wanted: int) -> Iterable[Order]:
    if not by_order or not wanted:
        return
    epoch = max(by_order)[0]
    for order in sorted((order for order in by_order if order[0] == epoch), reverse=True):
        yield order
        wanted -= any(holding.safe for holding in by_order[order])
        if not wanted:
            return


def _numbered(by_order: Mapping[Order, list[Holding]], numbers: Iterable[int]) -> Iterable[Order]:
    for number in numbers:
        same = [order for order in by_order if order[1] == number]
        if same:
            yield max(same)


def _kept_by(publications: list[Holding]) -> Iterable[Publication]:
    """By which of its publications a version is kept."""
    reliable = [
        holding.publication
        for holding in publications
        if all(holding.copies.get(shard) for shard in range(holding.num_shards))
    ]
    return [min(reliable)] if reliable else [holding.publication for holding in publications]
