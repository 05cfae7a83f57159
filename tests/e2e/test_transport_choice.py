"""What a user decides about transports, and what they see when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from steps import blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p.cli.doctor import trouble
from tensorhub_p2p.transfer.transports.base import CannotReach
from tensorhub_p2p.transfer.transports.cma import CmaReader, CmaTransport

SIZE = 6 << 20


def used(pull: th.Pull) -> set[str]:
    return {report.transport for source in pull.sources for report in source.transports}


def published(peer: Callable[..., th.Peer]) -> tuple[th.ShardHandle, Any]:
    weights = blank(2, SIZE)
    fill(weights, 1)
    trainer = peer().open("m")
    trainer.register(weights)
    trainer.publish(1)
    return trainer, weights


def test_a_rule_decides_over_what_a_link_reads(peer: Callable[..., th.Peer]) -> None:
    published(peer)
    ruled = th.Config(links=(th.LinkRule(("tcp",), locality="host"),))
    for config, expected in ((ruled, "tcp"), (th.Config(), "cma")):
        rollout, copy = peer(config=config).open("m"), blank(2, SIZE)
        rollout.register(copy)
        assert used(rollout.replicate(1, timeout=20)) == {expected}
        assert not wrong(copy, 1)
        rollout.close()


def test_a_transport_that_fails_in_the_middle_gives_way_with_a_warning(
    peer: Callable[..., th.Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published(peer)
    read = CmaReader.read
    calls = 0

    def fails_later(self: CmaReader, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise CannotReach("cma: process 1 may not be read any more")
        read(self, *args)

    monkeypatch.setattr(CmaReader, "read", fails_later)
    rollout, copy = peer().open("m"), blank(2, SIZE)
    rollout.register(copy)
    with caplog.at_level(logging.WARNING):
        pull = rollout.replicate(1, timeout=20)
    assert not wrong(copy, 1)
    assert "tcp" in used(pull)
    (fallback,) = (f for source in pull.sources for f in source.fallbacks)
    assert (fallback.transport, fallback.instead) == ("cma", "tcp")
    warnings = [r.getMessage() for r in caplog.records if "may not be read" in r.getMessage()]
    assert len(warnings) == 1
    assert "peer-0" in warnings[0]
    rollout.unpublish()
    rollout.unregister()
    rollout.register(blank(2, SIZE))
    assert used(rollout.replicate(1, timeout=20)) == {"tcp"}  # it isn't tried again at once


def test_a_transport_that_is_named_and_cannot_work_is_warned_of(
    peer: Callable[..., th.Peer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CmaTransport, "unavailable", lambda _self: "seccomp forbids it")
    peer(transports=["cma", "tcp"])
    [told] = [record.getMessage() for record in caplog.records]
    assert "cma" in told
    assert "seccomp forbids it; it has tcp" in told


def test_a_peer_of_whose_transports_none_can_work_does_not_start(
    peer: Callable[..., th.Peer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = []
    monkeypatch.setattr(CmaTransport, "unavailable", lambda _self: "seccomp forbids it")
    monkeypatch.setattr(CmaTransport, "close", lambda _self: closed.append("cma"))
    with pytest.raises(th.ConfigError, match=r"cma: seccomp forbids it.*tcp, which always can"):
        peer(transports=["cma"])
    assert closed == ["cma"]
    assert not caplog.records


@pytest.mark.parametrize("transport", ["nixl", "ucx"])
def test_transports_that_are_optional_move_whole_versions(
    peer: Callable[..., th.Peer], transport: str
) -> None:
    reason = trouble(transport)
    if reason is not None:
        pytest.skip(reason)
    first = peer(transports=[transport])
    weights, copy = blank(3, SIZE), blank(3, SIZE)
    trainer, rollout = first.open("m"), peer(transports=[transport]).open("m")
    trainer.register(weights)
    rollout.register(copy)
    for version in range(3):
        fill(weights, version)
        trainer.publish(version)
        assert used(rollout.replicate(version, timeout=30)) == {transport}
        assert not wrong(copy, version)
        trainer.unpublish()
    rollout.unpublish()
    for handle in (trainer, rollout):
        handle.unregister()
