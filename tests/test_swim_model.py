"""One membership machine against a simple model of it, driven by hypothesis.

The model keeps, of each peer, the highest claim made so far, and since when. What others claim,
and what the sockets show, it predicts exactly. Of what the machine finds out itself, as time
passes, it knows what is allowed and what is overdue:

    silent   only who left a ping unanswered for a whole probe and sent nothing meanwhile, and
             nobody while this peer hears nobody at all; or whose watch ended, and nobody greets
    dead     who was silent for the shortest suspicion, or as long as evidence left to it; or
             whom somebody's view held for dead, and who was silent here as well
    overdue  who is still silent after the longest suspicion, the limit of the
             unresponsive, or what evidence left to it

The model knows nothing of confirmations, gossip, health or comparisons.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.envelope import pack
from tensorhub_p2p.protocol.identity import NOBODY, PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Send
from tensorhub_p2p.protocol.membership.judging import DEAF_INTERVALS, ENOUGH_TO_DOUBT
from tensorhub_p2p.protocol.membership.members import PARTS, Rank, fingerprint, part_of
from tensorhub_p2p.protocol.membership.opinions import MAX_INCARNATION
from tensorhub_p2p.protocol.membership.suspicion import HOLD
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import Evidence, MemberChanged, Refuted
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
)

ALIVE, SUSPECT, UNRESPONSIVE, DEAD, LEFT = Status
GONE = (DEAD, LEFT)
SILENT = (SUSPECT, UNRESPONSIVE)
ME = PeerId("me")
PEERS = [PeerId(name) for name in ("ann", "bob", "cid", "dan", "pam", "sue", "tom", "zoe")]
CONFIG = SwimConfig(
    max_members=6,
    forget_dead_after=20,
    probe_interval=1.0,
    suspicion_multiplier=4.0,
    suspicion_max_multiplier=6.0,
)
SHORTEST, LONGEST = 4.0, 24.0
"""Of a suspicion, in seconds, among at most nine members."""
SOON = 1e-6


def info(peer: PeerId) -> PeerInfo:
    return PeerInfo(peer, f"name of {peer}", "here", (f"{peer}:1",))


@dataclass
class Held:
    """What the model holds of a member."""

    rank: Rank
    since: float
    """When it came to its status."""
    clock: float
    """When the time that is left to it began, its judge's pauses not counted."""
    cap: float = math.inf
    reported: int = -1
    """The incarnation at which a view held it for dead."""

    @property
    def status(self) -> Status:
        return self.rank[1]

    @property
    def earliest(self) -> float:
        """No verdict before."""
        limit = SHORTEST if self.status is SUSPECT else CONFIG.unresponsive_limit
        return min(self.cap, self.clock + limit)

    @property
    def latest(self) -> float:
        limit = LONGEST if self.status is SUSPECT else CONFIG.unresponsive_limit
        return min(self.cap, self.clock + limit)


@dataclass
class Model:
    """Claims are ranked; the higher wins."""

    incarnation: int = 0
    """The own one."""
    table: dict[PeerId, Held] = field(default_factory=dict)
    """Gone members are re-entered, so the longest gone come first."""
    tombs: dict[PeerId, Rank] = field(default_factory=dict)

    def reachable(self) -> list[PeerId]:
        return sorted(peer for peer, held in self.table.items() if held.status not in GONE)

    def hear(self, now: float, claim: Rumour) -> None:
        peer, rank = claim.peer, (claim.incarnation, claim.status)
        wrong = claim.info is not None and claim.info.peer_id != peer
        if wrong or claim.incarnation >= MAX_INCARNATION:
            return
        if peer == ME:
            if rank > (self.incarnation, ALIVE):
                self.incarnation = claim.incarnation + 1
        elif peer in self.table:
            if rank > self.table[peer].rank:
                self.enter(now, peer, rank)
        elif rank > self.tombs.get(peer, (-1, ALIVE)):
            if claim.status in GONE:
                self.bury(peer, rank)
            elif claim.info is not None:
                self.enter(now, peer, rank)

    def hear_view(self, now: float, view: tuple[Rumour, ...], sender: PeerId) -> None:
        for claim in view:
            held = self.table.get(claim.peer)
            if claim.status is not DEAD or held is None or held.status in GONE:
                self.hear(now, claim)
                continue
            self.hear(now, Rumour(claim.peer, claim.incarnation, SUSPECT, claim.info, sender))
            if claim.incarnation >= held.rank[0]:
                self.table[claim.peer].reported = claim.incarnation

    def enter(self, now: float, peer: PeerId, rank: Rank) -> None:
        old = self.table.get(peer)
        if old is None and len(self.table) >= CONFIG.max_members:
            gone = [each for each, held in self.table.items() if held.status in GONE]
            if not gone:
                return
            self.bury(gone[0], self.table.pop(gone[0]).rank)
        self.tombs.pop(peer, None)
        new = Held(rank, now, now)
        if old is not None and old.rank[0] == rank[0]:
            new.reported = old.reported
        elif old is not None and rank[1] not in GONE:
            new.reported = -1
        self.table.pop(peer, None)
        self.table[peer] = new

    def bury(self, peer: PeerId, rank: Rank) -> None:
        self.tombs.pop(peer, None)
        self.tombs[peer] = rank
        if len(self.tombs) > CONFIG.max_members:
            del self.tombs[next(iter(self.tombs))]

    def forget(self, now: float) -> None:
        for peer, held in list(self.table.items()):
            if held.status in GONE and held.since < now - CONFIG.forget_dead_after:
                self.bury(peer, self.table.pop(peer).rank)


