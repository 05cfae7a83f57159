"""What workers do all day, until they are told to end.

Rules of this file. Programs use the public face only, and treat every typed error as their users
are told to: ask again, or close and open anew. What comes of it is in the journal; they judge
nothing.

Versions are ticks of the machine's clock: all shards of a trainer publish the same number at about
the same time with no word between them, and one that comes late skips to the present. A version
is whole if they were all there at the same time.

    trainer   publish a tick, hold it until the next one, unpublish
    rollout   replicate the newest, and at times something else; a replica of several shards
              asks the same question always, as its shards must
    keeper    retains the newest few, and asks for one of the older ones among them
    elastic   a rollout of a replica without a name, which leaves after some pulls
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorhub_p2p as th
from chaos import content
from chaos.journal import now
from chaos.worker import VerbFailed, Worker

VERB_SECONDS = 20.0
SHORT_SECONDS = 4.0
"""For what may not exist."""
RESTS = (0.1, 1.2)
REPLACED = (th.SlotTaken, th.PeerClosed)
"""After these a handle is of no use any more."""


def trainer(worker: Worker) -> None:
    """Publish each tick; what can't be taken back in time is taken back by force."""
    settings, last = worker.settings, -1
    with_handle(worker)
    while not worker.stop.is_set():
        tick = int((now() - settings.began) / settings.period)
        if tick > last:
            last = tick
            _published(worker, tick)
        until = settings.began + (tick + 1) * settings.period
        worker.stop.wait(max(0.01, until - now() - settings.step))
        _taken_back(worker)
        if worker.handle.state is th.HandleState.REGISTERED:
            content.fill(worker.tensors, settings.shard, tick + 1)  # the next step of training


def _published(worker: Worker, tick: int) -> bool:
    content.fill(worker.tensors, worker.settings.shard, tick)
    return attempt(
        worker, "publish", tick, VERB_SECONDS, lambda h: h.publish(tick, timeout=VERB_SECONDS)
    )


def _taken_back(worker: Worker) -> None:
    """Twice with patience, then by force: the tensors are needed for the next step."""
    for force in (False, False, True):
        if worker.handle.state is not th.HandleState.PUBLISHED:
            return
        take_back = partial(th.ShardHandle.unpublish, timeout=SHORT_SECONDS, force=force)
        attempt(worker, "unpublish", "force" if force else "", SHORT_SECONDS, take_back)


def rollout(worker: Worker) -> None:
    with_handle(worker)
    alone = worker.settings.num_shards == 1
    while not worker.stop.is_set():
        (_anything if alone else _newest)(worker)
        worker.stop.wait(worker.random.uniform(*RESTS))


def elastic(worker: Worker) -> None:
    with_handle(worker)
    for _ in range(worker.settings.pulls):
        if worker.stop.is_set():
            return
        _newest(worker)
        worker.stop.wait(worker.random.uniform(*RESTS))


def keeper(worker: Worker) -> None:
    """Of the versions that it retains, it asks for one that isn't the newest."""
    with_handle(worker)
    seen: set[int] = set()
    while not worker.stop.is_set():
        seen.update(_whole(worker))
        kept = sorted(seen)[-worker.settings.newest :]
        if worker.settings.num_shards > 1:
            replicate(worker, "latest-1", SHORT_SECONDS)  # all of its shards ask the same
        elif len(kept) > 1:
            replicate(worker, worker.random.choice(kept[:-1]), SHORT_SECONDS)
        worker.stop.wait(worker.random.uniform(*RESTS))


def _newest(worker: Worker) -> None:
    replicate(worker, "latest", VERB_SECONDS)


def _anything(worker: Worker) -> None:
    draw = worker.random.random()
    if draw < 0.65:
        _newest(worker)
    elif draw < 0.75:
        newer = worker.handle.version
        attempt(
            worker,
            "wait_for",
            newer,
            VERB_SECONDS,
            lambda h: h.wait_for(-1 if newer is None else newer, VERB_SECONDS),
        )
    elif draw < 0.85:
        attempt(worker, "prefetch", "latest", VERB_SECONDS, _prefetched)
        _newest(worker)
    elif draw < 0.93:
        replicate(worker, "latest-1", SHORT_SECONDS)
    else:
        whole = _whole(worker)
        if whole:
            replicate(worker, worker.random.choice(whole[:3]), SHORT_SECONDS)


def _prefetched(handle: th.ShardHandle) -> int:
    return handle.prefetch("latest", VERB_SECONDS).result(VERB_SECONDS)


def _whole(worker: Worker) -> list[int]:
    try:
        return [info.version for info in worker.list_versions() if info.whole]
    except VerbFailed as failed:
        _hopeless(failed)
        return []


def replicate(worker: Worker, version: int | str, timeout: float) -> bool:
    return attempt(
        worker, "replicate", version, timeout, lambda h: h.replicate(version, timeout=timeout)
    )


# --- the loop's parts ---


def attempt(
    worker: Worker, verb: str, what: object, timeout: float, call: Callable[[th.ShardHandle], Any]
) -> bool:
    """Whether it succeeded. A handle that was replaced is given up for a new one."""
    try:
        worker.run(verb, what, timeout, lambda: call(worker.handle))
    except VerbFailed as failed:
        _hopeless(failed)
        if isinstance(failed.error, REPLACED) and not worker.stop.is_set():
            _anew(worker)
        return False
    return True


def with_handle(worker: Worker) -> None:
    """Open one. Its slot may be another's for a while: a restart before the death is known."""
    while not worker.stop.is_set():
        try:
            worker.open()
        except VerbFailed as failed:
            _hopeless(failed)
            worker.stop.wait(0.5)
        else:
            return
    raise VerbFailed(th.StateError("told to end before a handle was open"))


def _anew(worker: Worker) -> None:
    old = worker.handle
    try:
        worker.run("close handle", "", SHORT_SECONDS, lambda: old.close(SHORT_SECONDS))
    except VerbFailed as failed:
        _hopeless(failed)
    with_handle(worker)


def _hopeless(failed: VerbFailed) -> None:
    """The peer is closed (by SIGTERM): there is nothing left to do."""
    if isinstance(failed.error, th.PeerClosed):
        raise failed


PROGRAMS: dict[str, Callable[[Worker], None]] = {
    "trainer": trainer,
    "rollout": rollout,
    "keeper": keeper,
    "elastic": elastic,
}
