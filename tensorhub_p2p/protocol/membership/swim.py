"""Membership of one zone (SWIM and Lifeguard): who is there, silent, gone.

Rules of this file. It brings the parts together: it takes messages in, has them judged, and
sends what is due. Which claim is believed is opinions.py's rule, who is silent probing.py's,
what silence and evidence mean judging.py's, how long a suspect may still refute
suspicion.py's, what rides on which message gossip.py's and dissemination.py's, when views
are compared anti_entropy.py's, how far to trust the own clockwork health.py's, and where to
look for the lost seeds.py's. It knows nothing of rings, groups or versions; version hints and
zone summaries pass through. Peers of other zones never get here (zones.py).

Theory of operation. States of a member, and what leads from one to the next:

    ALIVE ──silent for a whole probe, its sockets show nothing──▶ SUSPECT ──verdict──▶ DEAD
    ALIVE, SUSPECT ──silent, its sockets answer──▶ UNRESPONSIVE ──verdict──▶ DEAD
    ALIVE ──its address refuses──▶ SUSPECT
    ALIVE ──silent, and it was reported dead, or its address is another's──▶ DEAD
    any   ──the member says so at a higher incarnation (refutation)──▶ ALIVE
    any   ──someone else joins from its address──▶ DEAD
    any   ──it says that it leaves──▶ LEFT

Whoever probes a member in vain looks at its sockets. Besides, each peer watches the
`watched_neighbours` members that follow it in the order of ids: a standing connection that
ends is news within milliseconds. A suspect is probed at once by those that watch it.

Messages. `Ping`, `PingRequest`, `Ack`, `Nack` probe, and carry rumours. `Gossip` goes to
`gossip_nodes` random members every `gossip_interval` while there is news; the first news
after a calm leaves at once. Views are compared by `ViewDigest`, `PushPull` and its reply.
Whoever writes to a peer that it holds for silent or gone tells it so first (Lifeguard's
buddy system), for it to refute.

Own pauses. When a call comes more than `pause_after` late, this process did not run. It then
extends all verdicts by the gap, and by a probe's time at least, probes anew and compares views.

Bounds: tables by `max_members`, rumours by one a member, messages by their byte budgets,
views by the table. What is malformed, unasked for or too much is counted in `dropped`.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.membership.anti_entropy import AntiEntropy
from tensorhub_p2p.protocol.membership.gossip import Gossiper
from tensorhub_p2p.protocol.membership.health import LocalHealth
from tensorhub_p2p.protocol.membership.hints import Hints
from tensorhub_p2p.protocol.membership.judging import Judge
from tensorhub_p2p.protocol.membership.members import (
    GONE,
    PARTS,
    Members,
    MemberView,
    fingerprint,
    part_of,
)
from tensorhub_p2p.protocol.membership.opinions import Opinions
from tensorhub_p2p.protocol.membership.probing import Prober
from tensorhub_p2p.protocol.membership.seeds import Seeds
from tensorhub_p2p.protocol.membership.summaries import Summaries
from tensorhub_p2p.protocol.membership.swim_events import (
    Evidence,
    Joined,
    Left,
    Look,
    MemberForgotten,
    NewerVersion,
    SeedIsSelf,
    WasAbsent,
    ZoneNews,
)
from tensorhub_p2p.protocol.messages import (
    Ack,
    Gossip,
    Message,
    Nack,
    Ping,
    PingRequest,
    PushPull,
    PushPullReply,
    Rumour,
    Status,
    VersionHint,
    ViewDigest,
    ZoneSummary,
)

PROBED_OF_A_VIEW = 3
"""Of the deaths that a view reports: those of a healed partition are too many to be probed."""


class Swim:
    """The membership of one peer. Has the machine's face."""

    def __init__(self, info: PeerInfo, config: SwimConfig, rng: random.Random) -> None:
        self.me = info
        self.outbox = Outbox()
        self.dropped: Counter[str] = Counter()
        """Messages and rumours that were not acted on, by reason."""
        self._config = config
        self._rng = rng
        self._left = False
        self._members = Members(config.max_members)
        self._health = LocalHealth(config.max_local_health)
        self._opinions = Opinions(
            info, config, self._members, self.outbox, self.dropped, self._health, self._changed
        )
        self._prober = Prober(config, rng, self._members, self._health)
        self._judge = Judge(info, config, self._members, self._prober, self._opinions, self.outbox)
        self._hints = Hints(config.max_hinted_models)
        self._summaries = Summaries(config.max_zones, self.dropped)
        self._seeds = Seeds(config, rng, self._members)
        self._gossip = Gossiper(
            self._own_claim,
            self._fingerprint,
            self._members,
            self._opinions.rumours,
            self._hints,
            self._summaries,
            config,
            rng,
            self.outbox,
        )
        self._views = AntiEntropy(
            info,
            self._own_claim,
            self.view,
            self._part_fingerprints,
            self._members,
            self._hints,
            self._summaries,
            config,
            rng,
            self.outbox,
        )
        self._found: PeerId | None = None
        """Who answered at a seed, or where others of the cluster are."""
        self._has_view = False
        """Some member told its view, or there is none."""
        self._sent_to = ""
        """The address of the member that a busy one named last."""
        self._last_call: float | None = None
        self._planned: float | None = None
        self._responsive: tuple[PeerId, ...] | None = None
        self._watched: tuple[PeerId, ...] | None = None
        self._handlers: dict[type[Message], Callable[[float, PeerId, Any], None]] = {
            Ping: self._on_ping,
            PingRequest: self._on_ping_request,
            Ack: self._on_ack,
            Nack: self._on_nack,
            Gossip: self._on_gossip,
            ViewDigest: self._on_view_digest,
            PushPull: self._on_push_pull,
            PushPullReply: self._on_push_pull_reply,
        }

    # -- the machine's face --

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        """Take in a membership message; others are not for this machine."""
        handler = self._handlers.get(type(message))
        if handler is None or self._left:
            return
        self._notice_pause(now)
        if sender != self.me.peer_id:
            self._judge.heard(now, sender)
        incarnation = self._opinions.incarnation
        handler(now, sender, message)
        if self._opinions.incarnation > incarnation:
            self._gossip.gossip_to(sender)
        self._views.introduce(now, sender)
        self._finish(now)

    def tick(self, now: float) -> None:
        """Probe, judge, gossip, compare views and dial, as far as each is due."""
        if self._left:
            return
        self._notice_pause(now)
        for address in self._seeds.due(now):
            self._views.dial(now, address, joining=not self._seeds.joined)
        self._members.forget_gone(now - self._config.forget_dead_after)
        for silence in self._prober.tick(now):
            self._judge.silence(now, silence)
        self._judge.pronounce(now)
        self._views.tick(now)
        self._gossip.tick(now)
        self._finish(now)

    def next_wakeup(self) -> float | None:
        """When something falls due; None for a peer that is alone or has left."""
        return None if self._left else self._planned

    def notice(self, now: float) -> None:
        """Something else happens now: if this process did not run, that is the time to see it."""
        if not self._left:
            self._notice_pause(now)

    # -- commands --

    def join(self, now: float, seeds: Sequence[str]) -> None:
        """Look for the cluster at these addresses ("host:port") until `Joined`, and after.

        Emits `SeedIsSelf` for each that turns out to be this peer's own; a caller all of
        whose seeds are its own is a cluster of one.
        """
        self._seeds.name(now, seeds)
        for address in seeds:
            if address in self.me.addresses and self._seeds.note_own(address):
                self.outbox.emit(SeedIsSelf(address))
        self.tick(now)

    def dial(self, now: float, address: str) -> None:
        """Say hello to whoever of this zone lives at this address, and join it if it answers."""
        if not self._left and address not in self.me.addresses:
            self._notice_pause(now)
            self._views.dial(now, address, joining=True)
            self._finish(now)

    def note_contact(self, now: float, dialled: str, peer: PeerId) -> None:
        """A peer of another zone answered at this address: the cluster is found.

        Those members that are known by now are asked for their view first, if none told it.
        """
        self._notice_pause(now)
        self._seeds.note_elsewhere(dialled)
        self._note_found(dialled, peer)
        if not self._members.num_reachable:
            self._has_view = True
        elif not self._has_view:
            for member in self._members.sample(self._rng, 1):
                self._ask_for_view(now, self._members.get(member))
        self._may_have_joined(now)
        self._finish(now)

    def adopt(self, now: float, infos: Iterable[PeerInfo]) -> None:
        """Take these (and this peer) for members since long, alive, with nothing to be said.

        For simulations, which can't wait until thousands have joined.
        """
        views = [MemberView(info, 0, Status.ALIVE, now) for info in infos]
        self.adopt_views(now, views)

    def adopt_views(
        self, now: float, views: Sequence[MemberView], summaries: Iterable[ZoneSummary] = ()
    ) -> None:
        """The same, with views that several peers may share, and with zones known as long."""
        for summary in summaries:
            self._summaries.adopt(summary)
        self._members.adopt(views, self.me.peer_id)
        self._prober.adopt(now)
        self._judge.adopt(now)
        self._views.start(now)
        self._seeds.joined = self._has_view = True
        self._responsive = self._watched = None
        self._finish(now)

    def leave(self, now: float) -> None:
        """Say goodbye to several members at once, then be silent for good."""
        if self._left:
            return
        self._left = True
        told = self._members.sample(self._rng, self._config.leave_fanout)
        for peer in dict.fromkeys((*self.watchers(), *told)):
            self._opinions.rumours.put(self.me.peer_id, self._opinions.claim(Status.LEFT))
            self._gossip.gossip_to(peer)
        self._responsive = self._watched = None
        self.outbox.emit(Left())

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        """What the sockets showed of a peer; unknown and gone peers are ignored."""
        if self._left or not self._members.is_reachable(peer):
            return
        self._notice_pause(now)
        self._judge.evidence(now, peer, evidence)
        self._finish(now)

    def hint(
        self, now: float, model: str, epoch: int, version: int, *, published: bool = False
    ) -> None:
        """Tell every member that this version exists, unless a newer one is known (hints.py)."""
        self._hints.found(now, model, epoch, version, published=published)
        self._plan()

    def tell(self, now: float, summary: ZoneSummary) -> bool:
        """Tell every member what a zone says of itself; False if that is no news here."""
        self._notice_pause(now)
        news = self._summaries.note(summary)
        self._finish(now)
        return news

    def compare(self, now: float, peer: PeerId) -> None:
        """This peer seems to have another view: find out where, if there is time for it now."""
        if not self._left:
            self._notice_pause(now)
            self._views.differs(now, peer)
            self._finish(now)

    # -- questions --

    def members(self) -> tuple[MemberView, ...]:
        """Everyone known, this peer first, dead and left ones included."""
        status = Status.LEFT if self._left else Status.ALIVE
        own = MemberView(self.me, self._opinions.incarnation, status, -math.inf)
        return (own, *self._members)

    def responsive(self) -> tuple[PeerId, ...]:
        """Those that may own keys, sorted: alive and not silent, this peer included."""
        if self._responsive is None:
            own = () if self._left else (self.me.peer_id,)
            others = (v.peer_id for v in self._members if v.status is Status.ALIVE)
            self._responsive = tuple(sorted((*own, *others)))
        return self._responsive

    def watched(self) -> tuple[PeerId, ...]:
        """Members to whose sockets this peer keeps a standing connection: the next by id."""
        if self._watched is None:
            self._watched = self._neighbours(self._config.watched_neighbours)
        return self._watched

    def watchers(self) -> tuple[PeerId, ...]:
        """Members that keep one to this peer, if their views are like its own."""
        return self._neighbours(-self._config.watched_neighbours)

    def info(self, peer: PeerId) -> PeerInfo | None:
        """What a peer told about itself; also of gone ones that are still remembered."""
        if peer == self.me.peer_id:
            return self.me
        view = self._members.get(peer)
        return view.info if view is not None else None

    def status(self, peer: PeerId) -> Status | None:
        """None for a peer that was never heard of, or was forgotten."""
        if peer == self.me.peer_id:
            return Status.LEFT if self._left else Status.ALIVE
        last = self._members.rank(peer)
        return last[1] if last is not None else None

    def wonder(self, peer: PeerId) -> None:
        """Somebody found its records, and it was never heard of: ask others who it is."""
        if self.status(peer) is None and self._views.wonder(peer):
            self._plan()

    def is_reachable(self, peer: PeerId) -> bool:
        """Whether it is known and neither dead nor left (it may be suspect or unresponsive)."""
        if peer == self.me.peer_id:
            return not self._left
        return self._members.is_reachable(peer)

    def view(self, parts: Collection[int] = ()) -> tuple[Rumour, ...]:
        """The own opinion, this peer first; of everyone, or of some parts.

        Tombstones included: a newcomer that never heard of a death would wait for the dead
        whose records it finds.
        """
        own = self._own_claim()
        members = self._members.of_parts(parts) if parts else self._members
        buried = self._members.buried()
        return (
            own,
            *(Rumour(v.peer_id, v.incarnation, v.status, v.info) for v in members),
            *(Rumour(peer, *last) for peer, last in buried if not parts or part_of(peer) in parts),
        )

    def newest(self) -> tuple[VersionHint, ...]:
        """The newest version of each model, as far as hints tell."""
        return self._hints.newest()

    def summaries(self) -> tuple[ZoneSummary, ...]:
        """What is known of each zone."""
        return self._summaries.newest()

    # -- messages --

    def _on_ping(self, now: float, sender: PeerId, message: Ping) -> None:
        self._opinions.hear_all(now, message.rumours)
        self._prober.pinged(sender, message)

    def _on_ping_request(self, now: float, sender: PeerId, message: PingRequest) -> None:
        self._opinions.hear_all(now, message.rumours)
        if not self._prober.asked(now, sender, message):
            self.dropped["ping request beyond max_relayed_probes"] += 1

    def _on_ack(self, now: float, sender: PeerId, message: Ack) -> None:
        if not self._prober.acked(sender, message):
            self.dropped["ack nobody waits for"] += 1
        self._opinions.hear_all(now, message.rumours)
        if not self._opinions.rumours:
            self._views.mismatch(now, sender, self._fingerprint(), message.fingerprint)

    def _on_nack(self, now: float, sender: PeerId, message: Nack) -> None:
        if not self._prober.nacked(sender, message):
            self.dropped["nack nobody waits for"] += 1
        self._opinions.hear_all(now, message.rumours)

    def _on_gossip(self, now: float, sender: PeerId, message: Gossip) -> None:
        self._opinions.hear_all(now, message.rumours)
        self._hear_hints(now, message.hints)
        self._hear_summaries(message.summaries)

    def _on_view_digest(self, now: float, sender: PeerId, message: ViewDigest) -> None:
        if not self._views.answer_digest(now, sender, message.parts, message.news):
            self.dropped["view digest malformed or too often"] += 1

    def _on_push_pull(self, now: float, sender: PeerId, message: PushPull) -> None:
        if sender == self.me.peer_id:
            if message.dialled and self._seeds.note_own(message.dialled):
                self.outbox.emit(SeedIsSelf(message.dialled))
            return
        if not _is_sound(message, sender):
            self.dropped["forged view"] += 1
            return
        if message.joining and self._members.rank(sender) is None:
            self._clear_address(now, message.info)
        self._hear_view(now, message.view, sender)
        self._hear_hints(now, message.hints)
        self._hear_summaries(message.summaries)
        self._views.reply(now, sender, message)
        if not message.hello:
            self._has_view = True
            self._may_have_joined(now)

    def _on_push_pull_reply(self, now: float, sender: PeerId, message: PushPullReply) -> None:
        if not _is_sound(message, sender) or sender == self.me.peer_id:
            self.dropped["forged view"] += 1
            return
        if not self._views.is_answer(now, sender, message):
            self.dropped["view nobody asked for"] += 1
            return
        self._hear_view(now, message.view, sender)
        self._hear_hints(now, message.hints)
        self._hear_summaries(message.summaries)
        self._seeds.note_answer(message.dialled, sender)
        self._note_found(message.dialled, sender)
        if not message.hello:
            self._has_view = True
        elif self._has_view or not self._ask_another(now, message, sender):
            self._views.compare_with(sender)
        self._may_have_joined(now)

    def _hear_view(self, now: float, view: Iterable[Rumour], sender: PeerId) -> None:
        """Whom it holds for dead, and this peer doesn't, is probed at once; a few of many."""
        accused = self._opinions.hear_view(now, view, sender)
        for peer in accused[:PROBED_OF_A_VIEW]:
            self._prober.probe_now(now, peer)

    # -- joining --

    def _note_found(self, dialled: str, peer: PeerId) -> None:
        if self._seeds.is_seed(dialled):
            self._found = peer

    def _may_have_joined(self, now: float) -> None:
        """Whoever hears of it may act on the view: so there is one first."""
        if self._found is not None and self._has_view and not self._seeds.joined:
            self._seeds.note_joined(now)
            self.outbox.emit(Joined(self._found))

    def _ask_another(self, now: float, brief: PushPullReply, sender: PeerId) -> bool:
        """Who was asked is busy, and names others: ask one of them, but not whom that one names."""
        named = [view for r in brief.view if (view := self._members.get(r.peer)) is not None]
        others = [view for view in named if view.is_reachable and view.peer_id != sender]
        if brief.dialled == self._sent_to or not others:
            return False
        return self._ask_for_view(now, self._rng.choice(others))

    def _ask_for_view(self, now: float, member: MemberView | None) -> bool:
        for address in member.info.addresses[:1] if member is not None else ():
            self._sent_to = address
            self._views.dial(now, address, joining=True)
            return True
        return False

    def _clear_address(self, now: float, newcomer: PeerInfo) -> None:
        """Who joins from an address proves every other PeerId there dead."""
        for address in newcomer.addresses[:1]:
            for view in self._members.at(address):
                self._opinions.accuse(now, view.peer_id, Status.DEAD)

    # -- what changes, and what silence means --

    def _changed(self, now: float, member: MemberView, old: Status | None) -> None:
        """A claim was accepted (opinions.py)."""
        peer = member.peer_id
        self._responsive = None
        if old is None or (old in GONE) is member.is_reachable:
            self._watched = None
        if member.status is Status.ALIVE or not member.is_reachable:
            self._prober.absolve(peer)
        if member.status is Status.SUSPECT and peer in self.watched():
            self._prober.probe_now(now, peer)
        elif member.status is Status.DEAD:
            self._seeds.start_redialling(now)
        elif member.is_reachable and (old is None or old in GONE):
            # A newcomer, or one that was held for dead: who knows what else it missed.
            self._prober.admit(now, peer)
            self._probe_earlier(now, member)
            self._views.start(now)
            if old is not None:
                self._views.welcome_back(now, peer)

    def _probe_earlier(self, now: float, newcomer: MemberView) -> None:
        """Who was at a newcomer's address before is most likely gone (judging.py)."""
        for address in newcomer.info.addresses[:1]:
            for view in self._members.at(address):
                if view.is_reachable and view.peer_id != newcomer.peer_id:
                    self._prober.probe_now(now, view.peer_id)

    def _neighbours(self, count: int) -> tuple[PeerId, ...]:
        """The members next to this peer in the ring of ids: after it, or before (negative)."""
        around = sorted(self._members.reachable())
        place = bisect_right(around, self.me.peer_id)
        around = around[place:] + around[:place]
        return tuple(around[:count] if count > 0 else around[count:])

    # -- hints and summaries --

    def _hear_hints(self, now: float, hints: Iterable[VersionHint]) -> None:
        for hint in hints:
            if self._hints.note(now, hint):
                self.outbox.emit(NewerVersion(hint.model, hint.epoch, hint.version))

    def _hear_summaries(self, summaries: Iterable[ZoneSummary]) -> None:
        for summary in summaries:
            if self._summaries.note(summary):
                self.outbox.emit(ZoneNews(summary))

    # -- after each call --

    def _finish(self, now: float) -> None:
        """Send what probing asked for, tell who was forgotten, and note when to be called next."""
        if self._prober.sends:
            sends, self._prober.sends = self._prober.sends, []
            for to, message in sends:
                self._gossip.send(to, message)
        if self._prober.looks:
            looks, self._prober.looks = self._prober.looks, []
            for peer in looks:
                self.outbox.emit(Look(peer))
        if self._members.forgotten:
            forgotten, self._members.forgotten = self._members.forgotten, []
            for peer in forgotten:
                self.outbox.emit(MemberForgotten(peer))
        self._gossip.start(now)
        self._last_call = now
        self._plan()

    def _plan(self) -> None:
        """Each call may move what falls due next, and ends with this."""
        self._planned = earliest(
            self._prober.next_wakeup(),
            self._opinions.verdicts.next_deadline(),
            self._seeds.next_wakeup(),
            self._gossip.next_wakeup(),
            self._views.next_wakeup(),
        )

    # -- what is said of this peer --

    def _own_claim(self) -> Rumour:
        return self._opinions.claim(Status.LEFT if self._left else Status.ALIVE)

    def _own_fingerprint(self) -> int:
        return fingerprint(self.me.peer_id, self._opinions.incarnation, Status.ALIVE)

    def _fingerprint(self) -> int:
        return self._members.fingerprint ^ self._own_fingerprint()

    def _part_fingerprints(self) -> list[int]:
        parts = list(self._members.part_fingerprints)
        parts[part_of(self.me.peer_id)] ^= self._own_fingerprint()
        return parts

    # -- own pauses --

    def _notice_pause(self, now: float) -> None:
        """Hold all verdicts if this process did not run when it wanted to."""
        if self._last_call is None or self._planned is None:
            return
        gap = now - max(self._planned, self._last_call)
        self._last_call = now
        if gap <= self._config.pause_after:
            return
        self._opinions.verdicts.postpone(gap, until=now + self._config.probe_interval)
        self._prober.restart(now)
        self._views.hasten(now)
        self.outbox.emit(WasAbsent(f"it did not run for {gap:.1f} s"))


def _is_sound(message: PushPull | PushPullReply, sender: PeerId) -> bool:
    """It speaks for its sender, and about parts that a view has."""
    parts = message.parts
    return message.info.peer_id == sender and len(parts) <= PARTS and max(parts, default=0) < PARTS
