"""Which publication answers a question: reading the registers of the versions key.

Rules of this file. Pure functions over registers; nothing here sends, waits or remembers.

A publication is *whole* once every shard of the publishing replica was ready at the same
time (G3): somebody marked it, or a holder says it was, or the registers show it now. It is
*covered* when each shard is ready at some reachable holder. Only a whole and covered
publication answers a question, and none whose version was retracted. Where several publications
of one version are whole, the lowest one does: data-parallel trainers publish the same bytes side
by side. Where they turn out to be other bytes the lowest one stands, and no other answers: a
higher one is *contradicted* once both said what they consist of (shards/comparing.py). It stays so
after it was hidden, as others may have pulled it; but one that nobody has contradicts nobody.

The registers may be those of several zones. `stands` says when the own zone's answer needs no
look at the others, `places` in which zones a publication has to be pinned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mmh3

from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.protocol.directory.records import Registers, values
from tensorhub_p2p.protocol.identity import Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import (
    Decision,
    Phase,
    Question,
    Retraction,
    Source,
    VersionRecord,
    WholeMark,
)

_SELECTOR = re.compile(r"latest(-([0-9]{1,9}))?|(>)?([0-9]{1,18})")
Floor = tuple[int, int]
"""The (epoch, version) below which "latest" does not go: a group's last answer."""
NO_FLOOR: Floor = (-1, -1)
Places = Mapping[str, tuple[int, ...]]
"""Zones in which a publication is to be kept, each with the shards; () stands for all of them."""


Sources = Mapping[int, tuple[Source, ...]]
"""By shard: whom a group's pulls may begin with, before they have asked who else holds it."""

MAX_SOURCES = 4
"""Of one shard."""
MAX_DESCRIBED = 5
"""Publications that an error message names."""


def selector_of(wanted: int | str) -> str:
    """The canonical text of what a user asks for: `7`, `"7"`, `"latest"`, `"latest-2"`.

    Raises ConfigError for anything else.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, (int, str)):
        raise ConfigError(f"{wanted!r} is no version: use an integer, 'latest' or 'latest-k'")
    text = str(wanted)
    match = _SELECTOR.fullmatch(text)
    if match is None or match[3]:
        raise ConfigError(f"{wanted!r} is no version: use an integer >= 0, 'latest' or 'latest-k'")
    if match[4]:
        return str(int(match[4]))
    return "latest" if not match[2] or int(match[2]) == 0 else f"latest-{int(match[2])}"


def newer_than(version: int) -> str:
    """The selector of `wait_for(newer_than=version)`."""
    return f">{version}"


@dataclass(frozen=True)
class Copy:
    """All of one shard, at a reachable peer that means to stay (no spot one)."""

    peer: PeerId
    slot: Slot
    """By which the peer holds it."""
    offload: bool
    """Kept for others, in host memory."""
    live: bool
    """The tensors of the replica that published it: they change when it goes on."""
    withdrawing: bool
    """The peer is about to give it up."""


@dataclass
class Holding:
    """What the registers say of one publication."""

    publication: Publication
    num_shards: int
    whole: bool = False
    marked: bool = False
    """Its mark is on W owners for sure: a record says that it was whole, and nobody writes that
    before. A mark that was merely read may be on one owner, and be refused by the others."""
    publishing: set[int] = field(default_factory=set)
    """Shards that the publishing replica's own slots have ready."""
    ready: dict[int, set[Source]] = field(default_factory=dict)
    """By shard: reachable peers that have all of it, and by which slot."""
    slots: int = 0
    """Slots that hold it, in whole or in part."""
    retracted: bool = False
    """Its version is bad, and to be used by nobody."""
    copies: dict[int, tuple[Copy, ...]] = field(default_factory=dict)
    """By shard: what a withdrawal may count on, or ask for a promise."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """By shard: the digest of its content, once the publisher has said it."""
    has_twins: bool = False
    """Somebody has the version as another replica published it."""
    contradicted_by: Publication | None = None
    """A lower publication of the version that has other bytes, and stands."""

    @property
    def withheld(self) -> bool:
        """Nobody is to get it, whoever has it."""
        return self.retracted or self.contradicted_by is not None

    @property
    def covered(self) -> bool:
        return all(self.ready.get(shard) for shard in range(self.num_shards))

    @property
    def reliable(self) -> dict[int, set[PeerId]]:
        """By shard: peers that have all of it, mean to stay, and don't withdraw."""
        return {
            shard: {copy.peer for copy in copies if not copy.withdrawing}
            for shard, copies in self.copies.items()
        }

    @property
    def safe(self) -> bool:
        """Each shard is whole at a reliable holder, other than in the publisher's live tensors."""
        return all(
            any(not copy.live and not copy.withdrawing for copy in self.copies.get(shard, ()))
            for shard in range(self.num_shards)
        )

    def shards_in(self, zone: str, zone_of: Callable[[PeerId], str]) -> frozenset[int]:
        """The shards that are ready at holders in this zone."""
        return frozenset(
            shard
            for shard, sources in self.ready.items()
            if any(zone_of(source.peer) == zone for source in sources)
        )

    def covered_at(self, places: Places, zone_of: Callable[[PeerId], str]) -> bool:
        """Whether each of the places still has what it is there for."""
        return all(
            self.shards_in(zone, zone_of).issuperset(shards or range(self.num_shards))
            for zone, shards in places.items()
        )


