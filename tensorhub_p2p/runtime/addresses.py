"""Addresses as people write them, and as sockets need them.

Rules of this file. An address is `host:port`, where host is an IPv4 literal, an IPv6
literal in brackets, or a DNS name. Nothing here dials: which address to advertise is
read from the kernel's tables, never found by connecting to some public address.
Whatever can't work is an `AddressError` that says how to write it instead.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from tensorhub_p2p.config import ConfigError
from tensorhub_p2p.errors import JoinError

_NAME = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
_SIOCGIFADDR = 0x8915
_UP = 0x0001
_GATEWAY = 0x0002


class AddressError(JoinError, ConfigError):
    """An address that can't be used: bad syntax, not resolvable, or not allowed."""


class Address(NamedTuple):
    """A host (without brackets) and a port; `str()` of it parses back to it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ writes it."""
        return f"tcp://{self}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The literal's value, or None for a DNS name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def is_numeric(self) -> bool:
        return self.ip is not None

    @property
    def is_wildcard(self) -> bool:
        ip = self.ip
        return ip is not None and ip.is_unspecified

    @property
    def is_loopback(self) -> bool:
        ip = self.ip
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            return ip.ipv4_mapped.is_loopback
        return ip is not None and ip.is_loopback


def parse(text: str, default_port: int | None = None) -> Address:
    """`host:port`, `[v6]:port` or `name:port`; without a port, `default_port` if given.

    Raises AddressError, which says how to write it.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise AddressError(f"address {text!r}: an IPv6 address is written [fd00::2]:7946")
        return Address(_check_host(host, text, six=True), _port(rest[1:], text, default_port))
    if text.count(":") > 1:
        if "://" in text:
            raise AddressError(f"address {text!r}: write host:port, without a scheme")
        raise AddressError(
            f"address {text!r}: put an IPv6 address in brackets, as in [{text}]:7946"
        )
    host, _, port = text.partition(":")
    return Address(_check_host(host, text, six=False), _port(port, text, default_port))


def dialable(text: str) -> Address:
    """`parse`, for an address that is to be dialled: no wildcard, no port 0."""
    address = parse(text)
    if address.port == 0 or address.is_wildcard:
        raise AddressError(f"address {text!r} can't be dialled: it needs a real host and port")
    return address


def _check_host(host: str, text: str, six: bool) -> str:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        ip = None
    if six and not isinstance(ip, ipaddress.IPv6Address):
        raise AddressError(f"address {text!r}: only an IPv6 address goes in brackets")
    if ip is None and (not _NAME.fullmatch(host) or host.replace(".", "").isdigit()):
        raise AddressError(f"address {text!r}: {host!r} is neither an IP address nor a name")
    return host


def _port(port: str, text: str, default: int | None) -> int:
    if not port and default is not None:
        return default
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise AddressError(f"address {text!r}: a port from 0 to 65535 is missing, as in host:7946")
    return int(port)


def resolve(address: Address) -> list[Address]:
    """All numeric addresses of `address`, in the system's order of preference.

    Blocks as long as the system's resolver does. Raises AddressError.
    """
    if address.is_numeric:
        return [address]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"address {str(address)!r} can't be resolved ({error}): check the name, or use an IP"
        ) from error
    return list(dict.fromkeys(Address(str(entry[4][0]), address.port) for entry in found))


def check_bind(address: Address, *, secret: bool, insecure: bool) -> list[Address]:
    """The numeric addresses of a bind address, if binding there is allowed.

    Without a secret anyone who reaches the port can join and read the weights, so only
    loopback is allowed then, unless `insecure`.
    """
    numeric = resolve(address)
    open_to_others = [a for a in numeric if not a.is_loopback]
    if open_to_others and not secret and not insecure:
        raise AddressError(
            f"bind address {str(address)!r} is reachable from other machines and no secret is "
            "set: pass secret=... (or THUB_SECRET), bind to 127.0.0.1, or accept with insecure=True"
        )
    return numeric


def advertised(bound: Address, advertise: str | None = None) -> tuple[str, ...]:
    """What to tell others for a socket bound to `bound` (numeric, its real port).

    `advertise` if given, with the bound port where it names none (or 0): for NAT and
    names. Else the bound address; for a wildcard one local address for each family it
    covers, that of the default route first.
    """
    if advertise is not None:
        explicit = parse(advertise, default_port=bound.port)
        if explicit.is_wildcard:
            raise AddressError(f"advertise {advertise!r}: nobody can dial a wildcard address")
        return (str(explicit._replace(port=explicit.port or bound.port)),)
    if not bound.is_wildcard:
        return (str(bound),)
    families = (6, 4) if ":" in bound.host else (4,)
    hosts = [host for family in families for host in interface_addresses(family)[:1]]
    return tuple(str(Address(host, bound.port)) for host in hosts)


def interface_addresses(family: int) -> list[str]:
    """This machine's addresses of one family (4 or 6), the most useful first.

    Order: on the interface of the default route, other global ones, loopback. Link-local
    ones are left out: they mean nothing on another machine.
    """
    default = _default_interfaces(family)
    found = _addresses6() if family == 6 else _addresses4()
    if not found:
        found = _addresses_by_name(family)
    usable = [(n, a) for n, a in found if not ipaddress.ip_address(a).is_link_local]
    usable.sort(
        key=lambda entry: (ipaddress.ip_address(entry[1]).is_loopback, entry[0] not in default)
    )
    return list(dict.fromkeys(a for _, a in usable)) or (["::1"] if family == 6 else ["127.0.0.1"])


def _addresses4() -> list[tuple[str, str]]:
    """(interface, its first IPv4 address), asked from the kernel (Linux)."""
    try:
        import fcntl
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # this interface has no IPv4 address
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _addresses6() -> list[tuple[str, str]]:
    found = []
    for line in _lines("/proc/net/if_inet6"):
        digits, _, _, _, _, name = line.split()
        found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def _addresses_by_name(family: int) -> list[tuple[str, str]]:
    """Where the kernel's tables can't be read: what the own host name stands for."""
    kind = socket.AF_INET6 if family == 6 else socket.AF_INET
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, kind, socket.SOCK_STREAM)
    except OSError:
        return []
    return [("", str(entry[4][0]).partition("%")[0]) for entry in entries]


def _default_interfaces(family: int) -> set[str]:
    if family == 4:
        rows = [line.split() for line in _lines("/proc/net/route")[1:]]
        return {r[0] for r in rows if r[1] == "0" * 8 and int(r[3], 16) & _UP}
    rows = [line.split() for line in _lines("/proc/net/ipv6_route")]
    return {
        r[9] for r in rows if r[0] == "0" * 32 and r[1] == "00" and int(r[8], 16) & _GATEWAY
    } - {"lo"}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