peers = st.sampled_from(PEERS[:3]) | st.sampled_from(PEERS)
statuses = st.sampled_from(Status)
infos = st.sampled_from(["none", "right", "right", "wrong"])
incarnations = st.integers(0, 4) | st.sampled_from([MAX_INCARNATION + 1, 2**64 - 1])


@st.composite
def claims(draw: st.DrawFn) -> Rumour:
    peer = draw(peers | st.just(ME))
    which = draw(infos)
    told = {"none": None, "right": info(peer), "wrong": info(PeerId("heir"))}[which]
    accuser = draw(peers | st.just(NOBODY))
    return Rumour(peer, draw(incarnations), draw(statuses), told, accuser)


some_claims = st.lists(claims(), min_size=1, max_size=4).map(tuple)


class SwimAgainstModel(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 3), number=st.integers(0, 6))
    def begin(self, seed: int, number: int) -> None:
        self.now = 10.0
        self.swim = Swim(info(ME), CONFIG, random.Random(seed))
        self.model = Model()
        self.last_call: float | None = None
        self.last_heard = -math.inf
        self.heard: dict[PeerId, float] = {}
        self.pinged: dict[PeerId, list[float]] = {peer: [] for peer in PEERS}
        self.there: dict[PeerId, float] = {}
        self.unreached: dict[PeerId, int] = {}
        """When sockets last showed that a peer's process is there."""
        self.showed: dict[PeerId, list[Evidence]] = {peer: [] for peer in PEERS}
        self.doubted = -math.inf
        if number:
            known = tuple(Rumour(peer, 0, ALIVE, info(peer)) for peer in PEERS[:number])
            self.hear(PEERS[0], known)

    # -- what others say --

    @rule(sender=peers, rumours=some_claims)
    def hear(self, sender: PeerId, rumours: tuple[Rumour, ...]) -> None:
        self.about_to_call()
        incarnation = self.model.incarnation
        for claim in rumours:
            self.model.hear(self.now, claim)
        self.arrives(sender, Gossip(rumours))
        self.take_out(incarnation, sender)

    @rule(sender=peers, view=some_claims, asks=st.booleans())
    def hear_view(self, sender: PeerId, view: tuple[Rumour, ...], asks: bool) -> None:
        self.about_to_call()
        incarnation = self.model.incarnation
        self.model.hear_view(self.now, view, sender)
        if asks:
            self.arrives(sender, PushPull(info(sender), view))
        else:
            self.swim.dial(self.now, f"{sender}:1")
            self.arrives(sender, PushPullReply(info(sender), view, dialled=f"{sender}:1"))
        self.take_out(incarnation, sender)

    @rule(sender=peers, view=some_claims)
    def hear_a_reply_to_nothing(self, sender: PeerId, view: tuple[Rumour, ...]) -> None:
        self.about_to_call()
        self.arrives(sender, PushPullReply(info(sender), view, dialled="nowhere:1"))
        self.take_out(self.model.incarnation, sender)

    @rule(sender=peers, peer=peers, status=statuses)
    def somebody_says_what_is_news(self, sender: PeerId, peer: PeerId, status: Status) -> None:
        """Of a member at its present incarnation; only the member itself says that it lives."""
        held = self.model.table.get(peer)
        known = held.rank if held is not None else self.model.tombs.get(peer, (-1, ALIVE))
        if status is ALIVE:
            self.hear(peer, (Rumour(peer, known[0] + 1, ALIVE, info(peer)),))
        else:
            self.hear(sender, (Rumour(peer, max(0, known[0]), status, None, sender),))

    @rule(sender=peers, forged=peers)
    def hear_a_forged_view(self, sender: PeerId, forged: PeerId) -> None:
        if sender != forged:
            self.about_to_call()
            view = (Rumour(forged, 4, DEAD), Rumour(ME, 4, DEAD))
            self.arrives(sender, PushPullReply(info(forged), view))
            self.take_out(self.model.incarnation, sender)

    @rule(sender=peers, seq=st.integers(0, 2**64 - 1))
    def hear_an_answer_to_nothing(self, sender: PeerId, seq: int) -> None:
        self.about_to_call()
        self.arrives(sender, Ack(seq + 100_000 if seq < 100_000 else seq))
        self.take_out(self.model.incarnation, sender)

    # -- what sockets show --

    @rule(peer=peers, then=st.sampled_from(Evidence))
    def a_watch_ends(self, peer: PeerId, then: Evidence) -> None:
        self.evidence(peer, Evidence.DISCONNECTED)
        self.evidence(peer, then)
        held = self.model.table.get(peer)
        if then is Evidence.ACCEPTED and held is not None and held.status not in GONE:
            assert held.status is UNRESPONSIVE

    @rule(peer=peers, evidence=st.sampled_from(Evidence))
    def evidence(self, peer: PeerId, evidence: Evidence) -> None:
        held = self.model.table.get(peer)
        if held is not None and held.status not in GONE:
            self.about_to_call()
            self.showed[peer].append(evidence)
            self.expect(held, peer, evidence)
            self.last_call = self.now
        self.swim.evidence(self.now, peer, evidence)
        self.take_out(self.model.incarnation, None)

    def expect(self, held: Held, peer: PeerId, evidence: Evidence) -> None:
        if evidence is not Evidence.UNREACHABLE:
            self.unreached.pop(peer, None)
        if evidence in (Evidence.GREETED, Evidence.ACCEPTED):
            self.there[peer] = self.now
            held.cap = math.inf
            if held.status is SUSPECT:
                self.model.hear(self.now, Rumour(peer, held.rank[0], Status.UNRESPONSIVE))
        elif evidence is Evidence.UNREACHABLE:
            self.unreached[peer] = times = self.unreached.get(peer, 0) + 1
            if held.status is SUSPECT or (held.status is Status.UNRESPONSIVE and times > 1):
                held.cap = min(held.cap, self.now + CONFIG.unreachable_suspicion)
        elif evidence is Evidence.REFUSED:
            self.model.hear(self.now, Rumour(peer, held.rank[0], SUSPECT))
            held = self.model.table[peer]
            held.cap = min(held.cap, self.now + CONFIG.refused_suspicion)

    # -- time --

    @rule(
        seconds=st.sampled_from([0.05, 0.3, 1.0, 2.0, 5.0, 25.0, 65.0]),
        answering=st.sets(peers) | st.just(set(PEERS)),
    )
    def time_passes(self, seconds: float, answering: set[PeerId]) -> None:
        """As a driver lets it pass; these peers answer, and relays say if another doesn't."""
        end = self.now + seconds
        self.tick(answering)
        while (wakeup := self.swim.next_wakeup()) is not None and wakeup <= end:
            assert wakeup > self.now, "a tick that changes nothing would spin"
            self.now = wakeup
            self.tick(answering)
        if self.swim.next_wakeup() is None:
            self.last_call = None
        self.now = end

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def this_process_stands_still(self, seconds: float) -> None:
        self.now += seconds
        self.tick(set())

    def tick(self, answering: set[PeerId]) -> None:
        self.about_to_call()
        self.model.forget(self.now)
        if self.doubts(DEAF_INTERVALS):
            self.doubted = self.now
        self.swim.tick(self.now)
        self.last_call = self.now
        pings = self.take_out(self.model.incarnation, None)
        for peer, held in self.model.table.items():
            if held.status in SILENT:
                overdue = max(held.latest, self.doubted + HOLD)
                assert self.now <= overdue + SOON, f"{peer} should be dead since {overdue}"
        for to, message in pings:
            if to in answering:
                self.arrives(
                    to, Ack(message.seq) if isinstance(message, Ping) else Nack(message.seq)
                )
                self.take_out(self.model.incarnation, None)

    def doubts(self, intervals: int) -> bool:
        silence = self.now - self.last_heard
        enough = len(self.model.reachable()) >= ENOUGH_TO_DOUBT
        return enough and intervals * CONFIG.probe_interval <= silence < CONFIG.doubt_limit

    # -- calling, and what comes of it --

    def about_to_call(self) -> None:
        """If the call is late, nobody's time has passed meanwhile."""
        planned = self.swim.next_wakeup()
        if planned is None or self.last_call is None:
            return
        gap = self.now - max(planned, self.last_call)
        if gap > CONFIG.pause_after:
            for held in self.model.table.values():
                held.clock += gap
                held.cap += gap
            self.doubted = max(self.doubted, self.now + CONFIG.probe_interval - HOLD)
            self.pinged = {peer: [] for peer in PEERS}  # what was asked before counts no more

    def arrives(self, sender: PeerId, message: Message) -> None:
        self.last_heard = self.heard[sender] = self.now
        self.swim.receive(self.now, sender, message)
        self.last_call = self.now

    def take_out(
        self, incarnation: int, accuser: PeerId | None
    ) -> list[tuple[PeerId, Ping | PingRequest]]:
        """Empties the outbox, checks what is in it, and names the pings and ping requests.

        If this peer had another incarnation before, the accuser must hear of that at once.
        """
        pings: list[tuple[PeerId, Ping | PingRequest]] = []
        refuted = told = False
        for item in self.swim.outbox.drain():
            if isinstance(item, MemberChanged):
                self.changed(item)
            elif isinstance(item, Refuted):
                refuted = True
            elif isinstance(item, Send):
                assert item.to != ME
                _, body = pack(item.message)
                assert len(bytes(body)) < 8000
                if isinstance(item.message, Ping):
                    self.pinged[item.to].append(self.now)
                if isinstance(item.message, (Ping, PingRequest)):
                    pings.append((item.to, item.message))
                said = (*getattr(item.message, "rumours", ()), *getattr(item.message, "view", ()))
                told |= item.to == accuser and any(
                    (r.peer, r.incarnation, r.status) == (ME, self.model.incarnation, ALIVE)
                    for r in said
                )
        assert refuted is (self.model.incarnation > incarnation)
        assert told or not refuted
        return pings

    def changed(self, event: MemberChanged) -> None:
        """Either the model knows of it, or the machine found it out: was that allowed?"""
        peer, rank = event.member.peer_id, event.member.rank
        held = self.model.table.get(peer)
        if held is None or rank <= held.rank:
            return
        assert rank[0] == held.rank[0], "only a peer itself raises its incarnation"
        assert event.old is held.status
        unanswered = [
            start
            for start in self.pinged[peer]
            if self.heard.get(peer, -math.inf) <= start <= self.now - CONFIG.probe_interval + SOON
        ]
        if rank[1] is DEAD and held.status in SILENT and self.now >= held.earliest - SOON:
            assert not self.doubts(DEAF_INTERVALS), "while nobody is heard, no verdict is spoken"
        elif rank[1] is UNRESPONSIVE and not unanswered:
            assert set(self.showed[peer][-2:]) == {Evidence.DISCONNECTED, Evidence.ACCEPTED}
            assert self.there[peer] == self.now
        elif rank[1] is UNRESPONSIVE:
            assert self.there.get(peer, -math.inf) >= unanswered[0]
        else:
            assert unanswered, f"{peer} was not silent"
            alone = all(self.last_heard < start for start in unanswered)
            assert not (alone and self.doubts(1)), "it may be this peer that is deaf"
            assert rank[1] is SUSPECT or held.reported >= held.rank[0]
        self.model.enter(self.now, peer, rank)

    # -- what holds at any time --

    @invariant()
    def beliefs_are_those_of_the_model(self) -> None:
        own, *others = self.swim.members()
        assert own.rank == (self.model.incarnation, ALIVE)
        assert {v.peer_id: v.rank for v in others} == {
            peer: held.rank for peer, held in self.model.table.items()
        }
        for peer, rank in self.model.tombs.items():
            assert self.swim.status(peer) is rank[1]
            assert not self.swim.is_reachable(peer)

    @invariant()
    def questions_agree_with_beliefs(self) -> None:
        reachable = self.model.reachable()
        alive = [peer for peer in reachable if self.model.table[peer].status is ALIVE]
        assert self.swim.responsive() == tuple(sorted([ME, *alive]))
        after = [peer for peer in reachable if peer > ME]
        ring = after + [peer for peer in reachable if peer < ME]
        assert self.swim.watched() == tuple(ring[: CONFIG.watched_neighbours])
        assert self.swim.watchers() == tuple(ring[-CONFIG.watched_neighbours :])
        assert all(self.swim.is_reachable(peer) for peer in reachable)

    @invariant()
    def fingerprints_are_those_of_the_view(self) -> None:
        parts = [0] * PARTS
        for view in self.swim.members():
            if view.status not in GONE:
                parts[part_of(view.peer_id)] ^= fingerprint(view.peer_id, *view.rank)
        assert self.swim._part_fingerprints() == parts

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.swim.members()) <= CONFIG.max_members + 1
        assert len(self.swim._opinions.rumours) <= CONFIG.max_members + 1
        silent = [held for held in self.model.table.values() if held.status in SILENT]
        assert len(self.swim._opinions.verdicts) == len(silent)

    def teardown(self) -> None:
        """A goodbye ends it all."""
        if hasattr(self, "swim"):
            self.swim.leave(self.now)
            self.swim.outbox.drain()
            self.swim.receive(self.now, PEERS[0], Ping(1))
            self.swim.tick(self.now + 100)
            assert self.swim.outbox.drain() == []
            assert self.swim.next_wakeup() is None


SwimAgainstModel.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSwimAgainstModel = SwimAgainstModel.TestCase
