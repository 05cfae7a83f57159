"""Which transports are tried on which link, and what became of it.

Rule of this file. It orders names and remembers failures; it opens nothing. All of it may
be called from any thread.

Theory. The peer's own order counts for every link, unless a rule of the configuration
matches the peer at the other end: then the first such rule's does. A transport that failed
on a link gives way to the next one there, and nowhere else. That is remembered for a while,
so that later pulls don't pay for finding out again; then it gets another chance, as it may have
been a passing trouble. The user is warned once for each link, transport and reason.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorhub_p2p.config import LinkRule
from tensorhub_p2p.protocol.identity import PeerId

LOCALITIES = ("host", "rack", "zone", "far")
"""By how far a peer is, as the swarm counts it: 0 to 3."""
MAX_REMEMBERED = 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Facts:
    """What rules look at: the peer at the other end of a link."""

    name: str = ""
    zone: str = ""
    host: str = ""
    """The label that it was given, not the machine's identity."""
    distance: int = 3


def _nobody(_peer: PeerId) -> Facts:
    return Facts()


def matches(rule: LinkRule, facts: Facts) -> bool:
    """Whether everything that the rule asks for is so. Patterns are the shell's."""
    patterns = ((rule.peer, facts.name), (rule.zone, facts.zone), (rule.host, facts.host))
    return rule.locality in ("", LOCALITIES[facts.distance]) and all(
        not pattern or fnmatch.fnmatchcase(text, pattern) for pattern, text in patterns
    )


class Choices:
    """The order of transports for each link, and the failures that were seen."""

    def __init__(
        self,
        transports: Sequence[str],
        rules: Sequence[LinkRule] = (),
        facts: Callable[[PeerId], Facts] = _nobody,
        remembered: float = 60.0,
    ) -> None:
        """`transports` in the peer's order; `remembered`: seconds for which a failure counts."""
        self._transports = tuple(transports)
        self._rules = tuple(rules)
        self._facts = facts
        self._remembered = remembered
        self._lock = threading.Lock()
        self._failed: OrderedDict[tuple[PeerId, str], tuple[float, str]] = OrderedDict()
        self._warned: OrderedDict[tuple[PeerId, str, str], None] = OrderedDict()

    def order(self, peer: PeerId) -> tuple[str, ...]:
        """The transports to try on the link to this peer, the first one first."""
        if not self._rules:
            return self._transports
        facts = self._facts(peer)
        rule = next((rule for rule in self._rules if matches(rule, facts)), None)
        return self._transports if rule is None else rule.transports

    def failed_lately(self, peer: PeerId, transport: str) -> str | None:
        """Why this transport failed on this link a short while ago, or None."""
        with self._lock:
            known = self._failed.get((peer, transport))
        if known is None or time.monotonic() - known[0] > self._remembered:
            return None
        return known[1]

    def failed(self, peer: PeerId, transport: str, why: str, instead: str) -> None:
        """It failed on this link; `instead` is used there from now on, "" if there is none."""
        with self._lock:
            self._failed[peer, transport] = (time.monotonic(), why)
            self._failed.move_to_end((peer, transport))
            key = (peer, transport, re.sub(r"\d+", "#", why))
            new = key not in self._warned
            self._warned[key] = None
            if len(self._failed) > MAX_REMEMBERED:
                self._failed.popitem(last=False)
            if len(self._warned) > MAX_REMEMBERED:
                self._warned.popitem(last=False)
        if new:
            name = self._facts(peer).name
            _log.warning(
                "the link to peer %s%s can't use %s: %s; %s",
                peer,
                f" ({name})" if name else "",
                transport,
                why,
                f"it uses {instead} instead" if instead else "no other transport is left",
            )
