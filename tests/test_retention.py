"""What is protected: the rule, case by case."""

from __future__ import annotations

import pytest

from tensorhub_p2p.protocol.groups.selection import Copy, Holding
from tensorhub_p2p.protocol.identity import Generation, Group, PeerId, Publication, Slot
from tensorhub_p2p.protocol.messages import Register, Retain
from tensorhub_p2p.protocol.retention.retention import Wish, protected, wishes_in

LIVE, SAFE, LEAVING, NONE = "live", "safe", "leaving", "none"


def holding(
    version: int,
    where: str = SAFE,
    epoch: int = 0,
    replica: str = "trainer",
    whole: bool = True,
    retracted: bool = False,
) -> Holding:
    """Of two shards, both of them alike."""
    publication = Publication(epoch, version, replica, Generation(1, 7))
    found = Holding(publication, 2, whole=whole, slots=2, retracted=retracted)
    for shard in range(2):
        slot = Slot(Group("m", replica if where == LIVE else "other"), shard)
        copy = Copy(PeerId("p"), slot, False, where == LIVE, where == LEAVING)
        found.copies[shard] = () if where == NONE else (copy,)
    return found


def kept(wish: Wish, *found: Holding) -> list[tuple[int, int, str]]:
    publications = protected({h.publication: h for h in found}, [wish])
    return sorted((p.epoch, p.version, p.replica) for p in publications)


def versions(wish: Wish, *found: Holding) -> list[int]:
    return [version for _, version, _ in kept(wish, *found)]


NEWEST_2 = Wish("w", newest=2)


def test_the_newest_ones_that_are_safe() -> None:
    assert versions(NEWEST_2, holding(1), holding(2), holding(3)) == [2, 3]


@pytest.mark.parametrize("where", [LIVE, LEAVING, NONE])
def test_one_that_is_not_safe_displaces_nothing(where: str) -> None:
    found = holding(1), holding(2), holding(3), holding(4, where)
    assert versions(NEWEST_2, *found) == [2, 3, 4]


def test_one_shard_that_is_not_safe_is_enough() -> None:
    half = holding(3)
    half.copies[1] = holding(3, LIVE).copies[1]
    assert versions(NEWEST_2, holding(1), holding(2), half) == [1, 2, 3]


def test_until_enough_are_safe_all_are_kept() -> None:
    assert versions(NEWEST_2, holding(1, LIVE), holding(2, LIVE), holding(3)) == [1, 2, 3]


def test_what_was_never_whole_counts_for_nothing() -> None:
    assert versions(NEWEST_2, holding(1), holding(2), holding(3, whole=False)) == [1, 2]


def test_what_was_retracted_counts_for_nothing() -> None:
    assert versions(NEWEST_2, holding(1), holding(2), holding(3, retracted=True)) == [1, 2]
    assert versions(Wish("w", versions=(3,)), holding(3, retracted=True)) == []


def test_what_nobody_has_any_more_counts_for_nothing() -> None:
    gone = holding(9, NONE)
    gone.slots = 0
    assert versions(NEWEST_2, holding(1), gone) == [1]


def test_the_newest_stay_inside_one_epoch() -> None:
    found = holding(8), holding(9), holding(3, epoch=1)
    assert kept(NEWEST_2, *found) == [(1, 3, "trainer")]


def test_a_number_means_the_newest_epoch_that_has_it() -> None:
    wish = Wish("w", versions=(5, 7, 11))
    found = holding(5), holding(7), holding(5, epoch=1), holding(6, epoch=1)
    assert kept(wish, *found) == [(0, 7, "trainer"), (1, 5, "trainer")]


def test_of_equal_versions_the_lowest_that_can_be_had_is_kept() -> None:
    wish = Wish("w", newest=1)
    a, b = holding(1, LIVE, replica="a"), holding(1, LIVE, replica="b")
    assert kept(wish, a, b) == [(0, 1, "a")]
    assert kept(wish, holding(1, NONE, replica="a"), b) == [(0, 1, "b")]


def test_in_doubt_each_of_equal_versions_is_kept() -> None:
    found = holding(1, NONE, replica="a"), holding(1, NONE, replica="b")
    assert kept(Wish("w", newest=1), *found) == [(0, 1, "a"), (0, 1, "b")]


def test_a_copy_of_any_of_equal_versions_makes_the_version_safe() -> None:
    found = holding(1), holding(2, LIVE, replica="a"), holding(2, SAFE, replica="b")
    assert kept(Wish("w", newest=1), *found) == [(0, 2, "a")]


def test_everybody_for_whom_it_is_kept_is_named() -> None:
    one = holding(1)
    wishes = [Wish("a", newest=1), Wish("b", versions=(1,)), Wish("c", versions=(2,))]
    assert protected({one.publication: one}, wishes) == {
        one.publication: ("a (newest 1)", "b (versions 1)")
    }


def test_nobody_wants_anything() -> None:
    assert versions(Wish("w"), holding(1)) == []


def test_wishes_are_read_from_the_registers_of_all_peers() -> None:
    registers = (
        Register(PeerId("a"), "retain", 0, 1, Retain(newest=2)),
        Register(PeerId("b"), "retain", 0, 1, Retain(versions=(1, 2))),
        Register(PeerId("c"), "retain", 0, 1, Retain()),
    )
    wishes = wishes_in(registers, {PeerId("a"): "peer x"})
    assert [wish.reason for wish in wishes] == ["peer x (newest 2)", "peer b (versions 1, 2)"]
