"""Suspicion timeouts: how confirmations, evidence and own pauses move a verdict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.identity import NOBODY, PeerId
from tensorhub_p2p.protocol.membership.suspicion import HOLD, Suspicions, timeout

SICK = PeerId("sick")


def started(now: float = 0.0, expected: int = 3) -> Suspicions:
    suspicions = Suspicions()
    suspicions.start(now, SICK, PeerId("first"), expected=expected, shortest=2, longest=30)
    return suspicions


def test_the_timeout_decays_as_in_the_reference_vector() -> None:
    """k = 3, 2 to 30 s, as in memberlist's own test of Lifeguard's formula."""
    suspicions = started()
    assert suspicions.deadline(SICK) == pytest.approx(30)
    assert suspicions.confirm(SICK, PeerId("second"))
    assert suspicions.deadline(SICK) == pytest.approx(2 + 14)
    assert suspicions.confirm(SICK, PeerId("third"))
    assert suspicions.deadline(SICK) == pytest.approx(3 + 4.81, abs=0.005)
    assert suspicions.confirm(SICK, PeerId("fourth"))
    assert suspicions.deadline(SICK) == pytest.approx(2)


def test_the_same_accuser_counts_once() -> None:
    suspicions = started()
    assert not suspicions.confirm(SICK, PeerId("first"))
    assert suspicions.confirm(SICK, PeerId("second"))
    assert not suspicions.confirm(SICK, PeerId("second"))
    assert not suspicions.confirm(SICK, NOBODY)
    assert suspicions.deadline(SICK) == pytest.approx(16)


def test_confirmations_beyond_the_expected_are_not_passed_on() -> None:
    suspicions = started(expected=1)
    assert suspicions.confirm(SICK, PeerId("second"))
    assert not suspicions.confirm(SICK, PeerId("third"))


def test_with_nobody_left_to_confirm_the_shortest_timeout_holds_at_once() -> None:
    assert started(expected=0).deadline(SICK) == pytest.approx(2)


def test_a_verdict_falls_once_at_its_deadline() -> None:
    suspicions = started()
    assert suspicions.take_due(29.9) == []
    assert suspicions.next_deadline() == pytest.approx(30)
    assert suspicions.take_due(30) == [SICK]
    assert suspicions.take_due(60) == []
    assert suspicions.next_deadline() is None


def test_a_cancelled_suspicion_never_ends_in_a_verdict() -> None:
    suspicions = started()
    suspicions.cancel(SICK)
    assert suspicions.next_deadline() is None
    assert suspicions.take_due(100) == []
    assert not suspicions.confirm(SICK, PeerId("second"))


def test_a_suspicion_that_starts_anew_forgets_its_first_accusers_and_time() -> None:
    suspicions = started()
    suspicions.confirm(SICK, PeerId("second"))
    suspicions.start(10, SICK, PeerId("third"), expected=3, shortest=2, longest=30)
    assert suspicions.take_due(39) == []
    assert suspicions.take_due(40) == [SICK]


def test_hard_evidence_hastens_but_never_delays() -> None:
    suspicions = started()
    suspicions.hasten(SICK, 50)
    assert suspicions.deadline(SICK) == pytest.approx(30)
    suspicions.hasten(SICK, 0.5)
    suspicions.hasten(SICK, 1.5)
    assert suspicions.deadline(SICK) == 0.5
    assert suspicions.take_due(0.5) == [SICK]


def test_hard_evidence_that_no_longer_holds_leaves_the_usual_time() -> None:
    suspicions = started()
    suspicions.hasten(SICK, 0.5)
    suspicions.relent(SICK)
    assert suspicions.deadline(SICK) == pytest.approx(30)
    assert suspicions.take_due(1.0) == []
    assert suspicions.take_due(30) == [SICK]


def test_a_judge_that_doubts_itself_looks_again_a_little_later() -> None:
    suspicions = started()
    assert suspicions.take_due(30, hold=True) == []
    assert suspicions.next_deadline() == 30 + HOLD
    assert suspicions.take_due(30.5) == []
    assert suspicions.take_due(30 + HOLD, hold=True) == []
    assert suspicions.take_due(30 + 2 * HOLD) == [SICK]


def test_the_heap_of_deadlines_stays_in_proportion() -> None:
    suspicions = started()
    other = PeerId("other")
    for turn in range(1000):
        suspicions.start(turn, other, PeerId("first"), expected=3, shortest=50, longest=60)
        suspicions.hasten(other, turn + 40)
        suspicions.relent(other)
    assert len(suspicions._heap) < 100
    assert suspicions.next_deadline() == pytest.approx(30)


def test_the_judges_own_pause_is_not_held_against_anyone() -> None:
    suspicions = started()
    suspicions.hasten(SICK, 5)
    suspicions.postpone(20)
    assert suspicions.take_due(24.9) == []
    assert suspicions.take_due(25) == [SICK]


@given(
    st.integers(0, 10),
    st.floats(0.1, 10),
    st.floats(1, 10),
)
def test_the_timeout_falls_with_each_confirmation_and_stays_in_its_range(
    expected: int, shortest: float, factor: float
) -> None:
    longest = shortest * factor
    values = [timeout(c, expected, shortest, longest) for c in range(expected + 2)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(shortest)
    assert values[0] == pytest.approx(longest if expected else shortest)