def holdings(registers: Registers, is_gone: Callable[[PeerId], bool]) -> dict[Publication, Holding]:
    """Every publication that the registers speak of."""
    found: dict[Publication, Holding] = {}
    for _, mark in values(registers, WholeMark):
        holding = found.setdefault(mark.publication, Holding(mark.publication, mark.num_shards))
        holding.whole = True
    for register, record in values(registers, VersionRecord):
        publication = record.publication
        holding = found.setdefault(publication, Holding(publication, record.num_shards))
        if record.was_whole:
            holding.whole = holding.marked = True
        if record.digests and record.slot.group.replica == publication.replica:
            holding.digests[record.slot.shard] = record.digests
        if is_gone(register.writer) or record.phase is Phase.HIDDEN:
            continue
        _count(holding, register.writer, record)
    held = Counter(holding.publication.order for holding in found.values() if holding.slots)
    retracted = {(bad.epoch, bad.version) for _, bad in values(registers, Retraction)}
    for holding in found.values():
        holding.whole = holding.whole or len(holding.publishing) == holding.num_shards
        holding.retracted = holding.publication.order in retracted
        holding.has_twins = held[holding.publication.order] > 1
    _compare(found)
    return found


def _compare(found: Mapping[Publication, Holding]) -> None:
    """Find those whose bytes are not those of the lowest whole publication of the version.

    Only of replicas that are cut alike: a shard of two is no shard of four.
    """
    said: dict[tuple[Floor, int], dict[int, tuple[bytes, Publication]]] = {}
    for publication in sorted(p for p, holding in found.items() if holding.digests):
        holding = found[publication]
        before = said.setdefault((publication.order, holding.num_shards), {})
        for shard, digest in holding.digests.items():
            content, other = before.get(shard, (digest, None))
            if content != digest:
                holding.contradicted_by = other
        if holding.contradicted_by is None and holding.slots and holding.whole:
            for shard, digest in holding.digests.items():
                before.setdefault(shard, (digest, publication))


def _count(holding: Holding, writer: PeerId, record: VersionRecord) -> None:
    """One slot that holds the publication, at a reachable peer."""
    shard = record.slot.shard
    own = record.slot.group.replica == holding.publication.replica
    holding.slots += 1
    if record.phase is Phase.READY:
        holding.ready.setdefault(shard, set()).add(Source(writer, record.slot))
        if own and record.generation == holding.publication.generation:
            holding.publishing.add(shard)
    if record.phase is not Phase.PARTIAL and not record.spot:
        withdrawing = record.phase is Phase.WITHDRAWING
        live = own and not record.offload
        copy = Copy(writer, record.slot, record.offload, live, withdrawing)
        holding.copies[shard] = (*holding.copies.get(shard, ()), copy)


def select(question: Question, found: dict[Publication, Holding], floor: Floor) -> Holding | None:
    """The holding that answers the question now, or None while nothing does."""
    usable = [h for h in found.values() if h.whole and h.covered and not h.withheld]
    match = _SELECTOR.fullmatch(question.selector)
    if not usable or match is None:
        return None
    epoch = max(h.publication.epoch for h in usable)
    if match[4] and not match[3]:
        return _exact(int(match[4]), usable)
    if match[3]:
        # A rewind may have gone below `version` already: then the new epoch is what is newer.
        version = int(match[4])
        usable = [h for h in usable if h.publication.version > version or epoch > max(floor[0], 0)]
        return _back(0, [h for h in usable if h.publication.order >= floor], epoch)
    back = int(match[2] or 0)
    return _back(
        back, usable if back else [h for h in usable if h.publication.order >= floor], epoch
    )


