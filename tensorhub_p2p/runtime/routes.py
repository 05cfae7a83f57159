"""From the addresses that a peer gave to the one numeric address that is dialled now.

Rules of this file. Nothing here dials. A *destination* is the tuple of addresses that
somebody gave, names among them. Its route holds the numeric addresses behind them, in
order; one is current, and a failure there moves on to the next. Names are looked up off the
control thread (resolving.py), again when all their addresses failed.

A refused dial proves that a process is gone only where it is known to have listened: at its
only address, or at one that worked before.

Bounded: `limit` routes; the least recently used is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tensorhub_p2p.runtime.addresses import dialable
from tensorhub_p2p.runtime.resolving import Found, Resolver, resolve_all

_RESOLVE_AGAIN = 5.0
"""Seconds after which names are looked up anew, when none of their addresses works."""

Destination = tuple[str, ...]


@dataclass
class Route:
    destination: Destination
    candidates: tuple[str, ...] = ()
    """Numeric addresses; empty until the names are looked up."""
    place: int = 0
    named: bool = False
    resolved_at: float = float("-inf")
    error: str = ""
    worked: str = ""
    """The candidate to which a connection came about last."""

    @property
    def current(self) -> str | None:
        """The address to dial; None while the names are being looked up."""
        return self.candidates[self.place] if self.candidates else None


class Routes:
    """All destinations of one peer. Used on one thread."""

    def __init__(self, limit: int, resolve_retry: float) -> None:
        self._limit = limit
        self._retry = resolve_retry
        self._routes: OrderedDict[Destination, Route] = OrderedDict()
        self._resolver = Resolver()

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is called from a thread when `resolved` has something."""
        self._resolver.wake = wake

    def get(self, destination: Destination) -> Route | None:
        return self._routes.get(destination)

    def find(self, destination: Destination, now: float) -> Route:
        """The route, made if there is none; its names are being looked up if need be.

        Raises AddressError for an address that can't be dialled.
        """
        route = self._routes.get(destination)
        if route is None:
            named = not all(a.is_numeric for a in map(dialable, destination))
            route = self._routes[destination] = Route(destination, named=named)
            if not named:
                self._take(resolve_all(destination), now)
            if len(self._routes) > self._limit:
                self._routes.popitem(last=False)
        self._routes.move_to_end(destination)
        if not route.candidates and now - route.resolved_at > (self._retry if route.error else 0):
            self._resolver.request(destination)
        return route

    def resolved(self, now: float) -> list[Route]:
        """Routes whose names were looked up since the last call, in vain or not."""
        return [r for found in self._resolver.take() if (r := self._take(found, now)) is not None]

    def failed(self, address: str, now: float) -> None:
        """Nothing came of dialling `address`: routes that are there try their next one."""
        for route in self._routes.values():
            if route.current != address:
                continue
            route.place = (route.place + 1) % len(route.candidates)
            if route.place == 0 and route.named and now - route.resolved_at > _RESOLVE_AGAIN:
                self._resolver.request(route.destination)

    def worked(self, address: str) -> None:
        """A connection to `address` came about."""
        for route in self._routes.values():
            if route.current == address:
                route.worked = address

    def is_proof(self, destination: Destination, address: str) -> bool:
        """Whether nobody's listening at `address` means that the process is gone."""
        route = self._routes.get(destination)
        if route is None:
            return destination == (address,)
        return route.candidates == (address,) or route.worked == address

    def _take(self, found: Found, now: float) -> Route | None:
        route = self._routes.get(found.addresses)
        if route is None:
            return None
        route.resolved_at = now
        route.error = found.error
        if found.numeric and found.numeric != route.candidates:
            route.candidates = found.numeric
            route.place = 0
        return route
