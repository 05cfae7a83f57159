"""Invariants of membership: what must hold in every run, and what must come true.

Rules of this file. It is apart from the code that it checks: it listens to events and asks
public questions (`members()`), and knows from the network who really lives. It changes
nothing.

Theory of operation. A check hears each event (`on_event`), looks at all peers now and then
(`look`), and may conclude when the calm after the faults is over (`conclude`). What it
finds wrong it raises as `Violation`.

    RanksRise         a view never goes back to a lower (incarnation, status)
    OwnLife           nobody holds himself for gone; only a peer itself raises its incarnation
    GuardedVerdicts   who just woke declares nobody dead that is well
    StaysGone         one that left, or was forgotten, doesn't come back by hearsay
    Bounded           tables and messages keep their bounds
    NoStorms          nobody sends much more than it is asked
    SparesStalled     no stalled process is declared dead, nor does it declare one
    Converges         once faults are over, all that run see all that run, within a stated
                      time, and nobody else; and it stays so
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.protocol.envelope import MAX_MESSAGE_BYTES
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.members import GONE, MemberView
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged, MemberForgotten
from tensorhub_p2p.protocol.messages import Status
from tensorhub_p2p.sim.host import Host, State
from tensorhub_p2p.sim.membership import MembershipSim
from tensorhub_p2p.sim.record import FalseDeath

WAKING = 1.0
"""Seconds after a pause during which its end still may explain a verdict."""
WELL_FOR = 5.0
"""Seconds for which a peer, and the weather, must have been well to count as such."""
STORM = 300
"""Messages that a peer may send in a second, besides one for each that it receives."""

Rank = tuple[int, Status]


class Violation(AssertionError):
    """Something was seen that must never be."""


class Check:
    """One invariant of one run."""

    def __init__(self, sim: MembershipSim) -> None:
        self.sim = sim
        self.network = sim.network

    def on_event(self, peer: PeerId, event: Event) -> None:
        """One machine emitted this."""

    def look(self) -> None:
        """Some time has passed: look at everybody."""

    def conclude(self) -> None:
        """The calm is over."""

    def awake(self) -> list[Host]:
        """Those whose machines run."""
        return [host for host in self.network.hosts() if host.state is State.RUNNING]

    def views(self, host: Host) -> tuple[MemberView, ...]:
        """What a peer holds of everyone, itself first."""
        return self.sim.machine(host.peer_id).members()


class RanksRise(Check):
    """A view never goes back to a lower (incarnation, status)."""

    def __init__(self, sim: MembershipSim) -> None:
        super().__init__(sim)
        self._highest: dict[tuple[PeerId, PeerId], Rank] = {}

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, MemberChanged):
            self._note(peer, event.member)

    def look(self) -> None:
        for host in self.awake():
            for view in self.views(host):
                self._note(host.peer_id, view)

    def _note(self, observer: PeerId, view: MemberView) -> None:
        pair, rank = (observer, view.peer_id), (view.incarnation, view.status)
        highest = self._highest.get(pair, rank)
        if rank < highest:
            raise Violation(f"{observer} held {view.peer_id} for {highest}, and now for {rank}")
        self._highest[pair] = rank


class OwnLife(Check):
    """Nobody holds himself for gone, and only a peer itself raises its incarnation."""

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, MemberChanged):
            self._compare(peer, event.member)

    def look(self) -> None:
        for host in self.awake():
            own, *others = self.views(host)
            if own.status is not Status.ALIVE:
                raise Violation(f"{host.peer_id} runs and holds itself for {own.status.name}")
            for view in others:
                self._compare(host.peer_id, view)

    def _compare(self, observer: PeerId, view: MemberView) -> None:
        host = self.network.find(view.peer_id)
        if host is None:
            raise Violation(f"{observer} knows {view.peer_id}, which never existed")
        own = self.views(host)[0].incarnation
        if view.incarnation > own:
            raise Violation(
                f"{observer} holds {view.peer_id} at incarnation {view.incarnation}, "
                f"and its own is {own}"
            )


class GuardedVerdicts(Check):
    """Who just woke from a pause that it noticed declares nobody dead that is well."""

    def __init__(self, sim: MembershipSim) -> None:
        super().__init__(sim)
        self._slept: dict[PeerId, tuple[float, float]] = {}
        """By peer: when it fell asleep last, and when it woke."""

    def look(self) -> None:
        for host in self.network.hosts():
            if host.is_asleep:
                self._slept[host.peer_id] = (host.since, host.since)
            elif host.peer_id in self._slept and host.state is State.RUNNING:
                fell_asleep, _ = self._slept[host.peer_id]
                if host.since > fell_asleep:
                    self._slept[host.peer_id] = (fell_asleep, host.since)

    def on_event(self, peer: PeerId, event: Event) -> None:
        if not isinstance(event, MemberChanged) or event.member.status is not Status.DEAD:
            return
        if self.network.ticking != peer or not self._just_woke(peer):
            return
        other = self.network.host(event.member.peer_id)
        if self._is_well(other):
            raise Violation(f"{peer} just woke and declares {other.peer_id} dead, which is well")

    def _just_woke(self, peer: PeerId) -> bool:
        host = self.network.host(peer)
        fell_asleep, woke = self._slept.get(peer, (0.0, -WAKING))
        woke = max(woke, host.since)
        noticed = woke - fell_asleep > self.sim.config.swim.pause_after + WAKING
        return peer in self._slept and noticed and self.network.now - woke < WAKING

    def _is_well(self, host: Host) -> bool:
        now = self.network.now
        quiet = not self.network.weather and now - self.network.cut_until > WELL_FOR
        well = host.state is State.RUNNING and not host.cost and now - host.since > WELL_FOR
        return quiet and well


class StaysGone(Check):
    """One that left, or was forgotten, doesn't come back by hearsay."""

    def __init__(self, sim: MembershipSim) -> None:
        super().__init__(sim)
        self._gone: dict[tuple[PeerId, PeerId], int] = {}
        """(observer, peer) → the incarnation at which it is gone for good."""

    def on_event(self, peer: PeerId, event: Event) -> None:
        if isinstance(event, MemberForgotten):
            host = self.network.host(event.peer)
            self._gone[peer, event.peer] = self.views(host)[0].incarnation if host.is_gone else 0
        elif isinstance(event, MemberChanged):
            view = event.member
            last = self._gone.get((peer, view.peer_id))
            if last is not None and view.is_reachable and view.incarnation <= last:
                raise Violation(f"{peer} holds {view.peer_id}, which was gone for good, for alive")
            if view.status is Status.LEFT:
                self._gone[peer, view.peer_id] = 1 << 62


