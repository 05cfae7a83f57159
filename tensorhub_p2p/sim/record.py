"""What a simulated membership did: deaths found, deaths invented, how fast, at what cost.

Rules of this file. It listens to events and knows from the network who really lives; it
changes nothing. Whether what it finds is right is checks.py's business.

    Detection      of one crash: when somebody suspected it, when somebody declared it, and
                   when everyone living who had known the peer had it for dead
    FalseDeath     somebody holds a peer for dead whose process exists; one for each observer,
                   with what was wrong with that peer at that time, if anything
    Spread         of one rumour: when each peer heard it
    Traffic        messages and bytes a second, each peer's

Bounds: one entry for each observer of a crash or false death.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import ceil

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.machine import Event
from tensorhub_p2p.protocol.membership.swim_events import MemberChanged
from tensorhub_p2p.protocol.messages import Status
from tensorhub_p2p.sim.host import ASLEEP, GONE, Host, State
from tensorhub_p2p.sim.network import SimNetwork

AFTERMATH = 30.0
"""Seconds for which a fault that is over still explains a false death."""


def percentile(values: Collection[float], share: float) -> float:
    """The smallest of the values that at least this share of them don't exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Detection:
    """How one crash was found. Times are seconds since the crash; None: not so far."""

    peer: PeerId
    of_host: bool
    crashed_at: float
    first_suspected: float | None
    first_declared: float | None
    everyone: float | None
    missing: tuple[PeerId, ...]
    """Living peers that still don't know."""


@dataclass(frozen=True)
class FalseDeath:
    """`observer` holds `peer` for dead, and it isn't."""

    at: float
    observer: PeerId
    peer: PeerId
    cause: str
    """paused, stalled, slow, cut off, each also "lately" and of the observer; else "loss"."""


@dataclass
class Spread:
    """Who has heard one piece of news, and how many seconds after it began."""

    began: float
    audience: frozenset[PeerId]
    heard: dict[PeerId, float] = field(default_factory=dict)

    def note(self, now: float, peer: PeerId) -> None:
        if peer in self.audience:
            self.heard.setdefault(peer, now - self.began)

    def time_until(self, share: float) -> float | None:
        """Seconds until this share of the audience had heard it; None if it hasn't."""
        needed = max(1, ceil(share * len(self.audience)))
        times = sorted(self.heard.values())
        return times[needed - 1] if needed <= len(times) else None

    @property
    def complete(self) -> bool:
        return len(self.heard) == len(self.audience)


@dataclass(frozen=True)
class Traffic:
    """What peers sent over some time. Bytes are those of encoded messages, a second."""

    seconds: float
    peers: int
    mean_messages: float
    max_messages: float
    mean_bytes: float
    max_bytes: float
    mean_bytes_by_kind: dict[str, float]


@dataclass
class TrafficMeter:
    """Compares the network's counters at two moments."""

    network: SimNetwork
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.network.now
        self._before = {h.peer_id: (h.sent, h.sent_bytes) for h in self.network.hosts()}
        self._kinds = Counter(self.network.kinds)

    def read(self, peers: Iterable[PeerId] | None = None) -> Traffic:
        """Of those that run now, or of these."""
        network, seconds = self.network, self.network.now - self.began
        chosen = [network.host(p) for p in (network.running() if peers is None else peers)]
        rates = [self._rates(host, seconds) for host in chosen]
        kinds = network.kinds - self._kinds
        return Traffic(
            seconds,
            len(chosen),
            mean_messages=sum(r[0] for r in rates) / len(rates),
            max_messages=max(r[0] for r in rates),
            mean_bytes=sum(r[1] for r in rates) / len(rates),
            max_bytes=max(r[1] for r in rates),
            mean_bytes_by_kind={k: kinds[k] / seconds / len(rates) for k in sorted(kinds)},
        )

    def _rates(self, host: Host, seconds: float) -> tuple[float, float]:
        sent, sent_bytes = self._before.get(host.peer_id, (0, 0))
        return (host.sent - sent) / seconds, (host.sent_bytes - sent_bytes) / seconds


@dataclass
class _Crash:
    peer: PeerId
    of_host: bool
    at: float
    observers: tuple[PeerId, ...]


