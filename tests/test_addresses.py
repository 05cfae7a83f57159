"""Addresses: how they are written, what they stand for, which one to tell others."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.errors import JoinError
from tensorhub_p2p.runtime import addresses
from tensorhub_p2p.runtime.addresses import (
    Address,
    AddressError,
    advertised,
    check_bind,
    dialable,
    interface_addresses,
    parse,
    resolve,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7946", "10.0.0.1", 7946),
        ("[fd00::2]:7946", "fd00::2", 7946),
        ("[::]:0", "::", 0),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("trainer-0.train.svc.cluster.local:7946", "trainer-0.train.svc.cluster.local", 7946),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_an_address_is_host_and_port_with_brackets_around_ipv6(
    text: str, host: str, port: int
) -> None:
    assert parse(text) == Address(host, port)
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("fd00::2", "brackets"),
        ("fd00::2:7946", "brackets"),
        ("::1", "brackets"),
        ("[fd00::2:7946", "written"),
        ("[fd00::2]7946", "written"),
        ("[10.0.0.1]:1", "only an IPv6"),
        ("tcp://10.0.0.1:1", "scheme"),
        ("10.0.0.1", "port"),
        ("10.0.0.1:", "port"),
        ("10.0.0.1:65536", "port"),
        ("10.0.0.1:-1", "port"),
        ("10.0.0.1:7e3", "port"),
        ("10.0.0.1:٣", "port"),
        ("10.0.0.256:1", "neither"),
        ("10.0.1:1", "neither"),
        (":7946", "neither"),
        ("", "neither"),
        ("a b:1", "neither"),
        ("-x:1", "neither"),
    ],
)
def test_a_bad_address_is_an_error_that_says_how_to_write_it(text: str, advice: str) -> None:
    with pytest.raises(AddressError, match=advice) as caught:
        parse(text)
    assert isinstance(caught.value, JoinError)
    assert isinstance(caught.value, ConfigError)
    assert repr(text) in str(caught.value)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_survives_being_written_and_parsed(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    address = Address(str(ip), port)
    assert parse(str(address)) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_an_address_error(text: str) -> None:
    try:
        address = parse(text)
    except AddressError:
        return
    assert parse(str(address)) == address


def test_a_default_port_fills_in_a_missing_one_only() -> None:
    assert parse("10.0.0.1", 7).port == 7
    assert parse("[::1]", 7) == Address("::1", 7)
    assert parse("10.0.0.1:8", 7).port == 8


@pytest.mark.parametrize("text", ["0.0.0.0:7", "[::]:7", "10.0.0.1:0"])
def test_wildcards_and_port_0_cannot_be_dialled(text: str) -> None:
    with pytest.raises(AddressError, match="can't be dialled"):
        dialable(text)


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::2", 9, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 9)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 9)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: answer)
    assert resolve(parse("trainer:9")) == [Address("fd00::2", 9), Address("10.0.0.2", 9)]


def test_a_name_that_cannot_be_resolved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(AddressError, match=r"nowhere\.invalid:9.*Name or service not known"):
        resolve(parse("nowhere.invalid:9"))


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:0", "127.8.8.8:0"])
def test_loopback_needs_no_secret(text: str) -> None:
    assert check_bind(parse(text), secret=False, insecure=False) == [parse(text)]


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "[::ffff:10.0.0.1]:0"])
def test_without_a_secret_only_loopback_can_be_bound(text: str) -> None:
    with pytest.raises(AddressError, match="no secret"):
        check_bind(parse(text), secret=False, insecure=False)
    assert check_bind(parse(text), secret=True, insecure=False)
    assert check_bind(parse(text), secret=False, insecure=True)


def test_the_bound_address_is_advertised_unless_told_otherwise() -> None:
    bound = Address("10.0.0.1", 4321)
    assert advertised(bound) == ("10.0.0.1:4321",)
    assert advertised(bound, "203.0.113.7:99") == ("203.0.113.7:99",)
    assert advertised(bound, "node-7") == ("node-7:4321",)
    assert advertised(bound, "[fd00::9]:0") == ("[fd00::9]:4321",)
    with pytest.raises(AddressError, match="wildcard"):
        advertised(bound, "0.0.0.0:1")


def test_a_wildcard_advertises_local_addresses_of_the_families_that_it_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {4: ["10.0.0.1", "172.17.0.1"], 6: ["fd00::1"]}
    monkeypatch.setattr(addresses, "interface_addresses", own.__getitem__)
    assert advertised(Address("0.0.0.0", 5)) == ("10.0.0.1:5",)
    assert advertised(Address("::", 5)) == ("[fd00::1]:5", "10.0.0.1:5")


def test_the_interface_of_the_default_route_comes_first_and_loopback_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        ("lo", "127.0.0.1"),
        ("docker0", "172.17.0.1"),
        ("eth0", "10.0.0.1"),
        ("eth1", "169.254.3.3"),
    ]
    monkeypatch.setattr(addresses, "_addresses4", lambda: found)
    monkeypatch.setattr(addresses, "_default_interfaces", lambda family: {"eth0"})
    assert interface_addresses(4) == ["10.0.0.1", "172.17.0.1", "127.0.0.1"]


def test_this_machine_has_an_address_of_each_family_that_can_be_written_down() -> None:
    for family in (4, 6):
        for host in interface_addresses(family):
            assert ipaddress.ip_address(host).version == family


def test_without_the_kernels_tables_the_host_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_lines", lambda path: [])
    monkeypatch.setattr(addresses, "_addresses4", list)
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: answer)
    assert interface_addresses(4) == ["10.1.1.1"]
