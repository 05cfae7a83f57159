"""A verb ends its future once, with its result or its error, or with what goes on from there."""

from __future__ import annotations

import pytest

from tensorhub_p2p.errors import PeerClosed, StateError
from tensorhub_p2p.protocol.shards.verbs import Done, Failed
from tensorhub_p2p.runtime.verbs import RunningVerbs


def test_what_goes_on_from_the_result_is_the_end() -> None:
    verbs, seen = RunningVerbs(), []

    def then(now: float, result: object) -> str:
        seen.append((now, result))
        return "and more"

    running = verbs.expect(then)
    verbs.end(2.0, Done(running.number, "result"))
    assert seen == [(2.0, "result")]
    assert running.future.result(0) == "and more"


def test_what_it_raises_is_raised_where_the_verb_was_called() -> None:
    verbs = RunningVerbs()

    def then(_now: float, _result: object) -> None:
        raise StateError("ended meanwhile")

    running = verbs.expect(then)
    verbs.end(2.0, Done(running.number, None))
    with pytest.raises(StateError, match="ended meanwhile"):
        running.future.result(0)


@pytest.mark.parametrize("end", ["failed", "not begun", "handed over to nobody", "closed"])
def test_a_verb_that_is_not_done_goes_on_nowhere(end: str) -> None:
    verbs, went_on = RunningVerbs(), []
    running = verbs.expect(lambda _now, result: went_on.append(result))
    if end == "failed":
        verbs.end(2.0, Failed(running.number, StateError("no")))
    elif end == "not begun":

        def start(_now: float, _number: int, _deadline: float) -> None:
            raise StateError("no")

        verbs.begin(1.0, 5.0, start, running.number)
    elif end == "closed":
        verbs.close()
    else:
        verbs.forget(running.number)
    verbs.end(3.0, Done(running.number, "late"))
    assert not went_on
    assert not verbs._thens
    if end != "handed over to nobody":
        with pytest.raises(PeerClosed if end == "closed" else StateError):
            running.future.result(0)
