"""Hosts on one machine: a network namespace each, joined by links of a bandwidth you choose.

    with Testbed(hosts=3, mbit=250) as bed:
        source = bed[0].popen([sys.executable, "worker.py"], stdin=PIPE, stdout=PIPE)

Rule of this file. It makes namespaces, links and processes in them, and takes all of it away
again. It knows nothing of the library, and touches nothing of the machine's own network.

Topology. Every host is a namespace with one interface, `eth0`, and its loopback. Its cable (a
veth pair) ends at a switch (a bridge) in a namespace of its own:

    host 0: eth0 ---- port 0 \\
    host 1: eth0 ---- port 1  switch        10.77.<bed>.1, .2, .3, ... one network
    host 2: eth0 ---- port 2 /

A limit is a token bucket (`tbf`) at both ends of a host's cable, so it holds each way: what
the host sends is limited at eth0, what it receives at the switch's port. Nothing delays or
loses packets (netem is not in every kernel). The caller talks with the processes through
pipes: the machine itself is not connected to the hosts.

A bed has a random name, so that several can stand side by side; names begin with `thub-`.
What a killed caller leaves behind, `python benchmarks/testbed.py --clean` removes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

PREFIX = "thub-"
NETWORK = "10.77"
MAX_HOSTS = 250
BURST_SECONDS = 0.004
"""What a bucket holds, in seconds at its rate: enough for the kernel's timer, and no more."""
MIN_BURST_BYTES = 64 << 10
"""A whole segment as the kernel hands it down must fit."""
QUEUE_SECONDS = 0.05
"""The longest that a packet waits for a token; beyond it, it is dropped and TCP slows down."""


class TestbedError(RuntimeError):
    """A command failed; the message is what it printed."""


def why_not() -> str | None:
    """Why there can be no testbed here, or None if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    try:
        with Testbed(hosts=1, mbit=100):
            return None
    except TestbedError as error:
        return f"this kernel lacks something: {error}"


class Host:
    """One host of a bed. Made by `Testbed`."""

    def __init__(self, bed: Testbed, index: int) -> None:
        self.index = index
        self.namespace = f"{bed.name}-{index}"
        self.address = f"{bed.network}.{index + 1}"
        self._bed = bed
        self._port = f"port{index}"

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host; it is killed with the bed. Options as of Popen's."""
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.namespace}", "--", *command], **options
        )
        self._bed.processes.append(process)
        return process

    def limit(self, mbit: float | None) -> None:
        """Bound what it sends and what it receives, each, in Mbit/s of 10^6; None: no bound."""
        for namespace, device in self._ends():
            if mbit is None:
                _run("ip", "netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root")
                continue
            rate = mbit * 1e6 / 8
            _run(
                *("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device),
                *("root", "tbf", "rate", f"{int(rate * 8)}bit"),
                *("burst", str(max(MIN_BURST_BYTES, int(rate * BURST_SECONDS)))),
                *("latency", f"{int(QUEUE_SECONDS * 1000)}ms"),
            )

    def cut(self) -> None:
        """Pull the plug: nothing comes or goes, and nobody is told."""
        _run("ip", "-n", self._bed.switch, "link", "set", self._port, "nomaster")

    def mend(self) -> None:
        """Put the plug back."""
        _run("ip", "-n", self._bed.switch, "link", "set", self._port, "master", "switch")

    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) by this host so far, headers included."""
        path = f"/sys/class/net/{self._port}/statistics"  # as seen at the other end
        files = (f"{path}/rx_bytes", f"{path}/tx_bytes")
        told = _run("ip", "netns", "exec", self._bed.switch, "cat", *files).split()
        return int(told[0]), int(told[1])

    def _ends(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.namespace, "eth0"), (self._bed.switch, self._port)

    def _plug_in(self) -> None:
        switch = self._bed.switch
        _run("ip", "netns", "add", self.namespace)
        _run(
            *("ip", "link", "add", "eth0", "netns", self.namespace, "type", "veth"),
            *("peer", "name", self._port, "netns", switch),
        )
        _run("ip", "-n", switch, "link", "set", self._port, "master", "switch", "up")
        _run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", self.namespace, "link", "set", "eth0", "up")


class Testbed:
    """Hosts, indexed from 0. `mbit` bounds every host's cable each way; None: no bound.

    Raises TestbedError (see `why_not`), after removing what it had made.
    """

    def __init__(self, hosts: int, mbit: float | None = None) -> None:
        if not 0 < hosts <= MAX_HOSTS:
            raise ValueError(f"{hosts} hosts; 1 to {MAX_HOSTS} are possible")
        number = secrets.randbelow(256)
        self.name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(2)}"
        self.network = f"{NETWORK}.{number}"
        self.switch = f"{self.name}-switch"
        self.processes: list[subprocess.Popen[Any]] = []
        """All that were started on its hosts."""
        self.hosts = [Host(self, index) for index in range(hosts)]
        try:
            _run("ip", "netns", "add", self.switch)
            _run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", "switch", "up")
            for host in self.hosts:
                host._plug_in()
                if mbit is not None:
                    host.limit(mbit)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __len__(self) -> int:
        return len(self.hosts)

    def close(self) -> None:
        """End all processes that still run here, and remove the hosts. Harmless when repeated."""
        for process in self.processes:
            process.kill()  # harmless for those that ended
        for process in self.processes:
            process.wait()
        self.processes.clear()
        for namespace in (*(host.namespace for host in self.hosts), self.switch):
            _remove(namespace)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _remove(namespace: str) -> None:
    """Its cable goes with it."""
    if os.path.exists(f"/run/netns/{namespace}"):
        _run("ip", "netns", "delete", namespace)


def clean() -> list[str]:
    """Remove the namespaces of beds whose caller is gone; returns their names."""
    left = []
    for name in sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []:
        caller = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not os.path.exists(f"/proc/{caller}"):
            _remove(name)
            left.append(name)
    return left


if __name__ == "__main__":
    if sys.argv[1:] == ["--clean"]:
        print("\n".join(clean()) or "nothing was left")
    else:
        print(why_not() or "a testbed can be had here")
