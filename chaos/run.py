"""One run: a cluster starts, is hurt by a schedule, calms down, and ends; then it is judged.

Rules of this file. It drives an arena by a plan, with nothing decided but in the schedule and the
faults; what came of it is for the judge, another process, to say from the journals.

Phases, each told to the journal:

    begun    all workers have joined (or `JOIN_SECONDS` have passed): faults begin
    calm     no fault is left; for `calm` seconds everything must work again
    closing  all are told to end, and do so within `CLOSE_SECONDS`
    over     nothing runs any more

Who dies is started again: by the fault that killed it, and else here, after a pause. The judge
knows which deaths were meant.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.testbed import Testbed
from chaos import journal
from chaos.arena import ROOT, Arena, Role, raise_descriptor_limit
from chaos.casting import Shape
from chaos.checks import Violation
from chaos.faults import CLOCK_JUMP, FAULTS, NoTarget, Struck, faketime
from chaos.journal import Phase, Trouble
from chaos.report import Summary, summarise
from chaos.schedule import Planned
from chaos.stalls import AFTER

JOIN_SECONDS = 40.0
CLOSE_SECONDS = 50.0
STEP_SECONDS = 0.02
LOOK_SECONDS = 0.3
"""Between two looks whether it is enough."""
SAMPLE_SECONDS = 5.0
REST_SECONDS = 1.5
"""Until who ended by itself is started again."""
RETRY_SECONDS = 0.5
TRIES = 6
"""A fault that finds nobody to strike is tried so often, then left out."""
FAKETIME_FILES = ("faketime_shm_", "sem.faketime_sem_")
LONGEST_APART = 4.0
REST_APART = AFTER + 0.25
"""So that no pull is set down to two of them."""
WITH_CLOCKS = 3
"""So many workers have a wall clock of their own, which can be set, where one is to be."""


@dataclass(frozen=True)
class Plan:
    """A run, as it is decided beforehand."""

    seed: int
    cast: Sequence[Role]
    shape: Shape
    faults: Sequence[Planned]
    seconds: float
    calm: float = 20.0
    bug: str = ""
    apart: bool = False
    """One fault at a time, none longer than `LONGEST_APART`, with a rest between; their times are
    not heeded, and it is over when all were there."""


@dataclass
class Run:
    """What a plan has come to."""

    plan: Plan
    directory: Path
    summary: Summary
    violations: list[Violation]
    left_out: dict[str, int] = field(default_factory=dict)
    """Faults that found nobody to strike, by kind."""


class Conductor:
    """Carries a plan out in an arena."""

    def __init__(self, plan: Plan, arena: Arena, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.arena = arena
        self.left_out: dict[str, int] = {}
        self._say = say
        self._random = random.Random(f"strikes/{plan.seed}")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._quiet = False
        """No fault begins any more."""
        self._closing = False
        self._seen: set[str] = set()
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._under_way: dict[int, Callable[[], None]] = {}
        """By number: what ends the fault."""

    # --- time ---

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (journal.now() + seconds, next(self._order), what))

    def _go_on(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Do what falls due, for so long or until it is enough; whether it was."""
        until, look_at = journal.now() + seconds, 0.0
        while journal.now() < until:
            if journal.now() >= look_at:
                if enough():
                    return True
                look_at = journal.now() + LOOK_SECONDS
            while self._due and self._due[0][0] <= journal.now():
                heapq.heappop(self._due)[2]()
            self._reap()
            time.sleep(STEP_SECONDS)
        return enough()

    # --- phases ---

    def conduct(self) -> list[str]:
        """All of it; the processes that had to be killed in the end."""
        for name in self.arena.cast:
            self.arena.start(name)
        joined = self._go_on(JOIN_SECONDS, self._all_there)
        self._phase("begun", "" if joined else "not all had joined")
        self._sample()
        if self.plan.apart:
            self._one_by_one()
        else:
            self._by_the_clock()
        self._quiet = True
        for end in list(self._under_way.values()):
            end()
        self._phase("calm")
        self._go_on(self.plan.calm)
        self._sample_once()
        self._phase("closing")
        return self._close()

    def _by_the_clock(self) -> None:
        for planned in self.plan.faults:
            self._later(planned.at, lambda kind=planned.kind: self._strike(kind, TRIES))  # type: ignore[misc]
        self._go_on(self.plan.seconds)

    def _one_by_one(self) -> None:
        for planned in self.plan.faults:
            self._strike(planned.kind, TRIES)
            self._go_on(TRIES * RETRY_SECONDS, lambda: bool(self._under_way))
            self._go_on(self.plan.seconds, lambda: not self._under_way)
            self._go_on(REST_APART)

    def _phase(self, name: str, detail: str = "") -> None:
        self.arena.write(Phase, phase=name, detail=detail)
        self._say(name)

    def _all_there(self) -> bool:
        """Whether each has once had a version, or led its group."""
        for name, standing in self.arena.look().items():
            if standing.version >= 0 or standing.leads:
                self._seen.add(name)
        return self._seen == set(self.arena.cast)

    def _close(self) -> list[str]:
        self._closing = True
        for life in self.arena.running():
            self.arena.order(life.role.name, "end")
        self._go_on(CLOSE_SECONDS, lambda: not self.arena.running())
        self._reap()
        return self.arena.close()

    # --- what happens again and again ---

    def _sample(self) -> None:
        self._sample_once()
        self._later(SAMPLE_SECONDS, self._sample)

    def _sample_once(self) -> None:
        self.arena.sample()

    def _reap(self) -> None:
        for life in self.arena.reap():
            name = life.role.name
            if name not in self.arena.busy and not self._closing:
                self._later(REST_SECONDS, lambda name=name: self._again(name))  # type: ignore[misc]

    def _again(self, name: str) -> None:
        """Start it, if it doesn't live; under a fault that is for the fault's end to do."""
        if name not in self.arena.busy and not self._closing:
            self.arena.start_again(name)

    # --- faults ---

    def _strike(self, kind: str, tries: int) -> None:
        if self._quiet:
            return
        strike = FAULTS[kind].strike(self.arena, self._random)
        try:
            struck = next(strike)
        except NoTarget:
            if tries > 1:
                self._later(RETRY_SECONDS, lambda: self._strike(kind, tries - 1))
            else:
                self.left_out[kind] = self.left_out.get(kind, 0) + 1
            return
        number = next(self._numbers)
        self._tell(number, kind, struck, ends=False)
        names = {who.rpartition(".")[0] for who in struck.targets}
        self.arena.busy += Counter(names)

        def end() -> None:
            if self._under_way.pop(number, None) is None:
                return  # the calm came first
            self.arena.busy -= Counter(names)
            next(strike, None)
            self._tell(number, kind, struck, ends=True)
            for name in names:  # who died of it otherwise
                self._later(REST_SECONDS, lambda name=name: self._again(name))  # type: ignore[misc]

        self._under_way[number] = end
        longest = LONGEST_APART if self.plan.apart else struck.seconds
        self._later(min(struck.seconds, longest), end)

    def _tell(self, number: int, kind: str, struck: Struck, *, ends: bool) -> None:
        self.arena.write(
            journal.Fault,
            number=number,
            kind=kind,
            ends=ends,
            targets=struck.targets,
            detail=struck.detail,
        )
        if not ends:
            self._say(f"{kind}: {', '.join(struck.targets)} {struck.detail}")


