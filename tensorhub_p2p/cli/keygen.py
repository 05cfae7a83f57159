"""`tensorhub-p2p keygen`: a secret for a cluster."""

from __future__ import annotations

import json

import tensorhub_p2p as th
from tensorhub_p2p.cli import joining


def keygen(as_json: joining.AsJson = False) -> None:
    """Print a new random secret, for `Peer(secret=...)` or the variable THUB_SECRET.

    All peers of a cluster need the same one; who has it belongs to the cluster.
    """
    secret = th.keygen()
    print(json.dumps({"secret": secret}) if as_json else secret)
