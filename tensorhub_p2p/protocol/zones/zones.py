"""Zones: one membership pool per zone, and one among the gateways of all of them.

Rules of this file. It decides which pool a message belongs to, and carries news from one to the
other; all else is done by others: a pool by swim.py, who is a gateway by gateways.py and
line.py, the gateways' pool by wide_pool.py, what a zone says of itself by authoring.py and
summaries.py, which zones are gone by fading.py, how a peer gets into its zone by arriving.py and
greeting.py. The events that it hands on are those of the home pool: to those above, members are
members of the own zone.

Theory of operation. Everyone is in the *home* pool, with the peers of its zone and nobody
else. The first two in line are *gateways*, and also in the *wide* pool, with the gateways of
all zones. Each zone's first gateway writes a `ZoneSummary`; it spreads in both pools, and
gateways carry it from one to the other. So a peer that is no gateway sends and receives
nothing between zones but summaries, which are as many as there are zones.

    who calls               whom it reaches           what follows
    a newcomer              a peer of another zone    ZoneGreeting: who speaks for both zones
    a newcomer              a peer of its own zone    it joins the home pool (swim.py)
    a gateway (WideArea)    a gateway                 the wide pool's own business
    a gateway (WideArea)    anyone else               ZoneGreeting: who the gateways are

Whoever meets somebody of its own zone in the wide pool, or in a summary, that isn't in its
home pool calls it home: first peers of a zone that started at once, or the halves of a zone
whose own network was cut. A gateway that home declares dead is suspect in the wide pool at
once, for home sees it from nearer.

Bounds: two pools and one table of summaries, each with its bounds; an answer of two summaries
for each call from elsewhere; calls are paced by reaching.py, and greetings that answer none are
dropped (calls.py). What is malformed, forged, unasked, or claims to be of this zone and isn't,
is counted in `dropped`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from tensorhub_p2p.config import Config
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Event, Outbox, Send, SendTo, earliest
from tensorhub_p2p.protocol.membership.members import GONE, MemberView
from tensorhub_p2p.protocol.membership.summaries import is_obituary, names_few, obituary
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import (
    Evidence,
    Look,
    MemberChanged,
    SeedIsSelf,
    Unheard,
    WasAbsent,
    ZoneNews,
)
from tensorhub_p2p.protocol.messages import (
    Message,
    PushPull,
    PushPullReply,
    RetainSummary,
    Rumour,
    Status,
    VersionHint,
    WideArea,
    ZoneGreeting,
    ZoneSummary,
)
from tensorhub_p2p.protocol.zones.arriving import Arrival, Contact
from tensorhub_p2p.protocol.zones.authoring import Author
from tensorhub_p2p.protocol.zones.calls import Calls
from tensorhub_p2p.protocol.zones.fading import Fading
from tensorhub_p2p.protocol.zones.greeting import HEARSAY, Greeter, is_alone
from tensorhub_p2p.protocol.zones.line import Line
from tensorhub_p2p.protocol.zones.reaching import Pacing
from tensorhub_p2p.protocol.zones.wide_area import dialled_in
from tensorhub_p2p.protocol.zones.wide_pool import WidePool

FIRST_VIEW = 1.0
"""Seconds after the first contact with the zone until which its view surely is here."""
GREETED_SUMMARIES = 4
"""Summaries read of one greeting; an honest one has two."""
CALLS = frozenset({"PushPull", "Ping"})
"""What a peer that is no gateway answers of the wide pool's messages."""


@dataclass(frozen=True)
class GatewayChanged(Event):
    """In the pool of gateways somebody came, or its status changed; seen by gateways only."""

    member: MemberView
    old: Status | None


def _as_before(known: ZoneSummary | None) -> tuple[RetainSummary, ...]:
    return known.retains if known is not None else ()


