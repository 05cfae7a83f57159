"""What happened in a run, as told by the reports, and the verdict over it.

Values in, values out: nothing here prints, waits or starts anything.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field

from tensorhub_p2p.cli.demo.plan import SHARDS, VICTIM, WITNESS, Plan, worker_name
from tensorhub_p2p.cli.demo.reports import (
    Broken,
    Joined,
    Published,
    Pulled,
    Report,
    Struck,
    Trained,
)


@dataclass
class Row:
    """One process: what the table shows of it."""

    state: str = "starting"
    version: int = 0
    pulls: int = 0
    bytes: int = 0
    moving: float = 0.0
    """Seconds in which bytes moved."""
    retried: int = 0
    transports: set[str] = field(default_factory=set)
    last: Pulled | None = None
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.moving / 1e9 if self.moving else 0.0


@dataclass
class Board:
    plan: Plan
    rows: dict[str, Row] = field(default_factory=dict)
    rewards: list[Trained] = field(default_factory=list)
    version_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes pulled of each version, by everybody."""
    checksums: dict[tuple[int, int], str] = field(default_factory=dict)
    """The publisher's, by (version, shard)."""
    unchecked: list[tuple[str, int, Pulled]] = field(default_factory=list)
    """Pulls whose publisher's checksum isn't known yet: (process, shard, pull)."""
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    struck: Struck | None = None
    accident_pull: Pulled | None = None
    """The pull in the middle of which the victim died."""
    broken: int = 0
    broken_off: str | None = None
    """Why the run ended early, if it did."""
    seconds: float = 0.0

    def take(self, name: str, report: Report) -> None:
        row = self.rows.setdefault(name, Row())
        shard = int(name.rstrip("'").rpartition("#")[2])
        if isinstance(report, Joined):
            row.state = "joined"
        elif isinstance(report, Published):
            row.state, row.version = "published", report.version
            self.checksums[report.version, shard] = report.checksum
            self._check()
        elif isinstance(report, Pulled):
            self._pulled(name, shard, row, report)
        elif isinstance(report, Trained):
            self.rewards.append(report)
        elif isinstance(report, Struck):
            self.struck = report
            self.rows.setdefault(worker_name(*VICTIM), Row()).state = "killed"
        elif isinstance(report, Broken):
            self.broken += 1
            row.state = "group broken"

    def _pulled(self, name: str, shard: int, row: Row, pulled: Pulled) -> None:
        if name == worker_name(*WITNESS) and pulled.version == self.plan.accident_version:
            self.accident_pull = pulled
        row.state, row.version, row.last = "serving", pulled.version, pulled
        row.pulls += 1
        row.bytes += pulled.bytes
        row.moving += pulled.moving
        row.transports.update(pulled.transports)
        row.retried += pulled.retried
        for source, count in pulled.sources.items():
            row.sources[source] = row.sources.get(source, 0) + count
        self.version_bytes[pulled.version] = (
            self.version_bytes.get(pulled.version, 0) + pulled.bytes
        )
        self.unchecked.append((name, shard, pulled))
        self._check()

    def _check(self) -> None:
        waiting = []
        for name, shard, pulled in self.unchecked:
            published = self.checksums.get((pulled.version, shard))
            if published is None:
                waiting.append((name, shard, pulled))
                continue
            self.checked += 1
            if published != pulled.checksum:
                self.wrong.append(
                    f"{name} holds other bytes of version {pulled.version} than its publisher: "
                    f"{pulled.checksum} instead of {published}"
                )
        self.unchecked = waiting

    # --- the verdict ----------------------------------------------------------------------

    @property
    def reward_before(self) -> float:
        return statistics.fmean(t.reward for t in self.rewards[:3]) if self.rewards else 0.0

    @property
    def reward_after(self) -> float:
        last = self.rewards[-max(1, len(self.rewards) // 4) :]
        return statistics.fmean(t.reward for t in last) if last else 0.0

    def failures(self) -> list[str]:
        """Why this run is no success; empty if it is one."""
        if self.broken_off is not None:
            return [*self.wrong, self.broken_off]
        found = list(self.wrong)
        found += [
            f"nobody published the version {pulled.version} that {name} pulled"
            for name, _, pulled in self.unchecked
        ]
        rise = self.reward_after - self.reward_before
        if rise < self.plan.required_rise:
            found.append(
                f"the reward rose by {rise:.2f} (from {self.reward_before:.2f} to "
                f"{self.reward_after:.2f}), less than {self.plan.required_rise}"
            )
        pullers = [row for name, row in self.rows.items() if name.startswith("rollout")]
        arrived = [row for row in pullers if row.version == self.plan.final_version]
        if len(arrived) < 3 * SHARDS:
            found.append(f"only {len(arrived)} rollout processes got the final version")
        return found + self._accident_failures()

    def _accident_failures(self) -> list[str]:
        victim = worker_name(*VICTIM)
        if self.struck is None or not self.struck.arrived:
            return [f"{victim} was not killed in the middle of a pull"]
        if self.accident_pull is None:
            return [f"the pull that {victim} served when it was killed did not finish"]
        if victim not in self.accident_pull.sources and not self.accident_pull.retried:
            return [f"{victim} served nothing of the pull during which it was killed"]
        if not self.broken:
            return [f"nobody was told that {victim} is gone (GroupBroken)"]
        return []

    def summary(self) -> dict[str, object]:
        """Everything worth keeping, for `--json`."""
        return {
            "ok": not self.failures(),
            "failures": self.failures(),
            "seconds": round(self.seconds, 2),
            "versions": len(self.checksums) // SHARDS,
            "reward": {
                "first": round(self.reward_before, 4),
                "last": round(self.reward_after, 4),
                "by_version": [round(t.reward, 4) for t in self.rewards],
            },
            "digests": {"checked": self.checked, "wrong": len(self.wrong)},
            "accident": {
                "version": self.plan.accident_version,
                "victim": worker_name(*VICTIM),
                "arrived_when_killed": self.struck.arrived if self.struck else None,
                "pull": asdict(self.accident_pull) if self.accident_pull else None,
            },
            "processes": {
                name: {
                    "state": row.state,
                    "version": row.version,
                    "pulls": row.pulls,
                    "bytes": row.bytes,
                    "gigabytes_per_second": round(row.gigabytes_per_second, 3),
                    "transports": sorted(row.transports),
                    "retried": row.retried,
                    "sources": row.sources,
                }
                for name, row in sorted(self.rows.items())
            },
        }
