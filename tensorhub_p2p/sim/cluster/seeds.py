"""Runs of whole clusters under faults, each decided by one seed, and the command for many.

Rules of this file. It decides what a run is and drives it; what must hold is checks.py's,
what goes wrong faults.py's.

Theory of operation. A seed draws a `Setting`: who is there, what they do, over what network;
and from it a schedule of faults. Then

    safety     for `duration` seconds the faults happen; all checks look on
    liveness   faults stop. Within `LIVELY_WITHIN` seconds every job must have done something
               new: trainers published, and all others replicated what was published since;
               and copies that nobody needs are freed
    rest       in some runs all users stop then, and soon after that their processes are quiet

    python -m tensorhub_p2p.sim.cluster.seeds --seeds 1000 [--first 0] [--failures DIR]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from tensorhub_p2p.config import Config, DirectoryConfig, PullConfig, SwimConfig
from tensorhub_p2p.protocol.layout import MIN_CHUNK_BYTES
from tensorhub_p2p.sim.checks import Check
from tensorhub_p2p.sim.cluster.checks import EVERY_RUN, HEALED, STEADY, UNCUT, ClusterCheck
from tensorhub_p2p.sim.cluster.faults import (
    ANY_WEATHER,
    CAST,
    COMING_AND_GOING,
    CUTS,
    Leave,
    generate,
)
from tensorhub_p2p.sim.cluster.history import Fact, Probed
from tensorhub_p2p.sim.cluster.programs import Job
from tensorhub_p2p.sim.cluster.stage import ClusterSim
from tensorhub_p2p.sim.faults import Fault, Schedule
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.membership import SEEDS
from tensorhub_p2p.sim.runs import CheckFailed, SeededRun, command, setting_from_json

__all__ = ["CheckFailed", "ClusterRun", "Setting", "main", "run_seed"]

SETTLES = 2.0
"""Seconds before the faults, in which everybody begins."""
LIVELY_WITHIN = 30.0
"""Seconds of calm within which every job does something new."""
UNWINDS = 8.0
"""Seconds after which nothing is left to do, once nobody calls a verb any more."""
RESTS = 4.0
"""Seconds for which traffic is measured then."""
QUICK = SwimConfig(
    probe_interval=0.4,
    probe_timeout=0.15,
    suspicion_multiplier=3,
    suspicion_max_multiplier=3,
    gossip_interval=0.15,
    redial_interval=2.0,
)
"""Deaths are noticed within a few seconds, so that runs are short."""


@dataclass(frozen=True)
class Setting:
    """Everything about a run but its faults."""

    seed: int
    spares: int = 2
    """Processes without a job, at first."""
    zones: int = 1
    shards: int = 2
    """Of every replica but the elastic ones, which need models of one shard."""
    trainers: int = 1
    """Replicas that publish the same versions side by side."""
    deviates: bool = False
    """The last of them publishes other bytes at times, though it should not."""
    rollouts: int = 1
    elastic: int = 0
    follower: int = 0
    chunks: int = 4
    period: float = 1.0
    """Seconds between two versions."""
    keeps: bool = True
    """Trainers take a version back only to publish the next."""
    duration: float = 10.0
    """Seconds for which faults happen."""
    intensity: float = 2.0
    """Mean number of faults in ten seconds."""
    cuts: bool = True
    """Partitions and clogs, too."""
    latency: tuple[float, float] = (0.0002, 0.002)
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 1.0
    converged: bool = True
    sockets: bool = True
    one_sided: bool = False
    damage: float = 0.0
    rate: float = 40e6
    """Bytes a second that one source sends."""
    digest_seconds: float = 0.01
    upload_slots: int = 8
    slow_repair: bool = False
    """Writers write again only late: what the directory forgets shows."""
    bucket_registers: int = 48
    """So many registers of one key lie together; few, so that keys are spread in small clusters."""
    steady: bool = False
    """Trainers take turns, so that what is newest stays; nothing happens to them, unless there are
    `cuts`. Others come and go."""

    rests: bool = False
    """In the end nobody does anything for a while."""

    retainers: int = 0
    herd: int = 0
    """Rollouts that give up what they have all at once."""
    wishers: int = 0
    """Want versions kept, too, and hold none."""
    newest: int = 1
    """How many of the newest versions retainers and wishers want kept."""
    offload_chunks: int = 0
    """Host memory that each process has for copies."""
    copy_seconds: float = 0.01
    """For one chunk."""
    copy_fails: float = 0.0
    spot: bool = False
    """The copies of rollouts don't count as kept."""
    retracts: bool = False
    """Trainers take versions back as bad."""

    @staticmethod
    def drawn(seed: int) -> Setting:
        """The setting of this seed."""
        rests = random.Random(f"{seed}/rest").random() < 0.3
        setting = Setting._drawn(seed)
        rng = random.Random(f"{seed}/buckets")
        few = rng.random() < 0.2
        setting = replace(
            setting,
            rests=rests,
            bucket_registers=rng.choice((4, 8)) if few else setting.bucket_registers,
            deviates=random.Random(f"{seed}/deviates").random() < 0.5,
        )
        rng = random.Random(f"{seed}/retention")
        if setting.steady or rng.random() < 0.4:
            return setting
        return replace(
            setting,
            # Few others, so that runs stay short.
            trainers=1,
            rollouts=min(1, setting.rollouts),
            shards=min(2, setting.shards),
            retainers=rng.choice((0, 1, 1, 1)),
            newest=rng.choice((1, 1, 2, 3)),
            offload_chunks=setting.chunks * rng.choice((1, 2, 8, 8)),
            copy_seconds=rng.choice((0.001, 0.02, 0.1)),
            copy_fails=rng.choice((0.0, 0.0, 0.2)),
            spot=rng.random() < 0.3,
            retracts=rng.random() < 0.3,
            keeps=setting.zones > 1 or rng.random() < 0.4,
            period=setting.period if setting.zones > 1 else rng.choice((0.4, 0.7, 1.0)),
            duration=min(8.0, setting.duration),
            herd=int(rng.random() < 0.2),
            wishers=int(rng.random() < 0.3),
        )

    @staticmethod
    def _drawn(seed: int) -> Setting:
        rng = random.Random(f"{seed}/cluster")
        shards = rng.choice((1, 1, 2, 2, 3))
        zones = rng.choice((1, 1, 1, 2))
        if rng.random() < 0.25:
            return Setting._steady(seed, rng)
        return Setting(
            seed,
            spares=rng.randint(1, 3),
            zones=zones,
            shards=shards,
            trainers=rng.choice((1, 1, 2)) if shards < 3 else 1,
            rollouts=rng.choice((1, 1, 2)) if shards < 3 else 1,
            elastic=int(shards == 1 and rng.random() < 0.5),
            follower=int(shards == 1 and rng.random() < 0.5),
            chunks=rng.choice((1, 3, 6)),
            # What is there for less than two seconds may not be seen in other zones.
            period=rng.choice((0.7, 1.0, 2.0)) if zones == 1 else 3.0,
            keeps=rng.random() < 0.7 or zones > 1,
            duration=rng.choice((5.0, 6.0, 8.0)),
            intensity=rng.choice((2.0, 4.0, 8.0)),
            cuts=rng.random() < 0.6,
            latency=rng.choice(((0.0002, 0.002), (0.001, 0.02))),
            loss=rng.choice((0.0, 0.01, 0.1)),
            duplicate=rng.choice((0.0, 0.05)),
            reorder=rng.choice((1.0, 0.1)),
            converged=rng.random() < 0.75,
            sockets=rng.random() < 0.7,
            one_sided=rng.random() < 0.4,
            damage=rng.choice((0.0, 0.0, 0.02)),
            rate=rng.choice((5e6, 40e6, 400e6)),
            digest_seconds=rng.choice((0.001, 0.02, 0.2)),
            upload_slots=rng.choice((1, 2, 8)),
            slow_repair=rng.random() < 0.3,
        )

    @staticmethod
    def _steady(seed: int, rng: random.Random) -> Setting:
        return Setting(
            seed,
            spares=rng.randint(2, 4),
            shards=rng.choice((1, 1, 2)),
            trainers=2,
            rollouts=rng.choice((1, 2)),
            elastic=0,
            chunks=rng.choice((1, 3)),
            period=rng.choice((0.3, 1.0)),
            duration=rng.choice((5.0, 8.0)),
            intensity=rng.choice((4.0, 8.0)),
            latency=rng.choice(((0.0002, 0.002), (0.001, 0.02))),
            loss=rng.choice((0.0, 0.05, 0.2)),
            duplicate=rng.choice((0.0, 0.05)),
            reorder=rng.choice((1.0, 0.1)),
            slow_repair=rng.random() < 0.7,
            steady=True,
            cuts=rng.random() < 0.4,
        )

    @property
    def peers(self) -> int:
        near = self.trainers * self.shards
        groups = self.rollouts + self.herd + self.retainers
        far = groups * self.shards + self.elastic + self.follower + self.wishers
        if self.zones == 1:
            return near + far + self.spares
        return self.zones * (max(near, far) + max(1, self.spares // 2))

    @property
    def config(self) -> Config:
        pull = PullConfig(upload_slots=self.upload_slots)
        directory = DirectoryConfig(bucket_registers=self.bucket_registers)
        if self.slow_repair:
            directory = replace(directory, rewrite_jitter=3.0, repair_interval=30.0)
        return Config(swim=QUICK, pull=pull, directory=directory)

    def jobs(self) -> list[Job]:
        """Trainers first: they are at the first places, through which newcomers join."""
        jobs = []
        groups = [("turn" if self.steady else "trainer", n) for n in range(self.trainers)]
        groups += [("rollout", n) for n in range(self.rollouts)]
        groups += [("herd", n) for n in range(self.herd)]
        groups += [("retainer", n) for n in range(self.retainers)]
        for kind, number in groups:
            for shard in range(self.shards):
                jobs.append(self._job(kind, number, shard))
        jobs += [self._job("elastic", n, 0) for n in range(self.elastic)]
        jobs += [self._job("follower", n, 0) for n in range(self.follower)]
        jobs += [self._job("wisher", n, 0) for n in range(self.wishers)]
        jobs += [self._job("scribe", n, 0) for n in range(2) if self.steady]
        return jobs

    def _job(self, kind: str, number: int, shard: int) -> Job:
        """Trainers are in the first zone, all others in the last."""
        return Job(
            kind,
            f"{kind}-{number}",
            shard,
            self.shards,
            self.chunks,
            0 if kind in ("trainer", "turn") else self.zones - 1,
            self.period,
            side_by_side=self.trainers > 1 and not self.steady,
            deviates=self.deviates and number == self.trainers - 1 > 0,
            keeps=self.keeps,
            turn=number,
            turns=self.trainers,
            spot=self.spot and kind == "rollout",
            newest=self.newest,
            retracts=self.retracts,
        )

    @property
    def checks(self) -> Sequence[Callable[[ClusterSim], ClusterCheck]]:
        """Those that hold in such a run."""
        if self.steady:
            return HEALED if self.cuts else STEADY
        return EVERY_RUN if self.cuts else UNCUT

    def faults(self) -> Schedule:
        """The schedule that belongs to the seed."""
        kinds: tuple[type[Fault], ...] = COMING_AND_GOING if self.steady else (*ANY_WEATHER, *CAST)
        kinds += CUTS if self.cuts else ()
        kinds += (Leave, Leave) if self.retainers else ()
        return generate(
            self.seed,
            self.peers,
            self.duration,
            self.intensity,
            zones=self.zones,
            needed=SEEDS * self.zones,
            kinds=kinds,
            spared=self.trainers * self.shards if self.steady else 0,
        )


@dataclass
class ClusterRun(SeededRun):
    """One run of a whole cluster, to be carried out once."""

    setting: Setting
    checks: Sequence[Callable[[ClusterSim], ClusterCheck]] = ()
    """None: those that hold in such a run."""
    sim: ClusterSim = field(init=False)

    def __post_init__(self) -> None:
        setting = self.setting
        self.sim = ClusterSim(
            setting.peers,
            setting.jobs(),
            zones=setting.zones,
            seed=setting.seed,
            config=setting.config,
            sockets=setting.sockets,
            link=Link(setting.latency, setting.loss, setting.duplicate, setting.reorder),
            converged=setting.converged,
            rate=setting.rate,
            one_sided=setting.one_sided,
            damage=setting.damage,
            digest_seconds=setting.digest_seconds,
            offload_limit=setting.offload_chunks * MIN_CHUNK_BYTES,
            copy_seconds=setting.copy_seconds,
            copy_fails=setting.copy_fails,
        )
        self._checks = [check(self.sim) for check in self.checks or setting.checks]
        for check in self._checks:
            check.together_since = inf if setting.cuts else -inf
        self.sim.history.listeners.append(self._on_fact)
        self.sim.history.probers.append(self._on_probe)

    @property
    def stage(self) -> ClusterSim:
        return self.sim

    @property
    def watching(self) -> Sequence[Check]:
        return self._checks

    def phases(self) -> None:
        """Safety, then liveness."""
        self.pass_time(SETTLES)
        self.schedule.play(self.sim)
        self.pass_time(max(self.setting.duration, self.schedule.ends))
        self.calm()
        self._live()
        if self.setting.rests:
            self._rest()
        self.each(lambda check: check.conclude())

    def _live(self) -> None:
        """The wires are good as well; go on until everything has happened that has to."""
        network = self.sim.network
        network.default_link = Link(self.setting.latency)
        self.sim.reads.damage = 0.0
        self.sim.board.calm = True
        for check in self._checks:
            check.calm_since = network.now
        end = network.now + LIVELY_WITHIN
        while network.now < end and any(check.waiting for check in self._checks):
            self.pass_time(0.5)
            if self.sim.converged():
                for check in self._checks:
                    check.together_since = min(network.now, check.together_since)

    def _rest(self) -> None:
        self.sim.board.resting = True
        self.pass_time(UNWINDS)
        for check in self._checks:
            check.resting_since = self.sim.network.now
            check.look()
        self.pass_time(RESTS)

    def _on_fact(self, now: float, fact: Fact) -> None:
        def hear(check: ClusterCheck) -> None:
            check.on_fact(now, fact)

        for check in self._checks:
            self.judge(check, hear)

    def _on_probe(self, now: float, probe: Probed) -> None:
        def hear(check: ClusterCheck) -> None:
            check.on_probe(now, probe)

        for check in self._checks:
            self.judge(check, hear)

    @staticmethod
    def from_json(values: dict[str, Any]) -> ClusterRun:
        setting = setting_from_json(Setting, values["setting"])
        return ClusterRun(setting, Schedule.from_json(values["faults"]))


def run_seed(seed: int, checks: Sequence[Callable[[ClusterSim], ClusterCheck]] = ()) -> ClusterSim:
    """Carry out the run of this seed; raises CheckFailed."""
    setting = Setting.drawn(seed)
    run = ClusterRun(setting, setting.faults(), checks)
    run.carry_out()
    return run.sim


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: many seeds, one text for each failure, and files to play them again."""
    return command(run_seed, "tensorhub_p2p.sim.cluster.seeds", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
