"""What a reader borrows of a library: a use that failed ends it before the failure is told."""

from __future__ import annotations

import threading

import pytest

from tensorhub_p2p.transfer.transports.base import SourceGone, SourceSilent, SourceWithdrew
from tensorhub_p2p.transfer.transports.borrowed import Borrowed


class Tool:
    def __init__(self, *, quiet: bool = True) -> None:
        self.quiet = quiet
        self.ended = False

    def close(self) -> None:
        self.ended = True


def lend(tool: Tool) -> tuple[Borrowed[Tool], list[Tool]]:
    returned: list[Tool] = []
    return Borrowed(tool, "a tool", returned.append), returned


@pytest.mark.parametrize("error", [SourceSilent("late"), SourceGone("gone"), ValueError("a bug")])
def test_a_use_that_failed_ends_it_before_the_failure_is_told(error: Exception) -> None:
    tool = Tool()
    borrowed, returned = lend(tool)
    with pytest.raises(type(error)), borrowed.using():
        raise error
    assert tool.ended
    with pytest.raises(SourceGone), borrowed.using():
        pass
    borrowed.close()
    assert returned == [], "what was ended is given back to nobody"


@pytest.mark.parametrize("quiet", [True, False])
def test_a_withdrawal_spares_it_only_if_nothing_is_under_way(quiet: bool) -> None:
    tool = Tool(quiet=quiet)
    borrowed, returned = lend(tool)
    with pytest.raises(SourceWithdrew), borrowed.using():
        raise SourceWithdrew("withdrawn")
    assert tool.ended is not quiet
    borrowed.close()
    assert returned == ([tool] if quiet else [])


def test_what_is_sound_is_given_back_once_when_the_reader_is_closed() -> None:
    tool = Tool()
    borrowed, returned = lend(tool)
    with borrowed.using() as mine:
        assert mine is tool
    assert returned == []
    borrowed.close()
    borrowed.close()
    assert returned == [tool]
    assert not tool.ended
    with pytest.raises(SourceGone):
        borrowed.check()


@pytest.mark.parametrize("fails", [False, True])
def test_closed_in_the_middle_of_a_use_it_goes_when_that_is_over(fails: bool) -> None:
    tool = Tool()
    borrowed, returned = lend(tool)

    def use() -> None:
        with borrowed.using():
            closing = threading.Thread(target=borrowed.close)
            closing.start()
            closing.join(10)
            assert returned == [], "it is still being used"
            if fails:
                borrowed.check()

    if fails:
        with pytest.raises(SourceGone):
            use()
    else:
        use()
    assert tool.ended is fails
    assert returned == ([] if fails else [tool])
