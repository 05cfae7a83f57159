"""`tensorhub-p2p doctor`: which transports work on this machine, and why the others don't.

No guessing: a second process publishes known bytes, and this one pulls them over each
transport in turn and compares. Everything stays on loopback.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import typer
from rich.console import Console
from rich.table import Table

import tensorhub_p2p as th
from tensorhub_p2p.cli import joining
from tensorhub_p2p.runtime.driver import TRANSPORTS
from tensorhub_p2p.transfer import huge_pages

TEST_BYTES = 64 << 20
PATIENCE = 30.0
"""Seconds for everything that is tried."""
MODEL = "doctor"


@dataclass(frozen=True)
class Finding:
    transport: str
    works: bool
    detail: str
    gigabytes_per_second: float = 0.0


def doctor(as_json: joining.AsJson = False) -> None:
    """Pull known bytes from a second process over each transport, and compare them.

    Exits with 1 if no transport works.
    """
    with _source() as (address, cluster, secret):
        findings = [_try(name, address, cluster, secret) for name in TRANSPORTS]
    machine = _machine()
    if as_json:
        print(json.dumps({"machine": machine, "transports": [asdict(f) for f in findings]}))
    else:
        _show(machine, findings)
    if not any(finding.works for finding in findings):
        raise typer.Exit(1)


def _test_bytes() -> dict[str, object]:
    import torch

    generator = torch.Generator().manual_seed(1)
    size = (TEST_BYTES,)
    return {"bytes": torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)}


@contextmanager
def _source() -> Iterator[tuple[str, str, str]]:
    """The other process, publishing; gives address, cluster and secret."""
    cluster, secret = f"doctor-{secrets.token_hex(4)}", th.keygen()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_publish, args=(cluster, secret, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE):
            raise th.Timeout(f"the test's second process did not publish within {PATIENCE} s")
        try:
            address = ours.recv()
        except EOFError as error:
            raise th.TransferError("the test's second process failed; see above") from error
        yield address, cluster, secret
    finally:
        ours.close()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()


def _publish(cluster: str, secret: str, pipe: Connection) -> None:
    """Entry point of the second process: serves until the pipe closes."""
    with th.Peer(cluster, bind="127.0.0.1:0", secret=secret, name="doctor's source") as peer:
        handle = peer.open(MODEL)
        handle.register(_test_bytes())
        handle.publish(1)
        pipe.send(peer.address)
        pipe.poll(10 * PATIENCE)


def _try(name: str, address: str, cluster: str, secret: str) -> Finding:
    import torch

    expected = _test_bytes()["bytes"]
    into = torch.zeros(TEST_BYTES, dtype=torch.uint8)
    try:
        with th.Peer(
            cluster, [address], bind="127.0.0.1:0", secret=secret, transports=[name], name="doctor"
        ) as peer:
            handle = peer.open(MODEL)
            handle.register({"bytes": into})
            pull = handle.replicate(1, timeout=PATIENCE)
    except th.TensorHubError as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")
    if not torch.equal(into, expected):  # type: ignore[arg-type]
        return Finding(name, False, "the bytes that arrived are not those that were published")
    encrypted = ", encrypted" if name == "tcp" else ""
    detail = f"{pull.bytes >> 20} MiB pulled and compared{encrypted}"
    return Finding(name, True, detail, round(pull.gigabytes_per_second, 2))


def _machine() -> dict[str, object]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{sys.platform} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "ptrace_scope": _first_line("/proc/sys/kernel/yama/ptrace_scope"),
        "huge_pages": huge_pages.unavailable() or "asked for behind large tensors",
    }


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"


def _show(machine: dict[str, object], findings: list[Finding]) -> None:
    console = Console()
    console.print(", ".join(f"{k} {v}" for k, v in machine.items()), highlight=False, markup=False)
    table = Table("transport", "works", "GB/s", "detail")
    for finding in findings:
        works = "[green]yes[/]" if finding.works else "[red]no[/]"
        rate = f"{finding.gigabytes_per_second:.2f}" if finding.works else ""
        table.add_row(finding.transport, works, rate, finding.detail)
    console.print(table)
