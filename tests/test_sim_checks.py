"""Each check catches the bug that it is there for, and says how to see it again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tensorhub_p2p.config import Config, SwimConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.members import MemberView
from tensorhub_p2p.protocol.membership.swim import Swim
from tensorhub_p2p.protocol.membership.swim_events import Evidence, MemberChanged
from tensorhub_p2p.protocol.messages import Ack, Message, Nack, Ping, Rumour, Status
from tensorhub_p2p.sim.checks import (
    EVERY_RUN,
    Bounded,
    Check,
    Converges,
    GuardedVerdicts,
    NoStorms,
    OwnLife,
    RanksRise,
    SparesStalled,
    StaysGone,
)
from tensorhub_p2p.sim.faults import Crash, Partition, Pause, Schedule, Stall
from tensorhub_p2p.sim.membership import MembershipSim
from tensorhub_p2p.sim.seeds import CheckFailed, Run, Setting, shrink

QUIET = Setting(seed=1, peers=8, duration=30.0)
PAUSES = Schedule(tuple(Pause(2.0 + 7 * i, 6.0, 2 * i) for i in range(4)))
LONG_PAUSE = Schedule((Pause(1.0, 29.0, 3),))
CRASHES = Schedule((Crash(2.0, float("inf"), 6), Crash(4.0, 5.0, 5)))
STALLS = Schedule((Stall(1.0, 29.0, 3),))


class Forgetful(Swim):
    """Takes a refutation back: holds the refuter at the incarnation before."""

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        super().receive(now, sender, message)
        for view in tuple(self._members):
            if view.incarnation:
                self._members.put(replace(view, incarnation=view.incarnation - 1))


class Resigned(Swim):
    """Believes its own death."""

    def members(self) -> tuple[MemberView, ...]:
        own, *others = super().members()
        if self._opinions.incarnation:
            own = replace(own, status=Status.DEAD)
        return (own, *others)


class Advocate(Swim):
    """Refutes what is said of others."""

    def tick(self, now: float) -> None:
        super().tick(now)
        for view in tuple(self._members):
            if view.status is Status.SUSPECT:
                claim = Rumour(view.peer_id, view.incarnation + 1, Status.ALIVE, view.info)
                self._opinions.hear(now, claim)


class Hasty(Swim):
    """Takes its own pause for everybody else's."""

    def _notice_pause(self, now: float) -> None:
        if self._planned is not None and now - self._planned > self._config.pause_after:
            for peer in tuple(self._members.reachable()):
                self._opinions.accuse(now, peer, Status.DEAD)
        self._last_call = now


class Nostalgic(Swim):
    """Takes those that left for members again."""

    def tick(self, now: float) -> None:
        super().tick(now)
        for view in tuple(self._members):
            if view.status is Status.LEFT:
                back = replace(view, status=Status.ALIVE, incarnation=view.incarnation + 1)
                self._members.put(back)
                self._opinions._on_change(now, back, Status.LEFT)
                self.outbox.emit(MemberChanged(back, Status.LEFT))


class Boundless(Swim):
    """Knows no limit."""

    def __init__(self, info: PeerInfo, config: SwimConfig, rng: random.Random) -> None:
        super().__init__(info, replace(config, max_members=1000), rng)


class Talkative(Swim):
    """Says everything many times."""

    def tick(self, now: float) -> None:
        super().tick(now)
        for view in tuple(self._members) * 50:
            self.outbox.send(view.peer_id, Nack(0))


class Echoing(Swim):
    """Answers everything many times."""

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        super().receive(now, sender, message)
        for _ in range(100):
            self.outbox.send(sender, Nack(0))


class Broken(Swim):
    """Has a bug of the ordinary kind."""

    def tick(self, now: float) -> None:
        super().tick(now)
        if now > 5:
            raise KeyError("somebody")


class Deaf(Swim):
    """Never hears what its fellows hold that it doesn't."""

    def adopt_views(self, now: float, views: Sequence[MemberView]) -> None:
        first, *others = views
        super().adopt_views(now, others if first.peer_id != self.me.peer_id else views)

    def receive(self, now: float, sender: PeerId, message: Message) -> None:
        if isinstance(message, (Ping, Ack)) and self._members.is_reachable(sender):
            super().receive(now, sender, message)


class Blind(Swim):
    """Looks at no sockets."""

    def evidence(self, now: float, peer: PeerId, evidence: Evidence) -> None:
        """Not noticed."""


