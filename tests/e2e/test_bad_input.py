"""Whatever a user gets wrong ends in an error that says so, and nothing is lost or written."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

import pytest
import torch
from steps import blank, fill, wrong

import tensorhub_p2p as th
from tensorhub_p2p.protocol.directory.records import holders_key, values
from tensorhub_p2p.protocol.messages import HolderRecord

StartPeer = Callable[..., th.Peer]
GRACE = 3.0
"""Seconds over its deadline that a call may take on a busy machine."""


class Pair:
    """A trainer that published version 1 of model "m", and a rollout that has registered."""

    def __init__(self, peer: StartPeer) -> None:
        self.trainer_peer, self.rollout_peer = peer(name="trainer"), peer(name="rollout")
        self.trainer = self.trainer_peer.open("m", replica="trainer")
        self.rollout = self.rollout_peer.open("m", replica="rollout")
        self.weights, self.copy = fill(blank(), 1), blank()
        self.trainer.register(self.weights)
        self.rollout.register(self.copy)
        self.trainer.publish(1)


@pytest.fixture
def pair(peer: StartPeer) -> Pair:
    return Pair(peer)


@pytest.fixture
def handle(peer: StartPeer) -> th.ShardHandle:
    return peer().open("m", replica="r")


# --- layouts -----------------------------------------------------------------------------

WEIGHTS = {"a": torch.zeros(4, 8), "b": torch.zeros(16), "c": torch.zeros(3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"a": (4, 8), "B": (16,), "c": (3,)}, ["'b'", "'B'"]),
        ({"a": (8, 4), "b": (16,), "c": (3,)}, ["'a'", "[4, 8]", "[8, 4]"]),
        ({"a": (4, 8), "b": (16,)}, ["'c'"]),
        ({"a": (4, 8), "b": (16,), "c": (3,), "d": (1,)}, ["'d'"]),
        ({"x": (1,)}, ["'a'", "'b'", "'c'", "'x'"]),
    ],
    ids=["a name", "a shape", "one less", "one more", "everything"],
)
def test_other_tensors_are_listed_and_no_byte_is_written(
    peer: StartPeer, others: dict[str, tuple[int, ...]], said: list[str]
) -> None:
    trainer, rollout = peer().open("m"), peer().open("m")
    trainer.register(WEIGHTS)
    trainer.publish(1)
    mine = {
        name: torch.full(shape, 7, dtype=torch.int64 if name == "c" else torch.float32)
        for name, shape in others.items()
    }
    before = {name: tensor.clone() for name, tensor in mine.items()}
    rollout.register(mine)
    with pytest.raises(th.LayoutMismatch) as caught:
        rollout.replicate("latest", timeout=10)
    for part in said:
        assert part in str(caught.value)
    assert all(torch.equal(mine[name], before[name]) for name in mine)
    assert rollout.state is th.HandleState.REGISTERED


def test_a_mismatch_names_the_model_the_version_and_its_publisher(pair: Pair) -> None:
    pair.rollout.unregister()
    pair.rollout.register({"other": torch.zeros(4)})
    publisher = (
        f"model 'm', version 1 by trainer, which is peer trainer ({pair.trainer_peer.peer_id})"
    )
    for call in (
        lambda: pair.rollout.prefetch(1).result(10),
        lambda: pair.rollout.replicate(1, timeout=10),
    ):
        with pytest.raises(th.LayoutMismatch, match=re.escape(publisher)):
            call()


def test_another_dtype_is_a_mismatch(peer: StartPeer) -> None:
    trainer, rollout = peer().open("m"), peer().open("m")
    trainer.register({"w": torch.ones(64, dtype=torch.bfloat16)})
    trainer.publish(1)
    mine = torch.full((64,), 7, dtype=torch.float16)
    rollout.register({"w": mine})
    with pytest.raises(th.LayoutMismatch, match=r"'w' is float16.*bfloat16"):
        rollout.replicate("latest", timeout=10)
    assert bool((mine == 7).all())


def test_a_mismatch_holds_nobody_up_and_is_over_once_the_tensors_fit(pair: Pair) -> None:
    pair.rollout.unregister()
    pair.rollout.register({"other": torch.zeros(4)})
    with pytest.raises(th.LayoutMismatch):
        pair.rollout.replicate("latest", timeout=10)
    pair.trainer.unpublish(timeout=5)
    fill(pair.weights, 2)
    pair.trainer.publish(2)
    pair.rollout.unregister()
    pair.rollout.register(pair.copy)
    assert pair.rollout.replicate("latest", timeout=10).version == 2
    assert not wrong(pair.copy, 2)


def test_a_published_handle_that_meets_a_mismatch_goes_on_serving(pair: Pair) -> None:
    pair.rollout.replicate(1, timeout=10)
    pair.trainer.unpublish()
    pair.trainer.unregister()
    pair.trainer.register({"other": torch.zeros(4)})
    pair.trainer.publish(2)
    with pytest.raises(th.LayoutMismatch):
        pair.rollout.replicate(2, timeout=10)
    assert (pair.rollout.state, pair.rollout.version) == (th.HandleState.PUBLISHED, 1)
    third = pair.trainer_peer.open("m", replica="third")
    copy = blank()
    third.register(copy)
    assert third.replicate(1, timeout=10).version == 1
    assert not wrong(copy, 1)


def test_a_replica_cut_into_another_number_of_shards_is_a_mismatch(peer: StartPeer) -> None:
    first = peer()
    shards = [first.open("m", replica="t", shard=i, num_shards=2) for i in range(2)]
    for shard in shards:
        shard.register(fill(blank(), 1))
        shard.publish_async(1)
    rollout, copy = peer().open("m"), blank()
    rollout.register(copy)
    with pytest.raises(
        th.LayoutMismatch, match=r"model 'm', version 1 by t.*peer .*2 shards.*has 1"
    ):
        rollout.replicate("latest", timeout=10)
    assert all(not tensor.any() for tensor in copy.values())


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"w": torch.zeros(9).as_strided((3, 2), (2, 3))}, "'w'.*interleave.*contiguous"),
        ({"w": torch.zeros(8, 8).to_sparse()}, "'w'.*layout"),
        ({"w": torch.zeros(8, device="meta")}, "'w'.*meta"),
        ({"w": [1, 2, 3]}, "'w'.*list"),
        ([("w", torch.zeros(1)), ("w", torch.zeros(1))], "two tensors.*'w'"),
        ([("", torch.zeros(1))], "''.*name"),
        ([(7, torch.zeros(1))], "7.*name"),
        ([torch.zeros(1)], "pairs"),
        (7, "int"),
        (
            [("a", (whole := torch.zeros(8))[:6:2]), ("b", whole[2:8:2])],
            "'a'.*overlaps 'b'.*in none",
        ),
    ],
    ids=[
        "interleaved",
        "sparse",
        "meta",
        "no tensor",
        "duplicate name",
        "empty name",
        "name no string",
        "no names",
        "no tensors",
        "overlapping, with gaps",
    ],
)
def test_tensors_that_cannot_be_moved_are_refused_by_name(
    handle: th.ShardHandle, tensors: object, said: str
) -> None:
    with pytest.raises(th.StateError, match=said):
        handle.register(tensors)
    assert handle.state is th.HandleState.OPEN
    handle.register(blank())


@pytest.mark.parametrize(
    ("nothing", "said"),
    [
        ({}, "nothing to register in this dict"),
        (torch.nn.Identity(), "nothing to register in this Identity"),
        (iter([]), "an iterator gives its tensors only once"),
    ],
    ids=["a mapping", "a module", "an iterator"],
)
def test_to_register_nothing_is_refused(handle: th.ShardHandle, nothing: object, said: str) -> None:
    with pytest.raises(th.StateError, match=said):
        handle.register(nothing)
    assert handle.state is th.HandleState.OPEN
    handle.register({"empty": torch.zeros(0)})
    handle.publish(1)


def test_a_tensor_that_moved_since_it_was_registered_is_an_error(handle: th.ShardHandle) -> None:
    weight = torch.nn.Parameter(torch.zeros(1024))
    handle.register({"w": weight})
    weight.data = torch.ones(1024)
    with pytest.raises(th.StateError, match=r"'w'.*other memory.*register"):
        handle.publish(1)


# --- calls that don't fit the state ------------------------------------------------------


def test_each_call_that_does_not_fit_says_what_is_missing(handle: th.ShardHandle) -> None:
    for call in (lambda: handle.publish(1), lambda: handle.replicate(timeout=1)):
        with pytest.raises(th.StateError, match=r"OPEN: register\(\)"):
            call()
    handle.register(blank())
    with pytest.raises(th.StateError, match=r"REGISTERED: publish\(\)"):
        handle.unpublish()
    with pytest.raises(th.StateError, match=r"REGISTERED: unregister\(\) first"):
        handle.register(blank())
    handle.publish(1)
    with pytest.raises(th.StateError, match=r"PUBLISHED: unpublish\(\)"):
        handle.publish(2)
    with pytest.raises(th.StateError, match=r"PUBLISHED: unpublish\(\)"):
        handle.unregister()
    with pytest.raises(th.StateError, match=r"PUBLISHED: unpublish\(\) and unregister\(\)"):
        handle.register(blank())
    handle.unpublish()
    handle.unregister()
    handle.close()
    for call in (lambda: handle.register(blank()), lambda: handle.wait_for(0, timeout=1)):
        with pytest.raises(th.StateError, match=r"CLOSED.*open\(\)"):
            call()
    handle.close()


@pytest.mark.parametrize("version", [-1, 1.5, "7", None, True, 2**70])
def test_a_version_to_publish_is_an_integer(handle: th.ShardHandle, version: object) -> None:
    handle.register(blank())
    with pytest.raises(ValueError, match="version"):
        handle.publish(version)  # type: ignore[arg-type]
    assert handle.state is th.HandleState.REGISTERED


@pytest.mark.parametrize("version", [-1, 1.5, "newest", "latest-", ">5", "", None, True, 2**70])
def test_a_selector_is_a_version_latest_or_latest_k(
    handle: th.ShardHandle, version: object
) -> None:
    handle.register(blank())
    with pytest.raises(th.ConfigError, match="version"):
        handle.replicate(version, timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", None])
def test_every_wait_has_a_deadline(peer: StartPeer, timeout: object) -> None:
    member = peer()
    handle = member.open("m")
    handle.register(blank())
    for call in (
        lambda: handle.replicate(timeout=timeout),  # type: ignore[arg-type]
        lambda: handle.publish(1, timeout=timeout),  # type: ignore[arg-type]
        lambda: handle.wait_for(1, timeout=timeout),  # type: ignore[arg-type]
        lambda: handle.close(timeout=timeout),  # type: ignore[arg-type]
        lambda: member.open("m", timeout=timeout),  # type: ignore[arg-type]
        lambda: member.versions("m", timeout=timeout),  # type: ignore[arg-type]
        lambda: member.close(timeout=timeout),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="timeout"):
            call()
    assert handle.state is th.HandleState.REGISTERED


def test_two_threads_in_one_handle_are_told_apart(pair: Pair) -> None:
    waiting = pair.rollout.replicate_async(5, timeout=20)
    while pair.rollout._verb_thread is None:
        time.sleep(0.001)
    for call in (
        lambda: pair.rollout.publish(1),
        lambda: pair.rollout.replicate(timeout=1),
        lambda: pair.rollout.wait_for(1, timeout=1),
        lambda: pair.rollout.unregister(),
    ):
        with pytest.raises(th.StateError, match=r"another thread is in its replicate\(\)"):
            call()
    pair.trainer.unpublish()
    fill(pair.weights, 5)
    pair.trainer.publish(5)
    assert waiting.result(20).version == 5
    assert not wrong(pair.copy, 5)


# --- versions ----------------------------------------------------------------------------


def test_publishing_backwards_is_a_conflict_that_names_what_exists(pair: Pair) -> None:
    pair.trainer.unpublish()
    pair.trainer.publish(7)
    pair.rollout.replicate(7, timeout=10)
    pair.trainer.unpublish()
    for handle in (pair.trainer, pair.trainer_peer.open("m", replica="another")):
        if handle.state is th.HandleState.OPEN:
            handle.register(blank())
        with pytest.raises(th.VersionConflict, match=r"7.*rewind=True"):
            handle.publish(6)
        assert handle.state is th.HandleState.REGISTERED
    pair.trainer.publish(6, rewind=True)
    assert pair.trainer_peer.versions("m")[0].version == 6
    assert pair.rollout.replicate("latest", timeout=10).version == 6


def test_an_unknown_version_is_a_timeout_that_names_what_exists(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(th.Timeout, match=r"replicate\(9\) of model 'm'.*version 1"):
        pair.rollout.replicate(9, timeout=0.6)
    with pytest.raises(th.Timeout, match="version 1"):
        pair.rollout.replicate("latest-3", timeout=0.6)
    with pytest.raises(th.Timeout, match="version 1"):
        pair.rollout.wait_for(1, timeout=0.6)
    assert time.monotonic() - started < 1.8 + GRACE
    assert all(not tensor.any() for tensor in pair.copy.values())
    assert pair.rollout.replicate(1, timeout=10).version == 1


def test_an_unknown_model_is_a_timeout_that_says_nothing_is_published(pair: Pair) -> None:
    handle = pair.rollout_peer.open("unheard of")
    handle.register(blank())
    with pytest.raises(TimeoutError, match="nothing is published"):
        handle.replicate(timeout=0.6)
    assert pair.rollout_peer.versions("unheard of") == []


def test_a_group_without_all_its_shards_times_out_and_names_those_that_lack(
    peer: StartPeer,
) -> None:
    handle = peer().open("m", replica="r", shard=0, num_shards=3)
    handle.register(blank())
    for call in (
        lambda: handle.publish(1, timeout=0.6),
        lambda: handle.replicate(timeout=0.6),
        lambda: handle.wait_for(0, timeout=0.6),
    ):
        started = time.monotonic()
        with pytest.raises(th.Timeout, match=r"shard 1, 2 of 3"):
            call()
        assert time.monotonic() - started < 0.6 + GRACE
    assert handle.state is th.HandleState.REGISTERED


# --- slots -------------------------------------------------------------------------------


def test_a_slot_that_a_live_peer_holds_is_taken_and_its_holder_named(pair: Pair) -> None:
    with pytest.raises(th.SlotTaken, match=r"m/trainer.*peer trainer"):
        pair.rollout_peer.open("m", replica="trainer", timeout=10)
    with pytest.raises(th.SlotTaken, match=r"num_shards=1.*with 2"):
        pair.rollout_peer.open("m", replica="trainer", shard=1, num_shards=2, timeout=10)
    with pytest.raises(th.StateError, match="open in this peer"):
        pair.trainer_peer.open("m", replica="trainer", timeout=10)
    pair.trainer.close()
    pair.rollout_peer.open("m", replica="trainer", timeout=10)


@pytest.mark.parametrize(
    "options",
    [
        {"model": ""},
        {"model": "m", "replica": "\n"},
        {"model": "m", "replica": "r" * 300},
        {"model": "m", "shard": 2, "num_shards": 2},
        {"model": "m", "shard": -1},
        {"model": "m", "num_shards": 0},
        {"model": "m", "shard": 0.5},
    ],
    ids=str,
)
def test_names_and_numbers_of_a_slot_are_checked(
    peer: StartPeer, options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="must be"):
        peer().open(**options)


@pytest.mark.parametrize("retain", [2, "newest", object, (7, 8), {"newest": 2}], ids=repr)
def test_what_is_retained_is_said_by_newest_or_versions(peer: StartPeer, retain: object) -> None:
    with pytest.raises(th.ConfigError, match=r"th\.newest\(2\)"):
        peer().open("m", retain=retain)


@pytest.mark.parametrize(
    "make",
    [
        lambda: th.newest(0),
        lambda: th.newest(-1),
        lambda: th.newest(1001),
        lambda: th.newest(True),
        lambda: th.newest(1.0),  # type: ignore[arg-type]
        lambda: th.newest("2"),  # type: ignore[arg-type]
        lambda: th.versions(),
        lambda: th.versions(-1),
        lambda: th.versions(10**18),
        lambda: th.versions([7, 8]),  # type: ignore[arg-type]
        lambda: th.versions(*range(65)),
    ],
)
def test_what_is_retained_is_checked_as_it_is_written(make: Callable[[], th.Retain]) -> None:
    with pytest.raises(ValueError, match=r"newest|versions"):
        make()


def test_versions_are_retained_in_order_and_once() -> None:
    assert th.versions(8, 7, 8) == th.versions(7, 8)
    assert th.newest(2) != th.newest(3)


@pytest.mark.parametrize("limit", [-1, 1.5, "1GiB", True, 1 << 60], ids=repr)
def test_a_limit_for_offloads_is_a_number_of_bytes(cluster: str, limit: object) -> None:
    with pytest.raises(ValueError, match="offload_limit"):
        th.Peer(cluster=cluster, offload_limit=limit)


def test_flags_are_true_or_false(pair: Pair) -> None:
    with pytest.raises(th.ConfigError, match="spot"):
        pair.trainer_peer.open("m", spot="yes")  # type: ignore[arg-type]
    with pytest.raises(th.ConfigError, match="rewind"):
        pair.trainer.publish(1, rewind=1)  # type: ignore[arg-type]
    with pytest.raises(th.ConfigError, match="force"):
        pair.trainer.unpublish(force="no")  # type: ignore[arg-type]


def test_a_spot_replica_is_recorded_as_one(peer: StartPeer) -> None:
    member = peer()
    for replica, spot in (("steady", False), ("fleeting", True)):
        handle = member.open("m", replica=replica, spot=spot)
        handle.register(blank())
        handle.publish(1)
    owner, found = member._driver.node.directory, []
    done = threading.Event()

    def look(now: float) -> None:
        def then(_now: float, registers: object) -> None:
            found.extend(values(registers, HolderRecord))  # type: ignore[arg-type]
            done.set()

        member._driver.node.records.read(now, holders_key("m", 0), then)

    member._driver.ask(look)
    assert done.wait(10)
    assert owner is not None
    assert {record.slot.group.replica: record.spot for _, record in found} == {
        "steady": False,
        "fleeting": True,
    }


# --- closed peers and handles ------------------------------------------------------------


def test_every_call_on_a_closed_peer_says_that_it_is_closed(pair: Pair) -> None:
    pair.trainer_peer.close()
    handle = pair.trainer
    for call in (
        lambda: pair.trainer_peer.open("m"),
        lambda: pair.trainer_peer.members(),
        lambda: pair.trainer_peer.versions("m"),
        lambda: handle.register(blank()),
        lambda: handle.unregister(),
        lambda: handle.publish(1),
        lambda: handle.unpublish(),
        lambda: handle.replicate(timeout=1),
        lambda: handle.wait_for(0, timeout=1),
    ):
        with pytest.raises(th.PeerClosed, match="closed"):
            call()
    assert handle.state is th.HandleState.CLOSED
    assert not handle.sealed
    assert "closed" in repr(pair.trainer_peer)
    handle.close()
    pair.trainer_peer.close()


def test_closing_the_peer_from_another_thread_ends_every_wait_at_once(pair: Pair) -> None:
    other = pair.rollout_peer.open("m", replica="other")
    waits = [pair.rollout.replicate_async(9, timeout=60), other.wait_for_async(9, timeout=60)]
    while pair.rollout._verb_thread is None or other._verb_thread is None:
        time.sleep(0.001)
    started = time.monotonic()
    pair.rollout_peer.close()
    for wait in waits:
        with pytest.raises(th.StateError, match="closed"):
            wait.result(GRACE)
    assert time.monotonic() - started < GRACE


def test_a_body_that_raises_closes_handle_and_peer_and_raises_the_same(peer: StartPeer) -> None:
    first = peer()
    first.open("m", replica="t").register(blank())
    second = peer()
    handle = second.open("m", replica="r")

    def body() -> None:
        with second, handle:
            handle.register(blank())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert handle.state is th.HandleState.CLOSED
    with pytest.raises(th.PeerClosed):
        second.members()
    first.open("m", replica="r", timeout=10)
