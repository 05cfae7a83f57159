"""Which chunks a pull fetches from other zones: each chunk crosses once a zone.

Rule of this file. It says what this pull may fetch from another zone now, and who else of the
zone is expected to fetch the rest. It sends nothing, asks nobody and chooses no source: that
is the business of courting.py and dispatch.py, which ask here.

Theory of operation (DESIGN, "Across zones"). There is no lease and no leader: pullers of one
zone come to the same answer as they know the same things.

*Who.* The fellows of a pull are the announced pullers of its zone: those that the directory
names as partial holders of the publication, and that don't say that they pull no more. Sorted
by a hash, the first `carriers` of them (we among them, if we are announced) are the line: only
they fetch from other zones, so that a zone takes few of a far holder's upload slots, and that
everybody can hear what each of them does. Of all chunks that nobody near has, a carrier takes
those for which it has the lowest weight (ownership.py). Who is no carrier lets far holders go
as soon as it hears from the whole line.

*Once.* A chunk that somebody near has does not cross again, nor one that a holder of the
whole, just found, is about to offer. Before it carries anything a pull waits until its own
announcement stands in the directory and was read back, so that of any two pullers at least one
knows of the other; and until the whole line has told what it does. It takes its chunks in the
order of its weights, the lowest first: those it keeps whoever else comes, and a newcomer takes
over hardly any that is under way. What is under way all the same its puller names in its
offers (`carrying`): the newcomer leaves it.

*Nobody waits for ever.* A carrier that owes a chunk shows that it goes on: it has more than
before, or it has something under way (a read that stalls is given up in time, links.py), or a
chunk of its share appears anywhere. One that shows nothing for `carrier_timeout` is late: it
is out of the line, for this pull, until it shows something; its chunks pass to the next in
order. Somebody declared dead is out at once. With nobody left it is all ours. Carriers that we
wait for are asked for their whole state at each renewal of the lease, so that life shows
though there is no news; a holder that leaves such questions unanswered for `source_timeout`
counts as having nothing.

*Own pauses.* After one of half a `carrier_timeout` others may have taken our share: nothing is
carried for two retry intervals, in which they tell what they have.

Views differ while records and offers travel, and two may then fetch the same chunk. That is
harmless, and bounded by what the two have in flight. What bounds this file: one array of
weights for each announced puller that is remembered (`max_candidates`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.identity import Publication
from tensorhub_p2p.protocol.machine import earliest
from tensorhub_p2p.protocol.messages import Phase
from tensorhub_p2p.protocol.pulls.ledger import Ledger
from tensorhub_p2p.protocol.pulls.ownership import weights
from tensorhub_p2p.protocol.pulls.source_table import SourceTable
from tensorhub_p2p.protocol.pulls.sources import (
    ACTIVE,
    ANSWERED,
    Source,
    SourceId,
    SourceState,
)

OUT = frozenset({SourceState.DEAD, SourceState.SHUNNED})
UNASKED = frozenset({SourceState.KNOWN, SourceState.ASKING})


@dataclass(eq=False)
class Fellow:
    """An announced puller of the zone."""

    weights: array[int]
    """For each chunk, and one more for its place in the line."""
    sign: float
    """When it last showed that it goes on, or owed nothing."""
    late: bool = False


def shares(line: dict[SourceId, array[int]], num_chunks: int) -> dict[SourceId, int]:
    """By puller: the chunks for which its weight is the lowest, the lower id on a tie."""
    pullers = sorted(line)
    bits = {puller: bytearray(num_chunks) for puller in pullers}
    columns = zip(*(line[puller][:num_chunks] for puller in pullers), strict=True)
    for chunk, column in enumerate(columns):
        bits[pullers[column.index(min(column))]][chunk] = 1
    return {puller: _packed(ones) for puller, ones in bits.items()}


def _packed(ones: bytearray) -> int:
    """Byte c is 1: bit c."""
    digits = bytes(ones).translate(bytes.maketrans(b"\0\1", b"01"))
    return int(digits[::-1] or b"0", 2)


class Crossing:
    """The part of one pull in what its zone fetches from others. Sets of chunks are ints."""

    def __init__(
        self,
        own: SourceId,
        publication: Publication,
        sources: SourceTable,
        ledger: Ledger,
        config: PullConfig,
    ) -> None:
        self._own = own
        self._publication = publication
        self._sources = sources
        self._ledger = ledger
        self._config = config
        self._begun = False
        self._announced = False
        self._seen = False
        """Our announcement stands in the directory."""
        self._unsettled_until = float("-inf")
        """Until then, at most, we wait to be known and to know what others do."""
        self._woken_until = float("-inf")
        """Until then it is waited for what others did while we stood still."""
        self._fellows: dict[SourceId, Fellow] = {}
        self._met: dict[SourceId, float] = {}
        """Whole holders of the zone that have offered nothing yet, and since when we know them."""
        self._num_chunks = -1
        self._weights = array("Q")
        self._order: list[int] = []
        """Chunks that may be missing, in the order of our weights."""
        self._line: tuple[SourceId, ...] = ()
        self._shares: dict[SourceId, int] = {}
        self._far = False
        """There are holders in other zones."""
        self._near = 0
        """What was to be had in the zone, when it was judged last."""
        self._missing = self._under_way = 0
        """What was to be had nowhere near; what others had on its way."""
        self._due: float | None = None

    # --- inputs --------------------------------------------------------------------------

    def begin(self, now: float, *, announced: bool) -> None:
        """Chunks may be fetched from now on. `announced`: we tell the zone that we pull."""
        self._begun, self._announced = True, announced
        if announced:
            self._unsettled_until = now + self._config.announce_patience

    def seen(self) -> None:
        """Our own announcement stands in the directory, and who stood there before is known."""
        self._seen = self._begun

    def said(self, now: float, source: Source, have: int, carrying: int | None) -> None:
        """A source said what it has, and has under way, before that is noted."""
        fellow = self._fellows.get(source.id)
        if fellow is not None and (carrying or have & ~source.have):
            self._show(now, fellow)
        source.carrying = carrying

    def woke(self, now: float, late: float) -> None:
        """This process did not run for so long: nobody was silent."""
        for fellow in self._fellows.values():
            fellow.sign += late
        for source in self._sources:
            if source.unanswered is not None:
                source.unanswered += late
        if late >= self._config.carrier_timeout / 2:
            self._woken_until = now + 2 * self._config.retry_interval

    def _show(self, now: float, fellow: Fellow) -> None:
        fellow.sign, fellow.late = now, False

    # --- what others ask -----------------------------------------------------------------

    def allowed(self, now: float) -> int:
        """The chunks that may be fetched from another zone, as of the last `judge`."""
        if now < self._unsettled_until or now < self._woken_until:
            return 0
        if not self._line:
            return self._missing
        return self._missing & self._shares.get(self._own, 0) & ~self._under_way

    def first(self, among: int) -> int | None:
        """Of these, the chunk that most surely stays ours whoever comes.

        None if they were all held before, and turned out to be wrong.
        """
        return next((chunk for chunk in self._order if among >> chunk & 1), None)

    def expected(self) -> int:
        """Missing chunks that others of the zone will bring."""
        if not self._far:
            return 0
        others = (share for puller, share in self._shares.items() if puller != self._own)
        return self._missing & sum(others)

    @property
    def is_due(self) -> bool:
        """As far as is known, something has to cross."""
        return self._far and bool(self._missing)

    def awaits(self, source: Source) -> bool:
        """It carries something that is missing here."""
        return source.id in self._line and bool(self._shares[source.id] & self._missing)

    def stands_back(self, source: Source) -> bool:
        """That one is of another zone, and others of ours carry what it has."""
        return source.far and self._others_carry

    def carries(self, source: Source) -> bool:
        """It is in the line: whoever pulls wants to hear from it."""
        return source.id in self._line

    @property
    def lacks_carriers(self) -> bool:
        """Somebody in the line has not been asked."""
        return any(source.state is SourceState.KNOWN for source in self._carriers())

    @property
    def needs_far(self) -> bool:
        """Holders of other zones are to be asked."""
        return self.is_due and not self._others_carry

    @property
    def _others_carry(self) -> bool:
        """We are no carrier, and hear from all that are."""
        if not self._begun or not self._line or self._own in self._line:
            return False
        return all(source.state in ANSWERED for source in self._carriers())

    def _carriers(self) -> Iterator[Source]:
        """Of the others."""
        for puller in self._line:
            source = self._sources.get(puller)
            if source is not None:
                yield source

    def next_wakeup(self) -> float | None:
        """When something may have to be judged anew though nothing has come."""
        return self._due

    # --- judging -------------------------------------------------------------------------

    def judge(self, now: float) -> None:
        """Take in what is known now. To be called before anything is asked."""
        self._due = None
        self._far = any(s.far and (s.listed or s.state in ACTIVE) for s in self._sources)
        if not self._far or not self._ledger.settled:
            self._line, self._shares = (), {}
            self._missing = self._ledger.needed
            return
        self._lay_out()
        self._meet(now)
        near = self._has(now)
        self._missing = self._ledger.needed & ~near
        self._note_new(now, (near | self._ledger.held) & ~self._near)
        self._near = near | self._ledger.held
        self._form_line()
        while self._drop_late(now):
            self._form_line()
        self._settle(now)
        self._under_way = self._others_fetch(now)

    def _lay_out(self) -> None:
        """The grid is another one than before: weights are of chunks."""
        num_chunks = self._ledger.manifest.num_chunks
        if num_chunks != self._num_chunks:
            self._num_chunks, self._near = num_chunks, 0
            self._weights = weights(self._own, num_chunks + 1)
            self._order = sorted(range(num_chunks), key=self._weights.__getitem__)
            self._fellows, self._line, self._shares = {}, (), {}
        while self._order and self._ledger.held >> self._order[0] & 1:
            del self._order[0]

    def _meet(self, now: float) -> None:
        """Who is there."""
        fellows = self._fellows
        self._fellows = {
            source.id: fellows.get(source.id)
            or Fellow(weights(source.id, self._num_chunks + 1), now)
            for source in self._sources
            if self._is_fellow(source)
        }

    def _is_fellow(self, source: Source) -> bool:
        announced = source.listed and source.phase is Phase.PARTIAL and not source.far
        same = source.publication == self._publication and source.carrying is not None
        return announced and same and source.state not in OUT

    def _has(self, now: float) -> int:
        """What is to be had in the zone, or will be in a moment."""
        chunks = 0
        met: dict[SourceId, float] = {}
        for source in self._sources:
            if source.far:
                continue
            if source.state in ANSWERED:
                if not source.failing and not self._is_quiet(now, source):
                    chunks |= source.have & ~source.bad
            elif source.state in UNASKED and source.listed and self._is_whole(source):
                met[source.id] = since = self._met.get(source.id, now)
                if not self._is_over(now, since + self._config.source_timeout):
                    chunks |= (1 << self._num_chunks) - 1
        self._met = met
        return chunks

    def _is_whole(self, source: Source) -> bool:
        return source.phase is Phase.READY and source.publication == self._publication

    def _is_quiet(self, now: float, source: Source) -> bool:
        asked = source.unanswered
        return asked is not None and self._is_over(now, asked + self._config.source_timeout)

    def _is_over(self, now: float, until: float) -> bool:
        """Whether that moment is past; else it is one at which to judge anew."""
        if now < until:
            self._due = earliest(self._due, until)
        return now >= until

    def _settle(self, now: float) -> None:
        """Enough is known once we are, and have heard from the whole line."""
        if self._seen and all(source.state in ANSWERED for source in self._carriers()):
            self._unsettled_until = float("-inf")
        for until in (self._unsettled_until, self._woken_until):
            self._is_over(now, until)

    def _others_fetch(self, now: float) -> int:
        chunks = 0
        for puller, fellow in self._fellows.items():
            source = self._sources.get(puller)
            if source is not None and source.carrying and not fellow.late:
                chunks |= 0 if self._is_quiet(now, source) else source.carrying
        return chunks

    def _note_new(self, now: float, chunks: int) -> None:
        """These have appeared in the zone: who carried them goes on."""
        for puller, share in self._shares.items():
            fellow = self._fellows.get(puller)
            if fellow is not None and share & chunks:
                self._show(now, fellow)

    def _form_line(self) -> None:
        """Who carries, and what."""
        able = {puller: f.weights for puller, f in self._fellows.items() if not f.late}
        if self._announced:
            able[self._own] = self._weights
        line = sorted(able, key=lambda puller: (able[puller][self._num_chunks], puller))
        first = tuple(line[: self._config.carriers])
        if first != self._line:
            self._line = first
            self._shares = shares({puller: able[puller] for puller in first}, self._num_chunks)

    def _drop_late(self, now: float) -> bool:
        """Who owes something and shows nothing is out; True if there is one."""
        dropped = False
        for puller in self._line:
            fellow = self._fellows.get(puller)
            if fellow is None:
                continue
            if not self._shares[puller] & self._missing:
                fellow.sign = now
            elif self._is_over(now, fellow.sign + self._config.carrier_timeout):
                fellow.late = dropped = True
        return dropped
