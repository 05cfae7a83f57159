"""The search for linearizations: small histories whose answer is known."""

from __future__ import annotations

import itertools
import random
from math import inf

import pytest

from tensorhub_p2p.sim.cluster.linear import Op, check, newest, register


def op(name: str, value: int, called: float, returned: float = inf) -> Op:
    return Op("p", called, returned, name, value)


def test_one_after_the_other_each_read_gets_the_last_write() -> None:
    assert check([op("write", 1, 0, 1), op("read", 1, 2, 3)], 0, register) is None


def test_a_read_of_what_was_overwritten_is_found() -> None:
    history = [op("write", 1, 0, 1), op("write", 2, 2, 3), op("read", 1, 4, 5)]
    found = check(history, 0, register)
    assert found is not None
    assert [o.value for o in found.order] == [1, 2]
    assert found.state == 2
    assert found.stuck == (history[2],)
    assert "read(1)" in str(found)


def test_a_read_beside_a_write_may_get_either() -> None:
    write = op("write", 1, 0, 10)
    assert check([write, op("read", 0, 1, 2)], 0, register) is None
    assert check([write, op("read", 1, 1, 2)], 0, register) is None


def test_of_two_reads_beside_a_write_the_later_one_may_not_get_less() -> None:
    history = [op("write", 1, 0, 10), op("read", 1, 1, 2), op("read", 0, 3, 4)]
    assert check(history, 0, register) is not None


def test_what_never_returned_may_have_happened_late_or_not_at_all() -> None:
    pending = op("write", 1, 0)
    assert check([pending, op("read", 0, 5, 6)], 0, register) is None
    assert check([pending, op("read", 0, 5, 6), op("read", 1, 7, 8)], 0, register) is None
    assert check([pending, op("read", 1, 5, 6), op("read", 0, 7, 8)], 0, register) is not None


def test_what_never_returned_did_not_happen_before_it_was_called() -> None:
    assert check([op("read", 1, 0, 1), op("write", 1, 2)], 0, register) is not None


def test_the_newest_version_is_a_maximum() -> None:
    whole = [op("whole", 2, 0, 1), op("whole", 1, 2, 3)]
    assert check([*whole, op("resolve", 2, 4, 5)], 0, newest) is None
    assert check([*whole, op("resolve", 1, 4, 5)], 0, newest) is not None


def test_a_version_that_nobody_published_can_not_be_resolved() -> None:
    assert check([op("whole", 1, 0, 1), op("resolve", 3, 2, 3)], 0, newest) is not None


def _brute(history: list[Op], initial: int) -> bool:
    """All orders of all choices of pending operations, by definition."""
    completed = [o for o in history if o.returned < inf]
    pending = [o for o in history if o.returned == inf]
    for count in range(len(pending) + 1):
        for chosen in itertools.combinations(pending, count):
            for order in itertools.permutations([*completed, *chosen]):
                if _in_time(order) and _runs(order, initial):
                    return True
    return False


def _in_time(order: tuple[Op, ...]) -> bool:
    return not any(
        later.returned < earlier.called for earlier, later in itertools.combinations(order, 2)
    )


def _runs(order: tuple[Op, ...], state: int) -> bool:
    for o in order:
        after = register(state, o)
        if after is None:
            return False
        state = after
    return True


@pytest.mark.parametrize("seed", range(5))
def test_the_search_agrees_with_the_definition_on_small_histories(seed: int) -> None:
    rng = random.Random(seed)
    verdicts = set()
    for _ in range(100):
        history = []
        for _ in range(rng.randint(2, 6)):
            called = rng.uniform(0, 10)
            returned = inf if rng.random() < 0.2 else called + rng.uniform(0.1, 4)
            history.append(op(rng.choice(("read", "write")), rng.randint(0, 2), called, returned))
        history = [o for o in history if o.name == "write" or o.returned < inf]
        verdict = check(history, 0, register) is None
        assert verdict == _brute(history, 0), history
        verdicts.add(verdict)
    assert verdicts == {True, False}


def test_two_hundred_operations_with_some_side_by_side_are_searched_soon() -> None:
    rng, state, history = random.Random(1), 0, []
    for at in range(200):
        if rng.random() < 0.3:
            state += 1
            history.append(op("whole", state, at, at + 0.9))
        else:
            history.append(op("resolve", state, at + 0.95, at + 3.0 * rng.random() + 0.96))
    spoiled = [*history, op("resolve", 0, 300, 301)]
    assert check(spoiled, 0, newest) is not None
