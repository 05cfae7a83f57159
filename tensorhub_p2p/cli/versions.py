"""`tensorhub-p2p versions`: which versions of a model somebody holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tensorhub_p2p.cli import joining


def versions(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    seed: joining.Seeds = None,
    cluster: joining.Cluster = None,
    zone: joining.Zone = None,
    secret: joining.Secret = None,
    bind: joining.Bind = None,
    advertise: joining.Advertise = None,
    insecure: joining.Insecure = None,
    as_json: joining.AsJson = False,
) -> None:
    """List the versions of a model, newest first."""
    with joining.visit("versions", seed, cluster, zone, secret, bind, advertise, insecure) as peer:
        found = peer.versions(model)
    if as_json:
        print(json.dumps([asdict(version) for version in found]))
        return
    table = Table("version", "epoch", "whole", "holders", "zones")
    for version in found:
        whole = "yes" if version.whole else "no"
        zones = ", ".join(version.zones)
        table.add_row(str(version.version), str(version.epoch), whole, str(version.holders), zones)
    Console().print(table)
