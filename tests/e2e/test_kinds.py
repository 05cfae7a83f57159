"""Every kind of tensor, from a publisher over a first puller to a second one.

Each kind is a function that makes the tensors of one side from a source of noise; `where`
says which side: where a kind may lie differently on both sides, it does. The second puller
gets everything from the first one, so what arrived is also what is served on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import tensorhub_p2p as th
from tensorhub_p2p.cli.doctor import trouble
from tensorhub_p2p.config import TRANSPORTS

StartPeer = Callable[..., th.Peer]
PUBLISHER, FIRST, SECOND = range(3)

# What torch has of types: all but those of quantised tensors, which are refused.
DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and not str(found).startswith("torch.q")
}


class Noise:
    """Random bytes, others at each side."""

    def __init__(self, where: int) -> None:
        self.where = where
        self._draw = torch.Generator().manual_seed(where)

    def bytes(self, count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), generator=self._draw, dtype=torch.uint8)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._draw)


class Named(torch.nn.Parameter):
    """As libraries make them: a parameter that knows more of itself."""

    loader = "some function"


class Strict(torch.Tensor):
    """A subclass that sees every call of torch on it."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def leaf(noise: Noise) -> torch.Tensor:
    parameter = torch.nn.Parameter(noise(20, 30))
    (parameter * 2).sum().backward()
    return parameter


def inference(noise: Noise) -> torch.Tensor:
    with torch.inference_mode():
        return noise(20, 30) + 1


def fused(noise: Noise) -> dict[str, torch.Tensor]:
    """A fused weight, parts of it as views, rows and columns; each side begins with another."""
    qkv = noise(12, 40)
    parts = {"qkv": qkv, "q": qkv[:4], "kv": qkv[2:], "half": qkv[:, 8:20], "t": qkv.t()}
    return parts if noise.where == PUBLISHER else dict(reversed(parts.items()))


def chain(noise: Noise) -> dict[str, torch.Tensor]:
    """Each overlaps the next one, none has all."""
    memory = noise(100)
    return {"low": memory[:40], "middle": memory[30:70], "high": memory[60:]}


def columns(noise: Noise) -> dict[str, torch.Tensor]:
    """Columns of one matrix at the pullers, tensors of their own at the publisher."""
    if noise.where == PUBLISHER:
        return {"q": noise(50, 64), "k": noise(50, 32)}
    matrix = torch.full((50, 100), 7.0)
    return {"q": matrix[:, :64], "k": matrix[:, 64:96]}