class Record:
    """All that happened in one simulated membership."""

    def __init__(self, network: SimNetwork, knows: Callable[[Host, PeerId], bool]) -> None:
        self._network = network
        self._knows = knows
        """Whether a host's machine holds this peer for a member."""
        self.false_deaths: list[FalseDeath] = []
        self._crashes: list[_Crash] = []
        self._declared: dict[PeerId, dict[PeerId, float]] = {}
        """By peer: who holds it for dead, and since when."""
        self._first: dict[tuple[PeerId, Status], float] = {}
        """When somebody first held a peer for this since the peer last was itself."""
        self._troubled: dict[PeerId, tuple[str, float]] = {}
        """What was last wrong with a peer, and until when."""
        self._slow: set[PeerId] = set()
        self._spreads: list[tuple[Spread, Callable[[Event], bool]]] = []

    # -- inputs --

    def on_change(self, host: Host, before: State) -> None:
        """A host came into another state, or became slow or quick."""
        peer, now = host.peer_id, self._network.now
        if host.is_gone and before not in GONE:
            for status in Status:
                self._first.pop((peer, status), None)
            of_host = host.state is State.DOWN
            self._crashes.append(_Crash(peer, of_host, now, self._knowing(host)))
        elif before in GONE and not host.is_gone:
            self._crashes = [crash for crash in self._crashes if crash.peer != peer]
            self._troubled[peer] = ("gone", now)
        elif before in ASLEEP:
            self._troubled[peer] = (before.value, now)
        if host.cost:
            self._slow.add(peer)
        elif peer in self._slow:
            self._slow.discard(peer)
            self._troubled[peer] = ("slow", now)

    def _knowing(self, host: Host) -> tuple[PeerId, ...]:
        """Those who are there and hold it for a member."""
        return tuple(
            other.peer_id
            for other in self._network.hosts()
            if other is not host and not other.is_gone and self._knows(other, host.peer_id)
        )

    def on_event(self, observer: PeerId, event: Event) -> None:
        for spread, is_it in self._spreads:
            if is_it(event):
                spread.note(self._network.now, observer)
        if isinstance(event, MemberChanged):
            self._note_opinion(observer, event.member.peer_id, event.member.status)

    def _note_opinion(self, observer: PeerId, peer: PeerId, status: Status) -> None:
        now, declared = self._network.now, self._declared.setdefault(peer, {})
        if status is Status.ALIVE:
            self._first.pop((peer, Status.SUSPECT), None)
        else:
            silent = status in (Status.SUSPECT, Status.UNRESPONSIVE)
            self._first.setdefault((peer, Status.SUSPECT if silent else status), now)
        if status is not Status.DEAD:
            declared.pop(observer, None)
            return
        declared[observer] = now
        host = self._network.find(peer)
        if host is not None and not host.is_gone:
            cause = self._cause(observer, host)
            self.false_deaths.append(FalseDeath(now, observer, peer, cause))

    def _cause(self, observer: PeerId, host: Host) -> str:
        network, witness = self._network, self._network.host(observer)
        if host.is_asleep:
            return host.state.value
        if host.cost or witness.cost:
            return "slow" if host.cost else "observer slow"
        if network.weather.cuts(host, witness) or network.weather.cuts(witness, host):
            return "cut off"
        for peer, whose in ((host.peer_id, ""), (observer, "observer ")):
            what, until = self._troubled.get(peer, ("", 0.0))
            if what and network.now - until < AFTERMATH:
                return f"{whose}{what} lately"
        return "cut off lately" if network.now - network.cut_until < AFTERMATH else "loss"

    # -- answers --

    def detections(self) -> list[Detection]:
        """One for each crash whose peer never came back, in order."""
        return [self._detection(crash) for crash in self._crashes]

    def _detection(self, crash: _Crash) -> Detection:
        declared = self._declared.get(crash.peer, {})
        living = [p for p in crash.observers if self._network.host(p).state is State.RUNNING]
        missing = tuple(p for p in living if p not in declared)
        times = [max(0.0, declared[p] - crash.at) for p in living if p in declared]
        suspected = self._first.get((crash.peer, Status.SUSPECT))
        return Detection(
            crash.peer,
            crash.of_host,
            crash.at,
            None if suspected is None else suspected - crash.at,
            min(times, default=None),
            max(times, default=0.0) if not missing else None,
            missing,
        )

    def falsely_declared(self) -> dict[PeerId, str]:
        """Peers that anybody ever held for dead though they lived, with the first cause."""
        found: dict[PeerId, str] = {}
        for death in self.false_deaths:
            found.setdefault(death.peer, death.cause)
        return found

    def false_deaths_by_cause(self) -> Counter[str]:
        """How many peers were falsely declared, by the first cause."""
        return Counter(self.falsely_declared().values())

    def follow(self, audience: Iterable[PeerId], is_it: Callable[[Event], bool]) -> Spread:
        """Note from now on which of the audience emit such an event."""
        spread = Spread(self._network.now, frozenset(audience))
        self._spreads.append((spread, is_it))
        return spread

    def unfollow(self, spread: Spread) -> None:
        self._spreads = [entry for entry in self._spreads if entry[0] is not spread]
