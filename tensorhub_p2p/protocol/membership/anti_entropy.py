"""Comparing views: how a peer joins, and how gaps that gossip left are mended.

Rule of this file. It decides with whom views are compared, when, and which part of them
travels; what a view means is for swim.py to judge, and the table of members is only read.

Theory of operation. A view is cut into parts, and each part has a fingerprint (members.py).
Two peers compare in three steps, of which the first is the last when they agree:

    ViewDigest ──▶            the fingerprints of all parts
            ◀── PushPull      the other's claims about the parts that differ
    PushPullReply ──▶         one's own claims about those

So the cost of a comparison is a fixed half kilobyte, and that of mending follows the
difference, not the cluster. A peer compares

    now and then     with a random member, each `push_pull_interval` (jittered by half; the
                     interval grows with the cluster, as does memberlist's)
    on a mismatch    the fingerprint on an Ack shows that two views differ though no more
                     news is on its way: gossip misses some peer now and then, and this
                     finds the gap within seconds
    with the lost    a member that was held for dead and is back
    with doubters    a peer that took somebody else for a key's owner
    after a pause    of its own (`hasten`): who knows what was missed
    of the unknown   whose records it finds (`wonder`): it asks a random member for the parts of
                     its view that are about them, tombstones included. Fingerprints don't show
                     who lacks those: it may have joined through a peer that knew no better

Only who joins asks for a whole view: its hello is a `PushPull` that holds nothing but
itself, and is answered in full. When many join at once, who has told enough names `NAMED`
members that have been here for a while instead: who joins asks one of those (swim.py). Other
hellos are answered as briefly, and followed by a comparison if there was an answer: they go to
strangers that write to us (they know this peer, which doesn't know them), to seeds, and to where
dead members were.

A fingerprint covers all reachable members and this peer; 0 says nothing. What is held of
the addressee, if it is held for gone, is said first, for it to refute.

A reply counts only if it was asked for: it comes from the address that was dialled, or from the
peer that was sent a `PushPull`, once, within `ANSWER_INTERVALS` intervals of probing.

Bounds: a view is bounded by the table. Strangers cause at most one hello each
`gossip_interval`, mismatches and those that are back one comparison each `mismatch_interval`.
In an interval of gossip at most `MAX_ANSWERS` digests are answered, as many peers asked because
they took somebody else for an owner, and `MAX_TOLD` pieces told, the last view of them whole;
beyond that digests stay unanswered, and replies just say who this is: a comparison follows, or
a question to those named. Of what was asked the latest `MAX_ASKED` are remembered. Of the unknown
`MAX_WONDERED` are asked for at a time, once each `mismatch_interval`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

from tensorhub_p2p.config import SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.machine import Outbox, earliest
from tensorhub_p2p.protocol.membership.hints import Hints
from tensorhub_p2p.protocol.membership.members import PARTS, Members, part_of
from tensorhub_p2p.protocol.membership.summaries import Summaries
from tensorhub_p2p.protocol.messages import PushPull, PushPullReply, Rumour, Status, ViewDigest

SMALL_CLUSTER = 32
"""Up to here the interval is `push_pull_interval` (memberlist's pushPullScaleThreshold)."""
MAX_ANSWERS = 4
MAX_TOLD = 8192
"""Claims, hints and summaries; claims are mostly below 100 bytes."""
NAMED = 4
SETTLED = 1.0
"""Seconds for which a member is known before others are sent to it: its own join is over."""
MAX_ASKED = 1024
MAX_WONDERED = 16
ANSWER_INTERVALS = 10

View = Callable[[Collection[int]], tuple[Rumour, ...]]
"""The present opinion of everyone in these parts, itself first; of all if there are none."""


class Allowance:
    """So much within each so many seconds."""

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._since = -math.inf
        self._used = 0

    def has_room(self, now: float) -> bool:
        if now - self._since > self._seconds:
            self._since, self._used = now, 0
        return self._used < self._limit

    def use(self, amount: int) -> None:
        """Even beyond the limit: then there is no room."""
        self._used += amount


class AntiEntropy:
    """The comparisons of one peer.

    `claim` is what it says of itself, `view` its opinion of everyone, and `fingerprints`
    those of the view's parts, each at present.
    """

    def __init__(
        self,
        me: PeerInfo,
        claim: Callable[[], Rumour],
        view: View,
        fingerprints: Callable[[], list[int]],
        members: Members,
        hints: Hints,
        summaries: Summaries,
        config: SwimConfig,
        rng: random.Random,
        outbox: Outbox,
    ) -> None:
        self._me = me
        self._claim = claim
        self._view = view
        self._fingerprints = fingerprints
        self._members = members
        self._hints = hints
        self._summaries = summaries
        self._config = config
        self._rng = rng
        self._outbox = outbox
        self._next: float | None = None
        """When the next comparison with a random member is due; None before the first member."""
        self._next_introduction = -math.inf
        self._next_comparison = -math.inf
        self._answers = Allowance(MAX_ANSWERS, config.gossip_interval)
        self._doubters = Allowance(MAX_ANSWERS, config.gossip_interval)
        self._told = Allowance(MAX_TOLD, config.gossip_interval)
        self._wondered: dict[PeerId, None] = {}
        """Never heard of, but somebody's records name them."""
        self._next_question = 0.0
        self._asked: dict[str, float] = {}
        """Who owes a reply, by PeerId or by the address dialled, and since when."""

    def start(self, now: float) -> None:
        """There is somebody to compare with."""
        if self._next is None:
            self._next = now + self._pause()

    def hasten(self, now: float) -> None:
        """The next comparison is due now."""
        if self._next is not None:
            self._next = now

    def wonder(self, about: PeerId) -> bool:
        """Its records were found, and it was never heard of: is it new, or long dead?

        Whether that is a new question.
        """
        if about in self._wondered or len(self._wondered) >= MAX_WONDERED:
            return False
        self._wondered[about] = None
        return True

    def tick(self, now: float) -> None:
        if self._next is not None and now >= self._next:
            self._next = now + self._pause()
            for peer in self._members.sample(self._rng, 1):
                self.compare_with(peer)
        if self._wondered and now >= self._next_question:
            self._next_question = now + self._config.mismatch_interval
            self._ask_about(now)

    def _ask_about(self, now: float) -> None:
        parts = {part_of(peer) for peer in self._wondered if self._members.rank(peer) is None}
        self._wondered.clear()
        for peer in self._members.sample(self._rng, 1 if parts else 0):
            asked = tuple(sorted(parts))
            self._ask(now, peer, PushPull(self._me, self._view(asked), parts=asked))

    def next_wakeup(self) -> float | None:
        if not self._members.num_reachable:
            return None
        return earliest(self._next, self._next_question if self._wondered else None)

    def _pause(self) -> float:
        size = max(1, self._members.num_reachable)
        scale = 1 + max(0, math.ceil(math.log2(size) - math.log2(SMALL_CLUSTER)))
        return self._config.push_pull_interval * scale * self._rng.uniform(0.5, 1.5)

    # -- comparing --

    def compare_with(self, peer: PeerId) -> None:
        """Ask whether its view differs, and where."""
        self._outbox.send(peer, ViewDigest(tuple(self._fingerprints()), self._news()))

    def _news(self) -> int:
        """The fingerprint of what is known besides members."""
        return self._hints.fingerprint ^ self._summaries.fingerprint

    def answer_digest(self, now: float, sender: PeerId, theirs: tuple[int, ...], news: int) -> bool:
        """Send what is held about the parts that differ; False if that was too often now."""
        room = self._answers.has_room(now) and self._told.has_room(now)
        if not room or len(theirs) != PARTS:
            return False
        self._answers.use(1)
        ours = self._fingerprints()
        parts = tuple(part for part in range(PARTS) if ours[part] != theirs[part])
        if parts or news != self._news():
            view = self._view(parts) if parts else self._only_us(sender)
            hints, summaries = self._hints.newest(), self._summaries.newest()
            message = PushPull(
                self._me, view, hints=hints, parts=parts, hello=not parts, summaries=summaries
            )
            self._told.use(len(view) + len(hints) + len(summaries))
            self._ask(now, sender, message)
        return True

    def reply(self, now: float, peer: PeerId, asked: PushPull) -> None:
        """The other half of an exchange; only who this is, when too much was told just now."""
        room = self._told.has_room(now)
        brief = (asked.hello and not asked.joining) or not room
        view = self._only_us(peer) if brief else self._view(asked.parts)
        if brief and asked.joining:
            view = (*view, *self._others(now, peer))
        hints = self._hints.newest() if room else ()
        summaries = self._summaries.newest() if room else ()
        self._told.use(len(view) + len(hints) + len(summaries))
        parts = () if brief else asked.parts
        reply = PushPullReply(
            self._me, view, hints, asked.dialled, parts, hello=brief, summaries=summaries
        )
        self._outbox.send(peer, reply)

    # -- what is owed --

    def _ask(self, now: float, peer: PeerId, message: PushPull) -> None:
        self._note_asked(now, peer)
        self._outbox.send(peer, message)

    def _note_asked(self, now: float, whom: str) -> None:
        self._asked.pop(whom, None)
        self._asked[whom] = now
        if len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]

    def is_answer(self, now: float, sender: PeerId, reply: PushPullReply) -> bool:
        """Whether this reply was owed; from now on it isn't any more."""
        asked = self._asked.pop(reply.dialled or sender, -math.inf)
        return now - asked <= ANSWER_INTERVALS * self._config.probe_interval

    # -- hellos --

    def dial(self, now: float, address: str, *, joining: bool) -> None:
        """Knock where a seed, or a member held for dead, may be."""
        self._note_asked(now, address)
        hello = PushPull(self._me, (self._claim(),), joining, dialled=address, hello=True)
        self._outbox.send_to(address, hello)

    def greet(self, now: float, peer: PeerId) -> None:
        """Tell a stranger who this is."""
        self._ask(now, peer, PushPull(self._me, self._only_us(peer), hello=True))

    def _only_us(self, peer: PeerId) -> tuple[Rumour, ...]:
        """Who this is, and what is held of the addressee if it is held for gone."""
        held = self._members.rank(peer)
        own = (self._claim(),)
        if held is None or self._members.is_reachable(peer):
            return own
        return (*own, Rumour(peer, *held))

    def _others(self, now: float, peer: PeerId) -> tuple[Rumour, ...]:
        """A few members at random, whom it may ask instead."""
        drawn = (self._members.get(p) for p in self._members.sample(self._rng, 4 * NAMED, (peer,)))
        settled = [
            Rumour(view.peer_id, view.incarnation, view.status, view.info)
            for view in drawn
            if view is not None and view.status is Status.ALIVE and view.since <= now - SETTLED
        ]
        return tuple(settled[:NAMED])

    # -- reasons to compare --

    def welcome_back(self, now: float, peer: PeerId) -> None:
        """It was held for dead, and is back: compare; but half a cluster comes back at once."""
        if now >= self._next_comparison:
            self._next_comparison = now + self._config.mismatch_interval
            self.compare_with(peer)

    def differs(self, now: float, peer: PeerId) -> None:
        """Something that it did shows that its view is another one."""
        if self._doubters.has_room(now):
            self._doubters.use(1)
            self.compare_with(peer)

    def mismatch(self, now: float, sender: PeerId, ours: int, theirs: int) -> None:
        """Views that differ when all has been said are compared, but not in storms."""
        if theirs in (0, ours) or now < self._next_comparison:
            return
        self._next_comparison = now + self._config.mismatch_interval
        self.compare_with(sender)

    def introduce(self, now: float, sender: PeerId) -> None:
        """A stranger writes, so it knows this peer: say hello, but never in storms."""
        if sender in self._members or sender == self._me.peer_id or now < self._next_introduction:
            return
        self._next_introduction = now + self._config.gossip_interval
        self.greet(now, sender)
