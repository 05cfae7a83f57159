"""`tensorhub-p2p serve`: publish the weights in a file."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

import tensorhub_p2p as th
from tensorhub_p2p.cli import checkpoints, joining


def serve(
    path: Annotated[Path, typer.Argument(help="A safetensors file or a torch checkpoint.")],
    model: Annotated[str, typer.Option(help="Name of the model to publish.")],
    version: Annotated[int, typer.Option(help="Version to publish.")] = 1,
    replica: Annotated[str | None, typer.Option(help="Replica; unique by default.")] = None,
    shard: Annotated[int, typer.Option(help="Which shard of the replica the file is.")] = 0,
    num_shards: Annotated[int, typer.Option(help="Shards of the replica.")] = 1,
    seed: joining.Seeds = None,
    cluster: joining.Cluster = None,
    zone: joining.Zone = None,
    secret: joining.Secret = None,
    bind: joining.Bind = None,
    advertise: joining.Advertise = None,
    insecure: joining.Insecure = None,
    offload_limit: joining.OffloadLimit = None,
    as_json: joining.AsJson = False,
) -> None:
    """Publish a file's weights as one version and serve them until Ctrl-C or SIGTERM.

    Without a seed a new cluster starts here; the address is printed for others to join. At its
    end others that retain the version take it over, if they can.
    """
    tensors = checkpoints.load(path)
    peer = th.Peer(
        cluster=cluster,
        seeds=seed or None,
        zone=zone,
        secret=secret,
        bind=bind,
        advertise=advertise,
        insecure=insecure,
        offload_limit=offload_limit,
        name=f"tensorhub-p2p serve {path.name}",
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with peer, peer.open(model, replica=replica, shard=shard, num_shards=num_shards) as handle:
        handle.register(tensors)
        handle.publish(version)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if as_json:
            facts = {"address": peer.address, "peer_id": peer.peer_id, "bytes": size}
            print(json.dumps({"model": model, "version": version, **facts}), flush=True)
        else:
            print(
                f"serving version {version} of {model!r}: {len(tensors)} tensors, "
                f"{size / 1e6:.1f} MB, at {peer.address}. Ctrl-C ends it.",
                flush=True,
            )
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass  # that is how it is told to end: the peer closes
