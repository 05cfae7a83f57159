"""Which network devices have an address, as UCX names them.

Rule of this file. It asks the kernel, and loads no library.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def devices_of(host: str) -> str | None:
    """What UCX calls the network devices with this address; None if there is no such one.

    "all" for 0.0.0.0 and ::.
    """
    if host in ("0.0.0.0", "::"):
        return "all"
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    if all(ipaddress.ip_address(address).is_loopback for address in map(str, wanted)):
        return "lo"
    for _, name in socket.if_nameindex():
        if _addresses(name) & wanted:
            return ",".join([name, *_rdma_of(name)])
    return None


def _addresses(interface: str) -> set[str | int]:
    found: set[str | int] = set()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        reply = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.add(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            words = line.split()
            if words[-1] == interface:
                found.add(str(ipaddress.IPv6Address(bytes.fromhex(words[0]))))
    return found


def _rdma_of(interface: str) -> list[str]:
    """The RDMA devices behind a network interface, as UCX names them."""
    try:
        return [
            f"{d}:1" for d in sorted(os.listdir(f"/sys/class/net/{interface}/device/infiniband"))
        ]
    except OSError:
        return []
