"""A zone that says nothing for hours is taken for gone, until it speaks again."""

from __future__ import annotations

from tensorhub_p2p.protocol.zones.fading import Fading

AFTER = 100.0


def test_a_silent_zone_fades_once_and_one_that_is_heard_does_not() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    fading.heard(10.0, "west")
    fading.heard(60.0, "east")
    assert fading.next_wakeup() == 10.0 + AFTER
    assert fading.tick(9.9 + AFTER) == []
    assert fading.tick(10.0 + AFTER) == ["west"]
    assert fading.tick(10.0 + AFTER) == []
    assert fading.next_wakeup() == 60.0 + AFTER


def test_a_zone_that_has_faded_counts_anew_once_it_is_heard() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    assert fading.tick(AFTER) == ["east"]
    fading.heard(AFTER + 1, "east")
    assert fading.next_wakeup() == 2 * AFTER + 1


def test_a_zone_that_others_found_to_be_gone_needs_no_clock() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    fading.is_over("east")
    fading.is_over("nowhere")
    assert fading.next_wakeup() is None


def test_who_could_hear_nobody_counts_anew() -> None:
    fading = Fading(AFTER)
    fading.heard(0.0, "east")
    fading.hold(1e6)
    assert fading.tick(1e6) == []
    assert fading.tick(1e6 + AFTER) == ["east"]
