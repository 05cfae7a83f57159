"""`tensorhub-p2p doctor`: which transports work on this machine, and why the others don't.

No guessing: a second process publishes known bytes, and this one pulls them over each
transport in turn and compares. Everything stays on loopback. Beside that it tells what
the machine allows, and what would help.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tensorhub_p2p as th
from tensorhub_p2p.cli import joining
from tensorhub_p2p.config import TRANSPORTS
from tensorhub_p2p.transfer import huge_pages, native_loops
from tensorhub_p2p.transfer.transports.base import Transport
from tensorhub_p2p.transfer.transports.cma import CmaTransport
from tensorhub_p2p.transfer.transports.nixl import NixlTransport
from tensorhub_p2p.transfer.transports.optional import rdma_devices
from tensorhub_p2p.transfer.transports.ucx import UcxTransport

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
    troubles = {name: trouble(name) for name in TRANSPORTS}
    usable = [name for name, why_not in troubles.items() if why_not is None]
    with _source(usable) as (address, cluster, secret):
        findings = [
            _try(name, address, cluster, secret)
            if why_not is None
            else Finding(name, False, why_not)
            for name, why_not in troubles.items()
        ]
    machine = _machine()
    advice = list(_advice(machine, findings))
    if as_json:
        report = [asdict(finding) for finding in findings]
        print(json.dumps({"machine": machine, "transports": report, "advice": advice}))
    else:
        _show(machine, findings, advice)
    if not any(finding.works for finding in findings):
        raise typer.Exit(1)


def trouble(name: str) -> str | None:
    """Why this transport can't even be tried here."""
    transport: Transport
    if name == "cma":
        transport = CmaTransport()
    elif name == "nixl":
        transport = NixlTransport()
    elif name == "ucx":
        transport = UcxTransport()
    else:
        return None
    with closing(transport):
        return transport.unavailable()


def _test_bytes() -> dict[str, object]:
    import torch

    generator = torch.Generator().manual_seed(1)
    size = (TEST_BYTES,)
    return {"bytes": torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)}


@contextmanager
def _source(transports: list[str]) -> Iterator[tuple[str, str, str]]:
    """The other process, publishing over these; gives address, cluster and secret."""
    cluster, secret = f"doctor-{secrets.token_hex(4)}", th.keygen()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_publish, args=(cluster, secret, transports, theirs), daemon=True
    )
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


def _publish(cluster: str, secret: str, transports: list[str], pipe: Connection) -> None:
    """Entry point of the second process: serves until the pipe closes."""
    with th.Peer(
        cluster,
        bind="127.0.0.1:0",
        secret=secret,
        name="doctor's source",
        transports=transports,
    ) as peer:
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
    encrypted = {"tcp": ", encrypted", "cma": ""}.get(name, ", not encrypted")
    detail = f"{pull.bytes >> 20} MiB pulled and compared{encrypted}"
    return Finding(name, True, detail, round(pull.gigabytes_per_second, 2))


def _machine() -> dict[str, object]:
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{sys.platform} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "rdma_devices": rdma_devices(),
        "ptrace_scope": _first_line("/proc/sys/kernel/yama/ptrace_scope"),
        "huge_pages": huge_pages.unavailable() or "asked for behind large tensors",
        "native_loops": native_loops.why_not or "built",
        "locked_memory_bytes": _locked_memory(),
        "shm_bytes": _size_of("/dev/shm"),
    }


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return "unknown"


def _locked_memory() -> int | None:
    """How much this process may pin; None is without limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _size_of(path: str) -> int:
    try:
        facts = os.statvfs(path)
    except OSError:
        return 0
    return facts.f_frsize * facts.f_blocks


def _advice(machine: dict[str, object], findings: list[Finding]) -> Iterator[str]:
    """What to do about what was found."""
    works = {finding.transport: finding.works for finding in findings}
    if not works["cma"]:
        yield (
            f"cma: processes may not read each other here (ptrace_scope is "
            f"{machine['ptrace_scope']}): set kernel.yama.ptrace_scope to 0 or 1; in a container, "
            "allow process_vm_readv (--cap-add SYS_PTRACE) and share the pid namespace"
        )
    if "switched off" in str(machine["huge_pages"]):
        yield (
            "huge pages are off, which makes reads of large tensors slower: write madvise to "
            "/sys/kernel/mm/transparent_hugepage/enabled"
        )
    if machine["native_loops"] != "built":
        yield (
            "what is read over cma and tcp is hashed by loops in Python, which are slower "
            f"({machine['native_loops']}): install this package again where there is a C compiler"
        )
    if machine["rdma_devices"]:
        if not (works["nixl"] or works["ucx"]):
            yield "there is an RDMA device, but neither nixl nor ucx works: see their details above"
        if machine["locked_memory_bytes"] is not None:
            yield (
                f"RDMA pins memory, and this process may pin {machine['locked_memory_bytes']} "
                "bytes: ulimit -l unlimited"
            )
    else:
        yield (
            "there is no RDMA device: nixl and ucx are used only where they are named in "
            "`transports`, and are not faster than cma and tcp"
        )


def _show(machine: dict[str, object], findings: list[Finding], advice: list[str]) -> None:
    console = Console()
    console.print(", ".join(f"{k} {v}" for k, v in machine.items()), highlight=False, markup=False)
    table = Table("transport", "works", "GB/s", "detail")
    for finding in findings:
        works = "[green]yes[/]" if finding.works else "[red]no[/]"
        rate = f"{finding.gigabytes_per_second:.2f}" if finding.works else ""
        table.add_row(finding.transport, works, rate, escape(finding.detail))
    console.print(table)
    for line in advice:
        console.print(f"- {line}", highlight=False, markup=False)
