"""`tensorhub-p2p demo`: reinforcement learning across processes, with no server.

Eight processes on this machine, each with a peer of its own. A trainer replica of two
shards learns to sort digits by policy gradient; three rollout replicas of two shards
each pull every version, sample with it and send samples and rewards back over a plain
queue. Each process holds one half of the policy only and passes activations to the
process with the other half.

Halfway one rollout process is killed while it serves a pull. The pull goes on from
other sources; a new process takes the free place, and its replica goes on.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console

from tensorhub_p2p.cli.demo.board import Board
from tensorhub_p2p.cli.demo.conductor import Conductor, RunFailed
from tensorhub_p2p.cli.demo.plan import QUICK, Plan
from tensorhub_p2p.cli.demo.screen import Screen

WIDTH_OF_A_LOG = 110
"""Characters a line, where the output is not a terminal that says its own width."""


def demo(
    quick: Annotated[
        bool, typer.Option(help="A short run: the machinery, little learning.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, progress to stderr.")
    ] = False,
) -> None:
    """Reinforcement learning with weights moved between processes, and an accident halfway.

    Exits with 1 when the reward did not rise, a checksum was wrong, or anything else failed.
    """
    plan = QUICK if quick else Plan()
    board = Board(plan)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = WIDTH_OF_A_LOG
    started = time.monotonic()
    broken_off = None
    with Screen(console, board) as screen:
        try:
            Conductor(plan, screen.watch).run()
        except RunFailed as error:
            broken_off = str(error)
    board.seconds = time.monotonic() - started
    board.broken_off = broken_off
    screen.finish()
    if as_json:
        print(json.dumps(board.summary()))
    if board.failures():
        raise typer.Exit(1)
