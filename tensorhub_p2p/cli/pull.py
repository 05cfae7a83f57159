"""`tensorhub-p2p pull`: replicate a version into a safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tensorhub_p2p.cli import checkpoints, joining
from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.protocol.groups.selection import selector_of


def pull(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    like: Annotated[
        Path | None,
        typer.Option(
            help="A file with tensors of the same names, shapes and dtypes (safetensors or a "
            "torch checkpoint); by default the file that is to be replaced."
        ),
    ] = None,
    version: Annotated[str, typer.Option(help='A number, "latest" or "latest-1".')] = "latest",
    timeout: Annotated[float, typer.Option(help="Seconds until it gives up.")] = 120.0,
    seed: joining.Seeds = None,
    cluster: joining.Cluster = None,
    zone: joining.Zone = None,
    secret: joining.Secret = None,
    bind: joining.Bind = None,
    advertise: joining.Advertise = None,
    insecure: joining.Insecure = None,
    as_json: joining.AsJson = False,
) -> None:
    """Replicate a version and write it to a safetensors file, which is whole or not there.

    For models of one shard.
    """
    selector = _selector(version)
    if like is None and not out.exists():
        raise typer.BadParameter(
            f"{out} does not exist: name a file with the same tensors with --like"
        )
    checkpoints.check_writable(out)
    tensors = checkpoints.load(like or out)
    with (
        joining.visit("pull", seed, cluster, zone, secret, bind, advertise, insecure) as peer,
        peer.open(model, spot=True, timeout=timeout) as handle,
    ):
        handle.register(tensors)
        done = handle.replicate(selector, timeout=timeout, progress=not as_json)
        explained = peer.explain(done)
    checkpoints.save(out, tensors)
    print(json.dumps({"out": str(out), **done.as_json()}) if as_json else f"{explained}\n→ {out}")


def _selector(version: str) -> str:
    try:
        return selector_of(version)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--version") from error