def _exact(version: int, usable: list[Holding]) -> Holding | None:
    """An integer means the newest epoch that has it."""
    same = [h for h in usable if h.publication.version == version]
    epoch = max((h.publication.epoch for h in same), default=0)
    return _lowest([h for h in same if h.publication.epoch == epoch])


def _back(steps: int, usable: list[Holding], epoch: int) -> Holding | None:
    """The newest version of the epoch, or one that many versions before it."""
    inside = [h for h in usable if h.publication.epoch == epoch]
    versions = sorted({h.publication.version for h in inside}, reverse=True)
    if steps >= len(versions):
        return None
    return _lowest([h for h in inside if h.publication.version == versions[steps]])


def _lowest(same_version: list[Holding]) -> Holding | None:
    return min(same_version, key=lambda h: h.publication, default=None)


def stands(question: Question, answer: Holding, elsewhere: tuple[int, int] | None) -> bool:
    """Whether other zones can't have a better answer than this one of the own zone.

    `elsewhere` is the highest (epoch, version) that any of them says it has.
    """
    match = _SELECTOR.fullmatch(question.selector)
    if elsewhere is None or match is None:
        return True
    if match[4] and not match[3]:
        return answer.publication.epoch >= elsewhere[0]
    if int(match[2] or 0):
        return False  # the versions between are not told
    return answer.publication.order >= elsewhere


def places(
    answer: Holding, zone_of: Callable[[PeerId], str], home: str, *, home_first: bool = True
) -> Places:
    """Where a pin belongs: in a zone that covers the publication alone, or in all it needs.

    The own zone comes before others, and those by name, so that all who ask choose alike; it
    comes last where it can't be read from (`home_first`).
    """
    zones = {zone_of(source.peer) for sources in answer.ready.values() for source in sources}
    line = sorted(zones, key=lambda zone: ((zone != home) is home_first, zone))
    for zone in line:
        if answer.covered_at({zone: ()}, zone_of):
            return {zone: ()}
    needed: dict[str, tuple[int, ...]] = {}
    missing = set(range(answer.num_shards))
    for zone in line:
        there = missing & answer.shards_in(zone, zone_of)
        if there:
            needed[zone] = tuple(sorted(there))
            missing -= there
    return needed


def decision_of(holding: Holding) -> Decision:
    return Decision(holding.publication, holding.num_shards)


def sources_for(group: Group, answer: Holding, is_near: Callable[[PeerId], bool]) -> Sources:
    """Whom the group's pulls may begin with: a few holders of each shard, of those that are near.

    Each group takes others, by a hash, so that thousands of them spread. None where replicas
    published the version side by side: a pull reads from all of these, as the directory says.
    """
    if answer.has_twins:
        return {}

    def place(slot: Slot, source: Source) -> tuple[int, Source]:
        return mmh3.hash64(f"{slot}\0{source.peer}\0{source.slot}", signed=False)[0], source

    found: dict[int, tuple[Source, ...]] = {}
    for shard, ready in answer.ready.items():
        near = [place(Slot(group, shard), source) for source in ready if is_near(source.peer)]
        found[shard] = tuple(source for _, source in sorted(near)[:MAX_SOURCES])
    return found


def describe(found: dict[Publication, Holding]) -> str:
    """What exists, for the error of a question that nothing answers."""
    held = [holding for holding in found.values() if holding.slots]
    if not held:
        whole = (h.publication for h in found.values() if h.whole and not h.retracted)
        newest = max(whole, default=None)
        gone = f" any more; {newest} was the newest" if newest is not None else ""
        return f"nothing is published{gone}"
    lines = []
    for holding in sorted(held, key=lambda h: h.publication, reverse=True)[:MAX_DESCRIBED]:
        missing = [s for s in range(holding.num_shards) if not holding.ready.get(s)]
        state = "whole" if holding.whole else "not whole yet"
        if holding.contradicted_by is not None:
            state = f"other bytes than {holding.contradicted_by}"
        state = "retracted" if holding.retracted else state
        gap = f", no reachable holder of shard {', '.join(map(str, missing))}" if missing else ""
        lines.append(f"{holding.publication} ({state}{gap})")
    return "there is " + "; ".join(lines)
