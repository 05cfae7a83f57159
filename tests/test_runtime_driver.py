"""A running peer's driver: whom it watches, and what it says to people."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from runtime_echo import eventually

import tensorhub_p2p as th
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.membership.swim_events import Unheard
from tensorhub_p2p.runtime.driver import UNHEARD_COUNT


@pytest.fixture
def pair() -> Iterator[tuple[th.Peer, th.Peer]]:
    with (
        th.Peer(cluster="driver", transports=["tcp"]) as a,
        th.Peer(cluster="driver", transports=["tcp"], seeds=[a.address]) as b,
    ):
        yield a, b
        for peer in (a, b):
            assert list(peer._driver.control.faults) == []


def test_members_watch_each_other_until_they_leave(pair: tuple[th.Peer, th.Peer]) -> None:
    a, b = pair
    for one, other in ((a, b), (b, a)):
        watching, peer = one._driver.links._watching, PeerId(other.peer_id)
        eventually(lambda w=watching, p=peer: w.is_up(p), "the watch stands")
    b.close()
    eventually(lambda: PeerId(b.peer_id) not in a._driver.links._watching, "nobody is left")
    assert [m.state for m in a.members(everyone=True) if m.peer_id == b.peer_id] == ["left"]


def test_messages_that_go_on_getting_lost_are_warned_about_once_a_minute(
    pair: tuple[th.Peer, th.Peer], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    driver = a._driver
    eventually(lambda: len(a.members()) == 2, "they know each other")
    with caplog.at_level(logging.WARNING):
        for _ in range(UNHEARD_COUNT - 1):
            driver.ask(lambda now: driver._on_event(Unheard(PeerId(b.peer_id))))
        assert "get lost" not in caplog.text, "it may be over in a moment"
        for _ in range(3):
            driver.ask(lambda now: driver._on_event(Unheard(PeerId(b.peer_id))))
    (warning,) = [r.getMessage() for r in caplog.records if "get lost" in r.getMessage()]
    assert b.address in warning
    assert a.address in warning
    assert "firewall" in warning
    assert "advertise" in warning
