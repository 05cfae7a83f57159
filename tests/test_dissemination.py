"""Which news rides on the next message."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.membership.dissemination import Dissemination, retransmit_limit

LOTS = 10_000


@pytest.mark.parametrize(
    ("members", "limit"), [(0, 4), (1, 4), (9, 4), (10, 8), (99, 8), (100, 12), (999, 12)]
)
def test_the_retransmit_limit_grows_with_the_logarithm(members: int, limit: int) -> None:
    assert retransmit_limit(4, members) == limit


def test_news_is_sent_as_often_as_the_limit_says_and_then_forgotten() -> None:
    queue: Dissemination[str, str] = Dissemination()
    queue.put("a", "news")
    assert [queue.take(LOTS, 3) for _ in range(4)] == [("news",)] * 3 + [()]
    assert len(queue) == 0


def test_what_was_sent_least_goes_first_and_then_the_newest() -> None:
    queue: Dissemination[str, str] = Dissemination()
    queue.put("old", "old")
    queue.put("older", "older")
    queue.take(LOTS, 9)
    queue.put("new", "new")
    queue.put("newest", "newest")
    assert queue.take(LOTS, 9) == ("newest", "new", "older", "old")


def test_a_newer_claim_replaces_the_older_and_starts_over() -> None:
    queue: Dissemination[str, str] = Dissemination()
    queue.put("a", "suspect")
    queue.take(LOTS, 2)
    queue.put("a", "alive")
    assert len(queue) == 1
    assert [queue.take(LOTS, 2) for _ in range(3)] == [("alive",), ("alive",), ()]


def test_a_message_stays_within_its_budget() -> None:
    queue: Dissemination[int, bytes] = Dissemination()
    for subject in range(10):
        queue.put(subject, bytes(98))  # 100 bytes encoded
    assert len(queue.take(350, 9)) == 3
    assert len(queue) == 10


def test_a_piece_larger_than_the_budget_travels_alone() -> None:
    queue: Dissemination[str, bytes] = Dissemination()
    queue.put("small", b"s")
    queue.put("large", bytes(500))
    assert queue.take(100, 1) == (bytes(500),)
    assert queue.take(100, 1) == (b"s",)


def test_smaller_news_fills_what_a_larger_piece_leaves() -> None:
    queue: Dissemination[str, bytes] = Dissemination()
    queue.put("small", b"s")
    queue.put("large", bytes(80))
    queue.put("medium", bytes(50))
    assert queue.take(100, 9) == (bytes(50), b"s")


def test_dropped_news_is_not_sent() -> None:
    queue: Dissemination[str, str] = Dissemination()
    queue.put("a", "news")
    queue.drop("a")
    queue.drop("never there")
    assert queue.take(LOTS, 9) == ()


@given(st.lists(st.binary(max_size=60), max_size=30), st.integers(1, 5), st.integers(10, 200))
def test_everything_is_sent_exactly_as_often_as_the_limit_says(
    pieces: list[bytes], limit: int, budget: int
) -> None:
    queue: Dissemination[int, bytes] = Dissemination()
    for subject, piece in enumerate(pieces):
        queue.put(subject, piece)
    sent: list[bytes] = []
    while batch := queue.take(budget, limit):
        sent.extend(batch)
    assert sorted(sent) == sorted(pieces * limit)