class Zones:
    """The membership of one peer, in its zone and beyond. Has the machine's face, and Swim's."""

    def __init__(self, info: PeerInfo, config: Config, rng: random.Random) -> None:
        self.me = info
        self.zone = info.zone
        self.outbox = Outbox()
        self.home = Swim(info, config.swim, random.Random(rng.getrandbits(64)))
        """The pool of the own zone."""
        self.wide: WidePool | None = None
        """The pool of all gateways, while this peer is one."""
        self._config = config
        self._rng = rng
        self._dropped: Counter[str] = Counter()
        self._left = False
        self._seeds: list[str] = []
        self._arrival = Arrival(config.zones.alone_after, config.swim.join_retry)
        self._has_arrived = False
        self._line = Line(info, config.zones, lambda: self.home.members()[1:])
        self._greeter = Greeter(self.zone)
        fades_after = config.swim.forget_dead_after
        self.retains: Callable[[ZoneSummary | None], tuple[RetainSummary, ...]] = _as_before
        """What the zone's handles want kept, given what its last summary said of it."""
        self._author = Author(info, config.zones, fades_after, self._lives)
        self._fading = Fading(fades_after)
        self._home_calls = Pacing(config.swim.join_retry)
        self._calls = Calls()

    # -- the machine's face --

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        """Take in a message of either pool, or of a peer of another zone."""
        if self._left:
            return
        if isinstance(message, WideArea):
            self._on_wide_area(now, sender, message)
        elif isinstance(message, ZoneGreeting):
            self._on_greeting(now, sender, message)
        elif isinstance(message, PushPull) and message.info.zone != self.zone:
            self._greet(now, sender, message)
        elif isinstance(message, PushPullReply) and message.info.zone != self.zone:
            self._dropped["view of another zone"] += 1
        else:
            self.home.receive(now, sender, self._of_this_zone(message))
        self._settle(now)

    def tick(self, now: float) -> None:
        """Tick both pools, look for the zone, look at the line and call who is missing."""
        if self._left:
            return
        self.home.tick(now)
        if self.wide is not None:
            self.wide.tick(now)
        self._look_for_zone(now)
        if self._line.next_look is not None and now >= self._line.next_look:
            self._look_at_line(now)
        if self.wide is not None and self.wide.round_is_due(now):
            self._call_missing(now, self.wide)
        self._settle(now)
        self._look_who_faded(now)

    def next_wakeup(self) -> float | None:
        """When something falls due; None for a peer that is alone or has left."""
        if self._left:
            return None
        return earliest(
            self.home.next_wakeup(),
            self._arrival.next_wakeup(),
            self._line.next_look,
            self._fading.next_wakeup(),
            self.wide.next_wakeup() if self.wide is not None else None,
        )

    def notice(self, now: float) -> None:
        """Something else happens now: own pauses are seen before it (`Swim.notice`)."""
        self.home.notice(now)
        if self.wide is not None:
            self.wide.notice(now)
        self._settle(now)

    # -- commands --

    def join(self, now: float, seeds: Sequence[str]) -> None:
        """Look for the cluster at these addresses, of whatever zone (see `Swim.join`)."""
        self._seeds = list(seeds)
        if not seeds:
            self._arrival.arrive(now)
        self.home.join(now, seeds)
        self._look_for_zone(now)
        self._settle(now)

    def adopt(self, now: float, infos: Iterable[PeerInfo]) -> None:
        """Take these (and this peer) for the zone's members since long; for simulations."""
        self.adopt_views(now, [MemberView(info, 0, Status.ALIVE, now) for info in infos])

    def adopt_views(
        self, now: float, views: Sequence[MemberView], summaries: Iterable[ZoneSummary] = ()
    ) -> None:
        """The same, with views that several peers may share, and with zones known as long."""
        summaries = tuple(summaries)
        self.home.adopt_views(now, views, summaries)
        for summary in summaries:
            self._note_life(now, summary)
        self._arrival.arrive(now)
        self._has_arrived = True
        self._line.adopt(now, (view for view in views if view.peer_id != self.me.peer_id))
        self._look_at_line(now)
        self._settle(now)

    def leave(self, now: float) -> None:
        """Say goodbye in both pools, then be silent for good."""
        if self._left:
            return
        self._leave_wide(now)
        self.home.leave(now)
        self._settle(now)
        self._left = True

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        """What the sockets showed of a peer, for whichever pool it is in."""
        if self._left:
            return
        self.home.evidence(now, peer, evidence)
        if self.wide is not None:
            self.wide.evidence(now, peer, evidence)
        self._settle(now)

    def hint(
        self, now: float, model: str, epoch: int, version: int, *, published: bool = False
    ) -> None:
        """Tell every member of the zone that this version exists; others by the summary."""
        self.home.hint(now, model, epoch, version, published=published)

    def compare(self, now: float, peer: PeerId) -> None:
        """This peer of the zone seems to have another view of its members (`Swim.compare`)."""
        self.home.compare(now, peer)
        self._settle(now)

    def expect(self, now: float, peer: PeerId) -> None:
        """This peer was asked something that it may answer with a greeting."""
        self._calls.note(now, peer)

    # -- questions --

    def zones(self) -> tuple[ZoneSummary, ...]:
        """The newest summary of each zone that is there, the own one too once it is written."""
        return tuple(summary for summary in self.home.summaries() if not is_obituary(summary))

    def gateways(self) -> tuple[PeerId, ...]:
        """Who speaks for the own zone, as far as this peer knows; the first one writes."""
        return self._line.gateways

    @property
    def is_gateway(self) -> bool:
        """Whether this peer is in the pool of gateways."""
        return self.wide is not None

    @property
    def dropped(self) -> Counter[str]:
        """Messages, rumours and summaries that were not acted on, by reason."""
        wide = self.wide.dropped if self.wide is not None else Counter[str]()
        return self._dropped + self.home.dropped + wide

    def info(self, peer: PeerId) -> PeerInfo | None:
        """What a peer of the zone, or a gateway of any, told about itself."""
        info = self.home.info(peer)
        if info is None and self.wide is not None:
            info = self.wide.info(peer)
        if info is None:
            named = (gateway for summary in self.zones() for gateway in summary.gateways)
            info = next((gateway for gateway in named if gateway.peer_id == peer), None)
        return info

    def members(self) -> tuple[MemberView, ...]:
        """Everyone known of the zone, this peer first, dead and left ones included."""
        return self.home.members()

    def responsive(self) -> tuple[PeerId, ...]:
        """Those of the zone that may own keys, sorted, this peer included."""
        return self.home.responsive()

    def watched(self) -> tuple[PeerId, ...]:
        """Members to whose sockets this peer keeps a standing connection."""
        return self.home.watched()

    def status(self, peer: PeerId) -> Status | None:
        """None for a peer that isn't of this zone, as far as is known."""
        return self.home.status(peer)

    def wonder(self, peer: PeerId) -> None:
        """Its records are this zone's, and it was never heard of: ask who it is."""
        self.home.wonder(peer)

    def is_reachable(self, peer: PeerId) -> bool:
        """Whether it is of this zone and neither dead nor left."""
        return self.home.is_reachable(peer)

    def is_responsive(self, peer: PeerId) -> bool:
        """Whether it is of this zone, and neither gone nor silent."""
        return self.status(peer) is Status.ALIVE

    def newest(self) -> tuple[VersionHint, ...]:
        """The newest version of each model in the zone, as far as hints tell."""
        return self.home.newest()

    # -- who belongs here --

    def _of_this_zone(self, message: Message) -> Message:
        """The message without introductions of peers of other zones: they don't belong here."""
        field = "view" if isinstance(message, (PushPull, PushPullReply)) else "rumours"
        rumours = getattr(message, field, ())
        own = self._without_strangers(rumours)
        return message if own is rumours else msgspec.structs.replace(message, **{field: own})

    def _without_strangers(self, rumours: tuple[Rumour, ...]) -> tuple[Rumour, ...]:
        own = tuple(r for r in rumours if r.info is None or r.info.zone == self.zone)
        if len(own) == len(rumours):
            return rumours
        self._dropped["rumour of another zone's peer"] += len(rumours) - len(own)
        return own

    # -- callers from elsewhere --

    def _greet(self, now: float, sender: PeerId, message: PushPull) -> None:
        """A peer of another zone says hello: tell it where its zone is, and where this one."""
        if message.info.peer_id != sender:
            self._dropped["forged view"] += 1
            return
        answer = self._greeter.answer(now, message.info, self.zones())
        self.outbox.send(sender, ZoneGreeting(self.me, answer, message.dialled))

    def _on_wide_area(self, now: float, sender: PeerId, message: WideArea) -> None:
        if self.wide is not None:
            self.wide.receive(now, sender, message)
        elif message.kind in CALLS:
            own = self._own_summary()
            summaries = (own,) if own is not None else ()
            self.outbox.send(sender, ZoneGreeting(self.me, summaries, dialled_in(message)))
        else:
            self._dropped["wide-area message, and no gateway"] += 1

    def _on_greeting(self, now: float, sender: PeerId, message: ZoneGreeting) -> None:
        """Somebody that this peer called is of another zone, or no gateway."""
        if message.info.peer_id != sender or sender == self.me.peer_id:
            self._dropped["forged greeting"] += 1
            return
        if not self._calls.await_answer(now, sender, message.dialled):
            self._dropped["greeting that was not asked for"] += 1
            return
        summaries = [s for s in message.summaries[:GREETED_SUMMARIES] if names_few(s)]
        for summary in summaries:
            if summary.counter != HEARSAY:
                self._learn(now, summary)
            if self.wide is not None and not self.wide.reaches(summary.zone):
                self.wide.call(now, summary.gateways)
        if message.info.zone == self.zone:
            self._bring_home(now, message.info)
        elif message.dialled in self._seeds:
            named = [g for s in summaries if s.zone == self.zone for g in s.gateways]
            contact = Contact(message.dialled, sender)
            self._found_elsewhere(now, contact, named, is_alone=is_alone(message))

    # -- being in the zone, and one of its gateways --

    def _found_elsewhere(
        self, now: float, contact: Contact, named: Iterable[PeerInfo], *, is_alone: bool
    ) -> None:
        """A seed is of another zone: that is the cluster, and the way into this zone."""
        if self._has_arrived:
            self.home.note_contact(now, *contact)
            self._meet(now, named)
        else:
            self._arrival.greeted(now, contact, named, is_alone=is_alone)
            self._look_for_zone(now)

    def _look_for_zone(self, now: float, first_view: float = 0.0) -> None:
        """Call who may be there; who has arrived is in line, and has found its cluster."""
        self._call_home(now, self._arrival.due(now))
        if self._arrival.at is None or self._has_arrived:
            return
        self._has_arrived = True
        self._line.enter(now, first_view)
        if self._arrival.contact is not None:
            self.home.note_contact(now, *self._arrival.contact)

    def _look_at_line(self, now: float) -> None:
        """See who the gateways are now, and enter or leave their pool accordingly."""
        if not self._line.look(now, self._incumbents()):
            self._leave_wide(now)
            return
        if self.wide is None:
            self._enter_wide(now)
        self._write_summary(now)
        self._line.look_at(now + self._config.zones.review_interval)

    def _incumbents(self) -> list[PeerId]:
        """Who the zone's summary says are its gateways, and is there."""
        own = self._own_summary()
        named = own.gateways[: self._config.zones.gateways] if own is not None else ()
        return [g.peer_id for g in named if self.status(g.peer_id) is Status.ALIVE]

    def _enter_wide(self, now: float) -> None:
        self.wide = WidePool(self.me, self._config.wan, self._rng, self.outbox)
        own = self._own_summary()
        if own is not None:
            self.wide.tell(now, own)

    def _leave_wide(self, now: float) -> None:
        if self.wide is not None:
            self.wide.leave(now)
            self._dropped += self.wide.dropped
            self.wide = None

    def _call_missing(self, now: float, wide: WidePool) -> None:
        """Call who should be in one of the pools and isn't."""
        infos = [self.home.info(peer) for peer in self.gateways() if peer != self.me.peer_id]
        fellows = [info for info in infos if info is not None]
        foreign = [summary for summary in self.home.summaries() if summary.zone != self.zone]
        at_home = {a for view in self.members() if view.is_reachable for a in view.info.addresses}
        seeds = [seed for seed in self._seeds if seed not in at_home]
        wide.call_missing(now, fellows, foreign, seeds)
        for member in wide.members():
            if member.is_reachable:
                self._bring_home(now, member.info)
        own = self._own_summary()
        if own is not None:
            self._meet(now, own.gateways)

    # -- calling home --

    def _bring_home(self, now: float, info: PeerInfo) -> None:
        """Somebody of this zone lives, whom home may hold for unknown or gone."""
        if info.zone == self.zone and not self.home.is_reachable(info.peer_id):
            self._call_home(now, (info,))

    def _meet(self, now: float, named: Iterable[PeerInfo]) -> None:
        """Call home whoever is said to be of this zone, and home never heard of."""
        self._call_home(now, (info for info in named if self.home.info(info.peer_id) is None))

    def _call_home(self, now: float, infos: Iterable[PeerInfo]) -> None:
        for info in infos:
            for address in info.addresses[:1] if info.zone == self.zone else ():
                if self._home_calls.allows(now, address):
                    self.home.dial(now, address)

    # -- summaries --

    def _own_summary(self) -> ZoneSummary | None:
        """The newest known; it may be an obituary, until this zone has written the next one."""
        return self._newest_of(self.zone)

    def _newest_of(self, zone: str) -> ZoneSummary | None:
        return next((summary for summary in self.home.summaries() if summary.zone == zone), None)

    def _write_summary(self, now: float) -> None:
        """Write it if this peer is the zone's first gateway, or nobody has written any."""
        known = self._own_summary()
        if known is not None and self._line.named[0] != self.me.peer_id:
            return
        infos = [self.home.info(peer) for peer in self._line.named]
        gateways = tuple(info for info in infos if info is not None)
        members = len(self.responsive())
        retains = self.retains(known)
        summary = self._author.write(now, known, gateways, members, self.newest(), retains)
        if summary is not None:
            self._spread(now, summary)

    def _spread(self, now: float, summary: ZoneSummary) -> bool:
        """Tell it in the pools that this peer is in; False if it is no news at home."""
        if self.wide is not None:
            self.wide.tell(now, summary)
        return self.home.tell(now, summary)

    def _learn(self, now: float, summary: ZoneSummary) -> None:
        """Somebody outside the home pool says this of a zone."""
        if self._spread(now, summary):
            self._act_on_news(now, summary)

    def _act_on_news(self, now: float, summary: ZoneSummary) -> None:
        """A summary is news here, and is being spread."""
        self._note_life(now, summary)
        if is_obituary(summary):
            return
        self.outbox.emit(ZoneNews(summary))
        if self.wide is None:
            return
        if summary.zone == self.zone:
            self._meet(now, summary.gateways)
        elif not self.wide.reaches(summary.zone):
            self.wide.hasten(now)

    def _note_life(self, now: float, summary: ZoneSummary) -> None:
        if is_obituary(summary):
            self._fading.is_over(summary.zone)
        elif summary.zone == self.zone:
            self._author.heard(now)
        else:
            self._fading.heard(now, summary.zone)

    def _look_who_faded(self, now: float) -> None:
        """Spread the obituaries of zones from which nothing new has come for too long."""
        for zone in self._fading.tick(now):
            last = self._newest_of(zone)
            if last is not None:
                self._spread(now, obituary(last))
                self._settle(now)

    def _lives(self, peer: PeerId) -> bool:
        """Whether either pool holds this peer for reachable, and home not for silent."""
        if self.status(peer) is Status.UNRESPONSIVE:
            return False
        wide = self.wide is not None and self.wide.is_reachable(peer)
        return wide or self.home.is_reachable(peer)

    # -- what the pools put out --

    def _settle(self, now: float) -> None:
        """Act on what the pools put out, or hand it on, until there is no more."""
        items = self.home.outbox.drain()
        events = self.wide.take_events() if self.wide is not None else []
        while items or events:
            for item in items:
                if not isinstance(item, Event) or not self._act_at_home(now, item):
                    self.outbox.items.append(item)
            for event in events:
                self._act_on_wide(now, event)
            items = self.home.outbox.drain()
            events = self.wide.take_events() if self.wide is not None else []
        for put in self.outbox.items:
            if isinstance(put, SendTo):
                self._calls.note(now, put.address)
            elif isinstance(put, Send) and isinstance(put.message, WideArea):
                self._calls.note(now, put.to)

    def _act_at_home(self, now: float, event: Event) -> bool:
        """Act on an event of the home pool; True if it isn't for those above (any more)."""
        if isinstance(event, ZoneNews):
            self._learn_at_home(now, event.summary)
            return True
        if isinstance(event, SeedIsSelf):
            self._seeds = [seed for seed in self._seeds if seed != event.address]
            self._arrival.may_be_alone(now)
        elif isinstance(event, WasAbsent):
            self._fading.hold(now)
        elif isinstance(event, MemberChanged):
            self._member_changed(now, event.member)
        return False

    def _learn_at_home(self, now: float, summary: ZoneSummary) -> None:
        if self.wide is not None:
            self.wide.tell(now, summary)
        self._act_on_news(now, summary)

    def _member_changed(self, now: float, member: MemberView) -> None:
        self._line.note(now, member)
        if member.is_reachable and not self._has_arrived:
            self._arrival.arrive(now)
            self._look_for_zone(now, FIRST_VIEW)
        if self.wide is not None and member.status in GONE:
            self.wide.evidence(now, member.peer_id, Evidence.REFUSED)

    def _act_on_wide(self, now: float, event: Event) -> None:
        """Of the gateways' pool, only news is for others; who is in it is for this peer."""
        if isinstance(event, MemberChanged):
            self._gateway_changed(now, event.member, event.old)
        elif isinstance(event, ZoneNews):
            self._learn(now, event.summary)
        elif isinstance(event, WasAbsent):
            self._fading.hold(now)
        elif isinstance(event, (Look, Unheard)):
            self.outbox.emit(event)

    def _gateway_changed(self, now: float, member: MemberView, old: Status | None) -> None:
        """Who comes, or comes back, is told what this zone says: that may be news no more."""
        self.outbox.emit(GatewayChanged(member, old))
        if not member.is_reachable:
            return
        self._bring_home(now, member.info)
        own = self._own_summary()
        if (old is None or old in GONE) and own is not None and self.wide is not None:
            self.wide.tell_one(member.peer_id, own)
