"""What the registers of a versions key say that can forbid a write, found without a search.

Rules of this file. An index, kept in step with the cells that it is of (cells.py). It judges
nothing: that is admission.py's, which would else look through all registers at every write,
and thousands of replicas publish under one key.

A publication counts as whole if that was marked, or said by a holder; and as long as all of its
shards stand here as ready, by the publisher's own records: the mark follows a while later.

What it holds is in proportion to the registers; a register that goes takes its entries along.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import TypeVar

from tensorhub_p2p.protocol.directory.registers import Cell
from tensorhub_p2p.protocol.identity import NO_GENERATION, Publication
from tensorhub_p2p.protocol.messages import (
    GenerationRecord,
    Phase,
    Register,
    Retraction,
    VersionRecord,
    WholeMark,
)

Order = tuple[int, int]
Found = Mapping[Cell, Register]
NOTHING: Found = {}
K = TypeVar("K")


class Reasons:
    """The index of one key."""

    def __init__(self) -> None:
        self._records: dict[Publication, dict[Cell, Register]] = {}
        self._replicas: dict[str, dict[Cell, Register]] = {}
        self._fences: dict[str, dict[Cell, Register]] = {}
        self._proofs: dict[Publication, dict[Cell, Register]] = {}
        self._whole: list[Publication] = []
        """The keys of `_proofs`, in order."""
        self._retracted: dict[Order, Register] = {}

    # -- keeping it --

    def put(self, register: Register) -> None:
        value = register.value
        if isinstance(value, VersionRecord):
            _enter(self._records, value.publication, register)
            _enter(self._replicas, value.slot.group.replica, register)
            if value.was_whole or self._completes(value):
                self._prove(value.publication, register)
        elif isinstance(value, WholeMark):
            self._prove(value.publication, register)
        elif isinstance(value, GenerationRecord):
            _enter(self._fences, register.name, register)
        elif isinstance(value, Retraction):
            self._retracted[(value.epoch, value.version)] = register

    def take(self, register: Register) -> None:
        """The register that was put is gone, or replaced."""
        value = register.value
        if isinstance(value, VersionRecord):
            _strike(self._records, value.publication, register)
            _strike(self._replicas, value.slot.group.replica, register)
            self._unprove(value.publication, register)
            if _is_own(value):
                # The others don't make it whole any more.
                for other in list(self._proofs.get(value.publication, NOTHING).values()):
                    if isinstance(other.value, VersionRecord) and not other.value.was_whole:
                        self._unprove(value.publication, other)
        elif isinstance(value, WholeMark):
            self._unprove(value.publication, register)
        elif isinstance(value, GenerationRecord):
            _strike(self._fences, register.name, register)
        elif isinstance(value, Retraction):
            self._retracted.pop((value.epoch, value.version), None)

    def _completes(self, record: VersionRecord) -> bool:
        """Whether this was the last shard that its replica lacked."""
        if not _is_own(record):
            return False
        records = self._records[record.publication].values()
        ready = {
            value.slot.shard
            for register in records
            if isinstance(value := register.value, VersionRecord) and _is_own(value)
        }
        return len(ready) == record.num_shards

    def _prove(self, publication: Publication, register: Register) -> None:
        if publication not in self._proofs:
            insort(self._whole, publication)
        _enter(self._proofs, publication, register)

    def _unprove(self, publication: Publication, register: Register) -> None:
        if register.cell not in self._proofs.get(publication, NOTHING):
            return
        _strike(self._proofs, publication, register)
        if publication not in self._proofs:
            del self._whole[bisect_left(self._whole, publication)]

    # -- asking it --

    def records_of(self, publication: Publication) -> Found:
        """`VersionRecord`s of this publication."""
        return self._records.get(publication, NOTHING)

    def records_by(self, replica: str) -> Found:
        """`VersionRecord`s of this replica's own slots."""
        return self._replicas.get(replica, NOTHING)

    def fences(self, name: str) -> Found:
        """`GenerationRecord`s under this name."""
        return self._fences.get(name, NOTHING)

    def newest_whole(self) -> Publication | None:
        return self._whole[-1] if self._whole else None

    def whole_by(self, replica: str, order: Order) -> Iterator[Publication]:
        """Publications of this version by this replica that were whole."""
        at = bisect_left(self._whole, Publication(*order, replica, NO_GENERATION))
        while at < len(self._whole) and self._whole[at].order == order:
            if self._whole[at].replica != replica:
                return
            yield self._whole[at]
            at += 1

    def proof(self, publication: Publication) -> Register:
        """A register that says that this publication was whole."""
        return next(iter(self._proofs[publication].values()))

    def retraction(self, order: Order) -> Register | None:
        return self._retracted.get(order)


def _is_own(record: VersionRecord) -> bool:
    """The publisher's own, as ready, by the generation that published it."""
    publication = record.publication
    own = record.slot.group.replica == publication.replica
    return own and record.phase is Phase.READY and record.generation == publication.generation


def _enter(index: dict[K, dict[Cell, Register]], under: K, register: Register) -> None:
    index.setdefault(under, {})[register.cell] = register


def _strike(index: dict[K, dict[Cell, Register]], under: K, register: Register) -> None:
    there = index[under]
    del there[register.cell]
    if not there:
        del index[under]
