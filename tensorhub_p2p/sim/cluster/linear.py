"""Is a history linearizable? Wing and Gong's search, with Lowe's memory of what was tried.

Rules of this file. Pure search over operations and a sequential model; it knows nothing of
clusters. Sources: Wing and Gong, "Testing and verifying concurrent objects" (1993); Lowe,
"Testing for linearizability" (2017), for the memory of (what took effect, state) pairs.

Theory of operation. A history is linearizable if each operation can be given one moment
between its call and its return at which it took effect, so that in the order of these
moments the model allows each result. The search takes, again and again, one operation that
may be next: none of those left had returned before it was called. An operation that never
returned may take effect at any time after its call, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class Op:
    """One operation. `returned` is infinite if it never did; `result` means nothing then."""

    who: str
    called: float
    returned: float
    name: str
    value: object

    def __str__(self) -> str:
        return f"{self.called:9.4f} to {self.returned:9.4f}  {self.name}({self.value})  {self.who}"


Apply = Callable[[S, Op], "S | None"]
"""The model: the state after the operation, or None if it can't have that result now."""


@dataclass(frozen=True)
class Counterexample(Generic[S]):
    """The longest order that works, the state it ends in, and what can't follow it."""

    order: tuple[Op, ...]
    state: S
    stuck: tuple[Op, ...]

    def __str__(self) -> str:
        done = "\n".join(f"    {op}" for op in self.order[-8:])
        stuck = "\n".join(f"    {op}" for op in self.stuck[:8])
        return f"after\n{done}\nthe state is {self.state}, and none of these fits:\n{stuck}"


@dataclass(frozen=True)
class _Node(Generic[S]):
    """What took effect (bit i for operation i), the state, and how it came to that."""

    done: int
    state: S
    last: int
    before: _Node[S] | None


def check(history: Sequence[Op], initial: S, apply: Apply[S]) -> Counterexample[S] | None:
    """None if the history is linearizable."""
    ops = sorted(history, key=lambda op: op.called)
    completed = sum(1 << i for i, op in enumerate(ops) if op.returned < inf)
    best = start = _Node(0, initial, -1, None)
    tried, stack = {(0, initial)}, [start]
    while stack:
        node = stack.pop()
        if node.done & completed == completed:
            return None
        if (node.done & completed).bit_count() > (best.done & completed).bit_count():
            best = node
        for index in reversed(_candidates(ops, node.done)):
            state = apply(node.state, ops[index])
            done = node.done | 1 << index
            if state is not None and (done, state) not in tried:
                tried.add((done, state))
                stack.append(_Node(done, state, index, node))
    return _counterexample(ops, best)


def _candidates(ops: Sequence[Op], done: int) -> list[int]:
    """Which may be next: nothing that is left had returned before they were called."""
    found, first_return = [], inf
    for index, op in enumerate(ops):
        if done >> index & 1:
            continue
        if op.called > first_return:
            break
        found.append(index)
        first_return = min(first_return, op.returned)
    return [index for index in found if ops[index].called <= first_return]


def _counterexample(ops: Sequence[Op], node: _Node[S]) -> Counterexample[S]:
    stuck = tuple(ops[index] for index in _candidates(ops, node.done))
    order: list[Op] = []
    at: _Node[S] | None = node
    while at is not None and at.last >= 0:
        order.append(ops[at.last])
        at = at.before
    return Counterexample(tuple(reversed(order)), node.state, stuck)


def newest(state: int, op: Op) -> int | None:
    """The model of one key of versions: `whole(v)` raises the newest, `resolve` returns it."""
    assert isinstance(op.value, int)
    if op.name == "whole":
        return max(state, op.value)
    return state if op.value == state else None


def register(state: int, op: Op) -> int | None:
    """The model of one register: `read` returns what the last `write` wrote."""
    assert isinstance(op.value, int)
    if op.name == "write":
        return op.value
    return state if op.value == state else None
