"""Membership of one zone (SWIM, with parts of Lifeguard): who is there, silent, gone.

Rules of this file. It holds the peer's opinion of everyone and spreads it. What beats
what is members.py's rule, who is silent probing.py's, how long a suspect may still refute
suspicion.py's, what rides on which message dissemination.py's, when whole views are
exchanged anti_entropy.py's, and where to look for the lost seeds.py's. It knows nothing of
rings, groups or versions; version hints pass through. The zone of a member is stored and
not acted upon: there is one pool.

Theory of operation. States of a member, and what leads from one to the next:

    ALIVE ──silent for a whole probe, or refused a re-dial──▶ SUSPECT ──timeout──▶ DEAD
    ALIVE ◀──the member says so at a higher incarnation (refutation)── any state
    any   ──someone else joins from its address──▶ DEAD
    any   ──it says that it leaves──▶ LEFT
    UNRESPONSIVE lies between ALIVE and SUSPECT; it is merged here, but nobody finds it yet.

Of Lifeguard (Dadgar et al. 2018) there are the suspicions that confirmations shorten, the
buddy system and the Nacks of relays. Its local health score is not: no timeout grows when
this peer is slow itself, and nobody counts the Nacks. Own pauses (below) do part of that.

Messages. `Ping`, `PingRequest`, `Ack`, `Nack` probe, and carry rumours. `Gossip` goes to
`gossip_nodes` random members every `gossip_interval` while there is news; the first news
after a calm leaves at once. `PushPull` and its reply exchange whole views
(anti_entropy.py). Whoever writes to a peer that it suspects, or holds for dead, tells it
so first (Lifeguard's buddy system), and a peer never believes its own death: it refutes
with a higher incarnation.

A view is older than gossip: a death that it reports of a member that is reachable here
opens a suspicion only. So healed halves, each of which holds the other for dead, find
each other again without anyone dying of it.

Own pauses: when a call comes more than `pause_after` late, this process did not run. It
then extends all suspicions by the gap, probes anew and asks another's view, before it
judges anybody.

Bounds: tables by `max_members`, rumours by one a member, messages by their byte budgets,
views by the table. What is malformed, unasked for or too much is counted in `dropped`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.anti_entropy import AntiEntropy
from tensorhub_p2p.protocol.dissemination import Dissemination, retransmit_limit
from tensorhub_p2p.protocol.hints import Hints
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.members import Members, MemberView, fingerprint, rank
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
)
from tensorhub_p2p.protocol.probing import Prober
from tensorhub_p2p.protocol.seeds import Seeds
from tensorhub_p2p.protocol.suspicion import Suspicions
from tensorhub_p2p.protocol.swim_events import (
    Evidence,
    Joined,
    Left,
    MemberChanged,
    MemberForgotten,
    NewerVersion,
    Refuted,
    SeedIsSelf,
)

MAX_INCARNATION = 1 << 53
"""No honest peer refutes that often; a higher one can't be raised on the wire for ever."""
RECENT_DEAD = 64
"""Of the recently dead, this many are candidates for gossip."""


