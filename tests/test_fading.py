"""A zone that says nothing for hours is forgotten, until it speaks again."""

from __future__ import annotations

from tensorhub_p2p.protocol.zones.fading import Fading

AFTER = 100.0


def test_a_silent_zone_fades_and_one_that_is_heard_does_not() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    fading.heard(10.0, "west")
    fading.heard(60.0, "east")
    assert fading.next_wakeup() == 10.0 + AFTER
    fading.tick(10.0 + AFTER)
    assert fading.has_faded("west")
    assert not fading.has_faded("east")
    assert fading.next_wakeup() == 60.0 + AFTER


def test_a_zone_that_has_faded_is_back_once_it_is_heard() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    fading.tick(AFTER)
    fading.heard(AFTER + 1, "east")
    assert not fading.has_faded("east")


def test_a_zone_that_was_never_heard_of_has_not_faded() -> None:
    fading = Fading(AFTER)
    fading.tick(1e9)
    assert not fading.has_faded("east")
    assert fading.next_wakeup() is None


def test_who_could_hear_nobody_counts_anew() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    fading.hold(1e6)
    fading.tick(1e6)
    assert not fading.has_faded("east")
    fading.tick(1e6 + AFTER)
    assert fading.has_faded("east")
