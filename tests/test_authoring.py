"""What a zone says of itself, and when it says something new."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from tensorhub_p2p.config import ZonesConfig
from tensorhub_p2p.protocol.identity import PeerId, PeerInfo
from tensorhub_p2p.protocol.membership.summaries import (
    MAX_COUNTER,
    MAX_MODELS,
    MAX_SUMMARY_BYTES,
    Summaries,
    is_sound,
)
from tensorhub_p2p.protocol.messages import VersionHint, ZoneSummary
from tensorhub_p2p.protocol.zones.authoring import RENEWALS, Author

CONFIG = ZonesConfig()
FADES_AFTER = 7200.0


def peer(name: str) -> PeerInfo:
    return PeerInfo(PeerId(name), name, "east", (f"{name}:1",), (f"{name}:2",), "host", "rack")


ME, OTHER = peer("me"), peer("other")


class Writing:
    """An author, and the summary that its zone last heard of."""

    def __init__(self) -> None:
        self.alive = {ME.peer_id, OTHER.peer_id}
        self.author = Author(ME, CONFIG, FADES_AFTER, self.alive.__contains__)
        self.known: ZoneSummary | None = None

    def write(
        self,
        now: float,
        gateways: tuple[PeerInfo, ...] = (ME, OTHER),
        members: int = 100,
        newest: tuple[VersionHint, ...] = (),
    ) -> ZoneSummary | None:
        new = self.author.write(now, self.known, gateways, members, newest)
        self.known = new or self.known
        return new

    def heard(self, now: float, summary: ZoneSummary) -> None:
        self.known = summary
        self.author.heard(now)


def test_the_first_summary_is_written_at_once() -> None:
    new = Writing().write(0.0)
    assert new is not None
    assert (new.zone, new.counter, new.members) == ("east", 1, 100)
    assert [gateway.addresses for gateway in new.gateways] == [("me:1",), ("other:1",)]


def test_a_summary_says_where_a_gateway_can_be_called_and_no_more_of_it() -> None:
    new = Writing().write(0.0)
    assert new is not None
    assert all(not (g.data_addresses or g.host or g.rack) for g in new.gateways)


def test_nothing_is_written_while_there_is_nothing_new_to_say() -> None:
    writing = Writing()
    writing.write(0.0)
    assert writing.write(100.0) is None
    assert writing.write(200.0, gateways=(OTHER, ME)) is not None


def test_a_zone_that_has_nothing_new_to_say_says_so_several_times_until_others_forget_it() -> None:
    writing = Writing()
    writing.write(0.0)
    written = [now for now in range(int(FADES_AFTER)) if writing.write(float(now)) is not None]
    assert len(written) == RENEWALS - 1
    assert max(b - a for a, b in pairwise([0, *written])) <= FADES_AFTER / RENEWALS + 1


def test_small_changes_of_the_number_of_members_are_no_news_and_large_ones_are() -> None:
    writing = Writing()
    writing.write(0.0)
    for now, members in ((10.0, 110), (20.0, 90), (30.0, 101)):
        assert writing.write(now, members=members) is None
    new = writing.write(40.0, members=111)
    assert new is not None
    assert new.members == 111


def test_a_new_summary_waits_for_its_interval_and_counts_on() -> None:
    writing = Writing()
    writing.write(0.0)
    news = (VersionHint("policy", 0, 1),)
    assert writing.write(CONFIG.summary_interval / 2, newest=news) is None
    new = writing.write(CONFIG.summary_interval, newest=news)
    assert new is not None
    assert (new.counter, new.newest) == (2, news)


def test_the_word_of_another_living_writer_stands_for_a_while() -> None:
    writing = Writing()
    writing.heard(10.0, ZoneSummary("east", 7, (OTHER,), 100))
    assert writing.write(10.0 + CONFIG.takeover_seconds - 0.01) is None
    new = writing.write(10.0 + CONFIG.takeover_seconds)
    assert new is not None
    assert new.counter == 8


@pytest.mark.parametrize("absurd", [10**9, MAX_COUNTER // 2 + 5, MAX_COUNTER])
def test_whatever_counter_a_summary_has_its_zone_writes_the_next_one(absurd: int) -> None:
    writing, summaries = Writing(), Summaries(8, Counter())
    liar = ZoneSummary("east", absurd, (OTHER,), 3)
    writing.heard(10.0, liar)
    new = writing.write(10.0 + CONFIG.takeover_seconds)
    assert new is not None
    summaries.note(liar)
    assert summaries.note(new)


def test_a_dead_writer_is_replaced_at_once() -> None:
    writing = Writing()
    writing.heard(10.0, ZoneSummary("east", 7, (OTHER,), 100))
    writing.alive.discard(OTHER.peer_id)
    assert writing.write(10.1) is not None


def test_what_others_would_not_take_is_left_out_the_oldest_news_first() -> None:
    hints = tuple(VersionHint(f"{i:03}" + "m" * 252, 0, i) for i in range(3 * MAX_MODELS))
    new = Writing().write(0.0, newest=hints)
    assert new is not None
    assert is_sound(new)
    assert new.newest == hints[:MAX_MODELS]
    wide = msgspec.structs.replace(ME, addresses=("h" * (MAX_SUMMARY_BYTES - 2000),))
    new = Writing().write(0.0, gateways=(wide,), newest=hints)
    assert new is not None
    assert is_sound(new)
    assert 0 < len(new.newest) < 10
    assert new.newest == hints[: len(new.newest)]


def test_a_gateway_too_large_to_be_named_writes_nothing() -> None:
    wide = msgspec.structs.replace(ME, addresses=("h" * MAX_SUMMARY_BYTES,))
    assert Writing().write(0.0, gateways=(wide,)) is None
