"""Large tensors get huge pages while they are registered, and layouts cross once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from steps import MIB, blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p.config import Config, MemoryConfig
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.protocol.messages import LayoutRequest, Message
from tensorhub_p2p.transfer.memory import Region


def test_tensors_are_pulled_while_their_pages_become_huge_ones(
    peer: Callable[..., th.Peer],
) -> None:
    config = Config(memory=MemoryConfig(huge_page_load=1.0))
    trainer, rollout = peer(config=config).open("m"), peer(config=config).open("m")
    weights, copy = blank(2, 16 * MIB), blank(2, 16 * MIB)
    trainer.register(fill(weights, 1))
    rollout.register(copy)
    for version in range(1, 5):
        fill(weights, version)
        trainer.publish(version)
        rollout.replicate(version, timeout=20)
        assert not wrong(copy, version)
        trainer.unpublish()
    assert trainer._driver.huge_pages.settled(20)


def test_a_region_that_is_let_go_is_forgotten(
    peer: Callable[..., th.Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = peer()
    asked: list[Region] = []
    forgotten: list[Region] = []
    monkeypatch.setattr(member._driver.huge_pages, "ask", asked.append)
    monkeypatch.setattr(member._driver.huge_pages, "forget", forgotten.append)
    handle = member.open("m")
    handle.register(blank())
    handle.unregister()
    assert len(asked) == len(forgotten) == 1
    handle.register(blank())
    handle.close()
    assert asked == forgotten
    assert len(asked) == 2


def test_tensors_in_another_order_have_their_layout_fetched_once(
    peer: Callable[..., th.Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = peer().open("m"), peer().open("m")
    weights, copy = blank(), blank()
    trainer.register(weights)
    rollout.register(dict(reversed(copy.items())))
    requests: list[LayoutRequest] = []
    send = rollout._driver.send

    def watched(to: PeerId, message: Message) -> None:
        if isinstance(message, LayoutRequest):
            requests.append(message)
        send(to, message)

    monkeypatch.setattr(rollout._driver, "send", watched)
    for version in range(3):
        fill(weights, version)
        trainer.publish(version)
        rollout.replicate(version, timeout=20)
        assert not wrong(copy, version)
        trainer.unpublish()
    assert len(requests) == 1
