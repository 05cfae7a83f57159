"""What every process of the demo runs: join, hold one half of the policy, play its role."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue

from tensorhub_p2p.cli.demo.plan import TRAINER, Plan
from tensorhub_p2p.cli.demo.reports import Batch, Failed, Finished, Join, Joined, Loaded


@dataclass(frozen=True)
class Wires:
    """What a process gets on its way: all of it is plain multiprocessing."""

    conductor: Connection
    partner: Connection
    samples: Queue[Batch]


def work(plan: Plan, name: str, replica: str, shard: int, wires: Wires) -> None:
    """Entry point of a spawned process. Whatever goes wrong is reported, then the run fails."""
    # Ctrl-C reaches the whole process group; the conductor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 0
    try:
        play(plan, name, replica, shard, wires)
        wires.conductor.send(Finished())
    except Exception:  # noqa: BLE001 - the traceback travels to the conductor, which fails
        wires.conductor.send(Failed(traceback.format_exc()))
        code = 1
    wires.samples.close()
    wires.samples.join_thread()
    # Everything is closed. Taking torch's modules apart would cost a second of CPU in each.
    os._exit(code)


def play(plan: Plan, name: str, replica: str, shard: int, wires: Wires) -> None:
    import torch

    from tensorhub_p2p.cli.demo import policy
    from tensorhub_p2p.cli.demo.pipeline import Link
    from tensorhub_p2p.cli.demo.radio import Radio
    from tensorhub_p2p.cli.demo.rollout import Rollout
    from tensorhub_p2p.cli.demo.trainer import train
    from tensorhub_p2p.cli.demo.weights import Weights

    torch.set_num_threads(1)
    radio = Radio(wires.conductor, plan.patience)
    link = Link(wires.partner, plan.patience)
    # Rollouts start from other random weights: if they learn, it is from what they pulled.
    half = policy.half(plan, shard, plan.seed if replica == TRAINER else plan.seed + 100)
    radio.report(Loaded())
    # The first process may be the last to be up, on a machine that is busy.
    join = radio.await_order(Join, plan.time_limit)
    with Weights(plan, half, name, replica, shard, join) as weights:
        radio.report(Joined(str(weights.peer.peer_id), weights.peer.address))
        if replica == TRAINER:
            train(plan, shard, half, weights, link, radio, wires.samples)
        else:
            Rollout(plan, replica, shard, half, weights, link, radio, wires.samples).run()
