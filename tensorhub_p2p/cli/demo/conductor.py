"""The parent process: starts the others, passes on addresses, arranges the accident.

It takes no part in moving weights: no peer runs here, and torch is never imported.

The accident runs through these scenes, each entered by a report:

    CALM      until both shards of the victim's replica hold the accident version
    AIMED     the witness's replica, held back until now, pulls that version too
    STRUCK    the witness killed the victim in the middle of its pull; a process that
              takes the victim's place is started, the trainer goes on without the replica
    MENDED    the newcomer pulled its first version; the trainer counts on it again
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue

from tensorhub_p2p.cli.demo.plan import (
    ROLLOUTS,
    SHARDS,
    TRAINER,
    VICTIM,
    WITNESS,
    Plan,
    worker_name,
)
from tensorhub_p2p.cli.demo.reports import (
    Batch,
    Expect,
    Failed,
    Finished,
    Join,
    Joined,
    Loaded,
    Order,
    Partner,
    Pull,
    Pulled,
    Report,
    Struck,
)
from tensorhub_p2p.cli.demo.worker import Wires, work

FIRST = worker_name(TRAINER, 0)
"""Joins alone; its address is everybody's seed."""
NEWCOMER = worker_name(*VICTIM) + "'"
Watch = Callable[[str, Report], None]


class RunFailed(Exception):
    """The run can't go on; the message says which process and why."""


class Scene(Enum):
    CALM = "calm"
    AIMED = "aimed"
    STRUCK = "struck"
    MENDED = "mended"


@dataclass
class Worker:
    process: BaseProcess
    pipe: Connection
    replica: str
    loaded: bool = False
    finished: bool = False


class Conductor:
    """One run. `watch(name, report)` is told everything that the workers report."""

    def __init__(self, plan: Plan, watch: Watch) -> None:
        self._plan = plan
        self._watch = watch
        self._context = multiprocessing.get_context("spawn")
        self._samples: Queue[Batch] = self._context.Queue()
        self._secret = secrets.token_urlsafe(32)
        self._cluster = f"demo-{secrets.token_hex(4)}"
        self._seeds: tuple[str, ...] = ()
        self._workers: dict[str, Worker] = {}
        self._victims_ready: set[str] = set()
        self.scene = Scene.CALM

    def run(self) -> None:
        """From the first process to the last; raises RunFailed."""
        deadline = time.monotonic() + self._plan.time_limit
        try:
            for replica in (TRAINER, *ROLLOUTS):
                self._start_replica(replica)
            while not all(w.finished for w in self._workers.values()):
                self._turn(deadline)
        finally:
            self._end_all()

    # --- processes ------------------------------------------------------------------------

    def _start_replica(self, replica: str) -> None:
        ends = self._context.Pipe()
        for shard in range(SHARDS):
            self._start(worker_name(replica, shard), replica, shard, ends[shard])

    def _start(self, name: str, replica: str, shard: int, partner: Connection) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=work,
            args=(self._plan, name, replica, shard, Wires(theirs, partner, self._samples)),
            name=name,
            daemon=True,
        )
        process.start()
        # Our copies must go: the other end of each pipe is to notice when a process dies.
        theirs.close()
        partner.close()
        self._workers[name] = Worker(process, ours, replica)

    def _end_all(self) -> None:
        # Those that are finished are about to exit by themselves; the others are stuck.
        for worker in self._workers.values():
            worker.process.join(5.0 if worker.finished else 0.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._samples.close()

    # --- reports and orders ---------------------------------------------------------------

    def _turn(self, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            unfinished = [n for n, w in self._workers.items() if not w.finished]
            raise RunFailed(
                f"not finished after {self._plan.time_limit:.0f} s; unfinished: {unfinished}"
            )
        names = {w.pipe: n for n, w in self._workers.items() if not w.finished}
        for pipe in wait(list(names), timeout=min(remaining, 0.25)):
            assert isinstance(pipe, Connection)
            self._hear(names[pipe], pipe)

    def _hear(self, name: str, pipe: Connection) -> None:
        if name not in self._workers:
            return  # the victim, buried in this very turn
        try:
            report: Report = pipe.recv()
        except (EOFError, OSError):
            self._gone(name)
            return
        self._watch(name, report)
        self._act(name, self._workers[name], report)

    def _act(self, name: str, worker: Worker, report: Report) -> None:
        if isinstance(report, Loaded):
            worker.loaded = True
            if self._seeds or name == FIRST:
                self._order_join(name)
        elif isinstance(report, Joined):
            if name == FIRST:
                self._seeds = (report.address,)
                for other, state in self._workers.items():
                    if state.loaded and other != FIRST:
                        self._order_join(other)
        elif isinstance(report, Pulled):
            self._pulled(name, worker, report)
        elif isinstance(report, Struck):
            self._struck()
        elif isinstance(report, Failed):
            raise RunFailed(f"{name} failed:\n{report.error}")
        elif isinstance(report, Finished):
            worker.finished = True

    def _order_join(self, name: str) -> None:
        # The witness's replica stands for a far machine: it may use tcp only, to anybody.
        far = self._workers[name].replica == WITNESS[0]
        transports = ("tcp",) if far else ()
        self._order(name, Join(self._cluster, self._secret, self._seeds, transports))

    def _order(self, name: str, order: Order) -> None:
        self._workers[name].pipe.send(order)

    # --- the accident ---------------------------------------------------------------------

    def _pulled(self, name: str, worker: Worker, pulled: Pulled) -> None:
        if self.scene is Scene.CALM and worker.replica == VICTIM[0]:
            if pulled.version == self._plan.accident_version:
                self._victims_ready.add(name)
            if len(self._victims_ready) == SHARDS:
                self._aim()
        elif self.scene is Scene.STRUCK and name == NEWCOMER:
            self.scene = Scene.MENDED
            self._order(FIRST, Expect(frozenset(ROLLOUTS)))

    def _aim(self) -> None:
        self.scene = Scene.AIMED
        victim = self._workers[worker_name(*VICTIM)].process.pid
        for shard in range(SHARDS):
            aims = shard == WITNESS[1]
            self._order(worker_name(WITNESS[0], shard), Pull(victim if aims else None))

    def _struck(self) -> None:
        self.scene = Scene.STRUCK
        replica, shard = VICTIM
        victim = self._workers.pop(worker_name(replica, shard))
        victim.process.join(self._plan.patience)
        victim.pipe.close()
        self._order(FIRST, Expect(frozenset(ROLLOUTS) - {replica}))
        survivors_end, newcomers_end = self._context.Pipe()
        self._start(NEWCOMER, replica, shard, newcomers_end)
        self._order(worker_name(replica, 1 - shard), Partner(survivors_end))
        survivors_end.close()

    def _gone(self, name: str) -> None:
        """A pipe ended without a last word: the victim's is meant to, any other is not."""
        worker = self._workers[name]
        if self.scene is Scene.AIMED and name == worker_name(*VICTIM):
            worker.process.join(self._plan.patience)
            worker.finished = True  # until the witness's own report comes in
            return
        worker.process.join(1.0)
        raise RunFailed(f"{name} died (exit code {worker.process.exitcode})")
