"""Zone summaries: which one wins, and what is kept and spread of them."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.summaries import (
    MAX_COUNTER,
    MAX_GATEWAYS,
    MAX_MODELS,
    MAX_SUMMARY_BYTES,
    Summaries,
    is_obituary,
    next_counter,
    obituary,
)
from tensorhub_p2p.protocol.messages import VersionHint, ZoneSummary

LOTS = 1_000_000


def gateway(name: str, zone: str = "east") -> PeerInfo:
    return PeerInfo(PeerId(name), name, zone, (f"{name}:1",))


def summary(counter: int, *gateways: str, zone: str = "east") -> ZoneSummary:
    return ZoneSummary(zone, counter, tuple(gateway(name, zone) for name in gateways), members=1)


def test_the_higher_counter_wins_in_whatever_order_they_arrive() -> None:
    summaries = Summaries(8, Counter())
    assert summaries.note(summary(2, "b"))
    assert not summaries.note(summary(1, "a"))
    assert summaries.note(summary(3, "c"))
    assert summaries.of("east") == summary(3, "c")


@pytest.mark.parametrize("absurd", [MAX_COUNTER, MAX_COUNTER - 1, MAX_COUNTER // 2, 10**9])
def test_after_any_counter_there_is_a_next_one(absurd: int) -> None:
    summaries = Summaries(8, Counter())
    assert summaries.note(summary(absurd, "liar"))
    for _ in range(3):
        after = summary(next_counter(absurd), "a")
        assert summaries.note(after)
        assert not summaries.note(summary(absurd, "liar"))
        absurd = after.counter


def test_an_absurd_counter_does_not_beat_a_known_one() -> None:
    summaries = Summaries(8, Counter())
    summaries.note(summary(7, "a"))
    assert not summaries.note(summary(MAX_COUNTER, "liar"))
    assert summaries.of("east") == summary(7, "a")


def test_the_same_summary_again_is_no_news() -> None:
    summaries = Summaries(8, Counter())
    assert summaries.note(summary(1, "a"))
    assert not summaries.note(summary(1, "a"))


@given(st.permutations([summary(c, g) for c in (1, 2) for g in ("a", "b", "c")]))
def test_everyone_ends_with_the_same_summary_whoever_wrote_under_one_counter(
    arrived: list[ZoneSummary],
) -> None:
    summaries = Summaries(8, Counter())
    for each in arrived:
        summaries.note(each)
    assert summaries.of("east") == summary(2, "c")


def test_the_fingerprint_tells_whether_two_know_the_same() -> None:
    one, other = Summaries(8, Counter()), Summaries(8, Counter())
    assert one.fingerprint == 0
    for each in (summary(1, "a"), summary(3, "b"), summary(2, "c", zone="west")):
        one.note(each)
    for each in (summary(2, "c", zone="west"), summary(2, "x"), summary(3, "b")):
        other.note(each)
    assert one.fingerprint == other.fingerprint != 0
    other.note(summary(4, "b"))
    assert one.fingerprint != other.fingerprint


def test_zones_do_not_disturb_each_other() -> None:
    summaries = Summaries(8, Counter())
    east, west = summary(7, "a"), summary(1, "b", zone="west")
    assert summaries.note(east)
    assert summaries.note(west)
    assert set(summaries.newest()) == {east, west}
    assert summaries.of("north") is None


def test_news_is_spread_as_often_as_the_limit_says_and_what_it_replaces_no_more() -> None:
    summaries = Summaries(8, Counter())
    assert not summaries
    summaries.note(summary(1, "a"))
    summaries.take(LOTS, 3)
    summaries.note(summary(2, "a"))
    assert summaries
    assert [summaries.take(LOTS, 3) for _ in range(4)] == [(summary(2, "a"),)] * 3 + [()]
    assert not summaries
    assert summaries.newest() == (summary(2, "a"),), "what was spread is still known"


def test_a_message_takes_as_many_as_its_budget_allows() -> None:
    summaries = Summaries(100, Counter())
    for number in range(50):
        summaries.note(summary(1, "a", "b", zone=f"zone-{number}"))
    one = len(msgspec.msgpack.encode(summary(1, "a", "b", zone="zone-10")))
    assert len(summaries.take(10 * one, 3)) == 10


def test_zones_beyond_the_limit_are_counted_and_dropped() -> None:
    dropped = Counter[str]()
    summaries = Summaries(2, dropped)
    for zone in ("a", "b", "c", "d"):
        summaries.note(summary(1, zone=zone))
    assert {s.zone for s in summaries.newest()} == {"a", "b"}
    assert dropped == {"summary of a zone beyond max_zones": 2}
    assert summaries.note(summary(2, zone="a")), "known zones still have news"


def test_at_the_limit_a_zone_that_is_gone_makes_room_for_one_that_is_there() -> None:
    summaries, others = Summaries(2, Counter()), Summaries(2, Counter())
    for zone in ("a", "b"):
        summaries.note(summary(1, zone=zone))
    summaries.note(obituary(summary(1, zone="b")))
    assert not summaries.note(obituary(summary(1, zone="c"))), "not for one that is gone itself"
    assert summaries.note(summary(1, zone="c"))
    assert [s.zone for s in summaries.newest()] == ["a", "c"]
    assert {s.zone for s in summaries.take(LOTS, 9)} == {"a", "c"}
    for zone in ("a", "c"):
        others.note(summary(1, zone=zone))
    assert summaries.fingerprint == others.fingerprint


def test_an_obituary_beats_the_last_word_only_and_names_whom_it_named() -> None:
    last = msgspec.structs.replace(summary(7, "a"), newest=(VersionHint("m", 0, 1),))
    summaries = Summaries(8, Counter())
    assert summaries.note(last)
    assert not is_obituary(last)
    assert summaries.note(obituary(last))
    assert is_obituary(obituary(last))
    assert not summaries.note(last)
    assert obituary(last).gateways == last.gateways
    assert summaries.note(summary(9, "a")), "who lives has counted on"
    assert not summaries.note(obituary(last))


def test_what_is_too_much_for_one_summary_is_counted_and_dropped() -> None:
    hints = tuple(VersionHint(f"model-{i}", 0, i) for i in range(MAX_MODELS + 1))
    wide = PeerInfo(PeerId("a"), "a", "east", ("h" * MAX_SUMMARY_BYTES,))
    bad = [
        summary(MAX_COUNTER + 1, "a"),
        summary(1, *(f"g{i}" for i in range(MAX_GATEWAYS + 1))),
        ZoneSummary("east", 1, (), 3, hints),
        ZoneSummary("east", 1, (wide,)),
        ZoneSummary("east", 1, (gateway("a", "west"),)),
    ]
    dropped = Counter[str]()
    summaries = Summaries(8, dropped)
    for each in bad:
        assert not summaries.note(each)
    assert dropped == {"malformed summary": len(bad)}
    assert summaries.newest() == ()
    assert not summaries
