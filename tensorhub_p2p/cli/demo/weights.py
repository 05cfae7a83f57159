"""One half of the policy, published or replicated through the library.

This is all the demo's workers do with tensorhub_p2p. The checksums are taken here,
over the tensors' bytes and outside the library, so that a wrong byte can't hide behind
a mistake in the library's own digests.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from types import TracebackType

import xxhash
from torch import Tensor, nn

import tensorhub_p2p as th
from tensorhub_p2p.cli.demo.plan import MODEL, SHARDS, Plan
from tensorhub_p2p.cli.demo.reports import Join, Published, Pulled


class Weights:
    """A peer with one handle: the shard `shard` of `replica`, and the tensors of `half`."""

    def __init__(
        self,
        plan: Plan,
        half: nn.Module,
        name: str,
        replica: str,
        shard: int,
        join: Join,
    ) -> None:
        self._half = half
        self._patience = plan.patience
        self.peer = th.Peer(
            cluster=join.cluster,
            seeds=list(join.seeds),
            secret=join.secret,
            name=name,
            transports=list(join.transports) or None,
            join_timeout=plan.patience,
        )
        self._handle = self.peer.open(
            MODEL, replica=replica, shard=shard, num_shards=SHARDS, timeout=plan.patience
        )
        self._handle.register(half)

    def publish(self, version: int) -> Published:
        started = time.perf_counter()
        self._handle.publish(version, timeout=self._patience)
        seconds = time.perf_counter() - started
        return Published(version, num_bytes(self._half), seconds, checksum(self._half))

    def unpublish(self) -> None:
        self._handle.unpublish(timeout=self._patience)

    def replicate(self) -> Pulled:
        pull = self._handle.replicate("latest", timeout=self._patience)
        return Pulled(
            version=pull.version,
            bytes=pull.bytes,
            seconds=pull.seconds,
            moving=pull.moving,
            sources={s.name: s.bytes for s in pull.sources if s.bytes},
            transports=sorted({s.transport for s in pull.sources if s.bytes}),
            retried=pull.retried,
            checksum=checksum(self._half),
        )

    def wait_for_newer(self, version: int) -> None:
        self._handle.wait_for(newer_than=version, timeout=self._patience)

    def __enter__(self) -> Weights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.close()
        self.peer.close()


def tensors(half: nn.Module) -> Iterator[Tensor]:
    return iter(half.state_dict().values())


def num_bytes(half: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(half))


def checksum(half: nn.Module) -> str:
    """xxh3 over all bytes of all tensors in order."""
    digest = xxhash.xxh3_128()
    for tensor in tensors(half):
        size = tensor.numel() * tensor.element_size()
        digest.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
    return digest.hexdigest()
