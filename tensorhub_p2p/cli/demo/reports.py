"""What the processes of the demo tell each other besides weights. Values only.

Reports go from a worker to the conductor, orders the other way, each over a pipe of
its own: a process that is killed in mid-sentence can't hold a lock that others need.
Samples go from the rollouts to the trainer over one plain queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection

# --- reports: worker to conductor ---------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """The process is up and wants to know the seeds."""


@dataclass(frozen=True)
class Joined:
    peer_id: str
    address: str


@dataclass(frozen=True)
class Published:
    """`checksum` is over all bytes of the shard, taken outside the library."""

    version: int
    bytes: int
    seconds: float
    checksum: str


@dataclass(frozen=True)
class Pulled:
    """`sources`: bytes by the name of the process that they came from.

    `seconds` for the whole call, `moving` for the part in which bytes moved.
    """

    version: int
    bytes: int
    seconds: float
    moving: float
    sources: dict[str, int]
    transports: list[str]
    retried: int
    checksum: str


@dataclass(frozen=True)
class Trained:
    """Version `version` of the policy got this mean reward, from these replicas."""

    version: int
    reward: float
    solved: float
    """Fraction of sequences sorted without a mistake."""
    replicas: list[str]


@dataclass(frozen=True)
class Struck:
    """The witness killed the victim when this fraction of its own pull had arrived."""

    arrived: float


@dataclass(frozen=True)
class Broken:
    """GroupBroken was raised: the other half's process is gone."""

    reason: str


@dataclass(frozen=True)
class Finished:
    pass


@dataclass(frozen=True)
class Failed:
    error: str


Report = Loaded | Joined | Published | Pulled | Trained | Struck | Broken | Finished | Failed

# --- orders: conductor to worker ----------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Start the peer with these seeds; the first one starts alone.

    `transports` restricts what the peer uses; empty means all that work here.
    """

    cluster: str
    secret: str
    seeds: tuple[str, ...]
    transports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pull:
    """To the witness's replica: pull the accident version now; kill `victim` meanwhile."""

    victim: int | None
    """Process id, or None for the shard that does not kill."""


@dataclass(frozen=True)
class Partner:
    """The other half lives in a new process, at the end of this pipe."""

    connection: Connection


@dataclass(frozen=True)
class Expect:
    """To the trainer: wait for a batch from each of these replicas."""

    replicas: frozenset[str]


Order = Join | Pull | Partner | Expect

# --- samples: rollout to trainer ----------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Plain lists: nothing of torch's shared memory is involved."""

    replica: str
    version: int
    sequences: list[list[int]]
    rewards: list[list[float]]
