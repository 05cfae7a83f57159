"""How a run looks: a line for each version, a live table below, the verdict at the end."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensorhub_p2p.cli.demo.board import Board, Row
from tensorhub_p2p.cli.demo.plan import VICTIM, worker_name
from tensorhub_p2p.cli.demo.reports import (
    Broken,
    Joined,
    Pulled,
    Report,
    Struck,
    Trained,
)

BAR = 24
"""Characters of a full reward bar."""


class Screen:
    """Watches a run on `console`. On anything but a terminal only the lines are printed."""

    def __init__(self, console: Console, board: Board) -> None:
        self._console = console
        self._board = board
        self._started = time.monotonic()
        self._live = Live(
            console=console, get_renderable=self._table, refresh_per_second=4, transient=True
        )
        self._animated = console.is_terminal

    def __enter__(self) -> Screen:
        if self._animated:
            self._live.start()
        self._say("[dim]eight processes are starting[/]")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._animated:
            self._live.stop()

    def watch(self, name: str, report: Report) -> None:
        """A `Watch` for the conductor: keeps the board and tells what is news."""
        self._board.take(name, report)
        if isinstance(report, Trained):
            self._say(self._version_line(report))
        elif isinstance(report, Joined):
            self._say(f"[dim]{name} joined: {report.peer_id} at {report.address}[/]")
        elif isinstance(report, Struck):
            self._say(
                f"[bold red]✗ {worker_name(*VICTIM)} killed (SIGKILL)[/] while {name} was pulling "
                f"from it, {report.arrived:.0%} done"
            )
        elif isinstance(report, Broken):
            self._say(f"[yellow]! {name}: {report.reason}[/]")
        elif (
            isinstance(report, Pulled) and name.endswith("'") and self._board.rows[name].pulls == 1
        ):
            self._say(f"[bold green]✓ {name} took the free place[/], pulled {self._pull(report)}")
        elif isinstance(report, Pulled) and report.retried:
            self._say(
                f"[green]✓ {name} finished all the same[/]: {report.retried} chunks from others, "
                f"{self._pull(report)}"
            )

    def _say(self, line: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(f"[dim]{elapsed:5.1f}s[/] {line}", highlight=False, soft_wrap=True)

    def _version_line(self, trained: Trained) -> str:
        filled = round(BAR * trained.reward)
        moved = self._board.version_bytes.get(trained.version, 0)
        return (
            f"version [bold]{trained.version:3d}[/]  reward {trained.reward:.3f} "
            f"[green]{'━' * filled}[/][dim]{'━' * (BAR - filled)}[/] "
            f"solved {trained.solved:4.0%}  {len(trained.replicas)} replicas, {moved / 1e6:.0f} MB"
        )

    @staticmethod
    def _pull(pulled: Pulled) -> str:
        sources = ", ".join(
            f"{count / 1e6:.0f} MB from {name}" for name, count in sorted(pulled.sources.items())
        )
        return f"version {pulled.version}, {sources}"

    # --- tables ---------------------------------------------------------------------------

    def _table(self, *, final: bool = False) -> Table:
        table = Table(title="weights moved, by process" if final else None, expand=False)
        table.add_column("process")
        table.add_column("state")
        table.add_column("version", justify="right")
        table.add_column("pulls", justify="right")
        table.add_column("GB", justify="right")
        table.add_column("GB/s", justify="right")
        table.add_column("over")
        table.add_column("from whom" if final else "last pull from", overflow="fold")
        for name, row in sorted(self._board.rows.items()):
            table.add_row(*self._cells(name, row, final))
        return table

    @staticmethod
    def _cells(name: str, row: Row, final: bool) -> tuple[str | Text, ...]:
        style = {"killed": "red", "group broken": "yellow", "published": "cyan"}.get(row.state, "")
        sources = row.sources if final or row.last is None else row.last.sources
        total = sum(sources.values()) or 1
        shares = ", ".join(
            f"{source} {count / total:.0%}"
            for source, count in sorted(sources.items(), key=lambda item: -item[1])
        )
        return (
            name,
            Text(row.state, style=style),
            str(row.version or ""),
            str(row.pulls or ""),
            f"{row.bytes / 1e9:.2f}" if row.bytes else "",
            f"{row.gigabytes_per_second:.2f}" if row.moving else "",
            ", ".join(sorted(row.transports)),
            shares,
        )

    def finish(self) -> None:
        """The closing table and the verdict."""
        board = self._board
        self._console.print(self._table(final=True))
        gigabytes = sum(row.bytes for row in board.rows.values()) / 1e9
        self._console.print(
            f"reward {board.reward_before:.2f} → [bold]{board.reward_after:.2f}[/], "
            f"{board.checked} checksums compared, {len(board.wrong)} wrong, "
            f"{gigabytes:.1f} GB moved, {board.seconds:.0f} s"
        )
        for failure in board.failures():
            self._console.print(f"[bold red]FAILED[/] {failure}", highlight=False)
        if not board.failures():
            self._console.print("[bold green]OK[/]")
