"""The command line `tensorhub-p2p`: one file a command, nothing but the list here."""

from __future__ import annotations

import typer

from tensorhub_p2p.cli.demo import demo
from tensorhub_p2p.cli.keygen import keygen

app = typer.Typer(
    name="tensorhub-p2p",
    help="Weights for LLM reinforcement learning, moved between workers with no server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (demo, keygen):
    app.command()(command)


def main() -> None:
    """Entry point of the script `tensorhub-p2p`."""
    app()
