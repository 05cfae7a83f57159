"""A standing question to the directory: one read of a key at a time.

Rules of this file. An `Inquiry` knows a key and who wants its registers. It decides nothing.

Theory of operation. The directory asks the owners of a key until they answer, so that a
second read of it, begun before the first is answered, only adds load; and during a partition
reads would pile up. So `look` during a read is remembered, and one more read follows the
answer. What is learnt is thus never older than the last `look`, once all is answered. How
far a read looks (`enough`, records.py) is as the last `look` said.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub_p2p.protocol.directory.records import Enough, Records, Registers
from tensorhub_p2p.protocol.messages import Key


class Inquiry:
    """Reads `key` on demand; `then(now, registers)` gets each answer."""

    def __init__(
        self,
        records: Records,
        key: Key,
        then: Callable[[float, Registers], None],
        near: str = "",
    ) -> None:
        self._records = records
        self._key = key
        self._then = then
        self._near = near
        self._request: int | None = None
        self._again = False
        self._enough: Enough | None = None

    def look(self, now: float, enough: Enough | None = None, *, agreed: bool = False) -> None:
        """Read the key, or once more if a read is under way."""
        self._enough = enough
        if self._request is not None:
            self._again = True
        else:
            self._again = False
            self._request = self._records.read(
                now, self._key, self._answered, enough, near=self._near, agreed=agreed
            )

    def look_anew(self, now: float, enough: Enough | None = None, *, agreed: bool = False) -> None:
        """Read the key; an answer to an earlier `look` is of no use any more."""
        self.stop()
        self.look(now, enough, agreed=agreed)

    def stop(self) -> None:
        """Want no answer any more."""
        self._again = False
        if self._request is not None:
            self._records.cancel(self._request)
            self._request = None

    def _answered(self, now: float, registers: Registers) -> None:
        self._request = None
        self._then(now, registers)
        if self._again and self._request is None:
            self.look(now, self._enough)