class Bounded(Check):
    """Tables and messages keep their bounds, and outboxes are emptied."""

    def look(self) -> None:
        limit = self.sim.config.swim.max_members + 1
        for host in self.awake():
            size = len(self.views(host))
            if size > limit:
                raise Violation(f"{host.peer_id} remembers {size} members, more than {limit}")
        if self.network.largest > MAX_MESSAGE_BYTES:
            raise Violation(f"a message of {self.network.largest} bytes was sent")


class NoStorms(Check):
    """Nobody sends much more than it is asked."""

    def __init__(self, sim: MembershipSim) -> None:
        super().__init__(sim)
        self._before: dict[PeerId, tuple[int, int]] = {}
        self._looked_at = self.network.now

    def look(self) -> None:
        now = self.network.now
        passed, self._looked_at = now - self._looked_at, now
        for host in self.network.hosts():
            sent, received = self._before.get(host.peer_id, (0, 0))
            self._before[host.peer_id] = (host.sent, host.received)
            allowed = host.received - received + STORM * max(1.0, passed)
            if host.sent - sent > allowed:
                raise Violation(
                    f"{host.peer_id} sent {host.sent - sent} messages in {passed:.1f} s"
                )


class SparesStalled(Check):
    """No stalled process is declared dead, nor does one declare anybody when it wakes.

    For runs whose only faults are stalls shorter than `unresponsive_limit`.
    """

    def look(self) -> None:
        self.conclude()

    def conclude(self) -> None:
        wrong: list[FalseDeath] = self.sim.record.false_deaths
        if wrong:
            raise Violation(f"{len(wrong)} false deaths, the first: {wrong[0]}")


class Converges(Check):
    """Everyone that runs holds everyone that runs, and nobody else, for a member."""

    def conclude(self) -> None:
        for host in self.awake():
            running = set(self.sim.running(host.zone))
            views = {view.peer_id: view.status for view in self.views(host)}
            held = {peer for peer, status in views.items() if status not in GONE}
            if held != running:
                raise Violation(
                    f"views differ: {host.peer_id} misses {sorted(running - held)} "
                    f"and still holds {sorted(held - running)}"
                )


EVERY_RUN: tuple[Callable[[MembershipSim], Check], ...] = (
    RanksRise,
    OwnLife,
    GuardedVerdicts,
    StaysGone,
    Bounded,
    NoStorms,
    Converges,
)
