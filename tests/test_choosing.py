"""Which transports are tried on which link: orders, rules, and failures that are remembered."""

from __future__ import annotations

import logging

import pytest

import tensorhub_p2p as th
from tensorhub_p2p.config import LinkRule
from tensorhub_p2p.options import default_transports, resolve_options
from tensorhub_p2p.protocol.identity import PeerId
from tensorhub_p2p.transfer.choosing import Choices, Facts
from tensorhub_p2p.transfer.transports import optional

A, B = PeerId("a" * 16), PeerId("b" * 16)
NEAR = Facts("rollout-3", "us", "rack-7", 0)
FAR = Facts("trainer", "eu-west", "", 3)
FACTS = {A: NEAR, B: FAR}


def choices(*rules: LinkRule, remembered: float = 60.0) -> Choices:
    return Choices(("cma", "tcp"), rules, FACTS.__getitem__, remembered)


def test_without_a_rule_every_link_has_the_peers_own_order() -> None:
    assert choices().order(A) == choices().order(B) == ("cma", "tcp")


@pytest.mark.parametrize(
    "rule",
    [
        LinkRule(("tcp",), locality="host"),
        LinkRule(("tcp",), peer="rollout-*"),
        LinkRule(("tcp",), zone="us"),
        LinkRule(("tcp",), host="rack-?"),
        LinkRule(("tcp",), locality="host", peer="rollout-3", zone="u*", host="rack-7"),
    ],
)
def test_a_rule_counts_for_the_links_that_it_matches_and_no_other(rule: LinkRule) -> None:
    assert choices(rule).order(A) == ("tcp",)
    assert choices(rule).order(B) == ("cma", "tcp")


def test_the_first_rule_that_matches_counts() -> None:
    first, second = LinkRule(("tcp",), zone="eu-*"), LinkRule(("cma",), locality="far")
    assert choices(first, second).order(B) == ("tcp",)
    assert choices(second, first).order(B) == ("cma",)


def test_all_that_a_rule_asks_for_must_be_so() -> None:
    assert choices(LinkRule(("tcp",), locality="host", zone="eu-*")).order(A) == ("cma", "tcp")


def test_a_failure_is_remembered_for_its_link_alone_and_not_for_ever() -> None:
    chosen = choices()
    chosen.failed(A, "cma", "not permitted", "tcp")
    assert chosen.failed_lately(A, "cma") == "not permitted"
    assert chosen.failed_lately(A, "tcp") is chosen.failed_lately(B, "cma") is None
    forgetful = choices(remembered=0.0)
    forgetful.failed(A, "cma", "not permitted", "tcp")
    assert forgetful.failed_lately(A, "cma") is None


def test_a_fallback_is_warned_of_once_for_each_link_and_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = choices()
    with caplog.at_level(logging.WARNING):
        for pid in range(3):
            chosen.failed(A, "cma", f"process {pid} may not be read", "tcp")
        chosen.failed(A, "cma", "seccomp", "tcp")
        chosen.failed(B, "cma", "seccomp", "")
    assert len(caplog.records) == 3
    first = caplog.records[0].getMessage()
    for part in (A, "rollout-3", "cma", "may not be read", "it uses tcp instead"):
        assert part in first
    assert "no other transport is left" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"transports": (), "locality": "far"}, "give a tuple"),
        ({"transports": "tcp", "locality": "far"}, "give a tuple"),
        ({"transports": ("rdma",), "locality": "far"}, "choose from cma"),
        ({"transports": ("tcp", "tcp"), "locality": "far"}, "each once"),
        ({"transports": ("tcp",), "locality": "near"}, "choose from host"),
        ({"transports": ("tcp",)}, "every link"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(th.ConfigError, match=says):
        LinkRule(**fields)  # type: ignore[arg-type]


def test_a_rule_with_a_transport_that_the_peer_does_not_use_is_refused() -> None:
    config = th.Config(links=(LinkRule(("cma",), locality="far"),))
    with pytest.raises(th.ConfigError, match="names cma"):
        th.Peer("c", transports=["tcp"], config=config)


def test_what_cannot_encrypt_is_only_a_default_with_rdma_and_without_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tensorhub_p2p.options.rdma_devices", list)
    assert default_transports(None) == default_transports("s") == ("cma", "tcp")
    monkeypatch.setattr("tensorhub_p2p.options.rdma_devices", lambda: ["mlx5_0"])
    assert default_transports(None) == ("cma", "nixl", "ucx", "tcp")
    assert default_transports("s") == ("cma", "tcp")
    assert resolve_options("c", secret="s", environment={}).transports == ("cma", "tcp")
    named = resolve_options("c", secret="s", environment={"THUB_TRANSPORTS": "nixl,tcp"})
    assert named.transports == ("nixl", "tcp")


def test_a_library_that_crashes_or_hangs_takes_nothing_down() -> None:
    crash, hang = "import os; os.kill(os.getpid(), 11)", "import time; time.sleep(60)"
    assert "crashed with signal 11" in (optional.try_apart("x", crash, 20) or "")
    assert "did not start within" in (optional.try_apart("x", hang, 0.2) or "")
    assert "no such" in (optional.try_apart("x", "raise OSError('no such')", 20) or "")
    assert optional.installed(("no_such_module_at_all",)) is None
