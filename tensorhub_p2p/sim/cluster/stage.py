"""A whole cluster on the simulated network: processes, their jobs, and who follows whom.

Rules of this file. It starts processes and programs, and plays the part of a job controller:
it replaces those that are gone. It looks into no machine; what is right is checks.py's.

Theory of operation. A `ClusterSim` is a `MembershipSim` whose machines are whole processes
(`SimPeer`). Jobs are dealt out to places; where a process is restarted, its jobs go on in the
new one. Each second the controller looks for jobs that nobody does: their worker's process is
gone for longer than `MISSED_FOR`, or its program has ended. It has another process do them.
It may be wrong, too (`replace`): then two processes believe that the job is theirs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from math import inf
from typing import cast

from tensorhub_p2p.config import Config
from tensorhub_p2p.protocol.directory.records import Registers
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.messages import Key
from tensorhub_p2p.sim.cluster.history import History
from tensorhub_p2p.sim.cluster.peer import SimPeer
from tensorhub_p2p.sim.cluster.programs import Board, Job, Worker
from tensorhub_p2p.sim.cluster.tasks import Steps, start
from tensorhub_p2p.sim.cluster.transfer import Reads
from tensorhub_p2p.sim.host import GONE, Host, State
from tensorhub_p2p.sim.link import Link
from tensorhub_p2p.sim.membership import LAN, WAN, MembershipSim
from tensorhub_p2p.sim.network import Action

CONTROLLER_LOOKS = 0.5
"""Seconds between two looks of the job controller."""
MISSED_FOR = 2.0
"""Seconds after which a process that is gone isn't waited for any more."""
LEAVES_WITHIN = 5.0
"""Seconds in which a process that leaves hands on what it keeps, and closes its handles."""


