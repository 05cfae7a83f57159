"""The newest version of each model, as members tell each other: what is news, what is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.membership.hints import MAX_REVISION, STANDS, Hints
from tensorhub_p2p.protocol.messages import VersionHint

BOGUS = VersionHint("policy", 0, 1 << 60)


def newest(hints: Hints) -> tuple[int, int] | None:
    return next(((h.epoch, h.version) for h in hints.newest()), None)


def test_a_newer_version_is_news_and_an_older_one_is_not() -> None:
    hints = Hints(10)
    for epoch, version, news in ((0, 5, True), (0, 5, False), (0, 4, False), (1, 1, True)):
        assert hints.note(0.0, VersionHint("policy", epoch, version)) is news
    assert newest(hints) == (1, 1)


@pytest.mark.parametrize(
    ("after", "published", "taken"),
    [(STANDS, True, True), (STANDS - 0.1, True, False), (10 * STANDS, False, False)],
)
def test_a_version_that_is_not_there_gives_way_to_what_is_published_later(
    after: float, published: bool, taken: bool
) -> None:
    """Who only brought a copy may well have brought an old one."""
    hints, others = Hints(10), Hints(10)
    for each in (hints, others):
        each.note(0.0, BOGUS)
    hints.found(after, "policy", 0, 1, published=published)
    assert newest(hints) == ((0, 1) if taken else (0, BOGUS.version))
    for hint in hints.newest():
        others.note(after, hint)
    assert not hints.note(after, BOGUS)
    assert newest(others) == newest(hints)
    hints.found(after, "policy", 0, 2, published=published)
    assert newest(hints) == ((0, 2) if taken else (0, BOGUS.version))


def test_a_publisher_that_is_late_takes_nothing_back() -> None:
    hints = Hints(10)
    hints.found(0.0, "policy", 0, 5, published=True)
    hints.note(100.0, VersionHint("policy", 0, 6))
    hints.found(101.0, "policy", 0, 5, published=True)
    assert newest(hints) == (0, 6)


def test_an_absurd_revision_is_not_believed() -> None:
    hints = Hints(10)
    assert not hints.note(0.0, VersionHint("policy", 0, 1, MAX_REVISION + 1))
    assert hints.note(0.0, VersionHint("policy", 0, 1))


@pytest.mark.parametrize("absurd", [MAX_REVISION, MAX_REVISION - 1, MAX_REVISION // 2, 1 << 20])
def test_no_revision_freezes_a_model_for_those_who_publish(absurd: int) -> None:
    hints, others = Hints(10), Hints(10)
    for each in (hints, others):
        each.note(0.0, VersionHint("policy", 0, 1 << 50, absurd))
    for version in range(1, 4):
        hints.found(version * 2 * STANDS, "policy", 0, version, published=True)
        assert newest(hints) == (0, version)
        (told,) = hints.newest()
        assert others.note(0.0, told)
    assert not others.note(0.0, VersionHint("policy", 0, 1 << 50, absurd))


def test_an_absurd_revision_does_not_beat_a_known_one() -> None:
    hints = Hints(10)
    hints.note(0.0, VersionHint("policy", 0, 7, 3))
    assert not hints.note(1.0, VersionHint("policy", 0, 1 << 50, MAX_REVISION))


def test_models_beyond_the_bound_are_left_out() -> None:
    hints = Hints(2)
    taken = [hints.note(0.0, VersionHint(f"model-{number}", 0, 1)) for number in range(4)]
    assert taken == [True, True, False, False]
    assert hints.note(0.0, VersionHint("model-0", 0, 2))


hint = st.builds(VersionHint, st.sampled_from("ab"), *[st.integers(0, 2)] * 3)


@given(st.lists(hint), st.randoms(use_true_random=False))
def test_who_heard_the_same_knows_the_same_in_whatever_order(heard, random) -> None:  # type: ignore[no-untyped-def]
    one, other = Hints(10), Hints(10)
    for each in heard:
        one.note(0.0, each)
    random.shuffle(heard)
    for each in heard:
        other.note(5.0, each)
    assert set(one.newest()) == set(other.newest())
    assert one.fingerprint == other.fingerprint
