"""A link gets the streams that make it faster, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub_p2p.transfer.streams import StreamCount

CHUNK = 1 << 20
Line = Callable[[int], float]


def move(streams: StreamCount, line: Line, chunks: int, now: float = 0.0) -> float:
    """Let so many chunks land on a line whose rate depends on the streams; returns the time."""
    streams.begin()
    for _ in range(chunks):
        now += CHUNK / line(streams.count)
        streams.landed(now, CHUNK)
    return now


def limited(whole: float, each: float) -> Line:
    """A line that carries `whole`, and `each` a stream at most."""
    return lambda count: min(whole, count * each)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (limited(31e6, 1e9), 2),  # a thin line: one would do, a second one does no harm
        (limited(2e9, 1e9), 2),  # a core for each
        (limited(125e6, 25e6), 5),  # a long way: each is held back by its window
        (limited(1e12, 10e6), 8),  # there is a bound
    ],
)
def test_a_link_settles_at_the_streams_that_it_needs(line: Line, expected: int) -> None:
    streams = StreamCount(most=8, period=0.25, again_after=1e9)
    move(streams, line, 6000)
    assert streams.settled
    assert streams.count == expected


def test_short_pulls_add_up_and_the_time_between_them_does_not_count() -> None:
    streams, now = StreamCount(most=8, period=0.25, again_after=1e9), 0.0
    for _ in range(200):
        now = move(streams, limited(2e9, 1e9), 16, now) + 60.0
    assert (streams.count, streams.settled) == (2, True)


def test_a_line_that_changed_is_found_out_about() -> None:
    streams = StreamCount(most=8, period=0.25, again_after=5.0)
    now = move(streams, limited(125e6, 25e6), 2000)
    assert streams.count in (4, 5, 6)
    for _ in range(10):
        now = move(streams, limited(125e6, 125e6), 1000, now)
    assert streams.count <= 2


def test_one_stream_at_most_is_settled_from_the_beginning() -> None:
    streams = StreamCount(most=1, period=0.25, again_after=5.0)
    move(streams, limited(1e9, 1e6), 100)
    assert (streams.count, streams.settled) == (1, True)
