"""Checks of calls: each ends by its deadline, and in the calm everybody gets on.

Rules of this file: those of checks.py.
"""

from __future__ import annotations

from collections import defaultdict

from tensorhub_p2p.protocol.identity import Publication, Slot
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import ClusterCheck
from tensorhub_p2p.sim.cluster.history import (
    Began,
    Ended,
    Fact,
    Replicated,
)
from tensorhub_p2p.sim.cluster.stage import ClusterSim

GRACE = 0.2
"""Seconds that a verb may end after its deadline."""


class Deadlines(ClusterCheck):
    """Every call ends by its deadline."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._open: dict[int, Began] = {}

    def on_fact(self, now: float, fact: Fact) -> None:
        if isinstance(fact, Began):
            self._open[fact.number] = fact
        elif isinstance(fact, Ended):
            began = self._open.pop(fact.number, None)
            if began is not None:
                self._judge(now, began)

    def look(self) -> None:
        now = self.network.now
        for number, began in list(self._open.items()):
            if self.network.host(began.handle.peer).is_gone:
                del self._open[number]
            else:
                self._judge(now, began)

    def _judge(self, now: float, began: Began) -> None:
        excused = self.cluster.troubled_until(began.handle.peer)
        limit = max(began.deadline, excused) + GRACE + self._extra(began.verb)
        if now > limit:
            raise Violation(f"{began} is {now - limit:.3f} s late")

    def _extra(self, verb: str) -> float:
        """What comes after the deadline, as the docs say."""
        lease = self.cluster.config.pull.lease_seconds
        drains = 2 * lease  # past the point of no return: the readers' lease, and their reads
        extra = {
            "unpublish": drains,
            "replicate": drains,
            "publish": lease,
            "close": 1.0,
            "leave": 1.5,
        }
        return extra.get(verb, 0.0)


class Lively(ClusterCheck):
    """Once faults are over every job gets on with it."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._versions: dict[Publication, set[int]] = defaultdict(set)
        """Published in the calm: by which shards."""
        self._done: set[Slot] = set()
        self._done_elastic = 0

    def on_fact(self, now: float, fact: Fact) -> None:
        if now < self.calm_since:
            return
        if isinstance(fact, Ended) and fact.verb == "publish" and fact.publication is not None:
            self._versions[fact.publication].add(fact.handle.slot.shard)
            self._done.add(fact.handle.slot)
        elif isinstance(fact, Replicated) and fact.publication in self._versions:
            self._done.add(fact.handle.slot)
            self._done_elastic += fact.handle.slot not in self._slots()

    def _slots(self) -> set[Slot]:
        return {job.slot for job in self.cluster.jobs}

    @property
    def waiting(self) -> list[str]:
        """Jobs that did nothing new since then."""
        elastic = {job.slot for job in self.cluster.jobs if job.kind == "elastic"}
        idle = {job.slot for job in self.cluster.jobs if job.kind in ("scribe", "wisher")}
        missing = self._slots() - elastic - idle - self._done
        return sorted(map(str, missing)) + ["elastic"] * bool(elastic and not self._done_elastic)

    def conclude(self) -> None:
        if self.waiting:
            story = "\n".join(self.cluster.history.story())
            raise Violation(f"nothing new was done by {', '.join(self.waiting)}:\n{story}")
