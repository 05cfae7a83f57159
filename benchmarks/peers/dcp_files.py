"""torch.distributed.checkpoint: the source saves to a file, the target loads it in place.

Settings: `folder`, where the file is to be: a tmpfs, or a disk.
"""

from __future__ import annotations

import warnings

import torch.distributed.checkpoint as dcp
from serving import Side, Span, Stopwatch, serve

warnings.filterwarnings("ignore", message=".*single process.*")


class Source(Side):
    def give(self) -> Span:
        writer = dcp.FileSystemWriter(self.settings["folder"], overwrite=True)
        with Stopwatch() as watch:
            dcp.save({"weights": self.tensor}, storage_writer=writer)
        return watch.span


class Target(Side):
    def take(self) -> Span:
        with Stopwatch() as watch:
            dcp.load({"weights": self.tensor}, checkpoint_id=self.settings["folder"])
        return watch.span


if __name__ == "__main__":
    serve({"source": Source, "target": Target})
