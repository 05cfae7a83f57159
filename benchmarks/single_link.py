"""One link: ours beside the systems that could be picked instead, each run for real.

    python benchmarks/single_link.py                       all of it, in about ten minutes
    python benchmarks/single_link.py --only nixl gloo --rounds 5
    python benchmarks/single_link.py --search nixl         what its settings are worth

A GiB of torch memory from a process into another's tensor, on one host and between two hosts
(network namespaces joined by veth, without a limit; needs root). Per system a pair of processes
of its own and a pair of ours, both started once and warm: connections, registrations and
prepared transfers are made before and not counted. In every round the sources write new bytes,
ours and the other take turns at being first, and a ratio is taken; what is reported is the
median of the ratios. The other's processes are stopped (SIGSTOP) while ours move bytes, since
some of them poll. After the last round the bytes at both ends are compared.

Ours is the whole `replicate()`, verified against the origin's digests, which were taken in the
background before; "right after publish" counts `publish` and the digests too. The others verify
nothing. They run with the settings that their own documentation uses; where `--search` found
better ones, a second line has them.

Environments come from benchmarks/environments.py. A system that can't be run here says why.
Results: benchmarks/results/single_link.json and docs/images/single_link.png.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import environments
import machine
from figures import Figure, announce, record, rounded, status
from remote import Remote, RemoteError, Start
from single_link_plot import PICTURE, draw
from testbed import Testbed, why_not

WARM_UPS = 2
SEARCH_ROUNDS = 3
Spans = list[float]


@dataclass(frozen=True)
class System:
    """How one system is run."""

    name: str
    """Of its environment."""
    script: str
    """In benchmarks/peers/."""
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    target: float | None = None
    """How many times faster ours should be."""
    sequential: bool = False
    """The source is done before the target begins."""
    alone: bool = False
    """One process is both sides, and starts others: it can't be stopped by a signal."""

    def tuned(self, what: str, **settings: Any) -> System:
        return replace(self, what=f"{self.what}, {what}", target=None, **settings)


# --- the systems, on one host ------------------------------------------------------------

NIXL = System("nixl", "nixl_reads.py", "NIXL, one-sided READ", target=2.5)
UCXX = System("ucxx", "ucxx_messages.py", "UCXX, send and recv", target=10)
GLOO = System(
    "gloo",
    "gloo_broadcast.py",
    "gloo, broadcast",
    environment={"GLOO_SOCKET_IFNAME": "lo"},
    target=2.5,
)
MOONCAKE = System("mooncake", "mooncake_reads.py", "Mooncake, TCP read")
RAY = System("ray", "ray_objects.py", "Ray, put, get and copy", target=10, alone=True)
DCP = System("dcp", "dcp_files.py", "torch DCP, save and load", sequential=True)

RESTED = {"pieces": 16, "rest": 0.0002}
"""NIXL's threads and the poll for its state spin, on two cores; this was faster in `--search`."""
BLOCKING = {"progress": "blocking"}
"""UCXX's own default is a thread that makes progress; this was faster in `--search`."""

ONE_HOST: dict[str, list[System]] = {
    "nixl": [NIXL, NIXL.tuned("16 pieces and rests", settings=RESTED)],
    "ucxx": [UCXX, UCXX.tuned("blocking progress", settings=BLOCKING)],
    "gloo": [GLOO],
    "mooncake": [MOONCAKE],
    "ray": [RAY],
    "dcp": [
        replace(DCP, what="torch DCP in memory (tmpfs)", settings={"folder": "/dev/shm"}),
        replace(DCP, what="torch DCP on disk", settings={"folder": "/var/tmp"}),
    ],
}

# --- between two hosts -------------------------------------------------------------------

TCP = {"UCX_TLS": "tcp"}
TWO_HOSTS: dict[str, list[System]] = {
    "mooncake": [replace(MOONCAKE, target=1.8)],
    "ucxx": [
        replace(UCXX, what="UCXX over TCP", environment=TCP, target=4),
        replace(
            UCXX,
            what="UCXX over TCP, blocking progress",
            environment=TCP,
            settings=BLOCKING,
            target=4,
        ),
    ],
    "nixl": [replace(NIXL, what="NIXL over TCP", environment=TCP, target=None)],
    "gloo": [replace(GLOO, environment={"GLOO_SOCKET_IFNAME": "eth0"}, target=None)],
}

# --- what a search tries, beside the settings above ---------------------------------------

