"""What a peer is told: explicit arguments first, `THUB_*` environment variables second.

An argument that is given, if only as "" or 0, is never overridden by the environment.
Everything is checked here, before a socket opens.
"""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeVar

from tensorhub_p2p.config import TRANSPORTS, ConfigError
from tensorhub_p2p.runtime.addresses import dialable
from tensorhub_p2p.transfer.copying import usable_bytes
from tensorhub_p2p.transfer.transports.optional import rdma_devices

T = TypeVar("T")
MAX_TIMEOUT = 1e8
"""Seconds (three years): every wait has a deadline, and the system's clocks have a range."""
MAX_NAME = 200
"""Characters of a cluster, zone, model or replica name."""
MAX_VERSION = 10**18 - 1
"""Selectors are texts of up to 18 digits."""
MAX_OFFLOAD = 1 << 50
"""Bytes; what one layout may have at most (protocol/layout.py)."""
OFFLOAD_PART = 4
"""By default offloads take up to one part in so many of the machine's memory."""


@dataclass(frozen=True)
class PeerOptions:
    """The options of one peer, complete and checked."""

    cluster: str
    seeds: tuple[str, ...]
    zone: str
    bind: str
    advertise: str | None
    data_bind: str | None
    secret: str | None
    insecure: bool
    name: str
    host: str
    rack: str
    transports: tuple[str, ...]
    offload_limit: int
    join_timeout: float


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _truth(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"", "0", "false", "no", "off"}:
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def checked_name(what: str, name: object) -> str:
    """A name that travels in messages: 1 to 200 printable characters."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ConfigError(f"{what} = {name!r}: must be 1 to {MAX_NAME} printable characters")
    return name


def checked_integer(what: str, value: object, lowest: int, highest: int) -> int:
    """An int, or what stands for one (numpy's, a tensor's), within bounds. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{what} = {value!r}: must be an integer")
    number = operator.index(value)
    if not lowest <= number <= highest:
        raise ConfigError(f"{what} = {number}: must be from {lowest} to {highest}")
    return number


def check_flag(what: str, value: object) -> None:
    """Raises ConfigError unless it is True or False: a text or a number may mean anything."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what} = {value!r}: must be True or False")


def check_timeout(timeout: object, what: str = "timeout") -> None:
    """Raises ConfigError, which is a ValueError, unless it is a time that can be waited."""
    if not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT:
        raise ConfigError(f"{what} = {timeout!r}: must be positive seconds, up to {MAX_TIMEOUT:g}")


def default_transports(secret: str | None) -> tuple[str, ...]:
    """What a peer uses that isn't told.

    `nixl` and `ucx` can't encrypt, so they need a cluster without a secret; and they are
    of use only where there is an RDMA device.
    """
    rdma = secret is None and bool(rdma_devices())
    return TRANSPORTS if rdma else ("cma", "tcp")


def resolve_options(
    cluster: str | None = None,
    seeds: Sequence[str] | None = None,
    zone: str | None = None,
    bind: str | None = None,
    advertise: str | None = None,
    data_bind: str | None = None,
    secret: str | None = None,
    insecure: bool | None = None,
    name: str | None = None,
    host: str | None = None,
    rack: str | None = None,
    transports: Sequence[str] | None = None,
    offload_limit: int | None = None,
    join_timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> PeerOptions:
    """Fill in what is not given from `THUB_<NAME>`, then from the defaults.

    Raises ConfigError; AddressError for a seed that can't be dialled.
    """
    env = os.environ if environment is None else environment

    def pick(name: str, given: T | None, convert: Callable[[str], T], default: T) -> T:
        if given is not None:
            return given
        text = env.get(f"THUB_{name.upper()}")
        if text is None:
            return default
        try:
            return convert(text)
        except ValueError as error:
            raise ConfigError(f"THUB_{name.upper()} = {text!r}: {error}") from error

    if isinstance(seeds, str):
        raise ConfigError(f"seeds = {seeds!r}: give a list of addresses, as in [{seeds!r}]")
    if isinstance(transports, str):
        raise ConfigError(f"transports = {transports!r}: give a list, as in [{transports!r}]")
    secret = secret if secret is not None else env.get("THUB_SECRET") or None
    options = PeerOptions(
        cluster=checked_name("cluster", pick("cluster", cluster, str, "default")),
        seeds=tuple(pick("seeds", seeds, _listed, ())),
        zone=checked_name("zone", pick("zone", zone, str, "default")),
        bind=pick("bind", bind, str, "127.0.0.1:0"),
        advertise=pick("advertise", advertise, str, "") or None,
        data_bind=pick("data_bind", data_bind, str, "") or None,
        secret=secret,
        insecure=pick("insecure", insecure, _truth, False),
        name=pick("name", name, str, f"{socket.gethostname()}:{os.getpid()}")[:MAX_NAME],
        host=pick("host", host, str, ""),
        rack=pick("rack", rack, str, ""),
        transports=tuple(pick("transports", transports, _listed, default_transports(secret))),
        offload_limit=checked_integer(
            "offload_limit",
            pick("offload_limit", offload_limit, int, usable_bytes() // OFFLOAD_PART),
            0,
            MAX_OFFLOAD,
        ),
        join_timeout=pick("join_timeout", join_timeout, float, 30.0),
    )
    _check(options)
    return options


def _check(options: PeerOptions) -> None:
    """Raises ConfigError, AddressError."""
    unknown = [name for name in options.transports if name not in TRANSPORTS]
    if unknown or not options.transports:
        raise ConfigError(
            f"transports = {list(options.transports)}: choose from {', '.join(TRANSPORTS)}"
        )
    for what, text in {"host": options.host, "rack": options.rack}.items():
        if text:
            checked_name(what, text)
    check_timeout(options.join_timeout, "join_timeout")
    for seed in options.seeds:
        dialable(seed)
