"""Python's cycle collector, which has nothing to find here and much to look at.

Rule of this file. It stops the collector for a while, and lets it go on afterwards.

Theory. A simulation of ten thousand peers holds tens of millions of objects that live as
long as it does; each full collection walks them all. What comes and goes (messages, claims)
has no cycles and is freed without it. Small simulations are left alone: they are many in one
process, and each is garbage, with cycles, in the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

LARGE = 1000
"""Peers from which on collections cost more than they are worth."""


@contextmanager
def at_rest(peers: int) -> Iterator[None]:
    """Without collections, if there are that many peers."""
    if peers < LARGE or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