KINDS: dict[str, Callable[[Noise], Any]] = {
    **{
        f"dtype {name}": lambda n, t=dtype: n.bytes(96).view(t)
        for name, dtype in DTYPES.items()
        if dtype is not torch.bool
    },
    "bool": lambda n: n(99) > 0,
    "empty": lambda n: torch.empty(0),
    "also empty": lambda n: torch.empty(3, 0, 2, dtype=torch.bfloat16),
    "scalar": lambda n: n(1)[0].clone(),
    "int4 packed": lambda n: n.bytes(32).reshape(4, 8),
    "transposed": lambda n: n(40, 60).t(),
    "channels last": lambda n: n(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
    "other order": lambda n: n(30, 20).t() if n.where == FIRST else n(20, 30),
    "heads first": lambda n: n(9, 4, 16) if n.where else n(4, 9, 16).transpose(0, 1),
    "view": lambda n: n(64)[8:24],
    "view at an odd byte": lambda n: n.bytes(64)[5:17],
    "every third row": lambda n: n(60, 10)[::3] if n.where else n(20, 10),
    "one column": lambda n: n(50, 6)[:, 2],
    "columns": columns,
    "many chunks": lambda n: n(700, 900)[:, 100:] if n.where else n(700, 800),
    "tied": lambda n: {"a": (w := n(30, 7)), "b": w, "flat": w.view(-1), "turned": w.t()},
    "fused": fused,
    "chain": chain,
    "expanded": lambda n: n(8).expand(5, 8),
    "expanded scalar": lambda n: n(1).expand(3, 4),
    "expanded and not": lambda n: {"rows": (w := n(8)).expand(5, 8), "row": w},
    "windows": lambda n: n(20).unfold(0, 4, 1),
    "complex part": lambda n: torch.view_as_real(torch.complex(n(9), n(9)))[:, 1],
    "inference": inference,
    "leaf with a gradient": leaf,
    "computed": lambda n: torch.nn.Parameter(n(6, 6)) * 2,
    "parameter subclass": lambda n: Named(n(6, 6)),
    "tensor subclass": lambda n: n(6, 6).as_subclass(Strict),
    "shared between processes": lambda n: n(10, 10).share_memory_(),
    "array": lambda n: n(5, 6).numpy(),
    "array, column-major": lambda n: numpy.asfortranarray(n(5, 6).numpy()),
    "array, columns": lambda n: n(5, 6).numpy()[:, 1:4],
}


def zoo(where: int) -> dict[str, Any]:
    noise, found = Noise(where), {}
    for kind, make in KINDS.items():
        made = make(noise)
        parts = made if isinstance(made, dict) else {"": made}
        found.update({f"{kind}.{part}": tensor for part, tensor in parts.items()})
    return found


def values(tensor: Any) -> bytes:
    """The elements' bytes, row-major; also of types that torch can't copy."""
    if isinstance(tensor, numpy.ndarray):
        return tensor.tobytes()
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


class Before:
    """What must be as it was: where tensors lie, and what autograd knows of them."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        self._known = self._look()
        self._versions = self._count()
        self._grads = {n: t.grad.clone() for n, t in self._tensors.items() if self._has_grad(t)}

    def _look(self) -> dict[str, Any]:
        return {
            name: (t.data_ptr(), t.shape, t.stride(), t.requires_grad, t.is_leaf, t.grad_fn)
            for name, t in self._tensors.items()
        }

    def _count(self) -> dict[str, int]:
        return {n: t._version for n, t in self._tensors.items() if not t.is_inference()}

    @staticmethod
    def _has_grad(tensor: torch.Tensor) -> bool:
        return tensor.is_leaf and tensor.grad is not None

    def check(self) -> None:
        assert self._look() == self._known
        versions = self._count()
        assert all(versions[name] > before for name, before in self._versions.items())
        assert self._grads
        for name, grad in self._grads.items():
            assert torch.equal(self._tensors[name].grad, grad)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_kind_arrives_and_is_served_on(peer: StartPeer, transport: str) -> None:
    reason = trouble(transport)
    if reason is not None:
        pytest.skip(reason)
    first = peer(transports=[transport])
    peers = [first, peer(transports=[transport]), peer(transports=[transport])]
    handles = [member.open("m", replica=f"r{i}") for i, member in enumerate(peers)]
    tensors = [zoo(where) for where in range(3)]
    for handle, mine in zip(handles, tensors, strict=True):
        handle.register(mine)
    handles[PUBLISHER].publish(1)
    expected = {name: values(tensor) for name, tensor in tensors[PUBLISHER].items()}
    for where in (FIRST, SECOND):
        before = Before(tensors[where])
        pull = handles[where].replicate(1, timeout=30)
        assert pull.retried == 0
        found = {name: values(tensor) for name, tensor in tensors[where].items()}
        assert [name for name in expected if found[name] != expected[name]] == []
        before.check()
        if where == FIRST:
            handles[PUBLISHER].unpublish()
    matrix = tensors[FIRST]["columns.q"]._base
    assert bool((matrix[:, 96:] == 7).all()), "what lies in the gaps is not ours to write"


STORAGE = torch.zeros(6, 8)


MISFITS: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]] = {
    "apart": (
        {"qkv": STORAGE, "q": STORAGE[:2]},
        {"qkv": torch.zeros(6, 8), "q": torch.zeros(2, 8)},
        "'q' shares the storage of 'qkv' there, but not here",
    ),
    "elsewhere": (
        {"qkv": STORAGE, "q": STORAGE[:2]},
        {"qkv": STORAGE, "q": STORAGE[1:3]},
        "'q' begins 32 bytes into the storage that it shares here, 0 there",
    ),
    "expanded": (
        {"row": torch.zeros(8).expand(4, 8)},
        {"row": torch.zeros(4, 8)},
        r"'row' is float32\[4, 8\] here, float32\[4, 8\] with strides \[0, 1\] there",
    ),
    "too many pieces": (
        {"w": torch.zeros(1025, 1024)},
        {"w": torch.zeros(1024, 1025).t()},
        r"another order in memory.*publisher's strides.*'w'.*with strides \[1, 1025\] here",
    ),
}


def test_memory_that_lies_in_another_way_is_a_mismatch_that_says_so(peer: StartPeer) -> None:
    trainers, rollouts = peer(), peer()
    for kind, (theirs, mine, said) in MISFITS.items():
        trainer, rollout = trainers.open(kind), rollouts.open(kind)
        trainer.register(theirs)
        rollout.register(mine)
        trainer.publish(1)
        with pytest.raises(th.LayoutMismatch, match=f"(?s){said}"):
            rollout.replicate("latest", timeout=10)
        assert rollout.state is th.HandleState.REGISTERED
