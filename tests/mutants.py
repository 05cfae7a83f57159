"""Deliberate bugs, one or more for each check of the whole-cluster simulator.

Each is a patch of the product, made and taken back by a context manager, with the check that
must find it. A check that finds no bug counts for nothing (test_sim_cluster_mutants.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from heapq import heappush
from math import inf
from typing import Any
from unittest.mock import patch

import msgspec

from tensorhub_p2p.protocol.directory import admission, quorum
from tensorhub_p2p.protocol.directory.directory import Directory
from tensorhub_p2p.protocol.directory.own import OwnRegisters
from tensorhub_p2p.protocol.directory.quorum import Request
from tensorhub_p2p.protocol.directory.warming import Debts
from tensorhub_p2p.protocol.groups import calls, election, leading, resolving, selection
from tensorhub_p2p.protocol.groups.candidate import Candidate
from tensorhub_p2p.protocol.groups.claims import generation_of
from tensorhub_p2p.protocol.groups.election import Election
from tensorhub_p2p.protocol.groups.generation_gate import GenerationGate
from tensorhub_p2p.protocol.groups.leading import CallLeader, LeaderState
from tensorhub_p2p.protocol.groups.notices import Notices
from tensorhub_p2p.protocol.groups.resolving import DirectoryResolver
from tensorhub_p2p.protocol.groups.selection import NO_FLOOR, holdings
from tensorhub_p2p.protocol.messages import KeepAnswer
from tensorhub_p2p.protocol.node import Node
from tensorhub_p2p.protocol.pulls.served import Served
from tensorhub_p2p.protocol.pulls.serving import Drained, ShardServer
from tensorhub_p2p.protocol.pulls.sources import Source
from tensorhub_p2p.protocol.retention import needs
from tensorhub_p2p.protocol.retention.held import RefState
from tensorhub_p2p.protocol.retention.promising import Plea, Promise
from tensorhub_p2p.protocol.shards import deadlines, outcomes
from tensorhub_p2p.protocol.shards.keeping import Keep
from tensorhub_p2p.protocol.shards.machines import Machines
from tensorhub_p2p.protocol.shards.publishing import Hidden, References
from tensorhub_p2p.protocol.shards.running_verb import RunningVerb, Verb
from tensorhub_p2p.protocol.shards.verbs import StopDigests
from tensorhub_p2p.protocol.shards.withdrawing import Withdrawal
from tensorhub_p2p.sim.cluster import checks
from tensorhub_p2p.sim.cluster.checks import ClusterCheck
from tensorhub_p2p.sim.cluster.faults import Late, Leave, Replace
from tensorhub_p2p.sim.cluster.seeds import ClusterRun, Setting
from tensorhub_p2p.sim.cluster.transfer import SimPull
from tensorhub_p2p.sim.faults import Crash, Fault, Partition, Pause, Schedule


@dataclass(frozen=True)
class Mutant:
    """One bug: what it is, who must find it, and in what runs it shows."""

    name: str
    check: type[ClusterCheck]
    apply: Callable[[], Any]
    """A context manager."""
    setting: Callable[[Setting], Setting] = lambda setting: setting
    faults: tuple[Fault, ...] = ()
    """What goes wrong, if that must be something special."""
    first: int = 0
    """A seed that finds it, to begin with: it saves time, and may change with the code."""

    def run(self, seed: int) -> ClusterRun:
        """One run in which it may show, to be carried out while it is applied."""
        drawn = replace(Setting.drawn(seed), rests=False, herd=0, wishers=0, bucket_registers=48)
        setting = self.setting(drawn)
        schedule = Schedule(self.faults) if self.faults else setting.faults()
        return ClusterRun(setting, schedule, (self.check,))


MUTANTS: list[Mutant] = []


def mutant(
    check: type[ClusterCheck], *faults: Fault, first: int = 0, **changes: object
) -> Callable[[Callable[[], Iterator[None]]], None]:
    """Enlist a bug. `changes` are made to the drawn setting: runs in which it can show."""

    def enlist(make: Callable[[], Iterator[None]]) -> None:
        def setting(drawn: Setting) -> Setting:
            return replace(drawn, **changes)  # type: ignore[arg-type]

        found = Mutant(make.__name__, check, contextmanager(make), setting, faults, first)
        MUTANTS.append(found)

    return enlist


@contextmanager
def patched(*places: tuple[object, str, object]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(patch.object(owner, name, value))
        yield


def nothing(*_args: object, **_options: object) -> None:
    """In place of a method: it does nothing."""


# --- groups ---


@mutant(checks.OneGeneration, steady=False)
def a_generation_takes_the_counter_of_the_one_before() -> Iterator[None]:
    draft, on_propose = Candidate.draft, Election._on_propose

    def drafts_again(self: Candidate, members: Any, above: int, floor: Any) -> Any:
        record = draft(self, members, above, floor)
        if record is None or record.generation.counter < 2:
            return record
        generation = generation_of(record.generation.counter - 1, members)
        return msgspec.structs.replace(record, generation=generation)

    def votes_again(self: Election, now: float, sender: Any, message: Any) -> None:
        self._accepted = 0
        on_propose(self, now, sender, message)

    with patched((Candidate, "draft", drafts_again), (Election, "_on_propose", votes_again)):
        yield


@mutant(checks.SameAnswer, first=8, shards=2, steady=False)
def who_asks_after_the_decision_has_it_decided_anew() -> Iterator[None]:
    asked = CallLeader._asked

    def asks_anew(self: CallLeader, now: float, shard: int, call: int, ask: Any) -> None:
        if call == self.call and self.state is LeaderState.DECIDED:
            self._resolve(now, ask.question)
        asked(self, now, shard, call, ask)

    with patched((CallLeader, "_asked", asks_anew)):
        yield


@mutant(checks.NobodyUnaware, shards=2, steady=False)
def nobody_is_told_of_the_end_of_a_generation() -> Iterator[None]:
    with patched((Notices, "generation_ended", nothing)):
        yield


@mutant(
    checks.NobodyUnaware,
    Crash(1.0, inf, 0),
    Crash(1.0, inf, 1),
    first=4,
    shards=2,
    chunks=6,
    rate=1e6,
    duration=18.0,
    loss=0.0,
    steady=False,
)
def nobody_is_told_of_a_void() -> Iterator[None]:
    with patched((Notices, "call_over", nothing), (Machines, "fail_with_notice", _silent)):
        yield


def _silent(self: Machines) -> None:
    """As the real one; without a notice the verb just ends as if it had timed out."""
    notice = self.part.notices.take()
    deadlines.expire(self, 0.0) if notice is None else self.fail(notice)


@mutant(checks.NobodyUnaware, shards=2, steady=False)
def every_member_is_told_of_an_end_twice() -> Iterator[None]:
    take = Notices.take

    def takes_and_keeps(self: Notices) -> Any:
        notice = take(self)
        if notice is not None and not hasattr(notice, "again"):
            notice.again = True  # type: ignore[attr-defined]
            self.pending = type(notice)(str(notice))
            self.pending.again = True  # type: ignore[attr-defined]
        return notice

    with patched((Notices, "take", takes_and_keeps)):
        yield


@mutant(checks.NeverBackwards, keeps=False, steady=False, rollouts=2)
def a_group_has_no_floor_and_is_given_the_oldest_at_times() -> Iterator[None]:
    turns = itertools.cycle((max, min))

    def any_of_them(question: Any, found: Any, _floor: Any) -> Any:
        usable = [holding for holding in found.values() if holding.whole and holding.covered]
        return next(turns)(usable, key=lambda holding: holding.publication, default=None)

    never = lambda _question, _decision, _floor: False  # noqa: E731
    with patched(
        (resolving, "select", any_of_them),
        (calls, "falls_below", never),
        (leading, "falls_below", never),
    ):
        yield


@mutant(
    checks.Remembers,
    Pause(0.5, 6.5, 2),
    Leave(6.0, 10.0, 0),
    Crash(6.6, 0.3, 1),
    first=3,
    steady=False,
    zones=1,
    shards=1,
    trainers=1,
    rollouts=2,
    elastic=0,
    follower=0,
    retainers=0,
    spares=1,
    keeps=False,
    period=0.4,
    cuts=False,
    converged=True,
    retracts=False,
    loss=0.0,
)
def whoever_comes_after_all_members_knows_nothing() -> Iterator[None]:
    with patched((election, "floor_on_record", lambda _registers: NO_FLOOR)):
        yield


@mutant(
    checks.Fenced,
    Pause(1.0, 6.0, 0),
    Replace(4.0, inf, 0),
    first=6,
    shards=1,
    sockets=False,
    steady=False,
    keeps=False,
    zones=1,
    duration=10.0,
)
def nobody_is_fenced() -> Iterator[None]:
    admits = lambda _self, _now, _sender, _message: True  # noqa: E731
    with patched(
        (admission, "_fenced", nothing),
        (GenerationGate, "admits", admits),
    ):
        yield


@mutant(checks.Lively, shards=2, elastic=0, follower=0, steady=False)
def the_death_of_a_member_breaks_nothing() -> Iterator[None]:
    with patched((Election, "peer_gone", nothing), (Election, "_on_claims", nothing)):
        yield


# --- versions ---


@mutant(checks.WholeOnly, shards=2, steady=False)
def a_version_is_whole_with_a_shard_missing() -> Iterator[None]:
    def sees_more(registers: Any, is_gone: Any) -> Any:
        found = holdings(registers, is_gone)
        for holding in found.values():
            if len(holding.publishing) >= holding.num_shards - 1:
                holding.whole = True
                for shard in range(holding.num_shards):
                    holding.ready.setdefault(shard, set()).update(
                        *(peers for peers in holding.ready.values())
                    )
        return found

    with patched((resolving, "holdings", sees_more), (admission, "_admit_mark", nothing)):
        yield


SOON_GONE: dict[str, Any] = {
    "steady": False,
    "zones": 1,
    "shards": 1,
    "trainers": 1,
    "rollouts": 2,
    "elastic": 2,
    "follower": 0,
    "retainers": 0,
    "offload_chunks": 0,
    "spares": 1,
    "keeps": False,
    "period": 0.4,
    "cuts": False,
    "converged": True,
    "retracts": False,
    "duration": 6.0,
}
"""Runs in which versions are gone before long, and there is no memory for copies."""


@mutant(checks.KeptForCalls, **SOON_GONE, chunks=3, rate=2e6, latency=(0.0002, 0.002))
def pins_hold_nothing_back() -> Iterator[None]:
    with patched((needs, "pins_of_others", lambda *_what: ())):
        yield


@mutant(
    checks.KeptForCalls,
    *(Late(0.0, 9.0, place, to, 1.0) for place in (1, 2) for to in range(6) if to != place),
    first=13,
    **{**SOON_GONE, "period": 0.2},
    chunks=1,
    latency=(0.0002, 0.002),
)
def what_is_withdrawn_can_be_pinned() -> Iterator[None]:
    def is_satisfied(self: DirectoryResolver, now: float, _pinned: Any) -> None:
        assert self._answer is not None
        check(self, now, self._answer)

    check = DirectoryResolver._check
    with patched(
        (admission, "_admit_pin", nothing),
        (admission, "_admit_mark", nothing),
        (DirectoryResolver, "_check", is_satisfied),
    ):
        yield


@mutant(checks.NoDigestAfterHiding, keeps=False, chunks=6, digest_seconds=0.2, steady=False)
def digests_go_on_after_hiding() -> Iterator[None]:
    on_hidden = outcomes.on_hidden

    def says_less(self: Machines, now: float, event: Any) -> None:
        on_hidden(self, now, event)
        self.outbox.items = [x for x in self.outbox.items if not isinstance(x, StopDigests)]

    handlers = {**outcomes.HANDLERS, Hidden: says_less}
    with patched((outcomes, "HANDLERS", handlers)):
        yield


# --- bytes ---


@mutant(checks.RightBytes, damage=0.05, steady=False)
def a_pull_believes_what_it_reads() -> Iterator[None]:
    with patched((SimPull, "_land", _believes)):
        yield


@mutant(
    checks.LowestStands,
    steady=False,
    zones=1,
    shards=1,
    trainers=2,
    retainers=0,
    cuts=False,
)
def the_highest_of_those_that_publish_a_version_answers() -> Iterator[None]:
    def highest(same_version: Any) -> Any:
        return max(same_version, key=lambda holding: holding.publication, default=None)

    with patched((selection, "_lowest", highest)):
        yield


@mutant(checks.RightBytes, steady=False, zones=1, shards=1, trainers=2, retainers=0, deviates=True)
def whoever_has_the_version_has_the_right_bytes() -> Iterator[None]:
    def has_all(self: Source, _manifest: Any) -> None:
        self.have = self.claimed

    with patched((SimPull, "_land", _believes), (Source, "weigh", has_all)):
        yield


def _believes(self: SimPull, now: float, item: Any) -> None:
    """In place of comparing what was read with its digest."""
    self.moved = True
    self.memory.tokens[item.chunk] = item.token
    self._swarm.fetched(now, item.source, item.chunk, self._wanted[item.chunk])


@mutant(
    checks.Drains,
    first=3,
    steady=False,
    upload_slots=1,
    shards=1,
    rollouts=4,
    rate=5e6,
    chunks=6,
    duration=6.0,
)
def a_withdrawn_shard_is_offered_on() -> Iterator[None]:
    def goes_on(self: ShardServer, now: float, _reason: str) -> None:
        self._outbox.emit(Drained(self.slot, self.publication))

    with patched((ShardServer, "withdraw", goes_on), (Served, "drained", nothing)):
        yield


# --- deadlines, and the directory ---


@mutant(checks.Deadlines, first=1, steady=False, duration=18.0)
def a_verb_ends_long_after_its_deadline() -> Iterator[None]:
    begin = RunningVerb.begin

    def begins_later(self: RunningVerb, verb: Verb, *, closed: bool) -> bool:
        verb.deadline += 6.0
        return begin(self, verb, closed=closed)

    with patched((RunningVerb, "begin", begins_later)):
        yield


@mutant(checks.NotLost, first=7, steady=True, cuts=False, slow_repair=True, loss=0.2)
def new_owners_answer_before_they_merged() -> Iterator[None]:
    with patched((Debts, "warm", property(lambda _self: True))):
        yield


@mutant(checks.NotLost, steady=True, cuts=False, slow_repair=True, loss=0.2)
def one_owner_is_a_majority() -> Iterator[None]:
    with patched((quorum, "majority", lambda _count: 1)):
        yield


TURNS: dict[str, Any] = {
    "steady": True,
    "slow_repair": True,
    "zones": 1,
    "shards": 1,
    "trainers": 2,
    "rollouts": 2,
    "elastic": 0,
    "follower": 0,
    "retainers": 0,
    "offload_chunks": 0,
    "spot": False,
    "duration": 8.0,
}
"""Runs in which trainers take turns, so that what is newest is never taken back."""


@mutant(checks.Linear, first=2, **TURNS, cuts=False, spares=2, period=0.3, loss=0.2)
def a_publish_ends_before_it_is_anywhere() -> Iterator[None]:
    write = References.write

    def forgets_one(
        self: References, now: float, phase: Any, then: Any, *, kept: bool = False
    ) -> None:
        write(self, now, phase, lambda _now, _refused: None, kept=kept)
        then(now, None)

    with patched((References, "write", forgets_one)):
        yield


@mutant(checks.Quiet, **{**SOON_GONE, "duration": 2.0, "period": 1.0}, rests=True)
def writers_and_owners_never_agree_and_look_again_soon() -> Iterator[None]:
    lacks, numbers = Directory._on_lacks, itertools.count()

    def looks_again(self: Directory, now: float, sender: Any, message: Any) -> None:
        lacks(self, now, sender, message)
        heappush(self._checks, (now + 0.1, message.key, (sender,)))

    with patched(
        (Directory, "_on_lacks", looks_again),
        (OwnRegisters, "fingerprint", lambda _self, _key: next(numbers)),
    ):
        yield


@mutant(
    checks.Linear,
    *(Late(0.0, 12.0, place, to, 0.3) for place in (0, 1) for to in range(2, 8)),
    first=2,
    **{**TURNS, "rollouts": 4},
    cuts=False,
    spares=2,
    chunks=1,
    period=0.2,
    loss=0.0,
    rate=400e6,
    converged=True,
)
def what_one_owner_says_need_not_be_seen_by_the_next_who_asks() -> Iterator[None]:
    with patched((Request, "agreed", property(lambda _self: False, nothing))):
        yield


@mutant(
    checks.Linear,
    Partition(1.0, 7.0, (0, 1, 2)),
    first=3,
    **TURNS,
    cuts=True,
    spares=3,
    period=4.0,
    loss=0.0,
)
def what_was_written_across_a_cut_is_never_merged() -> Iterator[None]:
    with patched((Debts, "owe", nothing), (Directory, "_plan_checks", nothing)):
        yield


# --- retention ---


WANTED: dict[str, Any] = {
    "steady": False,
    "zones": 1,
    "shards": 1,
    "trainers": 1,
    "rollouts": 1,
    "retainers": 1,
    "newest": 2,
    "offload_chunks": 48,
    "keeps": False,
    "period": 0.4,
    "cuts": False,
    "spot": False,
}
"""Runs in which versions are wanted, and there is memory for them."""


@mutant(checks.RetainedStays, **WANTED)
def nobody_looks_what_is_retained() -> Iterator[None]:
    with patched((needs, "protected", lambda _found, _wishes: {})):
        yield


@mutant(
    checks.RetainedStays,
    **{**WANTED, "zones": 2, "rollouts": 0, "retainers": 0},
    wishers=1,
    converged=True,
    duration=12.0,
)
def nobody_cares_what_other_zones_retain() -> Iterator[None]:
    with patched((Node, "_retained_elsewhere", lambda _self, _model: ())):
        yield


AT_ONCE: dict[str, Any] = {
    **WANTED,
    "spares": 0,
    "rollouts": 0,
    "retainers": 0,
    "herd": 2,
    "wishers": 1,
    "newest": 3,
    "elastic": 0,
    "follower": 0,
    "chunks": 1,
    "period": 0.8,
    "duration": 12.0,
    "converged": True,
    "sockets": False,
    "latency": (0.0005, 0.002),
    "loss": 0.0,
    "duplicate": 0.0,
    "copy_fails": 0.0,
    "copy_seconds": 0.001,
    "digest_seconds": 0.001,
    "rate": 400e6,
}
"""Runs in which the last two that hold a wanted version give it up at about the same time."""
LATE_YES = Late(0.0, 12.0, place=2, to=1, delay=0.3)


@mutant(checks.RetainedStays, LATE_YES, first=1, **{**AT_ONCE, "herd": 3, "latency": (0.001, 0.03)})
def who_gives_it_up_promises_to_keep_it() -> Iterator[None]:
    def says_yes(self: Promise, now: float, _stance: Any, _me: Any, _from: Any, ask: Any) -> bool:
        self.bind(now, ask.publication)
        return True

    with patched((Promise, "consider", says_yes)):
        yield


@mutant(checks.RetainedStays, LATE_YES, first=4, **AT_ONCE)
def who_gives_a_promise_counts_on_one_that_he_was_given_before() -> Iterator[None]:
    with patched((Withdrawal, "promised", nothing)):
        yield


@mutant(checks.RetainedStays, LATE_YES, first=4, **AT_ONCE)
def a_yes_to_an_earlier_request_counts() -> Iterator[None]:
    receive = Plea.receive

    def believes(self: Plea, now: float, sender: Any, message: Any) -> None:
        if isinstance(message, KeepAnswer) and message.yes:
            message = msgspec.structs.replace(message, request=self._request)
        receive(self, now, sender, message)

    with patched((Plea, "receive", believes)):
        yield


@mutant(checks.RetainedStays, **{**WANTED, "rollouts": 0, "newest": 3}, duration=10.0)
def a_copy_is_freed_at_once() -> Iterator[None]:
    def frees(self: Keep, now: float, _need: Any) -> None:
        if self.references.state is RefState.HELD:
            self.references.withdraw(now, freeing=True)

    def bound_by_nothing(self: Withdrawal, now: float) -> Any:
        return () if self._around.offload else bound_by(self, now)

    bound_by = Withdrawal._bound_by
    with patched((Keep, "_on_need", frees), (Withdrawal, "_bound_by", bound_by_nothing)):
        yield


@mutant(checks.RetainedStays, **WANTED)
def nobody_waits_for_the_copy() -> Iterator[None]:
    on_reserved = Withdrawal._on_reserved

    def hides(self: Withdrawal, now: float, why: str) -> None:
        on_reserved(self, now, why)
        if self.state is RefState.OFFLOADING:
            self._hide(now, kept=True)

    with patched((Withdrawal, "_on_reserved", hides)):
        yield


@mutant(checks.MemoryEndsFree, **WANTED)
def a_copy_is_kept_for_ever() -> Iterator[None]:
    with patched((Keep, "_on_need", nothing)):
        yield


@mutant(checks.Retracted, **WANTED, retracts=True)
def nobody_hears_that_a_version_is_bad() -> Iterator[None]:
    def sees_nothing_bad(registers: Any, is_gone: Any) -> Any:
        found = holdings(registers, is_gone)
        for holding in found.values():
            holding.retracted = False
        return found

    with patched((resolving, "holdings", sees_nothing_bad), (admission, "_retracted", nothing)):
        yield
