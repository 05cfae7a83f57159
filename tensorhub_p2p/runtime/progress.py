"""The progress bar of `replicate(progress=True)`."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from tensorhub_p2p.protocol.layout import Layout


class Progress:
    """One bar, on stderr's terminal if there is one. Used by one thread."""

    def __init__(self, title: str) -> None:
        self._bar = Bar("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._task = self._bar.add_task(title, total=None)
        self._layout: Layout | None = None

    def begin(self, layout: Layout) -> None:
        """The size is known, and bytes begin to move."""
        self._layout = layout
        self._bar.update(self._task, total=layout.num_bytes)
        self._bar.start()

    def advance(self, chunk: int) -> None:
        """One more chunk is in place."""
        assert self._layout is not None
        self._bar.advance(self._task, self._layout.chunk_range(chunk)[1])

    def close(self) -> None:
        self._bar.stop()
