"""Trainer and rollouts under torchrun: half of the ranks train, the other half follow.

Start it with `torchrun --nproc-per-node 4 examples/torchrun_sync.py`. Of 4 ranks, 0 and 1
are the two shards of the trainer's replica, 2 and 3 the two shards of a rollout's. Each shard
moves between the two processes that hold it: nothing is gathered, and no collective runs while
weights move. The process group only tells everybody where rank 0 is, keeps the trainer's shards
in step, and compares the results at the end.

On several machines, set THUB_SECRET (`tensorhub-p2p keygen`) and THUB_BIND=0.0.0.0:0 on each.
"""

import os
import time
import zlib

import torch
import torch.distributed as dist

import tensorhub_p2p as th

STEPS = 5


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_shards = dist.get_rank(), dist.get_world_size() // 2
    if dist.get_world_size() % 2 or not num_shards:
        raise SystemExit("start an even number of ranks: half of them train, half follow")
    trains, shard = rank < num_shards, rank % num_shards
    trainers = dist.new_group(list(range(num_shards)))
    torch.manual_seed(rank)
    model = torch.nn.Linear(1024, 1024 // num_shards)  # this shard's part of a layer

    with (
        join() as peer,
        peer.open(
            "policy",
            replica="trainer" if trains else "rollout",
            shard=shard,
            num_shards=num_shards,
        ) as handle,
    ):
        handle.register(model)
        if trains:
            train(handle, model, trainers)
        else:
            follow(handle, rank)
        compare(model, num_shards)  # nobody leaves before everybody has the last version


def join() -> th.Peer:
    """Rank 0 starts the cluster, the others join through its address."""
    cluster = os.environ["TORCHELASTIC_RUN_ID"]
    peer = th.Peer(cluster) if dist.get_rank() == 0 else None
    seed = [peer.address if peer else ""]
    dist.broadcast_object_list(seed)
    return peer or th.Peer(cluster, seeds=seed)


def train(
    handle: th.ShardHandle, model: torch.nn.Module, trainers: dist.ProcessGroup | None
) -> None:
    for version in range(1, STEPS + 1):
        handle.publish(version)
        time.sleep(0.5)  # a real trainer waits for its rollouts' samples here
        dist.barrier(trainers)  # a version is whole only while all shards have it
        if version < STEPS:
            handle.unpublish()  # waits for rollouts that are reading
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)  # the optimizer's step


def follow(handle: th.ShardHandle, rank: int) -> None:
    version = 0
    while version < STEPS:
        handle.wait_for(newer_than=version, timeout=60)
        pull = handle.replicate("latest", timeout=60)
        version = pull.version
        print(f"rank {rank} has version {version}: {pull.bytes} bytes", flush=True)


def compare(model: torch.nn.Module, num_shards: int) -> None:
    checksum = 0
    for tensor in model.state_dict().values():
        checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
    checksums = [0] * dist.get_world_size()
    dist.all_gather_object(checksums, checksum)
    if checksums[:num_shards] != checksums[num_shards:]:
        raise SystemExit(f"trainer and rollout differ: {checksums}")
    if dist.get_rank() == 0:
        print(f"trainer and rollout hold the same bytes: {checksums[:num_shards]}", flush=True)


if __name__ == "__main__":
    main()
