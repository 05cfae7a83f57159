"""Whose handshakes count as life."""

from __future__ import annotations

from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.runtime.doubts import Doubts

PEER, OTHER = PeerId("1" * 16), PeerId("2" * 16)


def test_a_peer_is_believed_until_it_closes() -> None:
    doubts = Doubts(9)
    assert PEER not in doubts
    doubts.greeted(PEER)
    doubts.heard(PEER)
    assert PEER not in doubts
    doubts.closed(PEER)
    assert PEER in doubts
    assert OTHER not in doubts


def test_only_a_message_after_a_handshake_ends_the_doubt() -> None:
    doubts = Doubts(9)
    doubts.closed(PEER)
    doubts.heard(PEER)
    assert PEER in doubts, "that message was on its way already"
    doubts.greeted(PEER)
    assert PEER in doubts, "anybody may greet"
    doubts.heard(OTHER)
    assert PEER in doubts
    doubts.heard(PEER)
    assert PEER not in doubts


def test_each_end_of_a_connection_opens_the_doubt_anew() -> None:
    doubts = Doubts(9)
    doubts.closed(PEER)
    doubts.greeted(PEER)
    doubts.closed(PEER)
    doubts.heard(PEER)
    assert PEER in doubts


def test_beyond_the_limit_the_oldest_doubt_is_dropped() -> None:
    doubts = Doubts(2)
    peers = [PeerId(str(n) * 16) for n in range(3)]
    for peer in (*peers[:2], peers[0], peers[2]):
        doubts.closed(peer)
    assert [peer in doubts for peer in peers] == [True, False, True]
    doubts.forget(peers[0])
    assert peers[0] not in doubts
