"""The check of traffic: who has nothing to do sends little.

Rules of this file: those of checks.py.
"""

from __future__ import annotations

from tensorhub_p2p.protocol.directory.records import holders_key, versions_key
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.sim.checks import Violation
from tensorhub_p2p.sim.cluster.accounts import ClusterCheck
from tensorhub_p2p.sim.cluster.programs import MODEL
from tensorhub_p2p.sim.cluster.stage import ClusterSim

AT_REST = 30.0
"""Messages a second that a process sends at most while nobody calls a verb, and all see each
other. Five of them probe others (`QUICK` in seeds.py); the rest looks after copies and watches."""
FOR_BUCKET = 1.5
"""As many besides, for each bucket that a key has but the first. Each is watched, and compared
with its owners, as if it were a key; at most once each while traffic is measured: that is three
owners twice in four seconds."""


class Quiet(ClusterCheck):
    """At rest no process sends more messages a second than there is to look after: none breeds
    others."""

    def __init__(self, sim: ClusterSim) -> None:
        super().__init__(sim)
        self._sent: dict[PeerId, int] | None = None
        """By process: up to when the rest began."""

    def look(self) -> None:
        if self._sent is None and self.network.now >= self.resting_since:
            self._sent = {host.peer_id: host.sent for host in self.awake()}

    def conclude(self) -> None:
        rested = self.network.now - self.resting_since
        for peer, before in (self._sent or {}).items():
            rate = (self.network.host(peer).sent - before) / rested
            if rate > AT_REST + FOR_BUCKET * self._buckets(peer):
                raise Violation(f"{peer} sends {rate:.0f} messages a second, and has nothing to do")

    def _buckets(self, peer: PeerId) -> int:
        """How many this process knows of, of all keys, but the first of each."""
        records = self.cluster.process(peer).node.records
        shards = max(job.num_shards for job in self.cluster.jobs)
        keys = [versions_key(MODEL), *(holders_key(MODEL, shard) for shard in range(shards))]
        return sum(records.buckets(key) - 1 for key in keys)
