"""The accident: a process is killed, the hard way, while it serves a pull.

The witness is a thread of the *puller*. It looks at a few bytes of every 256 KiB of the
tensors that are being replicated; when enough of them have changed the pull is well
under way, and it kills the source at once. Nobody else could time this: a pull takes
some hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from torch import Tensor, nn

from tensorhub_p2p.cli.demo.weights import tensors

PROBE_BYTES = 256 << 10
ENOUGH = 0.15
"""Fraction of the probes that must have changed."""


class Witness:
    """Starts to watch at once; `finish` ends it and says how much had arrived at the kill."""

    def __init__(self, half: nn.Module, victim: int) -> None:
        self._half = half
        self._victim = victim
        self._before = self._probe()
        self._done = threading.Event()
        self._arrived = 0.0
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)
        self._thread.start()

    def finish(self) -> float:
        self._done.set()
        self._thread.join()
        return self._arrived

    def _watch(self) -> None:
        while not self._done.is_set():
            arrived = self._fraction_changed()
            if arrived >= ENOUGH:
                os.kill(self._victim, signal.SIGKILL)
                self._arrived = arrived
                return
            time.sleep(0.0002)

    def _probe(self) -> list[Tensor]:
        flat = (t.detach().view(-1) for t in tensors(self._half))
        return [f[:: PROBE_BYTES // f.element_size()].clone() for f in flat if f.numel()]

    def _fraction_changed(self) -> float:
        now = self._probe()
        changed = sum(int((a != b).sum()) for a, b in zip(now, self._before, strict=True))
        return changed / sum(p.numel() for p in now)
