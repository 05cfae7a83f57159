"""How fast one pull over TCP is, beside iperf3 and bare sockets in the same run.

    python benchmarks/tcp_link.py                          everything, about five minutes
    python benchmarks/tcp_link.py --only plain --size 256M --rounds 3

`plain` and `tls` run between two hosts (testbed.py: a network namespace each, joined by cables
without a limit), so that all bytes cross a network device, `loopback` between two processes of
one host. Both ends have two streams, whoever measures. In each round the source writes new
bytes before each measurement, all kinds take turns at being first, and ratios are taken within
the round; reported are medians of the ratios. The memory of bare sockets is of the same
allocator, size and pages (huge ones) as what is pulled, and touched before.

- ours, the whole call: `replicate` as its caller sees it, every chunk verified; and while bytes
  move, the same without finding a source and announcing.
- bare: one `sendall` and `recv_into` a stream into equal memory, no digests. In `tls` through
  Python's ssl, TLS 1.3, with our certificate.
- bare that hash: the same with an xxh3 digest, step by step, as ours has to take it.
- iperf3: `--parallel 2`, the same number of bytes, what its receiver says.

Results: benchmarks/results/tcp_link.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bare
from figures import Figure, Measured, Rounds, case_options, run_documented, skipped
from pull import Pair
from testbed import Host, Testbed, why_not
from worker import Remote

import tensorhub_p2p as th

SECRET = "a secret for the benchmark"
IPERF_PORT = 5201
CONFIG = th.Config(tcp=th.TcpConfig(max_streams=bare.STREAMS))
"""Ours may have as many streams as the others."""


def iperf3(source: Host, target: Host, size: int) -> float:
    """Seconds that iperf3 takes for `size` bytes from one host to the other."""
    command = ["iperf3", "--server", "--one-off", "--forceflush", "--port", str(IPERF_PORT)]
    server = target.popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        if server.poll() is not None:
            raise RuntimeError("iperf3 does not listen")
    ask = ["--client", target.address, "--port", str(IPERF_PORT), "--parallel", str(bare.STREAMS)]
    client = source.popen(
        ["iperf3", *ask, "--bytes", str(size), "--json"], stdout=subprocess.PIPE, text=True
    )
    told = json.loads(client.communicate()[0])
    server.communicate()
    if "error" in told:
        raise RuntimeError(f"iperf3: {told['error']}")
    return size / (told["end"]["sum_received"]["bits_per_second"] / 8)


def pair_of(source: Remote, target: Remote, size: int) -> Pair:
    """What is pulled, and bare memory of the same kind: huge pages where ours has them."""
    pair = Pair(source, target, size)
    for worker in (source, target):
        worker.bare_huge_pages()
        worker.wait_for_huge_pages()
    return pair


@contextmanager
def between_two_hosts(**options: Any) -> Iterator[tuple[Testbed, Remote, Remote]]:
    """A source and a puller, each on a host of its own."""
    with Testbed(hosts=2) as bed:
        workers: list[Remote] = []
        try:
            seeds: list[str] = []
            for host in bed.hosts:
                here = {"bind": f"{host.address}:0", "namespace": host.namespace, "config": CONFIG}
                workers.append(Remote(host.namespace, seeds, here | options))
                seeds = seeds or [workers[0].address()]
            while workers[1].members() < len(workers):
                time.sleep(0.02)
            yield bed, workers[0], workers[1]
        finally:
            for worker in workers:
                worker.end()


def bare_streams(pair: Pair, hashed: bool = False) -> float:
    """Seconds that bare streams take for new bytes."""
    pair.source.write("bare")
    return float(pair.target.bare_receive(hashed)["seconds"])


def rounds_of(pair: Pair, count: int, others: dict[str, Callable[[], float]]) -> Rounds:
    """Ours and the others, in an order that turns from round to round. The first is dropped."""
    seen = Rounds()
    steps = ["pull", *others]
    for number in range(-1, count):
        into = Rounds() if number < 0 else seen
        at = number % len(steps)
        for name in steps[at:] + steps[:at]:
            if name == "pull":
                into.add_pull("pull", pair.pull())
            else:
                into.add(name, others[name]())
    pair.compare("flat", "bare")
    return seen


def figures(seen: Rounds, size: int, name: str, against: dict[str, float | None]) -> list[Figure]:
    """Ratios to each of the others, of the whole call and while bytes move."""
    found = []
    for other, bound in against.items():
        target = None if bound is None else (">=", bound)
        for which, what in (("pull", "the whole call"), ("pull moving", "while bytes move")):
            told, wanted = f"{name}, {what}, against {other}", target if which == "pull" else None
            found.append(seen.against(other, told, which, size, wanted, unit=f"of {other}"))
    return found


def plain(options: argparse.Namespace) -> Measured:
    """Between two hosts, in the clear."""
    with between_two_hosts(transports=["tcp"], insecure=True) as (bed, source, target):
        pair = pair_of(source, target, options.size)
        source_at = bed[0].address
        target.bare_target(source.bare_source(source_at), source_at)
        others: dict[str, Callable[[], float]] = {
            "bare sockets": lambda: bare_streams(pair),
            "bare that hash": lambda: bare_streams(pair, True),
        }
        targets: dict[str, float | None] = {"bare sockets": 0.85, "bare that hash": None}
        if shutil.which("iperf3"):
            others["iperf3"] = lambda: iperf3(bed[0], bed[1], options.size)
            targets["iperf3"] = 0.75
        else:
            print("iperf3 not found: install Debian's iperf3 to have it measured")
        seen = rounds_of(pair, options.rounds, others)
    return figures(seen, options.size, "two hosts", targets), seen


def tls(options: argparse.Namespace) -> Measured:
    """Between two hosts, in TLS 1.3."""
    with between_two_hosts(transports=["tcp"], secret=SECRET) as (bed, source, target):
        pair = pair_of(source, target, options.size)
        source_at = bed[0].address
        target.bare_target(source.bare_source(source_at, SECRET), source_at, SECRET)
        others = {"bare TLS": lambda: bare_streams(pair)}
        seen = rounds_of(pair, options.rounds, others)
    return figures(seen, options.size, "two hosts, TLS", {"bare TLS": 0.85}), seen


def loopback(options: argparse.Namespace) -> Measured:
    """Between two processes of one host, in the clear."""
    with Testbed(hosts=1) as bed:
        workers: list[Remote] = []
        try:
            seeds: list[str] = []
            for name in ("source", "target"):
                here = {"namespace": bed[0].namespace, "transports": ["tcp"], "config": CONFIG}
                workers.append(Remote(name, seeds, here))
                seeds = seeds or [workers[0].address()]
            while workers[1].members() < len(workers):
                time.sleep(0.02)
            source, target = workers
            pair = pair_of(source, target, options.size)
            target.bare_target(source.bare_source())
            others = {
                "bare sockets": lambda: bare_streams(pair),
                "bare that hash": lambda: bare_streams(pair, True),
            }
            seen = rounds_of(pair, options.rounds, others)
        finally:
            for worker in workers:
                worker.end()
    return figures(
        seen, options.size, "loopback", {"bare sockets": 0.75, "bare that hash": None}
    ), seen


CASES = {"plain": plain, "tls": tls, "loopback": loopback}


def main() -> int:
    options = case_options(__doc__, CASES, size=1 << 30)
    if skipped(why_not()):
        return 0
    return run_documented("tcp_link", options, CASES)


if __name__ == "__main__":
    sys.exit(main())
