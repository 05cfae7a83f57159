"""What a handle retains: the argument `retain=` of `Peer.open`, and the calls that make one.

Rule of this file. It checks what a user writes and makes the value that goes on record;
what a retain protects is the protocols' business (protocol/retention/retention.py).
"""

from __future__ import annotations

from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.options import MAX_VERSION, checked_integer
from tensorhub_p2p.protocol.messages import Retain

MAX_NEWEST = 1000
MAX_RETAINED = 64
"""Single versions that one handle retains, as they travel in one message."""


def newest(count: int) -> Retain:
    """Retain the `count` newest whole versions, from 1 to 1000: `open(..., retain=newest(2))`.

    Older ones stay too, until `count` newer ones are safe: whole at a reliable holder that
    is not their publisher's live tensors. Raises ConfigError.
    """
    return Retain(newest=checked_integer("newest", count, 1, MAX_NEWEST))


def versions(*numbers: int) -> Retain:
    """Retain these versions, up to 64, each in the newest epoch that has it.

    Raises ConfigError.
    """
    if not 0 < len(numbers) <= MAX_RETAINED:
        raise ConfigError(
            f"versions: {len(numbers)} numbers; give 1 to {MAX_RETAINED}, as in versions(7, 8)"
        )
    checked = {checked_integer("versions", number, 0, MAX_VERSION) for number in numbers}
    return Retain(versions=tuple(sorted(checked)))


def checked_retain(retain: object) -> Retain:
    """What `open` was given; None retains nothing. Raises ConfigError."""
    if retain is None:
        return Retain()
    if not isinstance(retain, Retain):
        raise ConfigError(
            f"retain = {retain!r}: give newest(k) or versions(...) of tensorhub_p2p, as in "
            "retain=th.newest(2)"
        )
    return retain