TRIED: dict[str, list[tuple[str, dict[str, Any], dict[str, str]]]] = {
    "nixl": [
        ("a rest of 0.2 ms between polls", {"rest": 0.0002}, {}),
        ("2 pieces", {"pieces": 2, "rest": 0.0002}, {}),
        ("16 pieces", {"pieces": 16, "rest": 0.0002}, {}),
    ],
    "ucxx": [
        ("blocking", {"progress": "blocking"}, {}),
        ("polling", {"progress": "polling"}, {}),
        ("thread-polling", {"progress": "thread-polling"}, {}),
        ("get_zcopy", {}, {"UCX_RNDV_SCHEME": "get_zcopy"}),
    ],
    "gloo": [("send and receive", {"call": "send"}, {})],
    "mooncake": [
        ("2 pieces", {"pieces": 2}, {}),
        ("4 pieces", {"pieces": 4}, {}),
        ("2 lanes, 2 pieces", {"pieces": 2}, {"MC_TCP_LANES_PER_PEER": "2"}),
        (
            "pooled connections, 1 MiB slices",
            {"pieces": 2},
            {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_TCP_SLICE_SIZE": "1048576"},
        ),
    ],
    "ray": [("numpy", {"as_numpy": True}, {})],
}

# --- a pair of processes -----------------------------------------------------------------


class Pair:
    """Source and target of one system, connected and warm. A context manager."""

    def __init__(
        self,
        python: str,
        system: System,
        settings: tuple[dict[str, Any], dict[str, Any]],
        starts: tuple[Start, Start],
    ) -> None:
        self._system = system
        roles = ("both",) if system.alone else ("source", "target")
        self.sides: list[Remote] = []
        try:
            for role, own, start in zip(roles, settings, starts, strict=False):
                given = {**own, **system.settings}
                self.sides.append(
                    Remote(
                        python,
                        system.script,
                        role,
                        given,
                        environment=system.environment,
                        start=start,
                    )
                )
            for side in self.sides:
                side.started()
            self.source, self.target = self.sides[0], self.sides[-1]
            if not system.alone:
                self.target.begin("connect", self.source.describe())
                self.source.accept()
                self.target.result()
                self.source.settle()
                self.target.settle()
        except BaseException:
            self.end()
            raise

    def transfer(self, write: str = "write", give: str = "give") -> float:
        """New bytes, then one transfer; its seconds."""
        getattr(self.source, write)()
        spans = []
        if not self._system.alone:
            self.source.begin(give)
            if self._system.sequential or give != "give":
                spans.append(self.source.result())
        self.target.begin("take")
        if not self._system.alone and not spans:
            spans.append(self.source.result())
        spans.append(self.target.result())
        took_part = [span for span in spans if span is not None]
        return float(max(end for _, end in took_part) - min(begin for begin, _ in took_part))

    def compare(self) -> None:
        """What was moved must be there: a fast benchmark of nothing is worth nothing."""
        there = self.target.fingerprint(*([1] if self._system.alone else []))
        if self.source.fingerprint() != there:
            raise RuntimeError(f"the bytes that {self._system.what} moved differ")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Its processes do nothing meanwhile."""
        sides = [] if self._system.alone else self.sides
        for side in sides:
            side.stop()
        try:
            yield
        finally:
            for side in sides:
                side.resume()

    def end(self) -> None:
        for side in self.sides:
            side.end()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# --- the two places ----------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the two processes of a pair run."""

    key: str
    about: str
    ours: System
    systems: dict[str, list[System]]
    rounds: int
    starts: tuple[Start, Start] = (subprocess.Popen, subprocess.Popen)
    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1")

    def pair(self, system: System, size: int) -> Pair:
        python = environments.python_of(system.name)
        own = tuple(
            {"size": size, "address": address, "source": self.addresses[0], "bind": f"{address}:0"}
            for address in self.addresses
        )
        return Pair(python, system, (own[0], own[1]), self.starts)


def ours(transport: str) -> System:
    return System(
        "ours", "ours_pulls.py", f"ours, {transport}", settings={"transports": [transport]}
    )


@contextlib.contextmanager
def places(rounds: int | None) -> Iterator[list[Place]]:
    found = [
        Place("one host", "two processes of one host", ours("cma"), ONE_HOST, rounds or 15),
    ]
    trouble = why_not()
    if trouble is not None:
        print(f"nothing is measured between two hosts: {trouble}")
        yield found
        return
    with Testbed(hosts=2) as bed:
        found.append(
            Place(
                "two hosts",
                "two network namespaces, veth without a limit",
                ours("tcp"),
                TWO_HOSTS,
                rounds or 9,
                (bed[0].popen, bed[1].popen),
                (bed[0].address, bed[1].address),
            )
        )
        yield found


# --- measuring ---------------------------------------------------------------------------


@contextlib.contextmanager
def with_folder(system: System) -> Iterator[System]:
    """A folder of its own inside the one that a system of files is given."""
    if "folder" not in system.settings:
        yield system
        return
    made = tempfile.mkdtemp(prefix="thub-benchmark-", dir=system.settings["folder"])
    try:
        yield replace(system, settings={**system.settings, "folder": f"{made}/checkpoint"})
    finally:
        shutil.rmtree(made)


def against(place: Place, system: System, size: int) -> tuple[list[Figure], dict[str, Spans]]:
    """`place.rounds` rounds of ours and the other's, taking turns."""
    seen: dict[str, Spans] = {"ours": [], "right after publish": [], "other": []}
    with (
        with_folder(system) as there,
        place.pair(there, size) as other,
        place.pair(place.ours, size) as mine,
    ):

        def one(record: bool) -> list[Callable[[], None]]:
            def keep(name: str, seconds: float) -> None:
                if record:
                    seen[name].append(seconds)

            def own() -> None:
                with other.stopped():
                    keep("ours", mine.transfer())
                    keep("right after publish", mine.transfer("withdraw_and_write", "publish"))

            return [own, lambda: keep("other", other.transfer())]

        for number in range(-WARM_UPS, place.rounds):
            steps = one(record=number >= 0)
            for step in steps if number % 2 else reversed(steps):
                step()
        mine.compare()
        other.compare()
    return figures(system, seen, size), seen


def figures(system: System, seen: dict[str, Spans], size: int) -> list[Figure]:
    other = seen["other"]
    made = []
    for name in ("ours", "right after publish"):
        spread = [size / seconds / 1e9 for seconds in (max(other), min(other))]
        made.append(
            Figure(
                system.what if name == "ours" else "   ours right after publish",
                machine.median_ratio(other, seen[name]),
                "×",
                None if system.target is None or name != "ours" else (">=", system.target),
                bare=size / statistics.median(other) / 1e9,
                ours=size / statistics.median(seen[name]) / 1e9,
                detail=f"theirs {spread[0]:.2f} to {spread[1]:.2f}" if name == "ours" else "",
            )
        )
    return made


def search(place: Place, name: str, size: int) -> list[tuple[str, float | str]]:
    """GB/s with the settings as they come and with those of TRIED."""
    found: list[tuple[str, float | str]] = []
    for plain in place.systems.get(name, [])[:1]:
        tried = [plain] + [
            plain.tuned(
                what,
                settings={**plain.settings, **settings},
                environment={**plain.environment, **environment},
            )
            for what, settings, environment in TRIED.get(name, [])
        ]
        for system in tried:
            try:
                with place.pair(system, size) as pair:
                    times = [pair.transfer() for _ in range(SEARCH_ROUNDS)]
                rate: float | str = size / statistics.median(times) / 1e9
            except RemoteError as error:
                rate = str(error)
            found.append((system.what, rate))
            told = rate if isinstance(rate, str) else f"{rate:.2f} GB/s"
            print(f"  {place.key}: {system.what:<60} {told}", flush=True)
    return found


def measure(place: Place, name: str, size: int) -> dict[str, Any] | None:
    """All lines of one system at one place; None where it has no part."""
    lines: list[Figure] = []
    samples: dict[str, dict[str, Spans]] = {}
    for system in place.systems.get(name, []):
        began = time.monotonic()
        try:
            measured, seen = against(place, system, size)
        except (environments.Unavailable, RemoteError) as error:
            print(f"  {system.what}: not measured: {error}", flush=True)
            return {"about": place.about, "unavailable": str(error), "figures": []}
        for figure in measured:
            print(str(figure).replace("bare ", "other"), flush=True)
        print(f"    ({time.monotonic() - began:.0f} s, {environments.version_of(name)})")
        lines += measured
        samples[system.what] = rounded(seen)
    if not lines:
        return None
    return record(
        lines,
        samples,
        about=place.about,
        size_bytes=size,
        rounds=place.rounds,
        version=environments.version_of(name),
    )


def main() -> int:
    options = _options()
    facts = announce()
    results: dict[str, dict[str, Any]] = {}
    saved: Path | None = None
    with places(options.rounds) as found:
        for place in found:
            if place.key not in options.place:
                continue
            print(f"\n{place.key}: {place.about}, {options.size >> 20} MiB, {place.rounds} rounds")
            for name in options.search or options.only:
                if options.search:
                    search(place, name, options.size)
                    continue
                result = measure(place, name, options.size)
                if result is not None:
                    results[f"{place.key}, {name}"] = result
                    if not options.dry:  # at once: what follows may be broken off
                        saved = machine.save("single_link", facts, results)
    if saved is not None:
        draw(saved)
        print(f"\nsaved as benchmarks/results/{saved.name}, drawn as docs/images/{PICTURE.name}")
    return status(results)


def _options() -> argparse.Namespace:
    names = list(ONE_HOST)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=lambda text: int(text) << 20, default=1 << 30, help="MiB")
    parser.add_argument("--rounds", type=int, help="default: 15 on one host, 9 between two")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--place", nargs="+", default=["one host", "two hosts"])
    parser.add_argument("--search", nargs="+", choices=names, help="try settings, save nothing")
    parser.add_argument("--dry", action="store_true", help="don't save the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
