"""Two handles of two peers, called in any order, beside a model of what must come of it.

The model knows the table of states (handle.py), which versions were published, and which
are held by whom. Where the outcome depends on what else the cluster still keeps, it
admits both, but nothing else: an error is one of the library's, says what to do if
the call didn't fit, and leaves a handle that can be used.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tensorhub_p2p as th
from tensorhub_p2p.handle import NEEDS, UNREGISTER_FIRST

OPEN, REGISTERED, PUBLISHED = (
    th.HandleState.OPEN,
    th.HandleState.REGISTERED,
    th.HandleState.PUBLISHED,
)
TORN, CLOSED = th.HandleState.TORN, th.HandleState.CLOSED
FITS = {
    "register": {OPEN},
    "unregister": {REGISTERED, TORN},
    "publish": {REGISTERED, TORN},
    "unpublish": {PUBLISHED},
    "replicate": {REGISTERED, PUBLISHED, TORN},
    "wait_for": {OPEN, REGISTERED, PUBLISHED, TORN},
    "retract": {OPEN, REGISTERED, PUBLISHED, TORN},
}
"""The table of handle.py, written down once more."""
SHORT = 0.1
"""Seconds for calls that may have nothing to find: of five hundred calls many wait so long."""
ENOUGH = 30.0
"""Seconds for calls that must succeed, on the busiest machine."""
Order = tuple[int, int]
"""(epoch, version)."""
models = itertools.count()
who = st.sampled_from(["a", "b"])
numbers = st.integers(0, 6)


class Side:
    """One handle, and what the model says of it."""

    def __init__(self, peer: th.Peer, model: str, replica: str) -> None:
        self.peer, self.model, self.replica = peer, model, replica
        self.tensor = numpy.zeros(100, dtype=numpy.uint8)
        self.floor: Order = (-1, -1)
        self.latest: Order = (-1, -1)
        """The highest that this replica published."""
        self.open(retains=False)

    def open(self, *, retains: bool) -> None:
        retain = th.newest(2) if retains else None
        self.handle = self.peer.open(
            self.model, replica=self.replica, retain=retain, timeout=ENOUGH
        )
        self.retains = retains
        self.state = OPEN
        self.holds: Order | None = None

    def fits(self, verb: str) -> bool:
        return self.state in FITS[verb]


class Handles(RuleBasedStateMachine):
    peers: ClassVar[tuple[th.Peer, th.Peer]]

    def __init__(self) -> None:
        super().__init__()
        model = f"model-{next(models)}"
        a, b = self.peers
        self.sides = {"a": Side(a, model, "a"), "b": Side(b, model, "b")}
        self.published: set[Order] = set()
        self.retracted: set[Order] = set()
        self.retained: set[Order] = set()
        """What was published while somebody retained the newest two, and was not given up."""

    def teardown(self) -> None:
        for side in self.sides.values():
            side.handle.close(5)

    # --- what the model knows ------------------------------------------------------------

    def other(self, name: str) -> Side:
        return self.sides["b" if name == "a" else "a"]

    def held(self) -> set[Order]:
        """What somebody certainly holds, and everybody may have."""
        held = {side.holds for side in self.sides.values() if side.holds is not None}
        return (held | set(sorted(self.retained)[-1:])) - self.retracted

    def misfit(self, side: Side, verb: str, call: Callable[[], object]) -> None:
        """The call doesn't fit: the error says which one is missing, and nothing changes."""
        with pytest.raises(th.StateError) as caught:
            call()
        needs = NEEDS[side.state]
        if verb == "register":
            needs = UNREGISTER_FIRST.get(side.state, needs)
        assert f"{verb}()" in str(caught.value)
        assert needs in str(caught.value)

    def outcome(self, call: Callable[[], Any], *admitted: type[Exception]) -> Any:
        """What the call returned, or the error, which has to be one of these."""
        try:
            return call()
        except (th.GroupBroken, *admitted) as error:  # the former: a call was ended before
            return error

    # --- verbs ---------------------------------------------------------------------------

    @rule(name=who)
    def register(self, name: str) -> None:
        side = self.sides[name]
        if not side.fits("register"):
            self.misfit(side, "register", lambda: side.handle.register({"w": side.tensor}))
            return
        side.handle.register({"w": side.tensor})
        side.state = REGISTERED

    @rule(name=who)
    def unregister(self, name: str) -> None:
        side = self.sides[name]
        if not side.fits("unregister"):
            self.misfit(side, "unregister", side.handle.unregister)
            return
        side.handle.unregister()
        side.state = OPEN

    @rule(name=who, version=numbers, rewind=st.booleans())
    def publish(self, name: str, version: int, rewind: bool) -> None:
        side = self.sides[name]

        def call() -> object:
            return side.handle.publish(version, rewind=rewind, timeout=ENOUGH)

        if not side.fits("publish"):
            self.misfit(side, "publish", call)
            return
        side.tensor[:] = version
        highest = max(self.published, default=(-1, -1))
        result = self.outcome(call, th.VersionConflict)
        if result is not None:
            # A generation counts epochs from what it knew: one that another replica began
            # later may be in the way.
            known = highest[0] <= max(0, side.latest[0])
            rises = known and (rewind or version > highest[1])
            assert isinstance(result, th.GroupBroken) or not rises, result
            return
        assert side.handle._tenure.holds is not None
        side.holds = side.handle._tenure.holds.order
        assert side.holds[1] == version
        assert side.holds not in self.retracted
        below = {order for order in self.held() if order > side.holds}
        assert not below, f"{side.holds} was published below {below}"
        assert not rewind or side.holds[0] > side.latest[0]
        side.latest = max(side.latest, side.holds)
        self.published.add(side.holds)
        if any(other.retains for other in self.sides.values()):
            self.retained.add(side.holds)
        side.state = PUBLISHED

    @rule(name=who, force=st.booleans())
    def unpublish(self, name: str, force: bool) -> None:
        side = self.sides[name]

        def call() -> object:
            return side.handle.unpublish(ENOUGH, force=force)

        if not side.fits("unpublish"):
            self.misfit(side, "unpublish", call)
            return
        call()
        if force and side.holds is not None:
            self.retained.discard(side.holds)
        side.state, side.holds = REGISTERED, None

    @rule(name=who, selector=st.one_of(numbers, st.just("latest"), st.just("latest-1")))
    def replicate(self, name: str, selector: int | str) -> None:
        side = self.sides[name]
        due = [o for o in self.held() if selector == "latest" and o >= side.floor]

        def call() -> th.Pull:
            return side.handle.replicate(selector, ENOUGH if due else SHORT)

        if not side.fits("replicate"):
            self.misfit(side, "replicate", call)
            return
        result = self.outcome(call, th.Timeout, th.VersionUnavailable)
        if isinstance(result, Exception):
            assert not due or isinstance(result, th.GroupBroken), f"{result}, but {due} is held"
            assert side.handle.state in (side.state, TORN)
            if side.handle.state is TORN:
                side.state, side.holds = TORN, None
            return
        order = (result.epoch, result.version)
        assert order in self.published
        assert order not in self.retracted
        assert not due or order >= max(due)
        if selector == "latest":
            assert order >= side.floor, "never backwards"
        side.floor = order
        assert (side.tensor == result.version).all()
        side.state, side.holds = PUBLISHED, order

    @rule(name=who, newer_than=st.integers(-1, 6))
    def wait_for(self, name: str, newer_than: int) -> None:
        side = self.sides[name]

        def call() -> int:
            return side.handle.wait_for(newer_than, SHORT)

        if not side.fits("wait_for"):
            self.misfit(side, "wait_for", call)
            return
        result = self.outcome(call, th.Timeout)
        if not isinstance(result, Exception):
            rewound = {version for epoch, version in self.published if epoch > 0}
            assert result > newer_than or result in rewound
            assert result in {version for _, version in self.published - self.retracted}
            side.floor = max(side.floor, max(o for o in self.published if o[1] == result))

    @rule(name=who, version=numbers)
    def retract(self, name: str, version: int) -> None:
        side = self.sides[name]

        def call() -> None:
            side.handle.retract(version, ENOUGH)

        if not side.fits("retract"):
            self.misfit(side, "retract", call)
            return
        known = sorted(order for order in self.published if order[1] == version)
        result = self.outcome(call, th.VersionUnavailable)
        if result is None:
            assert known, f"{version} was never published"
            self.retracted.add(known[-1])
            self.retained.clear()  # what comes next need not have been kept
        else:
            assert not any(order in self.held() for order in known), result

    # --- the end of a handle -------------------------------------------------------------

    @rule(name=who)
    def close(self, name: str) -> None:
        side = self.sides[name]
        side.handle.close(ENOUGH)
        side.state, side.holds, side.retains = CLOSED, None, False
        if not any(other.retains for other in self.sides.values()):
            self.retained.clear()
        with pytest.raises(th.StateError, match="open"):
            side.handle.register({"w": side.tensor})

    @rule(name=who, retains=st.booleans())
    def open_again(self, name: str, retains: bool) -> None:
        side = self.sides[name]
        if side.state is CLOSED:
            side.open(retains=retains)
            side.floor = (-1, -1)
        else:
            with pytest.raises((th.SlotTaken, th.StateError), match=side.replica):
                side.peer.open(side.model, replica=side.replica, timeout=SHORT)

    @precondition(lambda self: not any(side.retains for side in self.sides.values()))
    @rule(name=who)
    def begin_to_retain(self, name: str) -> None:
        self.close(name)
        self.open_again(name, True)

    @rule(name=who)
    def answer_bad_arguments_at_once(self, name: str) -> None:
        handle = self.sides[name].handle
        started = time.monotonic()
        for call in (
            lambda: handle.publish(-1),
            lambda: handle.publish(1, timeout=0),
            lambda: handle.replicate("newest"),
            lambda: handle.wait_for(-2),
            lambda: handle.retract(1.5),  # type: ignore[arg-type]
            lambda: handle.unpublish(force=None),  # type: ignore[arg-type]
        ):
            with pytest.raises(ValueError, match=r"."):
                call()
        assert time.monotonic() - started < 5

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        for side in self.sides.values():
            assert side.handle.state is side.state
            assert side.handle.version == (side.holds[1] if side.holds else None)


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[th.Peer, th.Peer]]:
    with (
        th.Peer(cluster="handles-model") as a,
        th.Peer(cluster="handles-model", seeds=[a.address]) as b,
    ):
        yield a, b
        for peer in (a, b):
            assert list(peer._driver.control.faults) == []


def test_calls_in_any_order_end_as_the_model_says(peers: tuple[th.Peer, th.Peer]) -> None:
    machine = type("Machine", (Handles,), {"peers": peers})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
