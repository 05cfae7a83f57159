"""`tensorhub-p2p keygen`: a secret for a cluster."""

from __future__ import annotations

import json
import secrets
from typing import Annotated

import typer

SECRET_BYTES = 32


def keygen(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Print a new random secret, for `Peer(secret=...)` or the variable THUB_SECRET.

    All peers of a cluster need the same one; who has it belongs to the cluster.
    """
    secret = secrets.token_urlsafe(SECRET_BYTES)
    print(json.dumps({"secret": secret}) if as_json else secret)