# --- a run from its beginning to its verdict ---


def carry_out(plan: Plan, directory: Path, *, bed: bool, say: Callable[[str], None]) -> Run:
    """Play it, and have it judged."""
    raise_descriptor_limit()
    directory.mkdir(parents=True)
    shared = set(os.listdir("/dev/shm"))
    hosts = 1 + max(role.host for role in plan.cast)
    testbed = Testbed(hosts=hosts, mbit=plan.shape.mbit) if bed else None
    try:
        arena = Arena(
            directory,
            plan.cast,
            seed=plan.seed,
            bed=testbed,
            mbit=plan.shape.mbit,
            bug=plan.bug,
            tensors=plan.shape.tensors,
            size=plan.shape.size,
            period=plan.shape.period,
            step=plan.shape.step,
            unresponsive=plan.shape.unresponsive,
        )
        _give_clocks(arena, plan)
        conductor = Conductor(plan, arena, say)
        try:
            leaked = conductor.conduct()
        finally:
            arena.close()
        for name in set(os.listdir("/dev/shm")) - shared:
            if name.startswith(FAKETIME_FILES) and int(name.rpartition("_")[2]) in arena.pids:
                os.unlink(f"/dev/shm/{name}")  # it leaves them behind when its process is killed
            elif not name.startswith((*FAKETIME_FILES, "sem.mp-")):  # those are of other programs
                arena.write(Trouble, what=f"left behind in /dev/shm: {name}")
        arena.write(Phase, phase="over", detail=", ".join(leaked))
    finally:
        if testbed is not None:
            testbed.close()
    violations = judged(directory)
    summary = summarise(journal.read(directory), violations, plan.seed, leaked)
    return Run(plan, directory, summary, violations, conductor.left_out)


def _give_clocks(arena: Arena, plan: Plan) -> None:
    library = faketime()
    if library is None or not any(planned.kind == CLOCK_JUMP for planned in plan.faults):
        return
    rng = random.Random(f"clocks/{plan.seed}")
    for name in rng.sample(sorted(arena.cast), min(WITH_CLOCKS, len(arena.cast))):
        arena.give_clock(name, library)


def judged(directory: Path) -> list[Violation]:
    """What a process of its own finds in the journals."""
    command = [sys.executable, "-m", "chaos.judge", str(directory)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the judge of {directory} ended with {done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[Violation])
