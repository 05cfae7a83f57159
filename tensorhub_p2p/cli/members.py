"""`tensorhub-p2p members`: who is in the cluster."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tensorhub_p2p.cli import joining


def members(
    seed: joining.Seeds = None,
    cluster: joining.Cluster = None,
    zone: joining.Zone = None,
    secret: joining.Secret = None,
    bind: joining.Bind = None,
    advertise: joining.Advertise = None,
    insecure: joining.Insecure = None,
    everyone: Annotated[bool, typer.Option(help="List the dead and those that left too.")] = False,
    as_json: joining.AsJson = False,
) -> None:
    """List the peers of a zone, but not the one that this command is for a moment."""
    with joining.visit("members", seed, cluster, zone, secret, bind, advertise, insecure) as peer:
        found = [m for m in peer.members(everyone=everyone) if m.peer_id != peer.peer_id]
        others = [zone for zone in peer.zones() if zone.name != peer.options.zone]
    found.sort(key=lambda m: (m.zone, m.name, m.peer_id))
    if as_json:
        print(json.dumps([asdict(member) for member in found]))
        return
    table = Table("name", "state", "zone", "address", "peer id")
    for member in found:
        table.add_row(member.name, member.state, member.zone, member.address, member.peer_id)
    Console().print(table)
    for other in others:
        about = f"about {other.members} members"
        print(f"zone {other.name}: {about}; list them with --zone {other.name}")