class Swim:
    """The membership of one peer. Has the machine's face."""

    def __init__(self, info: PeerInfo, config: SwimConfig, rng: random.Random) -> None:
        self.me = info
        self.outbox = Outbox()
        self.dropped: Counter[str] = Counter()
        """Messages and rumours that were not acted on, by reason."""
        self._config = config
        self._rng = rng
        self._incarnation = 0
        self._left = False
        self._members = Members(config.max_members)
        self._prober = Prober(config, rng, self._members)
        self._suspicions = Suspicions()
        self._rumours: Dissemination[PeerId, Rumour] = Dissemination()
        self._hints = Hints(config.max_hinted_models)
        self._seeds = Seeds(config, rng, self._members)
        self._views = AntiEntropy(
            info, self.view, self._members, self._hints, config, rng, self.outbox
        )
        self._next_gossip: float | None = None
        """When the next round may be; None before the first call."""
        self._last_call: float | None = None
        self._planned: float | None = None
        self._alive: tuple[PeerId, ...] | None = None
        self._handlers: dict[type[Message], Callable[[float, PeerId, Any], None]] = {
            Ping: self._on_ping,
            PingRequest: self._on_ping_request,
            Ack: self._on_ack,
            Nack: self._on_nack,
            Gossip: self._on_gossip,
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
        incarnation = self._incarnation
        handler(now, sender, message)
        if self._incarnation > incarnation:
            self._send(sender, Gossip())
        self._views.introduce(now, sender)
        self._finish(now)

    def tick(self, now: float) -> None:
        """Probe, judge, gossip, exchange views and dial, as far as each is due."""
        if self._left:
            return
        self._notice_pause(now)
        for address in self._seeds.due(now):
            self._views.dial(address, joining=not self._seeds.joined)
        for peer in self._members.forget_gone(now - self._config.forget_dead_after):
            self.outbox.emit(MemberForgotten(peer))
        for peer in self._prober.tick(now):
            self._accuse(now, peer)
        for peer in self._suspicions.take_due(now):
            self._declare_dead(now, peer)
        self._views.tick(now)
        if self._gossip_pending() and (self._next_gossip is None or now >= self._next_gossip):
            self._gossip(now)
        self._finish(now)

    def next_wakeup(self) -> float | None:
        """When something falls due; None for a peer that is alone or has left."""
        if self._left:
            return None
        return earliest(
            self._prober.next_wakeup(),
            self._suspicions.next_deadline(),
            self._seeds.next_wakeup(),
            self._next_gossip if self._gossip_pending() else None,
            self._views.next_wakeup(),
        )

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

    def leave(self, now: float) -> None:
        """Say goodbye to several members at once, then be silent for good."""
        if self._left:
            return
        for peer in self._members.sample(self._rng, self._config.leave_fanout):
            self._rumours.put(self.me.peer_id, self._claim(Status.LEFT))
            self._send(peer, Gossip(hints=self._take_hints()))
        self._left = True
        self._alive = None
        self.outbox.emit(Left())

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        """What the connections noticed of a peer; unknown and gone peers are ignored."""
        if self._left or not self._members.is_reachable(peer):
            return
        self._notice_pause(now)
        if evidence is Evidence.CONNECTION_REFUSED:
            self._accuse(now, peer)
            self._suspicions.hasten(peer, now + self._config.refused_suspicion)
        self._prober.probe_now(now, peer)
        self._finish(now)

    def hint(self, model: str, epoch: int, version: int) -> None:
        """Tell every member that this version exists, unless a newer one is known."""
        self._hints.note(VersionHint(model, epoch, version))

    def absorb(self, now: float, view: Iterable[Rumour]) -> None:
        """Merge somebody's view of all members into the own one."""
        if not self._left:
            self._absorb(now, view, NOBODY)
            self._finish(now)

    # -- questions --

    def members(self) -> tuple[MemberView, ...]:
        """Everyone known, this peer first, dead and left ones included."""
        status = Status.LEFT if self._left else Status.ALIVE
        return (MemberView(self.me, self._incarnation, status, -math.inf), *self._members)

    def alive(self) -> tuple[PeerId, ...]:
        """Those that may own keys, sorted: alive or suspect, this peer included."""
        if self._alive is None:
            able = (Status.ALIVE, Status.SUSPECT)
            own = () if self._left else (self.me.peer_id,)
            others = (view.peer_id for view in self._members if view.status in able)
            self._alive = tuple(sorted((*own, *others)))
        return self._alive

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

    def is_reachable(self, peer: PeerId) -> bool:
        """Whether it is known and neither dead nor left (it may be suspect or unresponsive)."""
        if peer == self.me.peer_id:
            return not self._left
        return self._members.is_reachable(peer)

    def view(self) -> tuple[Rumour, ...]:
        """The own opinion of everyone, this peer first, as `absorb` takes it.

        Tombstones included: a newcomer that never heard of a death would wait for the dead
        whose records it finds.
        """
        status = Status.LEFT if self._left else Status.ALIVE
        return (
            self._claim(status),
            *(Rumour(v.peer_id, v.incarnation, v.status, v.info) for v in self._members),
            *(Rumour(peer, *last) for peer, last in self._members.buried()),
        )

    # -- messages --

    def _on_ping(self, now: float, sender: PeerId, message: Ping) -> None:
        self._hear_all(now, message.rumours)
        self._prober.pinged(sender, message)

    def _on_ping_request(self, now: float, sender: PeerId, message: PingRequest) -> None:
        self._hear_all(now, message.rumours)
        self._prober.asked(now, sender, message)

    def _on_ack(self, now: float, sender: PeerId, message: Ack) -> None:
        self._prober.acked(sender, message)
        self._hear_all(now, message.rumours)
        if not self._rumours:
            self._views.compare(now, sender, self._fingerprint(), message.fingerprint)

    def _on_nack(self, now: float, sender: PeerId, message: Nack) -> None:
        """The relay is alive, which its rumours say better; the probe runs on."""
        self._hear_all(now, message.rumours)

    def _on_gossip(self, now: float, sender: PeerId, message: Gossip) -> None:
        self._hear_all(now, message.rumours)
        self._hear_hints(message.hints)

    def _on_push_pull(self, now: float, sender: PeerId, message: PushPull) -> None:
        if sender == self.me.peer_id:
            if message.dialled and self._seeds.note_own(message.dialled):
                self.outbox.emit(SeedIsSelf(message.dialled))
            return
        if message.info.peer_id != sender:
            self.dropped["forged view"] += 1
            return
        if message.joining and self._members.rank(sender) is None:
            self._clear_address(now, message.info)
        self._absorb(now, message.view, sender)
        self._hear_hints(message.hints)
        self._views.reply(sender, message.dialled)

    def _on_push_pull_reply(self, now: float, sender: PeerId, message: PushPullReply) -> None:
        if message.info.peer_id != sender or sender == self.me.peer_id:
            self.dropped["forged view"] += 1
            return
        self._absorb(now, message.view, sender)
        self._hear_hints(message.hints)
        self._seeds.note_answer(message.dialled, sender)
        if not self._seeds.joined and self._seeds.is_seed(message.dialled):
            self._seeds.note_joined(now)
            self.outbox.emit(Joined(sender))

    # -- claims about members --

    def _absorb(self, now: float, view: Iterable[Rumour], sender: PeerId) -> None:
        """A view may be old: a death in it is taken for an accusation."""
        for claim in view:
            if claim.status is Status.DEAD and self._members.is_reachable(claim.peer):
                claim = msgspec.structs.replace(claim, status=Status.SUSPECT, accuser=sender)
            self._hear(now, claim)

    def _hear_all(self, now: float, rumours: Iterable[Rumour]) -> None:
        for rumour in rumours:
            self._hear(now, rumour)

    def _hear(self, now: float, rumour: Rumour) -> None:
        """Merge one claim, whoever it came from."""
        info = rumour.info
        if rumour.incarnation > MAX_INCARNATION or (info and info.peer_id != rumour.peer):
            self.dropped["malformed rumour"] += 1
        elif rumour.peer == self.me.peer_id:
            self._hear_of_self(rumour)
        elif (known := self._members.get(rumour.peer)) is None:
            self._hear_of_stranger(now, rumour)
        elif rank(rumour) > known.rank:
            self._accept(now, rumour, known.info, known.status)
        elif rank(rumour) == known.rank and self._suspicions.confirm(rumour.peer, rumour.accuser):
            self._rumours.put(rumour.peer, _bare(rumour))

    def _hear_of_self(self, claim: Rumour) -> None:
        """Refute whatever would beat "alive" at the own incarnation (SWIM §4.2)."""
        if rank(claim) <= (self._incarnation, Status.ALIVE):
            return
        self._incarnation = claim.incarnation + 1
        self._rumours.put(self.me.peer_id, self._claim(Status.ALIVE))
        self.outbox.emit(Refuted(self._incarnation, claim.status))

    def _hear_of_stranger(self, now: float, rumour: Rumour) -> None:
        """Only one that is reachable, and introduced, becomes a member."""
        last = self._members.rank(rumour.peer)
        if last is not None and rank(rumour) <= last:
            return
        if rumour.status in (Status.DEAD, Status.LEFT):
            self._members.bury(rumour.peer, rank(rumour))
        elif rumour.info is not None:
            self._accept(now, rumour, rumour.info, None)

    def _accept(self, now: float, rumour: Rumour, info: PeerInfo, old: Status | None) -> None:
        """This claim holds from now on: store it, act on it and pass it on."""
        member = MemberView(info, rumour.incarnation, rumour.status, now)
        was_reachable = self._members.is_reachable(rumour.peer)
        if not self._members.put(member):
            self.dropped["newcomer beyond max_members"] += 1
            return
        self._alive = None
        self._suspicions.cancel(rumour.peer)
        if rumour.status is Status.SUSPECT:
            self._suspect(now, rumour)
        if member.is_reachable and not was_reachable:
            self._welcome(now, rumour.peer, returned=old is not None)
        elif rumour.status is Status.DEAD:
            self._seeds.start_redialling(now)
        spread = _bare(rumour)
        if rumour.status is Status.ALIVE:
            spread = msgspec.structs.replace(rumour, info=info)
        self._rumours.put(rumour.peer, spread)
        if rumour.status is not old:
            self.outbox.emit(MemberChanged(member, old))

    def _welcome(self, now: float, peer: PeerId, *, returned: bool) -> None:
        """A newcomer, or one that was held for dead: who knows what else it missed."""
        self._prober.admit(now, peer)
        self._views.start(now)
        if returned:
            self._views.exchange_with(peer)

    def _suspect(self, now: float, rumour: Rumour) -> None:
        members = self._members.num_reachable + 1
        scale = max(1.0, math.log10(members))
        shortest = self._config.suspicion_multiplier * scale * self._config.probe_interval
        expected = self._config.suspicion_confirmations
        self._suspicions.start(
            now,
            rumour.peer,
            rumour.accuser,
            expected=expected if members - 2 >= expected else 0,
            shortest=shortest,
            longest=shortest * self._config.suspicion_max_multiplier,
        )

    def _accuse(self, now: float, peer: PeerId) -> None:
        """This peer itself has found a member silent."""
        known = self._members.get(peer)
        if known is not None and known.is_reachable:
            self._hear(now, Rumour(peer, known.incarnation, Status.SUSPECT, None, self.me.peer_id))

    def _declare_dead(self, now: float, peer: PeerId) -> None:
        known = self._members.get(peer)
        if known is not None and known.is_reachable:
            self._hear(now, Rumour(peer, known.incarnation, Status.DEAD, None, self.me.peer_id))

    def _clear_address(self, now: float, newcomer: PeerInfo) -> None:
        """Who joins from an address proves every other PeerId there dead."""
        for address in newcomer.addresses[:1]:
            for view in self._members.at(address):
                self._declare_dead(now, view.peer_id)

    def _claim(self, status: Status) -> Rumour:
        """What this peer says of itself."""
        return Rumour(self.me.peer_id, self._incarnation, status, self.me)

    # -- hints --

    def _hear_hints(self, hints: Iterable[VersionHint]) -> None:
        for hint in hints:
            if self._hints.note(hint):
                self.outbox.emit(NewerVersion(hint.model, hint.epoch, hint.version))

    def _take_hints(self) -> tuple[VersionHint, ...]:
        return self._hints.take(self._config.max_hint_bytes, self._retransmit_limit())

    # -- sending --

    def _finish(self, now: float) -> None:
        """Let rumours ride on the probes' messages, and note when the next call is due."""
        sends, self._prober.sends = self._prober.sends, []
        for to, message in sends:
            self._send(to, message)
        if self._next_gossip is None:
            self._next_gossip = now
        self._last_call = now
        self._planned = self.next_wakeup()

    def _send(self, to: PeerId, message: Message) -> None:
        """Send with as many rumours as fit; what the addressee must refute goes first."""
        rumours = self._rumours.take(self._config.max_rumour_bytes, self._retransmit_limit())
        held = self._members.rank(to)
        if held is not None and held[1] is not Status.ALIVE:
            rumours = (Rumour(to, held[0], held[1], None, self.me.peer_id), *rumours)
        message = msgspec.structs.replace(message, rumours=rumours)
        if isinstance(message, Ack):
            message = msgspec.structs.replace(message, fingerprint=self._fingerprint())
        self.outbox.send(to, message)

    def _gossip_pending(self) -> bool:
        return bool(self._members.num_reachable and (self._rumours or self._hints))

    def _gossip(self, now: float) -> None:
        self._next_gossip = now + self._config.gossip_interval
        recent = now - self._config.gossip_to_dead_for
        dead = [
            view.peer_id
            for view in islice(self._members.gone(), RECENT_DEAD)
            if view.status is Status.DEAD and view.since >= recent
        ]
        targets = self._members.sample(self._rng, self._config.gossip_nodes)
        for peer in targets + self._rng.sample(dead, min(1, len(dead))):
            if not self._gossip_pending():
                return
            self._send(peer, Gossip(hints=self._take_hints()))

    def _retransmit_limit(self) -> int:
        members = self._members.num_reachable + 1
        return retransmit_limit(self._config.retransmit_multiplier, members)

    def _fingerprint(self) -> int:
        own = fingerprint(self.me.peer_id, (self._incarnation, Status.ALIVE))
        return self._members.fingerprint ^ own

    # -- own pauses --

    def _notice_pause(self, now: float) -> None:
        """Hold all verdicts if this process did not run when it wanted to."""
        if self._last_call is None or self._planned is None:
            return
        gap = now - max(self._planned, self._last_call)
        self._last_call = now
        if gap <= self._config.pause_after:
            return
        self._suspicions.postpone(gap)
        self._prober.restart(now)
        self._views.hasten(now)


def _bare(rumour: Rumour) -> Rumour:
    """Without the introduction, which only "alive" carries."""
    return msgspec.structs.replace(rumour, info=None)
