"""The command line `tensorhub-p2p`: one file a command, nothing but the list here."""

from __future__ import annotations

import sys

import typer

from tensorhub_p2p.cli.demo import demo
from tensorhub_p2p.cli.doctor import doctor
from tensorhub_p2p.cli.keygen import keygen
from tensorhub_p2p.cli.members import members
from tensorhub_p2p.cli.pull import pull
from tensorhub_p2p.cli.serve import serve
from tensorhub_p2p.cli.simulate import simulate
from tensorhub_p2p.cli.versions import versions
from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.errors import TensorHubError

app = typer.Typer(
    name="tensorhub-p2p",
    help="Weights for LLM reinforcement learning, moved between workers with no server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (demo, members, versions, doctor, serve, pull, keygen):
    app.command()(command)
app.add_typer(simulate, name="simulate")


def main() -> None:
    """Entry point of the script `tensorhub-p2p`. The library's errors are one line, no trace."""
    try:
        app()
    except (TensorHubError, ConfigError) as error:
        print(f"tensorhub-p2p: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
