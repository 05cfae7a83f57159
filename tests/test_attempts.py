"""When a handle whose pulls fail gives its call up."""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import Generation, Publication
from tensorhub_p2p.protocol.shards.attempts import Attempts
from tensorhub_p2p.protocol.shards.verbs import Answer

PATIENCE = 5.0
ONE, TWO = (Answer(call, Publication(0, 1, "trainer", Generation(1, 1)), 1) for call in (1, 2))


def attempts(alone: bool = True) -> Attempts:
    return Attempts(PATIENCE, alone=alone)


def fail(
    tries: Attempts,
    answer: Answer = ONE,
    moved: int = 0,
    lasted: float = 1.0,
    quiet: float = 0.0,
    timed_out: bool = True,
    unavailable: bool = False,
) -> bool:
    return tries.fail(
        answer,
        moved=moved,
        lasted=lasted,
        quiet=quiet,
        timed_out=timed_out,
        unavailable=unavailable,
    )


def test_what_nobody_can_have_is_given_up_at_once() -> None:
    assert fail(attempts(), lasted=0.1, timed_out=False, unavailable=True)


def test_many_short_attempts_find_out_what_one_long_one_does() -> None:
    tries = attempts()
    assert [fail(tries) for _ in range(5)] == [False, False, False, False, True]
    assert fail(attempts(), lasted=PATIENCE)


def test_an_attempt_that_came_further_than_all_before_it_begins_the_patience_anew() -> None:
    tries = attempts()
    assert not fail(tries, moved=10, lasted=4.0)
    assert not fail(tries, moved=10, lasted=4.0), "this one already is in vain"
    assert not fail(tries, moved=20, lasted=4.0)
    assert not fail(tries, moved=20, lasted=4.0)
    assert fail(tries, moved=20, lasted=4.0)


def test_patience_begins_with_the_last_byte_of_the_attempt_that_came_furthest() -> None:
    tries = attempts()
    assert not fail(tries, moved=10, lasted=4.0, quiet=3.0)
    assert fail(tries, moved=9, lasted=2.0), "five seconds in which nothing new came"


def test_the_same_bytes_again_are_no_progress_however_many() -> None:
    tries = attempts()
    fail(tries, moved=1000)
    assert [fail(tries, moved=999) for _ in range(5)][-1]


def test_an_error_that_passes_is_no_reason_but_its_time_counts() -> None:
    tries = attempts()
    assert not fail(tries, lasted=60.0, timed_out=False)
    assert fail(tries, lasted=0.1)


def test_another_call_begins_anew() -> None:
    tries = attempts()
    fail(tries, lasted=4.0)
    assert not fail(tries, TWO, lasted=4.0)
    assert tries.failed == TWO


def test_a_group_of_one_that_goes_on_gives_its_failed_call_up_once() -> None:
    tries = attempts()
    assert tries.leave() is None
    fail(tries)
    assert tries.leave() == ONE
    assert tries.leave() is None


def test_with_more_shards_the_others_decide_too() -> None:
    tries = attempts(alone=False)
    fail(tries)
    assert tries.leave() is None


def test_what_succeeded_is_not_given_up() -> None:
    tries = attempts()
    fail(tries)
    tries.succeed()
    assert tries.leave() is None
