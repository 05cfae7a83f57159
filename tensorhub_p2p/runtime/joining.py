"""How a starting peer finds its cluster, and the error when it does not.

    no seeds                    a cluster of one
    all seeds are this peer     a cluster of one
    some seeds are this peer    it starts alone after `OWN_SEED_GRACE`, and goes on dialling
    a seed answers              joined
    a seed refuses the handshake `HANDSHAKES_REFUSED` times in a row   AuthenticationError
    none of it by the deadline  JoinError, with what was seen at each seed

Seeds stay a way back for the peer's whole life (protocol/membership/seeds.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tensorhub_p2p.errors import AuthenticationError, JoinError
from tensorhub_p2p.runtime.addresses import dialable, parse
from tensorhub_p2p.runtime.driver import Driver
from tensorhub_p2p.runtime.monitor import Fact

_logger = logging.getLogger(__name__)

HANDSHAKES_REFUSED = 3
"""Refusals in a row by a reachable seed until it counts as another secret's."""
OWN_SEED_GRACE = 1.0
"""Seconds for which a peer that is a seed itself looks for the other seeds before it starts."""
LOOK_INTERVAL = 0.1
"""Seconds after which the state is looked at, news or not."""


def check_seeds(bind: str, advertise: str | None, seeds: Sequence[str]) -> None:
    """JoinError for seeds that can't work, before anything is opened.

    A peer that is bound to loopback can reach a seed elsewhere, but not be answered.
    """
    local = parse(bind, 0).is_loopback and advertise is None
    for seed in seeds:
        address = dialable(seed)
        if local and address.is_numeric and not address.is_loopback:
            raise JoinError(
                f"seed {seed} can't answer a peer that is bound to {bind}: pass "
                "bind='0.0.0.0:0' (or this machine's address) and the cluster's secret"
            )


def join(driver: Driver, cluster: str, seeds: Sequence[str], timeout: float) -> None:
    """Join through any of the seeds; returns once joined, or alone by right."""
    started = time.monotonic()
    deadline = started + timeout
    driver.ask(lambda now: driver.node.join(now, seeds))
    while seeds and not driver.joined.is_set():
        now = time.monotonic()
        own = driver.own_seeds.issuperset(seeds)
        if own or (driver.own_seeds and now - started >= OWN_SEED_GRACE):
            break
        _raise_if_refused(driver, seeds)
        if now >= deadline:
            raise JoinError(_why_not(driver, cluster, seeds, timeout))
        driver.news.wait(min(LOOK_INTERVAL, deadline - now))
        driver.news.clear()
    if not driver.joined.is_set():
        where = driver.info.addresses[0]
        _logger.info("peer %s is a cluster of one at %s", driver.peer_id, where)


def _raise_if_refused(driver: Driver, seeds: Sequence[str]) -> None:
    for address, fact in list(driver.refused.items()):
        if fact.count >= HANDSHAKES_REFUSED and address in seeds:
            raise AuthenticationError(
                f"seed {address} refuses the handshake ({fact.count} times in a row): "
                "its cluster has another secret, or none; give both the same `secret`"
            )


def _why_not(driver: Driver, cluster: str, seeds: Sequence[str], timeout: float) -> str:
    seen = {seed: driver.links.describe(seed) for seed in seeds}
    told = "; ".join(f"{seed}: {what}" for seed, what in seen.items())
    hint = "Check the addresses, and that the seeds are running"
    if any(what.startswith(Fact.UP.value) for what in seen.values()):
        hint = (
            "A seed that is connected but silent belongs to a cluster of another name, or can't "
            f"reach this peer back at {driver.info.addresses[0]}"
        )
    return f"no seed of cluster {cluster!r} answered within {timeout:g} s ({told}). {hint}"
