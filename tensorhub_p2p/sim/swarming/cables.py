"""What bytes cost on limited cables: every host sends and receives at a bounded rate.

Rule of this file. It moves reads of so many bytes from host to host and says when they are
done; it knows nothing of chunks, messages or pulls.

Theory of operation. A read is cut into quanta. A host's sending end serves the reads that
leave it in turn, one quantum each; a quantum that has left waits at the receiver's end for
its own turn there, in order of arrival. No read has more than `WINDOW` quanta between the
two ends, as TCP has no more than its window: so a busy receiver holds nobody else up, and a
sender never idles while somebody could take. That is processor sharing at both ends, which
keeps every cable busy, at the cost of one event for each quantum and end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

QUANTUM = 64 << 10
"""Bytes that are served at a turn."""
WINDOW = 4
"""Quanta of one read that may have left the sender and not reached the receiver."""

Later = Callable[[float, Callable[[], None]], None]
"""`later(delay, do)`: call `do` so many seconds from now."""


@dataclass(eq=False)
class Flow:
    """One read under way."""

    source: Cable
    target: Cable
    left: int
    """Bytes that have not left the sender."""
    done: Callable[[], None]
    between: int = 0
    """Quanta that have left the sender and not reached the receiver."""
    cut: bool = False


class Cable:
    """The two directions of one host's cable, `rate` bytes a second each."""

    def __init__(self, rate: float, later: Later) -> None:
        self.rate = rate
        self.sent = self.received = 0
        """Bytes so far."""
        self.uploads = 0
        """Reads that are being served."""
        self._later = later
        self._leaving: deque[Flow] = deque()
        """Reads that have bytes to send and room in their window, in the order of turns."""
        self._arriving: deque[tuple[Flow, int]] = deque()
        self._sending = self._receiving = False

    def read(self, source: Cable, num_bytes: int, done: Callable[[], None]) -> Flow:
        """Read from there; `done` is called when all of it is here. `cut` ends it silently."""
        flow = Flow(source, self, num_bytes, done)
        source.uploads += 1
        source._offer(flow)
        return flow

    def _offer(self, flow: Flow) -> None:
        self._leaving.append(flow)
        if not self._sending:
            self._send()

    def _send(self) -> None:
        while self._leaving:
            flow = self._leaving.popleft()
            if not flow.cut:
                break
            self.uploads -= 1
        else:
            self._sending = False
            return
        self._sending = True
        size = min(QUANTUM, flow.left)
        flow.left -= size
        flow.between += 1
        self.sent += size
        if flow.left and flow.between < WINDOW:
            self._leaving.append(flow)
        self._later(size / self.rate, lambda: self._sent(flow, size))

    def _sent(self, flow: Flow, size: int) -> None:
        flow.target._arriving.append((flow, size))
        if not flow.target._receiving:
            flow.target._receive()
        self._send()

    def _receive(self) -> None:
        if not self._arriving:
            self._receiving = False
            return
        self._receiving = True
        flow, size = self._arriving.popleft()
        self._later(size / self.rate, lambda: self._received(flow, size))

    def _received(self, flow: Flow, size: int) -> None:
        self.received += size
        flow.between -= 1
        if flow.cut:
            if flow not in flow.source._leaving and not flow.between:
                flow.source.uploads -= 1
        elif not flow.left and not flow.between:
            flow.source.uploads -= 1
            flow.done()
        elif flow.left and flow.between == WINDOW - 1:
            flow.source._offer(flow)
        self._receive()