class Meek(Swim):
    """Never refutes what is said of it."""

    def __init__(self, info: PeerInfo, config: SwimConfig, rng: random.Random) -> None:
        super().__init__(info, config, rng)
        self._opinions._hear_of_self = lambda claim: None  # type: ignore[method-assign]


def run(
    kind: type[Swim],
    check: Callable[[MembershipSim], Check],
    schedule: Schedule,
    config: Config | None = None,
    **changes: Any,
) -> Run:
    def make(info: PeerInfo, config: Config, rng: random.Random) -> Swim:
        return kind(info, config.swim, rng)

    return Run(replace(QUIET, **changes), schedule, make, config, (check,))


CASES = [
    (RanksRise, Forgetful, PAUSES, {"sockets": False}),
    (OwnLife, Resigned, PAUSES, {"sockets": False}),
    (OwnLife, Advocate, PAUSES, {"sockets": False}),
    (GuardedVerdicts, Hasty, PAUSES, {}),
    (NoStorms, Talkative, Schedule(), {}),
    (SparesStalled, Blind, STALLS, {}),
    (Converges, Meek, LONG_PAUSE, {"sockets": False}),
]


@pytest.mark.parametrize(("check", "bug", "schedule", "changes"), CASES)
def test_a_check_catches_its_bug_and_nothing_in_sound_code(
    check: type[Check], bug: type[Swim], schedule: Schedule, changes: dict[str, Any]
) -> None:
    run(Swim, check, schedule, **changes).carry_out()
    with pytest.raises(CheckFailed) as failed:
        run(bug, check, schedule, **changes).carry_out()
    assert failed.value.check == check.__name__


def test_one_that_left_is_seen_to_come_back() -> None:
    def goodbye(kind: type[Swim]) -> None:
        one = run(kind, StaysGone, Schedule())
        one.sim.network.at(3.0, lambda: one.sim.leave(4))
        one.carry_out()

    goodbye(Swim)
    with pytest.raises(CheckFailed, match="gone for good"):
        goodbye(Nostalgic)


def test_a_table_that_outgrows_its_bound_is_seen() -> None:
    config = Config(swim=SwimConfig(max_members=5))
    with pytest.raises(CheckFailed, match="remembers 8 members, more than 6"):
        run(Boundless, Bounded, Schedule(), config).carry_out()


def test_views_that_never_agree_are_told_with_who_misses_whom() -> None:
    with pytest.raises(CheckFailed, match=r"views differ: .* misses"):
        run(Deaf, Converges, Schedule(), sockets=False).carry_out()


@pytest.mark.parametrize(
    ("bug", "name", "reason"),
    [(Echoing, "RuntimeError", "a storm: "), (Broken, "KeyError", "somebody")],
)
def test_a_machine_that_breaks_down_is_told_like_a_failed_check(
    bug: type[Swim], name: str, reason: str
) -> None:
    with pytest.raises(CheckFailed, match=reason) as failed:
        run(bug, Bounded, Schedule()).carry_out()
    assert failed.value.check == name
    assert failed.value.at < 7


def test_a_failure_tells_all_that_is_needed_to_see_it_again() -> None:
    with pytest.raises(CheckFailed) as failed:
        run(Meek, Converges, LONG_PAUSE, sockets=False).carry_out()
    text = str(failed.value)
    assert text.startswith("seed 1: Converges failed at ")
    assert '{"kind": "Pause", "at": 1.0, "lasts": 29.0, "place": 3}' in text
    kept = failed.value.run.to_json("it is never taken back")
    again = Run.from_json(kept)
    assert (again.setting, again.schedule) == (failed.value.run.setting, LONG_PAUSE)


def test_a_failure_is_shrunk_to_the_faults_that_it_needs() -> None:
    noise = (Stall(1.0, 1.0, 1), Partition(3.0, 0.5, (5,)))
    schedule = Schedule((*noise, *LONG_PAUSE.faults))
    with pytest.raises(CheckFailed) as failed:
        run(Meek, Converges, schedule, sockets=False).carry_out()
    assert shrink(failed.value).run.schedule == LONG_PAUSE


def test_sound_code_passes_all_checks_under_every_kind_of_fault() -> None:
    for schedule in (PAUSES, LONG_PAUSE, CRASHES, STALLS):
        Run(QUIET, schedule, checks=EVERY_RUN).carry_out()
