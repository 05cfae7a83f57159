"""How far a peer trusts its own clockwork."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.membership.health import LocalHealth


def test_a_healthy_peer_stretches_nothing() -> None:
    assert LocalHealth(8).stretch == 1


def test_each_bad_sign_adds_one_and_each_good_one_takes_one_away() -> None:
    health = LocalHealth(8)
    health.note(+3)
    assert health.stretch == 4
    health.note(-1)
    assert health.stretch == 3


def test_good_health_is_not_saved_up() -> None:
    health = LocalHealth(8)
    for _ in range(10):
        health.note(-1)
    health.note(+1)
    assert health.stretch == 2


@given(st.integers(1, 10), st.lists(st.integers(-3, 3)))
def test_the_stretch_stays_within_one_and_the_limit(limit: int, changes: list[int]) -> None:
    health = LocalHealth(limit)
    for change in changes:
        health.note(change)
        assert 1 <= health.stretch <= limit
