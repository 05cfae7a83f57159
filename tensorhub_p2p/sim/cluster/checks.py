"""What a cluster promises its users, each judged from what users, wires and tensors show.

Rules of these files (check_*.py). A check hears the facts of a run (history.py) and, where it
says so, looks at the machines' public state. It shares no code with what it checks: what was
whole, held or withdrawn it reckons from the calls that users made (accounts.py).

    check                knows                       must never be
    OneGeneration        generations worked in       two of one counter in a group
    SameAnswer           answers                     two for one call (G2)
    NobodyUnaware        ends, voids, errors         a member not told, or told twice (G2)
    Fenced               generations and answers     anything new from a replaced one (G7)
    WholeOnly            what was published when     an answer that never was whole (G3)
    NeverBackwards       answers, by handle          "latest" below an earlier one (G4)
    Remembers            answers, by group           the same, by those who came after (G4)
    KeptForCalls         who had what when           an answer that nobody has any more
    RightBytes           tensors, before and after   other bytes (G1)
    NoDigestAfterHiding  digests                     one of what was taken back (G1)
    Drains               offers and reads            one of what was let go
    RetainedStays        memory, and users' wishes   the last copy given up of what is wanted
    MemoryEndsFree       the same, in the calm       a kept copy that nobody needs
    Deadlines            calls                       one that ends late (G8)
    Lively               calls in the calm           a job that gets nothing done
    Quiet                messages at rest            more than it takes to see each other

and in runs with no cut:

    Retracted            answers                     one that had been taken back as bad

and in runs in which trainers take turns, from when all see each other again after cuts:

    NotLost              a probe key                 a read that misses a finished write
    Linear               publishes and answers       an order that no sequence explains (G5)

Who crashed is excused from its deadlines, who slept or was slow for as long as that lasted.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.sim.cluster.accounts import ClusterCheck
from tensorhub_p2p.sim.cluster.check_bytes import (
    Drains,
    LowestStands,
    NoDigestAfterHiding,
    RightBytes,
)
from tensorhub_p2p.sim.cluster.check_calls import Deadlines, Lively
from tensorhub_p2p.sim.cluster.check_floors import Remembers
from tensorhub_p2p.sim.cluster.check_groups import (
    Fenced,
    NobodyUnaware,
    OneGeneration,
    SameAnswer,
)
from tensorhub_p2p.sim.cluster.check_retention import MemoryEndsFree, RetainedStays, Retracted
from tensorhub_p2p.sim.cluster.check_traffic import Quiet
from tensorhub_p2p.sim.cluster.check_versions import (
    KeptForCalls,
    Linear,
    NeverBackwards,
    NotLost,
    WholeOnly,
)
from tensorhub_p2p.sim.cluster.stage import ClusterSim

__all__ = [
    "EVERY_RUN",
    "HEALED",
    "STEADY",
    "UNCUT",
    "ClusterCheck",
    "Deadlines",
    "Drains",
    "Fenced",
    "KeptForCalls",
    "Linear",
    "Lively",
    "LowestStands",
    "MemoryEndsFree",
    "NeverBackwards",
    "NoDigestAfterHiding",
    "NobodyUnaware",
    "NotLost",
    "OneGeneration",
    "Quiet",
    "Remembers",
    "RetainedStays",
    "Retracted",
    "RightBytes",
    "SameAnswer",
    "WholeOnly",
]

EVERY_RUN: tuple[Callable[[ClusterSim], ClusterCheck], ...] = (
    OneGeneration,
    SameAnswer,
    NobodyUnaware,
    WholeOnly,
    NeverBackwards,
    Remembers,
    RightBytes,
    NoDigestAfterHiding,
    LowestStands,
    KeptForCalls,
    Fenced,
    Drains,
    Deadlines,
    Lively,
    Quiet,
    RetainedStays,
    MemoryEndsFree,
)
UNCUT: tuple[Callable[[ClusterSim], ClusterCheck], ...] = (*EVERY_RUN, Retracted)
"""For runs with no partition."""
STEADY: tuple[Callable[[ClusterSim], ClusterCheck], ...] = (*UNCUT, NotLost, Linear)
"""For runs with no partition, in which trainers take turns."""
HEALED: tuple[Callable[[ClusterSim], ClusterCheck], ...] = (*EVERY_RUN, NotLost, Linear)
"""For runs in which trainers take turns, with partitions."""