class ClusterSim(MembershipSim):
    """Many processes, one clock; each job begins at the next place of its zone."""

    def __init__(
        self,
        peers: int,
        jobs: Sequence[Job],
        *,
        zones: int = 1,
        seed: int = 0,
        config: Config | None = None,
        sockets: bool = True,
        link: Link = LAN,
        between_zones: Link = WAN,
        converged: bool = True,
        rate: float = 40e6,
        one_sided: bool = False,
        damage: float = 0.0,
        digest_seconds: float = 0.01,
        offload_limit: int = 0,
        copy_seconds: float = 0.01,
        copy_fails: float = 0.0,
    ) -> None:
        self.digest_seconds = digest_seconds
        self.offload_limit = offload_limit
        self.copy_seconds = copy_seconds
        self.copy_fails = copy_fails
        self.history = History(lambda: self.network.now)
        self.workers: list[Worker] = []
        """All that ever were, in the order in which they began."""
        self.jobs = list(jobs)
        self.board = Board()
        self._numbers = 0
        super().__init__(
            peers,
            zones=zones,
            seed=seed,
            config=config,
            sockets=sockets,
            link=link,
            between_zones=between_zones,
            converged=converged,
            machine=self._make_peer,
        )
        self.reads = Reads(
            self.network,
            random.Random(f"{seed}/reads"),
            rate=rate,
            one_sided=one_sided,
            damage=damage,
            timeout=self.config.pull.source_timeout,
        )
        self._dice = random.Random(f"{seed}/controller")
        self._troubled: dict[PeerId, float] = {}
        """Until when a process slept or was slow last; infinity: it does still."""
        self.network.on_change = self._on_change
        places = {zone: itertools.cycle(range(zone, peers, zones)) for zone in range(zones)}
        for number, job in enumerate(self.jobs):
            self.network.at(0.02 * number, self._beginner(job, next(places[job.zone])))
        self.network.at(CONTROLLER_LOOKS, self._control)

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _make_peer(self, info: PeerInfo, config: Config, rng: random.Random) -> SimPeer:
        return SimPeer(info, config, rng, self)

    def process(self, peer: PeerId) -> SimPeer:
        """The process of this peer, also one that is gone."""
        return cast(SimPeer, self.machine(peer))

    def copies(self, key: Key) -> list[Registers]:
        """What each process that is not gone holds of a key, as an owner."""
        there = [host.peer_id for host in self.network.hosts() if not host.is_gone]
        return [self.process(peer).copy(key) for peer in there]

    def troubled_until(self, peer: PeerId) -> float:
        """When this process last woke, or became quick again; infinity if it did not yet."""
        return self._troubled.get(peer, -inf)

    def _on_change(self, host: Host, before: State) -> None:
        self.record.on_change(host, before)
        if host.is_asleep or host.cost:
            self._troubled[host.peer_id] = inf
        elif host.peer_id in self._troubled or before in GONE:
            self._troubled[host.peer_id] = self.network.now

    # --- jobs ---

    def _beginner(self, job: Job, place: int) -> Action:
        def begin() -> None:
            self.begin(job, place)

        return begin

    def begin(self, job: Job, place: int) -> Worker | None:
        """Have the process at this place do the job, if it runs; returns its worker."""
        host = self.network.find(self.peers[place])
        if host is None or host.state is not State.RUNNING:
            return None
        worker = Worker(job, place, self.process(host.peer_id), self.board)
        self.workers.append(worker)
        worker.peer.post(lambda: start(worker.run()))
        return worker

    def worker_of(self, job: Job) -> Worker | None:
        """Who does it, as far as the controller knows: the last one that began."""
        return next((w for w in reversed(self.workers) if w.job == job), None)

    def does(self, worker: Worker) -> bool:
        """Whether it is at it still: its process is there, and its program goes on."""
        return not worker.over and not self.network.host(worker.peer.peer_id).is_gone

    def _control(self) -> None:
        for job in self.jobs:
            worker = self.worker_of(job)
            if worker is None or self._is_missed(worker):
                self._replace(job)
        self.network.at(self.network.now + CONTROLLER_LOOKS, self._control)

    def _is_missed(self, worker: Worker) -> bool:
        host = self.network.host(worker.peer.peer_id)
        gone = host.is_gone and self.network.now - host.since >= MISSED_FOR
        return worker.over or gone

    def _replace(self, job: Job) -> None:
        """Another process does it: one that does nothing, if there is one."""
        zones = len(self.zones)
        there = range(job.zone, len(self.peers), zones)
        running = [place for place in there if self._runs(self.peers[place])]
        busy = {w.place for w in self.workers if self.does(w)}
        free = [place for place in running if place not in busy]
        slots = {(w.place, w.job.slot) for w in self.workers if self.does(w)}
        able = [place for place in free or running if (place, job.slot) not in slots]
        if able:
            self.begin(job, self._dice.choice(able))

    def _runs(self, peer: PeerId) -> bool:
        host = self.network.find(peer)
        return host is not None and host.state is State.RUNNING

    def _seeds_for(self, place: int) -> list[str]:
        """All of the zone: any few of them may be restarted at once, and would found an island."""
        zones = len(self.zones)
        there = range(place % zones, len(self.peers), zones)
        return [f"host-{p}:7946" for p in dict.fromkeys((*there, 0)) if p != place]

    # --- faults ---

    def replace(self, place: int) -> None:
        """The controller takes the process there for lost, whether it is or not."""
        for worker in list(self.workers):
            if worker.place == place and self.worker_of(worker.job) is worker:
                self._replace(worker.job)

    def grow(self) -> None:
        """One more process joins, at the next place."""
        info = self._new_info(len(self.peers))
        self.peers.append(info.peer_id)
        self._starter(len(self.peers) - 1, info)()

    def restart_anew(self, place: int) -> None:
        """A new process at this place, which does what the one before did."""
        before = self.peers[place]
        super().restart_anew(place)
        for worker in list(self.workers):
            if worker.peer.peer_id == before and self.worker_of(worker.job) is worker:
                self.begin(worker.job, place)

    def leave_well(self, place: int) -> None:
        """The process there hands on what it keeps, closes its handles, says goodbye and ends."""
        peer = self.peers[place]
        if self._runs(peer) and not self.process(peer).leaving:
            process = self.process(peer)
            process.post(lambda: start(self._leave(process, place)))

    def _leave(self, process: SimPeer, place: int) -> Steps[None]:
        yield from process.leave_well(LEAVES_WITHIN)
        if self.peers[place] == process.peer_id:
            self.leave(place)
