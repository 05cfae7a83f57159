"""How far ahead the only source is asked, so that it goes on sending whatever holds it up.

Rule of this file. It says how many chunks more than usual may be in flight. It asks for
nothing itself.

Theory. A source whose Python is held up (a tokeniser, a pickle, a JIT that keeps the lock for
seconds) can't take requests; but what it was asked for before, its kernel goes on sending. So
much is asked of a source ahead of time, but only where it costs nothing: a chunk that was
asked for can't be given to another source, so only the one source that there is, with no
other holder and no other puller known, is asked for more than keeps it busy; and only once it
has delivered what it was asked for first, so that its rate is known.

Bound: `run_ahead` seconds' worth at its measured rate.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub_p2p.config import PullConfig
from tensorhub_p2p.protocol.pulls.sources import ANSWERED, Source, SourceState

GONE = frozenset({SourceState.DEAD, SourceState.SHUNNED})


def run_ahead(sources: Iterable[Source], usual: int, config: PullConfig) -> int:
    """Chunks that may be in flight beyond the `usual` ones, at these sources altogether."""
    there = [source for source in sources if source.state not in GONE]
    if len(there) != 1:
        return 0
    (only,) = there
    if only.state not in ANSWERED or only.chunks < usual or not only.rate or only.streak:
        return 0
    return int(only.rate * config.run_ahead * only.chunks / only.bytes)
