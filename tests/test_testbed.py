"""benchmarks/testbed.py: hosts reach each other, limits hold, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
with connection:
    while connection.recv(1 << 20):
        pass
print("all came", flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    started = time.monotonic()
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - started, flush=True)
"""


@pytest.fixture
def testbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = __import__("testbed")
    reason = module.why_not()
    if reason is not None:
        pytest.skip(f"no testbed here: {reason}")
    yield module
    del sys.modules["testbed"]


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def test_hosts_reach_each_other_and_a_limit_holds(testbed: ModuleType) -> None:
    with testbed.Testbed(hosts=2, mbit=80) as bed:
        receiver = bed[1].popen(python(LISTEN, bed[1].address), stdout=subprocess.PIPE, text=True)
        port = receiver.stdout.readline().strip()
        size = 4_000_000
        sender = bed[0].popen(
            python(SEND, bed[1].address, port, str(size)), stdout=subprocess.PIPE, text=True
        )
        took = float(sender.communicate(timeout=30)[0])
        assert receiver.communicate(timeout=30)[0] == "all came\n"
        assert bed[0].traffic()[0] >= size
        assert bed[1].traffic()[1] >= size
    # 0.4 s at the limit, but for what the buckets held. A lower bound: no load can fake it.
    assert took > 0.3


def test_a_cut_host_is_not_reached_until_it_is_mended(testbed: ModuleType) -> None:
    with testbed.Testbed(hosts=2) as bed:
        receiver = bed[1].popen(python(LISTEN, bed[1].address), stdout=subprocess.PIPE, text=True)
        port = receiver.stdout.readline().strip()
        bed[1].cut()
        before = bed[1].traffic()[1]
        sender = bed[0].popen(
            python(SEND, bed[1].address, port, "1000"), stdout=subprocess.PIPE, text=True
        )
        with pytest.raises(subprocess.TimeoutExpired):
            sender.communicate(timeout=0.5)
        assert bed[1].traffic()[1] < before + 1000  # what it hears of the switch itself
        bed[1].mend()
        assert float(sender.communicate(timeout=30)[0]) > 0


def test_nothing_is_left_behind(testbed: ModuleType) -> None:
    with testbed.Testbed(hosts=2, mbit=100) as bed:
        process = bed[0].popen(["sleep", "60"])
        names = [bed.switch, *(host.namespace for host in bed.hosts)]
        assert all(os.path.exists(f"/run/netns/{name}") for name in names)
    assert process.returncode is not None
    assert not any(os.path.exists(f"/run/netns/{name}") for name in names)


def test_what_a_dead_caller_left_is_cleaned_up(testbed: ModuleType) -> None:
    left = subprocess.run(
        python(
            "import os, testbed\n"
            "bed = testbed.Testbed(hosts=1)\n"
            "print(bed.switch, bed[0].namespace, flush=True)\n"
            "os._exit(1)"
        ),
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert all(os.path.exists(f"/run/netns/{name}") for name in left)
    assert set(left) <= set(testbed.clean())
    assert not any(os.path.exists(f"/run/netns/{name}") for name in left)
