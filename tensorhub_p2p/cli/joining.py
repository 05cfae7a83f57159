"""The options of every command that joins a cluster, and the joining."""

from __future__ import annotations

from typing import Annotated

import typer

import tensorhub_p2p as th
from tensorhub_p2p.options import resolve_options

Seeds = Annotated[
    list[str] | None,
    typer.Option("--seed", help="Address to join through, host:port; repeatable. [THUB_SEEDS]"),
]
Cluster = Annotated[str | None, typer.Option(help="Name of the cluster. [THUB_CLUSTER]")]
Zone = Annotated[str | None, typer.Option(help="This peer's zone. [THUB_ZONE]")]
Secret = Annotated[
    str | None,
    typer.Option(help="The cluster's secret; better given as THUB_SECRET, others see arguments."),
]
Bind = Annotated[
    str | None, typer.Option(help="Control address to bind, 127.0.0.1:0 by default. [THUB_BIND]")
]
Advertise = Annotated[
    str | None, typer.Option(help="Address that others reach this peer by. [THUB_ADVERTISE]")
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Allow a public address without a secret. [THUB_INSECURE]"),
]
OffloadLimit = Annotated[
    int | None,
    typer.Option(help="Bytes of host memory for copies that others retain. [THUB_OFFLOAD_LIMIT]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def visit(
    role: str,
    seeds: list[str] | None,
    cluster: str | None,
    zone: str | None,
    secret: str | None,
    bind: str | None,
    advertise: str | None,
    insecure: bool | None,
) -> th.Peer:
    """A peer that joins an existing cluster for one command; raises JoinError without seeds.

    An empty list of seeds would start a cluster of one, in which there is nothing to see.
    """
    given = resolve_options(seeds=seeds or None).seeds
    if not given:
        raise th.JoinError("no seed given: name a running peer with --seed host:port or THUB_SEEDS")
    return th.Peer(
        cluster=cluster,
        seeds=given,
        zone=zone,
        secret=secret,
        bind=bind,
        advertise=advertise,
        insecure=insecure,
        offload_limit=0,  # it is gone in a moment: nothing is to be left with it
        name=f"tensorhub-p2p {role}",
    )
