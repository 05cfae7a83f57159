"""DNS off the control thread: names are looked up by short-lived threads.

A lookup can take seconds and can't be interrupted; neither the control thread nor
ZeroMQ's I/O thread may wait for it. Bounded: `MAX_LOOKUPS` at a time, one per set of
addresses; a request beyond that is not taken (the caller asks again with its next
message).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_p2p.runtime.addresses import Address, AddressError, parse, resolve

MAX_LOOKUPS = 4


@dataclass(frozen=True)
class Found:
    """All numeric addresses behind `addresses`, in order; `error` says what can't be resolved."""

    addresses: tuple[str, ...]
    numeric: tuple[str, ...]
    error: str


def resolve_all(addresses: tuple[str, ...]) -> Found:
    """Resolve several addresses of one destination; blocks if there are names among them."""
    numeric: dict[Address, None] = {}
    errors = []
    for address in addresses:
        try:
            numeric.update(dict.fromkeys(resolve(parse(address))))
        except AddressError as error:
            errors.append(str(error))
    return Found(addresses, tuple(map(str, numeric)), "; ".join(errors))


class Resolver:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[tuple[str, ...]] = set()
        self._found: list[Found] = []
        self.wake: Callable[[], None] = lambda: None
        """Called from a lookup's thread when its result can be taken."""

    def request(self, addresses: tuple[str, ...]) -> bool:
        """Start a lookup, unless it runs already; False if too many are running."""
        with self._lock:
            if addresses in self._running:
                return True
            if len(self._running) >= MAX_LOOKUPS:
                return False
            self._running.add(addresses)
        name = f"tensorhub-resolve {addresses[0]}"
        threading.Thread(target=self._run, args=(addresses,), name=name, daemon=True).start()
        return True

    def _run(self, addresses: tuple[str, ...]) -> None:
        found = resolve_all(addresses)
        with self._lock:
            self._running.discard(addresses)
            self._found.append(found)
        self.wake()

    def take(self) -> list[Found]:
        if not self._found:
            return []
        with self._lock:
            found, self._found = self._found, []
        return found
